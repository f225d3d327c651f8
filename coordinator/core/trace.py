# SPDX-License-Identifier: Apache-2.0
"""One trace at the coordinator, and each node's part in it.

A part begins when a crumb names the node, a trigger fires on it, or it says
something about the trace by itself. Its life:

    state     what happened                           next      sent
    -         named, and the node is connected        ASKED     Collect
    -         named, and it is not, or is unknown     UNASKED
    -         a trigger fired there                   ASKED
    UNASKED   the node connects                       ASKED     Collect
    ASKED     its stream is lost                      UNASKED
    any       SliceStatus                             ANSWERED
    ANSWERED  the node comes back restarted, while    RETURNED
              bytes or open handles were due
    UNASKED   the same, and the coordinator was       RETURNED
              restarted too, after it had answered
    ANSWERED  it comes back restarted, and nothing    ANSWERED  Collect
              was due

Except ANSWERED, a part is awaited until ``deadline_ns`` and then overdue: the
trace is judged without it. A restarted node repeats by itself the status of
what its report store kept, so a RETURNED part that is overdue is lost; it is
not asked again, since it would collect a new slice under the same name.
Nothing is asked twice on one stream: while a stream lasts, it loses nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.core.evidence import Evidence
from coordinator.core.groups import GroupState
from coordinator.core.verdict import Reason, Verdict
from protocol.messages import Group, NodeId, SliceFlags, SliceStatus, TraceId

if TYPE_CHECKING:
    from coordinator.core.closed import ClosedSlice

DOUBTS = SliceFlags.LOSSY | SliceFlags.MAYBE_LOSSY | SliceFlags.CORRUPT
"""What a node may come to know of a trace at any time, though its slice was whole here."""


STAYING = DOUBTS | SliceFlags.EVICTED | SliceFlags.STORE_FULL
"""What stays true of a trace, though its node may not know it of a slice that it begins anew."""


UNKNOWN_INCARNATION = -1
"""No node has it: what was fired before the coordinator began was fired under another."""


class TraceState(enum.Enum):
    """Where a trace is on its way; coordinator.core.lifecycle says what moves it on."""

    OPEN = "open"
    SETTLED = "settled"
    RELEASED = "released"
    CLOSED = "closed"


class PartState(enum.Enum):
    UNASKED = "unasked"
    ASKED = "asked"
    ANSWERED = "answered"
    RETURNED = "returned"


@dataclass(slots=True)
class Part:
    """One node's part in a trace.

    ``told``: the trace's groups for which the node was asked, and whether it said
    something since. ``received`` bytes of the slice came without a gap,
    ``durable`` of them are in the store. ``acked_on`` is the last Slices stream
    that carried an ack. ``epoch`` is that of the slice which they belong to, 0
    while none is known; bytes of another are never put behind them.
    ``epoch_before``: of the slice that was given up for this one, or that this
    one was kept for. ``of_no_use``: the epoch and the end of the last chunk that fits nowhere;
    its node has let go of what is missing before it. ``restarted``: the node began another slice, and may have
    lost something of the one before. ``fired_under``: the incarnation under which a
    process of the node fired the trace as primary, until the node says what it has of it.
    ``only_by``: of an id that no node is known by: whose statuses name it, while nothing else does,
    so that it may be an address; None: it is a node's.
    """

    node: NodeId
    state: PartState
    named_by: str
    deadline_ns: int | None
    told: dict[Group, bool] = field(default_factory=dict)
    status: SliceStatus | None = None
    received: int = 0
    durable: int = 0
    acked_on: int | None = None
    epoch: int = 0
    epoch_before: int = 0
    of_no_use: tuple[int, int] | None = None
    restarted: bool = False
    fired_under: int | None = None
    only_by: set[NodeId] | None = None
    expected_bytes: int = 0
    """What is to come on a Slices stream, as its node's credit has it."""

    @property
    def is_unasked(self) -> bool:
        """The node was named, and nobody has asked it."""
        return self.state is PartState.UNASKED

    @property
    def is_open(self) -> bool:
        """More is to come: an answer, bytes, or records not yet written."""
        if self.state is not PartState.ANSWERED:
            return self.deadline_ns is not None
        return self.is_due and not self.lost

    @property
    def lost(self) -> bool:
        """What the node had not yet sent, it no longer has."""
        return self.state is PartState.RETURNED and self.deadline_ns is None

    @property
    def is_empty(self) -> bool:
        """The slice of this epoch never had a byte."""
        return self.received == 0 and (self.status is None or self.status.bytes == 0)

    @property
    def is_whole(self) -> bool:
        """By its own status, all of the slice of this epoch is here."""
        return self.status is not None and self.status.epoch == self.epoch and not self.is_due

    @property
    def is_due(self) -> bool:
        """By its last status there are bytes that did not come, or open handles."""
        return self.missing_bytes > 0 or self.open_handles > 0

    @property
    def missing_bytes(self) -> int:
        return max(0, self.status.bytes - self.received) if self.status is not None else 0

    @property
    def open_handles(self) -> int:
        return self.status.open_handles if self.status is not None else 0


