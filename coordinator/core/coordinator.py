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

This file is what comes in and goes out. What fires is taken by the firings, which nodes are asked
is the traversal's, what becomes of a trace the lifecycle's, bytes are the assembly's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

from coordinator.core.assembly import Assembly
from coordinator.core.clock import PROBES_AT_CONNECT
from coordinator.core.closed import NOTHING, UnreadableError
from coordinator.core.config import CoordinatorConfig
from coordinator.core.figures import (
    CoordinatorCounters,
    CoordinatorFigures,
    NodeView,
)
from coordinator.core.firings import Firings
from coordinator.core.lifecycle import Lifecycle
from coordinator.core.memory import Memory
from coordinator.core.nodes import Forgotten, Node, Nodes, Reach
from coordinator.core.outbox import BytesDurable, Closed, Outbox, Say
from coordinator.core.policy import Policies
from coordinator.core.records import (
    DropNode,
    PutNode,
    PutStatus,
    StoredTrace,
    Write,
)
from coordinator.core.recovery import Recovery
from coordinator.core.snapshots import Snapshots
from coordinator.core.timers import Timers
from coordinator.core.trace import Part, Trace, TraceState
from coordinator.core.traversal import Traversal
from counting.histogram import Histogram
from protocol.messages import (
    CLOCK_STEPPED,
    NO_POLICY,
    Abandoned,
    ClockProbe,
    ClockReply,
    CoordinatorMessage,
    Drop,
    Group,
    Hello,
    NodeId,
    NodeMessage,
    NodeReport,
    Policy,
    Refused,
    SliceChunk,
    SliceReply,
    SliceStatus,
    SnapshotStatus,
    StatusQuestion,
    TraceId,
    TriggerFired,
    Unknown,
    Welcome,
)
from protocol.versions import OURS, Feature, Versions

__all__ = ["CoordinatorConfig", "CoordinatorCore"]


# As often nodes are looked at that are gone for too long.
EXPIRY_GRACE_NS = 60_000_000_000

# A node that sets its clock all the time is asked no more often.
CLOCK_STEPPED_PROBE_NS = 1_000_000_000


