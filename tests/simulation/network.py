# SPDX-License-Identifier: Apache-2.0
"""Virtual time, and streams that break.

A stream delivers in order, or is lost with all that is in flight, as gRPC over
TCP does. Each direction has a latency and may have a rate. The two streams of a
node are independent, so what crosses them may arrive in either order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

MS = 1_000_000
S = 1_000_000_000
EPOCH_NS = 1_700_000_000 * S

NOBODYS = "10.9.9.9"
"""An address at which there is no node."""

Log = Callable[[str, str], None]


class Scheduler:
    """Discrete events; equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.steps = 0
        """Events so far."""

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(time_ns, self.now_ns), self._count, action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self.at(self.now_ns + delay_ns, action)

    def run_until(self, time_ns: int) -> None:
        """Run all events up to and including that time."""
        while self._heap and self._heap[0][0] <= time_ns:
            self.now_ns, _, action = heapq.heappop(self._heap)
            self.steps += 1
            action()
        self.now_ns = time_ns


@dataclass(slots=True)
class Link:
    """The way between a node and the coordinator.

    ``jitter_ns`` is added at most, by ``random``. ``bytes_per_s`` limits what
    the node sends on its Slices stream. ``slow_ns``: how long the node takes
    over each thing that reaches it. ``stream_delay_ns`` is added to one kind of
    stream, "control" or "slices".
    """

    latency_ns: int = MS
    jitter_ns: int = 0
    bytes_per_s: int | None = None
    slow_ns: int = 0
    up: bool = True
    stream_delay_ns: dict[str, int] = field(default_factory=dict)


class Direction:
    """One way of a stream."""

    def __init__(self, scheduler: Scheduler, deliver: Callable[[object], None]) -> None:
        self._scheduler = scheduler
        self._deliver = deliver
        self._last_ns = 0
        self._free_ns = 0
        self.open = True
        self.messages = 0
        self.bytes = 0

    def send(
        self, message: object, delay_ns: int, size: int = 0, bytes_per_s: int | None = None
    ) -> None:
        """Deliver in order, after the delay and the time that the size takes."""
        now_ns = self._scheduler.now_ns
        self.messages += 1
        self.bytes += size
        if bytes_per_s is not None:
            self._free_ns = max(self._free_ns, now_ns) + size * S // bytes_per_s
            now_ns = self._free_ns
        self._last_ns = max(self._last_ns, now_ns + delay_ns)
        self._scheduler.at(self._last_ns, lambda: self._arrive(message))

    def _arrive(self, message: object) -> None:
        if self.open:
            self._deliver(message)
