# SPDX-License-Identifier: Apache-2.0
"""The program that stands for the nodes (fleet.c), and its plan."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.trees import Tree
from testbed.daemons import bound
from testbed.topology import PYTHON

_PLAN = Path(__file__).with_name("plan.py")

# Until all nodes are connected, and after a window until all is durable: a coordinator that
# takes longer has stopped.
_DRAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """Traces a second, or how many are not durable at any time; the other is 0.

    ``is_released``: it is waited for until all nodes may forget all traces.
    """

    rate_per_s: int
    in_flight: int
    warm_up_s: float
    window_s: float
    is_released: bool = True

    @property
    def name(self) -> str:
        return f"{self.rate_per_s}/s" if self.rate_per_s else f"{self.in_flight} in flight"


@dataclass(frozen=True, slots=True)
class Fired:
    """What a fleet measured.

    From a firing to its durability, of those that were fired in the window. ``late_max_ms``: how
    late the fleet itself was with one. ``fleet_cpu_share``: of its core. ``sent``, ``received``: messages.
    """

    fired: int
    durable: int
    released: int
    window_fired: int
    window_durable: int
    window_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    late_max_ms: float
    fleet_cpu_share: float
    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a fleet of so many nodes says; see plan.py."""

    path: Path
    nodes: int


def make_plan(
    tree: Tree, directory: Path, nodes: int, traces: int, *, is_open: bool = False
) -> Plan:
    """In the words of that tree, and the same each time."""
    path = directory / f"{tree.commit}-{nodes}{'-open' if is_open else ''}.plan"
    with tree.daemons():
        subprocess.run(
            # By its path: another commit's packages come first where that is measured.
            [PYTHON, "-P", str(_PLAN), str(path), str(nodes), str(traces), str(nodes), str(int(is_open))],
            check=True,
        )  # fmt: skip
    return Plan(path, nodes)


class Fleet:
    """A fleet that is connected, while it is entered."""

    def __init__(self, program: Path, core: int, plan: Plan, port: int, load: Load) -> None:
        numbers = (
            port,
            load.rate_per_s,
            load.in_flight,
            *(int(1000 * seconds) for seconds in (load.warm_up_s, load.window_s, _DRAIN_S)),
            int(load.is_released),
            plan.nodes,
        )
        self._command = bound([str(program), str(plan.path), *map(str, numbers)], core)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._stack.enter_context(self._process)
        self._stack.callback(self._process.kill)
        assert self._process.stdin is not None
        self._stack.enter_context(contextlib.suppress(BrokenPipeError))
        self._stack.callback(self._process.stdin.close)
        self._await("connected")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the fleet ended; its reason stands above")
        return line.strip()

    def _await(self, what: str) -> None:
        line = self._line()
        if line != what:
            raise RuntimeError(f"the fleet says {line!r}, want {what!r}")

    def fire(self) -> Iterator[Fired | None]:
        """None when the window begins, None when it ends, then what was measured."""
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        for moment in ("begin", "end"):
            self._await(moment)
            yield None
        yield Fired(**json.loads(self._line()))
