# SPDX-License-Identifier: Apache-2.0
"""A trace's way at the coordinator: from its first news to a verdict that stands, and out.

A trace goes through these states. "News" is whatever changes what is known of
it: a trigger, a crumb to a new node, an answer, bytes.

    state      what happened                              next      written, said
    -          TriggerFired, or a SliceStatus or chunk    OPEN
               that holds something
    OPEN       news                                       OPEN      (Collects)
    OPEN       provisional_ns passed, with news           OPEN      PutVerdict: provisional
    OPEN       no part is open, and quiet for quiet_ns    SETTLED   PutVerdict
    OPEN       no news for missing_linger_ns              SETTLED,  PutVerdict, PutReleased
                                                          RELEASED
    SETTLED    news                                       OPEN
    SETTLED    no news for linger_ns, or for              RELEASED  PutReleased, then
               missing_linger_ns where something                    Release to its nodes
               missing may still come
    RELEASED   news                                       OPEN      PutReleased: not
    RELEASED   no news for linger_ns                      CLOSED
    CLOSED     bytes, or a doubt                          OPEN      PutReleased: not (late)
    SETTLED,   there is too much in memory, and it is     CLOSED    PutReleased, then Release
    RELEASED   done (memory.py)
    any but    there is too much, and its group gives     CLOSED    (PutAbandoned,) PutVerdict,
    CLOSED     way                                                  PutReleased, then Release

A trace that misses nothing stays SETTLED as long as others of its groups may change: a
group is whole or gone. One of which anything is given up while any trace of it is open is gone,
with all its traces that no other group wants, also those that are whole. Of one that is whole
nothing was lost, so it stays.

OPEN, SETTLED and RELEASED traces are in memory with all that was read of their
slices; of a CLOSED one only its outcome is. A PutVerdict is written only if
something in it changed, and then its version is one higher.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from coordinator.core.closed import ClosedSlice, ClosedTraces, Outcome, UnreadableError
from coordinator.core.config import NS_PER_S, CoordinatorConfig
from coordinator.core.evidence import Evidence
from coordinator.core.figures import DURATION_BOUNDS_S, CoordinatorCounters
from coordinator.core.groups import NO_TRIGGER, GroupState
from coordinator.core.memory import Memory, is_free
from coordinator.core.nodes import Node, Nodes, identity_of
from coordinator.core.outbox import BytesDurable, Closed, Outbox
from coordinator.core.records import (
    PutAbandoned,
    PutReleased,
    PutVerdict,
    PutVerdictAgain,
    StoredTrace,
)
from coordinator.core.timers import Timers
from coordinator.core.trace import Part, PartState, Trace, TraceState
from coordinator.core.traversal import Traversal, wanted_by
from coordinator.core.verdict import (
    ELSEWHERE,
    HEALABLE,
    ReasonKind,
    Verdict,
    deleted,
    given_up,
    judge,
)
from counting.histogram import Histogram
from protocol.messages import Group, NodeId, Release, SliceStatus, TraceId
from protocol.verdicts import VerdictKind

# To judge a trace takes some 0.2 us for each of its items, 1 us where slices were begun anew, and
# whoever writes to it again can have it judged again. So a large one is judged the later, and the
# eight largest that fit in memory take a tenth of a core. One of so many items takes some 4 ms,
# and is as quick as any.
_ITEMS_JUDGED_AT_ONCE = 16384
_QUIET_NS_PER_ITEM = 20_000


# So many traces or groups give way at once, of some 50 us each: more than what a message begins, and
# no more than others can wait for. There are many where the bounds were lowered, or over a restart.
_GIVE_WAY_AT_ONCE = 64
_GIVE_WAY_NS = 1_000_000

# By the table above; whoever is CLOSED begins as another Trace.
_NEXT = {
    TraceState.OPEN: {TraceState.SETTLED, TraceState.CLOSED},
    TraceState.SETTLED: {TraceState.OPEN, TraceState.RELEASED, TraceState.CLOSED},
    TraceState.RELEASED: {TraceState.OPEN, TraceState.CLOSED},
    TraceState.CLOSED: set(),
}

NOBODY = ""
"""Gave up a group, where it was no node: this coordinator."""


class Lifecycle:
    """The traces in memory and the closed ones; what moves a trace from state to state.

    ``traces`` are by their last news, the oldest first.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        nodes: Nodes,
        traversal: Traversal,
        outbox: Outbox,
        memory: Memory,
        counters: CoordinatorCounters,
        stored: Callable[[TraceId], StoredTrace | None],
    ) -> None:
        self.traces: OrderedDict[TraceId, Trace] = OrderedDict()
        self.moves: list[tuple[TraceId, TraceState, TraceState]] | None = None
        """Which traces went from where to where, since somebody took it; None: nobody wants to know."""
        # While that is not durable: the number of the closing, and who is to be told of it then.
        self._closing: dict[TraceId, tuple[int, dict[NodeId, None]]] = {}
        self.closed = ClosedTraces(config, stored, lambda trace: trace not in self._closing)
        self.traversal_s = Histogram(DURATION_BOUNDS_S)
        self.verdict_s = Histogram(DURATION_BOUNDS_S)
        self._memory = memory
        self._config = config
        self._nodes = nodes
        self._traversal = traversal
        self._outbox = outbox
        self._counters = counters
        self._closings = 0
        self._make_room_ns: int | None = None
        self._timers: Timers[TraceId] = Timers()

    def reconfigure(self, config: CoordinatorConfig) -> None:
        """Go on with other times and bounds, each from when it is next looked at."""
        self._config = config
        self._memory.reconfigure(config)
        self.closed.reconfigure(config)

    def tick(self, now_ns: int) -> None:
        """Do what is due."""
        while (trace_id := self._timers.pop(now_ns)) is not None:
            self._review(self.traces[trace_id], now_ns)

    def next_ns(self) -> int | None:
        """When the next thing is due, or more has to give way (``make_room``)."""
        due = [time for time in (self._timers.next_ns(), self._make_room_ns) if time is not None]
        return min(due, default=None)

    def outcome(self, trace_id: TraceId) -> Outcome | None:
        """Of a closed trace; None where it is not one. Raises UnreadableError."""
        return None if trace_id in self.traces else self.closed.get(trace_id)

    def begin(self, trace_id: TraceId, by: NodeId, now_ns: int, outcome: Outcome | None) -> Trace:
        """A trace of which a node spoke, and that is not in memory; a closed one goes on from its outcome.

        Who calls this has asked for that before: the store may be unreadable, or be so by now.
        """
        evidence = Evidence(self._config.evidence_per_trace_max)
        provisional_at_ns = now_ns + self._config.provisional_ns
        trace = Trace(
            trace_id,
            evidence,
            now_ns,
            provisional_at_ns,
            reported_ns=now_ns,
            unreleased=self._closing[trace_id][1] if trace_id in self._closing else {},
        )
        self.traces[trace_id] = trace
        self._memory.begin(trace, by)
        self.closed.forget(trace_id)
        if outcome is not None:
            self._memory.add_stored(trace, outcome.stored_bytes)
            self._write_reopened(trace_id)
            self._put_verdict_again(trace_id, outcome)
            if outcome.is_empty:
                trace.verdict = outcome.verdict
                self._add_missing(trace, outcome, now_ns)
            else:
                self._counters.traces_late += 1
                self._go_on(trace, outcome, now_ns)
        return trace

    def _add_missing(self, trace: Trace, outcome: Outcome, now_ns: int) -> None:
        """Nobody had sent any bytes of it: who was to send some still is, and as many as he said."""
        for identity, known in outcome.slices.items():
            if known.announced_bytes or known.open_handles:
                self._answered_before(
                    trace,
                    identity,
                    SliceStatus(
                        trace.id,
                        True,
                        known.flags,
                        known.announced_bytes,
                        known.open_handles,
                        epoch=known.epoch,
                    ),
                    now_ns,
                )
        for reason in outcome.verdict.reasons if outcome.verdict is not None else ():
            if reason.node and reason.kind is not ReasonKind.NEVER_SEEN:
                self._traversal.add_stored(trace, identity_of(reason.node), now_ns)

    def news(self, trace: Trace, now_ns: int) -> None:
        """Something changed: judge again, but not before it is quiet."""
        self._memory.grown(trace)
        if trace.is_released:
            self._write_reopened(trace.id)
            # The store may have deleted it since, and what was judged alike is not put again.
            if trace.verdict is not None:
                self._outbox.write(PutVerdictAgain(trace.id, deleted(trace.verdict)))
        if trace.is_settled:
            self._move(trace, TraceState.OPEN)
            trace.provisional_at_ns = now_ns + self._config.provisional_ns
            self._memory.restate(trace)
        trace.last_news_ns = now_ns
        self.traces.move_to_end(trace.id)
        self._timers.set_earlier(trace.id, now_ns + self._quiet_ns(trace))

    def bytes_given_up(self, trace: Trace) -> None:
        """Others come for bytes that were here: no trace is called coherent without them."""
        if trace.verdict is not None and trace.verdict.kind is VerdictKind.COHERENT:
            self._judge(trace, final=False)

    def release(self, trace: Trace, now_ns: int) -> None:
        """Close it in the store; then its nodes may forget it."""
        self._move(trace, TraceState.RELEASED)
        trace.last_news_ns = now_ns
        self._write_released(trace)
        self._memory.restate(trace)
        self._timers.set(trace.id, now_ns + self._config.linger_ns)

    def make_room(self, now_ns: int) -> None:
        """Have what there is too much of give way, in pieces, until all fits: see memory.py."""
        self._make_room_ns = None
        left = _GIVE_WAY_AT_ONCE
        while (measure := self._memory.short_of()) is not None:
            if not left:
                self._make_room_ns = now_ns + _GIVE_WAY_NS
                break
            left -= 1
            done = self._memory.done()
            if done is not None:
                self._finish(done)
                continue
            state = self._memory.costliest(measure)
            if state is None:
                break
            if state.group.trigger == NO_TRIGGER:
                (lone,) = state.traces.values()
                self._judge(lone, final=True)
                self._finish(lone)
            elif state.unsettled and not self._settle_whole(state, now_ns):
                self._counters.groups_given_up += 1
                self._abandon(state.group, NOBODY)
                for trace in [trace for trace in state.traces.values() if not wanted_by(trace)]:
                    self._judge(trace, final=True)
                    self._finish(trace)
            else:
                self._finish_group(state)

    def give_up(self, group: Group, by: str, now_ns: int) -> list[Trace]:
        """A node gave up a group: so does everybody, unless all of it is here. What is given up."""
        state = self._traversal.groups.get(group)
        if state is not None and self._settle_whole(state, now_ns):
            # What the node had beyond is no loss. Closed first, since whoever begins in between
            # must not take it for given up.
            for trace in state.traces.values():
                trace.kept = True
                if wanted_by(trace) == [state] and not trace.is_released:
                    self.release(trace, now_ns)
            self._abandon(group, by)
            return []
        lost = self._abandon(group, by)
        for trace in lost:
            self.news(trace, now_ns)
        return lost

    @staticmethod
    def slice_of(trace: Trace, part: Part) -> ClosedSlice:
        """What is here of a node's slice."""
        least = trace.evidence.least_bytes(part.node)
        epoch, end = part.of_no_use or (0, 0)
        status = part.status if part.status is not None else SliceStatus(trace.id, False)
        return ClosedSlice(
            part.epoch,
            part.received,
            part.received if least is None else least,
            status.flags,
            end if epoch == part.epoch else 0,
            status.bytes,
            status.open_handles,
        )

    def wait_for_nodes(self, trace: Trace, now_ns: int) -> None:
        """Nodes need a moment to find a new coordinator: none is overdue before."""
        for part in trace.parts.values():
            waits = part.state is not PartState.ANSWERED
            part.deadline_ns = now_ns + self._config.provisional_ns if waits else None
        trace.provisional_at_ns = now_ns + self._config.provisional_ns
        self.news(trace, now_ns)

    def put_released_unless_here(self, trace_id: TraceId, group: Group) -> None:
        """What was just written concerns a trace that nobody waits for: the store may delete it."""
        if trace_id not in self.traces:
            is_known = True
            outcome = None
            try:
                outcome = self.outcome(trace_id)
            except UnreadableError:
                is_known = False
            verdict = self._put_verdict_again(trace_id, outcome, group)
            self._outbox.write(PutReleased(trace_id))
            if is_known and outcome is None and verdict is not None:
                # As the store has it: whoever speaks of it now speaks of what was given up.
                self.closed.remember(trace_id, Outcome({}, verdict, 0))

    def on_closed(self, closed: Closed) -> None:
        number, nodes = self._closing.get(closed.trace, (0, {}))
        if number != closed.number:
            return  # there were news meanwhile
        del self._closing[closed.trace]
        for identity, epoch, end in closed.of_no_use:
            node = self._nodes.by_id.get(identity)
            if node is not None and node.stream is not None:
                # It holds what it has sent until that is acknowledged.
                self._outbox.ack(node.stream, closed.trace, epoch, end)
        for identity in nodes:
            node = self._nodes.by_id.get(identity)
            if node is not None and node.session is not None:
                self._outbox.say(node.session, Release(closed.trace), hurried=False)

    def release_again(self, trace_id: TraceId, node: Node) -> None:
        """A node mentions what it may forget."""
        closing = self._closing.get(trace_id)
        if closing is not None:
            # It is told then, also if those were not to be that had a part.
            closing[1][node.id] = None
        elif node.session is not None:
            self._outbox.say(node.session, Release(trace_id), hurried=False)

    # ------------------------------------------------------------ inside

    def _move(self, trace: Trace, state: TraceState) -> None:
        """The only place where a trace's state changes."""
        assert state in _NEXT[trace.state], f"{trace.id.hex()}: {trace.state} to {state}"
        if self.moves is not None:
            self.moves.append((trace.id, trace.state, state))
        trace.state = state

    def _abandon(self, group: Group, by: str) -> list[Trace]:
        self._outbox.write(PutAbandoned(group, by))
        primary = self.traces.get(group.primary)
        if primary is not None and not primary.groups:
            # Nodes spoke of it, and nobody told of its firing.
            self._traversal.join_given_up(primary, group, by)
        lost = self._traversal.abandon(group, by)
        self.put_released_unless_here(group.primary, group)
        return lost

    def _settle_whole(self, state: GroupState, now_ns: int) -> bool:
        """Whether all traces of a group are coherent, though it may not be quiet yet."""
        for trace in state.traces.values():
            verdict = trace.verdict
            if not trace.is_settled:
                verdict = None if trace.is_awaited else judge(trace, self._nodes, final=True)
            if verdict is None or verdict.kind is not VerdictKind.COHERENT:
                return False
        for trace in state.traces.values():
            self._settle(trace, now_ns)
        return True

    def _settle(self, trace: Trace, now_ns: int) -> None:
        """Nothing of a trace is waited for any more, but for what may heal it."""
        if trace.is_settled:
            return
        self._judge(trace, final=True)
        self._time(trace, now_ns)
        self._move(trace, TraceState.SETTLED)
        trace.may_heal = self._linger_ns(trace) > self._config.linger_ns
        self._memory.restate(trace)

    def _finish(self, trace: Trace) -> None:
        """Close a trace before its time, with the verdict that it has."""
        if not trace.is_released:
            self._counters.traces_finished_early += 1
            self._write_released(trace)
        self._forget(trace)

    def _finish_group(self, state: GroupState) -> None:
        for trace in list(state.traces.values()):
            if wanted_by(trace) in ([state], []):
                self._finish(trace)
            else:
                self._traversal.leave(trace, state)

    def _go_on(self, trace: Trace, outcome: Outcome, now_ns: int) -> None:
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
            trace.evidence.take_up(verdict.span_count, verdict.start_ns, verdict.end_ns)
        for identity, known in outcome.slices.items():
            status = SliceStatus(trace.id, True, known.flags, known.length, epoch=known.epoch)
            part = self._answered_before(trace, identity, status, now_ns)
            part.received = known.length
            if known.length:
                self._outbox.after_writes(
                    BytesDurable(trace.id, identity, known.epoch, known.length, known.length, 0)
                )

    def _answered_before(
        self, trace: Trace, identity: NodeId, status: SliceStatus, now_ns: int
    ) -> Part:
        """The part of a node that had said this before its trace was closed."""
        part = self._traversal.add_stored(trace, identity, now_ns)
        part.state = PartState.ANSWERED
        part.deadline_ns = None
        part.status = status
        part.epoch = status.epoch
        return part

    def _quiet_ns(self, trace: Trace) -> int:
        """For how long nothing of a trace may come before it is judged."""
        more = max(0, trace.charged_items - _ITEMS_JUDGED_AT_ONCE)
        return self._config.quiet_ns + more * _QUIET_NS_PER_ITEM

    def _review(self, trace: Trace, now_ns: int) -> None:
        """Do what is due, and come back when the next thing is."""
        config = self._config
        self._traversal.overdue(trace, now_ns)
        if trace.is_released:
            due_ns = trace.last_news_ns + config.linger_ns
            if now_ns >= due_ns:
                self._forget(trace)
                return
        elif trace.is_settled:
            due_ns = trace.last_news_ns + self._linger_ns(trace)
            if now_ns >= due_ns:
                if trace.may_heal or is_free(trace):
                    self.release(trace, now_ns)
                    return
                due_ns = now_ns + config.linger_ns
        elif not trace.is_awaited and now_ns >= trace.last_news_ns + self._quiet_ns(trace):
            self._settle(trace, now_ns)
            due_ns = trace.last_news_ns + self._linger_ns(trace)
        elif now_ns >= trace.last_news_ns + config.missing_linger_ns:
            self._settle(trace, now_ns)
            self.release(trace, now_ns)
            return
        else:
            due_ns = self._review_open(trace, now_ns)
        self._timers.set(trace.id, max(due_ns, now_ns + 1))

    def _review_open(self, trace: Trace, now_ns: int) -> int:
        """Something is open, or news just came; when to look again."""
        config = self._config
        due = [trace.last_news_ns + config.missing_linger_ns]
        due += [p.deadline_ns for p in trace.parts.values() if p.deadline_ns is not None]
        if not trace.is_awaited:
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
            self._counters.verdicts[verdict.kind] += 1
            for kind in {reason.kind for reason in verdict.reasons}:
                self._counters.reasons[kind] += 1
            self._memory.grown(trace)
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

    def _write_released(self, trace: Trace) -> None:
        assert trace.verdict is not None
        self._counters.closed[trace.verdict.kind] += 1
        self._closings += 1
        of_no_use = tuple(
            (part.node, *part.of_no_use)
            for part in trace.parts.values()
            if part.of_no_use is not None
        )
        # Also of one that was given up: they were told to drop its groups, but may hold it for one
        # that nobody here knows, of before a restart.
        self._closing[trace.id] = self._closings, trace.unreleased | dict.fromkeys(trace.parts)
        effect = Closed(trace.id, self._closings, of_no_use)
        trace.slices = {node: self.slice_of(trace, part) for node, part in trace.parts.items()}
        least = tuple(
            (self._nodes.name_of(node), known.least)
            for node, known in trace.slices.items()
            if known.length
        )
        self._outbox.write(PutReleased(trace.id, released=True, least=least), effect)

    def _write_reopened(self, trace_id: TraceId) -> None:
        self._closing.pop(trace_id, None)
        self._outbox.write(PutReleased(trace_id, released=False))

    def _put_verdict_again(
        self, trace_id: TraceId, outcome: Outcome | None, group: Group | None = None
    ) -> Verdict | None:
        """A trace came up again, or by an abandoned group: it may be all that the store has."""
        verdict = None
        if outcome is not None:
            verdict = None if outcome.verdict is None else deleted(outcome.verdict)
        elif group is not None and (by := self._traversal.abandoned.get(group)) is not None:
            verdict = given_up(by)
        if verdict is not None:
            self._outbox.write(PutVerdictAgain(trace_id, verdict))
        return verdict

    def _forget(self, trace: Trace) -> None:
        """Only its outcome stays in memory."""
        self.closed.remember(
            trace.id,
            Outcome(trace.slices, trace.verdict, trace.stored_bytes),
        )
        self._traversal.remove(trace)
        self._timers.cancel(trace.id)
        del self.traces[trace.id]
        self._move(trace, TraceState.CLOSED)
