# SPDX-License-Identifier: Apache-2.0
"""What is known of closed traces: the last of them in memory, the others by the store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from coordinator.core.config import CoordinatorConfig
from coordinator.core.records import StoredSlice, StoredTrace
from coordinator.core.trace import DOUBTS
from coordinator.core.verdict import HEALABLE, UNJUDGED, ReasonKind, Verdict
from protocol.hashing import node_id
from protocol.messages import NodeId, SliceFlags, SliceStatus, TraceId
from protocol.values import dataclass


@dataclass(frozen=True, slots=True)
class ClosedSlice:
    """What came of a node's slice: ``length`` bytes of ``epoch``, zeros without any.

    ``least``: what the node would send if it collected the same once more, in one piece.
    ``let_go``: up to where the node was told to let go of bytes that fit nowhere.
    ``flags``, ``announced_bytes`` and ``open_handles`` are as the node said last.
    """

    epoch: int = 0
    length: int = 0
    least: int = 0
    flags: SliceFlags = SliceFlags.NONE
    let_go: int = 0
    announced_bytes: int = 0
    open_handles: int = 0

    def may_lack(self, status: SliceStatus) -> bool:
        """Whether a node may have, or know, what this has not.

        Collected again, a slice is what is left in the pool. All of it is there unless some
        was evicted, so what is as long as before has nothing new; what was evicted was
        collected before, so any bytes are what was written since. So are those of a slice
        that is shorter, and of which nothing says why: its node lost its memory.
        """
        if status.flags & DOUBTS & ~self.flags:
            return True
        if status.epoch in (0, self.epoch):
            return status.bytes > max(self.length, self.let_go)
        if SliceFlags.EVICTED in status.flags:
            return status.bytes > 0
        is_unexplained = not status.flags & ~SliceFlags.HELD
        return status.bytes > self.least or (is_unexplained and 0 < status.bytes < self.least)


NOTHING = ClosedSlice()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is remembered of a closed trace: how far its slices went, and the verdict.

    ``stored_bytes`` as in Trace.
    """

    slices: dict[NodeId, ClosedSlice]
    verdict: Verdict | None
    stored_bytes: int

    @property
    def items(self) -> int:
        """What it takes of the memory, in pieces of some 150 bytes."""
        reasons = len(self.verdict.reasons) if self.verdict is not None else 0
        return 2 + len(self.slices) + 2 * reasons

    @property
    def is_empty(self) -> bool:
        """Nobody had anything: whoever has it after all begins it anew."""
        if any(known.length for known in self.slices.values()):
            return False
        return (
            self.verdict is None
            or self.verdict.version == UNJUDGED
            or all(
                reason.kind in HEALABLE or reason.kind is ReasonKind.NEVER_SEEN
                for reason in self.verdict.reasons
            )
        )

    @property
    def given_up(self) -> bool:
        """Nobody wants what comes of it, unless it is fired anew."""
        reasons = self.verdict.reasons if self.verdict is not None else ()
        return len(reasons) == 1 and reasons[0].kind is ReasonKind.ABANDONED

    def slice_of(self, node: NodeId) -> ClosedSlice:
        """What it had from that node."""
        return self.slices.get(node, NOTHING)


def outcome_of(stored: StoredTrace) -> Outcome:
    """As the store has it."""
    slices = {node_id(known.node): _closed_slice(stored.trace, known) for known in stored.slices}
    length = sum(known.length for known in stored.slices)
    return Outcome(slices, stored.verdict, length)


def _closed_slice(trace: TraceId, known: StoredSlice) -> ClosedSlice:
    status = known.status if known.status is not None else SliceStatus(trace, False)
    return ClosedSlice(
        known.epoch or status.epoch,
        known.length,
        known.length if known.least is None else known.least,
        status.flags,
        announced_bytes=status.bytes,
        open_handles=status.open_handles,
    )


class UnreadableError(Exception):
    """The store cannot be read now: whether a trace is a closed one, nobody knows.

    Who spoke of it is not heard, and says it again later. It is not taken for a new one: then what
    is stored of it would be given up, beneath a verdict that stands on it.
    """


class ClosedTraces:
    """Outcomes by trace, bounded by ``closed_max`` and, for what is in them, ``evidence_max``.

    One that was forgotten is read from the store where it is wanted: ``stored`` gives what is
    durable there of a trace, or raises UnreadableError. So none is forgotten before its end
    ``is_durable``. Where the disk does not write there are more, as many as nodes are heard until then.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        stored: Callable[[TraceId], StoredTrace | None],
        is_durable: Callable[[TraceId], bool],
    ) -> None:
        self._config = config
        self._stored = stored
        self._is_durable = is_durable
        self._outcomes: OrderedDict[TraceId, Outcome] = OrderedDict()
        self._items = 0
        self._are_all = True

    def reconfigure(self, config: CoordinatorConfig) -> None:
        """Go on with other bounds, from the next trace on."""
        self._config = config

    def __len__(self) -> int:
        return len(self._outcomes)

    def get(self, trace: TraceId) -> Outcome | None:
        outcome = self._outcomes.get(trace)
        if outcome is None and not self._are_all:
            stored = self._stored(trace)
            if stored is not None and stored.released:
                outcome = outcome_of(stored)
                self.remember(trace, outcome)
        return outcome

    def remember(self, trace: TraceId, outcome: Outcome) -> None:
        """A trace is closed; others may be forgotten for it."""
        self._outcomes[trace] = outcome
        self._items += outcome.items
        while self._are_too_many():
            oldest = next(iter(self._outcomes))
            if not self._is_durable(oldest):
                break
            self._items -= self._outcomes.pop(oldest).items
            self._are_all = False
        # As many may be what there was room for at the start.
        self._are_all = self._are_all and len(self._outcomes) < self._config.closed_max

    def forget(self, trace: TraceId) -> None:
        """A trace is not closed any more."""
        outcome = self._outcomes.pop(trace, None)
        if outcome is not None:
            self._items -= outcome.items

    def _are_too_many(self) -> bool:
        config = self._config
        return len(self._outcomes) > config.closed_max or self._items > config.evidence_max
