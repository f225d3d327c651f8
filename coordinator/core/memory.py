# SPDX-License-Identifier: Apache-2.0
"""What the traces in memory take, who is charged for it, and what gives way when it is too much.

Each trace is charged to the group that had it first, as on a node, and so to who fired that:
a process of a node. When there is too much of anything, these give way, in this order:

1. What is done: traces with a final verdict of which nothing is missing that may still come.
   Who closes them early loses nothing but what is written late. The oldest go first.
2. Of the node whose traces take the most, the process whose traces take the most; of that, the
   group of the lowest priority: one that is settled and waits for what is missing before one
   that is open.

So what an overload costs falls on who causes it (what is taken from the largest again and again
makes shares max-min fair), and a group goes as a whole. Nodes give up groups by the same priority
(counting.by_priority), so all sides have the same left.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

from coordinator.core.config import CoordinatorConfig
from coordinator.core.groups import NO_TRIGGER, GroupState, Owner
from coordinator.core.trace import Trace
from counting.by_priority import ByPriority, order_of
from protocol.hashing import Domain, TraceHash
from protocol.messages import Group, NodeId, TraceId

# What a firing takes of the store: most of it its laterals, once in it and once
# each as members of its group.
FIRING_BYTES = 2048


class Measure(enum.IntEnum):
    """Of what there may be too much."""

    TRACES = 0
    ITEMS = 1
    STORED_BYTES = 2


@dataclass(slots=True)
class _Process:
    """Groups of one process that traces are charged to: those that are settled, and the others."""

    cost: list[int] = field(default_factory=lambda: [0] * len(Measure))
    settled: ByPriority[GroupState] = field(default_factory=ByPriority)
    unsettled: ByPriority[GroupState] = field(default_factory=ByPriority)


@dataclass(slots=True)
class _Node:
    cost: list[int] = field(default_factory=lambda: [0] * len(Measure))
    processes: dict[int, _Process] = field(default_factory=dict)


class Memory:
    """The charges of all traces in memory."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._priority = TraceHash(Domain.PRIORITY, config.priority_seed)
        self._nodes: dict[NodeId, _Node] = {}
        self._total = [0] * len(Measure)
        self._done: OrderedDict[TraceId, Trace] = OrderedDict()

    def reconfigure(self, config: CoordinatorConfig) -> None:
        """Go on with other bounds. The seed of priorities stays."""
        self._config = config

    @property
    def stored_bytes(self) -> int:
        """Of the traces in memory."""
        return self._total[Measure.STORED_BYTES]

    # ----------------------------------------------------------- charges

    def new_group(self, group: Group, owner: Owner) -> GroupState:
        """A group of which there is none yet."""
        return GroupState(group, owner, order_of(group, self._priority(group.primary)))

    def begin(self, trace: Trace, by: NodeId) -> None:
        """A trace is in memory, of which that node spoke; to be charged to it until it has a group."""
        lone = self.new_group(Group(NO_TRIGGER, trace.id), Owner(by))
        lone.traces[trace.id] = trace
        lone.unsettled, lone.pending = trace.counted
        self.charge(trace, lone)

    def charge(self, trace: Trace, state: GroupState) -> None:
        """Charge a trace to this group from now on."""
        self._uncharge(trace)
        trace.charged_to = state
        state.charged += 1
        self._add(state, 1, trace.charged_items, trace.stored_bytes)
        self.place(state)

    def own(self, state: GroupState, owner: Owner) -> None:
        """Another process fired the group too: it is charged to who has less to pay."""
        if owner == state.owner or self._cost(owner) >= self._cost(state.owner):
            return
        charged = state.charged
        traces, items, stored_bytes = state.cost
        self._add(state, -traces, -items, -stored_bytes)
        state.charged = 0
        self.place(state)
        state.owner, state.charged = owner, charged
        self._add(state, traces, items, stored_bytes)
        self.place(state)

    def grown(self, trace: Trace) -> None:
        """Count what a trace takes now."""
        items = trace.items
        more = items - trace.charged_items
        if more:
            trace.charged_items = items
            assert trace.charged_to is not None
            self._add(trace.charged_to, 0, more, 0)

    def add_stored(self, trace: Trace, count: int) -> None:
        """So many bytes more of a trace are stored, or will be."""
        trace.stored_bytes += count
        assert trace.charged_to is not None
        self._add(trace.charged_to, 0, 0, count)

    def forget(self, trace: Trace) -> None:
        """The trace leaves the memory."""
        self._uncharge(trace)
        self._done.pop(trace.id, None)

    # -------------------------------------------------------- settlement

    def restate(self, trace: Trace) -> None:
        """Whether a trace is settled, released, or may heal may have changed."""
        before, trace.counted = trace.counted, _count(trace)
        if before != trace.counted:
            more = tuple(now - then for now, then in zip(trace.counted, before, strict=True))
            for state in self._groups_of(trace):
                self.count(state, more)
        if self._is_done(trace):
            self._done.setdefault(trace.id, trace)
        else:
            self._done.pop(trace.id, None)

    def count(self, state: GroupState, more: tuple[int, ...]) -> None:
        """So many more traces of a group are not settled, and may change."""
        unsettled, pending = more
        was_settled, was_final = state.unsettled == 0, state.pending == 0
        state.unsettled += unsettled
        state.pending += pending
        if was_settled != (state.unsettled == 0):
            self.place(state)
        if not was_final and state.pending == 0:
            for trace in state.traces.values():
                if self._is_done(trace):
                    self._done.setdefault(trace.id, trace)

    @staticmethod
    def _is_done(trace: Trace) -> bool:
        if trace.is_released:
            return True
        return trace.is_settled and not trace.may_heal and is_free(trace)

    # --------------------------------------------------------- who gives

    def short_of(self) -> Measure | None:
        """Of what there is too much, if there is anything that could give way."""
        traces, items, stored_bytes = self._total
        config = self._config
        if not traces:
            return None
        if traces > config.traces_max:
            return Measure.TRACES
        if items > config.evidence_max:
            return Measure.ITEMS
        return Measure.STORED_BYTES if stored_bytes > config.assembly_bytes_max else None

    def done(self) -> Trace | None:
        """The oldest of those that are done."""
        while self._done:
            trace = next(iter(self._done.values()))
            if self._is_done(trace):
                return trace
            # A trace of its group is open again; it comes back with that.
            del self._done[trace.id]
        return None

    def costliest(self, measure: Measure) -> GroupState | None:
        """Which group gives way where none is done; None if there is no trace."""
        node = max(self._nodes.values(), key=lambda node: node.cost[measure], default=None)
        if node is None:
            return None
        process = max(node.processes.values(), key=lambda process: process.cost[measure])
        return next((process.settled if len(process.settled) else process.unsettled).backwards())

    def place(self, state: GroupState) -> None:
        """Put a group where it belongs."""
        node, process = self._payer(state.owner)
        is_charged = state.charged > 0
        process.settled.put(state.order, state, is_charged and state.unsettled == 0)
        process.unsettled.put(state.order, state, is_charged and state.unsettled > 0)
        if not len(process.settled) and not len(process.unsettled):
            del node.processes[state.owner.process]
            if not node.processes:
                del self._nodes[state.owner.node]

    # ------------------------------------------------------------ inside

    @staticmethod
    def _groups_of(trace: Trace) -> list[GroupState]:
        if trace.groups or trace.charged_to is None:
            return list(trace.groups.values())
        return [trace.charged_to]

    def _uncharge(self, trace: Trace) -> None:
        state, trace.charged_to = trace.charged_to, None
        if state is not None:
            self._add(state, -1, -trace.charged_items, -trace.stored_bytes)
            state.charged -= 1
            self.place(state)

    def _payer(self, owner: Owner) -> tuple[_Node, _Process]:
        """Have who pays for something."""
        node = self._nodes.get(owner.node)
        if node is None:
            node = self._nodes[owner.node] = _Node()
        process = node.processes.get(owner.process)
        if process is None:
            process = node.processes[owner.process] = _Process()
        return node, process

    def _add(self, state: GroupState, traces: int, items: int, stored_bytes: int) -> None:
        node, process = self._payer(state.owner)
        for cost in (self._total, node.cost, process.cost, state.cost):
            # In the order of Measure.
            cost[0] += traces
            cost[1] += items
            cost[2] += stored_bytes

    def _cost(self, owner: Owner) -> tuple[int, int]:
        """In traces: of the node, and of its process."""
        node = self._nodes.get(owner.node, _Node())
        process = node.processes.get(owner.process, _Process())
        return node.cost[Measure.TRACES], process.cost[Measure.TRACES]


def is_free(trace: Trace) -> bool:
    """Whether a trace that is final is not to wait for others of its groups: so are these."""
    return all(state.pending == 0 or state.given_up for state in trace.groups.values())


def _count(trace: Trace) -> tuple[int, int]:
    """What it adds to ``unsettled`` and ``pending`` of its groups."""
    is_final = trace.is_released or (trace.is_settled and not trace.may_heal)
    return int(not trace.is_settled), int(not is_final)
