# SPDX-License-Identifier: Apache-2.0
"""The node's connections to one coordinator.

One Control stream for as long as the daemon runs, and a Slices stream, on a
connection of its own, only while there is something to report. Both are
written by tasks that fetch from the core when they can send: what the
coordinator does not take stays in the core, where priorities decide.

Thrifty, since every byte leaves the node: a batch per turn of the event loop,
no metadata of ours, pings at most each 30 s, and none while nothing is open.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import grpc

from appliance.core.node import NodeCore, earliest
from protocol import wire
from protocol.messages import CHUNKS_MAX, SliceChunk
from protocol.sending import encoded
from protocol.versions import Feature
from runtime.log import Log, MessageId
from runtime.settings.tls import NodeTlsSettings
from runtime.tls import LOOK_EVERY_S, Rotating, Usage, why_not

_CONTROL = "/backsight.v1.Coordinator/Control"
_SLICES = "/backsight.v1.Coordinator/Slices"

_OPTIONS = [
    ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
    # Else gRPC puts both streams on one connection.
    ("grpc.use_local_subchannel_pool", 1),
    # The coordinator is a machine of ours, not somewhere behind a web proxy.
    ("grpc.enable_http_proxy", 0),
    # Replays are the core's business; service configs come from DNS.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),
]

_BACKOFF_FIRST_S = 0.1
_BACKOFF_MAX_S = 10.0

# Reasons for not being connected, which are few.
_SAID_MAX = 16

_TLS_SECTION = "coordinator.tls"

# Why a stream ended, where it is no error.
_ENDED = "it ended the stream"
_IDLE = "nothing to report"
_WITH_CONTROL = "its Control stream ended"

# Of chunks in one message. The coordinator's loop is busy with it for a millisecond or two.
_LIST_BYTES = 256 << 10

# The coordinator ends a stream so for who calls, or for what it does.
_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class _Refusal(str):
    """Why a stream ended, by the coordinator's own will."""

    __slots__ = ()


_Call = grpc.aio.StreamStreamCall[bytes, bytes]


