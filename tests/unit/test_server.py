# SPDX-License-Identifier: Apache-2.0
"""The coordinator's shell stays within its memory, whatever disk and nodes do."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from unittest.mock import Mock

import backsight_pb2 as pb
import grpc
import pytest
from google.protobuf.message import Message

from coordinator import queries, server
from coordinator.core.closed import UnreadableError
from coordinator.core.records import AppendSlice, Write
from coordinator.rpc import nodes, streams
from coordinator.server import CoordinatorServer
from coordinator.store import reader as store_reader
from coordinator.store.reader import StoreReader, Wanted
from coordinator.store.rows import SliceRow
from coordinator.store.writer import Store
from ctl.__main__ import main
from formats.records import Data
from formats.slices import PieceKind, RunFlags
from protocol import wire
from protocol.messages import (
    CHUNK_BYTES_MAX,
    CoordinatorMessage,
    Drop,
    Group,
    Hello,
    Refused,
    SliceChunk,
    Snapshot,
    SnapshotStatus,
    TraceId,
    TriggerAck,
    TriggerFired,
    Welcome,
)
from runtime import VERSION
from runtime.log import Log
from runtime.schema import ConfigError
from runtime.settings.coordinator import AccessSettings, Settings, StoreSettings
from testbed.encoding import encode_piece, encode_record
from testbed.ports import free_port
from tests.export.collected import FRONT, TRACE
from tests.unit.logs import SILENT, logs_to
from tests.unit.reading_here import ReadingHere
from tests.unit.test_query import put_trace
from tests.unit.test_store import driver

BATCHES = 50


def trigger(number: int) -> TriggerFired:
    return TriggerFired(Group("slow", TraceId(number.to_bytes(16, "big"))))


def hold_up_the_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on nothing is written until the event that it returns is set."""
    disk_works = threading.Event()
    commit = Store._commit

    def commit_later(store: Store, batch: Sequence[Write]) -> bool:
        disk_works.wait()
        return commit(store, batch)

    monkeypatch.setattr(Store, "_commit", commit_later)
    return disk_works


@pytest.mark.parametrize("repeated", [False, True])
def test_nodes_are_not_listened_to_while_the_disk_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, repeated: bool
) -> None:
    disk_works = hold_up_the_disk(monkeypatch)
    monkeypatch.setattr(server, "_UNDURABLE_WRITES_MAX", 10)
    heard = 0

    async def say() -> AsyncIterator[bytes]:
        nonlocal heard
        yield wire.encode_node_batch([Hello("n", 1)])
        for heard in range(1, BATCHES + 1):
            await asyncio.sleep(0)  # as reading from a socket would
            # One that is known is nothing to write, but to be answered all the same.
            yield wire.encode_node_batch([trigger(1 if repeated else heard)])

    async def run() -> None:
        settings = Settings("127.0.0.1:0", store=StoreSettings(str(tmp_path / "t.sqlite")))
        async with CoordinatorServer(settings, 1, SILENT) as here:
            hearing = asyncio.ensure_future(
                here._nodes._hear(say(), 1, "peer", streams.Outgoing(), None)
            )
            for _ in range(20 * BATCHES):
                await asyncio.sleep(0)
            heard_before = heard
            disk_works.set()
            await hearing
            assert 0 < heard_before < BATCHES
            assert heard == BATCHES

    asyncio.run(run())


