# SPDX-License-Identifier: Apache-2.0
"""Snapshots: what nodes were asked to trigger of their last seconds, and how far they are."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from coordinator.core.nodes import Node, Nodes
from coordinator.core.outbox import Outbox
from protocol.messages import NodeId, Snapshot, SnapshotStatus

# Somebody watches each; an older one goes on, unwatched.
_REMEMBERED_MAX = 16


@dataclass(slots=True)
class SnapshotState:
    """One snapshot: the last status of each node that was asked, None before its first."""

    order: Snapshot
    nodes: dict[NodeId, SnapshotStatus | None]
    lost: dict[NodeId, str] = field(default_factory=dict)

    @property
    def trigger(self) -> str:
        """Under which its traces are found."""
        return self.order.trigger

    @property
    def undone(self) -> list[NodeId]:
        """The nodes that have not triggered yet all that they will."""
        return [
            identity for identity, status in self.nodes.items() if status is None or not status.done
        ]

    @property
    def done(self) -> int:
        """How many nodes have."""
        return len(self.nodes) - len(self.undone)

    @property
    def ended(self) -> bool:
        return all(identity in self.lost for identity in self.undone)

    def total(self, field_name: str) -> int:
        """The sum over the nodes of ``found``, ``fired`` or ``bytes``."""
        statuses = self.nodes.values()
        return sum(getattr(status, field_name) for status in statuses if status is not None)


class Snapshots:
    """Those of late, by number."""

    def __init__(self, nodes: Nodes, outbox: Outbox) -> None:
        self._nodes = nodes
        self._outbox = outbox
        self._states: OrderedDict[int, SnapshotState] = OrderedDict()

    def start(self, wanted: Snapshot) -> SnapshotState:
        """Ask all nodes that are connected; each for its share of the bytes."""
        asked = [node for node in self._nodes if node.session is not None]
        order = replace(wanted, trigger=f"{wanted.trigger}.{wanted.number:08x}")
        state = SnapshotState(order, {node.id: None for node in asked})
        share = max(1, wanted.bytes_max // max(1, len(asked)))
        self._order(state, share)
        self._states[wanted.number] = state
        while len(self._states) > _REMEMBERED_MAX:
            _, forgotten = self._states.popitem(last=False)
            for identity in forgotten.undone:
                forgotten.lost[identity] = self._nodes.by_id[identity].name
        return state

    def _order(self, state: SnapshotState, bytes_max: int) -> None:
        """To those that are not done: up to so many bytes."""
        for identity in state.undone:
            session = self._nodes.by_id[identity].session
            if session is not None:
                self._outbox.say(session, replace(state.order, bytes_max=bytes_max))

    def on_status(self, node: Node, status: SnapshotStatus) -> None:
        state = self._states.get(status.number)
        if state is not None and node.id in state.nodes:
            state.nodes[node.id] = status
            state.lost.pop(node.id, None)
            # What one node triggers fills others too, of which it knows nothing.
            if state.total("bytes") >= state.order.bytes_max:
                self._order(state, 0)

    def lost(self, node: Node) -> None:
        """It left. What it has triggered it reports when it is back, and no more."""
        for state in self._states.values():
            if node.id in state.undone:
                state.lost[node.id] = node.name
