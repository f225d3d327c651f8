# SPDX-License-Identifier: Apache-2.0
"""The node's core: triggers, groups, reporting, and the coordinator protocol.

Sans-IO: facts come in by the ``on_*`` methods with the time of CLOCK_MONOTONIC,
outputs are fetched by the ``take_*`` methods. The only thing called from here
is the data plane, which does no IO either.

What must survive a lost connection is repeated on the next one: what the
coordinator is owed (``owed.py``), and each slice from its last durable byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView
from typing import assert_never

from appliance.core.config import NodeConfig, TriggerLimits, TriggerPolicy
from appliance.core.counters import NodeCounters, TriggerCounters
from appliance.core.dataplane import (
    NO_CLIENT,
    ClientDrained,
    DataPlane,
    DataPlaneEvent,
    LocalTrigger,
    SliceChanged,
    StoreFull,
)
from appliance.core.groups import HeldTrace
from appliance.core.holdings import Holdings
from appliance.core.limits import Admission, Refusal
from appliance.core.link import Link
from appliance.core.marks import Asker, Owner
from appliance.core.reporting import QueueDepth
from appliance.core.snapshot import SnapshotRuns
from protocol.messages import (
    CONTROL_CHUNK_BYTES_MAX,
    DRY_RUN_PREFIX,
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
    NodeReport,
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
from protocol.versions import OURS, Agreed, Versions

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
    ) -> None:
        """Recover what dataplane.slices() shows of an earlier daemon.

        ``realtime_offset_ns`` is Unix time minus CLOCK_MONOTONIC. ``policy`` and ``priority_seed``
        are those that an earlier daemon was told last, and are in force; seed 0: none was told.
        ``user_of`` tells whose a process is, by its number.
        """
        self._config = config
        self._dataplane = dataplane
        self._now_ns = now_ns
        self._realtime_offset_ns = realtime_offset_ns
        self._admission = Admission(config.limits, user_of)
        self._holdings = Holdings(config, dataplane, now_ns)
        self._link = Link(config, self._holdings, incarnation, versions)
        self._owed = self._link.owed

        self.policy = policy
        """What the coordinator last said that nodes shall record."""
        self._status_asked: int | None = None
        self._new_priority_seed: int | None = None
        self._policy_is_new = False
        self._snapshots = SnapshotRuns()

        self._relieve_at_ns: int | None = None

        if priority_seed:
            self._holdings.rank_by(priority_seed, now_ns)
        self._recover()

    @property
    def counters(self) -> NodeCounters:
        return self._holdings.counters

    @property
    def refused(self) -> str | None:
        """Why the coordinator refused this node, or must not be heard, for the operator."""
        return self._link.refused

    @property
    def agreed(self) -> Agreed | None:
        """What is spoken with the coordinator, since it welcomed this node."""
        return self._link.agreed

    @property
    def abandoned_groups(self) -> KeysView[Group]:
        """The groups that were given up, here or elsewhere, as far as remembered."""
        return self._owed.abandoned_groups

    @property
    def unreported_groups(self) -> int:
        """Groups that the coordinator does not know of, or has not all of, yet."""
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
        self._admission.reconfigure(config.limits, now_ns)
        self._holdings.reconfigure(config, now_ns)
        self._owed.reconfigure(config)
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
                    self._on_local_trigger(event, now_ns, waited_ns)
                case SliceChanged():
                    self._on_slice_changed(event.trace, now_ns)
                case StoreFull():
                    held = self._on_slice_changed(event.trace, now_ns)
                    if held is not None:
                        self._holdings.count(held.groups[0].group.trigger).store_full += 1
                case ClientDrained():
                    self._admission.forget_process(event.client)
                case _:
                    assert_never(event)
        self._relieve(now_ns)

    def on_operator_trigger(
        self, group: Group, laterals: tuple[TraceId, ...], why: str, now_ns: int
    ) -> None:
        """An operator asks for a trace: as a local trigger, but never limited."""
        self._now_ns = now_ns
        self._fire(group, laterals, why, Source.OPERATOR, Asker.NODE, now_ns, now_ns)
        self._relieve(now_ns)

    def take_recent_question(self) -> Snapshot | None:
        """An order for which ``on_recent`` is to tell which traces there are; once each."""
        return self._snapshots.take_question()

    def take_status_question(self) -> int | None:
        """The number of a question for which ``on_status`` is to tell how the node is; once each.

        Of several that came meanwhile the last one.
        """
        asked, self._status_asked = self._status_asked, None
        return asked

    def on_status(self, number: int, json: str) -> None:
        """How the node is, for who asked that question."""
        self._owed.report(NodeReport(number, json))

    @property
    def has_open(self) -> bool:
        """Whether a process of this node has a triggered trace open, so that more of it comes."""
        return self._holdings.has_open

    @property
    def slices_connected(self) -> bool:
        """Whether there is a Slices stream."""
        return self._link.slices_connected

    def take_collected(self) -> bool:
        """Whether anything was collected since the last time."""
        return self._holdings.take_collected()

    def take_priority_seed(self) -> int | None:
        """By what priorities are hashed from now on, if that has changed; once each."""
        seed, self._new_priority_seed = self._new_priority_seed, None
        return seed

    def take_policy(self) -> Policy | None:
        """What is to be recorded from now on, and to be kept over restarts; once each."""
        if not self._policy_is_new:
            return None
        self._policy_is_new = False
        return self.policy

    def on_recent(
        self, order: Snapshot, found: int, traces: Iterable[TraceId], now_ns: int
    ) -> None:
        """The pool holds ``found`` traces that the order is for; these are to be triggered."""
        self._now_ns = now_ns
        self._snapshots.begin(order.number, found, traces)

    def on_control_connected(self, now_ns: int, addresses: tuple[str, ...]) -> None:
        """A Control stream is there. ``addresses``: by which peers know this node now."""
        self._now_ns = now_ns
        self._link.connect(addresses)

    def on_control_lost(self, now_ns: int) -> None:
        """A Control stream ended, or could not be had, and its Slices stream with it.

        Some of what was sent by its credit may have been on the way here.
        """
        self.on_slices_lost(now_ns)
        self._link.disconnect()

    def on_control(
        self, message: CoordinatorMessage | Unknown, now_ns: int, realtime_ns: int
    ) -> None:
        """One message of the coordinator."""
        self._now_ns = now_ns
        self.on_clock(now_ns, realtime_ns)
        opens = isinstance(message, Welcome | Refused)
        if not self._link.connected or not (self._owed.is_open or opens):
            self.counters.unexpected_messages += 1
            return
        match message:
            case Welcome():
                self._on_welcome(message, now_ns)
            case Refused():
                self._on_refused(message.reason)
            case Collect():
                self._on_collect(message, now_ns)
            case TriggerAck():
                self._owed.firing_acknowledged(message.group)
            case Drop():
                self._on_drop(message.group, now_ns)
            case Release():
                self._on_release(message.trace, now_ns)
            case ClockProbe():
                self._link.probe(message, now_ns, realtime_ns)
            case Snapshot():
                self._on_snapshot(message, now_ns)
            case StatusQuestion():
                self._status_asked = message.number
            case Policy():
                self._policy_is_new = self._policy_is_new or message != self.policy
                self.policy = message
            case Unknown():
                self.counters.unknown_messages += 1
            case _:
                assert_never(message)
        self._relieve(now_ns)

    def on_slices_connected(self, now_ns: int, number: int) -> None:
        """There is a Slices stream, the ``number``-th of this node."""
        self._now_ns = now_ns
        self._link.connect_slices(number)
        self._holdings.rewind(now_ns)

    def on_slices_lost(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._link.disconnect_slices()
        self._holdings.rewind(now_ns)

    def on_slice_reply(self, reply: SliceReply, now_ns: int) -> None:
        self._now_ns = now_ns
        if not self._link.slices_connected:
            self.counters.unexpected_messages += 1
            return
        self._link.credit_bytes += reply.credit_bytes
        for ack in reply.acks:
            held = self._holdings.traces.get(ack.trace)
            # An ack for an earlier slice of the trace says nothing about this one.
            if held is not None and ack.epoch == held.slice.epoch:
                self._holdings.acked(held, ack.offset, now_ns)
                if ack.again and ack.offset >= held.acked:
                    self._holdings.rewind_to_acked(held, now_ns)
                if held.release_early and held.held_bytes == 0:
                    held.release_early = False
                    self._owed.answer(held.trace)
        self._expire(now_ns)

    def on_tick(self, now_ns: int) -> None:
        """Time passed: see next_wakeup_ns."""
        self._now_ns = now_ns
        self._holdings.end_waits(now_ns)
        self._relieve(now_ns)
        for name in self._holdings.forget_names(now_ns):
            self._admission.forget_name(name)

    def on_clock(self, now_ns: int, realtime_ns: int) -> None:
        """What both clocks show, read together. To be told before what else is sent now."""
        self._realtime_offset_ns = realtime_ns - now_ns
        self._link.on_clock(now_ns, realtime_ns)

    # ----------------------------------------------------------- outputs

    def take_control(self, now_ns: int, realtime_ns: int) -> list[NodeMessage]:
        """Messages for the Control stream, in order; none while it is down."""
        self._now_ns = now_ns
        messages = self._link.take_control(now_ns, realtime_ns)
        if not self._owed.is_open:
            return messages
        # After the firings, so that what it counts is known.
        messages += self._snapshots.take_news()
        if messages and self._link.may_send_on_control:
            # A message of their own would cost more than they do.
            messages += self._take_chunks(now_ns, on_control=True)
        return messages

    def take_chunks(self, now_ns: int) -> list[SliceChunk]:
        """Chunks for the Slices stream: what rates and credit allow now."""
        self._now_ns = now_ns
        return self._take_chunks(now_ns, on_control=False)

    def _take_chunks(self, now_ns: int, *, on_control: bool) -> list[SliceChunk]:
        """What may be sent; on the Control stream only few bytes, and only ends of slices.

        What follows of a slice on the other stream might overtake it, and be sent twice.
        """
        stream = self._link.slices_number if on_control else 0
        left_bytes = CONTROL_CHUNK_BYTES_MAX
        chunks: list[SliceChunk] = []
        while self._link.may_send:
            following = self._holdings.reporter.next_trace(now_ns)
            if following is None:
                break
            group, held = following
            count = min(self._config.chunk_bytes, held.unsent_bytes, self._link.credit_bytes)
            if on_control and (count > left_bytes or count < held.unsent_bytes):
                break
            left_bytes -= count
            data = self._dataplane.read(held.trace, held.sent, count)
            chunks.append(SliceChunk(held.trace, held.sent, data, held.slice.epoch, stream=stream))
            self._link.sent(chunks[-1])
            self._holdings.sent(group, held, len(data), now_ns)
            told = held.told
            if told is not None and told.bytes < held.slice.bytes and told.bytes <= held.sent:
                self._owed.status(held.trace)
        return chunks

    def wants_slices_connection(self) -> bool:
        """Whether there is something to report, or reported and not yet durable."""
        return self._owed.is_open and self._holdings.reporter.held_bytes > 0

    def next_wakeup_ns(self, now_ns: int) -> int | None:
        """When on_tick, take_control or take_chunks may do more without a new fact."""
        first_ns = earliest(
            self.next_tick_ns(),
            earliest(self.next_control_ns(now_ns), self.next_chunks_ns(now_ns)),
        )
        return max(now_ns, first_ns) if first_ns is not None else None

    def next_tick_ns(self) -> int | None:
        """When on_tick is to be called; it may be over."""
        return earliest(
            self._holdings.next_ready_ns(),
            earliest(self._holdings.next_expiry_ns(), self._relieve_at_ns),
        )

    def next_control_ns(self, now_ns: int) -> int | None:
        """When take_control may have something without a new fact; now or earlier: now."""
        if self._owed.is_open and self._snapshots.has_news:
            return now_ns
        return self._link.next_control_ns(now_ns)

    def next_chunks_ns(self, now_ns: int) -> int | None:
        """When take_chunks may have something without a new fact; now or earlier: now."""
        return self._holdings.reporter.ready_ns(now_ns) if self._link.may_send else None

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
                collected_ns + self._realtime_offset_ns,
            )
            group.acknowledged = False
        self._relieve(self._now_ns)

    def _on_refused(self, reason: str) -> None:
        self._link.refused = reason
        self.counters.refused += 1

    def _on_welcome(self, welcome: Welcome, now_ns: int) -> None:
        """The stream is open: repeat all that the other side may have missed."""
        if not self._link.welcome(welcome):
            self.counters.refused += 1
            return
        seed = welcome.priority_seed or self._config.cluster_seed
        if self._holdings.rank_by(seed, now_ns):
            self._new_priority_seed = seed
        self._snapshots.repeat()
        self._owed.open()

    def _on_local_trigger(self, event: LocalTrigger, now_ns: int, waited_ns: int) -> None:
        queue = self._holdings.queue(event.trigger)
        counters = self._holdings.count(event.trigger)
        counters.fired += 1
        others = len({*event.laterals} - {event.trace})
        laterals = min(others, self._config.limits.laterals_max)
        match self._admission.admit(event.client, queue, now_ns, waited_ns, laterals):
            case Refusal.PROCESS:
                counters.rate_limited_process += 1
            case Refusal.TRIGGER:
                counters.rate_limited_trigger += 1
            case None if event.trigger.startswith(DRY_RUN_PREFIX):
                counters.dry_run += 1
            case None:
                counters.admitted += 1
                group = Group(event.trigger, event.trace)
                owner = self._admission.owner(event.client)
                self._fire(
                    group,
                    event.laterals,
                    event.why,
                    event.source,
                    owner,
                    event.fired_ns,
                    now_ns,
                    event.client,
                )

    def _fire(
        self,
        group: Group,
        laterals: tuple[TraceId, ...],
        why: str,
        source: Source,
        owner: Owner,
        fired_ns: int,
        now_ns: int,
        client: int = NO_CLIENT,
    ) -> None:
        counters = self._holdings.count(group.trigger)
        if group in self._owed.abandoned_groups:
            counters.merged += 1
            return
        known = self._holdings.groups.get(group)
        told = known.fired.laterals if known is not None and known.fired is not None else ()
        others = dict.fromkeys((*told, *laterals))
        others.pop(group.primary, None)
        self._holdings.want((group.primary, *others), owner, now_ns)
        # What has so many triggers that it cannot join is not told of either, so that the
        # coordinator expects nothing of it for this one.
        joins = self._holdings.may_join(group.primary, group)
        named = tuple(t for t in others if joins and self._holdings.may_join(t, group))
        named = named[: self._config.limits.laterals_max]
        counters.laterals_cut += len(others) - len(named)
        if not joins or (known is not None and {group.primary, *named} <= set(known.traces)):
            counters.merged += 1
            return
        held = known or self._holdings.group(group, now_ns)
        if held is None:
            self.counters.firings_dropped += 1
            return
        if held.fired is not None:
            why, source, client = held.fired.why, held.fired.source, held.fired.process
            fired_at_ns = held.fired.fired_at_ns
        else:
            fired_at_ns = fired_ns + self._realtime_offset_ns
        suppressed = self._admission.take_suppressed(held.queue)
        held.fired = TriggerFired(group, named, why, source, fired_at_ns, suppressed, client)
        held.acknowledged = False
        self._owed.firing(group)
        unknown = self._holdings.collect(held, (group.primary, *named), owner, now_ns)
        # What was told of the others stands; if it is released meanwhile, the coordinator is
        # asked again once it has the firing.
        for trace in dict.fromkeys((group.primary, *unknown)):
            self._owed.answer(trace)

    def _on_snapshot(self, order: Snapshot, now_ns: int) -> None:
        why = f"of the last {order.age_ns / 1e9:g} s" + (
            f" of {order.service}" if order.service else ""
        )
        why = cut_utf8(why, WHY_BYTES_MAX)
        for group in self._snapshots.ordered(order):
            self._fire(group, (), why, Source.OPERATOR, Asker.COORDINATOR, now_ns, now_ns)

    def _on_collect(self, message: Collect, now_ns: int) -> None:
        """A remote trigger: never limited, and every trace is answered."""
        if message.group in self._owed.abandoned_groups:
            self._owed.refusal(message.traces, SliceFlags.ABANDONED)
            return
        self._holdings.want(message.traces, Asker.COORDINATOR, now_ns)
        group = None
        # A group that none of them can join would be held for nothing: all of them are held
        # already, and each is answered by what there is of it.
        if any(self._holdings.may_join(trace, message.group) for trace in message.traces):
            group = self._holdings.group(message.group, now_ns)
        if group is None:
            self._owed.refusal(message.traces, SliceFlags.STORE_FULL)
            return
        self._holdings.collect(group, message.traces, Asker.COORDINATOR, now_ns)
        for trace in message.traces:
            self._owed.answer(trace)

    def _on_drop(self, group: Group, now_ns: int) -> None:
        if group in self._owed.abandoned_groups:
            self._owed.abandonment_known(group)
            return
        self._holdings.count(group.trigger).dropped_remote += 1
        self._abandon(group, unanswered=False, now_ns=now_ns)

    def _on_release(self, trace: TraceId, now_ns: int) -> None:
        held = self._holdings.traces.get(trace)
        if held is None or held.searching:
            # It is told what the search finds, and says so again if it needs none of it.
            return
        if held.held_bytes > 0:
            # New bytes, of which the coordinator will hear and judge again; or it has
            # them all, and said so on the other stream: ask it again when that is here.
            held.release_early = True
            return
        # It may not know yet of a group that needs the trace: ask it again then.
        unknown = [group for group in held.groups if not group.acknowledged]
        for group in unknown:
            group.release_deferred = True
        if not unknown:
            self._holdings.release(held, now_ns)

    def _on_slice_changed(self, trace: TraceId, now_ns: int) -> HeldTrace | None:
        held = self._holdings.changed(trace, now_ns)
        if held is not None:
            self._owed.status(trace)
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
        self._owed.forget(self._holdings.expire(now_ns))

    def _abandon(self, group: Group, *, unanswered: bool, now_ns: int) -> None:
        if unanswered:
            self._owed.abandonment(group)
        else:
            self._owed.abandonment_known(group)
        held = self._holdings.groups.get(group)
        if held is None:
            return
        traces = tuple(held.traces)
        self._holdings.abandon(held, now_ns)
        # The coordinator may have forgotten these traces with the group. It must hear of them
        # again before another of their groups fires.
        for trace in traces:
            if trace in self._holdings.traces:
                self._owed.answer(trace)