def test_a_coordinator_listens_before_it_has_taken_up_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driver(tmp_path / "t.sqlite") as earlier:
        put_trace(earlier, TRACE, {"edge": FRONT})
    # It has no time for that.
    monkeypatch.setattr(server, "_RECOVERED_AT_ONCE_NS", 0)

    async def run() -> None:
        async with Client(tmp_path) as client:
            control, slices = client.call("Control"), client.call("Slices")
            await control.write(wire.encode_node_batch([Hello("edge", 1)]))
            await slices.write(wire.encode_opening(wire.Opening("edge", 1)))
            # It answers who asks for what is stored. Nodes wait, whatever else happens.
            client.server._changed()
            detail = await client.ask("GetTrace", pb.GetTraceRequest(trace=TRACE)).read()
            assert isinstance(detail, bytes)
            assert client.server._core.recovering
            assert client.server._core.figures().nodes_connected == 0
            assert "nodes wait" in client.server.status_text()
            monkeypatch.setattr(server, "_RECOVERED_AT_ONCE_NS", 10**9)
            said = await control.read()
            assert isinstance(said, bytes)
            (welcome, *_) = wire.decode_coordinator_batch(said)
            assert isinstance(welcome, Welcome)
            assert client.server._core.figures().traces_open == 1
            control.cancel()
            slices.cancel()

    asyncio.run(run())


@pytest.mark.timeout(30)
def test_a_full_disk_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.sqlite"
    tried = threading.Event()

    def commit(_: Store, batch: Sequence[object]) -> bool:
        tried.set()
        return False

    monkeypatch.setattr(Store, "_commit", commit)

    async def run() -> None:
        async with CoordinatorServer(
            Settings("127.0.0.1:0", store=StoreSettings(str(path))), 1, SILENT
        ) as server:
            server._store.submit([Write(1, AppendSlice(TRACE, "a", 1, 0, b"abc"))])
            assert await asyncio.to_thread(tried.wait, 20)

    asyncio.run(run())


