# SPDX-License-Identifier: Apache-2.0
"""A stream between a node and the coordinator, and how it breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.messages import Hello, SliceReply, Snapshot
from tests.simulation.network import Direction

if TYPE_CHECKING:
    from tests.simulation.coordinator import SimCoordinator
    from tests.simulation.node import SimNode


class Stream:
    """One bidirectional stream between a node and the coordinator."""

    def __init__(self, node: SimNode, coordinator: SimCoordinator, kind: str) -> None:
        scheduler = node.scheduler
        self.node = node
        self.coordinator = coordinator
        self.kind = kind
        self.number = 0
        self.accepted = False
        self._core = node.core
        self._peer = coordinator.core
        self.up = Direction(scheduler, self._arrive_up)
        self.down = Direction(scheduler, self._arrive_down)
        coordinator.add_stream(self)

    def delay_ns(self) -> int:
        link = self.node.link
        jitter = self.node.rng.randrange(link.jitter_ns + 1) if link.jitter_ns else 0
        return link.latency_ns + jitter + link.stream_delay_ns.get(self.kind, 0)

    def send_up(self, message: object, size: int = 0) -> None:
        rate = self.node.link.bytes_per_s if size else None
        # What opens a stream is said once, by definition.
        if self.node.duplicate and not isinstance(message, Hello | tuple):
            self.up.send(message, self.delay_ns(), size, rate)
        self.up.send(message, self.delay_ns(), size, rate)

    def send_down(self, message: object) -> None:
        if self.node.duplicate and isinstance(message, SliceReply):
            # Credit adds up: it is no fact that may be repeated.
            self.down.send(replace(message, credit_bytes=0), self.delay_ns())
        elif self.node.duplicate and not isinstance(message, Snapshot):
            # So does what a node may take of a snapshot.
            self.down.send(message, self.delay_ns())
        self.down.send(message, self.delay_ns() + self.node.link.slow_ns)

    def _arrive_up(self, message: object) -> None:
        if self.coordinator.core is self._peer and self._peer is not None:
            self.coordinator.on_message(self, message)

    def _arrive_down(self, message: object) -> None:
        self.node.on_message(self, self._core, message)

    def break_off(self, *, node_notices_ns: int = 0, coordinator_notices_ns: int = 0) -> None:
        """The connection is gone: all that is in flight is lost.

        Until a side notices, the stream is half-open to it: what it sends is
        lost too.
        """
        if not self.up.open:
            return
        self.up.open = self.down.open = False
        scheduler = self.node.scheduler
        scheduler.after(node_notices_ns, lambda: self.node.on_broken(self, self._core))
        scheduler.after(
            coordinator_notices_ns, lambda: self.coordinator.on_broken(self, self._peer)
        )
