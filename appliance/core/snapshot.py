# SPDX-License-Identifier: Apache-2.0
"""The node's part of snapshots: which traces it still has to trigger, and how far it is."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from protocol.messages import Group, Snapshot, SnapshotStatus, TraceId

TRACES_MAX = 10_000
"""Of one snapshot on one node: more than anybody looks at."""

_REMEMBERED_MAX = 16
"""As many as a coordinator goes on with."""


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

    @property
    def news(self) -> SnapshotStatus | None:
        """How far it is, if that is not what was told last."""
        is_done = self.found is not None and not self._left
        status = SnapshotStatus(self.order.number, self.found or 0, self.fired, is_done)
        return status if status != self.told else None

    def take_news(self) -> SnapshotStatus | None:
        """That, which is told now."""
        news = self.news
        if news is not None:
            self.told = news
        return news


class SnapshotRuns:
    """Those of late, by number. Each goes on by itself, so that none costs another what it has found."""

    def __init__(self) -> None:
        self._runs: OrderedDict[int, SnapshotRun] = OrderedDict()

    def ordered(self, order: Snapshot) -> Iterator[Group]:
        """What to trigger now, of one that is known; another one begins."""
        run = self._runs.get(order.number)
        if run is not None:
            for trace in run.go_on(order.traces):
                yield Group(run.order.trigger, trace)
        elif not order.traces:
            self._runs[order.number] = SnapshotRun(order)
            while len(self._runs) > _REMEMBERED_MAX:
                self._runs.popitem(last=False)
        # Else it was forgotten, and nothing is left of it to trigger.

    def take_question(self) -> Snapshot | None:
        """One for which begin() is to tell which traces there are; once each."""
        for run in self._runs.values():
            if not run.asked:
                run.asked = True
                return run.order
        return None

    def begin(self, number: int, found: int, traces: Iterable[TraceId]) -> None:
        """As for the run of that number, if it is not forgotten."""
        run = self._runs.get(number)
        if run is not None:
            run.begin(found, traces)

    def take_news(self) -> list[SnapshotStatus]:
        """How far each is, of which that is news."""
        news = (run.take_news() for run in self._runs.values())
        return [status for status in news if status is not None]

    @property
    def has_news(self) -> bool:
        """Whether take_news() has something."""
        return any(run.news is not None for run in self._runs.values())

    def repeat(self) -> None:
        """The other side may have missed what was told."""
        for run in self._runs.values():
            run.told = None
