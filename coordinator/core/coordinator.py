# SPDX-License-Identifier: Apache-2.0
"""The coordinator's core: from a fired trigger to a verdict that stands.

Sans-IO: facts come in by the ``on_*`` methods with the time, outputs are
fetched by the ``take_*`` methods. ``now_ns`` is CLOCK_MONOTONIC, ``realtime_ns``
Unix time. Sessions are Control streams and streams are Slices streams, numbered
by the shell, which never uses a number twice.

The rules:

1. Nothing is acknowledged before it is durable: a trigger, a byte of a slice,
   an abandonment, a verdict. ``on_durable`` tells; what waits for it is an
   effect in the outbox.
2. Everything can be repeated, by any side, at any time.
3. A restart loses what was not durable, and only that. Nodes repeat it.
4. Every wait has an end, every table a bound.

A trace goes through these states. "News" is whatever changes what is known of
it: a trigger, a crumb to a new node, an answer, bytes.

    state      what happened                              next      written, said
    -          TriggerFired, or a SliceStatus or chunk    OPEN
               that holds something
    OPEN       news                                       OPEN      (Collects)
    OPEN       provisional_ns passed, with news           OPEN      PutVerdict: provisional
    OPEN       no part is open, and quiet for quiet_ns    SETTLED   PutVerdict
    OPEN       no news for missing_linger_ns              RELEASED  PutVerdict, PutReleased
    SETTLED    news                                       OPEN
    SETTLED    no news for linger_ns, or for              RELEASED  PutReleased, then
               missing_linger_ns where something                    Release to its nodes
               missing may still come
    RELEASED   news                                       OPEN      PutReleased: not
    RELEASED   no news for linger_ns                      CLOSED
    CLOSED     bytes                                      OPEN      PutReleased: not (late)
    any but    too many traces, or too much evidence,     CLOSED    PutVerdict, PutReleased,
    CLOSED     and it has been without news the longest             then Release

OPEN, SETTLED and RELEASED traces are in memory with all that was read of their
slices; of a CLOSED one only its outcome is. A PutVerdict is written only if
something in it changed, and then its version is one higher.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

from coordinator.core.assembly import Assembly
from coordinator.core.clock import PROBES_AT_CONNECT, ClockOffset
from coordinator.core.config import NS_PER_S, CoordinatorConfig
from coordinator.core.evidence import Evidence
from coordinator.core.nodes import Node, Nodes
from coordinator.core.outbox import BytesDurable, Closed, Outbox, Say
from coordinator.core.policy import Policies
from coordinator.core.records import (
    PutAbandoned,
    PutNode,
    PutReleased,
    PutStatus,
    PutTrigger,
    PutVerdict,
    PutVerdictAgain,
    StoredSlice,
    StoredTrace,
    Write,
)
from coordinator.core.snapshots import Snapshots
from coordinator.core.timers import Timers
from coordinator.core.trace import Part, PartState, Trace
from coordinator.core.traversal import Traversal
from coordinator.core.verdict import (
    ELSEWHERE,
    HEALABLE,
    UNJUDGED,
    ReasonKind,
    Verdict,
    deleted,
    given_up,
    judge,
)
from counting.histogram import Histogram
from counting.trigger_names import TriggerNames
from protocol.hashing import node_id
from protocol.messages import (
    NO_POLICY,
    RECOVERED_WHY,
    Abandoned,
    ClockProbe,
    ClockReply,
    CoordinatorMessage,
    Drop,
    Group,
    Hello,
    NodeId,
    NodeMessage,
    Policy,
    Refused,
    Release,
    SliceChunk,
    SliceFlags,
    SliceReply,
    SliceStatus,
    SnapshotStatus,
    TraceId,
    TriggerAck,
    TriggerFired,
    Unknown,
    Welcome,
)
from protocol.verdicts import VerdictKind
from protocol.versions import OURS, Agreed, Versions

__all__ = [
    "CoordinatorConfig",
    "CoordinatorCore",
    "CoordinatorCounters",
    "CoordinatorFigures",
    "NodeView",
]


# 20 ms is what following a request over ten nodes shall take, 0.2 s the quiet after
# which it is judged, 300 s for how long what is missing is waited for.
_DURATION_BOUNDS_S = (
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)


@dataclass(slots=True)
class TriggerCounters:
    """Of one trigger name: reports by nodes, repetitions included; and traces that it collected.

    A trace of several names counts once for each.
    """

    reports: int = 0
    traces: int = 0


@dataclass(slots=True)
class CoordinatorCounters:
    """Since start; they only rise. Each is a fact that an operator may have to act on.

    ``verdicts`` counts every version of a trace's verdict by its kind, ``reasons`` those of
    them that have a reason of that kind. ``triggers`` is the sum of what ``by_trigger`` has.
    """

    hellos_refused: int = 0
    triggers: int = 0
    groups_abandoned: int = 0
    bytes_over_slice_max: int = 0  # of slices, dropped for slice_bytes_max
    traces_finished_early: int = 0  # traces, evidence or bytes over their bound
    traces_late: int = 0  # bytes came for a closed trace
    chunks_unwelcome: int = 0  # on a stream that may not send
    chunks_over_credit: int = 0
    chunks_with_gap: int = 0
    clock_replies_refused: int = 0
    messages_unexpected: int = 0
    messages_unknown: int = 0
    verdicts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VerdictKind, 0))
    reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ReasonKind, 0))
    by_trigger: dict[str, TriggerCounters] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CoordinatorFigures:
    """How things stand.

    ``traces_open`` wait for an answer, bytes, or the end of what is written; ``traces_settled`` have
    their verdict and may still grow; ``traces_closed`` are remembered by their outcome.
    ``memory_bytes`` is undurable bytes and credit that is out; ``assembly_bytes`` what is stored of
    the traces that are not closed.
    """

    nodes_known: int
    nodes_connected: int
    traces_open: int
    traces_settled: int
    traces_closed: int
    groups: int
    memory_bytes: int
    undurable_bytes: int
    assembly_bytes: int
    answers_waiting: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as an operator sees it."""

    node: str
    id: NodeId
    connected: bool
    peer: str
    addresses: tuple[str, ...]
    clock: ClockOffset | None
    agreed: Agreed | None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What is remembered of a closed trace: its slices' epochs and lengths, and the verdict.

    ``stored_bytes`` as in Trace.
    """

    slices: dict[NodeId, tuple[int, int]]
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
        if any(length for _, length in self.slices.values()):
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
    def verdict_if_deleted(self) -> Verdict | None:
        """What is true of the trace if the store has nothing of it any more."""
        if self.verdict is None or not self.verdict.bytes:
            return self.verdict  # it speaks of no bytes
        return deleted(self.verdict)


def _slice_of(outcome: _Outcome | None, node: Node) -> tuple[int, int]:
    """Epoch and length of what a closed trace had from that node; zeros without any."""
    return (0, 0) if outcome is None else outcome.slices.get(node.id, (0, 0))


def _may_add(status: SliceStatus, epoch: int, length: int) -> bool:
    """Whether a node may have what a released slice of that epoch and length had not.

    Collected again, a slice is what is left in the pool. All of it is there unless some
    was evicted, so no more bytes are nothing new; what was evicted was collected before,
    so any bytes are what was written since.
    """
    evicted = SliceFlags.EVICTED in status.flags and status.epoch not in (0, epoch)
    return status.bytes > (0 if evicted else length)


# To judge a trace takes some 0.2 us for each of its items, 1 us where slices were begun anew, and
# whoever writes to it again can have it judged again. So a large one is judged the later, and the
# eight largest that fit in memory take a tenth of a core. One of so many items takes some 4 ms,
# and is as quick as any.
_ITEMS_JUDGED_AT_ONCE = 16384
_QUIET_NS_PER_ITEM = 20_000


# What a firing takes of the store: most of it its laterals, once in it and once
# each as members of its group.
FIRING_BYTES = 2048


class CoordinatorCore:
    """One coordinator. See the module; ``counters`` may be read at any time."""

    def __init__(
        self,
        config: CoordinatorConfig,
        incarnation: int,
        recovered: Iterable[StoredTrace],
        known_nodes: Iterable[PutNode],
        now_ns: int,
        versions: Versions = OURS,
        policy: Policy = NO_POLICY,
    ) -> None:
        """Go on from what an earlier coordinator left in the store.

        ``recovered`` is read once, in order: it may load its traces one by one,
        the youngest last.
        """
        self.counters = CoordinatorCounters()
        self.traversal_s = Histogram(_DURATION_BOUNDS_S)
        """From the first report of a trace to the last that was new, of those with a final verdict."""
        self.verdict_s = Histogram(_DURATION_BOUNDS_S)
        """From the first report of a trace to its first final verdict."""
        self._config = config
        self._incarnation = incarnation
        self._outbox = Outbox()
        self._nodes = Nodes(config.nodes_max, versions)
        self._trigger_names = TriggerNames(config.trigger_names_max)
        self._traversal = Traversal(config, self._nodes, self._outbox)
        self._assembly = Assembly(config, self._nodes, self._outbox)
        self.snapshots = Snapshots(self._nodes, self._outbox)
        self._policies = Policies(policy, self._nodes, self._outbox)
        self._traces: OrderedDict[TraceId, Trace] = OrderedDict()  # by last news
        self._closed: OrderedDict[TraceId, _Outcome] = OrderedDict()
        self._closing: dict[TraceId, int] = {}  # while that is not durable
        self._closings = 0
        self._closed_items = 0  # of all outcomes
        self._items = self._stored_bytes = 0  # of the traces in memory
        self._trace_timers: Timers[TraceId] = Timers()
        self._probe_timers: Timers[NodeId] = Timers()

        for known in known_nodes:
            self._nodes.remember(known.node, known.addresses)
        fired: list[Iterable[PutTrigger]] = []
        for stored in recovered:
            self._recover(stored, now_ns)
            fired.append(stored.triggers)
        for triggers in fired:
            for trigger in triggers:
                self._recover_trigger(trigger, now_ns)

    # ---------------------------------------------------------- facts in

    def on_node_connected(
        self, session: int, hello: Hello, peer: str, now_ns: int
    ) -> Refused | None:
        """A Control stream opened with a Hello. ``peer``: its address, in words.

        What the node is told if it is not taken in.
        """
        before = self._nodes.named(hello.node)
        replaced = before.session if before is not None else None
        node = self._nodes.connect(session, hello, peer)
        if isinstance(node, str):
            self.counters.hellos_refused += 1
            refused = Refused(node)
            self._outbox.say(session, refused)
            return refused
        if replaced is not None:
            self._traversal.lost(node)
            self._outbox.forget_session(replaced)
            self._outbox.say(replaced, Refused(f"replaced by a new connection from {peer}"))
        restarted = node.incarnation is not None and node.incarnation != hello.incarnation
        node.incarnation = hello.incarnation
        assert node.agreed is not None
        self._outbox.say(session, Welcome(self._incarnation, node.agreed))
        self._policies.connected(node)
        if before is None or node.addresses != hello.addresses:
            self._nodes.move(node, hello.addresses)
            self._outbox.write(PutNode(node.name, node.addresses))
        for trace in self._traversal.connected(node, restarted=restarted, now_ns=now_ns):
            self._news(trace, now_ns)
        for stream in self._assembly.hello(node):
            self._resume(stream, node)
        node.probes_left = PROBES_AT_CONNECT
        self._probe(node, now_ns)
        return None

    def on_node_lost(self, session: int, now_ns: int) -> None:
        """A Control stream ended, for whatever reason."""
        self._outbox.forget_session(session)
        node = self._nodes.disconnect(session)
        if node is not None:
            self._traversal.lost(node)
            self.snapshots.lost(node)
            self.snapshots.go_on(self._traces)
            self._probe_timers.cancel(node.id)

    def on_node_message(
        self, session: int, message: NodeMessage | Unknown, now_ns: int, realtime_ns: int
    ) -> None:
        """A message after the Hello."""
        node = self._nodes.of_session(session)
        if node is None:
            self.counters.messages_unexpected += 1
            return
        match message:
            case TriggerFired():
                self._on_trigger(session, node, message, now_ns)
            case SliceStatus():
                self._on_status(node, message, now_ns)
            case Abandoned():
                self._on_abandoned(session, node, message.group, now_ns)
            case ClockReply():
                self._on_clock_reply(node, message, now_ns, realtime_ns)
            case SnapshotStatus():
                self.snapshots.on_status(node, message)
            case Hello():
                self.counters.messages_unexpected += 1
            case Unknown():
                self.counters.messages_unknown += 1
            case _:
                assert_never(message)
        self._settle()
        self.snapshots.go_on(self._traces)

    def on_slices_connected(self, stream: int, node: str, incarnation: int, now_ns: int) -> None:
        """A Slices stream opened. It gets credit once its node has said Hello."""
        sender = self._assembly.connect(stream, node, incarnation)
        if sender is not None:
            self._resume(stream, sender)

    def on_slices_lost(self, stream: int, now_ns: int) -> None:
        self._assembly.lost(stream)

    def on_chunk(self, stream: int, chunk: SliceChunk, now_ns: int) -> None:
        """Bytes of a slice."""
        self._on_chunk(stream, chunk, now_ns)
        self._settle()

    def on_durable(self, token: int, now_ns: int) -> None:
        """All writes up to and including the token's are durable."""
        self._outbox.durable(token)
        self._settle()

    def on_tick(self, now_ns: int) -> None:
        """Time passed: see next_wakeup_ns."""
        while (identity := self._probe_timers.pop(now_ns)) is not None:
            self._probe(self._nodes.by_id[identity], now_ns)
        while (trace_id := self._trace_timers.pop(now_ns)) is not None:
            self._review(self._traces[trace_id], now_ns)
        self.snapshots.go_on(self._traces)

    # ----------------------------------------------------------- outputs

    def take_control(self) -> list[tuple[int, CoordinatorMessage]]:
        """(session, message), in order. After a Refused the session's stream ends."""
        return self._outbox.take_control()

    def take_slice_replies(self) -> list[tuple[int, SliceReply]]:
        """(stream, reply)."""
        return self._outbox.take_replies(self._assembly.credit.take_grants())

    def take_writes(self) -> list[Write]:
        """What to make durable, in order; then ``on_durable``."""
        return self._outbox.take_writes()

    def next_wakeup_ns(self, now_ns: int) -> int | None:
        """When on_tick may do something without a new fact."""
        times = [self._trace_timers.next_ns(), self._probe_timers.next_ns()]
        due = [time for time in times if time is not None]
        return max(now_ns, min(due)) if due else None

    def nodes(self, now_ns: int) -> list[NodeView]:
        """All known nodes, by name."""
        views = [
            NodeView(
                node.name,
                node.id,
                node.session is not None,
                node.peer,
                node.addresses,
                node.clock.estimate(now_ns),
                node.agreed,
            )
            for node in self._nodes
        ]
        return sorted(views, key=lambda view: view.node)

    def reconfigure(self, config: CoordinatorConfig) -> None:
        """Go on with other times and bounds, each from when it is next looked at."""
        self._config = config
        self._traversal.reconfigure(config)
        self._assembly.reconfigure(config)

    def set_policy(self, policy: Policy) -> None:
        """What nodes shall record from now on."""
        self._policies.change(policy)

    def figures(self) -> CoordinatorFigures:
        """How things stand."""
        settled = sum(trace.settled or trace.released for trace in self._traces.values())
        return CoordinatorFigures(
            nodes_known=len(self._nodes.by_id),
            nodes_connected=sum(node.session is not None for node in self._nodes),
            traces_open=len(self._traces) - settled,
            traces_settled=settled,
            traces_closed=len(self._closed),
            groups=len(self._traversal.groups),
            memory_bytes=self.memory_bytes,
            undurable_bytes=self._assembly.credit.undurable_bytes,
            assembly_bytes=self._stored_bytes,
            answers_waiting=self.waiting_effects,
        )

    @property
    def memory_bytes(self) -> int:
        """Slice bytes that are not durable, and credit that is out."""
        return self._assembly.credit.used_bytes

    @property
    def waiting_effects(self) -> int:
        """What is to be said when more is durable: a node can make more of it at any rate."""
        return self._outbox.waiting_effects

    # ---------------------------------------------------------- messages

    def _on_trigger(self, session: int, node: Node, fired: TriggerFired, now_ns: int) -> None:
        group = fired.group
        self.snapshots.on_fired(node, group)
        name = self._trigger_names.key(group.trigger)
        counters = self.counters.by_trigger.setdefault(name, TriggerCounters())
        self.counters.triggers += 1
        counters.reports += 1
        state = self._traversal.groups.get(group)
        told = state.fired if state is not None else {}
        known = bool(told) or group.primary in self._closed or group in self._traversal.abandoned
        adds_nothing = fired.why == RECOVERED_WHY and known
        is_new = not adds_nothing and told.get(node.name) != hash(fired)
        if is_new:
            self._outbox.write(PutTrigger(node.name, fired))
        self._outbox.after_writes(Say(session, TriggerAck(group)))
        if group in self._traversal.abandoned:
            self._outbox.say(session, Drop(group))
        else:
            for trace_id in (group.primary, *fired.laterals):
                # A closed trace stays as it is, but for what was written since.
                outcome = self._closed.get(trace_id)
                if outcome is None or outcome.is_empty:
                    trace = self._traces.get(trace_id) or self._begin(trace_id, now_ns)
                    named = self._is_named(trace, name)
                    if self._traversal.fired(trace, group, node, now_ns):
                        self._news(trace, now_ns)
                        counters.traces += not named
            state = self._traversal.groups.get(group)
            if state is not None and not adds_nothing:
                state.fired[node.name] = hash(fired)
        if is_new:
            primary = self._traces.get(group.primary)
            if primary is not None:
                self._stored(primary, FIRING_BYTES)
            for trace_id in (group.primary, *fired.laterals):
                self._put_released_unless_here(trace_id, group)
        self._make_room(now_ns)

    def _is_named(self, trace: Trace, name: str) -> bool:
        """Whether a trace has a trigger that counts under this name."""
        return any(self._trigger_names.key(group.trigger) == name for group in trace.groups)

    def _on_status(self, node: Node, status: SliceStatus, now_ns: int) -> None:
        status = self._within_bounds(status)
        trace = self._traces.get(status.trace)
        if trace is None:
            outcome = self._closed.get(status.trace)
            epoch, known = _slice_of(outcome, node)
            adds = _may_add(status, epoch, known)
            if not adds and (outcome is not None or not status.open_handles):
                self._release_again(status.trace, node)
                return
            trace = self._begin(status.trace, now_ns)
        elif trace.released:
            known_part = trace.parts.get(node.id)
            if known_part is not None and not _may_add(
                status, known_part.epoch, known_part.received
            ):
                self._release_again(status.trace, node)
                return
        part = self._traversal.part_of(trace, node, now_ns)
        was_restarted = part.restarted
        begins = status.bytes > 0
        kept = not self._meet(trace, part, status.epoch, begins=begins, told=True)
        news = self._traversal.answered(trace, part, node, status, now_ns, kept=kept)
        if news or part.restarted != was_restarted:
            self._put_status(node, part, now_ns)
            self._news(trace, now_ns)
            self._make_room(now_ns)

    def _on_chunk(self, stream: int, chunk: SliceChunk, now_ns: int) -> None:
        node = self._assembly.sender(stream)
        if node is None:
            self.counters.chunks_unwelcome += 1
            return
        if not self._assembly.credit.arrived(stream, len(chunk.data)):
            self.counters.chunks_over_credit += 1
            return
        end = chunk.offset + len(chunk.data)
        trace = self._traces.get(chunk.trace)
        if trace is None:
            outcome = self._closed.get(chunk.trace)
            epoch, known = _slice_of(outcome, node)
            same = chunk.epoch == epoch
            if end <= known or (same and known >= self._config.slice_bytes_max):
                upto = max(known, end) if same else end
                self._assembly.decline(stream, node, chunk, upto)
                return
            trace = self._begin(chunk.trace, now_ns)
            self._news(trace, now_ns)
        part = self._traversal.part_of(trace, node, now_ns)
        was_restarted = part.restarted
        begins = chunk.offset == 0
        # As for a closed trace: no longer than what is here, so it says nothing new.
        closed_on = trace.released and part.is_whole and end <= part.received
        closed_on = closed_on and chunk.epoch != part.epoch
        kept = closed_on or not self._meet(trace, part, chunk.epoch, begins=begins, told=False)
        if part.restarted != was_restarted:
            self._put_status(node, part, now_ns)
            self._news(trace, now_ns)
        if kept:
            self._assembly.decline(stream, node, chunk, end)
            return
        if chunk.epoch != part.epoch:
            # Late, of a slice that was given up; or the next one, from its middle.
            self.counters.chunks_with_gap += not begins
            self._assembly.ignore(stream, chunk)
            return
        over = end - max(chunk.offset, self._config.slice_bytes_max)
        self.counters.bytes_over_slice_max += max(0, over)
        gap = chunk.offset > part.received and over <= 0
        self.counters.chunks_with_gap += gap
        fresh = self._assembly.take(stream, node, trace, part, chunk)
        if fresh:
            named = trace.evidence.add(node.id, fresh)
            self._stored(trace, len(fresh))
            self._traversal.named(trace, named, node.name, now_ns)
            self._news(trace, now_ns)
            self._make_room(now_ns)

    def _within_bounds(self, status: SliceStatus) -> SliceStatus:
        """What a node says of its slice, as far as it is stored."""
        limit = self._config.slice_bytes_max
        if status.bytes <= limit:
            return status
        return replace(status, bytes=limit, flags=status.flags | SliceFlags.TRUNCATED)

    def _put_released_unless_here(self, trace_id: TraceId, group: Group) -> None:
        """What was just written concerns a trace that nobody waits for: the store may delete it."""
        if trace_id not in self._traces:
            self._put_verdict_again(trace_id, self._closed.get(trace_id), group)
            self._outbox.write(PutReleased(trace_id))

    def _put_verdict_again(
        self, trace_id: TraceId, outcome: _Outcome | None, group: Group | None = None
    ) -> None:
        """A trace came up again, or by an abandoned group: it may be all that the store has."""
        verdict = None
        if outcome is not None:
            verdict = outcome.verdict_if_deleted
        elif group is not None and (by := self._traversal.abandoned.get(group)) is not None:
            verdict = given_up(by)
        if verdict is not None:
            self._outbox.write(PutVerdictAgain(trace_id, verdict))

    def _meet(self, trace: Trace, part: Part, epoch: int, *, begins: bool, told: bool) -> bool:
        received = part.received
        met = self._assembly.meet(trace, part, epoch, begins=begins, told=told)
        self._stored(trace, part.received - received)
        return met

    def _stored(self, trace: Trace, count: int) -> None:
        """So many bytes more of a trace are stored, or will be."""
        trace.stored_bytes += count
        self._stored_bytes += count

    def _charge(self, trace: Trace) -> None:
        """Count what a trace takes of the memory now."""
        items = trace.items
        self._items += items - trace.charged_items
        trace.charged_items = items

    def _put_status(self, node: Node, part: Part, now_ns: int) -> None:
        if part.status is not None:
            clock = node.clock.estimate(now_ns)
            self._outbox.write(PutStatus(node.name, part.status, clock, part.restarted))

    def _on_abandoned(self, session: int, node: Node, group: Group, now_ns: int) -> None:
        if group not in self._traversal.abandoned:
            self.counters.groups_abandoned += 1
            self._outbox.write(PutAbandoned(group, node.name))
            lost = self._traversal.abandon(group, node.name)
            self._put_released_unless_here(group.primary, group)
            for trace in lost:
                if self._is_coherent(trace):
                    # Everything is here: that a node gave up the rest is no loss.
                    trace.abandoned_by = None
                    self._release(trace, now_ns)
                else:
                    self._news(trace, now_ns)
        self._outbox.after_writes(Say(session, Drop(group)))

    def _on_clock_reply(self, node: Node, reply: ClockReply, now_ns: int, realtime_ns: int) -> None:
        taken = node.clock.answer(
            reply.number, reply.received_ns, reply.sent_ns, now_ns, realtime_ns
        )
        if not taken:
            self.counters.clock_replies_refused += 1
        elif node.probes_left:
            self._probe(node, now_ns)

    def _probe(self, node: Node, now_ns: int) -> None:
        if node.session is None:
            return
        node.probes_left = max(0, node.probes_left - 1)
        self._outbox.say(node.session, ClockProbe(node.clock.probe(now_ns)))
        self._probe_timers.set(node.id, now_ns + self._config.clock_probe_interval_ns)

    def _resume(self, stream: int, node: Node) -> None:
        """A stream may send from now on: say from where."""
        for trace, part in self._traversal.traces_of(node):
            self._assembly.resume(stream, node, trace, part)

    def _settle(self) -> None:
        """What waited for durability, and need not any more."""
        for effect in self._outbox.settle():
            match effect:
                case Say():
                    if self._nodes.of_session(effect.session) is not None:
                        self._outbox.say(effect.session, effect.message)
                case BytesDurable():
                    self._assembly.durable(effect, self._traces.get(effect.trace))
                case Closed():
                    self._on_closed(effect)
                case _:
                    assert_never(effect)

    def _release_again(self, trace_id: TraceId, node: Node) -> None:
        """A node mentions what it may forget."""
        if trace_id not in self._closing and node.session is not None:
            self._outbox.say(node.session, Release(trace_id))

    def _on_closed(self, closed: Closed) -> None:
        if self._closing.get(closed.trace) != closed.number:
            return  # there were news meanwhile
        del self._closing[closed.trace]
        for identity in closed.nodes:
            node = self._nodes.by_id.get(identity)
            if node is not None and node.session is not None:
                self._outbox.say(node.session, Release(closed.trace))

    # ------------------------------------------------- a trace's way through

    def _begin(self, trace_id: TraceId, now_ns: int) -> Trace:
        """A trace that is not in memory; a closed one goes on from its outcome."""
        self._make_room(now_ns, one_more=True)
        evidence = Evidence(self._config.evidence_per_trace_max)
        provisional_at_ns = now_ns + self._config.provisional_ns
        trace = Trace(trace_id, evidence, now_ns, provisional_at_ns, reported_ns=now_ns)
        self._traces[trace_id] = trace
        outcome = self._closed.pop(trace_id, None)
        if outcome is not None:
            self._closed_items -= outcome.items
            self._stored(trace, outcome.stored_bytes)
            self._write_reopened(trace_id)
            self._put_verdict_again(trace_id, outcome)
            if outcome.is_empty:
                trace.verdict = outcome.verdict
            else:
                self.counters.traces_late += 1
                self._go_on(trace, outcome, now_ns)
        return trace

    def _go_on(self, trace: Trace, outcome: _Outcome, now_ns: int) -> None:
        """Take up a closed trace, whose evidence is gone."""
        trace.late = True
        trace.reported_ns = None
        trace.evidence.give_up()
        verdict = outcome.verdict
        if verdict is not None:
            trace.verdict = verdict
            trace.reasons_before = tuple(
                reason
                for reason in verdict.reasons
                if reason.kind not in (ReasonKind.LATE, ReasonKind.OPEN)
            )
            trace.evidence.span_count = verdict.span_count
            trace.evidence.start_ns = verdict.start_ns
            trace.evidence.end_ns = verdict.end_ns
        for identity, (epoch, length) in outcome.slices.items():
            part = self._traversal.add_stored(trace, identity, now_ns)
            part.state = PartState.ANSWERED
            part.deadline_ns = None
            part.status = SliceStatus(trace.id, held=True, bytes=length, epoch=epoch)
            part.epoch = epoch
            part.received = length
            if length:
                self._outbox.after_writes(BytesDurable(trace.id, identity, epoch, length, 0))

    def _news(self, trace: Trace, now_ns: int) -> None:
        """Something changed: judge again, but not before it is quiet."""
        self._charge(trace)
        if trace.released:
            trace.released = False
            self._write_reopened(trace.id)
        if trace.settled:
            trace.settled = False
            trace.provisional_at_ns = now_ns + self._config.provisional_ns
        trace.last_news_ns = now_ns
        self._traces.move_to_end(trace.id)
        self._trace_timers.set_earlier(trace.id, now_ns + self._quiet_ns(trace))

    def _quiet_ns(self, trace: Trace) -> int:
        """For how long nothing of a trace may come before it is judged."""
        more = max(0, trace.charged_items - _ITEMS_JUDGED_AT_ONCE)
        return self._config.quiet_ns + more * _QUIET_NS_PER_ITEM

    def _review(self, trace: Trace, now_ns: int) -> None:
        """Do what is due, and come back when the next thing is."""
        config = self._config
        self._traversal.overdue(trace, now_ns)
        if trace.released:
            due_ns = trace.last_news_ns + config.linger_ns
            if now_ns >= due_ns:
                self._forget(trace)
                return
        elif trace.settled:
            due_ns = trace.last_news_ns + self._linger_ns(trace)
            if now_ns >= due_ns:
                self._release(trace, now_ns)
                return
        elif not trace.is_open and now_ns >= trace.last_news_ns + self._quiet_ns(trace):
            trace.settled = True
            self._judge(trace, final=True)
            self._time(trace, now_ns)
            due_ns = trace.last_news_ns + self._linger_ns(trace)
        elif now_ns >= trace.last_news_ns + config.missing_linger_ns:
            trace.settled = True
            self._judge(trace, final=True)
            self._time(trace, now_ns)
            self._release(trace, now_ns)
            return
        else:
            due_ns = self._review_open(trace, now_ns)
        self._trace_timers.set(trace.id, max(due_ns, now_ns + 1))

    def _review_open(self, trace: Trace, now_ns: int) -> int:
        """Something is open, or news just came; when to look again."""
        config = self._config
        due = [trace.last_news_ns + config.missing_linger_ns]
        due += [p.deadline_ns for p in trace.parts.values() if p.deadline_ns is not None]
        if not trace.is_open:
            due.append(trace.last_news_ns + self._quiet_ns(trace))
        if now_ns >= trace.provisional_at_ns:
            self._judge(trace, final=False)
            trace.provisional_at_ns = now_ns + config.provisional_ns
        if trace.last_news_ns > trace.provisional_at_ns - config.provisional_ns or (
            trace.verdict is None or trace.verdict.kind is not VerdictKind.PROVISIONAL
        ):
            due.append(trace.provisional_at_ns)
        return min(due)

    def _judge(self, trace: Trace, *, final: bool) -> None:
        verdict = judge(trace, self._nodes, final=final)
        if verdict != trace.verdict:
            trace.verdict = verdict
            self.counters.verdicts[verdict.kind] += 1
            for kind in {reason.kind for reason in verdict.reasons}:
                self.counters.reasons[kind] += 1
            self._charge(trace)
            self._outbox.write(PutVerdict(trace.id, verdict))

    def _time(self, trace: Trace, now_ns: int) -> None:
        """Count how long it took from the first report to here; once a trace."""
        if trace.reported_ns is not None:
            self.traversal_s.observe((trace.last_news_ns - trace.reported_ns) / NS_PER_S)
            self.verdict_s.observe((now_ns - trace.reported_ns) / NS_PER_S)
            trace.reported_ns = None

    def _linger_ns(self, trace: Trace) -> int:
        """How long a settled trace may still get news."""
        assert trace.verdict is not None
        if trace.abandoned_by is None and not trace.late:
            parts = trace.parts.values()
            if any(part.lost for part in parts):
                # It came back and says nothing: lost, or slow.
                return self._config.missing_linger_ns
            away = any(not self._nodes.is_connected(part.node) for part in parts)
            for reason in trace.verdict.reasons:
                if reason.kind in HEALABLE or (away and reason.kind in ELSEWHERE):
                    return self._config.missing_linger_ns
        return self._config.linger_ns

    def _release(self, trace: Trace, now_ns: int) -> None:
        """Close it in the store; then its nodes may forget it."""
        trace.released = True
        trace.last_news_ns = now_ns
        self._write_released(trace)
        self._trace_timers.set(trace.id, now_ns + self._config.linger_ns)

    def _write_released(self, trace: Trace) -> None:
        # Of an abandoned trace they hold nothing; they were told to drop it.
        told = () if trace.abandoned_by is not None else tuple(trace.parts)
        self._closings += 1
        self._closing[trace.id] = self._closings
        effect = Closed(trace.id, told, self._closings)
        self._outbox.write(PutReleased(trace.id, released=True), effect)

    def _write_reopened(self, trace_id: TraceId) -> None:
        self._closing.pop(trace_id, None)
        self._outbox.write(PutReleased(trace_id, released=False))

    def _forget(self, trace: Trace) -> None:
        """Only its outcome stays in memory."""
        self._remember(
            trace.id,
            _Outcome(
                {part.node: (part.epoch, part.received) for part in trace.parts.values()},
                trace.verdict,
                trace.stored_bytes,
            ),
        )
        self._items -= trace.charged_items
        self._stored_bytes -= trace.stored_bytes
        self._traversal.remove(trace)
        self._trace_timers.cancel(trace.id)
        del self._traces[trace.id]

    def _remember(self, trace_id: TraceId, outcome: _Outcome) -> None:
        config = self._config
        self._closed[trace_id] = outcome
        self._closed_items += outcome.items
        while len(self._closed) > config.closed_max or self._closed_items > config.evidence_max:
            _, forgotten = self._closed.popitem(last=False)
            self._closed_items -= forgotten.items

    def _make_room(self, now_ns: int, *, one_more: bool = False) -> None:
        """Close the traces without news for longest, until all fit, and another one if need be."""
        limit = self._config.traces_max - one_more
        while self._traces and (
            len(self._traces) > limit
            or self._items > self._config.evidence_max
            or self._stored_bytes > self._config.assembly_bytes_max
        ):
            trace = next(iter(self._traces.values()))
            if not trace.released:
                self.counters.traces_finished_early += 1
                self._judge(trace, final=True)
                trace.released = True
                self._write_released(trace)
            self._forget(trace)

    @staticmethod
    def _is_coherent(trace: Trace) -> bool:
        """It is whole, by a verdict on all that is known of it."""
        return (
            trace.settled
            and trace.verdict is not None
            and trace.verdict.kind is VerdictKind.COHERENT
        )

    # ---------------------------------------------------------- recovery

    def _recover(self, stored: StoredTrace, now_ns: int) -> None:
        """Take in a trace of an earlier coordinator."""
        for abandoned in stored.abandoned:
            self._traversal.remember_abandoned(abandoned.group, abandoned.node)
        if stored.released:
            slices = {node_id(known.node): (known.epoch, known.length) for known in stored.slices}
            length = sum(known.length for known in stored.slices)
            self._remember(stored.trace, _Outcome(slices, stored.verdict, length))
            return
        trace = self._begin(stored.trace, now_ns)
        trace.reported_ns = None
        trace.verdict = stored.verdict
        for known in stored.slices:
            self._recover_slice(trace, known, now_ns)
        self._wait_for_nodes(trace, now_ns)
        self._make_room(now_ns)

    def _recover_trigger(self, trigger: PutTrigger, now_ns: int) -> None:
        group = trigger.fired.group
        for trace_id in (group.primary, *trigger.fired.laterals):
            if trace_id in self._closed:
                continue
            trace = self._traces.get(trace_id) or self._begin(trace_id, now_ns)
            trace.reported_ns = None
            part = self._traversal.add_stored(trace, node_id(trigger.node), now_ns)
            part.told[group] = True
            for other in trace.parts.values():
                # What is complete need not be asked again, but must hear of a Drop.
                if other.state is PartState.ANSWERED or group in self._traversal.abandoned:
                    other.told[group] = True
            self._traversal.join(trace, group)
            self._stored(trace, FIRING_BYTES * (trace_id == group.primary))
            self._wait_for_nodes(trace, now_ns)
        state = self._traversal.groups.get(group)
        if state is not None:
            state.fired[trigger.node] = hash(trigger.fired)

    def _recover_slice(self, trace: Trace, known: StoredSlice, now_ns: int) -> None:
        identity = node_id(known.node)
        part = self._traversal.add_stored(trace, identity, now_ns)
        part.restarted = known.restarted
        part.epoch = known.epoch
        status = known.status
        chunks = known.chunks
        if status is not None and status.bytes and status.epoch != known.epoch:
            # Given up for another slice, of which nothing is durable.
            part.epoch_before, part.epoch = known.epoch, status.epoch
            chunks = ()
        for chunk in chunks:
            part.received += len(chunk)
            named = trace.evidence.add(identity, chunk)
            self._traversal.named(trace, named, known.node, now_ns)
        part.durable = part.received
        self._stored(trace, part.received)
        if known.status is not None:
            part.status = self._within_bounds(known.status)
            if not part.is_due:
                part.state = PartState.ANSWERED
            self._traversal.named(trace, known.status.crumbs, known.node, now_ns)

    def _wait_for_nodes(self, trace: Trace, now_ns: int) -> None:
        """Nodes need a moment to find a new coordinator: none is overdue before."""
        for part in trace.parts.values():
            waits = part.state is not PartState.ANSWERED
            part.deadline_ns = now_ns + self._config.provisional_ns if waits else None
        self._news(trace, now_ns)
