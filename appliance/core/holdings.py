# SPDX-License-Identifier: Apache-2.0
"""The registry of groups and triggered traces of one node.

It keeps the data plane, the report queues and the counters in step: whatever
is collected, grows, is acknowledged or let go passes through here.

Memory. A trace with bytes in the report store is bounded by the store. Any
other only has its mark there, and the number of those is bounded by
``triggered_max``, by a quarter of the store, and by half of it as long as bytes leave them
that much. Either it is *idle*, and goes
when there are too many, first those of whoever has the most (marks.py):
  - those of no more use, or never seen here, also end after
    ``triggered_ttl_ns``;
  - those reported in full wait for the coordinator's Release.
Or the data plane still searches for it: that takes milliseconds, and there may
yet be bytes of it, so it stays, and idle ones go in its place.
A trace is in ``groups_per_trace_max`` groups at most, since whatever happens to it
concerns them all. It is collected already, so another group goes without it.
Groups are bounded by the same number as marks. One more costs the oldest firing that has
lost its traces and was not acknowledged, else an idle trace; when there
is neither, it is refused.

All this is one for the node, however many coordinators there are: the data plane has one slice
of a trace, and the store and its marks are the node's memory. What one coordinator has of a
trace is its share (groups.py). A trace is idle when no coordinator lacks bytes of it, and its
bytes are freed as far as all have them. Priorities are hashed by one seed, since the groups of
all coordinators compete for the store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from appliance.core.config import NodeConfig
from appliance.core.counters import NodeCounters, TriggerCounters
from appliance.core.dataplane import DataPlane, Slice
from appliance.core.groups import HeldGroup, HeldTrace, Share
from appliance.core.marks import Asker, IdleMarks, Owner
from appliance.core.reporting import Reporter
from counting.trigger_names import OTHER_NAMES, UNUSED_NS, TriggerNames
from protocol.hashing import Domain, Shards, TraceHash
from protocol.messages import Group, SliceFlags, TraceId

MARK_BYTES = 2048
"""Of the report store that a collected trace takes beside its bytes: a block (node.h)."""


@dataclass(slots=True)
class Gone:
    """What is held no more: traces, each with the share of the coordinator for whom it is not.

    ``idle``: those whose time was over, or that made room; who asked for one may not have
    been answered yet. ``abandoned``: those that were given up.
    """

    idle: list[tuple[HeldTrace, Share]] = field(default_factory=list)
    abandoned: list[tuple[HeldTrace, Share]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)


class Holdings:
    """Groups, their traces, and who is charged for them."""

    def __init__(self, config: NodeConfig, dataplane: DataPlane, shards: int, now_ns: int) -> None:
        self.counters = NodeCounters()
        self.reporter = Reporter(config, shards, now_ns)
        self.traces: dict[TraceId, HeldTrace] = {}
        self.groups: dict[Group, HeldGroup] = {}
        self._config = config
        self._dataplane = dataplane
        self._seed = config.cluster_seed
        self._priority = TraceHash(Domain.PRIORITY, self._seed)
        self.shard_of = Shards(config.cluster_seed, shards)
        """Whose the groups of a primary are, by the number of their coordinator."""
        self._names = TriggerNames(config.trigger_names_max, config.policies)
        self._names_forgotten_ns = now_ns
        self._idle = IdleMarks()
        self._searching: set[TraceId] = set()
        self._open: set[TraceId] = set()
        self._gathering: OrderedDict[Share, HeldTrace] = OrderedDict()
        self._traceless: OrderedDict[Group, None] = OrderedDict()
        self._gone = Gone()
        self._has_collected = False
        self._marks_always = self._marks_however_full()

    def reconfigure(self, config: NodeConfig, now_ns: int) -> None:
        """Go on with other limits and policies; what is held stays in the queue that it is in."""
        self._config = config
        self._marks_always = self._marks_however_full()
        self._names.configure(config.policies)
        self.reporter.reconfigure(config, now_ns)

    def rank_by(self, seed: int, now_ns: int) -> None:
        """Hash priorities by this seed, also of what is held."""
        if seed == self._seed:
            return
        self._seed = seed
        self._priority = TraceHash(Domain.PRIORITY, seed)
        for held in self.groups.values():
            self.reporter.rank(held, self._priority(held.group.primary), now_ns)

    def share(self, trace: TraceId, shard: int) -> Share | None:
        """What a coordinator has of a trace; None if it is not held for it."""
        held = self.traces.get(trace)
        return held.share(shard) if held is not None else None

    # ------------------------------------------------------------- names

    def queue(self, trigger: str) -> str:
        """The bounded name under which a trigger is limited and counted."""
        return self._names.key(trigger)

    def count(self, trigger: str) -> TriggerCounters:
        queue = self.queue(trigger)
        counters = self.counters.triggers.get(queue)
        if counters is None:
            counters = self.counters.triggers[queue] = TriggerCounters()
        return counters

    def forget_names(self, now_ns: int) -> list[str]:
        """Names that nobody fired by for long; what was counted for them is of the others now."""
        if now_ns < self._names_forgotten_ns + UNUSED_NS:
            return []
        self._names_forgotten_ns = now_ns
        unused = self._names.forget({group.queue for group in self.groups.values()})
        for name in unused:
            self.reporter.forget_queue(name)
            counted = self.counters.triggers.pop(name, None)
            if counted is not None:
                self.counters.triggers.setdefault(OTHER_NAMES, TriggerCounters()).add(counted)
        return unused

    # ------------------------------------------------------------ taking

    def group(self, group: Group, now_ns: int) -> HeldGroup | None:
        """The group's entry, made where it is new; None when there is no room."""
        held = self.groups.get(group)
        if held is None:
            while len(self.groups) >= self._config.triggered_max:
                if self._traceless:
                    oldest, _ = self._traceless.popitem(last=False)
                    self.counters.firings_dropped += 1
                    self._remove_group(oldest)
                elif not self._drop_idle(now_ns):
                    return None
            held = self._new_group(group, now_ns)
        return held

    def may_join(self, trace: TraceId, group: Group) -> bool:
        """Whether a trace is in a group, or in so few others that it can be."""
        held = self.traces.get(trace)
        if held is None or not self._is_full(held):
            return True
        known = self.groups.get(group)
        return known is not None and trace in known.traces

    def collect(
        self, group: HeldGroup, traces: Iterable[TraceId], owner: Owner, now_ns: int
    ) -> list[TraceId]:
        """Collect traces for a group; those of which its coordinator may know nothing.

        Those that the group has already stay as they are. So do those that cannot join it:
        they are held for others. ``owner``: whose are new.
        """
        unknown: list[TraceId] = []
        for trace in traces:
            known = self.traces.get(trace)
            share = known.share(group.shard) if known is not None else None
            if share is None or share.released or share.release_early:
                unknown.append(trace)
            if known is not None and (trace in group.traces or self._is_full(known)):
                continue
            held = known or self._add(self._dataplane.collect(trace, group.group, now_ns), owner)
            self._join(held, group)
            group.share(held).released = False
            if known is None and not held.searching:
                self._count_found(held)
            self._refresh(held, now_ns)
        self.reporter.place(group, now_ns)
        return unknown

    def is_searching(self, trace: TraceId) -> bool:
        """Whether the data plane still looks for a triggered trace."""
        return trace in self._searching

    def take_collected(self) -> bool:
        """Whether a trace is new since the last time."""
        has_collected, self._has_collected = self._has_collected, False
        return has_collected

    @property
    def has_open(self) -> bool:
        """Whether a process of this node has a triggered trace open."""
        return bool(self._open)

    def want(self, traces: Iterable[TraceId], owner: Owner, now_ns: int) -> None:
        """What is held of these is owner's, too."""
        for trace in traces:
            held = self.traces.get(trace)
            if held is not None and owner not in held.owners:
                held.owners |= {owner}
                self._refresh(held, now_ns)

    def recover(self, now_ns: int) -> None:
        """Take in what the report store of an earlier daemon still held."""
        for found in self._dataplane.slices():
            held = self._add(found, Asker.UNKNOWN)
            group = self.groups.get(found.group) or self._new_group(found.group, now_ns)
            self._join(held, group)
            self._refresh(held, now_ns)
            self.reporter.place(group, now_ns)

    # ---------------------------------------------------------- changing

    def changed(self, trace: TraceId, now_ns: int) -> HeldTrace | None:
        """Look at a slice again; None when it is not held."""
        held = self.traces.get(trace)
        if held is None:
            return None
        now = self._dataplane.slice(trace)
        if now is None:
            return None
        was_searching = held.searching
        for share in held.shares:
            share.released = share.released and now.bytes == held.slice.bytes
        held.slice = now
        if was_searching and not held.searching:
            self._count_found(held)
        self._refresh(held, now_ns)
        return held

    def sent(self, group: HeldGroup, trace: HeldTrace, count: int, now_ns: int) -> None:
        """Bytes of a trace went into a chunk, chosen for this group."""
        share = group.share(trace)
        share.sent += count
        self._gather(trace, share, now_ns)
        self.reporter.sent(group, count, now_ns)
        self.count(group.group.trigger).reported_bytes += count
        self.reporter.refresh(trace, now_ns)
        for owner in trace.groups:
            if owner.shard == share.shard:
                self.reporter.begin(owner, now_ns)

    def acked(self, held: HeldTrace, share: Share, offset: int, now_ns: int) -> None:
        """Everything before offset is durable at the coordinator whose share that is."""
        offset = min(offset, held.bytes)
        if offset <= share.acked:
            return
        share.acked = offset
        share.sent = max(share.sent, offset)
        self._trim(held)
        if held.trimmed == held.bytes:
            self.count(held.groups[0].group.trigger).reported += 1
        self._refresh(held, now_ns)

    def rewind(self, shard: int, now_ns: int) -> None:
        """Start over from what is durable: a new Slices stream of a coordinator."""
        for held in self.traces.values():
            share = held.share(shard)
            if share is not None:
                self.rewind_to_acked(held, share, now_ns)

    def rewind_to_acked(self, held: HeldTrace, share: Share, now_ns: int) -> None:
        """Send again what is not durable of a slice."""
        if share.sent != share.acked:
            share.sent = share.acked
            self.reporter.refresh(held, now_ns)

    # ------------------------------------------------------- letting go

    def release(self, held: HeldTrace, share: Share, now_ns: int) -> None:
        """The coordinator whose share that is needs no more of what there is of a trace."""
        share.released = True
        self._refresh(held, now_ns)

    def abandon(self, group: HeldGroup, now_ns: int) -> None:
        """Give up a group, and the traces that no other group holds."""
        self.reporter.forget(group)
        for held in list(group.traces.values()):
            gone = self._leave(held, group)
            if gone is not None:
                self._gone.abandoned.append((held, gone))
            if not held.groups:
                self._remove(held, abandoned=True, now_ns=now_ns)
            elif gone is None:
                self.reporter.charge(held, now_ns)
            else:
                # Nobody waits for its coordinator any more.
                self._trim(held)
                self._refresh(held, now_ns)
        self.drop_if_empty(group)

    def drop_if_empty(self, group: HeldGroup) -> None:
        """Forget a group without traces once its firing is acknowledged."""
        if group.traces:
            return
        if group.acknowledged:
            self._traceless.pop(group.group, None)
            if group.group in self.groups:
                self._remove_group(group.group)
        else:
            self._traceless.setdefault(group.group)

    def expire(self, now_ns: int) -> Gone:
        """Let go of idle traces, by time and by number; all that went since the last time."""
        while (over := self._idle.expired(now_ns)) is not None:
            self._forget(over, now_ns)
        marks = len(self._idle) + len(self._searching)
        # Nearly always there are far fewer; how full the store is makes no difference then.
        too_many = marks - self._marks_max() if marks > self._marks_always else 0
        while too_many > 0 and self._drop_idle(now_ns):
            too_many -= 1
        gone, self._gone = self._gone, Gone()
        return gone

    def next_expiry_ns(self) -> int | None:
        return self._idle.next_expiry_ns()

    def end_waits(self, now_ns: int) -> None:
        """What has waited for more until now goes as it is."""
        while (share := self._longest_waiting()) is not None and share.ready_ns <= now_ns:
            self.reporter.refresh(self._gathering.pop(share), now_ns)

    def next_ready_ns(self) -> int | None:
        """When end_waits() is to be called."""
        share = self._longest_waiting()
        return share.ready_ns if share is not None else None

    def _longest_waiting(self) -> Share | None:
        return next(iter(self._gathering), None)

    # ----------------------------------------------------------- inside

    def _marks_max(self) -> int:
        """How many traces may have nothing but their mark in the store now."""
        usage = self._dataplane.store_usage()
        marks = len(self._idle) + len(self._searching)
        others_bytes = usage.used_bytes - marks * MARK_BYTES
        room_bytes = usage.capacity_bytes // 2 - others_bytes
        return max(self._marks_always, min(self._config.triggered_max, room_bytes // MARK_BYTES))

    def _marks_however_full(self) -> int:
        """How many may, however many bytes there are."""
        capacity_bytes = self._dataplane.store_usage().capacity_bytes
        return min(self._config.triggered_max, capacity_bytes // 4 // MARK_BYTES)

    def _new_group(self, group: Group, now_ns: int) -> HeldGroup:
        self.count(group.trigger).collected += 1
        held = HeldGroup(
            group,
            self.queue(group.trigger),
            self._priority(group.primary),
            now_ns,
            self.shard_of(group.primary),
        )
        self.groups[group] = held
        return held

    def _count_found(self, held: HeldTrace) -> None:
        """Count what there was of a trace when its trigger came; once it is known."""
        counters = self.count(held.groups[0].group.trigger)
        counters.evicted_before += SliceFlags.EVICTED in held.slice.flags
        counters.lossy += SliceFlags.LOSSY in held.slice.flags

    def _add(self, found: Slice, owner: Owner) -> HeldTrace:
        held = HeldTrace(found, frozenset({owner}), found.trimmed_bytes)
        self.traces[found.trace] = held
        self._has_collected = True
        return held

    def _is_full(self, held: HeldTrace) -> bool:
        return len(held.groups) >= self._config.groups_per_trace_max

    def _join(self, held: HeldTrace, group: HeldGroup) -> None:
        group.add(held)
        self._traceless.pop(group.group, None)
        group.begun = group.begun or group.share(held).sent > 0

    def _leave(self, held: HeldTrace, group: HeldGroup) -> Share | None:
        """The share that goes with it."""
        self.reporter.uncharge(held)
        gone = group.remove(held)
        if gone is not None:
            self._gathering.pop(gone, None)
        return gone

    def _trim(self, held: HeldTrace) -> None:
        """Free what all have. Whom the trace concerns later gets only the rest of it."""
        offset = min(share.acked for share in held.shares)
        if offset > held.trimmed:
            self._dataplane.trim(held.trace, offset)
            held.trimmed = offset

    def _gather(self, held: HeldTrace, share: Share, now_ns: int) -> None:
        if not held.slice.open_handles or held.unsent_bytes(share) == 0:
            share.ready_ns = 0
            self._gathering.pop(share, None)
        elif not share.ready_ns:
            share.ready_ns = now_ns + self._config.gather_ns
            self._gathering[share] = held

    def _refresh(self, held: HeldTrace, now_ns: int) -> None:
        for share in held.shares:
            self._gather(held, share, now_ns)
        self.reporter.refresh(held, now_ns)
        if held.searching:
            self._searching.add(held.trace)
        else:
            self._searching.discard(held.trace)
        if held.slice.open_handles:
            self._open.add(held.trace)
        else:
            self._open.discard(held.trace)
        if held.searching or held.held_bytes > 0:
            self._idle.discard(held.trace)
            return
        expires = held.bytes == 0 or all(share.released for share in held.shares)
        expires_ns = now_ns + self._config.triggered_ttl_ns if expires else None
        self._idle.put(held.trace, held.owners, expires_ns)

    def _drop_idle(self, now_ns: int) -> bool:
        while (dearest := self._idle.dearest()) is not None:
            trace, owner = dearest
            held = self.traces[trace]
            held.owners -= {owner}
            if not held.owners:
                self.counters.marks_dropped += 1
                self._forget(trace, now_ns)
                return True
            self._refresh(held, now_ns)
        return False

    def _forget(self, trace: TraceId, now_ns: int) -> None:
        held = self.traces[trace]
        groups = list(held.groups)
        for group in groups:
            self.count(group.group.trigger).forgotten += 1
            gone = self._leave(held, group)
            if gone is not None:
                self._gone.idle.append((held, gone))
            self.reporter.place(group, now_ns)
        self._remove(held, abandoned=False, now_ns=now_ns)
        for group in groups:
            self.drop_if_empty(group)

    def _remove(self, held: HeldTrace, *, abandoned: bool, now_ns: int) -> None:
        self._dataplane.release(held.trace, abandoned=abandoned, now_ns=now_ns)
        self._idle.discard(held.trace)
        self._searching.discard(held.trace)
        self._open.discard(held.trace)
        del self.traces[held.trace]

    def _remove_group(self, group: Group) -> None:
        del self.groups[group]
        self._gone.groups.append(group)
