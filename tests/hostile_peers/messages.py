# SPDX-License-Identifier: Apache-2.0
"""What a node says to a coordinator that it should not, each message for itself well-formed or not.

``python3 -m tests.hostile_peers.messages ATTACK SECONDS NODE ENDPOINT CA DIRECTORY LEAKED``. NODE is
the name that it says; LEAKED a file with ids of traces of others, which it has learned. Prints
what came of it, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

from protocol import wire
from protocol.hashing import node_id
from protocol.messages import (
    Abandoned,
    Collect,
    Group,
    Hello,
    NodeId,
    NodeMessage,
    SliceChunk,
    SliceFlags,
    SliceStatus,
    SnapshotStatus,
    TraceId,
    TriggerFired,
)

_INCARNATION = 99
_CRUMBS = 100
_LATERALS = 32
_NAMES = 400
_BATCH = 64

Call = grpc.aio.StreamStreamCall[bytes, bytes]


class Liar:
    """A node with a certificate, and what it says."""

    def __init__(self, name: str, channel: grpc.aio.Channel, leaked: Path, until_s: float) -> None:
        self._name = name
        self._channel = channel
        self._leaked = leaked
        self._until_s = until_s
        self._rng = random.Random()
        self.counts: Counter[str] = Counter()

    # ------------------------------------------------------------ conversation

    def _call(self, method: str) -> Call:
        call: Call = self._channel.stream_stream(f"/backsight.v1.Coordinator/{method}", None, None)(
            None
        )
        return call

    async def _on_streams(self, converse: Callable[[Call], Awaitable[object]]) -> None:
        """On a Control stream after the other, as long as there is time."""
        while (left_s := self._until_s - time.monotonic()) > 0:
            call = self._call("Control")
            self.counts["streams"] += 1
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(left_s):
                    await call.write(wire.encode_node_batch([Hello(self._name, _INCARNATION)]))
                    await converse(call)
            if call.done():
                self.counts[f"ended: {(await call.code()).name}"] += 1
            call.cancel()
            await asyncio.sleep(0.05)

    async def _say(self, call: Call, *messages: NodeMessage) -> None:
        await call.write(wire.encode_node_batch(list(messages)))
        self.counts["messages"] += len(messages)

    async def _hear(self, call: Call, answer: Callable[[Collect], list[NodeMessage]]) -> None:
        """Answer what it is asked for, until the stream ends."""
        while isinstance(data := await call.read(), bytes):
            for message in wire.decode_coordinator_batch(data):
                self.counts[type(message).__name__] += 1
                if isinstance(message, Collect):
                    said = answer(message)
                    for start in range(0, len(said), _BATCH):
                        await self._say(call, *said[start : start + _BATCH])

    async def _speak(
        self,
        messages: Callable[[], list[NodeMessage]],
        answer: Callable[[Collect], list[NodeMessage]],
        pause_s: float = 0.01,
    ) -> None:
        """Say these again and again, and answer."""

        async def converse(call: Call) -> None:
            hearing = asyncio.ensure_future(self._hear(call, answer))
            try:
                while not hearing.done():
                    await self._say(call, *messages())
                    await asyncio.sleep(pause_s)
            finally:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)

        await self._on_streams(converse)

    # ------------------------------------------------------------------ lies

    def _trace(self) -> TraceId:
        return TraceId(self._rng.randbytes(16))

    def _known(self) -> list[TraceId]:
        """Traces of others that it has learned of, the latest."""
        try:
            text = self._leaked.read_text()
        except FileNotFoundError:
            return []
        return [TraceId(bytes.fromhex(line)) for line in text.split()[-_BATCH:]]

    def _crumbs(self) -> tuple[NodeId, ...]:
        honest = [node_id(f"honest-{self._rng.randrange(30)}") for _ in range(_CRUMBS // 2)]
        nowhere = [NodeId(self._rng.getrandbits(64)) for _ in range(_CRUMBS // 2)]
        return tuple(dict.fromkeys((*honest, *nowhere)))

    def _held(self, asked: Collect) -> list[NodeMessage]:
        """A slice of each, which never comes, and breadcrumbs to everybody."""
        return [
            SliceStatus(trace, True, SliceFlags.HELD, 1 << 20, 1, self._crumbs(), 1)
            for trace in asked.traces
        ]

    @staticmethod
    def _nothing(asked: Collect) -> list[NodeMessage]:
        return []

    async def floods(self) -> None:
        """Triggers of 32 laterals with 100 breadcrumbs each, under 400 names."""

        def fired() -> list[NodeMessage]:
            laterals = tuple(self._trace() for _ in range(_LATERALS))
            group = Group(f"evil.{self._rng.randrange(_NAMES)}", self._trace())
            return [TriggerFired(group, laterals, "why not")]

        await self._speak(fired, self._held)

    async def names(self) -> None:
        """Each trigger under a new name."""

        def fired() -> list[NodeMessage]:
            return [
                TriggerFired(Group(f"n{self._rng.getrandbits(64):x}", self._trace()))
                for _ in range(_BATCH)
            ]

        await self._speak(fired, self._nothing)

    async def silence(self) -> None:
        """Triggers, and no word when it is asked for them."""

        def fired() -> list[NodeMessage]:
            return [TriggerFired(Group("evil", self._trace())) for _ in range(8)]

        await self._speak(fired, self._nothing)

    async def claims(self) -> None:
        """A part in traces of others, which never comes."""

        def fired() -> list[NodeMessage]:
            return [TriggerFired(Group("evil", trace)) for trace in self._known()]

        await self._speak(fired, self._held, pause_s=0.2)

    async def abandons(self) -> None:
        """That it has given up traces of others, by the names of their own triggers."""

        def given_up() -> list[NodeMessage]:
            known = self._known()
            return [
                *(Abandoned(Group("honest", trace)) for trace in known),
                *(SliceStatus(trace, False, SliceFlags.EVICTED, epoch=1) for trace in known),
            ]

        await self._speak(given_up, self._nothing, pause_s=0.2)

    async def snapshots(self) -> None:
        """How far it is with snapshots that nobody ordered."""

        def done() -> list[NodeMessage]:
            return [
                SnapshotStatus(self._rng.getrandbits(32), 1 << 31, 1 << 31, done=True)
                for _ in range(_BATCH)
            ]

        await self._speak(done, self._nothing)

    async def nonsense(self) -> None:
        """Bytes, and messages cut short."""

        async def babble(call: Call) -> None:
            whole = wire.encode_node_batch(
                [TriggerFired(Group("evil", self._trace()), why="x" * 50)]
            )
            for _ in range(20):
                cut = whole[: self._rng.randrange(len(whole))]
                await call.write(self._rng.choice((cut, self._rng.randbytes(1000))))
                self.counts["messages"] += 1
            while isinstance(await call.read(), bytes):
                pass

        await self._on_streams(babble)

    async def another(self) -> None:
        """That it is another node than its certificate says, on both streams."""

        async def pretend(call: Call) -> None:
            data = await call.read()
            if isinstance(data, bytes):
                for message in wire.decode_coordinator_batch(data):
                    self.counts[type(message).__name__] += 1
            call.cancel()
            slices = self._call("Slices")
            await slices.write(wire.encode_opening(wire.Opening(self._name, 7)))
            answer = await slices.read()
            self.counts["slices answered"] += isinstance(answer, bytes)

        await self._on_streams(pretend)

    async def chunks(self) -> None:
        """Slices without credit, of traces that nobody asked for, with holes."""
        leaked = self._known()
        while (left_s := self._until_s - time.monotonic()) > 0:
            call = self._call("Slices")
            self.counts["streams"] += 1
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(left_s):
                    await call.write(wire.encode_opening(wire.Opening(self._name, _INCARNATION)))
                    while not call.done():
                        trace = self._rng.choice(leaked) if leaked else self._trace()
                        offset = self._rng.choice((0, 1, 1 << 20, 1 << 60))
                        chunk = SliceChunk(trace, offset, self._rng.randbytes(60_000), 1)
                        await call.write(wire.encode_chunks([chunk]))
                        self.counts["chunks"] += 1
            if call.done():
                self.counts[f"ended: {(await call.code()).name}"] += 1
            call.cancel()
            await asyncio.sleep(0.05)


def _shown(ca: str, directory: str) -> grpc.ChannelCredentials:
    paths = ca, f"{directory}/tls.key", f"{directory}/tls.crt"
    return grpc.ssl_channel_credentials(*(Path(path).read_bytes() for path in paths))


async def _attack(
    attack: str, seconds: str, name: str, endpoint: str, ca: str, directory: str, leaked: str
) -> Counter[str]:
    credentials = _shown(ca, directory)
    # One call at a time is what a connection has.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(endpoint, credentials, options=options) as channel:
        liar = Liar(name, channel, Path(leaked), time.monotonic() + float(seconds))
        lie: Callable[[], Awaitable[None]] = getattr(liar, attack)
        await lie()
        return liar.counts


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_attack(*sys.argv[1:]))))
