# SPDX-License-Identifier: Apache-2.0
"""What nodes say and are told, on the two streams of each.

Their messages are taken as bytes and decoded by protocol.wire, so that whatever is
malformed is counted, and answered with a reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import grpc

from coordinator.core.closed import UnreadableError
from coordinator.core.coordinator import CoordinatorCore
from coordinator.counters import ServerCounters
from coordinator.rpc import streams
from coordinator.rpc.admission import Who
from coordinator.rpc.budget import Budget
from coordinator.rpc.identity import Identity
from coordinator.rpc.peers import address_of
from coordinator.rpc.streams import Outgoing
from protocol import wire
from protocol.messages import (
    CoordinatorMessage,
    Hello,
    NodeMessage,
    Refused,
    SliceReply,
    Unknown,
    cut_utf8,
)
from protocol.sending import encoded
from runtime.log import Log, MessageId, PeerLog

# A node says again on its next stream what was not heard. Soon enough for a disk that failed for a
# moment, and seldom enough that one bad page of the store does not keep its nodes away.
_SAID_AGAIN_S = 60.0

# Of nodes that are refused, and come again and again.
_SAID_REFUSED_MAX = 256


class NodeStreams:
    """The streams of all nodes.

    ``changed`` is called when the core was told something; ``news`` is set when a node came or went.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        counters: ServerCounters,
        who: Who,
        budget: Budget,
        changed: Callable[[], None],
        news: asyncio.Event,
        log: Log,
        peer_log: PeerLog,
    ) -> None:
        self._core = core
        self._counters = counters
        self._who = who
        self._budget = budget
        self._changed = changed
        self._news = news
        self._log = log
        self._peer_log = peer_log
        self._sessions: dict[int, Outgoing] = {}
        self._streams: dict[int, Outgoing] = {}
        self._said_refused: dict[tuple[str, str], str] = {}  # by name and address; latest last
        self._last_number = 0
        self._zstd = wire.Zstd()
        self.keeps_up = asyncio.Event()
        """Nodes are listened to while it is set. Before, they can connect, and wait."""

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By the names of the calls."""
        return {
            "Control": grpc.stream_stream_rpc_method_handler(self._control),
            "Slices": grpc.stream_stream_rpc_method_handler(self._slices),
        }

    @property
    def waiting_bytes(self) -> int:
        """Of messages that wait to be sent."""
        return sum(
            outgoing.waiting_bytes
            for outgoing in (*self._sessions.values(), *self._streams.values())
        )

    def _identity(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> Identity | None:
        caller = self._who(context)
        return caller.identity if caller is not None else None

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def say(self, session: int, messages: Sequence[CoordinatorMessage]) -> None:
        outgoing = self._sessions.get(session)
        if outgoing is None:
            return
        for start in range(0, len(messages), wire.BATCH_MESSAGES_MAX):
            batch = messages[start : start + wire.BATCH_MESSAGES_MAX]
            for data in encoded(batch, wire.encode_coordinator_batch, self._cannot_send):
                outgoing.put(data)
        if any(isinstance(message, Refused) for message in messages):
            outgoing.end()

    def reply(self, stream: int, reply: SliceReply) -> None:
        outgoing = self._streams.get(stream)
        if outgoing is not None:
            for data in encoded([reply], _encode_reply, self._cannot_send):
                outgoing.put(data)

    def _cannot_send(self, error: wire.WireError) -> None:
        """Leave a message out."""
        self._counters.unsendable += 1
        if self._counters.unsendable == 1:
            self._log.error(
                f"not sent, for this coordinator's own message breaks the protocol: {error}. That is"
                " a bug of backsight-coordinator, please report it; further ones are only counted,"
                " as server.unsendable in `backsightctl counters`"
            )

    async def _control(
        self,
        requests: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[bytes, bytes],
    ) -> None:
        self._counters.streams += 1
        session, peer = self._number(), context.peer()
        outgoing = self._sessions[session] = Outgoing()
        try:
            reads = await streams.converse(
                context,
                outgoing,
                self._hear(requests, session, peer, outgoing, self._identity(context)),
            )
        finally:
            del self._sessions[session]
            self._core.on_node_lost(session, time.monotonic_ns())
            self._news.set()
            self._changed()
        if not reads:
            await self._end_unread(context)

    async def _end_unread(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """End a stream for good, of which nothing more is kept here.

        Waits until the peer reads that, or is gone: gRPC has a message of ours
        that comes before, and does not let a server take it back.
        """
        self._counters.not_reading += 1
        self._peer_log.warning(
            address_of(context.peer()),
            f"{context.peer()}: does not read what it is told, so its stream is ended",
        )
        await context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"ended, since for {streams.UNREAD_TIMEOUT_S:g} s, or {streams.WAITING_BYTES_MAX >> 20} MiB,"
            " nothing was read of what the coordinator said",
        )

    async def _hear(
        self,
        requests: AsyncIterator[bytes],
        session: int,
        peer: str,
        outgoing: Outgoing,
        identity: Identity | None,
    ) -> None:
        """Take what a node says; a Refused ends the stream from the other task."""
        try:
            first = await streams.first(requests)
            if first is not None:
                self._budget.delivered(peer, len(first))
                messages = wire.decode_node_batch(first, self._zstd)
                hello = messages[0] if messages else None
                if not isinstance(hello, Hello):
                    self._counters.no_hello += 1
                    self._refuse(outgoing, "the first message of a stream must be a Hello")
                    return
                reason = _why_another(hello.node, identity)
                if reason is not None:
                    self._counters.not_permitted += 1
                    self._say_refused(hello.node, peer, reason, f"{peer}: refused: {reason}")
                    self._refuse(outgoing, reason)
                    return
                await self._keep_up(peer)
                refused = self._core.on_node_connected(
                    session,
                    hello,
                    peer,
                    time.monotonic_ns(),
                    "" if identity is None else str(identity),
                )
                if refused is None:
                    self._say_connected(hello.node, peer)
                else:
                    self._say_refused(hello.node, peer, refused.reason, refused.reason)
                self._news.set()
                self._take(session, messages[1:], outgoing)
                await self._keep_up(peer)
                async for data in requests:
                    self._budget.delivered(peer, len(data))
                    self._take(session, wire.decode_node_batch(data, self._zstd), outgoing)
                    if not self.keeps_up.is_set():
                        await self._keep_up(peer)
            outgoing.end()
        except TimeoutError:
            self._counters.no_hello += 1
            self._refuse(outgoing, f"no Hello came within {streams.GREETING_TIMEOUT_S:g} s")
        except wire.WireError as error:
            self._counters.malformed += 1
            self._peer_log.warning(address_of(peer), f"{peer}: malformed message refused: {error}")
            self._refuse(outgoing, f"malformed message: {error}")

    async def _keep_up(self, peer: str) -> None:
        with self._budget.unread(peer):
            await self.keeps_up.wait()

    def _say_connected(self, node: str, peer: str) -> None:
        self._said_refused = {
            key: said for key, said in self._said_refused.items() if key[0] != node
        }
        self._log.info(
            f"node {node} connected from {peer}", node=node, message_id=MessageId.CONNECTED
        )

    def _say_refused(self, node: str, peer: str, reason: str, text: str) -> None:
        """A node comes back for as long as it is refused, each time from another port: said once."""
        who = (node, address_of(peer))
        if self._said_refused.pop(who, None) != reason:
            self._peer_log.warning(
                who[1], f"{text}. Further attempts are only counted", node=node, reason=reason
            )
        self._said_refused[who] = reason
        if len(self._said_refused) > _SAID_REFUSED_MAX:
            del self._said_refused[next(iter(self._said_refused))]

    def _take(
        self, session: int, messages: Iterable[NodeMessage | Unknown], outgoing: Outgoing
    ) -> None:
        now_ns, realtime_ns = time.monotonic_ns(), time.time_ns()
        for message in messages:
            try:
                self._core.on_node_message(session, message, now_ns, realtime_ns)
            except UnreadableError:
                self._not_heard(outgoing)
        self._changed()

    def _not_heard(self, outgoing: Outgoing) -> None:
        """Of a trace that the store cannot read. What else the stream says is heard."""
        self._counters.not_heard += 1
        outgoing.end_within(_SAID_AGAIN_S)

    @staticmethod
    def _refuse(outgoing: Outgoing, reason: str) -> None:
        refused = Refused(cut_utf8(reason, wire.REASON_BYTES_MAX))
        outgoing.put(wire.encode_coordinator_batch([refused]))
        outgoing.end()

    async def _slices(
        self,
        requests: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[bytes, bytes],
    ) -> None:
        self._counters.streams += 1
        stream, peer = self._number(), context.peer()
        outgoing = self._streams[stream] = Outgoing()
        try:
            reads = await streams.converse(
                context,
                outgoing,
                self._receive(requests, stream, peer, context, outgoing, self._identity(context)),
            )
        finally:
            del self._streams[stream]
            self._core.on_slices_lost(stream, time.monotonic_ns())
            self._changed()
        if not reads:
            await self._end_unread(context)

    async def _receive(
        self,
        requests: AsyncIterator[bytes],
        stream: int,
        peer: str,
        context: grpc.aio.ServicerContext[bytes, bytes],
        outgoing: Outgoing,
        identity: Identity | None,
    ) -> None:
        try:
            first = await streams.first(requests)
            if first is not None:
                self._budget.delivered(peer, len(first))
                opening = wire.decode_slices_message(first, self._zstd)
                if not isinstance(opening, wire.Opening):
                    self._counters.no_opening += 1
                    await context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT, "the first message must say who sends"
                    )
                reason = _why_another(opening.node, identity)
                if reason is not None:
                    self._counters.not_permitted += 1
                    said = f"{peer}: refused: {reason}"
                    self._peer_log.warning(address_of(peer), said, node=opening.node)
                    await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
                await self._keep_up(peer)
                self._core.on_slices_connected(
                    stream,
                    opening.node,
                    opening.incarnation,
                    time.monotonic_ns(),
                    opening.number,
                )
                self._changed()
                async for data in requests:
                    self._budget.delivered(peer, len(data))
                    chunks = wire.decode_slices_message(data, self._zstd)
                    if isinstance(chunks, wire.Opening):
                        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "opened twice")
                    now_ns = time.monotonic_ns()
                    for chunk in chunks:
                        try:
                            self._core.on_chunk(stream, chunk, now_ns)
                        except UnreadableError:
                            self._not_heard(outgoing)
                    self._changed()
                    if not self.keeps_up.is_set():
                        await self._keep_up(peer)
            outgoing.end()
        except TimeoutError:
            self._counters.no_opening += 1
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"nobody said within {streams.GREETING_TIMEOUT_S:g} s who sends",
            )
        except wire.WireError as error:
            self._counters.malformed += 1
            self._peer_log.warning(
                address_of(peer), f"{peer}: malformed slice data refused: {error}"
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _encode_reply(replies: Sequence[SliceReply]) -> bytes:
    (reply,) = replies
    return wire.encode_slice_reply(reply)


def _why_another(node: str, identity: Identity | None) -> str | None:
    """Why a stream is not of the node that it says it is; None if it is, or nobody is asked."""
    if identity is None or identity.name == node:
        return None
    return (
        f"this stream says to be of node {node}, and its certificate is of {identity}; set `node` to"
        " the name in the certificate, or get one for this name"
    )
