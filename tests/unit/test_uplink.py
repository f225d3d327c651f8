# SPDX-License-Identifier: Apache-2.0
"""A node outlives whatever its coordinator does, and says once what is wrong."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Self

import grpc
import pytest

from appliance.core.node import NodeConfig, NodeCore
from appliance.native import NativeDataPlane, TickSource
from appliance.settings import Settings
from appliance.uplink import Backoff, Uplink
from coordinator.server import CoordinatorServer
from coordinator.settings import Settings as CoordinatorSettings
from coordinator.settings import StoreSettings
from protocol import wire
from protocol.messages import Refused, Welcome

# pytest undoes the filter of protocol.wire.
pytestmark = pytest.mark.filterwarnings("ignore:Unexpected end-group tag")

Handler = Callable[[AsyncIterator[bytes], "grpc.aio.ServicerContext[bytes, bytes]"], object]


def test_backoff_doubles_by_chance_up_to_a_bound() -> None:
    backoff = Backoff(random.Random(1))
    waits = [backoff.next_s() for _ in range(20)]
    for number, wait in enumerate(waits):
        whole = min(0.1 * 2**number, 10.0)
        assert whole / 2 <= wait <= whole
    backoff.reset()
    assert backoff.next_s() <= 0.1
    # Nodes that were cut off together do not come back together.
    assert waits != [b.next_s() for b in [Backoff(random.Random(2))] for _ in range(20)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Node:
    """A core on a real data plane with an uplink; what it logs can be awaited."""

    def __init__(self, endpoint: str) -> None:
        settings = Settings(node="n", pool_bytes=8 << 20, store_bytes=1 << 20)
        self.dataplane = NativeDataPlane(settings, TickSource(False, 1_000_000_000))
        now_ns = time.monotonic_ns()
        core = NodeCore(NodeConfig("n"), self.dataplane, 7, now_ns, time.time_ns() - now_ns)
        self.log: asyncio.Queue[str] = asyncio.Queue()
        self.facts: asyncio.Queue[None] = asyncio.Queue()
        self.uplink = Uplink(
            endpoint,
            wire.Opening("n", 7),
            core,
            self._on_fact,
            self.log.put_nowait,
            random.Random(1),
        )

    def _on_fact(self) -> None:
        self.facts.put_nowait(None)
        self.uplink.poke()

    async def __aenter__(self) -> Self:
        self._running = asyncio.ensure_future(self.uplink.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self.dataplane.close()

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            await self.facts.get()


async def serve(endpoint: str, control: Handler, slices: Handler | None = None) -> grpc.aio.Server:
    server = grpc.aio.server()
    handlers = {"Control": grpc.stream_stream_rpc_method_handler(control)}
    if slices is not None:
        handlers["Slices"] = grpc.stream_stream_rpc_method_handler(slices)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("backsight.v1.Coordinator", handlers),)
    )
    server.add_insecure_port(endpoint)
    await server.start()
    return server


@pytest.mark.parametrize("answer", [b"\xff\xff", b"\x0a\x00", b"\x0c\x01"])
def test_a_coordinator_that_talks_nonsense_is_left_and_tried_again(answer: bytes) -> None:
    async def control(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        await context.write(answer)
        async for _ in requests:
            pass

    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        server = await serve(endpoint, control)
        async with Node(endpoint) as node:
            await node.until(lambda: node.uplink.counters.control_lost >= 3)
            assert node.uplink.counters.malformed >= 2
            assert not node.uplink.welcomed
            assert "it sends what makes no sense" in node.log.get_nowait()
            assert node.log.empty()
        await server.stop(None)

    asyncio.run(run())


def test_a_refusal_reaches_the_operator_once() -> None:
    async def control(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        async for _ in requests:
            await context.write(wire.encode_coordinator_batch([Refused("name taken by 10.0.0.1")]))
            return

    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        server = await serve(endpoint, control)
        async with Node(endpoint) as node:
            await node.until(lambda: node.uplink.counters.control_lost >= 3)
            assert "name taken by 10.0.0.1; trying again" in node.log.get_nowait()
            assert node.log.empty()
        await server.stop(None)

    asyncio.run(run())


def test_slices_that_are_refused_are_tried_ever_more_seldom_and_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    next_s = Backoff.next_s

    def counted(backoff: Backoff) -> float:
        waits.append(next_s(backoff))
        return 0.0

    async def control(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        await context.write(wire.encode_coordinator_batch([Welcome(1)]))
        async for _ in requests:
            pass

    async def slices(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        async for _ in requests:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not like that")

    monkeypatch.setattr(NodeCore, "wants_slices_connection", lambda core: True)
    monkeypatch.setattr(Backoff, "next_s", counted)

    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        server = await serve(endpoint, control, slices)
        async with Node(endpoint) as node:
            assert (await node.log.get()).startswith("connected to")
            assert "not like that; trying again" in await node.log.get()
            await node.until(lambda: len(waits) >= 8)
            assert node.log.empty()
        await server.stop(None)

    asyncio.run(run())
    assert max(waits) > 10 * waits[0]


def test_a_node_waits_for_its_coordinator_and_finds_it_again(tmp_path: Path) -> None:
    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        settings = CoordinatorSettings(
            endpoint, store=StoreSettings(str(tmp_path / "traces.sqlite"))
        )
        async with Node(endpoint) as node:
            assert (await node.log.get()).startswith("no coordinator at")
            for _ in range(2):
                async with CoordinatorServer(settings, 1, lambda _: None):
                    assert (await node.log.get()).startswith("connected to")
                assert (await node.log.get()).startswith("no coordinator at")

    asyncio.run(run())
