# SPDX-License-Identifier: Apache-2.0
"""Groups and their traces, as this node holds them.

A group is a fired trigger: its primary trace and its laterals, kept or dropped
together. A trace may belong to several groups; it is let go when the last of
them lets go.

A group concerns one coordinator, that of its primary's shard: who had only some of its traces
could not keep or drop it as a whole. A trace concerns the coordinators of all its groups, and
each has its own share of it. Its bytes stay until all of them have them. They are charged to
the first group whose coordinator does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.core.dataplane import Slice
from appliance.core.marks import Owner
from counting.by_priority import Order, order_of
from protocol.messages import Group, SliceFlags, SliceStatus, TraceId, TriggerFired


@dataclass(slots=True, eq=False)
class Share:
    """What one coordinator, that of ``shard``, has of a triggered trace, and was told of it.

    What lies before ``acked`` is durable there; ``sent`` is where
    the next chunk on the present Slices stream starts. ``told`` is the last
    status sent on the present Control stream, at ``told_ns``. ``released``:
    the coordinator has all that it wants; the mark remains for a while, so
    that what is written later continues the slice instead of starting another
    under the same name. ``release_early``: it said so while bytes were not
    known to be durable. ``unsent`` and ``held``: whether its groups count it so.
    ``ready_ns``: until then what is unsent waits for more, since a process has the trace
    open; 0: it does not.
    """

    shard: int
    acked: int
    sent: int
    told: SliceStatus | None = None
    told_ns: int = 0
    ready_ns: int = 0
    unsent: bool = False
    held: bool = False
    released: bool = False
    release_early: bool = False


@dataclass(slots=True)
class HeldTrace:
    """A triggered trace. ``owners``: whose mark it is while it is idle.

    What lies before ``trimmed`` every coordinator has that the trace concerned until then, and it
    is not here any more. ``charged_bytes`` are charged to the queue ``charged_to``.

    Of a trace that the data plane still searches for there are no bytes yet, and no status.
    """

    slice: Slice
    owners: frozenset[Owner]
    trimmed: int
    groups: list[HeldGroup] = field(default_factory=list)
    shares: tuple[Share, ...] = ()
    charged_bytes: int = 0
    charged_to: str = ""

    def share(self, shard: int) -> Share | None:
        """That of one coordinator; None if no group of it has the trace."""
        for share in self.shares:
            if share.shard == shard:
                return share
        return None

    @property
    def trace(self) -> TraceId:
        return self.slice.trace

    @property
    def searching(self) -> bool:
        return self.slice.searching

    @property
    def bytes(self) -> int:
        """Of all that was ever in the slice, as far as that is known."""
        return 0 if self.slice.searching else self.slice.bytes

    def unsent_bytes(self, share: Share) -> int:
        return self.bytes - share.sent

    def is_sendable(self, share: Share, now_ns: int) -> bool:
        """Whether there is something to send, that waits for nothing."""
        return self.unsent_bytes(share) > 0 and share.ready_ns <= now_ns

    def is_lacked(self, share: Share) -> bool:
        """Whether there are bytes that are not known to be durable at that coordinator."""
        return self.bytes > share.acked

    @property
    def held_bytes(self) -> int:
        """What it occupies in the report store, but for the rounding to blocks."""
        return self.bytes - self.trimmed

    def status(self) -> SliceStatus:
        return SliceStatus(
            trace=self.slice.trace,
            held=SliceFlags.HELD in self.slice.flags,
            flags=self.slice.flags,
            bytes=self.slice.bytes,
            open_handles=self.slice.open_handles,
            crumbs=self.slice.crumbs,
            epoch=self.slice.epoch,
        )


@dataclass(slots=True, eq=False)
class HeldGroup:
    """A group that has traces here, or a firing that was not acknowledged.

    ``shard`` is that of its primary. ``fired`` is the firing to repeat until it is acknowledged;
    None for a group that this node only heard of. ``unanswered`` counts how often it was
    sent on the present Control stream without an answer: the answer to the
    last one counts, since a merge may have added laterals since.
    ``release_deferred``: the coordinator released a trace of it before it can
    have known of the group. ``unsent`` and ``held`` are how many of its traces have bytes
    that may be sent, or are not durable elsewhere: a trace has many groups and a group many
    traces, so they are counted and not looked for at each change.
    """

    group: Group
    queue: str
    priority: int
    since_ns: int
    shard: int
    traces: dict[TraceId, HeldTrace] = field(default_factory=dict)
    fired: TriggerFired | None = None
    acknowledged: bool = True
    unanswered: int = 0
    release_deferred: bool = False
    begun: bool = False
    unsent: int = 0
    held: int = 0

    def add(self, trace: HeldTrace) -> None:
        """Have a trace. A coordinator that it did not concern gets what there is from now on."""
        share = trace.share(self.shard)
        if share is None:
            share = Share(self.shard, acked=trace.trimmed, sent=trace.trimmed)
            trace.shares += (share,)
        self.traces[trace.trace] = trace
        trace.groups.append(self)
        self.unsent += share.unsent
        self.held += share.held

    def remove(self, trace: HeldTrace) -> Share | None:
        """Have it no more; the share that goes, if it was the last group of its coordinator."""
        share = self.share(trace)
        del self.traces[trace.trace]
        trace.groups.remove(self)
        self.unsent -= share.unsent
        self.held -= share.held
        if any(group.shard == self.shard for group in trace.groups):
            return None
        trace.shares = tuple(other for other in trace.shares if other is not share)
        return share

    def share(self, trace: HeldTrace) -> Share:
        """That of this group's coordinator, of a trace which the group has."""
        share = trace.share(self.shard)
        assert share is not None
        return share

    def has_alone(self, trace: HeldTrace) -> bool:
        """Whether no other group of its coordinator has a trace of it."""
        return sum(group.shard == self.shard for group in trace.groups) == 1

    @property
    def order(self) -> Order:
        """Sorts the groups of a queue by priority, highest first."""
        return order_of(self.group, self.priority)

    @property
    def is_reported(self) -> bool:
        """Whether the coordinator has all that there is of it, and knows why."""
        return self.acknowledged and not any(
            trace.searching or trace.is_lacked(self.share(trace)) for trace in self.traces.values()
        )