def test_a_message_that_cannot_be_sent_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends neither the coordinator nor the stream."""
    encode = wire.encode_coordinator_batch

    def encode_some(messages: Sequence[CoordinatorMessage]) -> bytes:
        if any(isinstance(said, TriggerAck) and said.group.primary[-1] == 2 for said in messages):
            raise wire.WireError("trigger_ack.group", "is too long")
        return encode(messages)

    monkeypatch.setattr(wire, "encode_coordinator_batch", encode_some)

    async def run() -> None:
        async with Client(tmp_path) as client:
            call = client.call("Control")
            await call.write(wire.encode_node_batch([Hello("n", 1)]))
            await call.write(wire.encode_node_batch([trigger(number) for number in (1, 2, 3)]))
            acknowledged: list[int] = []
            while len(acknowledged) < 2:
                acknowledged += [
                    said.group.primary[-1]
                    for said in wire.decode_coordinator_batch(await anext(aiter(call)))
                    if isinstance(said, TriggerAck)
                ]
            assert acknowledged == [1, 3]
            while "breaks the protocol: trigger_ack.group: is too long" not in (
                await client.log.get()
            ):
                pass
            assert client.server.counters.unsendable == 1
            call.cancel()

    asyncio.run(run())


class Client:
    """Calls a coordinator as a node does; what the coordinator logs can be awaited."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.log: asyncio.Queue[str] = asyncio.Queue()
        store = StoreSettings(str(directory / "t.sqlite"))
        self.server = CoordinatorServer(
            Settings(self.endpoint, store=store, access=AccessSettings(anonymous="operator")),
            1,
            Log(lambda entry: self.log.put_nowait(entry.message)),
            reading=ReadingHere(),
        )
        # A small window, so that it is soon full.
        self._channel = grpc.aio.insecure_channel(
            self.endpoint, options=[("grpc.http2.lookahead_bytes", 1000)]
        )

    async def __aenter__(self) -> Self:
        await self.server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)
        await self.server.__aexit__(None, None, None)

    def call(self, method: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        return self._channel.stream_stream(f"/backsight.v1.Coordinator/{method}", None, None)(None)

    def ask(self, method: str, question: Message) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        ask = self._channel.unary_stream(f"/backsight.v1.Coordinator/{method}", None, None)
        return ask(question.SerializeToString())

    async def logged(self, text: str) -> None:
        while text not in await self.log.get():
            pass


async def read_to_the_end(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> int:
    """How many messages there are; an AioRpcError if they do not end well."""
    return len([message async for message in call])


def test_what_waits_for_a_node_is_bounded_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        def __init__(self) -> None:
            self.sent = 0

        async def write(self, item: bytes) -> None:
            self.sent += len(item)

    async def run() -> None:
        monkeypatch.setattr(streams, "WAITING_BYTES_MAX", 1000)
        outgoing, context = streams.Outgoing(), Context()
        outgoing.put(bytes(600))
        outgoing.put(bytes(400))
        outgoing.end()
        await outgoing.send_all(context)  # type: ignore[arg-type]
        assert context.sent == 1000
        outgoing.put(bytes(1000))
        assert outgoing.waiting_bytes == 1000
        outgoing.put(b"x")
        outgoing.put(b"y")
        assert outgoing.waiting_bytes == 0
        with pytest.raises(streams.Unread):
            await outgoing.send_all(context)  # type: ignore[arg-type]
        assert context.sent == 1000

    asyncio.run(run())


def test_a_node_that_does_not_read_is_given_up_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "UNREAD_TIMEOUT_S", 0.2)

    async def run() -> None:
        async with Client(tmp_path) as client:
            here, call = client.server, client.call("Control")
            await call.write(wire.encode_node_batch([Hello("n", 1)]))
            await client.logged("node n connected")
            (outgoing,) = here._nodes._sessions.values()
            said = wire.encode_coordinator_batch([Drop(trigger(1).group)] * wire.BATCH_MESSAGES_MAX)
            # gRPC itself takes some 4 MB, so that some of this waits here.
            for _ in range((8 << 20) // len(said)):
                outgoing.put(said)
            await client.logged("does not read what it is told")
            # Nothing is kept for it, and it may come again, though it did not notice yet.
            assert not here._nodes._sessions and not outgoing.waiting_bytes
            assert here.counters.not_reading == 1
            assert not call.done()
            again = client.call("Control")
            await again.write(wire.encode_node_batch([Hello("n", 2)]))
            await client.logged("node n connected")
            # Once it reads on, it learns what happened.
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await read_to_the_end(call)
            assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "nothing was read" in (ended.value.details() or "")

    asyncio.run(run())


def test_who_does_not_say_who_it_is_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "GREETING_TIMEOUT_S", 0.01)

    async def run() -> None:
        async with Client(tmp_path) as client:
            (refused,) = [message async for message in client.call("Control")]
            assert wire.decode_coordinator_batch(refused) == [
                Refused("no Hello came within 0.01 s")
            ]
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await read_to_the_end(client.call("Slices"))
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            counters = client.server.counters
            assert (counters.no_hello, counters.no_opening) == (1, 1)

    asyncio.run(run())


def test_who_said_who_it_is_may_be_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "GREETING_TIMEOUT_S", 0.01)
    all_over = asyncio.Event()

    # No gRPC, over which a greeting may well take longer than that.
    async def say(*greeting: bytes) -> AsyncIterator[bytes]:
        for message in greeting:
            yield message
        await all_over.wait()

    async def run() -> None:
        settings = Settings("127.0.0.1:0", store=StoreSettings(str(tmp_path / "t.sqlite")))
        async with CoordinatorServer(settings, 1, SILENT) as here:
            hello = say(wire.encode_node_batch([Hello("n", 1)]))
            opening = say(wire.encode_opening(wire.Opening("n", 1)))
            greeted = [
                asyncio.ensure_future(
                    here._nodes._hear(hello, 1, "peer", streams.Outgoing(), None)
                ),
                asyncio.ensure_future(
                    here._nodes._receive(opening, 2, "peer", None, streams.Outgoing(), None)  # type: ignore[arg-type]
                ),
            ]
            await asyncio.sleep(0)  # they begin to wait before the one that says nothing
            await here._nodes._hear(say(), 3, "peer", streams.Outgoing(), None)
            assert not any(task.done() for task in greeted)
            all_over.set()
            await asyncio.gather(*greeted)
            assert (here.counters.no_hello, here.counters.no_opening) == (1, 0)

    asyncio.run(run())


