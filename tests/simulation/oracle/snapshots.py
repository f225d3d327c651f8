# SPDX-License-Identifier: Apache-2.0
"""Whether nodes trigger of a snapshot what they were told to: the highest priorities, and no more.

What a pool holds, the model of it tells when it is asked. What a node was told, the messages say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.hashing import Domain, TraceHash
from protocol.messages import Group, Snapshot, Source, TraceId
from tests.simulation.oracle.record import Fired, World

if TYPE_CHECKING:
    from appliance.core.node import NodeCore
    from tests.simulation.node import SimNode


ALL_BYTES = 1 << 30
"""More than any world has: such a snapshot may have all."""


@dataclass(slots=True)
class Taken:
    """A snapshot on one node: what there was, highest priority first, and what was triggered.

    ``may_fire``: so many it was told to; the first order only has it look.
    """

    found: list[TraceId] | None = None
    may_fire: int = 0
    fired: list[TraceId] = field(default_factory=list)


@dataclass(slots=True)
class SnapshotRecord:
    """All snapshots of a world. ``disturbed``: by what a node, or the coordinator, forgets one."""

    by_node: dict[tuple[str, str], Taken] = field(default_factory=dict)
    bytes_max: dict[str, int] = field(default_factory=dict)
    disturbed: set[str] = field(default_factory=set)

    def ordered(self, node: str, order: Snapshot) -> None:
        taken = self.by_node.get((order.trigger, node))
        if taken is None:
            self.by_node[order.trigger, node] = Taken()
        else:
            taken.may_fire += order.traces

    def found(self, node: SimNode, order: Snapshot, traces: list[TraceId]) -> None:
        """Its pool was asked, and gave them in this order."""
        rank = TraceHash(Domain.PRIORITY, node.priority_seed)
        assert traces == sorted(traces, key=rank, reverse=True)
        self.by_node[order.trigger, node.name].found = traces

    def fire(self, node: str, group: Group) -> None:
        taken = self.by_node[group.trigger, node]
        assert taken.found is not None, f"{node} triggers {group} before it looked"
        number = len(taken.fired)
        assert number < taken.may_fire, f"{node} triggers {group}, of {taken.may_fire} that it may"
        assert group.primary == taken.found[number], (
            f"{node} triggers {group}, and {taken.found[number].hex()} is next by its priority"
        )
        taken.fired.append(group.primary)

    def left(self) -> Iterator[str]:
        """Where a snapshot that may have all ended with less, in words."""
        for (trigger, node), taken in self.by_node.items():
            if trigger in self.disturbed or self.bytes_max[trigger] < ALL_BYTES:
                continue
            if taken.fired != taken.found:
                found = "nothing yet" if taken.found is None else len(taken.found)
                yield f"{node} has triggered {len(taken.fired)} of {found} traces for {trigger}"

    def lost(self, gone: str = "") -> None:
        """A node's daemon is gone, or the coordinator, with all that it knew of snapshots."""
        self.disturbed |= set(self.bytes_max)
        for trigger, node in list(self.by_node):
            if node == gone:
                del self.by_node[trigger, node]


def watch_snapshots(world: World, node: SimNode, core: NodeCore, record: SnapshotRecord) -> None:
    """Note what a node triggers for an operator, before it collects it."""
    fire = core._firings.fire

    def fired(
        group: Group, laterals: tuple[TraceId, ...], why: str, source: Source, *more: object
    ) -> None:
        if source is Source.OPERATOR:
            record.fire(node.name, group)
            world.fire(Fired(group, laterals, node.name, world.scheduler.now_ns))
        fire(group, laterals, why, source, *more)  # type: ignore[arg-type]

    core._firings.fire = fired  # type: ignore[method-assign,assignment]
