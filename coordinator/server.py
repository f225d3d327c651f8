# SPDX-License-Identifier: Apache-2.0
"""The coordinator's shell: gRPC on one side, the store on the other, the core between.

All of the core runs on the event loop. Facts arrive in callbacks; after the
turn in which they came, one pass fetches what the core has to say, so that
many facts make one batch. Nodes' messages are taken as bytes and decoded by
protocol.wire, so that whatever is malformed is counted, and answered with a
reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import sqlite3
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Sequence,
)
from types import TracebackType
from typing import Any, Self

import grpc

from coordinator import streams
from coordinator.core.coordinator import CoordinatorCore
from coordinator.core.records import PutVerdict, StoredTrace, Write
from coordinator.counters import ServerCounters
from coordinator.index.indexer import Indexer
from coordinator.otlp_export.exporter import Exporter
from coordinator.questions import Questions
from coordinator.settings import core_config, policy, store_limits
from coordinator.store.reader import StoreReader
from coordinator.store.schema import in_words
from coordinator.store.writer import Store
from coordinator.streams import Outgoing
from protocol import wire
from protocol.messages import (
    CoordinatorMessage,
    Hello,
    NodeMessage,
    Refused,
    SliceReply,
    TraceId,
    Unknown,
    cut_utf8,
)
from protocol.sending import encoded
from protocol.versions import OURS, Versions
from runtime.log import Level, Log, MessageId
from runtime.main import die_if_it_fails
from runtime.schema import ConfigError
from runtime.settings.coordinator import Settings
from runtime.watchdog import Ask

_SERVICE = "backsight.v1.Coordinator"

# Writes, and replies, that wait for a disk which is slow, or full. Beyond, nodes
# are not listened to, and keep what they have to say; the bytes of slices are
# bounded by credit.
_UNDURABLE_WRITES_MAX = 65536

_OPTIONS = [
    ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", wire.MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a second coordinator must not share the port
    # A stream that was ended lasts, with a message, until its peer reads that it
    # was; a node has one on a connection, backsightctl a few.
    ("grpc.max_concurrent_streams", 64),
    # Nodes send a ping each 30 s at most; a quarter of that is no abuse yet.
    ("grpc.http2.min_ping_interval_without_data_ms", 7500),
    ("grpc.http2.max_ping_strikes", 0),
    # A node that vanished without a word is noticed within a minute.
    ("grpc.keepalive_time_ms", 40_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Saves a ping for each few frames of data.
    ("grpc.http2.bdp_probe", 0),
]

# Of nodes that are refused, and come again and again.
_SAID_REFUSED_MAX = 256

# At the end, for what is being sent.
_STOP_GRACE_S = 0.5


class CoordinatorServer:
    """One coordinator. Use as ``async with``; serves while it is entered."""

    def __init__(
        self, settings: Settings, incarnation: int, log: Log, versions: Versions = OURS
    ) -> None:
        self.counters = ServerCounters()
        self._settings = settings
        self._log = log
        self.news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._store = Store(
            settings.store_path,
            store_limits(settings.store),
            lambda token: _call_soon(self._loop, self._on_durable, token),
            log,
        )
        config = core_config(settings)
        self._closed = StoreReader(settings.store_path)
        self._core = CoordinatorCore(
            config,
            incarnation,
            self._store.recover_traces(config.closed_max),
            self._store.recover_nodes(),
            time.monotonic_ns(),
            versions,
            policy(settings.policy),
            self._closed_trace,
        )
        self._questions = Questions(
            settings.store_path,
            self._core,
            self.counters,
            self._changed,
            self._last_written,
            self.counted,
        )
        self._indexer = Indexer(self._store, settings.store_path, log)
        self._exporter = Exporter(settings.export, self._store, settings.store_path, log)
        self._followers = contextlib.ExitStack()
        self._sessions: dict[int, Outgoing] = {}
        self._streams: dict[int, Outgoing] = {}
        self._said_refused: dict[tuple[str, str], str] = {}  # by name and address; latest last
        self._last_number = 0
        self._submitted = self._durable = 0  # the last tokens
        self._keeps_up = asyncio.Event()
        self._keeps_up.set()
        self._flush_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self._handlers(),))

    def _handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                "Control": grpc.stream_stream_rpc_method_handler(self._control),
                "Slices": grpc.stream_stream_rpc_method_handler(self._slices),
                **self._questions.handlers(),
            },
        )

    async def __aenter__(self) -> Self:
        self._store.__enter__()
        try:
            listen = self._settings.listen
            # First, since gRPC says it on standard error, and in its own words.
            reason = _why_not(listen)
            if reason is None:
                try:
                    port = self._server.add_insecure_port(listen)
                except RuntimeError:
                    port = 0
                if port == 0:
                    reason = "gRPC refused it"
            if reason is not None:
                raise OSError(
                    f"listen: cannot listen on {listen}: {reason}; give it another endpoint, of"
                    " this machine and free"
                )
            await self._server.start()
            self._followers.enter_context(self._indexer)
            self._followers.enter_context(self._exporter)
        except BaseException:
            await self._questions.close()
            self._closed.__exit__(None, None, None)
            self._store.__exit__(None, None, None)
            raise
        self._changed()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._server.stop(_STOP_GRACE_S)
        # First: the last connection takes the journal into the file, which needs a writer.
        await self._questions.close()
        if self._timer is not None:
            self._timer.cancel()
        self._closed.__exit__(None, None, None)
        # In threads: they wait for the disk, but not for one that is full.
        self._store.stop_trying_again()
        await asyncio.to_thread(self._followers.close)
        await asyncio.to_thread(self._store.__exit__, None, None, None)

    # ----------------------------------------------------------------- core

    def _closed_trace(self, trace: TraceId) -> StoredTrace | None:
        """What the store has of a closed trace: some rows by their keys."""
        try:
            return self._closed.closed(trace)
        except sqlite3.Error as error:
            self._log.error(
                f"{self._settings.store_path}: cannot read a closed trace:"
                f" {in_words(self._settings.store_path, error)}",
                message_id=MessageId.STORE_FAILED,
            )
            return None

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _changed(self) -> None:
        """Facts came in: fetch what the core makes of them, once a turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _last_written(self) -> int:
        """The last token of all that the core has to say until now, which is written from here on."""
        self._flush()
        return self._submitted

    @die_if_it_fails
    def _on_durable(self, token: int) -> None:
        self._durable = token
        self._questions.on_durable(token)
        self._core.on_durable(token, time.monotonic_ns())
        self._changed()

    @die_if_it_fails
    def _on_timer(self) -> None:
        self._timer = None
        self._core.on_tick(time.monotonic_ns())
        self._changed()

    @die_if_it_fails
    def _flush(self) -> None:
        self._flush_due = False
        writes = self._core.take_writes()
        if writes:
            self._say_verdicts(writes)
            self._store.submit(writes)
            self._questions.on_written(writes)
            self._submitted = writes[-1].token
        waiting = max(self._submitted - self._durable, self._core.waiting_effects)
        if waiting <= _UNDURABLE_WRITES_MAX:
            self._keeps_up.set()
        else:
            self._keeps_up.clear()
        by_session: dict[int, list[CoordinatorMessage]] = {}
        for session, message in self._core.take_control():
            by_session.setdefault(session, []).append(message)
        for session, messages in by_session.items():
            self._say(session, messages)
        for stream, reply in self._core.take_slice_replies():
            self._reply(stream, reply)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_ns = time.monotonic_ns()
        wakeup_ns = self._core.next_wakeup_ns(now_ns)
        if wakeup_ns is not None:
            self._timer = self._loop.call_later((wakeup_ns - now_ns) / 1e9, self._on_timer)

    def _say_verdicts(self, writes: Sequence[Write]) -> None:
        if not self._log.says(Level.DEBUG):
            return
        for write in writes:
            record = write.record
            if isinstance(record, PutVerdict):
                verdict = record.verdict
                reasons = "; ".join(f"{r.kind} {r.node}: {r.detail}" for r in verdict.reasons)
                reasons = reasons or "all is here"
                self._log.debug(
                    f"trace {record.trace.hex()} is {verdict.kind}: {reasons}",
                    trace_id=record.trace.hex(),
                    verdict=verdict.kind,
                    reason=reasons,
                )

    def _say(self, session: int, messages: list[CoordinatorMessage]) -> None:
        outgoing = self._sessions.get(session)
        if outgoing is None:
            return
        for start in range(0, len(messages), wire.BATCH_MESSAGES_MAX):
            batch = messages[start : start + wire.BATCH_MESSAGES_MAX]
            for data in encoded(batch, wire.encode_coordinator_batch, self._cannot_send):
                outgoing.put(data)
        if any(isinstance(message, Refused) for message in messages):
            outgoing.end()

    def _reply(self, stream: int, reply: SliceReply) -> None:
        outgoing = self._streams.get(stream)
        if outgoing is not None:
            for data in encoded([reply], _encode_reply, self._cannot_send):
                outgoing.put(data)

    def _cannot_send(self, error: wire.WireError) -> None:
        """Leave a message out."""
        self.counters.unsendable += 1
        if self.counters.unsendable == 1:
            self._log.error(
                f"not sent, for this coordinator's own message breaks the protocol: {error}. That is"
                " a bug of backsight-coordinator, please report it; further ones are only counted,"
                " as server.unsendable in `backsightctl counters`"
            )

    # -------------------------------------------------------------- streams

    async def _control(
        self,
        requests: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[bytes, bytes],
    ) -> None:
        self.counters.streams += 1
        session, peer = self._number(), context.peer()
        outgoing = self._sessions[session] = Outgoing()
        try:
            reads = await streams.converse(
                context, outgoing, self._hear(requests, session, peer, outgoing)
            )
        finally:
            del self._sessions[session]
            self._core.on_node_lost(session, time.monotonic_ns())
            self.news.set()
            self._changed()
        if not reads:
            await self._end_unread(context)

    async def _end_unread(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """End a stream for good, of which nothing more is kept here.

        Waits until the peer reads that, or is gone: gRPC has a message of ours
        that comes before, and does not let a server take it back.
        """
        self.counters.not_reading += 1
        self._log.warning(
            f"{context.peer()}: does not read what it is told, so its stream is ended"
        )
        await context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"ended, since for {streams.UNREAD_TIMEOUT_S:g} s, or {streams.WAITING_BYTES_MAX >> 20} MiB,"
            " nothing was read of what the coordinator said",
        )

    async def _hear(
        self, requests: AsyncIterator[bytes], session: int, peer: str, outgoing: Outgoing
    ) -> None:
        """Take what a node says; a Refused ends the stream from the other task."""
        try:
            first = await streams.first(requests)
            if first is not None:
                messages = wire.decode_node_batch(first)
                hello = messages[0] if messages else None
                if not isinstance(hello, Hello):
                    self.counters.no_hello += 1
                    self._refuse(outgoing, "the first message of a stream must be a Hello")
                    return
                refused = self._core.on_node_connected(session, hello, peer, time.monotonic_ns())
                self._say_met(hello.node, peer, refused)
                self.news.set()
                self._take(session, messages[1:])
                await self._keeps_up.wait()
                async for data in requests:
                    self._take(session, wire.decode_node_batch(data))
                    await self._keeps_up.wait()
            outgoing.end()
        except TimeoutError:
            self.counters.no_hello += 1
            self._refuse(outgoing, f"no Hello came within {streams.GREETING_TIMEOUT_S:g} s")
        except wire.WireError as error:
            self.counters.malformed += 1
            self._log.warning(f"{peer}: malformed message refused: {error}")
            self._refuse(outgoing, f"malformed message: {error}")

    def _say_met(self, node: str, peer: str, refused: Refused | None) -> None:
        """A node came. It comes back for as long as it is refused, which is said once."""
        who = (node, peer.rpartition(":")[0])
        if refused is None:
            self._said_refused = {
                key: said for key, said in self._said_refused.items() if key[0] != node
            }
            self._log.info(
                f"node {node} connected from {peer}", node=node, message_id=MessageId.CONNECTED
            )
            return
        if self._said_refused.pop(who, None) != refused.reason:
            self._log.warning(
                f"{refused.reason}. Further attempts are only counted",
                node=node,
                reason=refused.reason,
            )
        self._said_refused[who] = refused.reason
        if len(self._said_refused) > _SAID_REFUSED_MAX:
            del self._said_refused[next(iter(self._said_refused))]

    def _take(self, session: int, messages: Iterable[NodeMessage | Unknown]) -> None:
        now_ns, realtime_ns = time.monotonic_ns(), time.time_ns()
        for message in messages:
            self._core.on_node_message(session, message, now_ns, realtime_ns)
        self._changed()

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
        self.counters.streams += 1
        stream = self._number()
        outgoing = self._streams[stream] = Outgoing()
        try:
            reads = await streams.converse(
                context, outgoing, self._receive(requests, stream, context, outgoing)
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
        context: grpc.aio.ServicerContext[bytes, bytes],
        outgoing: Outgoing,
    ) -> None:
        try:
            first = await streams.first(requests)
            if first is not None:
                opening = wire.decode_slices_message(first)
                if not isinstance(opening, wire.Opening):
                    self.counters.no_opening += 1
                    await context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT, "the first message must say who sends"
                    )
                self._core.on_slices_connected(
                    stream, opening.node, opening.incarnation, time.monotonic_ns()
                )
                self._changed()
                async for data in requests:
                    chunks = wire.decode_slices_message(data)
                    if isinstance(chunks, wire.Opening):
                        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "opened twice")
                    now_ns = time.monotonic_ns()
                    for chunk in chunks:
                        self._core.on_chunk(stream, chunk, now_ns)
                    self._changed()
                    await self._keeps_up.wait()
            outgoing.end()
        except TimeoutError:
            self.counters.no_opening += 1
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"nobody said within {streams.GREETING_TIMEOUT_S:g} s who sends",
            )
        except wire.WireError as error:
            self.counters.malformed += 1
            self._log.warning(f"{context.peer()}: malformed slice data refused: {error}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    @property
    def threads(self) -> dict[str, Ask]:
        """What must move so that the coordinator does."""
        return {"store": self._store.give_sign}

    def status_text(self) -> str:
        """How the coordinator is, in a line."""
        now = self._core.figures()
        return (
            f"{now.nodes_connected} of {now.nodes_known} nodes connected;"
            f" {now.traces_open} traces open, {now.traces_settled} settled;"
            f" store {self._store.stored_bytes >> 20} of {self._store.retention.limits.bytes_max >> 20} MiB"
        )

    def reconfigure(self, settings: Settings) -> None:
        """Go on with other settings, of which those that cannot be changed are the same."""
        try:
            self._exporter.reconfigure(settings.export)
        except OSError as error:
            raise ConfigError([str(error)]) from error
        self._settings = settings
        self._store.retention.limits = store_limits(settings.store)
        self._core.reconfigure(core_config(settings))
        self._core.set_policy(policy(settings.policy))
        self._changed()

    async def run(self) -> None:
        """All happens in callbacks."""

    def counted(self) -> dict[str, Any]:
        """All that was counted, by part and name."""
        return {
            "core": dataclasses.asdict(self._core.counters),
            "server": dataclasses.asdict(self.counters),
            "store": dataclasses.asdict(self._store.counters),
            "index": dataclasses.asdict(self._indexer.counters),
            "export": dataclasses.asdict(self._exporter.counters),
        }

    def status(self) -> dict[str, Any]:
        """All that was counted, and how things stand. On the event loop only."""
        return {
            **self.counted(),
            "now": dataclasses.asdict(self._core.figures()),
            "queues": {
                "export_traces": self._exporter.waiting,
                "index_changes": self._indexer.waiting,
                "index_s": self._indexer.waiting_s,
                "writes": self._submitted - self._durable,
                "messages_bytes": sum(
                    outgoing.waiting_bytes
                    for outgoing in (*self._sessions.values(), *self._streams.values())
                ),
            },
            "stored_bytes": self._store.stored_bytes,
            "store_has_reserve": int(self._store.retention.has_reserve),
            "limits": {
                "memory_bytes": self._settings.memory_bytes,
                "store_bytes": self._settings.store.bytes_max,
            },
            "traversal": dataclasses.asdict(self._core.traversal_s),
            "verdict": dataclasses.asdict(self._core.verdict_s),
        }


def _encode_reply(replies: Sequence[SliceReply]) -> bytes:
    (reply,) = replies
    return wire.encode_slice_reply(reply)


def _call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[[int], None], token: int
) -> None:
    # At the end the loop is closed before the store has written its last.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, token)


def _why_not(endpoint: str) -> str | None:
    """Why nothing can listen there; None if something can."""
    host, _, port = endpoint.rpartition(":")
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return None
