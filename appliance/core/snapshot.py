# SPDX-License-Identifier: Apache-2.0
"""The node's part of a snapshot: which traces it still has to trigger, and how far it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from protocol.messages import Snapshot, SnapshotStatus, TraceId

TRACES_MAX = 10_000
"""Of one snapshot on one node: more than anybody looks at."""

# A trigger costs the node some 0.1 ms of its event loop, which has other work too.
_TRACES_AT_ONCE = 64


@dataclass(slots=True)
class SnapshotRun:
    """One order of the coordinator. ``asked``: for the traces, which come by ``begin()``."""

    order: Snapshot
    asked: bool = False
    found: int | None = None
    fired: int = 0
    bytes: int = 0
    told: SnapshotStatus | None = None
    _left: deque[TraceId] = field(default_factory=deque)

    def begin(self, found: int, traces: Iterable[TraceId]) -> None:
        """These are to be triggered, of ``found`` that there are."""
        self.found = found
        self._left.extend(traces)

    @property
    def waits(self) -> bool:
        """Whether there is more to trigger."""
        return bool(self._left)

    def next_traces(self) -> Iterator[TraceId]:
        """Some of those to trigger; each is to be answered by ``triggered()``."""
        for _ in range(min(_TRACES_AT_ONCE, len(self._left))):
            if self._left:
                yield self._left.popleft()

    def triggered(self, size_bytes: int) -> None:
        """One was, and its slice on this node has so many bytes."""
        self.fired += 1
        self.bytes += size_bytes
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
