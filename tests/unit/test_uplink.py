# SPDX-License-Identifier: Apache-2.0
"""A node outlives whatever its coordinator does, and says once what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Self

import grpc
import pytest

from appliance import daemon, uplink
from appliance.core.node import NodeConfig, NodeCore
from appliance.daemon import Daemon
from appliance.uplink import Backoff, Uplink
from coordinator.server import CoordinatorServer
from formats.records import Data
from protocol import wire
from protocol.messages import (
    CHUNKS_MAX,
    Group,
    Hello,
    NodeMessage,
    Refused,
    SliceAck,
    SliceChunk,
    SliceReply,
    TraceId,
    TriggerFired,
    Unknown,
    Welcome,
)
from protocol.versions import OURS, Agreed, Feature, Versions
from runtime import VERSION
from runtime.log import Log
from runtime.service_manager import ServiceManager
from runtime.settings.coordinator import Settings as CoordinatorSettings
from runtime.settings.coordinator import StoreSettings
from runtime.settings.node import CoordinatorSettings as Uplinked
from runtime.settings.node import Settings
from runtime.settings.tls import NodeTlsSettings
from testbed.ports import free_port
from tests.simulation.pool import PoolConfig, PoolModel
from tests.unit.logs import SILENT, logs_to

ALL = Agreed(OURS.newest, OURS.features)
AGREED = Agreed(OURS.newest, OURS.features & ~Feature.CONTROL_CHUNKS)

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


def trace(number: int) -> TraceId:
    return TraceId(number.to_bytes(16, "big"))


class Node:
    """A core with an uplink; what it logs can be awaited."""

    def __init__(
        self,
        endpoint: str,
        slices_idle_s: float = 30.0,
        incarnation: int = 7,
        tls: NodeTlsSettings | None = None,
    ) -> None:
        now_ns = time.monotonic_ns()
        config = PoolConfig(pool_bytes=8 << 20, arena_bytes=8 << 20, store_bytes=4 << 20)
        self.pool = PoolModel(config, "n")
        self.pool.clock_pair(now_ns, time.time_ns())
        self.client = self.pool.add_client(100, "service", now_ns)
        realtime_offset_ns = time.time_ns() - now_ns
        self.core = NodeCore(NodeConfig("n"), self.pool, incarnation, now_ns, realtime_offset_ns)
        self.log: asyncio.Queue[str] = asyncio.Queue()
        self.facts: asyncio.Queue[None] = asyncio.Queue()
        self.uplink = Uplink(
            endpoint,
            wire.Opening("n", incarnation),
            self.core,
            self._no_addresses,
            self._on_fact,
            Log(lambda entry: self.log.put_nowait(entry.message)),
            random.Random(1),
            slices_idle_s,
            tls,
        )

    @staticmethod
    async def _no_addresses() -> tuple[str, ...]:
        return ()

    def fire(self, number: int, why: str = "", records: int = 1) -> None:
        """A process writes something into a trace, and the operator wants to see it."""
        handle = self.pool.open(self.client, trace(number))
        for _ in range(records):
            self.pool.write(handle, 0, Data(1, bytes(100)), 0)
        self.pool.close(handle, 0)
        now_ns = time.monotonic_ns()
        self.core.on_operator_trigger(Group("t", trace(number)), (), why, now_ns)
        self._on_fact()

    def _on_fact(self) -> None:
        self.facts.put_nowait(None)
        self.uplink.poke()

    async def __aenter__(self) -> Self:
        self._running = asyncio.ensure_future(self.uplink.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            await self.facts.get()


@contextlib.asynccontextmanager
async def serving(
    endpoint: str, control: Handler, slices: Handler | None = None
) -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server()
    handlers = {"Control": grpc.stream_stream_rpc_method_handler(control)}
    if slices is not None:
        handlers["Slices"] = grpc.stream_stream_rpc_method_handler(slices)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("backsight.v1.Coordinator", handlers),)
    )
    server.add_insecure_port(endpoint)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)


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
        async with serving(endpoint, control), Node(endpoint) as node:
            await node.until(lambda: node.uplink.counters.control_lost >= 3)
            assert node.uplink.counters.malformed >= 2
            assert not node.uplink.welcomed
            assert "it sends what makes no sense" in node.log.get_nowait()
            assert node.log.empty()

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
        async with serving(endpoint, control) as server, Node(endpoint) as node:
            await node.until(lambda: node.uplink.counters.control_lost >= 3)
            assert "name taken by 10.0.0.1; trying again" in node.log.get_nowait()
            assert node.log.empty()
            # Nobody is there any more who would refuse it.
            await server.stop(None)
            assert "name taken" not in await node.log.get()
            assert node.core.links[0].refused is None

    asyncio.run(run())


def test_a_coordinator_that_is_too_new_says_so_and_so_does_one_that_is_wrong_about_it(
    tmp_path: Path,
) -> None:
    async def control(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        await context.write(wire.encode_coordinator_batch([Welcome(1, Agreed(9))]))
        async for _ in requests:
            pass

    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        store = StoreSettings(str(tmp_path / "traces.sqlite"))
        newer = Versions(OURS.newest + 1, OURS.newest + 2)
        settings = CoordinatorSettings(endpoint, store=store)
        said: asyncio.Queue[str] = asyncio.Queue()
        log = Log(lambda entry: said.put_nowait(entry.message))
        async with Node(endpoint) as node:
            async with CoordinatorServer(settings, 1, log, newer):
                why = f"the node speaks protocol {OURS}, the coordinator {newer}: update the node"
                while why not in await node.log.get():
                    pass
                assert why in await said.get()
                assert not node.uplink.welcomed
                await node.until(lambda: node.core.counters.refused >= 3)
                assert said.empty()
            async with serving(endpoint, control):
                why = f"the coordinator speaks protocol 9, this node {OURS}: update the node"
                while why not in await node.log.get():
                    assert not node.uplink.welcomed
                # The coordinator took it in, and would wait for ever.
                lost = node.uplink.counters.control_lost
                await node.until(lambda: node.uplink.counters.control_lost >= lost + 2)
                assert not node.uplink.welcomed

    asyncio.run(run())


def test_two_nodes_of_one_name_are_told_once_and_the_second_follows_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink, "_BACKOFF_MAX_S", 0.1)
    said: asyncio.Queue[str] = asyncio.Queue()

    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        settings = CoordinatorSettings(
            endpoint, store=StoreSettings(str(tmp_path / "traces.sqlite"))
        )
        log = Log(lambda entry: said.put_nowait(entry.message))
        refusal = (
            r"node 'n' at ipv4:127\.0\.0\.1 is refused: a node of that name is connected from"
            r" ipv4:127\.0\.0\.1:\d+\. Give one of them another name, or stop it"
        )
        async with CoordinatorServer(settings, 1, log), Node(endpoint, incarnation=1) as first:
            assert (await said.get()).startswith("node n connected from ipv4:127.0.0.1:")
            assert (await first.log.get()).startswith("connected to")
            async with Node(endpoint, incarnation=2) as second:
                await second.until(lambda: second.core.counters.refused >= 5)
                told = await said.get()
                assert re.fullmatch(rf"{refusal}\. Further attempts are only counted", told)
                assert re.search(f": {refusal}; trying again", await second.log.get())
                assert said.empty() and first.log.empty() and second.log.empty()
                await first.__aexit__()
                assert (await second.log.get()).startswith("connected to")
                assert (await said.get()).startswith("node n connected from ipv4:127.0.0.1:")
                # What was said is news again once it was over.
                async with Node(endpoint, incarnation=3) as third:
                    assert re.match(refusal, await said.get())
                    assert re.search(refusal, await third.log.get())

    asyncio.run(run())


def test_who_connects_and_who_goes_is_news_of_both_sides(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        settings = CoordinatorSettings(
            endpoint, store=StoreSettings(str(tmp_path / "traces.sqlite"))
        )
        here = Settings(
            node="n",
            socket=str(tmp_path / "node.sock"),
            coordinator=Uplinked(endpoint, insecure=True),
        )
        async with (
            CoordinatorServer(settings, 1, SILENT) as server,
            Daemon(here, 1, ServiceManager(None), [], SILENT) as daemon,
        ):
            running = asyncio.ensure_future(daemon.run())
            await server.news.wait()
            assert server.status_text().startswith("1 of 1 nodes connected")
            await daemon.news.wait()
            assert daemon.status_text().startswith("connected to")
            server.news.clear()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.news.wait()
            assert server.status_text().startswith("0 of 1 nodes connected")

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
        await context.write(wire.encode_coordinator_batch([Welcome(1, AGREED)]))
        async for _ in requests:
            pass

    async def slices(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        async for _ in requests:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not like that")

    monkeypatch.setattr(NodeCore, "wants_slices_connection", lambda core, shard: True)
    monkeypatch.setattr(Backoff, "next_s", counted)

    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        async with serving(endpoint, control, slices), Node(endpoint) as node:
            assert (await node.log.get()).startswith("connected to")
            assert "not like that; trying again" in await node.log.get()
            await node.until(lambda: len(waits) >= 8)
            assert node.log.empty()

    asyncio.run(run())
    assert max(waits) > 10 * waits[0]


def test_reasons_that_come_in_turn_are_each_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # As gRPC does of a name that nobody knows: that there is no A record, and no AAAA record.
    reasons = iter(["no A", "no AAAA"] * 5)
    ended = asyncio.Event()

    async def connected(_uplink: Uplink, _method: str, _use: object) -> str:
        reason = next(reasons, None)
        if reason is None:
            ended.set()
            await asyncio.Event().wait()
        return str(reason)

    monkeypatch.setattr(Uplink, "_connected", connected)
    monkeypatch.setattr(Backoff, "next_s", lambda _backoff: 0.0)

    async def run() -> list[str]:
        async with Node("nowhere:1") as node:
            await ended.wait()
            return [node.log.get_nowait() for _ in range(node.log.qsize())]

    assert asyncio.run(run()) == [
        f"no coordinator at nowhere:1: {reason}; trying again" for reason in ("no A", "no AAAA")
    ]


def test_a_node_waits_for_its_coordinator_and_finds_it_again(tmp_path: Path) -> None:
    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        settings = CoordinatorSettings(
            endpoint, store=StoreSettings(str(tmp_path / "traces.sqlite"))
        )
        async with Node(endpoint) as node:
            assert (await node.log.get()).startswith("no coordinator at")
            for _ in range(2):
                async with CoordinatorServer(settings, 1, SILENT):
                    assert (await node.log.get()).startswith("connected to")
                    assert node.uplink.not_connected == ""
                assert (await node.log.get()).startswith("no coordinator at")
                assert node.uplink.not_connected

    asyncio.run(run())


class Coordinator:
    """Welcomes the node; what arrives can be awaited, acks are the test's to give."""

    def __init__(self, agreed: Agreed = AGREED) -> None:
        self._agreed = agreed
        self.said: asyncio.Queue[NodeMessage | Unknown] = asyncio.Queue()
        self.chunks: asyncio.Queue[SliceAck] = asyncio.Queue()
        self.chunks_by_message: list[int] = []
        self.frames: list[bool] = []
        self.acks: asyncio.Queue[SliceAck] = asyncio.Queue()
        self.slices_ended: asyncio.Queue[None] = asyncio.Queue()
        self.streams: list[int] = []
        self.end_control = asyncio.Event()

    async def control(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        await context.write(wire.encode_coordinator_batch([Welcome(1, self._agreed)]))
        hearing = asyncio.ensure_future(self._hear(requests))
        ending = asyncio.ensure_future(self.end_control.wait())
        await asyncio.wait([hearing, ending], return_when=asyncio.FIRST_COMPLETED)
        self.end_control.clear()
        hearing.cancel()
        ending.cancel()

    async def _hear(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            for message in wire.decode_node_batch(data):
                self.said.put_nowait(message)

    async def slices(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        async def acknowledge() -> None:
            await context.write(wire.encode_slice_reply(SliceReply((), 1 << 20)))
            while True:
                ack = await self.acks.get()
                await context.write(wire.encode_slice_reply(SliceReply((ack,))))

        acknowledging = asyncio.ensure_future(acknowledge())
        try:
            async for data in requests:
                chunks = wire.decode_slices_message(data)
                if isinstance(chunks, wire.Opening):
                    self.streams.append(chunks.number)
                    continue
                self.frames += [bool(chunk.zstd) for chunk in chunks]
                self.chunks_by_message.append(len(chunks))
                for chunk in chunks:
                    end = chunk.offset + len(chunk.data)
                    self.chunks.put_nowait(SliceAck(chunk.trace, end, chunk.epoch))
        finally:
            acknowledging.cancel()
            self.slices_ended.put_nowait(None)


def test_what_this_node_cannot_say_is_its_own_fault_and_costs_nothing_else() -> None:
    async def run() -> None:
        endpoint, coordinator = f"127.0.0.1:{free_port()}", Coordinator()
        async with (
            serving(endpoint, coordinator.control, coordinator.slices),
            Node(endpoint) as node,
        ):
            for number in range(1, 4):
                # The second and the third are longer than the wire lets through.
                node.fire(number, "x" * (60 + 20 * number))
            fired: list[TriggerFired] = []
            while len(fired) < 1:
                said = await coordinator.said.get()
                fired += [said] if isinstance(said, TriggerFired) else []
            assert [one.group.primary for one in fired] == [trace(1)]
            assert {(await coordinator.chunks.get()).trace for _ in range(3)} == {
                trace(number) for number in range(1, 4)
            }
            assert (await node.log.get()).startswith("connected to")
            assert "this node's own message breaks the protocol: trigger_fired.why" in (
                node.log.get_nowait()
            )
            assert node.log.empty()
            counters = node.uplink.counters
            assert (counters.unsendable, counters.malformed, counters.control_lost) == (2, 0, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("features", "messages"),
    [(AGREED.features, [CHUNKS_MAX, 44]), (AGREED.features & ~Feature.CHUNK_LISTS, [1] * 300)],
)
def test_small_chunks_share_messages_where_both_sides_know_of_it(
    features: Feature, messages: list[int]
) -> None:
    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        coordinator = Coordinator(Agreed(OURS.newest, features))
        async with (
            serving(endpoint, coordinator.control, coordinator.slices),
            Node(endpoint) as node,
        ):
            for number in range(1, 301):
                node.fire(number)
            arrived = {(await coordinator.chunks.get()).trace for _ in range(300)}
            assert arrived == {trace(number) for number in range(1, 301)}
            assert coordinator.chunks_by_message == messages

    asyncio.run(run())


@pytest.mark.parametrize("feature", [Feature.NONE, Feature.ZSTD])
def test_chunks_come_in_frames_of_zstandard_where_both_sides_know_of_it(feature: Feature) -> None:
    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        coordinator = Coordinator(Agreed(OURS.newest, OURS.features & ~Feature.ZSTD | feature))
        async with (
            serving(endpoint, coordinator.control, coordinator.slices),
            Node(endpoint) as node,
        ):
            node.fire(1, records=100)
            await coordinator.chunks.get()
            assert coordinator.frames == [feature is Feature.ZSTD]

    asyncio.run(run())


@pytest.mark.parametrize("feature", [Feature.NONE, Feature.ZSTD])
def test_small_chunks_come_with_what_is_said_where_both_sides_know_of_it(feature: Feature) -> None:
    async def run() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        coordinator = Coordinator(Agreed(OURS.newest, OURS.features & ~Feature.ZSTD | feature))
        async with (
            serving(endpoint, coordinator.control, coordinator.slices),
            Node(endpoint) as node,
        ):
            # There is no credit before the first.
            node.fire(1)
            coordinator.acks.put_nowait(await coordinator.chunks.get())
            await node.until(lambda: not node.core.wants_slices_connection())
            node.fire(2, records=20)
            while not isinstance(said := await coordinator.said.get(), SliceChunk):
                pass
            assert (said.trace, said.stream) == (trace(2), 1)
            assert bool(said.zstd) is (feature is Feature.ZSTD)
            # It may have been lost with its stream, so it is sent again, with another one's credit.
            coordinator.end_control.set()
            await coordinator.slices_ended.get()
            again = await coordinator.chunks.get()
            assert (again.trace, again.offset) == (trace(2), len(said.data))
            assert coordinator.streams == [1, 2]
            assert node.uplink.counters.slices_lost == 0

    asyncio.run(run())


def test_chunks_share_a_message_up_to_a_quarter_of_a_megabyte() -> None:
    async def run() -> None:
        endpoint, coordinator = f"127.0.0.1:{free_port()}", Coordinator()
        async with (
            serving(endpoint, coordinator.control, coordinator.slices),
            Node(endpoint) as node,
        ):
            for number in range(1, 6):
                node.fire(number, records=1000)
            for _ in range(5):
                await coordinator.chunks.get()
            # Together 262,208 bytes: 64 more than that.
            assert coordinator.chunks_by_message == [4, 1]

    asyncio.run(run())


def test_a_node_registers_the_addresses_that_it_has_when_it_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = [None, "127.0.0.1", "10.0.0.7", "10.0.0.8", "127.0.0.1"]
    log: list[str] = []

    async def address(_: str) -> str | None:
        return has.pop(0)

    monkeypatch.setattr(daemon, "own_address", address)

    async def run() -> None:
        endpoint, hellos = f"127.0.0.1:{free_port()}", asyncio.Queue[NodeMessage | Unknown]()

        async def control(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> None:
            async for data in requests:
                hellos.put_nowait(wire.decode_node_batch(data)[0])
                return  # and so it connects again

        settings = Settings(
            node="n",
            socket=str(tmp_path / "n.sock"),
            coordinator=Uplinked(endpoint),
            pool_bytes=8 << 20,
            store_bytes=1 << 20,
        )
        manager = ServiceManager.from_environment({})
        daemon = Daemon(settings, 7, manager, (), logs_to(log))
        async with serving(endpoint, control), daemon as here:
            running = asyncio.ensure_future(here.run())
            said = [await hellos.get() for _ in range(5)]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        addresses = ((), (), ("10.0.0.7",), ("10.0.0.8",), ())
        assert said == [Hello("n", 7, had, software=VERSION) for had in addresses]
        assert sum("set `addresses`, or" in line for line in log) == 1

    asyncio.run(run())


def test_who_has_nothing_to_send_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    take_control, take_chunks = NodeCore.take_control, NodeCore.take_chunks

    def control(core: NodeCore, now_ns: int, realtime_ns: int, shard: int) -> list[NodeMessage]:
        asked.append("control")
        return take_control(core, now_ns, realtime_ns, shard)

    def chunks(core: NodeCore, now_ns: int, shard: int) -> list[SliceChunk]:
        asked.append("chunks")
        return take_chunks(core, now_ns, shard)

    monkeypatch.setattr(NodeCore, "take_control", control)
    monkeypatch.setattr(NodeCore, "take_chunks", chunks)

    async def run() -> None:
        endpoint, coordinator = f"127.0.0.1:{free_port()}", Coordinator()
        async with (
            serving(endpoint, coordinator.control, coordinator.slices),
            Node(endpoint) as node,
        ):
            node.fire(1)
            coordinator.acks.put_nowait(await coordinator.chunks.get())
            await node.until(lambda: not node.core.wants_slices_connection())
            asked.clear()
            for _ in range(100):
                node.uplink.poke()
                await asyncio.sleep(0)
            assert asked == []
            node.fire(2)
            assert (await coordinator.chunks.get()).trace == trace(2)
            assert {*asked} == {"control", "chunks"}

    asyncio.run(run())


def test_a_slices_connection_ends_when_nothing_was_to_report_for_a_while() -> None:
    async def run() -> None:
        endpoint, coordinator = f"127.0.0.1:{free_port()}", Coordinator()
        async with (
            serving(endpoint, coordinator.control, coordinator.slices),
            Node(endpoint, slices_idle_s=0.001) as node,
        ):
            counters = node.uplink.counters
            for connects in (1, 2):
                node.fire(connects)
                ack = await coordinator.chunks.get()
                assert ack.trace == trace(connects)
                coordinator.acks.put_nowait(ack)
                await coordinator.slices_ended.get()
                assert (counters.slices_connects, counters.slices_lost) == (connects, 0)

    asyncio.run(run())


def test_a_slices_connection_stays_while_something_is_not_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: asyncio.Queue[bool] = asyncio.Queue()
    wants = NodeCore.wants_slices_connection

    def look(core: NodeCore, shard: int) -> bool:
        wanted = wants(core, shard)
        looks.put_nowait(wanted)
        return wanted

    async def run() -> None:
        endpoint, coordinator = f"127.0.0.1:{free_port()}", Coordinator()
        async with (
            serving(endpoint, coordinator.control, coordinator.slices),
            Node(endpoint, slices_idle_s=0.001) as node,
        ):
            node.fire(1)
            ack = await coordinator.chunks.get()
            monkeypatch.setattr(NodeCore, "wants_slices_connection", look)
            for _ in range(20):  # it would have ended ten times
                assert await looks.get()
            assert coordinator.slices_ended.empty()
            coordinator.acks.put_nowait(ack)
            # What happens otherwise does not keep it.
            while coordinator.slices_ended.empty():
                node.uplink.poke()
                await asyncio.sleep(0)
            assert node.uplink.counters.slices_connects == 1

    asyncio.run(run())