def test_a_large_trace_is_shown_in_messages_of_common_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = TraceId(b"a trace of 20 MB")
    data = encode_record(Data(1, bytes(32000)), 0) * 2
    runs = b"".join(
        encode_piece(PieceKind.RUN, data, flags=flags, client=1, handle=1, seq=seq)
        for seq, flags in [(0, RunFlags.FIRST), *((n, RunFlags.NONE) for n in range(1, 313))]
    )
    assert len(runs) > 20_000_000

    async def run() -> None:
        async with Client(tmp_path) as client:
            appended = [
                AppendSlice(trace, node, 1, start, runs[start : start + CHUNK_BYTES_MAX])
                for node in ("n1", "n2")
                for start in range(0, len(runs), CHUNK_BYTES_MAX)
            ]
            durable = asyncio.Event()
            monkeypatch.setattr(
                client.server,
                "_on_durable",
                lambda token: durable.set() if token == len(appended) else None,
            )
            client.server._store.submit([Write(n, one) for n, one in enumerate(appended, 1)])
            await durable.wait()
            request = pb.GetTraceRequest(trace=trace).SerializeToString()
            # A client with gRPC's own bounds.
            channel = grpc.aio.insecure_channel(client.endpoint)
            get = channel.unary_stream("/backsight.v1.Coordinator/GetTrace", None, None)
            sizes = [len(message) async for message in get(request)]
            assert len(sizes) == 1 + 2 * 20
            assert max(sizes) < CHUNK_BYTES_MAX + 1000
            ctl = ["--coordinator", client.endpoint, "show", trace.hex()]
            assert await asyncio.to_thread(main, [*ctl, "--json"]) == 0
            shown = json.loads(capsys.readouterr().out)
            assert len(shown["records"]) == 2 * 2 * 313
            assert [part["bytes"] for part in shown["slices"]] == [len(runs)] * 2
            monkeypatch.setattr(StoreReader, "chunk", lambda *_: None)
            assert await asyncio.to_thread(main, ctl) == 1
            assert "was deleted, or begun anew, while it was read" in capsys.readouterr().err
            await channel.close(None)

    asyncio.run(run())


def test_what_was_refused_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            await client.call("Control").write(b"\xff")
            await client.logged("malformed message refused")
            ask = ["--coordinator", client.endpoint, "counters"]
            assert await asyncio.to_thread(main, [*ask, "--json"]) == 0
            counters = json.loads(capsys.readouterr().out)
            assert counters["server.malformed"] == 1
            assert counters["core.hellos_refused"] == counters["store.deleted.age"] == 0
            assert await asyncio.to_thread(main, ask) == 0
            assert "server.malformed                         1" in capsys.readouterr().out

    asyncio.run(run())


def test_how_a_coordinator_is_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            ask = ["--coordinator", client.endpoint, "status"]
            assert await asyncio.to_thread(main, [*ask, "--json"]) == 0
            said = json.loads(capsys.readouterr().out)
            assert (said["version"], said["listen"]) == (VERSION, client.endpoint)
            assert (said["ready"], said["not_ready"]) == (True, "")
            # All that its metrics tell.
            assert said.keys() >= client.server.status().keys()
            client.server._store.failed = "the disk is full"
            assert await asyncio.to_thread(main, ask) == 0
            lines = dict(
                line.split(maxsplit=1)
                for line in capsys.readouterr().out.splitlines()
                if " " in line
            )
            assert lines["ready"] == "no"
            assert lines["not_ready"] == "store: cannot be written: the disk is full"
            assert lines["now.nodes_connected"] == "0"

    asyncio.run(run())


def test_a_node_that_the_core_refuses_is_told_why_and_its_stream_ends(tmp_path: Path) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            first, second = client.call("Control"), client.call("Control")
            await first.write(wire.encode_node_batch([Hello("n", 1)]))
            await client.logged("node n connected")
            # Another machine that has the same name.
            await second.write(wire.encode_node_batch([Hello("n", 2)]))
            message = await second.read()
            assert isinstance(message, bytes)
            (refused,) = wire.decode_coordinator_batch(message)
            assert isinstance(refused, Refused)
            async with asyncio.timeout(30):
                assert not isinstance(await second.read(), bytes)

    asyncio.run(run())


