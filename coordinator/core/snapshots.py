# SPDX-License-Identifier: Apache-2.0
"""Snapshots: what nodes were asked to trigger of their last seconds, and how far they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.core.nodes import Node, Nodes
from coordinator.core.outbox import Outbox
from coordinator.core.timers import Timers
from coordinator.core.trace import PartState, Trace
from protocol.messages import (
    SNAPSHOT_TRIGGER,
    Group,
    NodeId,
    Snapshot,
    SnapshotStatus,
    TraceId,
)

# Somebody watches each; an older one goes on no more.
_REMEMBERED_MAX = 16

# A trigger costs a node some 0.1 ms of its event loop, which has other work too.
_TRACES_AT_ONCE = 64

# A node looks through its pool, or triggers so many, within seconds. One that says nothing for so long
# does not do what it was asked for, and nobody waits for it.
_SILENCE_NS = 60_000_000_000

# Of one snapshot: more than anybody looks at, some 10 MB here.
_TRACES_MAX = 65536


@dataclass(slots=True)
class SnapshotState:
    """One snapshot: the last status of each node that was asked, None before its first.

    ``bytes`` are those of the slices of its traces on all nodes, as far as these have answered.
    ``may_fire`` is how many more traces each node was told to trigger: what else comes under
    this name is no part of it. ``undone`` have not triggered yet all that they will.
    """

    order: Snapshot
    bytes_max: int
    nodes: dict[NodeId, SnapshotStatus | None]
    lost: dict[NodeId, str] = field(default_factory=dict)
    bytes: int = 0
    traces: set[TraceId] = field(default_factory=set)
    unanswered: dict[TraceId, None] = field(default_factory=dict)
    waiting: set[NodeId] = field(default_factory=set)
    may_fire: dict[NodeId, int] = field(default_factory=dict)
    undone: dict[NodeId, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.undone = dict.fromkeys(self.nodes)

    @property
    def trigger(self) -> str:
        """Under which its traces are found."""
        return self.order.trigger

    @property
    def done(self) -> int:
        """How many nodes have."""
        return len(self.nodes) - len(self.undone)

    @property
    def ended(self) -> bool:
        return len(self.lost) == len(self.undone)

    def total(self, field_name: str) -> int:
        """The sum over the nodes of ``found`` or ``fired``."""
        statuses = self.nodes.values()
        return sum(getattr(status, field_name) for status in statuses if status is not None)

    def next_round(self) -> int:
        """How many traces each node that waits may trigger now: what fits by what those so far took."""
        left = self.bytes_max - self.bytes
        if left <= 0 or len(self.traces) >= _TRACES_MAX:
            return 0
        if not self.traces:
            return 1
        fitting = left * len(self.traces) // (max(1, self.bytes) * max(1, len(self.undone)))
        return min(max(1, fitting), _TRACES_AT_ONCE)


class Snapshots:
    """Those of late, by number.

    Each goes on in rounds: when all nodes that were asked for its traces have answered, it is
    known what they take, and the nodes that wait are told how many more they may trigger.
    """

    def __init__(self, nodes: Nodes, outbox: Outbox) -> None:
        self._nodes = nodes
        self._outbox = outbox
        self._states: OrderedDict[int, SnapshotState] = OrderedDict()
        self._by_trigger: dict[str, SnapshotState] = {}
        self._silent: Timers[tuple[int, NodeId]] = Timers()

    def start(self, wanted: Snapshot, bytes_max: int, now_ns: int) -> SnapshotState:
        """Have all nodes that are connected look what they have."""
        asked = [node for node in self._nodes if node.session is not None]
        order = replace(wanted, trigger=_trigger_of(wanted.trigger, wanted.number))
        state = SnapshotState(order, bytes_max, {node.id: None for node in asked})
        for node in asked:
            self._say(node, order, now_ns)
        self._states[wanted.number] = self._by_trigger[state.trigger] = state
        while len(self._states) > _REMEMBERED_MAX:
            _, forgotten = self._states.popitem(last=False)
            del self._by_trigger[forgotten.trigger]
            for identity in forgotten.undone:
                forgotten.lost[identity] = self._nodes.name_of(identity)
        return state

    def on_fired(self, node: Node, group: Group) -> bool:
        """A node triggered a trace; whether it was told to, by a snapshot."""
        state = self._by_trigger.get(group.trigger)
        if state is None or group.primary in state.traces or not state.may_fire.get(node.id):
            return False
        state.may_fire[node.id] -= 1
        state.traces.add(group.primary)
        state.unanswered[group.primary] = None
        return True

    def tick(self, now_ns: int) -> None:
        """Wait no more for those who were silent for too long; what they say later counts."""
        while (key := self._silent.pop(now_ns)) is not None:
            number, identity = key
            state = self._states.get(number)
            if state is not None and identity in state.undone:
                state.lost[identity] = self._nodes.name_of(identity)

    def next_ns(self) -> int | None:
        """When ``tick`` may do something."""
        return self._silent.next_ns()

    def on_status(self, node: Node, status: SnapshotStatus) -> None:
        self._silent.cancel((status.number, node.id))
        state = self._states.get(status.number)
        if state is not None and node.id in state.nodes:
            state.nodes[node.id] = status
            state.lost.pop(node.id, None)
            if status.done:
                state.undone.pop(node.id, None)
            else:
                state.undone[node.id] = None
                state.waiting.add(node.id)
        elif not status.done and node.session is not None:
            # Of a coordinator before this one: nobody knows any more how much it may still trigger.
            order = Snapshot(status.number, _trigger_of(SNAPSHOT_TRIGGER, status.number), 0)
            self._outbox.say(node.session, order)

    def lost(self, node: Node) -> None:
        """It left. What it has triggered it reports when it is back, and says how far it is.

        One that had not heard of it says nothing. It is not asked again: whether it had heard nobody
        knows, and to one that had, an order that it has already says to trigger no more.
        """
        for state in self._states.values():
            state.waiting.discard(node.id)
            if node.id in state.undone:
                state.lost[node.id] = node.name

    def go_on(self, traces: Mapping[TraceId, Trace], now_ns: int) -> None:
        """Begin the next round where the last one is answered."""
        for state in self._states.values():
            # Any that is not answered holds the round up, so the others may be left for later.
            while state.unanswered:
                trace_id = next(iter(state.unanswered))
                if not _is_answered(traces.get(trace_id)):
                    break
                del state.unanswered[trace_id]
                state.bytes += _bytes_of(traces.get(trace_id))
            if state.waiting and not state.unanswered:
                order = replace(state.order, traces=state.next_round())
                for identity in state.waiting:
                    node = self._nodes.by_id[identity]
                    if node.session is not None:
                        told = state.may_fire.get(identity, 0)
                        state.may_fire[identity] = told + order.traces
                        self._say(node, order, now_ns)
                state.waiting.clear()

    def _say(self, node: Node, order: Snapshot, now_ns: int) -> None:
        assert node.session is not None
        self._outbox.say(node.session, order)
        self._silent.set((order.number, node.id), now_ns + _SILENCE_NS)


def _trigger_of(name: str, number: int) -> str:
    return f"{name}.{number:08x}"


def _is_answered(trace: Trace | None) -> bool:
    """Whether all nodes that were asked for it have said what they hold, or take too long."""
    return trace is None or not any(
        part.state is PartState.ASKED and part.deadline_ns is not None
        for part in trace.parts.values()
    )


def _bytes_of(trace: Trace | None) -> int:
    if trace is None:
        return 0
    return sum(part.status.bytes for part in trace.parts.values() if part.status is not None)
