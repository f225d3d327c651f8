# SPDX-License-Identifier: Apache-2.0
"""The node's part of a snapshot: which traces it still has to trigger, and how far it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from protocol.messages import Snapshot, SnapshotStatus, TraceId

TRACES_MAX = 10_000
"""Of one snapshot on one node: more than anybody looks at."""


@dataclass(slots=True)
class SnapshotRun:
    """One order of the coordinator. ``asked``: for the traces, which come by ``begin()``.

    What it shall trigger, the coordinator says, round by round: it alone knows what all nodes
    together have collected.
    """

    order: Snapshot
    asked: bool = False
    found: int | None = None
    fired: int = 0
    told: SnapshotStatus | None = None
    _left: deque[TraceId] = field(default_factory=deque)
    _ended: bool = False

    def begin(self, found: int, traces: Iterable[TraceId]) -> None:
        """These are to be triggered, of ``found`` that there are."""
        self.found = found
        if not self._ended:
            self._left.extend(traces)

    def go_on(self, traces: int) -> Iterator[TraceId]:
        """Those to trigger now, so many at most; none: it ends."""
        if not traces:
            self._ended = True
            self._left.clear()
        for _ in range(min(traces, len(self._left))):
            self.fired += 1
            yield self._left.popleft()

    def take_news(self) -> SnapshotStatus | None:
        """How far it is, if that is not what was told last."""
        is_done = self.found is not None and not self._left
        status = SnapshotStatus(self.order.number, self.found or 0, self.fired, is_done)
        if status == self.told:
            return None
        self.told = status
        return status
