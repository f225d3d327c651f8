# SPDX-License-Identifier: Apache-2.0
"""What one peer may take of a coordinator, and what it may make it say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import grpc
import pytest

from coordinator.counters import ServerCounters
from coordinator.rpc import budget, listener
from coordinator.rpc.budget import IDLE_CONNECTIONS_MAX, IDLE_S, UNDELIVERED_BYTES_MAX, Budget
from coordinator.rpc.connections import connections, shut_all
from coordinator.rpc.identity import Identity, Role
from protocol import wire
from protocol.messages import Hello
from runtime.log import PeerLog
from tests.unit.logs import logs_to
from tests.unit.open_files import nothing_stays_open
from tests.unit.test_guard import World, said_to

NODE = Identity(Role.NODE, "n1", "spiffe://d/node/n1")


@dataclass
class Fake:
    """A connection as the kernel would show it."""

    peer: str
    bytes_received: int = 0
    is_shut: bool = False

    def shut(self) -> None:
        self.is_shut = True


class Looked:
    """A budget, and the connections that it sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.counters = ServerCounters()
        self.now_s = 100.0
        self.budget = Budget(self.counters, PeerLog(logs_to(self.said)), lambda: self.now_s)
        self.fakes: list[Fake] = []
        monkeypatch.setattr(budget, "connections", lambda port: iter(self.fakes))

    def add(self, peer: str) -> Fake:
        self.fakes.append(Fake(peer))
        return self.fakes[-1]

    def look(self) -> None:
        self.budget.look(0)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(monkeypatch)


def test_who_sends_more_than_a_message_and_never_its_end_is_ended(looked: Looked) -> None:
    one = looked.add("ipv4:10.0.0.1:1")
    with looked.budget.call(one.peer, NODE):
        looked.look()
        one.bytes_received = UNDELIVERED_BYTES_MAX
        looked.look()
        assert not one.is_shut
        one.bytes_received += 1
        looked.look()
        assert one.is_shut
    assert looked.counters.connections_ended_unfinished == 1
    (said,) = looked.said
    assert said == (
        "ipv4:10.0.0.1:1: its connection is ended: sent 8 MiB of a message that is not whole yet;"
        " messages have at most 4 MiB"
    )


def test_who_sends_much_in_whole_messages_goes_on(looked: Looked) -> None:
    one = looked.add("ipv4:10.0.0.1:1")
    with looked.budget.call(one.peer, NODE):
        for _ in range(100):
            one.bytes_received += UNDELIVERED_BYTES_MAX
            looked.budget.delivered(one.peer)
            looked.look()
    for _ in range(100):  # a call after the other, on the same connection
        with looked.budget.call(one.peer, NODE):
            one.bytes_received += UNDELIVERED_BYTES_MAX
            looked.look()
    assert not one.is_shut


def test_a_message_that_nobody_has_asked_for_yet_counts(looked: Looked) -> None:
    """GRPC reads the one of a question before it calls us."""
    one = looked.add("ipv4:10.0.0.1:1")
    one.bytes_received = UNDELIVERED_BYTES_MAX + 1
    looked.look()
    assert one.is_shut


