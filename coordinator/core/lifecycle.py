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
    OPEN       no news for missing_linger_ns              RELEASED  PutVerdict, PutReleased
    SETTLED    news                                       OPEN
    SETTLED    no news for linger_ns, or for              RELEASED  PutReleased, then
               missing_linger_ns where something                    Release to its nodes
               missing may still come
    RELEASED   news                                       OPEN      PutReleased: not
    RELEASED   no news for linger_ns                      CLOSED
    CLOSED     bytes, or a doubt                          OPEN      PutReleased: not (late)
    any but    too many traces, or too much evidence,     CLOSED    PutVerdict, PutReleased,
    CLOSED     and it has been without news the longest             then Release
               (too many: see make_room)

OPEN, SETTLED and RELEASED traces are in memory with all that was read of their
slices; of a CLOSED one only its outcome is. A PutVerdict is written only if
something in it changed, and then its version is one higher.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from coordinator.core.closed import ClosedSlice, ClosedTraces, Outcome
from coordinator.core.config import NS_PER_S, CoordinatorConfig
from coordinator.core.evidence import Evidence
from coordinator.core.figures import DURATION_BOUNDS_S, CoordinatorCounters
from coordinator.core.nodes import Node, Nodes, identity_of
from coordinator.core.outbox import BytesDurable, Closed, Outbox
from coordinator.core.records import PutReleased, PutVerdict, PutVerdictAgain, StoredTrace
from coordinator.core.timers import Timers
from coordinator.core.trace import Part, PartState, Trace
from coordinator.core.traversal import Traversal
from coordinator.core.verdict import ELSEWHERE, HEALABLE, ReasonKind, deleted, given_up, judge
from counting.histogram import Histogram
from protocol.messages import Group, Release, SliceFlags, SliceStatus, TraceId
from protocol.verdicts import VerdictKind

