# SPDX-License-Identifier: Apache-2.0
"""Puts slices together from chunks, within the memory there is.

A slice grows at its end only: a chunk that starts beyond it is dropped and
answered with the durable offset, from which its node sends again; what lies before
it is known already. So the bytes written to the store are the slice, whatever was
repeated, or came out of order, on the way. A node that no longer has what is missing
in between keeps the rest until the trace is closed.

A node that lost its slice, or let go of it, may come with another one of the
same trace, which the epoch tells apart. The bytes of two are never put
together: the earlier one is kept where it is whole by its own status, else it
is given up for the later one. Either way something may be missing that only
the node knew of, so the part is a restarted one. Epochs of one report store rise,
so what is still said of an earlier slice is known for late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coordinator.core.config import CoordinatorConfig
from coordinator.core.credit import Credit
from coordinator.core.nodes import Node, Nodes
from coordinator.core.outbox import BytesDurable, Outbox
from coordinator.core.records import AppendSlice
from coordinator.core.trace import STAYING, Part, Trace
from protocol.messages import SliceChunk, SliceFlags, SliceStatus

OF_ONE_STORE = 1 << 32
"""Epochs that are closer to each other are of one report store: each begins at a random one of 62
bits (first_slice_epoch() in native/src/node/store.c)."""


def is_earlier(epoch: int, than: int) -> bool:
    """Whether a node let go of one slice before it began the other."""
    return 0 < than - epoch < OF_ONE_STORE


@dataclass(slots=True)
class _Stream:
    """A Slices stream. It may send when its node is the one that said Hello."""

    name: str
    incarnation: int
    number: int
    """By which its node knows it."""
    node: Node | None = None


class Assembly:
    """The Slices streams, and how far each slice is."""

    def __init__(self, config: CoordinatorConfig, nodes: Nodes, outbox: Outbox) -> None:
        self.credit = Credit(config.memory_bytes, config.credit_window_bytes)
        self._slice_bytes_max = config.slice_bytes_max
        self._nodes = nodes
        self._outbox = outbox
        self._streams: dict[int, _Stream] = {}

    def reconfigure(self, config: CoordinatorConfig) -> None:
        """Go on with other bounds; credit that is out stays out."""
        self.credit.reconfigure(config.memory_bytes, config.credit_window_bytes)
        self._slice_bytes_max = config.slice_bytes_max

    def connect(self, stream: int, name: str, incarnation: int, number: int) -> Node | None:
        """A stream opened, which its node knows by a number; the node, if it may send now."""
        self._streams[stream] = _Stream(name, incarnation, number)
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

    def numbered(self, node: Node, number: int) -> int | None:
        """The stream by which a node may send, if that is the one that it knows by this number."""
        stream = node.stream
        return stream if stream is not None and self._streams[stream].number == number else None

    def resume(self, stream: int, node: Node, trace: Trace, part: Part) -> None:
        """Tell a new stream how far a slice is, where the node may not know."""
        unsure = part.acked_on is None or part.acked_on == node.previous_stream
        if part.durable and (unsure or part.missing_bytes):
            self._ack(stream, trace, part, hurried=True)

    def meet(self, trace: Trace, part: Part, epoch: int, *, begins: bool, told: bool) -> bool:
        """A slice of this epoch has come up; False if another one is kept for good.

        Begins it where the part has none, or gives up what is not whole for it,
        if it ``begins``: its first bytes are here, or announced. ``told``: a
        status says so, which is of the slice that the node has now; a chunk may
        be a late one of the slice before.
        """
        if epoch in (0, part.epoch):
            return True
        if epoch == part.epoch_before and (part.is_whole or not told):
            # Where nothing is kept, nobody may forget for it what he still has.
            return not part.is_whole or (not told and not part.received)
        # Late, of one that its node let go of before it spoke of this one.
        was_let_go = not told and is_earlier(epoch, part.epoch)
        if part.is_empty and not was_let_go:
            said = part.status
            if (
                said is not None
                and said.epoch not in (0, epoch)
                and (said.flags & STAYING or said.open_handles)
            ):
                # What it said of the slice before, it may not know any more.
                part.restarted = True
            part.epoch, part.status = epoch, None
            return True
        part.restarted = True
        if part.is_whole and not part.is_empty:
            part.epoch_before = epoch
            return False
        if begins and not was_let_go:
            part.epoch_before, part.epoch, part.status = part.epoch, epoch, None
            part.received = part.durable = 0
            trace.evidence.restart(part.node)
            self.expect(trace, part)
        return True

    @staticmethod
    def is_late(part: Part, status: SliceStatus) -> bool:
        """Whether a status is of a slice before the one that is here: bytes of this overtook it.

        Then there is a slice that the node let go of, unless that was empty.
        """
        if not status.epoch or not is_earlier(status.epoch, part.epoch):
            return False
        if status.bytes or status.flags & STAYING or status.open_handles:
            part.restarted = True
        return True

    @staticmethod
    def hold(part: Part, epoch: int, end: int) -> None:
        """A chunk fits nowhere: its node holds all before ``end`` until the trace is closed.

        A late chunk is of a slice that the node has let go of, and says nothing of the last one.
        """
        if part.of_no_use is not None:
            held, before = part.of_no_use
            if is_earlier(epoch, held):
                return
            if epoch == held:
                # It may send once more what is before that.
                end = max(end, before)
        part.of_no_use = epoch, end

    def within_bounds(self, status: SliceStatus) -> SliceStatus:
        """What a node says of its slice, as far as it is stored."""
        if status.bytes <= self._slice_bytes_max:
            return status
        return replace(
            status, bytes=self._slice_bytes_max, flags=status.flags | SliceFlags.TRUNCATED
        )

    def expect(self, trace: Trace, part: Part) -> None:
        """What is missing of a slice is to come, and takes credit."""
        node = self._nodes.by_id.get(part.node)
        if node is None:
            return
        due = 0 if part.lost or trace.abandoned_by is not None else part.missing_bytes
        node.expected_bytes += due - part.expected_bytes
        part.expected_bytes = due
        if node.stream is not None:
            self.credit.demand(node.stream, node.expected_bytes)

    def begin_again(self, stream: int, chunk: SliceChunk) -> None:
        """A chunk from the middle of a slice of which the beginning did not come."""
        self.ignore(stream, chunk)
        self._outbox.ack(stream, chunk.trace, chunk.epoch, 0, again=True)

    def ignore(self, stream: int, chunk: SliceChunk) -> None:
        """A chunk for which there was room is of no use."""
        self.credit.free(len(chunk.data))
        self.credit.top_up(stream)

    def decline(self, stream: int, node: Node, chunk: SliceChunk, end: int, stored: int) -> None:
        """A chunk is not needed: the node may forget all before end, of which that much is stored.

        When all that was written is durable, since the node may be left with
        nothing that it could repeat instead.
        """
        self.ignore(stream, chunk)
        self._outbox.after_writes(BytesDurable(chunk.trace, node.id, chunk.epoch, end, stored, 0))

    def take(self, stream: int, node: Node, trace: Trace, part: Part, chunk: SliceChunk) -> bytes:
        """Take a chunk for which there was room; what of it is new.

        What lies beyond the largest slice is dropped; the node may forget it.
        """
        size = len(chunk.data)
        end = chunk.offset + size
        fresh = b""
        if chunk.offset <= part.received:
            fresh = chunk.data[part.received - chunk.offset : self._slice_bytes_max - chunk.offset]
        if not fresh:
            # A gap, or nothing new: where to go on.
            self.credit.free(size)
            if part.received >= self._slice_bytes_max:
                self._outbox.after_writes(BytesDurable(trace.id, node.id, part.epoch, end, end, 0))
            elif chunk.offset > part.received or end <= part.durable:
                self._ack(stream, trace, part, hurried=True, again=chunk.offset > part.received)
        else:
            offset = part.received
            part.received += len(fresh)
            self._outbox.write(
                AppendSlice(
                    trace.id,
                    node.name,
                    part.epoch,
                    offset,
                    fresh,
                    chunk.zstd if len(fresh) == size else b"",
                ),
                BytesDurable(trace.id, node.id, part.epoch, end, end, len(fresh)),
            )
            self.credit.free(size - len(fresh))
        self.expect(trace, part)
        self.credit.top_up(stream)
        return fresh

    def durable(self, effect: BytesDurable, trace: Trace | None) -> None:
        """Bytes are in the store: free their memory, and tell the node."""
        self.credit.free(effect.size)
        node = self._nodes.by_id.get(effect.node)
        part = trace.parts.get(effect.node) if trace is not None else None
        if trace is not None and part is not None and part.epoch == effect.epoch:
            is_full = part.received >= self._slice_bytes_max
            # What came while the trace was closed, and nobody wanted, is wanted now.
            again = effect.end > part.received and not is_full
            durable = min(effect.durable, part.received) if again else effect.durable
            part.durable = max(part.durable, durable)
            if node is not None and node.stream is not None:
                self._ack(node.stream, trace, part, hurried=again, again=again)
        elif node is not None and node.stream is not None:
            # So is it where nothing else is here that would be kept instead.
            again = trace is not None and (part is None or part.is_empty)
            end = 0 if again else effect.end
            hurried = self.credit.hurries(node.stream)
            self._outbox.ack(
                node.stream, effect.trace, effect.epoch, end, hurried=hurried, again=again
            )

    def _ack(
        self, stream: int, trace: Trace, part: Part, *, hurried: bool = False, again: bool = False
    ) -> None:
        part.acked_on = stream
        hurried = hurried or self.credit.hurries(stream)
        self._outbox.ack(stream, trace.id, part.epoch, part.durable, hurried=hurried, again=again)

    def _admit(self, stream: int) -> Node | None:
        known = self._streams[stream]
        node = self._nodes.named(known.name)
        if node is None or node.incarnation != known.incarnation:
            return None
        known.node = node
        if node.stream is not None:
            node.previous_stream = node.stream
            # Nobody hoards by many streams what others could send.
            self.credit.close(node.stream)
        node.stream = stream
        self.credit.open(stream, patient=node.takes_late_acks)
        self.credit.demand(stream, node.expected_bytes)
        return node
