# SPDX-License-Identifier: Apache-2.0
"""The node's part of a snapshot: which traces it still has to trigger, and how far it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from protocol.messages import Group, Snapshot, SnapshotStatus, TraceId

TRACES_MAX = 10_000
"""Of one snapshot on one node: more than anybody looks at."""

# A trigger costs the node some 0.1 ms of its event loop, which has other work too.
_TRACES_AT_ONCE = 64


@dataclass(slots=True)
class SnapshotRun:
    """One order of the coordinator. ``asked``: for the traces, which come by ``begin()``.

    Traces are triggered in rounds, of which each waits until the coordinator knows the one
    before. The first is of one trace, each other up to twice as long: when the coordinator finds
    that all nodes together have enough, no more than that is on its way.
    """

    order: Snapshot
    asked: bool = False
    found: int | None = None
    fired: int = 0
    bytes: int = 0
    told: SnapshotStatus | None = None
    _left: deque[TraceId] = field(default_factory=deque)
    _round: tuple[TraceId, ...] = ()
    _counted: set[TraceId] = field(default_factory=set)

    def begin(self, found: int, traces: Iterable[TraceId]) -> None:
        """These are to be triggered, of ``found`` that there are."""
        self.found = found
        self._left.extend(traces)
        self._stop_if_full()

    @property
    def waits(self) -> bool:
        """Whether there is more to trigger."""
        return bool(self._left)

    @property
    def round(self) -> Iterator[Group]:
        """What was triggered last."""
        return (Group(self.order.trigger, trace) for trace in self._round)

    def next_traces(self) -> Iterator[TraceId]:
        """Those of the next round; each is to be answered by ``triggered()``."""
        length = min(max(1, 2 * len(self._round)), _TRACES_AT_ONCE, len(self._left))
        self._round = ()
        for _ in range(length):
            if self._left:
                trace = self._left.popleft()
                self._round += (trace,)
                yield trace

    def triggered(self, trace: TraceId, size_bytes: int) -> None:
        """One was, and its slice on this node has so many bytes."""
        self.fired += 1
        self.holds(trace, size_bytes)

    def holds(self, trace: TraceId, size_bytes: int) -> None:
        """This node holds a trace of the snapshot, whoever triggered it."""
        if trace not in self._counted:
            self._counted.add(trace)
            self.bytes += size_bytes
        self._stop_if_full()

    def limit(self, bytes_max: int) -> None:
        """From now on, no more than so much."""
        self.order = replace(self.order, bytes_max=bytes_max)
        self._stop_if_full()

    def _stop_if_full(self) -> None:
        if self.bytes >= self.order.bytes_max:
            self._left.clear()

    def take_news(self) -> SnapshotStatus | None:
        """How far it is, if that is not what was told last."""
        status = SnapshotStatus(
            self.order.number,
            self.found or 0,
            self.fired,
            self.bytes,
            self.found is not None and not self._left,
        )
        if status == self.told:
            return None
        self.told = status
        return status