def _patience_ns(config: CoordinatorConfig) -> int:
    """So that what came of a trace is acknowledged long before its node may forget it."""
    return min(config.patience_ns, config.linger_ns // 4)


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
        stored: Callable[[TraceId], StoredTrace | None] = lambda _: None,
    ) -> None:
        """Go on from what an earlier coordinator left in the store, once ``recover()`` took it up.

        ``known_nodes`` come in the order in which they were put last. ``recovered`` is read
        once, in order: it may load its traces one by one, the youngest last. ``stored`` gives
        what is durable of a closed trace that is remembered no more, without its triggers and bytes, or
        raises UnreadableError. So does then whatever is said of such a trace, and nothing came of it.
        """
        self.counters = CoordinatorCounters()
        self._config = config
        self._incarnation = incarnation
        self._outbox = Outbox(_patience_ns(config))
        self._nodes = Nodes(config.nodes_max, versions)
        self._memory = Memory(config)
        self._traversal = Traversal(config, self._nodes, self._outbox, self._memory)
        self._assembly = Assembly(config, self._nodes, self._outbox)
        self.snapshots = Snapshots(self._nodes, self._outbox)
        self._policies = Policies(policy, self._nodes, self._outbox)
        self._lifecycle = Lifecycle(
            config,
            self._nodes,
            self._traversal,
            self._outbox,
            self._memory,
            self.counters,
            stored,
        )
        self._traces = self._lifecycle.traces
        self._firings = Firings(
            config,
            self._traversal,
            self._lifecycle,
            self._memory,
            self._outbox,
            self.snapshots,
            self.counters,
            now_ns,
        )
        self._probe_timers: Timers[NodeId] = Timers()
        self._status_asked: dict[int, NodeId] = {}
        self._reports: list[NodeReport] = []

        for known in known_nodes:
            gone_ns = now_ns - known.gone_ns
            self._nodes.remember(known.node, known.addresses, known.incarnation, gone_ns)
        self._expire_ns = now_ns + EXPIRY_GRACE_NS  # those that were connected come back sooner
        self._recovery: Recovery | None = Recovery(
            recovered,
            self._traversal,
            self._assembly,
            self._lifecycle,
            self._memory,
        )

    # ---------------------------------------------------------- recovery

    @property
    def recovering(self) -> bool:
        """Whether there is more to take up of what is stored. Until then no facts may come in."""
        return self._recovery is not None

    def recover(self, now_ns: int) -> None:
        """Take up a piece of what is stored, some tenths of a millisecond."""
        if self._recovery is not None and not self._recovery.step(now_ns):
            self._recovery = None
            self._lifecycle.make_room(now_ns)

    # ---------------------------------------------------------- facts in

    def on_node_connected(
        self, session: int, hello: Hello, peer: str, now_ns: int, identity: str = ""
    ) -> Refused | None:
        """A Control stream opened with a Hello. ``peer``: its address, ``identity``: its certificate's, in words.

        What the node is told if it is not taken in.
        """
        before = self._nodes.named(hello.node)
        replaced = before.session if before is not None else None
        while self._nodes.is_full_for(hello.node) and self._forget_node():
            pass
        node = self._nodes.connect(session, hello, peer, identity)
        if isinstance(node, str):
            self.counters.hellos_refused += 1
            refused = Refused(node)
            self._outbox.say(session, refused)
            return refused
        if replaced is not None:
            self._traversal.lost(node)
            self.snapshots.lost(node)
            self._outbox.forget_session(replaced)
            self._outbox.say(replaced, Refused(f"replaced by a new connection from {peer}"))
        last = node.stored_incarnation if node.incarnation is None else node.incarnation
        restarted = last is not None and last != hello.incarnation
        node.incarnation = hello.incarnation
        assert node.agreed is not None
        welcome = Welcome(self._incarnation, node.agreed, self._config.priority_seed)
        self._outbox.say(session, welcome)
        self._policies.connected(node)
        if last is None:
            node.stored_incarnation = hello.incarnation
        moved = before is None or node.addresses != hello.addresses
        if moved:
            self._nodes.move(node, hello.addresses)
        if moved or last is None:
            self._put_node(node)
        for trace in self._traversal.connected(node, restarted=restarted, now_ns=now_ns):
            self._lifecycle.news(trace, now_ns)
        for trace in self._traversal.moved(node, self._traces.values(), now_ns) if moved else ():
            self._lifecycle.news(trace, now_ns)
        self._put_incarnation(node)
        for stream in self._assembly.hello(node):
            self._resume(stream, node)
        node.probes_left = PROBES_AT_CONNECT
        self._probe(node, now_ns)
        self._lifecycle.make_room(now_ns)
        return None

    def forget_node(self, name: str) -> Forgotten:
        """Forget a node that an operator names, if it is gone and nothing in memory names it."""
        node = self._nodes.named(name)
        if node is None:
            return Forgotten.UNKNOWN
        if node.session is not None or node.stream is not None:
            return Forgotten.CONNECTED
        if self._traversal.has_part(node.id):
            return Forgotten.NEEDED
        self._nodes.forget(node)
        self._outbox.write(DropNode(name))
        return Forgotten.DONE

    def ask_status(self, name: str, number: int) -> Reach:
        """Ask a node how it is, by a number that is used once; ``take_reports`` has the answer."""
        node = self._nodes.named(name)
        if node is None:
            return Reach.UNKNOWN
        if node.session is None or node.agreed is None:
            return Reach.AWAY
        if Feature.STATUS not in node.agreed.features:
            return Reach.TOO_OLD
        self._status_asked[number] = node.id
        self._outbox.say(node.session, StatusQuestion(number))
        return Reach.ASKED

    def forget_question(self, number: int) -> None:
        """Nobody waits for the answer any more."""
        self._status_asked.pop(number, None)

    def take_reports(self) -> list[NodeReport]:
        """What nodes say of themselves that were asked."""
        reports, self._reports = self._reports, []
        return reports

    def _on_report(self, node: Node, report: NodeReport) -> None:
        if self._status_asked.get(report.number) != node.id:
            self.counters.messages_unexpected += 1  # late, or not its to answer
            return
        del self._status_asked[report.number]
        self._reports.append(report)

    def _expire_nodes(self, now_ns: int) -> None:
        if now_ns >= self._expire_ns:
            self._expire_ns = now_ns + EXPIRY_GRACE_NS
            while self._forget_node(now_ns - self._config.node_expiry_ns):
                pass

    def _forget_node(self, gone_before_ns: int | None = None) -> bool:
        """Forget the node that is gone for longest, and not needed; whether there was one."""
        forgotten = self._nodes.forget_one(self._traversal.has_part, gone_before_ns)
        if forgotten is not None:
            self._outbox.write(DropNode(forgotten.name))
        return forgotten is not None

    def _put_node(self, node: Node) -> None:
        self._outbox.write(PutNode(node.name, node.addresses, node.stored_incarnation))

    def _put_incarnation(self, node: Node) -> None:
        """Have the store know a restarted node, once it was asked and has answered for all.

        A coordinator that begins before that takes it for restarted since, as this one does.
        """
        if node.stored_incarnation != node.incarnation and not self._traversal.waits_for(node):
            node.stored_incarnation = node.incarnation
            self._put_node(node)

    def on_node_lost(self, session: int, now_ns: int) -> None:
        """A Control stream ended, for whatever reason."""
        self._outbox.forget_session(session)
        node = self._nodes.disconnect(session, now_ns)
        if node is not None:
            self._put_node(node)
            self._traversal.lost(node)
            self.snapshots.lost(node)
            self.snapshots.go_on(self._traces, now_ns)
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
                self._firings.fired(session, node, message, now_ns)
            case SliceStatus():
                self._on_status(node, message, now_ns)
            case Abandoned():
                self._on_abandoned(session, node, message.group, now_ns)
            case ClockReply():
                self._on_clock_reply(node, message, now_ns, realtime_ns)
            case SnapshotStatus():
                self.snapshots.on_status(node, message)
            case NodeReport():
                self._on_report(node, message)
            case SliceChunk():
                self._on_control_chunk(node, message, now_ns)
            case Hello():
                self.counters.messages_unexpected += 1
            case Unknown():
                self.counters.messages_unknown += 1
            case _:
                assert_never(message)
        self._lifecycle.make_room(now_ns)
        self._settle()
        self.snapshots.go_on(self._traces, now_ns)

    def on_slices_connected(
        self, stream: int, node: str, incarnation: int, now_ns: int, number: int = 0
    ) -> None:
        """A Slices stream opened, which its node knows by a number.

        It gets credit once its node has said Hello.
        """
        sender = self._assembly.connect(stream, node, incarnation, number)
        if sender is not None:
            self._resume(stream, sender)

    def on_slices_lost(self, stream: int, now_ns: int) -> None:
        self._assembly.lost(stream)

    def on_chunk(self, stream: int, chunk: SliceChunk, now_ns: int) -> None:
        """Bytes of a slice."""
        self._on_chunk(stream, chunk, now_ns)
        self._lifecycle.make_room(now_ns)
        self._settle()

    def on_durable(self, token: int, now_ns: int) -> None:
        """All writes up to and including the token's are durable."""
        self._outbox.durable(token)
        self._settle()

    def on_tick(self, now_ns: int) -> None:
        """Time passed: see next_wakeup_ns."""
        if self.recovering:
            return  # no verdict by half of what is known
        while (identity := self._probe_timers.pop(now_ns)) is not None:
            self._probe(self._nodes.by_id[identity], now_ns)
            self._put_incarnation(self._nodes.by_id[identity])
        self._firings.forget_names(now_ns)
        self._expire_nodes(now_ns)
        self._lifecycle.tick(now_ns)
        self._lifecycle.make_room(now_ns)
        self.snapshots.tick(now_ns)
        self.snapshots.go_on(self._traces, now_ns)

    # ----------------------------------------------------------- outputs

    def take_control(self, now_ns: int) -> list[tuple[int, list[CoordinatorMessage]]]:
        """(session, messages), each one's in order. After a Refused the session's stream ends."""
        return self._outbox.take_control(now_ns)

    def take_slice_replies(self, now_ns: int) -> list[tuple[int, SliceReply]]:
        """(stream, reply)."""
        return self._outbox.take_replies(self._assembly.credit, now_ns)

    def take_moves(self, *, wanted: bool) -> list[tuple[TraceId, TraceState, TraceState]]:
        """Which traces changed their state since this was last called, from where to where.

        Only what comes after a call by which they are ``wanted`` is told.
        """
        moves = self._lifecycle.moves or []
        self._lifecycle.moves = [] if wanted else None
        return moves

    def take_writes(self) -> list[Write]:
        """What to make durable, in order; then ``on_durable``."""
        return self._outbox.take_writes()

    def next_wakeup_ns(self, now_ns: int) -> int | None:
        """When on_tick may do something, or something is to be fetched, without a new fact."""
        if self.recovering:
            return None
        times = [
            self._lifecycle.next_ns(),
            self._probe_timers.next_ns(),
            self._outbox.next_ns(),
            self.snapshots.next_ns(),
        ]
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
                0 if node.session is not None else now_ns - node.gone_ns,
                node.software,
                node.identity,
            )
            for node in self._nodes
        ]
        return sorted(views, key=lambda view: view.node)

    def reconfigure(self, config: CoordinatorConfig) -> None:
        """Go on with other times and bounds, each from when it is next looked at."""
        self._config = config
        self._outbox.reconfigure(_patience_ns(config))
        self._traversal.reconfigure(config)
        self._assembly.reconfigure(config)
        self._lifecycle.reconfigure(config)
        self._firings.reconfigure(config)
        self._nodes.limit = config.nodes_max
        while self._nodes.has_too_many and self._forget_node():
            pass
        for node in self._nodes:
            node.firing_tokens = None

    def set_policy(self, policy: Policy) -> None:
        """What nodes shall record from now on."""
        self._policies.change(policy)

    def figures(self) -> CoordinatorFigures:
        """How things stand."""
        settled = sum(trace.is_settled for trace in self._traces.values())
        return CoordinatorFigures(
            nodes_known=len(self._nodes.by_id),
            nodes_connected=sum(node.session is not None for node in self._nodes),
            traces_open=len(self._traces) - settled,
            traces_settled=settled,
            traces_closed=len(self._lifecycle.closed),
            groups=len(self._traversal.groups),
            memory_bytes=self.memory_bytes,
            undurable_bytes=self._assembly.credit.undurable_bytes,
            streams_waiting=self._assembly.credit.waiting,
            assembly_bytes=self._memory.stored_bytes,
            answers_waiting=self.waiting_effects,
        )

    @property
    def traversal_s(self) -> Histogram:
        """From the first report of a trace to the last that was new, of those with a final verdict."""
        return self._lifecycle.traversal_s

    @property
    def verdict_s(self) -> Histogram:
        """From the first report of a trace to its first final verdict."""
        return self._lifecycle.verdict_s

    @property
    def memory_bytes(self) -> int:
        """Slice bytes that are not durable, and credit that is out."""
        return self._assembly.credit.used_bytes

    @property
    def waiting_effects(self) -> int:
        """What is to be said when more is durable: a node can make more of it at any rate."""
        return self._outbox.waiting_effects

    # ---------------------------------------------------------- messages

    def _on_status(self, node: Node, status: SliceStatus, now_ns: int) -> None:
        status = self._assembly.within_bounds(status)
        trace = self._traces.get(status.trace)
        if trace is None:
            outcome = self._lifecycle.outcome(status.trace)
            known = outcome.slice_of(node.id) if outcome is not None else NOTHING
            is_gone = outcome is not None and outcome.given_up
            lacks = known.may_lack(status) and not is_gone
            if not lacks and (outcome is not None or not status.open_handles):
                self._lifecycle.release_again(status.trace, node)
                return
            trace = self._lifecycle.begin(status.trace, node.id, now_ns, outcome)
        elif trace.is_released:
            known_part = trace.parts.get(node.id)
            here = self._lifecycle.slice_of(trace, known_part) if known_part is not None else None
            if here is not None and not here.may_lack(status):
                self._lifecycle.release_again(status.trace, node)
                return
        part = self._traversal.part_of(trace, node, now_ns)
        was_restarted = part.restarted
        if self._assembly.is_late(part, status):
            # What the node has now it says on the same stream.
            if part.restarted != was_restarted:
                self._put_status(node, part, now_ns)
                self._lifecycle.news(trace, now_ns)
            return
        begins = status.bytes > 0
        # A node that lost its memory has begun another slice, of which nothing is there yet.
        kept = part.is_whole and status.epoch not in (0, part.epoch) and status.is_blank
        # Or it let go of what is here, and collects it no more.
        kept = kept or (part.is_whole and not part.is_empty and not status.epoch)
        # Or it gave up, as whole as it was here, what it is asked for once more.
        kept = kept or (trace.kept and part.is_whole and status.only_gave_up)
        if not kept:
            kept = not self._meet(trace, part, status.epoch, begins=begins, told=True)
        news = self._traversal.answered(trace, part, node, status, now_ns, kept=kept)
        self._assembly.expect(trace, part)
        if news or part.restarted != was_restarted:
            self._put_status(node, part, now_ns)
            self._lifecycle.news(trace, now_ns)
        elif trace.is_released:
            # Of another slice than the one that is kept, so it changes nothing; the node waits.
            self._lifecycle.release_again(trace.id, node)

    def _on_control_chunk(self, node: Node, chunk: SliceChunk, now_ns: int) -> None:
        stream = self._assembly.numbered(node, chunk.stream)
        if stream is None:
            # Its node begins again, when it hears that the stream is gone.
            self.counters.chunks_unwelcome += 1
        else:
            self._on_chunk(stream, chunk, now_ns)

    def _on_chunk(self, stream: int, chunk: SliceChunk, now_ns: int) -> None:
        node = self._assembly.sender(stream)
        if node is None:
            self.counters.chunks_unwelcome += 1
            return
        if not self._assembly.credit.arrived(stream, len(chunk.data)):
            self.counters.chunks_over_credit += 1
            return
        trace = self._traces.get(chunk.trace)
        try:
            outcome = self._lifecycle.outcome(chunk.trace) if trace is None else None
        except UnreadableError:
            self._assembly.ignore(stream, chunk)
            raise
        end = chunk.offset + len(chunk.data)
        if trace is None:
            known = outcome.slice_of(node.id) if outcome is not None else NOTHING
            same = chunk.epoch == known.epoch
            is_gone = outcome is not None and outcome.given_up
            if (
                is_gone
                or end <= known.length
                or (same and end <= known.let_go)
                or (same and known.length >= self._config.slice_bytes_max)
            ):
                upto = max(known.length, end) if same else end
                is_full = same and known.length >= self._config.slice_bytes_max
                stored = upto if is_full else known.length if same else 0
                self._assembly.decline(stream, node, chunk, upto, stored)
                return
            trace = self._lifecycle.begin(chunk.trace, node.id, now_ns, outcome)
            self._lifecycle.news(trace, now_ns)
        is_first = node.id not in trace.parts
        part = self._traversal.part_of(trace, node, now_ns)
        if is_first:
            self._lifecycle.news(trace, now_ns)
        was_restarted = part.restarted
        begins = chunk.offset == 0
        # As for a closed trace: no longer than what is here, so it says nothing new.
        closed_on = trace.is_released and part.is_whole and end <= part.received
        closed_on = closed_on and chunk.epoch != part.epoch
        kept = closed_on or not self._meet(trace, part, chunk.epoch, begins=begins, told=False)
        if part.restarted != was_restarted:
            self._put_status(node, part, now_ns)
            self._lifecycle.news(trace, now_ns)
        if kept:
            self._assembly.decline(stream, node, chunk, end, 0)
            return
        if chunk.epoch != part.epoch:
            # Late, of a slice that was given up; or the next one, from its middle.
            self.counters.chunks_with_gap += not begins
            if begins:
                self._assembly.ignore(stream, chunk)
            else:
                self._assembly.begin_again(stream, chunk)
            self._assembly.hold(part, chunk.epoch, end)
            return
        over = end - max(chunk.offset, self._config.slice_bytes_max)
        self.counters.bytes_over_slice_max += max(0, over)
        gap = chunk.offset > part.received and over <= 0
        self.counters.chunks_with_gap += gap
        if gap:
            self._assembly.hold(part, chunk.epoch, end)
        fresh = self._assembly.take(stream, node, trace, part, chunk)
        if fresh:
            named = trace.evidence.add(node.id, fresh)
            self._memory.add_stored(trace, len(fresh))
            self._traversal.named(trace, named, node.id, node.name, now_ns)
            self._lifecycle.news(trace, now_ns)

    def _meet(self, trace: Trace, part: Part, epoch: int, *, begins: bool, told: bool) -> bool:
        received = part.received
        met = self._assembly.meet(trace, part, epoch, begins=begins, told=told)
        if part.received != received:
            self._memory.add_stored(trace, part.received - received)
            self._lifecycle.bytes_given_up(trace)
        return met

    def _put_status(self, node: Node, part: Part, now_ns: int) -> None:
        if part.status is not None:
            clock = node.clock.estimate(now_ns)
            self._outbox.write(PutStatus(node.name, part.status, clock, part.restarted))

    def _on_abandoned(self, session: int, node: Node, group: Group, now_ns: int) -> None:
        if group in self._traversal.abandoned:
            pass  # it is told once more
        elif self._traversal.is_of_others(group, self._traces.get(group.primary), node):
            self.counters.abandonments_refused += 1
        elif group in self._traversal.groups or self._firings.may_be_given_up(node, now_ns):
            self.counters.groups_abandoned += 1
            for trace in self._lifecycle.give_up(group, node.name, now_ns):
                for part in trace.parts.values():
                    self._assembly.expect(trace, part)
        self._outbox.after_writes(Say(session, Drop(group)))

    def _on_clock_reply(self, node: Node, reply: ClockReply, now_ns: int, realtime_ns: int) -> None:
        if reply.number == CLOCK_STEPPED:
            makes_sense = node.clock.stepped(reply.sent_ns - reply.received_ns)
            self.counters.clock_replies_refused += not makes_sense
            self._probe_timers.set_earlier(node.id, now_ns + CLOCK_STEPPED_PROBE_NS)
            return
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
        if not self._outbox.has_settled:
            return  # as after most messages
        for effect in self._outbox.settle():
            match effect:
                case Say():
                    node = self._nodes.of_session(effect.session)
                    if node is not None:
                        late = effect.late and node.takes_late_acks
                        self._outbox.say(effect.session, effect.message, hurried=not late)
                case BytesDurable():
                    self._assembly.durable(effect, self._traces.get(effect.trace))
                case Closed():
                    self._lifecycle.on_closed(effect)
                case _:
                    assert_never(effect)