def _unreadable(trace: TraceId) -> None:
    if trace == trigger(1).group.primary:
        raise sqlite3.DatabaseError("database disk image is malformed")


@pytest.mark.parametrize("stream", ["control", "slices"])
def test_what_the_store_cannot_read_is_not_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """A trace that is closed may not be taken for a new one; the node says it again, on its next stream."""
    monkeypatch.setattr(nodes, "_SAID_AGAIN_S", 0.2)

    async def run() -> None:
        async with Client(tmp_path) as client:
            control, slices = client.call("Control"), client.call("Slices")
            await control.write(wire.encode_node_batch([Hello("n", 1)]))
            await control.read()
            await slices.write(wire.encode_opening(wire.Opening("n", 1)))
            reply = await slices.read()
            assert isinstance(reply, bytes)
            assert wire.decode_slice_reply(reply).credit_bytes > 0
            here = client.server
            here._core._lifecycle.closed._are_all = False
            failing = Mock(side_effect=_unreadable)
            monkeypatch.setattr(here._closed, "closed", failing)
            if stream == "control":
                await control.write(wire.encode_node_batch([trigger(1), trigger(2)]))
                ended = control
            else:
                chunks = [SliceChunk(trigger(n).group.primary, 0, b"abc", 1) for n in (1, 2)]
                await slices.write(wire.encode_chunks(chunks))
                ended = slices
            async with asyncio.timeout(30):
                while isinstance(await ended.read(), bytes):
                    pass
                assert await ended.code() == grpc.StatusCode.OK
            # What else came is heard.
            assert list(here._core._traces) == [trigger(2).group.primary]
            assert here.counters.not_heard == 1

    asyncio.run(run())


