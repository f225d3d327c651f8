# SPDX-License-Identifier: Apache-2.0
"""The coordinator's Unix socket: who may ask there is who the kernel says connected."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import secrets
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import backsight_pb2 as pb
import grpc
import pytest
from google.protobuf.message import Message

from coordinator.core.records import AppendSlice
from coordinator.rpc import budget, local
from coordinator.server import CoordinatorServer
from ctl.__main__ import main
from protocol import wire
from protocol.messages import CHUNK_BYTES_MAX, Hello, TraceId
from runtime.settings.allow import AllowSettings
from runtime.settings.coordinator import AccessSettings, Settings, StoreSettings
from testbed.ports import free_port
from tests.hostile_peers.http2 import Http2
from tests.unit.logs import logs_to
from tests.unit.reading_here import ReadingHere
from tests.unit.test_server import order_of
from tests.unit.test_store import driver

SERVICE = "/backsight.v1.Coordinator"

# Nobody's number, on all machines; and a group that need not exist.
USER, GROUP = 65534, 64999

# Calls as another user, with nothing of ours.
AS_ANOTHER = """
import grpc, json, sys
endpoint, method, request, times = sys.argv[1:]
for _ in range(int(times)):
    with grpc.insecure_channel(endpoint, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_stream(f"/backsight.v1.Coordinator/{method}", None, None)
        try:
            next(iter(call(bytes.fromhex(request))), None)
            said = ["OK", ""]
        except grpc.RpcError as error:
            said = [error.code().name, error.details()]
print(json.dumps(said))
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """With a short name, which others may enter."""
    with tempfile.TemporaryDirectory(prefix="backsight-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


class World:
    """A coordinator with a socket in that directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "c.sock"
        self.endpoint = f"unix:{self.path}"
        self.said: list[str] = []
        self.settings = Settings(
            f"127.0.0.1:{free_port()}",
            store=StoreSettings(str(directory / "t.sqlite")),
            access=AccessSettings(socket=str(self.path)),
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[CoordinatorServer]:
        async with (
            CoordinatorServer(self.settings, 1, logs_to(self.said), reading=ReadingHere()) as here,
            here.local_door(),
        ):
            yield here

    def allow(self, **access: Any) -> None:
        changed = replace(self.settings.access, **access)
        self.settings = replace(self.settings, access=changed)


async def said_to(endpoint: str, method: str, request: Message) -> tuple[str, str]:
    """How a call ends; OK with its first answer."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        call = channel.unary_stream(f"{SERVICE}/{method}", None, None)(request.SerializeToString())
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return error.code().name, str(error.details())
        call.cancel()
        return "OK", ""


async def said_to_another(
    endpoint: str,
    method: str,
    request: Message,
    groups: tuple[int, ...] = (),
    user: int = USER,
    times: int = 1,
) -> tuple[str, str]:
    """The same, asked by another user so many times, each on a connection of its own; the last answer."""

    def ask() -> list[str]:
        done = subprocess.run(
            [
                "/usr/bin/python3",
                "-c",
                AS_ANOTHER,
                endpoint,
                method,
                request.SerializeToString().hex(),
                str(times),
            ],
            user=user,
            group=user,
            extra_groups=groups,
            cwd="/",
            env={},
            stdout=subprocess.PIPE,
            check=True,
        )
        answer: list[str] = json.loads(done.stdout)
        return answer

    code, said = await asyncio.to_thread(ask)
    return code, said


NODES = pb.ListNodesRequest()
SNAPSHOT = pb.SnapshotRequest(age_ns=1, bytes_max=1)


def test_root_may_all_and_others_what_is_said(directory: Path) -> None:
    world = World(directory)

    async def run() -> None:
        async with world.serving() as here:
            assert await said_to(world.endpoint, "ListNodes", NODES) == ("OK", "")
            assert await said_to(world.endpoint, "TakeSnapshot", SNAPSHOT) == ("OK", "")
            code, said = await said_to_another(world.endpoint, "ListNodes", NODES)
            assert code == "UNAUTHENTICATED"
            assert f"nobody (uid {USER}) is neither operator nor viewer" in said
            assert "`access.viewers`" in said
            world.allow(viewers=AllowSettings(groups=(GROUP,)))
            here.reconfigure(world.settings)
            code, _ = await said_to_another(world.endpoint, "ListNodes", NODES)
            assert code == "UNAUTHENTICATED"
            asked = await said_to_another(world.endpoint, "ListNodes", NODES, (GROUP,))
            assert asked == ("OK", "")
            code, said = await said_to_another(world.endpoint, "TakeSnapshot", SNAPSHOT, (GROUP,))
            assert code == "PERMISSION_DENIED"
            assert f"not for viewer nobody (uid {USER} on the coordinator's machine)" in said
            world.allow(operators=AllowSettings(users=(USER,)))
            here.reconfigure(world.settings)
            asked = await said_to_another(world.endpoint, "TakeSnapshot", SNAPSHOT)
            assert asked == ("OK", "")

    asyncio.run(run())


def test_who_orders_a_snapshot_is_named_to_each_node(directory: Path) -> None:
    world = World(directory)

    async def run() -> None:
        async with (
            world.serving(),
            grpc.aio.insecure_channel(world.settings.listen) as channel,
        ):
            node = channel.stream_stream(f"{SERVICE}/Control", None, None)(None)
            await node.write(wire.encode_node_batch([Hello("n", 1)]))
            await node.read()  # it is welcome
            assert await said_to(world.endpoint, "TakeSnapshot", SNAPSHOT) == ("OK", "")
            order = await order_of(node)
            assert order.by == "operator root (uid 0 on the coordinator's machine)"
            assert any(f"as ordered by {order.by}" in line for line in world.said)

    asyncio.run(run())


@pytest.mark.parametrize("named", [False, True])
def test_a_user_who_is_refused_often_hides_nobody_else(directory: Path, *, named: bool) -> None:
    """Whether the relay refuses him, or what stands before each call."""
    world = World(directory)
    if named:
        world.allow(viewers=AllowSettings(users=(USER, USER - 1)))

    async def run() -> None:
        async with world.serving():
            await said_to_another(world.endpoint, "TakeSnapshot", SNAPSHOT, times=20)
            await said_to_another(world.endpoint, "TakeSnapshot", SNAPSHOT, user=USER - 1)

    asyncio.run(run())
    assert len([line for line in world.said if f"(uid {USER}" in line]) == 10
    assert f"(uid {USER - 1}" in world.said[-1]


def test_no_node_reports_there(directory: Path) -> None:
    world = World(directory)

    async def run() -> None:
        async with world.serving():
            code, _ = await said_to(world.endpoint, "Control", NODES)
            assert code == "UNIMPLEMENTED"

    asyncio.run(run())


def test_who_goes_round_the_relay_is_nobody(directory: Path) -> None:
    world = World(directory)

    async def run() -> None:
        async with world.serving():
            inner = f"{world.endpoint}.grpc"
            code, said = await said_to(inner, "ListNodes", NODES)
            assert code == "UNAUTHENTICATED"
            assert f"call at {world.path}" in said
            code, _ = await said_to_another(inner, "ListNodes", NODES)
            assert code == "UNAVAILABLE"

    asyncio.run(run())


def test_whoever_comes_over_a_network_without_tls_is_a_node_or_what_is_said(
    directory: Path,
) -> None:
    world = World(directory)

    async def run() -> None:
        async with world.serving() as here:
            code, said = await said_to(world.settings.listen, "ListNodes", NODES)
            assert code == "PERMISSION_DENIED"
            assert "for the role operator or viewer, and here nobody proves who he is" in said
            assert "`access.socket`" in said
            world.allow(anonymous="viewer")
            here.reconfigure(world.settings)
            assert await said_to(world.settings.listen, "ListNodes", NODES) == ("OK", "")
            code, _ = await said_to(world.settings.listen, "TakeSnapshot", SNAPSHOT)
            assert code == "PERMISSION_DENIED"

    asyncio.run(run())


def test_what_is_large_comes_through(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(directory)
    trace, chunks = TraceId(bytes(range(16))), 8
    with driver(directory / "t.sqlite") as earlier:
        for number in range(chunks):
            earlier.write(
                AppendSlice(trace, "n", 1, number * CHUNK_BYTES_MAX, bytes(CHUNK_BYTES_MAX))
            )

    async def run() -> None:
        async with world.serving():
            monkeypatch.delenv("BACKSIGHT_TLS", raising=False)
            monkeypatch.setenv("BACKSIGHT_COORDINATOR", world.endpoint)
            shown = await asyncio.to_thread(main, ["show", trace.hex(), "--json"])
            assert shown == 0, capsys.readouterr().err

    asyncio.run(run())
    (part,) = json.loads(capsys.readouterr().out)["slices"]
    assert part["bytes"] == chunks * CHUNK_BYTES_MAX


# As many as one user may have.
HELD = local.CONNECTIONS_OF_A_USER_MAX

HOLD = """
import os, socket, sys
path, held, *uids = sys.argv[1:]
connections = []
for uid in map(int, uids):
    os.seteuid(uid)
    for _ in range(int(held)):
        connections.append(socket.socket(socket.AF_UNIX))
        connections[-1].connect(path)
        connections[-1].recv(1)
    os.seteuid(0)
print("all are there", flush=True)
sys.stdin.read()
"""


@contextlib.asynccontextmanager
async def held(path: Path, uids: Iterable[int]) -> AsyncIterator[None]:
    """Connections of these users on which nothing is said, each met before the next comes."""
    command = ["/usr/bin/python3", "-c", HOLD, str(path), str(HELD), *map(str, uids)]
    pipe = asyncio.subprocess.PIPE
    holding = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert holding.stdin is not None
    assert holding.stdout is not None
    try:
        assert await holding.stdout.readline() == b"all are there\n"
        yield
    finally:
        holding.stdin.close()
        await holding.wait()


def test_one_user_has_not_all_connections(directory: Path) -> None:
    world = World(directory)

    async def run() -> None:
        async with world.serving() as here, held(world.path, [0]):
            code, said = await said_to(world.endpoint, "ListNodes", NODES)
            assert code == "RESOURCE_EXHAUSTED"
            assert said.startswith(f"uid 0 has {local.CONNECTIONS_OF_A_USER_MAX} connections")
            assert world.said[-1].endswith(f"one connection is refused: {said}")
            assert here.counters.too_many_calls == 1
            code, _ = await said_to_another(world.endpoint, "ListNodes", NODES)
            assert code == "UNAUTHENTICATED"  # he gets that far

    asyncio.run(run())


def test_who_has_no_role_takes_no_place_of_those_who_have_one(directory: Path) -> None:
    world = World(directory)
    world.allow(viewers=AllowSettings(users=(USER,)))
    strangers = range(100_000, 100_020)

    async def run() -> None:
        async with world.serving(), held(world.path, strangers):
            assert await said_to(world.endpoint, "ListNodes", NODES) == ("OK", "")
            asked = await said_to_another(world.endpoint, "ListNodes", NODES)
            assert asked == ("OK", "")

    asyncio.run(run())


def test_who_has_a_role_takes_no_place_of_roots(directory: Path) -> None:
    world = World(directory)
    world.allow(viewers=AllowSettings(users=("100000-100019",)))

    async def run() -> None:
        async with world.serving() as here, held(world.path, range(100_000, 100_020)):
            assert here.counters.too_many_calls > 0
            assert await said_to(world.endpoint, "ListNodes", NODES) == ("OK", "")

    asyncio.run(run())


def names_of_ours() -> list[str]:
    """Of sockets, which everybody sees."""
    return re.findall("@(backsight/.*)", Path("/proc/net/unix").read_text())


def test_no_name_of_a_connection_says_the_next(directory: Path) -> None:
    world = World(directory)

    async def run() -> None:
        async with world.serving():
            before = names_of_ours()
            async with held(world.path, [0]):
                names = set(names_of_ours()) - set(before)
            numbers = [int(name.removeprefix("backsight/0:"), 16) for name in names]
            assert len(numbers) == HELD
            assert all(abs(one - other) > 1 << 64 for one, other in itertools.pairwise(numbers))

    asyncio.run(run())


def test_a_name_that_is_taken_is_said(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda size: "ab" * size)
    world = World(directory)

    async def run() -> None:
        async with world.serving():
            with socket.socket(socket.AF_UNIX) as taking:
                taking.bind(f"\0backsight/0:{'ab' * 16}")
                code, _ = await said_to(world.endpoint, "ListNodes", NODES)
            assert code == "UNAVAILABLE"
            assert any("uid 0 does not get to gRPC: [Errno 98]" in line for line in world.said)

    asyncio.run(run())


@pytest.mark.skipif(
    not grpc.__version__.startswith("1.51."), reason="newer ones do not gather what is too long"
)
def test_who_sends_more_than_a_message_is_ended_and_nothing_stays_of_him(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not only when memory grows.
    monkeypatch.setattr(budget, "_GLANCE_S", 0.01)
    monkeypatch.setattr(budget, "_LOOK_EVERY_S", 0)
    world = World(directory)

    def fill() -> None:
        with Http2(world.endpoint) as asking:
            asking.listen(0.1)
            asking.call("ListTraces", 1 << 30)
            sent = 0
            while not asking.ended and sent < 64 << 20:
                asking.listen(0.01)
                sent += asking.fill(1 << 30)
            assert asking.ended

    async def run() -> None:
        async with world.serving() as here:
            running = asyncio.ensure_future(here.run())
            assert await said_to(world.endpoint, "ListNodes", NODES) == ("OK", "")
            await asyncio.to_thread(fill)
            assert here.counters.connections_ended_unfinished == 1
            ended = "its connection is ended: sent 8 MiB of a message that is not whole yet"
            assert any("backsight/0:" in line and ended in line for line in world.said)
            assert await said_to(world.endpoint, "ListNodes", NODES) == ("OK", "")
            async with asyncio.timeout(30):
                while here._budget._delivered:  # noqa: ASYNC110 # nobody tells
                    await asyncio.sleep(0.01)
            running.cancel()

    asyncio.run(run())


def test_who_has_no_role_never_comes_to_grpc(directory: Path) -> None:
    world = World(directory)

    async def run() -> None:
        async with world.serving() as here:
            door = here._door
            assert door is not None
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(door, "_relay", None)
                code, _ = await said_to_another(world.endpoint, "ListNodes", NODES)
            assert code == "UNAUTHENTICATED"
            assert here.counters.not_permitted == 1

    asyncio.run(run())


class Gone(dict[str, Any]):
    """The callers of whom nobody finds one any more."""

    def get(self, key: str, default: object = None) -> None:
        return None


@pytest.mark.parametrize(
    ("method", "request_", "end"),
    [
        ("ForgetNode", pb.ForgetNodeRequest(node="n"), ("OK", "node n is forgotten by")),
        ("TakeSnapshot", SNAPSHOT, ("OK", "are collected, as ordered by")),
        ("PinTrace", pb.PinTraceRequest(trace=bytes(range(16))), ("NOT_FOUND", None)),
        ("DeleteTrace", pb.DeleteTraceRequest(trace=bytes(range(16))), ("NOT_FOUND", None)),
    ],
)
def test_who_hangs_up_as_soon_as_he_has_asked_is_known_all_the_same(
    directory: Path,
    method: str,
    request_: Message,
    end: tuple[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(directory)

    async def run() -> None:
        async with world.serving() as here:
            async with grpc.aio.insecure_channel(world.settings.listen) as channel:
                node = channel.stream_stream(f"{SERVICE}/Control", None, None)(None)
                await node.write(wire.encode_node_batch([Hello("n", 1)]))
                await node.read()
                here.news.clear()
                node.cancel()
                await here.news.wait()
            door = here._door
            assert door is not None

            def gone(question: Callable[..., Awaitable[object]], *whole: object) -> Any:
                door._relayed = Gone(door._relayed)
                return question(*whole)

            for asked in (here._operations, here._questions):
                monkeypatch.setattr(asked, "_question", partial(gone, asked._question))
            code, _ = await said_to(world.endpoint, method, request_)
            assert code == end[0]
            if end[1] is not None:
                (said,) = (text for text in world.said if end[1] in text)
                assert "operator root (uid 0 on the coordinator's machine)" in said

    asyncio.run(run())


# Listens as another user until that ends, and calls once more on the same channel.
LISTENS = """
import grpc, sys
endpoint, request = sys.argv[1:]
with grpc.insecure_channel(endpoint) as channel:
    for method in ("TailTraces", "TakeSnapshot"):
        call = channel.unary_stream(f"/backsight.v1.Coordinator/{method}", None, None)
        try:
            next(iter(call(bytes.fromhex(request))), None)
            print("OK")
        except grpc.RpcError as error:
            print(error.code().name)
"""


def test_who_is_named_no_more_may_no_more(directory: Path) -> None:
    world = World(directory)
    world.allow(operators=AllowSettings(users=(USER,)))

    async def called(here: CoordinatorServer, calls: int) -> None:
        async with asyncio.timeout(30):
            while sum(one.calls for one in here._budget._peers.values()) < calls:  # noqa: ASYNC110 # nobody tells
                await asyncio.sleep(0.01)

    async def run() -> None:
        async with world.serving() as here, grpc.aio.insecure_channel(world.endpoint) as channel:
            tail = channel.unary_stream(f"{SERVICE}/TailTraces", None, None)(b"")
            listening = await asyncio.create_subprocess_exec(
                *("/usr/bin/python3", "-c", LISTENS, world.endpoint),
                SNAPSHOT.SerializeToString().hex(),
                stdout=asyncio.subprocess.PIPE,
                user=USER,
                group=USER,
                extra_groups=(),
                cwd="/",
                env={},
            )
            await called(here, 2)
            world.allow(operators=AllowSettings())
            here.reconfigure(world.settings)
            async with asyncio.timeout(30):
                said, _ = await listening.communicate()
            assert said.split() == [b"UNAVAILABLE", b"UNAUTHENTICATED"]
            assert not tail.done()  # root's
            tail.cancel()

    asyncio.run(run())


def test_a_reload_that_changes_nobody_ends_nothing(directory: Path) -> None:
    world = World(directory)
    world.allow(viewers=AllowSettings(users=(USER,)))

    async def run() -> None:
        async with world.serving() as here, held(world.path, [USER]):
            door = here._door
            assert door is not None
            before = list(door.connections())
            assert len(before) == HELD
            world.allow(anonymous="viewer")
            here.reconfigure(world.settings)
            await said_to(world.endpoint, "ListNodes", NODES)
            assert set(before) <= set(door.connections())

    asyncio.run(run())


def test_the_socket_of_a_killed_one_is_no_obstacle_and_none_is_left(directory: Path) -> None:
    world = World(directory)
    for path in world.path, directory / "c.sock.grpc":
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))

    async def run() -> None:
        async with world.serving():
            assert await said_to(world.endpoint, "ListNodes", NODES) == ("OK", "")

    asyncio.run(run())
    assert not list(directory.glob("c.sock*"))


def test_what_is_in_the_way_of_the_socket_is_said_with_the_key_that_names_it(
    directory: Path,
) -> None:
    world = World(directory)
    world.allow(socket=str(directory / "none" / "c.sock"))

    async def run() -> None:
        async with world.serving():
            pass

    with pytest.raises(OSError, match=r"/none does not exist; make it, .*path as `access\.socket`"):
        asyncio.run(run())
