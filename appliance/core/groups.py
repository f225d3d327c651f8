# SPDX-License-Identifier: Apache-2.0
"""Groups and their traces, as this node holds them.

A group is a fired trigger: its primary trace and its laterals, kept or dropped
together. A trace may belong to several groups; it is let go when the last of
them lets go. Its bytes are charged to the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.core.dataplane import Slice
from appliance.core.marks import Owner
from counting.by_priority import Order, order_of
from protocol.messages import Group, SliceFlags, SliceStatus, TraceId, TriggerFired


@dataclass(slots=True)
class HeldTrace:
    """A triggered trace. ``owners``: whose mark it is while it is idle.

    What lies before ``acked`` is durable at the coordinator; ``sent`` is where
    the next chunk on the present Slices stream starts. ``told`` is the last
    status sent on the present Control stream, at ``told_ns``. ``released``:
    the coordinator has all that it wants; the mark remains for a while, so
    that what is written later continues the slice instead of starting another
    under the same name. ``release_early``: it said so while bytes were not
    known to be durable. ``unsent`` and ``held``: whether its groups count it so.
    ``ready_ns``: until then what is unsent waits for more, since a process has the trace
    open; 0: it does not.

    Of a trace that the data plane still searches for there are no bytes yet, and no status.
    """

    slice: Slice
    owners: frozenset[Owner]
    acked: int
    sent: int
    groups: list[HeldGroup] = field(default_factory=list)
    told: SliceStatus | None = None
    told_ns: int = 0
    charged_bytes: int = 0
    ready_ns: int = 0
    unsent: bool = False
    held: bool = False
    released: bool = False
    release_early: bool = False

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

    @property
    def unsent_bytes(self) -> int:
        return self.bytes - self.sent

    def is_sendable(self, now_ns: int) -> bool:
        """Whether there is something to send, that waits for nothing."""
        return self.unsent_bytes > 0 and self.ready_ns <= now_ns

    @property
    def held_bytes(self) -> int:
        """What it occupies in the report store, but for the rounding to blocks."""
        return self.bytes - self.acked

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

    ``fired`` is the firing to repeat until it is acknowledged; None for a
    group that this node only heard of. ``unanswered`` counts how often it was
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
    traces: dict[TraceId, HeldTrace] = field(default_factory=dict)
    fired: TriggerFired | None = None
    acknowledged: bool = True
    unanswered: int = 0
    release_deferred: bool = False
    begun: bool = False
    unsent: int = 0
    held: int = 0

    def add(self, trace: HeldTrace) -> None:
        self.traces[trace.trace] = trace
        trace.groups.append(self)
        self.unsent += trace.unsent
        self.held += trace.held

    def remove(self, trace: HeldTrace) -> None:
        del self.traces[trace.trace]
        trace.groups.remove(self)
        self.unsent -= trace.unsent
        self.held -= trace.held

    @property
    def order(self) -> Order:
        """Sorts the groups of a queue by priority, highest first."""
        return order_of(self.group, self.priority)

    @property
    def is_reported(self) -> bool:
        """Whether the coordinator has all that there is of it, and knows why."""
        return self.acknowledged and not any(
            trace.searching or trace.held_bytes > 0 for trace in self.traces.values()
        )
