# SPDX-License-Identifier: Apache-2.0
"""Small pools that are gone round, and triggers that come late."""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Self

from protocol.messages import TraceId
from runtime.schema import Size, format_size
from testbed.topology import PYTHON, Coordinator, Node, Opened
from tests.recall.horizon import Horizon, Reading

TRIGGER = "late"

_LATE_MAX = 20.0
_POOL = Size(4 << 20, 1 << 30)  # from the least that a node takes
_POOL_BYTES = 4 << 20

# Gone round so often while the system is under load, most triggers come after the first round.
_ROUNDS = 5

_TURN_S = 0.05
_READ_S = 0.25  # a sixth of the shortest horizon that is used, and cheap
_WAIT_S = 60.0
_JUDGED = re.compile(r"\btrace ([0-9a-f]{32}) is (\w+):")


class LateError(RuntimeError):
    """It cannot be done; the message says what is wanted."""


@dataclass(frozen=True, slots=True)
class Late:
    """Triggers come up to ``periods`` late; in one period as much is written as the pool takes."""

    periods: float
    pool_bytes: int = _POOL_BYTES
    seed: int = 11

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """By LATE and POOL; None without them."""
        late, pool = environment.get("LATE"), environment.get("POOL")
        if not late:
            if pool:
                raise LateError(f"POOL={pool}: only together with LATE")
            return None
        try:
            periods = float(late)
        except ValueError:
            periods = 0.0
        if not 0 < periods <= _LATE_MAX:
            raise LateError(f"LATE={late}: want a number above 0, up to {_LATE_MAX:g}")
        if not pool:
            return cls(periods)
        try:
            return cls(periods, _POOL.admit(pool))
        except ValueError:
            raise LateError(f"POOL={pool}: want {_POOL.allowed()}") from None

    def period_s(self, duration_s: float) -> float:
        return duration_s / _ROUNDS

    def node_config(self) -> dict[str, Any]:
        return {"pool_bytes": self.pool_bytes}

    @staticmethod
    def coordinator_config() -> dict[str, Any]:
        """It says when it judged what."""
        return {"log_level": "debug"}

    def __str__(self) -> str:
        return (
            f"pools of {format_size(self.pool_bytes)}, triggers up to {self.periods:g} rounds late"
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """A trace that was triggered (Unix ns), and when it was found to have its last verdict."""

    trace_id: str
    fired_ns: int
    judged_ns: int


@dataclass(slots=True)
class _Filler:
    process: subprocess.Popen[bytes]

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            raise LateError(f"a filler ended with status {self.process.wait()}")

    def stop(self) -> tuple[int, int]:
        """Payload bytes: written, lost."""
        said, _ = self.process.communicate()
        _, written, lost = said.split()
        return int(written), int(lost)


@dataclass(slots=True)
class Trigger(Opened):
    """Fills the pools, fires late, and writes down how far the pools reach meanwhile.

    ``finished`` tells it of each trace that may be triggered once that is over.
    """

    late: Late
    duration_s: float
    coordinator: Coordinator
    nodes: Mapping[str, Node]
    horizons: dict[str, Horizon] = field(init=False)
    filled_bytes: int = field(default=0, init=False)
    lost_bytes: int = field(default=0, init=False)
    """Of them."""
    _fillers: list[_Filler] = field(default_factory=list, init=False)
    _random: random.Random = field(init=False)
    _due: list[tuple[float, str, str]] = field(default_factory=list, init=False)
    _fired: dict[str, int] = field(default_factory=dict, init=False)
    _judged: dict[str, int] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    def open(self) -> None:
        self.horizons = {name: Horizon() for name in self.nodes}
        self._random = random.Random(self.late.seed)
        bytes_per_s = self.late.pool_bytes / self.late.period_s(self.duration_s)
        for node in self.nodes.values():
            process = node.host.popen(
                [PYTHON, "-m", "tests.recall.filler", f"{bytes_per_s:.0f}"],
                env=node.client_environment("filler"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._stack.callback(_end, process)
            self._fillers.append(_Filler(process))
        for filler in self._fillers:
            filler.await_ready()
        log = self._stack.enter_context(self.coordinator.log_path.open("r", errors="replace"))
        log.seek(0, os.SEEK_END)
        thread = threading.Thread(target=self._work, args=(log,), name="late")
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(self._stop.set)

    def close(self) -> None:
        self._stack.close()

    def finished(self, trace_id: str, node: str) -> None:
        """Fire for this trace, on this node, some time later."""
        delay_s = self._random.uniform(0, self.late.periods * self.late.period_s(self.duration_s))
        with self._lock:
            heapq.heappush(self._due, (time.monotonic() + delay_s, trace_id, node))

    def wait(self) -> None:
        """Until all have fired."""
        deadline_s = _WAIT_S + self.late.periods * self.late.period_s(self.duration_s)
        waited_until_s = time.monotonic() + deadline_s
        while self._waiting() and time.monotonic() < waited_until_s and self._error is None:
            self._stop.wait(_TURN_S)

    def _waiting(self) -> bool:
        with self._lock:
            return bool(self._due)

    def settled(self) -> list[Asked]:
        """Stop filling; what was asked for, in the order of firing. To be called when all is judged."""
        now_ns = time.time_ns()
        while not self._has_read_since(now_ns) and self._error is None:
            self._stop.wait(_TURN_S)
        self._stop.set()
        for filler in self._fillers:
            written, lost = filler.stop()
            self.filled_bytes += written
            self.lost_bytes += lost
        if self._error is not None:
            raise self._error
        return [
            Asked(trace_id, fired_ns, self._judged.get(trace_id, time.time_ns()))
            for trace_id, fired_ns in self._fired.items()
        ]

    def _has_read_since(self, at_ns: int) -> bool:
        """All horizons, after what the coordinator had said by then."""
        readings = [horizon.readings for horizon in self.horizons.values()]
        return all(of_one and of_one[-1].asked_ns > at_ns for of_one in readings)

    # ---------------------------------------------------------- the thread

    def _work(self, log: IO[str]) -> None:
        read_s = 0.0
        try:
            while not self._stop.wait(_TURN_S):
                for trace_id, node in self._take_due():
                    self._fired[trace_id] = time.time_ns()
                    self.nodes[node].control.trigger(
                        TRIGGER, TraceId(bytes.fromhex(trace_id)), "some time after"
                    )
                for line in _lines(log):
                    if (found := _JUDGED.search(line)) and found[2] != "provisional":
                        self._judged[found[1]] = time.time_ns()
                if time.monotonic() - read_s >= _READ_S:
                    read_s = time.monotonic()
                    self._read()
        except BaseException as error:  # noqa: BLE001 # raised where somebody waits
            self._error = error

    def _take_due(self) -> Iterator[tuple[str, str]]:
        while True:
            with self._lock:
                if not self._due or self._due[0][0] > time.monotonic():
                    return
                _, trace_id, node = heapq.heappop(self._due)
            yield trace_id, node

    def _read(self) -> None:
        for name, node in self.nodes.items():
            asked_ns = time.time_ns()
            dataplane = node.control.status()["dataplane"]
            self.horizons[name].readings.append(Reading.of(asked_ns, time.time_ns(), dataplane))


def _lines(log: IO[str]) -> Iterator[str]:
    """What was added, whole lines only."""
    while True:
        at = log.tell()
        line = log.readline()
        if not line.endswith("\n"):
            log.seek(at)
            return
        yield line


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
