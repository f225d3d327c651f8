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

    trigger: str
    nodes: dict[NodeId, SnapshotStatus | None]
    lost: dict[NodeId, str] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """How many nodes have triggered all that they will."""
        return sum(status is not None and status.done for status in self.nodes.values())

    @property
    def ended(self) -> bool:
        return all(
            identity in self.lost or (status is not None and status.done)
            for identity, status in self.nodes.items()
        )

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
        state = SnapshotState(
            f"{wanted.trigger}.{wanted.number:08x}", {node.id: None for node in asked}
        )
        for node in asked:
            assert node.session is not None
            share = max(1, wanted.bytes_max // len(asked))
            self._outbox.say(node.session, replace(wanted, trigger=state.trigger, bytes_max=share))
        self._states[wanted.number] = state
        while len(self._states) > _REMEMBERED_MAX:
            self._states.popitem(last=False)
        return state

    def on_status(self, node: Node, status: SnapshotStatus) -> None:
        state = self._states.get(status.number)
        if state is not None and node.id in state.nodes:
            state.nodes[node.id] = status
            state.lost.pop(node.id, None)

    def lost(self, node: Node) -> None:
        """It left. What it has triggered it reports when it is back, and no more."""
        for state in self._states.values():
            status = state.nodes.get(node.id)
            if node.id in state.nodes and not (status is not None and status.done):
                state.lost[node.id] = node.name