def test_that_the_store_cannot_be_read_is_said_once_each_time_that_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each trace of one bad page, between those that can be read."""
    said: list[str] = []
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    async def run() -> None:
        nonlocal now_s
        settings = Settings("127.0.0.1:0", store=StoreSettings(str(tmp_path / "t.sqlite")))
        here = CoordinatorServer(settings, 1, logs_to(said))
        monkeypatch.setattr(here, "_closed", Mock(closed=_unreadable))
        for said_times in (1, 2):
            for _ in range(100):
                now_s += 60
                with pytest.raises(UnreadableError):
                    here._closed_trace(trigger(1).group.primary)
                here._closed_trace(trigger(2).group.primary)
            assert len(said) == said_times
            now_s += 7 * 24 * 3600

    asyncio.run(run())
    assert all("cannot read closed traces: " in text for text in said)


@pytest.mark.parametrize(("reasons", "said_times"), [(2, 2), (500, server._UNREADABLE_REASONS_MAX)])
def test_each_reason_why_the_store_cannot_be_read_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reasons: int, said_times: int
) -> None:
    """Though they take turns, as where one page is bad and the disk fails at another; and not any number."""
    said: list[str] = []
    failures = [sqlite3.DatabaseError(f"reason {n % reasons}") for n in range(1000)]

    async def run() -> None:
        settings = Settings("127.0.0.1:0", store=StoreSettings(str(tmp_path / "t.sqlite")))
        here = CoordinatorServer(settings, 1, logs_to(said))
        monkeypatch.setattr(here, "_closed", Mock(closed=Mock(side_effect=failures)))
        for _ in failures:
            with pytest.raises(UnreadableError):
                here._closed_trace(trigger(1).group.primary)

    asyncio.run(run())
    assert len(said) == len(set(said)) == said_times


@pytest.mark.parametrize("refuses", ["reading", "guard"])
def test_of_a_reload_that_is_refused_nothing_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            here = client.server
            before = here._settings
            reading, guard = Mock(), Mock()
            failing = reading.check if refuses == "reading" else guard.reconfigure
            failing.side_effect = OSError("no such file")
            with monkeypatch.context() as patched:
                patched.setattr(here, "_reading", reading)
                patched.setattr(here, "_guard", guard)
                with pytest.raises(ConfigError, match="no such file"):
                    here.reconfigure(replace(before, linger_s=7))
            assert not reading.reconfigure.called
            assert guard.reconfigure.called == (refuses == "guard")
            assert here._settings is before

    asyncio.run(run())


def test_a_snapshot_is_over_when_what_was_said_of_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            node = client.call("Control")
            await node.write(wire.encode_node_batch([Hello("n", 1)]))
            await client.logged("node n connected")
            snapshot = client.ask("TakeSnapshot", pb.SnapshotRequest(age_ns=1, bytes_max=1000))
            order = await order_of(node)
            disk_works = hold_up_the_disk(monkeypatch)
            fired = TriggerFired(Group(order.trigger, trigger(7).group.primary))
            done = SnapshotStatus(order.number, 1, 1, done=True)
            await node.write(wire.encode_node_batch([fired, done]))
            said = []
            async for message in snapshot:
                assert isinstance(message, bytes)
                said.append(pb.SnapshotProgress.FromString(message))
                # One was asked for before the node was done, and looks like the last.
                if sum(progress.nodes_done for progress in said) == 2:
                    disk_works.set()
            assert (said[-1].traces, said[-1].judged) == (1, 1)

    asyncio.run(run())


def test_a_snapshot_ends_though_something_is_always_on_its_way_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Store.submit
    held: list[Write] = []

    def submit_all_but_the_last(
        store: Store, writes: Sequence[Write], *, may_wait: bool = False
    ) -> None:
        held.extend(writes)
        submit(store, held[:-1], may_wait=may_wait)
        del held[:-1]

    async def fire_for_ever(node: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        number = 1000
        while True:
            number += 1
            await node.write(wire.encode_node_batch([trigger(number)]))
            await asyncio.sleep(0.02)

    async def run() -> None:
        async with Client(tmp_path) as client, asyncio.timeout(20):
            monkeypatch.setattr(Store, "submit", submit_all_but_the_last)
            node = client.call("Control")
            await node.write(wire.encode_node_batch([Hello("n", 1)]))
            await client.logged("node n connected")
            snapshot = client.ask("TakeSnapshot", pb.SnapshotRequest(age_ns=1, bytes_max=1000))
            order = await order_of(node)
            fired = TriggerFired(Group(order.trigger, trigger(7).group.primary))
            done = SnapshotStatus(order.number, 1, 1, done=True)
            await node.write(wire.encode_node_batch([fired, done]))
            firing = asyncio.ensure_future(fire_for_ever(node))
            try:
                said = [message async for message in snapshot]
            finally:
                firing.cancel()
            last = pb.SnapshotProgress.FromString(said[-1])
            assert (last.traces, last.judged) == (1, 1)

    asyncio.run(run())


async def order_of(node: grpc.aio.StreamStreamCall[bytes, bytes]) -> Snapshot:
    """The next order to take a snapshot that the node is told."""
    while True:
        message = await node.read()
        assert isinstance(message, bytes)
        for said in wire.decode_coordinator_batch(message):
            if isinstance(said, Snapshot):
                return said


def test_who_follows_is_told_of_each_trace_that_was_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            channel = grpc.aio.insecure_channel(client.endpoint)
            follow = channel.unary_stream("/backsight.v1.Coordinator/TailTraces", None, None)

            def tail(request: pb.ListTracesRequest) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
                call: grpc.aio.UnaryStreamCall[bytes, bytes] = follow(request.SerializeToString())
                return call

            async def tails(count: int) -> None:
                while len(client.server._questions._tails) != count:  # noqa: ASYNC110 # nobody tells
                    await asyncio.sleep(0)

            everything = tail(pb.ListTracesRequest())
            others = tail(pb.ListTracesRequest(trigger="other"))
            await everything.initial_metadata()
            await others.initial_metadata()
            printing = asyncio.ensure_future(
                asyncio.to_thread(
                    main,
                    ["--coordinator", client.endpoint, "tail", "--json", "--limit", "1",
                     "--verdict", "partial"],
                )
            )  # fmt: skip
            await tails(3)
            node = client.call("Control")
            await node.write(wire.encode_node_batch([Hello("n", 1)]))
            # Nobody has anything of it, so that it is partial.
            await node.write(wire.encode_node_batch([trigger(7)]))
            message = await everything.read()
            assert isinstance(message, bytes)
            told = pb.TraceSummary.FromString(message)
            assert (told.trace, told.verdict.kind) == (trigger(7).group.primary, "partial")
            assert await printing == 0
            assert json.loads(capsys.readouterr().out)["trace_id"] == told.trace.hex()
            others.cancel()
            everything.cancel()
            await tails(0)
            refused = tail(pb.ListTracesRequest(service="shop"))
            assert await refused.code() is grpc.StatusCode.INVALID_ARGUMENT
            await channel.close(None)

    asyncio.run(run())


@pytest.mark.parametrize("less", ["nobody", "viewer"])
def test_what_strangers_opened_ends_when_they_may_something_else(tmp_path: Path, less: str) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            here = client.server
            tail = client.ask("TailTraces", pb.ListTracesRequest())
            await tail.initial_metadata()
            here.reconfigure(replace(here._settings, linger_s=7))
            again = client.ask("TailTraces", pb.ListTracesRequest())
            await again.initial_metadata()
            assert not tail.done()
            access = replace(here._settings.access, anonymous=less)
            here.reconfigure(replace(here._settings, access=access))
            for call in (tail, again):
                async with asyncio.timeout(20):
                    assert await call.code() is grpc.StatusCode.UNAVAILABLE
            await client.logged(f"whoever comes without a name is {less} now")
            # Who may comes again.
            node = client.call("Control")
            await node.write(wire.encode_node_batch([Hello("n", 1)]))
            await client.logged("node n connected")
            node.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["since_ns", "until_ns"])
@pytest.mark.parametrize("method", ["ListTraces", "TailTraces"])
def test_a_time_that_no_trace_can_have_is_refused_with_what_is_allowed(
    tmp_path: Path, method: str, name: str
) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            question = pb.ListTracesRequest()
            setattr(question, name, 1 << 63)
            call = client.ask(method, question)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"{name} is {1 << 63}" in str(await call.details())
            assert f"up to {(1 << 63) - 1}" in str(await call.details())
            setattr(question, name, (1 << 63) - 1)
            latest = client.ask("ListTraces", question)
            assert await latest.code() is grpc.StatusCode.OK

    asyncio.run(run())


def test_one_file_is_left_of_a_store_that_was_read(tmp_path: Path) -> None:
    with driver(tmp_path / "t.sqlite") as earlier:
        put_trace(earlier, TRACE, {"edge": FRONT})

    async def run() -> None:
        async with Client(tmp_path) as client:
            await client.call("Control").write(b"\xff")
            await client.logged("malformed message refused")
            assert isinstance(
                await client.ask("GetTrace", pb.GetTraceRequest(trace=TRACE)).read(), bytes
            )
            assert (tmp_path / "t.sqlite-wal").exists()

    asyncio.run(run())
    files = {"t.sqlite", "t.sqlite.lock", "t.sqlite.reserve", "t.sqlite.seed"}
    assert {file.name for file in tmp_path.glob("t.sqlite*")} == files


def test_the_store_is_let_go_of_when_nobody_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driver(tmp_path / "t.sqlite") as earlier:
        put_trace(earlier, TRACE, {"edge": FRONT})
    entered, go_on = threading.Semaphore(0), threading.Event()
    chunk = StoreReader.chunk
    close = queries.Queries.__aexit__
    read: list[bytes | None] = []
    waited: list[bool] = []

    def slow(reader: StoreReader, trace: TraceId, part: SliceRow, offset: int) -> bytes | None:
        entered.release()
        go_on.wait(60)
        read.append(chunk(reader, trace, part, offset))
        return read[-1]

    async def closed(asked: queries.Queries, *raised: Any) -> None:
        closing = asyncio.ensure_future(close(asked, *raised))
        # Would it not wait, it would be done long before.
        done, _ = await asyncio.wait({closing}, timeout=0.5)
        waited.append(not done)
        go_on.set()
        await closing

    monkeypatch.setattr(StoreReader, "chunk", slow)
    monkeypatch.setattr(queries.Queries, "__aexit__", closed)

    async def run() -> None:
        async with Client(tmp_path) as client:
            call = client.ask("GetTrace", pb.GetTraceRequest(trace=TRACE))
            await call.read()
            assert await asyncio.to_thread(entered.acquire, timeout=60)
            call.cancel()

    asyncio.run(run())
    assert waited == [True]
    assert read == [FRONT]


def test_a_listing_that_takes_long_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driver(tmp_path / "t.sqlite") as earlier:
        put_trace(earlier, TRACE, {"edge": FRONT})
    entered, go_on = threading.Semaphore(0), threading.Event()
    list_traces = StoreReader.list_traces

    def slow(reader: StoreReader, wanted: Wanted, limit: int = 0) -> list[TraceId]:
        entered.release()
        go_on.wait(60)
        return list_traces(reader, wanted, limit)

    monkeypatch.setattr(StoreReader, "list_traces", slow)

    async def run() -> None:
        async with Client(tmp_path) as client:
            get = client.ask("GetTrace", pb.GetTraceRequest(trace=TRACE))
            listings = [client.ask("ListTraces", pb.ListTracesRequest()) for _ in range(9)]
            reading = [asyncio.ensure_future(listing.read()) for listing in listings]
            for _ in range(queries._LISTINGS_AT_ONCE):
                assert await asyncio.to_thread(entered.acquire, timeout=60)
            detail = pb.TraceDetail.FromString(await get.read())  # type: ignore[arg-type] # it is there
            assert detail.summary.trace == TRACE
            go_on.set()
            for message in await asyncio.gather(*reading):
                assert isinstance(message, bytes)
                assert pb.TraceSummary.FromString(message).trace == TRACE
            # One that would read for too long is given up, and says so.
            monkeypatch.setattr(store_reader, "_READ_TIMEOUT_S", -1.0)
            monkeypatch.setattr(store_reader, "_STEPS", 1)
            given_up = client.ask("ListTraces", pb.ListTracesRequest())
            assert await given_up.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "narrow it" in await given_up.details()

    asyncio.run(run())


def test_a_listing_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_reader, "_READ_TIMEOUT_S", 1e9)
    monkeypatch.setattr(store_reader, "_STEPS", 1)
    entered = threading.Event()

    def endless(reader: StoreReader, *_: object) -> list[TraceId]:
        entered.set()
        count = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
        return [row[0] for row in reader.connection.execute(count) if row[0] == 0]

    monkeypatch.setattr(StoreReader, "list_traces", endless)

    async def run() -> None:
        async with Client(tmp_path) as client:
            listing = asyncio.ensure_future(client.ask("ListTraces", pb.ListTracesRequest()).read())
            assert await asyncio.to_thread(entered.wait, 60)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await listing

    asyncio.run(run())


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [("127.0.0.1:{port}", "Address already in use"), ("192.0.2.1:0", "Cannot assign requested")],
)
def test_why_it_cannot_listen_is_said(
    tmp_path: Path, endpoint: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run(endpoint: str) -> None:
        settings = Settings(
            endpoint, insecure=True, store=StoreSettings(str(tmp_path / "t.sqlite"))
        )
        async with CoordinatorServer(settings, 1, SILENT):
            pass

    with socket.create_server(("127.0.0.1", 0)) as other:
        named = endpoint.format(port=other.getsockname()[1])
        with pytest.raises(OSError, match=f"^listen: cannot listen on {named}: {reason}"):
            asyncio.run(run(named))
    assert capfd.readouterr().err == ""  # of gRPC
