# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS as both sides see it: who gets in, as what, until when, and what the others are told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import backsight_pb2 as pb
import grpc
import health_pb2 as health
import pytest

from coordinator.rpc import admission, guard
from coordinator.rpc.identity import ALLOWED, Role
from coordinator.server import CoordinatorServer
from ctl.__main__ import main
from ctl.pki import Authority
from protocol import wire
from protocol.messages import CoordinatorMessage, Hello, Refused, Welcome
from runtime.log import Entry, Log
from runtime.schema import ConfigError
from runtime.settings.coordinator import Settings, StoreSettings
from runtime.settings.tls import CoordinatorTlsSettings, NodeTlsSettings, TlsFiles
from runtime.tls import TlsError, Usage, load, why_not
from testbed.ports import free_port
from testbed.topology import await_ready
from tests.unit.logs import SILENT, logs_to
from tests.unit.reading_here import ReadingHere
from tests.unit.test_tls import weaken
from tests.unit.test_uplink import Node

REQUESTS = {
    "ListTraces": pb.ListTracesRequest(),
    "TailTraces": pb.ListTracesRequest(),
    "TakeSnapshot": pb.SnapshotRequest(age_ns=1, bytes_max=1),
    "GetTrace": pb.GetTraceRequest(trace=bytes(range(16))),
    "ListNodes": pb.ListNodesRequest(),
    "GetCounters": pb.GetCountersRequest(),
    "GetStatus": pb.GetStatusRequest(),
    "ForgetNode": pb.ForgetNodeRequest(node="unknown"),
    "PinTrace": pb.PinTraceRequest(trace=bytes(range(16))),
    "DeleteTrace": pb.DeleteTraceRequest(trace=bytes(range(16))),
}
ONE_ANSWER = {"GetCounters", "GetStatus", "ForgetNode", "PinTrace", "DeleteTrace"}


def test_a_certificate_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its owner calls."""
    read = Mock(return_value=SimpleNamespace(uris=(), dns_names=(), expires_at=datetime.now(UTC)))
    monkeypatch.setattr(guard, "_first", read)
    here = guard.Guard(None, lambda: None, SILENT)
    here._names = Mock()
    context: Any = SimpleNamespace(auth_context=lambda: {"x509_pem_cert": [b"one"]})
    callers = [here.caller(context) for _ in range(3)]
    assert callers[0] is not None
    assert callers == [callers[0]] * 3
    read.assert_called_once_with(b"one")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPC says on standard error what our own messages say."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")


class World:
    """A CA, a coordinator's files, and everybody else's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = Authority.create(directory / "pki", "d")
        self.coordinator = self.ca.issue(
            "coordinator", is_server=True, addresses=["127.0.0.1"]
        ).directory
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.said: list[str] = []

    def issued(self, path: str, **options: Any) -> Path:
        return self.ca.issue(path, is_server=False, **options).directory

    def settings(self, tls: CoordinatorTlsSettings | None = None) -> Settings:
        files = TlsFiles.of_directory(self.coordinator)
        return Settings(
            self.endpoint,
            tls=tls or CoordinatorTlsSettings(files.ca, files.certificate, files.key),
            store=StoreSettings(str(self.directory / "t.sqlite")),
        )

    @contextlib.asynccontextmanager
    async def serving(
        self, tls: CoordinatorTlsSettings | None = None
    ) -> AsyncIterator[CoordinatorServer]:
        async with CoordinatorServer(
            self.settings(tls), 1, logs_to(self.said), reading=ReadingHere()
        ) as here:
            yield here

    def channel(self, directory: Path | None, ca: Path | None = None) -> grpc.aio.Channel:
        """By which somebody connects, with the certificate there."""
        own = TlsFiles.of_directory(directory) if directory is not None else None
        credentials = grpc.ssl_channel_credentials(
            ((ca or self.directory / "pki") / "ca.crt").read_bytes(),
            Path(own.key).read_bytes() if own is not None else None,
            Path(own.certificate).read_bytes() if own is not None else None,
        )
        # Else gRPC goes on with a connection that another channel has.
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.secure_channel(self.endpoint, credentials, options=options)

    def node_files(self, directory: Path) -> NodeTlsSettings:
        files = TlsFiles.of_directory(directory)
        return NodeTlsSettings(files.ca, files.certificate, files.key)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def said_to(
    channel: grpc.aio.Channel, method: str, request: bytes
) -> tuple[grpc.StatusCode, str]:
    """How a call ends, after its first answer at the latest."""
    path = f"/backsight.v1.Coordinator/{method}"
    if method in ("Control", "Slices"):
        call: Any = channel.stream_stream(path, None, None)(None, timeout=20)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(request)
            await call.done_writing()
    elif method in ONE_ANSWER:
        call = channel.unary_unary(path, None, None)(request, timeout=20)
    else:
        call = channel.unary_stream(path, None, None)(request, timeout=20)
    try:
        if method in ONE_ANSWER:
            await call
        else:
            await call.initial_metadata()
            if method == "TailTraces" and not call.done():
                call.cancel()
            async for _ in call:
                break
    except asyncio.CancelledError:
        return grpc.StatusCode.OK, ""
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return (await call.code()) if call.done() else grpc.StatusCode.OK, ""


