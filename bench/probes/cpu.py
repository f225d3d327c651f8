# SPDX-License-Identifier: Apache-2.0
"""CPU time of a load: without probes, with them, and with the bypass, in turn."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from itertools import cycle, permutations

from bench.machine import cpu_ns
from bench.probes.lines import interval, ratios
from bench.probes.rig import BYPASS, ON, PING_PONGS, Rig, Settings, Took

# None: no process of probes at all.
_WAYS: dict[str, Settings | None] = {"off": None, "on": ON, "bypass": BYPASS}


def cpu(rig: Rig) -> None:
    """That of the load's threads, in their own code and in the kernel, and of both daemons."""
    for what, arguments in PING_PONGS.items():
        with rig.ping_pong(*arguments) as measure:
            _compare(rig, measure, what, arguments.count("attached"))


def _compare(rig: Rig, measure: Callable[[], Took], what: str, watched: int) -> None:
    spent: dict[str, list[float]] = {way: [] for way in _WAYS}
    for _, order in zip(range(rig.parameters.pairs), cycle(permutations(_WAYS)), strict=False):
        for way in order:
            with _as_in(rig, _WAYS[way], watched) as daemons:
                # What was done to be so is over, and what it moved out of the caches is back.
                measure()
                before = sum(map(cpu_ns, daemons))
                took = measure()
                theirs = sum(map(cpu_ns, daemons)) - before
            spent[way].append(took.cpu_ns + theirs / rig.parameters.round_trips)
    print(f"  {what}", flush=True)
    for way, times in spent.items():
        of_off = f"   of off {interval(ratios(times, spent['off']))}" if way != "off" else ""
        print(f"    {way:<8} {statistics.median(times):8.0f} ns{of_off}", flush=True)


@contextlib.contextmanager
def _as_in(rig: Rig, settings: Settings | None, watched: int) -> Iterator[list[int]]:
    """The pids of the daemons that run then."""
    daemons = [rig.node.daemon_pid()]
    with contextlib.ExitStack() as stack:
        if settings is not None:
            stack.enter_context(rig.probes)
            rig.probes.await_watched(watched)
            rig.configure(settings)
            daemons.append(rig.probes.daemon_pid())
        yield daemons
    # The next one begins from the same.
    rig.write(ON)
