# SPDX-License-Identifier: Apache-2.0
"""The node's core: triggers, groups, reporting, and the coordinator protocol.

Sans-IO: facts come in by the ``on_*`` methods with the time of CLOCK_MONOTONIC,
outputs are fetched by the ``take_*`` methods. The only thing called from here
is the data plane, which does no IO either.

What must survive a lost connection is repeated on the next one: what a
coordinator is owed (``owed.py``), and each slice from its last durable byte.

What concerns one coordinator is in its link (``link.py``); ``shard`` says which one a fact is of
or an output for. Here is what is one for the node: what it holds, who fires, and what is given
up. The first coordinator says what this node records and by which seed priorities are hashed,
since a node can do only one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

from appliance.core.config import NodeConfig, TriggerLimits, TriggerPolicy
from appliance.core.counters import NodeCounters, TriggerCounters
from appliance.core.dataplane import (
    ClientDrained,
    DataPlane,
    DataPlaneEvent,
    LocalTrigger,
    SliceChanged,
    StoreFull,
)
from appliance.core.firings import Firings
from appliance.core.groups import HeldTrace
from appliance.core.holdings import Holdings
from appliance.core.link import Link
from appliance.core.marks import Asker
from appliance.core.reporting import QueueDepth
from protocol.messages import (
    LATERALS_MAX,
    NO_POLICY,
    RECOVERED_WHY,
    WHY_BYTES_MAX,
    ClockProbe,
    Collect,
    CoordinatorMessage,
    Drop,
    Group,
    NodeMessage,
    Policy,
    Refused,
    Release,
    SliceChunk,
    SliceFlags,
    SliceReply,
    Snapshot,
    Source,
    StatusQuestion,
    TraceId,
    TriggerAck,
    TriggerFired,
    Unknown,
    Welcome,
    cut_utf8,
)
from protocol.versions import OURS, Versions

__all__ = [
    "NodeConfig",
    "NodeCore",
    "NodeCounters",
    "TriggerCounters",
    "TriggerLimits",
    "TriggerPolicy",
]


def earliest(one_ns: int | None, other_ns: int | None) -> int | None:
    """Of two times, each None for never."""
    if one_ns is None or other_ns is None:
        return other_ns if one_ns is None else one_ns
    return min(one_ns, other_ns)


class NodeCore:
    """One node. See the module; ``counters`` may be read at any time."""

    def __init__(
        self,
        config: NodeConfig,
        dataplane: DataPlane,
        incarnation: int,
        now_ns: int,
        realtime_offset_ns: int,
        versions: Versions = OURS,
        policy: Policy = NO_POLICY,
        user_of: Callable[[int], int | None] = lambda _: None,
        priority_seed: int = 0,
        shards: int = 1,
    ) -> None:
        """Recover what dataplane.slices() shows of an earlier daemon.

        ``realtime_offset_ns`` is Unix time minus CLOCK_MONOTONIC. ``policy`` and ``priority_seed``
        are those that an earlier daemon was told last, and are in force; seed 0: none was told.
        ``user_of`` tells whose a process is, by its number. ``shards`` is how many coordinators
        there are.
        """
        self._config = config
        self._dataplane = dataplane
        self._now_ns = now_ns
        self._holdings = Holdings(config, dataplane, shards, now_ns)
        self.links = tuple(
            Link(shard, config, dataplane, self._holdings, incarnation, versions)
            for shard in range(shards)
        )
        """One for each coordinator, by shards."""
        self._firings = Firings(config, self._holdings, self.link_of, user_of, realtime_offset_ns)
        self._relieve_at_ns: int | None = None

        self.links[0].recall(policy, priority_seed)
        self._holdings.rank_by(self.links[0].priority_seed, now_ns)
        self._recover()

    def link_of(self, primary: TraceId) -> Link:
        """That of the coordinator to which the groups of this primary go, with all their traces."""
        return self.links[self._holdings.shard_of(primary)]

    @property
    def counters(self) -> NodeCounters:
        return self._holdings.counters

    @property
    def policy(self) -> Policy:
        """What this node shall record, as the first coordinator last said."""
        return self.links[0].policy

    @property
    def unreported_groups(self) -> int:
        """Groups that their coordinator does not know of, or has not all of, yet."""
        return sum(not group.is_reported for group in self._holdings.groups.values())

    @property
    def triggered_traces(self) -> int:
        """Traces that are collected, or marked so that what comes of them will be."""
        return len(self._holdings.traces)

    @property
    def queues(self) -> dict[str, QueueDepth]:
        """What waits to be reported, by the bounded names of triggers."""
        return self._holdings.reporter.depths()

    def reconfigure(self, config: NodeConfig, now_ns: int) -> None:
        """Go on with other limits, policies and rates. The node and its seed stay the same."""
        self._now_ns = now_ns
        self._config = config
        self._firings.reconfigure(config, now_ns)
        self._holdings.reconfigure(config, now_ns)
        for link in self.links:
            link.reconfigure(config)
        self._relieve(now_ns)

    # ---------------------------------------------------------- facts in

    def on_dataplane(self, events: Iterable[DataPlaneEvent], now_ns: int) -> None:
        """What dataplane reported since the last time."""
        self._now_ns = now_ns
        events = list(events)
        fired_ns = (event.fired_ns for event in events if isinstance(event, LocalTrigger))
        waited_ns = max(0, now_ns - min(fired_ns, default=now_ns))
        for event in events:
            match event:
                case LocalTrigger():
                    self._firings.on_local_trigger(event, now_ns, waited_ns)
                case SliceChanged():
                    self._on_slice_changed(event.trace, now_ns)
                case StoreFull():
                    held = self._on_slice_changed(event.trace, now_ns)
                    if held is not None:
                        self._holdings.count(held.groups[0].group.trigger).store_full += 1
                case ClientDrained():
                    self._firings.forget_process(event.client)
                case _:
                    assert_never(event)
        self._relieve(now_ns)

    def on_operator_trigger(
        self, group: Group, laterals: tuple[TraceId, ...], why: str, now_ns: int
    ) -> None:
        """An operator asks for a trace: as a local trigger, but never limited."""
        self._now_ns = now_ns
        self._firings.fire(group, laterals, why, Source.OPERATOR, Asker.NODE, now_ns, now_ns)
        self._relieve(now_ns)

    def take_recent_question(self, shard: int = 0) -> Snapshot | None:
        """An order for which ``on_recent`` is to tell which traces there are; once each."""
        return self.links[shard].snapshots.take_question()

    def take_status_question(self, shard: int = 0) -> int | None:
        """The number of a question for which ``on_status`` is to tell how the node is; once each.

        Of several that came meanwhile the last one.
        """
        return self.links[shard].take_status_question()

    def on_status(self, number: int, json: str, shard: int = 0) -> None:
        """How the node is, for who asked that question."""
        self.links[shard].tell_status(number, json)

    @property
    def has_open(self) -> bool:
        """Whether a process of this node has a triggered trace open, so that more of it comes."""
        return self._holdings.has_open

    def is_searching(self, trace: TraceId) -> bool:
        """Whether a trace was triggered and is still looked for: what is held of it is not known yet."""
        return self._holdings.is_searching(trace)

    def take_collected(self) -> bool:
        """Whether anything was collected since the last time."""
        return self._holdings.take_collected()

    def take_priority_seed(self) -> int | None:
        """By what priorities are hashed from now on, if that has changed; once each."""
        return self.links[0].take_priority_seed()

    def take_policy(self) -> Policy | None:
        """What is to be recorded from now on, and to be kept over restarts; once each."""
        return self.links[0].take_policy()

    def on_recent(
        self, order: Snapshot, found: int, traces: Iterable[TraceId], now_ns: int, shard: int = 0
    ) -> None:
        """The pool holds ``found`` traces that the order is for; these are to be triggered.

        Those of other shards are not: whoever wants them orders it of their coordinators, too.
        """
        self._now_ns = now_ns
        listed = tuple(traces)
        mine = tuple(trace for trace in listed if self._holdings.shard_of(trace) == shard)
        found -= len(listed) - len(mine)
        self.links[shard].snapshots.begin(order.number, found, mine)

    def on_control_connected(self, now_ns: int, addresses: tuple[str, ...], shard: int = 0) -> None:
        """A Control stream is there. ``addresses``: by which peers know this node now."""
        self._now_ns = now_ns
        self.links[shard].connect(addresses)

    def on_control_lost(self, now_ns: int, shard: int = 0) -> None:
        """A Control stream ended, or could not be had, and its Slices stream with it.

        Some of what was sent by its credit may have been on the way here.
        """
        self.on_slices_lost(now_ns, shard)
        self.links[shard].disconnect()

    def on_control(
        self,
        message: CoordinatorMessage | Unknown,
        now_ns: int,
        realtime_ns: int,
        shard: int = 0,
    ) -> None:
        """One message of a coordinator."""
        self._now_ns = now_ns
        self.on_clock(now_ns, realtime_ns)
        link = self.links[shard]
        if not link.connected or not self._is_expected(message, link):
            self.counters.unexpected_messages += 1
            return
        match message:
            case Welcome():
                self._on_welcome(message, link, now_ns)
            case Refused():
                link.refused = message.reason
                self.counters.refused += 1
            case Collect():
                self._on_collect(message, link, now_ns)
            case TriggerAck():
                link.owed.firing_acknowledged(message.group)
            case Drop():
                self._on_drop(message.group, link, now_ns)
            case Release():
                link.release(message.trace, now_ns)
            case ClockProbe():
                link.probe(message, now_ns, realtime_ns)
            case Snapshot():
                self._on_snapshot(message, link, now_ns)
            case StatusQuestion():
                link.ask_status(message.number)
            case Policy():
                link.say_policy(message)
            case Unknown():
                self.counters.unknown_messages += 1
            case _:
                assert_never(message)
        self._relieve(now_ns)

    def on_slices_connected(self, now_ns: int, number: int, shard: int = 0) -> None:
        """There is a Slices stream, the ``number``-th of this node to this coordinator."""
        self._now_ns = now_ns
        self.links[shard].connect_slices(number, now_ns)

    def on_slices_lost(self, now_ns: int, shard: int = 0) -> None:
        self._now_ns = now_ns
        self.links[shard].disconnect_slices(now_ns)

    def on_slice_reply(self, reply: SliceReply, now_ns: int, shard: int = 0) -> None:
        self._now_ns = now_ns
        if not self.links[shard].slices_connected:
            self.counters.unexpected_messages += 1
            return
        self.links[shard].on_reply(reply, now_ns)
        self._expire(now_ns)

    def on_tick(self, now_ns: int) -> None:
        """Time passed: see next_wakeup_ns."""
        self._now_ns = now_ns
        self._holdings.end_waits(now_ns)
        self._relieve(now_ns)
        for name in self._holdings.forget_names(now_ns):
            self._firings.forget_name(name)

    def on_clock(self, now_ns: int, realtime_ns: int) -> None:
        """What both clocks show, read together. To be told before what else is sent now."""
        self._firings.realtime_offset_ns = realtime_ns - now_ns
        for link in self.links:
            link.on_clock(now_ns, realtime_ns)

    # ----------------------------------------------------------- outputs

    def take_control(self, now_ns: int, realtime_ns: int, shard: int = 0) -> list[NodeMessage]:
        """Messages for a Control stream, in order; none while it is down."""
        self._now_ns = now_ns
        return self.links[shard].take_control(now_ns, realtime_ns)

    def take_chunks(self, now_ns: int, shard: int = 0) -> list[SliceChunk]:
        """Chunks for a Slices stream: what rates and credit allow now."""
        self._now_ns = now_ns
        return self.links[shard].take_chunks(now_ns)

    def wants_slices_connection(self, shard: int = 0) -> bool:
        """Whether there is something to report, or reported and not yet durable."""
        return self.links[shard].wants_slices()

    def next_wakeup_ns(self, now_ns: int) -> int | None:
        """When on_tick, take_control or take_chunks may do more without a new fact."""
        first_ns = self.next_tick_ns()
        for link in self.links:
            sends_ns = earliest(link.next_control_ns(now_ns), link.next_chunks_ns(now_ns))
            first_ns = earliest(first_ns, sends_ns)
        return max(now_ns, first_ns) if first_ns is not None else None

    def next_tick_ns(self) -> int | None:
        """When on_tick is to be called; it may be over."""
        return earliest(
            self._holdings.next_ready_ns(),
            earliest(self._holdings.next_expiry_ns(), self._relieve_at_ns),
        )

    def next_control_ns(self, now_ns: int, shard: int = 0) -> int | None:
        """When take_control may have something without a new fact; now or earlier: now."""
        return self.links[shard].next_control_ns(now_ns)

    def next_chunks_ns(self, now_ns: int, shard: int = 0) -> int | None:
        """When take_chunks may have something without a new fact; now or earlier: now."""
        return self.links[shard].next_chunks_ns(now_ns)

    # ------------------------------------------------------------ inside

    def _recover(self) -> None:
        self._holdings.recover(self._now_ns)
        for group in self._holdings.groups.values():
            primary = group.group.primary
            if primary not in self._holdings.traces:
                # Only heard of: whoever fires a trigger collects its primary.
                continue
            # The store names one group for each trace; this may be another one of it.
            self._holdings.collect(group, (primary,), Asker.UNKNOWN, self._now_ns)
            collected_ns = min(held.slice.collected_ns for held in group.traces.values())
            # More of them if several nodes fired the group, each with laterals of its own.
            laterals = tuple(trace for trace in group.traces if trace != group.group.primary)
            group.fired = TriggerFired(
                group.group,
                laterals[:LATERALS_MAX],
                RECOVERED_WHY,
                Source.NODE,
                collected_ns + self._firings.realtime_offset_ns,
            )
            group.acknowledged = False
        self._relieve(self._now_ns)

    def _is_expected(self, message: CoordinatorMessage | Unknown, link: Link) -> bool:
        """Whether a coordinator may say that now: first who it is, then of its own groups only."""
        match message:
            case Welcome() | Refused():
                return True
            case Collect() | TriggerAck() | Drop():
                return link.owed.is_open and self.link_of(message.group.primary) is link
            case _:
                return link.owed.is_open

    def _on_welcome(self, welcome: Welcome, link: Link, now_ns: int) -> None:
        if not link.welcome(welcome):
            self.counters.refused += 1
            return
        # What is told first is what ranks first.
        self._holdings.rank_by(self.links[0].priority_seed, now_ns)
        link.open()

    def _on_snapshot(self, order: Snapshot, link: Link, now_ns: int) -> None:
        why = f"of the last {order.age_ns / 1e9:g} s" + (
            f" of {order.service}" if order.service else ""
        )
        why = cut_utf8(why, WHY_BYTES_MAX)
        for group in link.snapshots.ordered(order):
            self._firings.fire(group, (), why, Source.OPERATOR, Asker.COORDINATOR, now_ns, now_ns)

    def _on_collect(self, message: Collect, link: Link, now_ns: int) -> None:
        """A remote trigger: never limited, and every trace is answered."""
        if message.group in link.owed.abandoned_groups:
            link.owed.answer_all(message.traces, SliceFlags.ABANDONED)
            return
        self._holdings.want(message.traces, Asker.COORDINATOR, now_ns)
        group = None
        # A group that none of them can join would be held for nothing: all of them are held
        # already, and each is answered by what there is of it.
        if any(self._holdings.may_join(trace, message.group) for trace in message.traces):
            group = self._holdings.group(message.group, now_ns)
        if group is not None:
            self._holdings.collect(group, message.traces, Asker.COORDINATOR, now_ns)
        # One that cannot join may still be held for other groups of this coordinator.
        link.owed.answer_all(message.traces, SliceFlags.STORE_FULL)

    def _on_drop(self, group: Group, link: Link, now_ns: int) -> None:
        if group in link.owed.abandoned_groups:
            link.owed.abandonment_known(group)
            return
        self._holdings.count(group.trigger).dropped_remote += 1
        self._abandon(group, unanswered=False, now_ns=now_ns)

    def _on_slice_changed(self, trace: TraceId, now_ns: int) -> HeldTrace | None:
        held = self._holdings.changed(trace, now_ns)
        if held is not None:
            for share in held.shares:
                self.links[share.shard].owed.status(trace)
        return held

    def _relieve(self, now_ns: int) -> None:
        """Keep every bound: the store's by abandoning, the others by forgetting."""
        threshold = self._config.abandon_threshold
        grace_ns = self._config.abandon_grace_ns
        self._relieve_at_ns = None
        # Marks give way to bytes, before bytes are given up.
        self._expire(now_ns)
        while True:
            usage = self._dataplane.store_usage()
            capacity = usage.capacity_bytes
            surplus = usage.used_bytes - int(threshold * capacity)
            if surplus <= 0:
                break
            spare = usage.used_bytes <= int((1 + threshold) / 2 * capacity)
            before_ns = now_ns - grace_ns if spare else now_ns
            group = self._holdings.reporter.lowest_group(surplus, before_ns)
            if group is None:
                # All are young, or all is shared with queues that hold less than their share.
                self._relieve_at_ns = now_ns + max(1, grace_ns // 4)
                break
            self._holdings.count(group.group.trigger).abandoned += 1
            self._abandon(group.group, unanswered=True, now_ns=now_ns)
        self._expire(now_ns)

    def _expire(self, now_ns: int) -> None:
        gone = self._holdings.expire(now_ns)
        for link in self.links:
            link.owed.forget(gone)

    def _abandon(self, group: Group, *, unanswered: bool, now_ns: int) -> None:
        owed = self.link_of(group.primary).owed
        if unanswered:
            owed.abandonment(group)
        else:
            owed.abandonment_known(group)
        held = self._holdings.groups.get(group)
        if held is None:
            return
        traces = tuple(held.traces)
        self._holdings.abandon(held, now_ns)
        # The coordinator may have forgotten these traces with the group. It must hear of them
        # again before another of their groups fires.
        for trace in traces:
            if self._holdings.share(trace, held.shard) is not None:
                owed.answer(trace)