async def first_said(channel: grpc.aio.Channel, node: str) -> CoordinatorMessage | None:
    """What the coordinator answers to a Hello."""
    call = channel.stream_stream("/backsight.v1.Coordinator/Control", None, None)(None)
    await call.write(wire.encode_node_batch([Hello(node, 1)]))
    data = await call.read()
    call.cancel()
    said = wire.decode_coordinator_batch(data)[0] if isinstance(data, bytes) else None
    assert said is None or isinstance(said, Welcome | Refused)
    return said


@pytest.mark.parametrize("method", ALLOWED)
@pytest.mark.parametrize("role", Role)
def test_each_method_is_for_its_roles_only(world: World, method: str, role: Role) -> None:
    directory = world.issued(f"{role}/who")
    if method == "Control":
        request = wire.encode_node_batch([Hello("who", 1)])
    elif method == "Slices":
        request = wire.encode_opening(wire.Opening("who", 1))
    else:
        request = REQUESTS[method].SerializeToString()

    async def run() -> None:
        async with world.serving() as here, world.channel(directory) as channel:
            code, said = await said_to(channel, method, request)
            if role in ALLOWED[method]:
                assert code in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND), said
                assert here.counters.not_permitted == 0
            else:
                roles = " or ".join(sorted(ALLOWED[method]))
                assert (code, said) == (
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"{method} is not for {role} who (spiffe://d/{role}/who); allowed: the role {roles}",
                )
                assert here.counters.not_permitted == 1
                assert any(text.endswith(f"refused: {said}") for text in world.said)
            assert here.status()["now"]["nodes_known"] == int(
                method == "Control" and role == "node"
            )

    asyncio.run(run())


def test_a_node_says_the_name_in_its_certificate_or_is_refused(world: World) -> None:
    directory = world.issued("node/n1")

    async def run() -> None:
        async with world.serving() as here, world.channel(directory) as channel:
            assert isinstance(await first_said(channel, "n1"), Welcome)
            refused = await first_said(channel, "n2")
            assert refused == Refused(
                "this stream says to be of node n2, and its certificate is of node n1"
                " (spiffe://d/node/n1); set `node` to the name in the certificate, or get one for this name"
            )
            opening = wire.encode_opening(wire.Opening("n2", 1))
            assert await said_to(channel, "Slices", opening) == (
                grpc.StatusCode.PERMISSION_DENIED,
                refused.reason,
            )
            assert here.counters.not_permitted == 2
            assert [view.node for view in here._core.nodes(0)] == ["n1"]

    asyncio.run(run())