@dataclass(slots=True)
class Trace:
    """One trace: under which groups, on which nodes, and what is known of it.

    ``reported_ns``: when it was first heard of; None where that is not known (another
    coordinator heard it) or told already. ``abandoned_by``: no group wants it any more; that node was the first.
    ``nodes_cut`` counts crumbs over the bound. ``kept``: it and
    all of a group were whole when that was given up, so that it stays whatever becomes of its other
    groups. ``late``: something came when its evidence was forgotten; what was wrong with it before
    that stands in ``reasons_before``. ``stored_bytes`` are in the
    store, of slices and firings. ``may_heal``: by its final verdict, something is missing that may
    still come. ``charged_to``: the group that pays for it, with ``charged_items`` of ``items``.
    ``unreleased``: it was begun again before these nodes heard that it was closed, so that they do
    not say again what they said before.
    """

    id: TraceId
    evidence: Evidence
    last_news_ns: int
    provisional_at_ns: int
    reported_ns: int | None = None
    groups: dict[Group, GroupState] = field(default_factory=dict)
    parts: dict[NodeId, Part] = field(default_factory=dict)
    abandoned_by: str | None = None
    nodes_cut: int = 0
    verdict: Verdict | None = None
    state: TraceState = TraceState.OPEN
    late: bool = False
    kept: bool = False
    reasons_before: tuple[Reason, ...] = ()
    stored_bytes: int = 0
    may_heal: bool = False
    charged_to: GroupState | None = None
    charged_items: int = 0
    unreleased: dict[NodeId, None] = field(default_factory=dict)
    slices: dict[NodeId, ClosedSlice] = field(default_factory=dict)
    """As they were when it was released; nothing came since."""
    counted: tuple[int, int] = (1, 1)
    """What it adds to ``unsettled`` and ``pending`` of its groups."""

    @property
    def items(self) -> int:
        """What it takes of the memory, in pieces of some 150 bytes."""
        parts, groups = len(self.parts), len(self.groups)
        reasons = len(self.verdict.reasons) if self.verdict is not None else 0
        # Each part has an entry in `told` for each group.
        return self.evidence.items + 4 * (parts + groups) + parts * groups + 2 * reasons

    @property
    def is_settled(self) -> bool:
        """The verdict is final, and nothing came since."""
        return self.state is not TraceState.OPEN

    @property
    def is_released(self) -> bool:
        """Its nodes are told to forget it."""
        return self.state is TraceState.RELEASED

    @property
    def is_awaited(self) -> bool:
        """More is to come from a node."""
        return self.abandoned_by is None and any(part.is_open for part in self.parts.values())

    @property
    def bytes(self) -> int:
        return sum(part.received for part in self.parts.values())
