# SPDX-License-Identifier: Apache-2.0
"""How long a coordinator that was killed takes until it listens, with many traces open."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.control.fleet import Fleet, Load, Plan
from bench.control.run import coordinator, port_of, verdicts
from testbed.daemons import Cores

# As good as for ever: no trace shall be judged for good because nobody waits for it any more.
_LONG_S = 3600

# What a coordinator keeps by default; one that is configured to keep more is not of an older commit.
_TRACES_BY_DEFAULT = 16_384

# Of one of these traces, which has some 60.
_EVIDENCE = 100

# Enough to keep it busy.
_IN_FLIGHT = 200


def _killed(kill: Callable[[], object]) -> float:
    began_ns = time.monotonic_ns()
    kill()
    return (time.monotonic_ns() - began_ns) / 1e9


def _open(found: Counter[tuple[str, bool]]) -> int:
    return sum(count for (kind, _), count in found.items() if kind == "provisional")


@dataclass(frozen=True, slots=True)
class Restart:
    """From ``kill -9`` until it says that it is ready, which it is when it listens.

    ``before`` and ``after``: its verdicts when it was killed, and then.
    """

    empty_s: float
    listen_s: float
    before: Counter[tuple[str, bool]]
    after: Counter[tuple[str, bool]]

    @property
    def open_traces(self) -> int:
        """That had no final verdict when it was killed, and are known after.

        Since the nodes are away then, they get one.
        """
        return min(_open(self.before), self.after.total())


def restart(directory: Path, cores: Cores, program: Path, plan: Plan, traces: int) -> Restart:
    """Have a fleet fire all of a plan of traces that never end, and kill the coordinator."""
    load = Load(0, _IN_FLIGHT, warm_up_s=0, window_s=_LONG_S, is_released=False)
    limits = {}
    if traces > _TRACES_BY_DEFAULT:
        limits = {"traces_max": traces, "evidence_max": traces * _EVIDENCE}
    with coordinator(
        directory, cores, linger_s=_LONG_S, missing_linger_s=_LONG_S, **limits
    ) as daemon:
        empty_s = _killed(daemon.kill_daemon)
        with Fleet(program, cores.writer, plan, port_of(daemon), load) as fleet:
            *_, fired = fleet.fire()
        if fired is None or fired.durable != traces:
            raise RuntimeError(f"of {traces} traces {fired} became durable")
        before = verdicts(daemon.endpoint)
        listen_s = _killed(daemon.kill_daemon)
        after = verdicts(daemon.endpoint)
    return Restart(empty_s, listen_s, before, after)