def test_a_node_refused_for_its_name_is_logged_once_from_whatever_port_it_comes(
    world: World,
) -> None:
    directory = world.issued("node/n1")
    said: list[Entry] = []

    async def run() -> None:
        log = Log(said.append)
        async with CoordinatorServer(world.settings(), 1, log, reading=ReadingHere()) as here:
            for _ in range(3):
                async with world.channel(directory) as channel:
                    assert isinstance(await first_said(channel, "n2"), Refused)
            assert here.counters.not_permitted == 3

    asyncio.run(run())
    (refused,) = [entry for entry in said if "refused" in entry.message]
    assert refused.message.startswith("ipv4:127.0.0.1:")
    assert refused.message.endswith(". Further attempts are only counted")
    assert refused.fields["REASON"].startswith("this stream says to be of node n2")


@pytest.mark.parametrize("who", ["node/n1", "viewer/v", "somebody"])
def test_health_is_told_to_every_certificate_and_to_nobody_without(world: World, who: str) -> None:
    directory = world.issued(who)

    async def asked(channel: grpc.aio.Channel) -> int:
        call = channel.unary_unary(
            "/grpc.health.v1.Health/Check", None, health.HealthCheckResponse.FromString
        )
        answer: health.HealthCheckResponse = await call(b"", timeout=20)
        return answer.status

    async def run() -> None:
        async with world.serving():
            async with world.channel(directory) as channel:
                assert await asked(channel) == health.HealthCheckResponse.SERVING
            async with world.channel(None) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asked(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def strangers(world: World) -> Iterator[tuple[str, Path | None]]:
    past = datetime.now(UTC) - timedelta(days=9)
    yield "without a certificate", None
    yield "over", world.issued("node/old", days=1, now=past)
    other = Authority.create(world.directory / "other", "d")
    yield "of another CA", other.issue("node/n1", is_server=False).directory
    yield "for servers", world.coordinator


def test_strangers_get_nothing(world: World) -> None:
    async def run() -> None:
        async with world.serving() as here:
            for who, directory in strangers(world):
                async with world.channel(directory) as channel:
                    for method in ("Control", "ListTraces"):
                        code, _ = await said_to(channel, method, b"")
                        assert code is grpc.StatusCode.UNAVAILABLE, who
            async with grpc.aio.insecure_channel(world.endpoint) as channel:
                code, _ = await said_to(channel, "ListTraces", b"")
                assert code is grpc.StatusCode.UNAVAILABLE
            assert here.counters.streams == 0
            assert here.status()["now"]["nodes_known"] == 0

    asyncio.run(run())


def test_a_certificate_without_a_role_is_told_what_is_wanted(world: World) -> None:
    directory = world.issued("something/else")

    async def run() -> None:
        async with world.serving(), world.channel(directory) as channel:
            code, said = await said_to(channel, "ListNodes", b"")
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert said == (
                "the certificate is of spiffe://d/something/else; wanted: spiffe://d/…/ROLE/NAME,"
                " with the role node, operator, viewer"
            )

    asyncio.run(run())


async def warning_of(world: World, tls: NodeTlsSettings, name: str = "n") -> str:
    """What a node says first of its coordinator."""
    node = Node(world.endpoint, tls=tls)
    async with node:
        async with asyncio.timeout(30):
            said = await node.log.get()
            # `backsightctl status` has the same reason, in whatever way it is kept out.
            if not said.startswith("connected to"):
                assert node.uplink.not_connected
                assert said.endswith(f": {node.uplink.not_connected}; trying again")
            return said


def test_a_node_says_why_it_does_not_get_in(world: World) -> None:
    """Each with its file, and what is wrong with it."""
    good = world.issued("node/n")
    other = Authority.create(world.directory / "other", "d")
    foreign = other.issue("node/n", is_server=False).directory
    wrong_name = world.issued("node/n2")
    past = datetime.now(UTC) - timedelta(days=9)
    old = world.issued("node/old", days=1, now=past)

    async def run() -> None:
        async with world.serving() as here:
            said = await warning_of(world, world.node_files(good))
            assert said == f"connected to the coordinator at {world.endpoint}"
            trusts_another = replace(world.node_files(good), ca=str(foreign / "ca.crt"))
            said = await warning_of(world, trusts_another)
            assert "its certificate is not accepted: " in said
            assert (
                f"it must be signed by a CA in {foreign}/ca.crt, be valid now, and be for" in said
            )
            said = await warning_of(
                world, replace(world.node_files(foreign), ca=str(good / "ca.crt"))
            )
            assert f"it hung up when it saw the certificate in {foreign}/tls.crt" in said
            assert "spiffe://d/node/n, signed by CN=Backsight CA of d, valid until " in said
            said = await warning_of(world, world.node_files(wrong_name))
            assert said.startswith(
                f"the coordinator at {world.endpoint} refuses this node: this stream"
            )
            said = await warning_of(world, world.node_files(old))
            assert f"coordinator.tls.certificate: {old}/tls.crt: it was valid until 20" in said
            named = replace(world.node_files(good), server_name="hub.example.org")
            said = await warning_of(world, named)
            assert "and be for hub.example.org" in said
            said = await warning_of(world, replace(world.node_files(good), key="/nowhere"))
            assert "coordinator.tls.key: /nowhere: there is no such file" in said
            operator = world.node_files(world.issued("operator/n"))
            said = await warning_of(world, operator)
            assert (
                f"the coordinator at {world.endpoint} refuses this node: Control is not for" in said
            )
            assert here.status()["now"]["nodes_known"] == 1

    asyncio.run(run())


def test_a_server_name_stands_for_the_endpoints(world: World) -> None:
    made = world.ca.issue("coordinator", is_server=True, dns=["hub"], replace=True)
    assert made.directory == world.coordinator
    good = world.issued("node/n")

    async def run() -> None:
        async with world.serving():
            said = await warning_of(world, replace(world.node_files(good), server_name="hub"))
            assert said == f"connected to the coordinator at {world.endpoint}"
            said = await warning_of(world, world.node_files(good))
            assert "its certificate is not accepted: IP address mismatch" in said

    asyncio.run(run())


def test_a_coordinator_without_tls_is_told_apart(world: World) -> None:
    shown = world.issued("node/n")
    files = TlsFiles.of_directory(shown)
    facts = load(files, "tls", Usage.CLIENT).facts

    async def run() -> None:
        plain = Settings(world.endpoint, store=StoreSettings(str(world.directory / "t.sqlite")))
        async with CoordinatorServer(plain, 1, SILENT):
            said = await asyncio.to_thread(why_not, world.endpoint, files, None, facts)
            assert said == "it speaks no TLS; has it a `tls` section?"

    asyncio.run(run())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        silent.close()
        assert why_not(endpoint, files, None, facts) is None  # gRPC says that nobody is there


def test_a_node_may_not_pass_for_the_coordinator(world: World) -> None:
    """Its certificate is of the same CA, and for the right address."""
    server = world.ca.issue("node/n", is_server=False, addresses=["127.0.0.1"]).directory
    files = TlsFiles.of_directory(server)
    pair = (Path(files.key).read_bytes(), Path(files.certificate).read_bytes())

    async def run() -> None:
        here = grpc.aio.server()
        here.add_secure_port(world.endpoint, grpc.ssl_server_credentials([pair]))
        await here.start()
        said = await warning_of(world, world.node_files(server))
        assert "its certificate is not accepted: unsuitable certificate purpose" in said
        await here.stop(None)

    asyncio.run(run())


def replace_files(source: Path, target: Path) -> None:
    for name in ("ca.crt", "tls.key", "tls.crt"):
        shutil.copy(source / name, target / f".{name}")
        (target / f".{name}").rename(target / name)


async def lasting(channel: grpc.aio.Channel, node: str) -> Any:
    """A Control stream that was welcomed."""
    call = channel.stream_stream("/backsight.v1.Coordinator/Control", None, None)(None)
    await call.write(wire.encode_node_batch([Hello(node, 1)]))
    data = await call.read()
    assert isinstance(data, bytes)
    assert isinstance(wire.decode_coordinator_batch(data)[0], Welcome)
    return call


async def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a stream ends."""
    async with asyncio.timeout(20):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while isinstance(await call.read(), bytes):
                pass
        return await call.code(), await call.details()


def served_certificate(endpoint: str, directory: Path) -> bytes:
    """What the coordinator shows now, in DER."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(directory / "ca.crt")
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    host, _, port = endpoint.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        return secured.getpeercert(binary_form=True) or b""


def test_a_new_certificate_is_shown_to_who_comes_and_nobody_is_disturbed(world: World) -> None:
    node = world.issued("node/n1")

    async def run() -> None:
        async with world.serving() as here, world.channel(node) as channel:
            call = await lasting(channel, "n1")
            before = await asyncio.to_thread(served_certificate, world.endpoint, node)
            world.ca.issue("coordinator", is_server=True, addresses=["127.0.0.1"], replace=True)
            here._guard.look()
            after = await asyncio.to_thread(served_certificate, world.endpoint, node)
            assert before != after
            assert any("taken up, spiffe://d/coordinator" in text for text in world.said)
            # The stream goes on: what is asked is answered.
            await call.write(b"\xff")
            (refused,) = wire.decode_coordinator_batch(await call.read())
            assert isinstance(refused, Refused)

    asyncio.run(run())


def test_a_certificate_that_cannot_be_shown_is_said_and_the_old_one_shown(world: World) -> None:
    node = world.issued("node/n1")

    async def run() -> None:
        async with world.serving() as here:
            before = await asyncio.to_thread(served_certificate, world.endpoint, node)
            expires = here.status()["certificate_expires_s"]["listen"]
            weaken(world.coordinator)
            for _ in range(3):
                here._guard.look()
            assert await asyncio.to_thread(served_certificate, world.endpoint, node) == before
            assert here.status()["certificate_expires_s"]["listen"] == expires
            (said,) = (text for text in world.said if "tls.crt" in text)
            assert "OpenSSL refuses to show it" in said
            with pytest.raises(ConfigError, match="OpenSSL refuses to show it"):
                here.reconfigure(here._settings)
        with pytest.raises(TlsError, match="OpenSSL refuses to show it"):
            async with world.serving():
                pass

    asyncio.run(run())


def test_who_is_not_trusted_any_more_is_out(world: World) -> None:
    node = world.issued("node/n1")
    other = Authority.create(world.directory / "other", "d")
    new = other.issue("coordinator", is_server=True, addresses=["127.0.0.1"]).directory
    trusted = other.issue("node/n2", is_server=False).directory

    async def run() -> None:
        async with world.serving() as here, world.channel(node, new) as channel:
            # As while CAs change: the node trusts both.
            both = (node / "ca.crt").read_bytes() + (new / "ca.crt").read_bytes()
            (node / "ca.crt").write_bytes(both)
            async with world.channel(node) as old:
                call = await lasting(old, "n1")
                replace_files(new, world.coordinator)
                here._guard.look()
                code, _ = await end_of(call)
                assert code is grpc.StatusCode.UNAVAILABLE
                code, _ = await said_to(old, "Control", wire.encode_node_batch([Hello("n1", 1)]))
                assert code is grpc.StatusCode.UNAVAILABLE
            code, _ = await said_to(channel, "Control", wire.encode_node_batch([Hello("n1", 1)]))
            assert code is grpc.StatusCode.UNAVAILABLE
            async with world.channel(trusted, new) as channel2:
                assert isinstance(await first_said(channel2, "n2"), Welcome)

    asyncio.run(run())


def test_a_stream_ends_with_its_certificate(world: World) -> None:
    node = world.issued("node/n1", days=3 / 86400)

    async def run() -> None:
        async with world.serving(), world.channel(node) as channel:
            call = await lasting(channel, "n1")
            code, said = await end_of(call)
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert said.startswith(
                "the certificate of node n1 (spiffe://d/node/n1) is over since it"
            )
            # Nor does a connection from before help.
            code, said = await said_to(channel, "Control", wire.encode_node_batch([Hello("n1", 2)]))
            assert code is grpc.StatusCode.UNAUTHENTICATED or "Socket closed" in said

    asyncio.run(run())


@pytest.mark.parametrize("method", ALLOWED)
def test_no_call_begins_after_its_certificate_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """On a connection from before, where TLS itself asks nobody again."""
    role = "node" if method in ("Control", "Slices") else "operator"
    directory = world.issued(f"{role}/who")
    request = {
        **{name: message.SerializeToString() for name, message in REQUESTS.items()},
        "ForgetNode": pb.ForgetNodeRequest(node="gone").SerializeToString(),
        "Control": wire.encode_node_batch([Hello("who", 1)]),
        "Slices": wire.encode_opening(wire.Opening("who", 1)),
    }[method]

    async def run() -> None:
        async with world.serving() as here, world.channel(directory) as channel:
            async with world.channel(world.issued("node/gone")) as gone:
                assert isinstance(await first_said(gone, "gone"), Welcome)
            while here.status()["now"]["nodes_connected"]:
                await here.news.wait()
                here.news.clear()
            await channel.channel_ready()
            over_s = time.time() + 2 * 365 * 86400
            monkeypatch.setattr(admission, "time", SimpleNamespace(time=lambda: over_s))
            code, said = await said_to(channel, method, request)
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert said == (
                f"the certificate of {role} who (spiffe://d/{role}/who) is over since it was shown;"
                " connect again with a new one"
            )
            # Nor was anything done.
            assert here.status()["now"]["nodes_known"] == 1
            assert here.counters.streams == 1
            assert not any("ordered by" in text for text in world.said)
            assert here.counters.not_permitted == 1
            assert any(text.endswith(f"refused: {said}") for text in world.said)

    asyncio.run(run())


def test_a_reload_takes_other_files_up_or_changes_nothing(world: World) -> None:
    new = Authority.create(world.directory / "other", "d").issue(
        "coordinator", is_server=True, addresses=["127.0.0.1"]
    )
    files = TlsFiles.of_directory(new.directory)
    wanted = CoordinatorTlsSettings(files.ca, files.certificate, files.key)

    async def run() -> None:
        async with world.serving() as here:
            before = here._guard.files
            with pytest.raises(ConfigError, match=r"tls\.key: /nowhere: there is no such file"):
                here.reconfigure(world.settings(replace(wanted, key="/nowhere")))
            assert here._guard.files is before
            here.reconfigure(world.settings(wanted))
            assert here._guard.files is not None
            assert here._guard.files.current == load(files, "tls", Usage.SERVER)

    asyncio.run(run())


def test_a_coordinator_without_valid_files_does_not_start(world: World) -> None:
    (world.coordinator / "tls.key").unlink()

    async def run() -> None:
        async with world.serving():
            pass

    with pytest.raises(TlsError, match=r"^tls\.key: .*: there is no such file"):
        asyncio.run(run())


def test_backsightctl_shows_a_certificate(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    viewer = world.issued("viewer/bob")
    node = world.issued("node/n1")
    other = Authority.create(world.directory / "other", "d")
    foreign = other.issue("viewer/bob", is_server=False).directory

    async def ctl(*words: str) -> int:
        return await asyncio.to_thread(main, ["--coordinator", world.endpoint, *words])

    async def run() -> None:
        async with world.serving():
            assert await ctl("--tls", str(viewer), "nodes") == 0
            assert await ctl("nodes") == 1
            assert "--tls DIR or BACKSIGHT_TLS" in capsys.readouterr().err
            monkeypatch.setenv("BACKSIGHT_TLS", str(node))
            assert await ctl("nodes") == 1
            assert "ListNodes is not for node n1 (spiffe://d/node/n1)" in capsys.readouterr().err
            shutil.copy(viewer / "ca.crt", foreign / "ca.crt")
            assert await ctl("--tls", str(foreign), "nodes") == 1
            assert "it hung up when it saw the certificate in" in capsys.readouterr().err
            assert await ctl("--tls", "/nowhere", "nodes") == 1
            assert "--tls.ca: /nowhere/ca.crt: there is no such file" in capsys.readouterr().err

    asyncio.run(run())


WITHOUT_TLS = {
    "nobody": "whoever reaches it may pass for any node; `tls`",
    "viewer": (
        "whoever reaches it may pass for any node, and read all traces (`access.anonymous: viewer`); `tls`"
    ),
    "operator": (
        "whoever reaches it may pass for any node, and read and delete all traces, have more collected and"
        " forget nodes (`access.anonymous: operator`); `tls`"
    ),
}


@pytest.mark.parametrize("anonymous", WITHOUT_TLS)
@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_who_serves_a_network_in_clear_text_is_warned(
    tmp_path: Path, host: str, anonymous: str, *, warned: bool
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        f"listen: {host}:{free_port()}\ninsecure: true\nstore: {{path: {tmp_path}/t.sqlite}}\n"
        f"metrics: {{listen: null}}\nquery: {{listen: null}}\naccess: {{anonymous: {anonymous}}}\n"
    )
    notify = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(str(notify))
        with subprocess.Popen(
            [sys.executable, "-m", "coordinator", "--config", str(config)],
            env={**os.environ, "NOTIFY_SOCKET": str(notify)},
            stderr=subprocess.PIPE,
            text=True,
        ) as daemon:
            await_ready(ready, daemon, "coordinator", lambda: "")  # type: ignore[arg-type]
            daemon.terminate()
            _, said = daemon.communicate()
    lines = [line for line in said.splitlines() if "without TLS" in line]
    assert len(lines) == warned
    assert all(WITHOUT_TLS[anonymous] in line for line in lines)


def test_a_reload_that_lets_strangers_do_more_is_warned_of(tmp_path: Path) -> None:
    said: list[str] = []

    async def run() -> None:
        settings = Settings(
            f"0.0.0.0:{free_port()}", insecure=True, store=StoreSettings(str(tmp_path / "t.sqlite"))
        )
        async with CoordinatorServer(settings, 1, logs_to(said)) as here:
            here.reconfigure(replace(settings, linger_s=1.0))
            assert not any("without TLS" in text for text in said)
            more = replace(settings, access=replace(settings.access, anonymous="operator"))
            here.reconfigure(more)
            (warning,) = (text for text in said if "without TLS" in text)
            assert WITHOUT_TLS["operator"] in warning

    asyncio.run(run())


def test_what_strangers_may_ends_no_connection_of_who_has_a_name(world: World) -> None:
    viewer = world.issued("viewer/v")

    async def run() -> None:
        async with world.serving() as here, world.channel(viewer) as channel:
            path = "/backsight.v1.Coordinator/TailTraces"
            tail = channel.unary_stream(path, None, None)(b"")
            await tail.initial_metadata()
            here.reconfigure(
                replace(here._settings, access=replace(here._settings.access, anonymous="viewer"))
            )
            async with world.channel(viewer) as other:
                assert await said_to(other, "ListNodes", b"") == (grpc.StatusCode.OK, "")
            assert not tail.done()
            assert not any("begin anew" in text for text in world.said)
            tail.cancel()

    asyncio.run(run())
