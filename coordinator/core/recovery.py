# SPDX-License-Identifier: Apache-2.0
"""How a coordinator takes up what an earlier one left in the store, piece by piece.

First all traces with their slices, then the triggers, which join traces to groups. What is known
halfway is no evidence, so nobody is heard before the end: nodes wait, and lose nothing by it,
since they keep what was not acknowledged. Whoever runs the core has it do other things in
between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coordinator.core.assembly import Assembly
from coordinator.core.closed import outcome_of
from coordinator.core.groups import OF_A_PROCESS, Owner
from coordinator.core.lifecycle import Lifecycle
from coordinator.core.memory import FIRING_BYTES, Memory
from coordinator.core.records import PutAbandoned, PutTrigger, StoredSlice, StoredTrace
from coordinator.core.trace import UNKNOWN_INCARNATION, PartState, Trace
from coordinator.core.traversal import Traversal
from protocol.hashing import node_id


class Recovery:
    """One recovery, from its beginning to its end."""

    def __init__(
        self,
        recovered: Iterable[StoredTrace],
        traversal: Traversal,
        assembly: Assembly,
        lifecycle: Lifecycle,
        memory: Memory,
    ) -> None:
        self._traversal = traversal
        self._assembly = assembly
        self._lifecycle = lifecycle
        self._memory = memory
        self._now_ns = 0
        self._pieces = self._run(recovered)

    def step(self, now_ns: int) -> bool:
        """Do a piece of it; False when there is none left."""
        self._now_ns = now_ns
        return next(self._pieces, self) is not self

    def _run(self, recovered: Iterable[StoredTrace]) -> Iterator[None]:
        fired: list[Iterable[PutTrigger]] = []
        given_up: list[PutAbandoned] = []
        for stored in recovered:
            yield from self._trace(stored)
            fired.append(stored.triggers)
            given_up += () if stored.released else stored.abandoned
        for triggers in fired:
            for trigger in triggers:
                self._trigger(trigger)
                yield
        for put in given_up:
            primary = self._lifecycle.traces.get(put.group.primary)
            if primary is not None and not primary.groups:
                self._traversal.join_given_up(primary, put.group, put.node)
            yield
        # It may have taken long: nobody is overdue for that.
        for trace in list(self._lifecycle.traces.values()):
            self._lifecycle.wait_for_nodes(trace, self._now_ns)
            yield

    def _trace(self, stored: StoredTrace) -> Iterator[None]:
        """A trace, but for its triggers."""
        for abandoned in stored.abandoned:
            self._traversal.remember_abandoned(abandoned.group, abandoned.node)
        if stored.released:
            self._lifecycle.closed.remember(stored.trace, outcome_of(stored))
            yield
            return
        # Charged to its triggers when these are here.
        by = node_id(stored.slices[0].node if stored.slices else "")
        trace = self._lifecycle.begin(stored.trace, by, self._now_ns, None)
        trace.reported_ns = None
        trace.verdict = stored.verdict
        for known in stored.slices:
            yield from self._slice(trace, known)
        yield

    def _slice(self, trace: Trace, known: StoredSlice) -> Iterator[None]:
        identity = node_id(known.node)
        part = self._traversal.add_stored(trace, identity, self._now_ns)
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
            self._traversal.named(trace, named, identity, known.node, self._now_ns)
            yield
        part.durable = part.received
        self._memory.add_stored(trace, part.received)
        if known.status is not None:
            part.status = self._assembly.within_bounds(known.status)
            if not part.is_due:
                part.state = PartState.ANSWERED
            self._assembly.expect(trace, part)
            crumbs = known.status.crumbs
            self._traversal.told(trace, crumbs, identity, known.node, self._now_ns)

    def _trigger(self, trigger: PutTrigger) -> None:
        group = trigger.fired.group
        owner = Owner(node_id(trigger.node))
        for trace_id in (group.primary, *trigger.fired.laterals):
            trace = self._lifecycle.traces.get(trace_id)
            if trace is None:
                continue  # closed, or the store has deleted it since
            trace.reported_ns = None
            part = self._traversal.add_stored(trace, owner.node, self._now_ns)
            by_process = trigger.fired.source in OF_A_PROCESS and trace_id == group.primary
            if by_process and part.status is None:
                part.fired_under = UNKNOWN_INCARNATION
            self._traversal.join(trace, group, owner)
            for known in trace.parts.values() if group in trace.groups else ():
                # Who fired it, or has all of it here, need not be asked again; a Drop concerns all.
                sure = known is part or known.state is PartState.ANSWERED
                if sure or group in self._traversal.abandoned:
                    known.told[group] = True
            self._memory.add_stored(trace, FIRING_BYTES * (trace_id == group.primary))
        state = self._traversal.groups.get(group)
        if state is not None:
            state.fired[trigger.node] = hash(trigger.fired)