class Backoff:
    """Waits between attempts: doubling, up to a bound, each by chance between half and all of it.

    Chance keeps a thousand nodes from coming back to a coordinator at once.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next_s = _BACKOFF_FIRST_S

    def reset(self) -> None:
        """The last attempt was a success."""
        self._next_s = _BACKOFF_FIRST_S

    def next_s(self) -> float:
        """How long to wait before the next one."""
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, _BACKOFF_MAX_S)
        return wait_s


@dataclass(slots=True)
class UplinkCounters:
    """What became of the connections. They only rise."""

    control_connects: int = 0
    control_lost: int = 0
    slices_connects: int = 0
    slices_lost: int = 0
    slice_replies: int = 0
    malformed: int = 0  # messages of the coordinator
    unsendable: int = 0  # messages of this node that break the protocol


class Uplink:
    """Drives the core's messages to and from the coordinator of ``shard``.

    ``addresses`` tells by which ones peers know this node, asked at each connect;
    ``on_fact`` is called when the core learned something. A Slices connection that
    had nothing to report for ``slices_idle_s`` is closed: the credit that it holds
    is memory of the coordinator, which others may want.
    """

    def __init__(
        self,
        endpoint: str,
        opening: wire.Opening,
        core: NodeCore,
        addresses: Callable[[], Awaitable[tuple[str, ...]]],
        on_fact: Callable[[], None],
        log: Log,
        rng: random.Random,
        slices_idle_s: float = 30.0,
        tls: NodeTlsSettings | None = None,
        shard: int = 0,
    ) -> None:
        self.counters = UplinkCounters()
        self.welcomed = False
        """Whether the coordinator has taken this node in, on the present stream."""
        self.not_connected = ""
        """Why not, as the last attempt ended; empty while it has, and before the first ended."""
        self._endpoint = endpoint
        self._opening = opening
        self._core = core
        self._shard = shard
        self._link = core.links[shard]
        self._addresses = addresses
        self._on_fact = on_fact
        self._log = log
        self._rng = rng
        self._slices_idle_s = slices_idle_s
        self._files: Rotating | None = None
        self._server_name: str | None = None
        if tls is not None:
            self._files = Rotating(tls, _TLS_SECTION, Usage.CLIENT, log)
            self._server_name = tls.server_name
        self._control_due = asyncio.Event()
        self._chunks_due = asyncio.Event()
        self._slices_wanted = asyncio.Event()
        self._control_lost = asyncio.Event()
        self._slices_number = 0
        self._zstd = wire.Zstd()
        self._said: deque[str] = deque(maxlen=_SAID_MAX)  # what is wrong, since it was not

    def poke(self) -> int | None:
        """Send what the core has to send now, if there is anything.

        Returns when it may have something else to send without a new fact.
        """
        now_ns = time.monotonic_ns()
        control_ns, chunks_ns = (
            self._core.next_control_ns(now_ns, self._shard),
            self._core.next_chunks_ns(now_ns, self._shard),
        )
        if control_ns is not None and control_ns <= now_ns:
            self._control_due.set()
            control_ns = None  # known when that is sent
        if chunks_ns is not None and chunks_ns <= now_ns:
            self._chunks_due.set()
            chunks_ns = None
        if not self._link.slices_connected and self._core.wants_slices_connection(self._shard):
            self._slices_wanted.set()
        return earliest(control_ns, chunks_ns)

    @property
    def expires_at_s(self) -> float:
        """When this node's certificate is over, or was, in seconds since 1970; 0: there is none."""
        return self._files.expires_at_s if self._files is not None else 0.0

    def reconfigure(self, tls: NodeTlsSettings | None) -> None:
        """Connect with these files from now on; TlsError leaves all as it was."""
        if tls is not None and self._files is not None:
            self._files.take_up(tls)
            self._server_name = tls.server_name

    async def run(self) -> None:
        """Keep the connections up, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._files is not None:
                tasks.create_task(_look_again(self._files))
            tasks.create_task(self._run_control())
            tasks.create_task(self._run_slices())

    # --------------------------------------------------------------- control

    async def _run_control(self) -> None:
        backoff = Backoff(self._rng)
        while True:
            why = await self._connected(_CONTROL, self._control)
            self._core.on_control_lost(time.monotonic_ns(), self._shard)
            self._control_lost.set()
            self.counters.control_lost += 1
            if self.welcomed:
                self.welcomed = False
                backoff.reset()
            self._on_fact()
            refused = self._link.refused or (why if isinstance(why, _Refusal) else None)
            what = (
                f"the coordinator at {self._endpoint} refuses this node"
                if refused is not None
                else f"no coordinator at {self._endpoint}"
            )
            self.not_connected = refused or why
            self._warn(what, self.not_connected, MessageId.DISCONNECTED)
            await asyncio.sleep(backoff.next_s())

    def _warn(self, what: str, why: str, message_id: str) -> None:
        # Once, not with each attempt; of a name that nobody knows gRPC says two things in turn.
        text = f"{what}: {why}; trying again"
        if text not in self._said:
            self._said.append(text)
            self._log.warning(text, message_id=message_id, reason=why)

    async def _control(self, call: _Call) -> str:
        # The address that faces the coordinator may have come with the way to it.
        await call.wait_for_connection()
        addresses = await self._addresses()
        self.counters.control_connects += 1
        self._core.on_control_connected(time.monotonic_ns(), addresses, self._shard)
        self._control_due.set()
        return await _first_to_end(self._write_control(call), self._read_control(call))

    async def _write_control(self, call: _Call) -> str:
        while True:
            await self._control_due.wait()
            self._control_due.clear()
            messages = self._core.take_control(time.monotonic_ns(), time.time_ns(), self._shard)
            encode = partial(wire.encode_node_batch, zstd=self._zstd_if_known())
            for start in range(0, len(messages), wire.BATCH_MESSAGES_MAX):
                batch = messages[start : start + wire.BATCH_MESSAGES_MAX]
                for data in encoded(batch, encode, self._cannot_send):
                    await call.write(data)
            self._go_on()

    def _go_on(self) -> None:
        """After something was taken from the core: there may be more, now or later."""
        now_ns = time.monotonic_ns()
        later_ns = earliest(
            self._core.next_control_ns(now_ns, self._shard),
            self._core.next_chunks_ns(now_ns, self._shard),
        )
        if later_ns is not None:
            self._on_fact()

    def _cannot_send(self, error: wire.WireError) -> None:
        """Leave a message out."""
        self.counters.unsendable += 1
        if self.counters.unsendable == 1:
            self._log.error(
                f"not sent, for this node's own message breaks the protocol: {error}. That is a"
                " bug of backsight-node, please report it; further ones are only counted, as"
                " uplink.unsendable in `backsightctl status`"
            )

    async def _read_control(self, call: _Call) -> str:
        async for data in call:
            messages = wire.decode_coordinator_batch(data)
            now_ns, realtime_ns = time.monotonic_ns(), time.time_ns()
            for message in messages:
                self._core.on_control(message, now_ns, realtime_ns, self._shard)
            if self._link.refused is not None:
                self._on_fact()
                return self._link.refused
            if not self.welcomed and self._link.agreed is not None:
                self.welcomed = True
                self.not_connected = ""
                # What was wrong before is news if it comes again.
                self._said.clear()
                self._log.info(
                    f"connected to the coordinator at {self._endpoint}",
                    message_id=MessageId.CONNECTED,
                )
            self._on_fact()
        return _ENDED

    # ---------------------------------------------------------------- slices

    async def _run_slices(self) -> None:
        backoff = Backoff(self._rng)
        while True:
            while not self._core.wants_slices_connection(self._shard):
                self._slices_wanted.clear()
                await self._slices_wanted.wait()
            replies = self.counters.slice_replies
            why = await self._connected(_SLICES, self._slices)
            self._core.on_slices_lost(time.monotonic_ns(), self._shard)
            self._on_fact()
            # A stream that merely opened may be refused for ever.
            if self.counters.slice_replies > replies:
                backoff.reset()
            if why not in (_IDLE, _WITH_CONTROL):
                self.counters.slices_lost += 1
                if self.welcomed:
                    self._warn(f"no slices go to {self._endpoint}", why, MessageId.DISCONNECTED)
                await asyncio.sleep(backoff.next_s())

    async def _slices(self, call: _Call) -> str:
        self._slices_number += 1
        self._control_lost.clear()
        await call.write(wire.encode_opening(replace(self._opening, number=self._slices_number)))
        self.counters.slices_connects += 1
        self._core.on_slices_connected(time.monotonic_ns(), self._slices_number, self._shard)
        return await _first_to_end(
            self._write_slices(call), self._read_slices(call), self._until_control_is_lost()
        )

    async def _until_control_is_lost(self) -> str:
        await self._control_lost.wait()
        return _WITH_CONTROL

    async def _write_slices(self, call: _Call) -> str:
        """Send chunks until there has been nothing to report for a while."""
        loop = asyncio.get_running_loop()
        idle_at_s = loop.time() + self._slices_idle_s
        zstd = self._zstd_if_known()
        while True:
            try:
                async with asyncio.timeout_at(idle_at_s):
                    await self._chunks_due.wait()
            except TimeoutError:
                if not self._core.wants_slices_connection(self._shard):
                    return _IDLE
            self._chunks_due.clear()
            idle_at_s = loop.time() + self._slices_idle_s
            chunks = self._core.take_chunks(time.monotonic_ns(), self._shard)
            for listed in self._listed(chunks):
                for data in encoded(
                    listed, lambda some: wire.encode_chunks(some, zstd), self._cannot_send
                ):
                    await call.write(data)
            self._go_on()

    def _zstd_if_known(self) -> wire.Zstd | None:
        return self._zstd if self._knows(Feature.ZSTD) else None

    def _knows(self, feature: Feature) -> bool:
        """Whether the coordinator does."""
        agreed = self._link.agreed
        return agreed is not None and feature in agreed.features

    def _listed(self, chunks: Iterable[SliceChunk]) -> Iterator[list[SliceChunk]]:
        """Chunks by the message that carries them; one each to who knows no lists."""
        count_max = CHUNKS_MAX if self._knows(Feature.CHUNK_LISTS) else 1
        listed: list[SliceChunk] = []
        size = 0
        for chunk in chunks:
            size += len(chunk.data)
            if listed and (size > _LIST_BYTES or len(listed) == count_max):
                yield listed
                listed, size = [], len(chunk.data)
            listed.append(chunk)
        if listed:
            yield listed

    async def _read_slices(self, call: _Call) -> str:
        async for data in call:
            self.counters.slice_replies += 1
            self._core.on_slice_reply(
                wire.decode_slice_reply(data), time.monotonic_ns(), self._shard
            )
            self._on_fact()
        return _ENDED

    # ------------------------------------------------------------------ both

    def _channel(self) -> grpc.aio.Channel:
        if self._files is None:
            return grpc.aio.insecure_channel(self._endpoint, options=_OPTIONS)
        shown = self._files.current
        assert shown is not None
        options: list[tuple[str, int | str]] = [*_OPTIONS]
        if self._server_name is not None:
            options.append(("grpc.ssl_target_name_override", self._server_name))
        credentials = grpc.ssl_channel_credentials(shown.ca, shown.key, shown.certificate)
        return grpc.aio.secure_channel(self._endpoint, credentials, options=options)

    async def _connected(self, method: str, use: Callable[[_Call], Awaitable[str]]) -> str:
        """Dial, and use the stream until it ends. Why it ended."""
        if self._files is not None:
            self._files.look()
            unusable = self._files.why_unusable
            if unusable is not None:
                return unusable
        async with self._channel() as channel:
            call: _Call = channel.stream_stream(method, None, None)(None)
            try:
                return await use(call)
            except wire.WireError as error:
                # Of what was read: what cannot be written is left out.
                self.counters.malformed += 1
                return f"it sends what makes no sense: {error}"
            except grpc.aio.AioRpcError as error:
                return await self._why(error.code(), error.details())
            except asyncio.InvalidStateError:
                # The call had ended when something was written to it.
                return await self._why(await call.code(), await call.details())
            finally:
                call.cancel()

    async def _why(self, code: grpc.StatusCode, details: str | None) -> str:
        """Why a call ended, in words."""
        said = details or code.name
        if code in _REFUSALS:
            return _Refusal(said)
        if code is not grpc.StatusCode.UNAVAILABLE or self._files is None:
            return said
        # Of TLS gRPC says that the socket was closed.
        shown = self._files.current
        assert shown is not None
        tried = await asyncio.to_thread(
            why_not, self._endpoint, self._files.files, self._server_name, shown.facts
        )
        return tried or said


async def _look_again(files: Rotating) -> None:
    """What changes is used for the next connection; that here says so when it comes."""
    while True:
        files.look()
        await asyncio.sleep(LOOK_EVERY_S)  # nothing tells


async def _first_to_end(*halves: Coroutine[None, None, str]) -> str:
    """Run both halves of a stream until one ends: its result, or its error."""
    tasks = [asyncio.ensure_future(half) for half in halves]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in done)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
