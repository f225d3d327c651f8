# SPDX-License-Identifier: Apache-2.0
"""Puts slices together from chunks, within the memory there is.

A slice grows at its end only: a chunk that starts beyond it is dropped and
answered with the durable offset, what lies before it is known already. So the
bytes written to the store are the slice, whatever was repeated on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.core.config import CoordinatorConfig
from coordinator.core.credit import Credit
from coordinator.core.nodes import Node, Nodes
from coordinator.core.outbox import BytesDurable, Outbox
from coordinator.core.records import AppendSlice
from coordinator.core.trace import Part, Trace
from protocol.messages import SliceChunk


@dataclass(slots=True)
class _Stream:
    """A Slices stream. It may send when its node is the one that said Hello."""

    name: str
    incarnation: int
    node: Node | None = None


class Assembly:
    """The Slices streams, and how far each slice is."""

    def __init__(self, config: CoordinatorConfig, nodes: Nodes, outbox: Outbox) -> None:
        self.credit = Credit(config.memory_bytes, config.credit_window_bytes)
        self._nodes = nodes
        self._outbox = outbox
        self._streams: dict[int, _Stream] = {}

    def connect(self, stream: int, name: str, incarnation: int) -> Node | None:
        """A stream opened; its node, if it may send now."""
        self._streams[stream] = _Stream(name, incarnation)
        return self._admit(stream)

    def hello(self, node: Node) -> list[int]:
        """A node said who it is: the streams that may send from now on."""
        return [
            stream
            for stream, known in self._streams.items()
            if known.node is None and known.name == node.name and self._admit(stream) is not None
        ]

    def lost(self, stream: int) -> None:
        known = self._streams.pop(stream, None)
        if known is None:
            return
        self.credit.close(stream)
        self._outbox.forget_stream(stream)
        if known.node is not None and known.node.stream == stream:
            known.node.stream = None
            known.node.previous_stream = stream

    def sender(self, stream: int) -> Node | None:
        """The node behind a stream that may send."""
        known = self._streams.get(stream)
        return known.node if known is not None else None

    def resume(self, stream: int, node: Node, trace: Trace, part: Part) -> None:
        """Tell a new stream how far a slice is, where the node may not know."""
        unsure = part.acked_on is None or part.acked_on == node.previous_stream
        if part.durable and (unsure or part.missing_bytes):
            self._ack(stream, trace, part)

    def take(self, stream: int, node: Node, trace: Trace, part: Part, chunk: SliceChunk) -> bytes:
        """Take a chunk for which there was room; what of it is new."""
        size = len(chunk.data)
        fresh = b""
        if chunk.offset <= part.received:
            fresh = chunk.data[part.received - chunk.offset :]
        if not fresh:
            # A gap, or nothing new: where to go on.
            self.credit.free(size)
            if chunk.offset > part.received or chunk.offset + size <= part.durable:
                self._ack(stream, trace, part)
        else:
            offset = part.received
            part.received += len(fresh)
            self._outbox.write(
                AppendSlice(trace.id, node.name, offset, fresh),
                BytesDurable(trace.id, node.id, part.received, len(fresh)),
            )
            self.credit.free(size - len(fresh))
        self.credit.top_up(stream)
        return fresh

    def durable(self, effect: BytesDurable, trace: Trace | None) -> None:
        """Bytes are in the store: free their memory, and tell the node."""
        self.credit.free(effect.size)
        node = self._nodes.by_id.get(effect.node)
        part = trace.parts.get(effect.node) if trace is not None else None
        if trace is not None and part is not None:
            part.durable = effect.end
            if node is not None and node.stream is not None:
                self._ack(node.stream, trace, part)
        elif node is not None and node.stream is not None:
            self._outbox.ack(node.stream, effect.trace, effect.end)

    def _ack(self, stream: int, trace: Trace, part: Part) -> None:
        part.acked_on = stream
        self._outbox.ack(stream, trace.id, part.durable)

    def _admit(self, stream: int) -> Node | None:
        known = self._streams[stream]
        node = self._nodes.named(known.name)
        if node is None or node.incarnation != known.incarnation:
            return None
        known.node = node
        if node.stream is not None:
            node.previous_stream = node.stream
        node.stream = stream
        self.credit.open(stream)
        return node