def test_that_nothing_can_be_opened_does_not_end_the_coordinator(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def resident() -> int:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise OSError(24, "Too many open files")
        return looks * UNDELIVERED_BYTES_MAX

    one = looked.add("ipv4:10.0.0.1:1")
    one.bytes_received = UNDELIVERED_BYTES_MAX + 1
    monkeypatch.setattr(budget, "resident_bytes", resident)
    monkeypatch.setattr(budget, "_GLANCE_S", 0)

    async def run() -> None:
        watching = asyncio.ensure_future(looked.budget.watch(lambda: 0))
        async with asyncio.timeout(30):
            while not one.is_shut:  # noqa: ASYNC110 # nobody tells
                await asyncio.sleep(0)
        watching.cancel()

    asyncio.run(run())


def test_connections_without_a_call_are_few_for_each_address(looked: Looked) -> None:
    many = [looked.add(f"ipv4:10.0.0.1:{port}") for port in range(IDLE_CONNECTIONS_MAX + 5)]
    other = looked.add("ipv4:10.0.0.2:1")
    with looked.budget.call(many[-1].peer, NODE):
        looked.look()
        # A fleet behind one address may have come at once, and is about to call.
        assert not any(one.is_shut for one in many)
        looked.now_s += IDLE_S
        looked.look()
    assert sum(one.is_shut for one in many) == 4
    assert not many[-1].is_shut
    assert not other.is_shut
    assert looked.counters.connections_ended_idle == 4


def test_what_is_known_of_connections_goes_with_them(looked: Looked) -> None:
    for port in range(50):
        one = looked.add(f"ipv4:10.0.0.1:{port}")
        with looked.budget.call(one.peer, NODE):
            pass
        looked.look()
        looked.fakes.clear()
    looked.look()
    assert not looked.budget._delivered
    assert not looked.budget._seen
    assert not looked.budget._calls
    assert not looked.budget._peers


def test_an_identity_has_so_many_calls_at_once(looked: Looked) -> None:
    calls = [looked.budget.call(f"ipv4:10.0.0.{n}:1", NODE) for n in range(8)]
    for call in calls:
        assert looked.budget.why_not(NODE) is None
        call.__enter__()
    assert "node n1 (spiffe://d/node/n1) has 8 calls at once already" in (
        looked.budget.why_not(NODE) or ""
    )
    assert looked.budget.why_not(Identity(Role.NODE, "n2", "x")) is None
    assert looked.budget.why_not(None) is None
    calls[0].__exit__(None, None, None)
    assert looked.budget.why_not(NODE) is None


def test_a_call_over_ipv6_is_of_its_connection(looked: Looked) -> None:
    many = [looked.add(f"ipv6:[::1]:{port}") for port in range(IDLE_CONNECTIONS_MAX + 1)]
    with looked.budget.call(f"ipv6:%5B::1%5D:{IDLE_CONNECTIONS_MAX}", NODE):
        looked.look()
        looked.now_s += IDLE_S
        looked.look()
    assert not any(one.is_shut for one in many)


def test_to_look_at_connections_leaves_nothing_open() -> None:
    """Most descriptors of a process are of no socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, Path("/dev/null").open():
            taken, _ = server.accept()
            with taken, nothing_stays_open():
                found = [one.peer for one in connections(port)]
            assert found == [f"ipv4:127.0.0.1:{client.getsockname()[1]}"]


def test_one_call_too_many_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.setattr(budget, "_CALLS_MAX", dict.fromkeys(Role, 0))
    world = World(tmp_path)
    directory = world.issued("node/n1")

    async def run() -> None:
        async with world.serving() as here, world.channel(directory) as channel:
            hello = wire.encode_node_batch([Hello("n1", 1)])
            code, said = await said_to(channel, "Control", hello)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert said.startswith("node n1 (spiffe://d/node/n1) has 0 calls at once already")
            assert here.counters.too_many_calls == 1

    asyncio.run(run())


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


def test_connections_of_ours_are_found_and_shut(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    port = accepted.getsockname()[1]
    client.sendall(bytes(1000))
    assert accepted.recv(1000, socket.MSG_WAITALL) == bytes(1000)
    found = [(one.peer, one.bytes_received) for one in connections(port)]
    host, own = client.getsockname()
    assert found == [(f"ipv4:{host}:{own}", 1000)]
    shut_all(port)
    assert client.recv(1) == b""


def test_peers_are_named_as_grpc_names_them(tmp_path: Path) -> None:
    async def run() -> None:
        peers: list[str] = []

        async def answer(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            peers.append(context.peer())
            return b""

        for host in ("127.0.0.1", "[::]", "[::1]"):
            server = grpc.aio.server()
            handlers = {"y": grpc.unary_unary_rpc_method_handler(answer)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", handlers),))
            port = listener.add_port(server, f"{host}:0", None)
            await server.start()
            for target in {"[::]": ("127.0.0.1", "[::1]")}.get(host, (host,)):
                async with grpc.aio.insecure_channel(f"{target}:{port}") as channel:
                    await channel.unary_unary("/x/y", None, None)(b"")
                    assert unquote(peers[-1]) in {one.peer for one in connections(port)}
            await server.stop(None)

    asyncio.run(run())


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_one_address_makes_few_lines_whatever_port_it_has() -> None:
    said: list[str] = []
    clock = Clock()
    limited = PeerLog(logs_to(said), clock)
    for port in range(1000):
        limited.warning(f"ipv4:10.0.0.1:{port}", "refused")
    assert said == ["refused"] * 10
    limited.warning("ipv4:10.0.0.2:1", "another")
    assert said[10:] == ["another"]
    clock.now_s += 60
    limited.warning("ipv4:10.0.0.1:1", "again")
    assert said[11:] == ["990 more warnings about peers were left out", "again"]


def test_many_addresses_make_no_more_lines_than_all_may() -> None:
    said: list[str] = []
    limited = PeerLog(logs_to(said), Clock())
    for number in range(1000):
        limited.warning(f"ipv6:[2001:db8::{number:x}]:1", "refused")
    assert len(said) == 100
