# SPDX-License-Identifier: Apache-2.0
"""A fired group at the coordinator: its traces, who fired it, and what it is charged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from counting.by_priority import Order
from protocol.messages import Group, NodeId, Source, TraceId

if TYPE_CHECKING:
    from coordinator.core.trace import Trace

NO_TRIGGER = ""
"""Instead of a trigger's name: a trace that nobody fired, by itself."""


OF_A_PROCESS = (Source.APPLICATION, Source.CONTEXT, Source.KERNEL)
"""Who fires because a process of the node works on the primary. Nodes repeat firings as their own."""


class Owner(NamedTuple):
    """Who caused something: a process of a node; 0: none that is known."""

    node: NodeId
    process: int = 0


@dataclass(slots=True, eq=False)
class GroupState:
    """A group that has traces in memory.

    ``fired``: the hash of what each node said when it fired there. ``unsettled`` of its traces
    have no verdict that stands, ``pending`` none, or one that may still get better. ``charged``
    are those that are charged to it, and ``cost`` what they take, by Measure. ``given_up_by``:
    nobody wants it any more, and that node was the first; None: it is wanted.
    """

    group: Group
    owner: Owner
    order: Order
    traces: dict[TraceId, Trace] = field(default_factory=dict)
    fired: dict[str, int] = field(default_factory=dict)
    unsettled: int = 0
    pending: int = 0
    charged: int = 0
    cost: list[int] = field(default_factory=lambda: [0, 0, 0])
    given_up_by: str | None = None

    @property
    def given_up(self) -> bool:
        return self.given_up_by is not None