# To judge a trace takes some 0.2 us for each of its items, 1 us where slices were begun anew, and
# whoever writes to it again can have it judged again. So a large one is judged the later, and the
# eight largest that fit in memory take a tenth of a core. One of so many items takes some 4 ms,
# and is as quick as any.
_ITEMS_JUDGED_AT_ONCE = 16384
_QUIET_NS_PER_ITEM = 20_000


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
        counters: CoordinatorCounters,
        stored: Callable[[TraceId], StoredTrace | None],
    ) -> None:
        self.traces: OrderedDict[TraceId, Trace] = OrderedDict()
        self._closing: dict[TraceId, int] = {}  # while that is not durable
        self.closed = ClosedTraces(config, stored, lambda trace: trace not in self._closing)
        self.traversal_s = Histogram(DURATION_BOUNDS_S)
        self.verdict_s = Histogram(DURATION_BOUNDS_S)
        self.stored_bytes = 0
        """Of the traces in memory."""
        self._config = config
        self._nodes = nodes
        self._traversal = traversal
        self._outbox = outbox
        self._counters = counters
        self._closings = 0
        self._items = 0  # of the traces in memory
        # Those of which no byte has come, by their last news, too.
        self._bare: OrderedDict[TraceId, None] = OrderedDict()
        self._timers: Timers[TraceId] = Timers()

    def reconfigure(self, config: CoordinatorConfig) -> None:
        """Go on with other times and bounds, each from when it is next looked at."""
        self._config = config
        self.closed.reconfigure(config)

    def tick(self, now_ns: int) -> None:
        """Do what is due."""
        while (trace_id := self._timers.pop(now_ns)) is not None:
            self._review(self.traces[trace_id], now_ns)

    def next_ns(self) -> int | None:
        """When the next thing is due."""
        return self._timers.next_ns()

    def outcome(self, trace_id: TraceId) -> Outcome | None:
        """Of a closed trace; None where it is not one."""
        return None if trace_id in self.traces else self.closed.get(trace_id)

    def begin(self, trace_id: TraceId, now_ns: int) -> Trace:
        """A trace that is not in memory; a closed one goes on from its outcome."""
        self.make_room(one_more=True)
        evidence = Evidence(self._config.evidence_per_trace_max)
        provisional_at_ns = now_ns + self._config.provisional_ns
        trace = Trace(trace_id, evidence, now_ns, provisional_at_ns, reported_ns=now_ns)
        self.traces[trace_id] = trace
        outcome = self.closed.take(trace_id)
        if outcome is not None:
            self.add_stored_bytes(trace, outcome.stored_bytes)
            self._write_reopened(trace_id)
            self._put_verdict_again(trace_id, outcome)
            if outcome.is_empty:
                trace.verdict = outcome.verdict
                self._add_missing(trace, outcome, now_ns)
            else:
                self._counters.traces_late += 1
                self._go_on(trace, outcome, now_ns)
        if not trace.evidence.has_bytes:
            self._bare[trace_id] = None
        return trace

    def _add_missing(self, trace: Trace, outcome: Outcome, now_ns: int) -> None:
        """Nobody had sent any bytes of it: who was to send some still is."""
        for reason in outcome.verdict.reasons if outcome.verdict is not None else ():
            if reason.node and reason.kind is not ReasonKind.NEVER_SEEN:
                self._traversal.add_stored(trace, identity_of(reason.node), now_ns)

    def add_stored_bytes(self, trace: Trace, count: int) -> None:
        """So many bytes more of a trace are stored, or will be."""
        trace.stored_bytes += count
        self.stored_bytes += count

    def news(self, trace: Trace, now_ns: int) -> None:
        """Something changed: judge again, but not before it is quiet."""
        self._charge(trace)
        if trace.released:
            trace.released = False
            self._write_reopened(trace.id)
            # The store may have deleted it since, and what was judged alike is not put again.
            if trace.verdict is not None:
                self._outbox.write(PutVerdictAgain(trace.id, deleted(trace.verdict)))
        if trace.settled:
            trace.settled = False
            trace.provisional_at_ns = now_ns + self._config.provisional_ns
        trace.last_news_ns = now_ns
        self.traces.move_to_end(trace.id)
        if trace.id in self._bare:
            if trace.evidence.has_bytes:
                del self._bare[trace.id]
            else:
                self._bare.move_to_end(trace.id)
        self._timers.set_earlier(trace.id, now_ns + self._quiet_ns(trace))

    def release(self, trace: Trace, now_ns: int) -> None:
        """Close it in the store; then its nodes may forget it."""
        trace.released = True
        trace.last_news_ns = now_ns
        self._write_released(trace)
        self._timers.set(trace.id, now_ns + self._config.linger_ns)

    def make_room(self, *, one_more: bool = False) -> None:
        """Close the traces without news for longest, until all fit, and another one if need be.

        Whoever fires much names many traces that nobody has anything of. Where they are more
        than half of all, they make room for each other, and not one of which bytes came.
        """
        limit = self._config.traces_max - one_more
        while self.traces and (
            len(self.traces) > limit
            or self._items > self._config.evidence_max
            or self.stored_bytes > self._config.assembly_bytes_max
        ):
            too_many = len(self.traces) > limit and len(self._bare) > self._config.traces_max // 2
            trace = self.traces[next(iter(self._bare if too_many else self.traces))]
            if not trace.released:
                self._counters.traces_finished_early += 1
                self._judge(trace, final=True)
                trace.released = True
                self._write_released(trace)
            self._forget(trace)

    @staticmethod
    def slice_of(trace: Trace, part: Part) -> ClosedSlice:
        """What is here of a node's slice."""
        said = trace.evidence.slice_of(part.node)
        return ClosedSlice(
            part.epoch,
            part.received,
            part.received if said is None else said.least_bytes,
            part.status.flags if part.status is not None else SliceFlags.NONE,
        )

    @staticmethod
    def is_coherent(trace: Trace) -> bool:
        """It is whole, by a verdict on all that is known of it."""
        return (
            trace.settled
            and trace.verdict is not None
            and trace.verdict.kind is VerdictKind.COHERENT
        )

    def wait_for_nodes(self, trace: Trace, now_ns: int) -> None:
        """Nodes need a moment to find a new coordinator: none is overdue before."""
        for part in trace.parts.values():
            waits = part.state is not PartState.ANSWERED
            part.deadline_ns = now_ns + self._config.provisional_ns if waits else None
        self.news(trace, now_ns)

    def put_released_unless_here(self, trace_id: TraceId, group: Group) -> None:
        """What was just written concerns a trace that nobody waits for: the store may delete it."""
        if trace_id not in self.traces:
            self._put_verdict_again(trace_id, self.outcome(trace_id), group)
            self._outbox.write(PutReleased(trace_id))

    def on_closed(self, closed: Closed) -> None:
        if self._closing.get(closed.trace) != closed.number:
            return  # there were news meanwhile
        del self._closing[closed.trace]
        for identity in closed.nodes:
            node = self._nodes.by_id.get(identity)
            if node is not None and node.session is not None:
                self._outbox.say(node.session, Release(closed.trace))

    def release_again(self, trace_id: TraceId, node: Node) -> None:
        """A node mentions what it may forget."""
        if trace_id not in self._closing and node.session is not None:
            self._outbox.say(node.session, Release(trace_id))

    # ------------------------------------------------------------ inside

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
            part = self._traversal.add_stored(trace, identity, now_ns)
            part.state = PartState.ANSWERED
            part.deadline_ns = None
            part.status = SliceStatus(trace.id, True, known.flags, known.length, epoch=known.epoch)
            part.epoch = known.epoch
            part.received = known.length
            if known.length:
                self._outbox.after_writes(
                    BytesDurable(trace.id, identity, known.epoch, known.length, 0)
                )

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
                self.release(trace, now_ns)
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
            self._counters.verdicts[verdict.kind] += 1
            for kind in {reason.kind for reason in verdict.reasons}:
                self._counters.reasons[kind] += 1
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

    def _write_released(self, trace: Trace) -> None:
        assert trace.verdict is not None
        self._counters.closed[trace.verdict.kind] += 1
        # Of an abandoned trace they hold nothing; they were told to drop it.
        told = () if trace.abandoned_by is not None else tuple(trace.parts)
        self._closings += 1
        self._closing[trace.id] = self._closings
        effect = Closed(trace.id, told, self._closings)
        least = tuple(
            (self._nodes.name_of(part.node), self.slice_of(trace, part).least)
            for part in trace.parts.values()
            if part.received
        )
        self._outbox.write(PutReleased(trace.id, released=True, least=least), effect)

    def _write_reopened(self, trace_id: TraceId) -> None:
        self._closing.pop(trace_id, None)
        self._outbox.write(PutReleased(trace_id, released=False))

    def _put_verdict_again(
        self, trace_id: TraceId, outcome: Outcome | None, group: Group | None = None
    ) -> None:
        """A trace came up again, or by an abandoned group: it may be all that the store has."""
        verdict = None
        if outcome is not None:
            verdict = None if outcome.verdict is None else deleted(outcome.verdict)
        elif group is not None and (by := self._traversal.abandoned.get(group)) is not None:
            verdict = given_up(by)
        if verdict is not None:
            self._outbox.write(PutVerdictAgain(trace_id, verdict))

    def _forget(self, trace: Trace) -> None:
        """Only its outcome stays in memory."""
        self.closed.remember(
            trace.id,
            Outcome(
                {part.node: self.slice_of(trace, part) for part in trace.parts.values()},
                trace.verdict,
                trace.stored_bytes,
            ),
        )
        self._items -= trace.charged_items
        self.stored_bytes -= trace.stored_bytes
        self._traversal.remove(trace)
        self._timers.cancel(trace.id)
        del self.traces[trace.id]
        self._bare.pop(trace.id, None)

    def _charge(self, trace: Trace) -> None:
        """Count what a trace takes of the memory now."""
        items = trace.items
        self._items += items - trace.charged_items
        trace.charged_items = items
