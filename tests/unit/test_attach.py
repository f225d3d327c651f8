# SPDX-License-Identifier: Apache-2.0
"""Who may attach is, whoever else connects or whatever is sent is answered, counted and gone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.client_store import ClientStore
from appliance.contexts import memfd_context
from appliance.packets import Abi
from appliance.process import pidfd_of_peer, start_ticks_of
from runtime.service_manager import ServiceManager, StoredFd, take_stored_fds
from runtime.unix_socket import Allowed, listen
from tests.unit.attach_harness import (
    ARENA_BYTES,
    NO_TOKEN,
    NOBODY,
    UNKNOWN_OPTION,
    Peer,
    Store,
    close_fds,
    node,
    open_directory,
    program,
    request,
    request_of_version_1,
)
from tests.unit.logs import SILENT
from tests.unit.open_files import open_files


@pytest.fixture
def directory() -> Iterator[Path]:
    with open_directory() as path:
        yield path


def test_a_client_gets_its_memory(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer = Peer.at(here.path)
            reply = await peer.ask(request())
            assert (reply.status, reply.resumed, reply.message) == (0, False, "")
            assert reply.arena_bytes == ARENA_BYTES
            assert any(reply.token)
            contents = [os.pread(fd, 100, 0) for fd in reply.fds]
            assert contents == [b"arena", b"channel", b"context", b"policy"]
            # The pid is the kernel's word; the message said 1.
            assert here.dataplane.added == [(os.getpid(), "shop")]
            assert here.server.counters.attached == 1
            assert here.dataplane.lost == []
            close_fds(reply)
            peer.close()

    asyncio.run(run())


def test_a_client_without_a_tenant_leaves_nothing(directory: Path) -> None:
    async def run() -> None:
        async with node(directory, has_memory=False) as here:
            peer = Peer.at(here.path)
            reply = await peer.ask(request())
            assert (reply.status, reply.fds) == (-errno.ENOMEM, [])
            assert not any("memfd:arena" in name for name in open_files())
            assert here.dataplane.exited.get_nowait() == 1
            assert len(here.clients) == 0
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("packet", "status", "counter", "words"),
    [
        (b"x", errno.EPROTO, "malformed", "not an attach request: 1 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", errno.EPROTO, "malformed", "magic 0x20544547"),
        (request()[:-1], errno.EPROTO, "malformed", "103 bytes instead of 104"),
        (bytes(100_000), errno.EPROTO, "malformed", "magic 0x0"),
        (request(magic=0), errno.EPROTO, "malformed", "magic 0x0"),
        (request(version=1, oldest=1), errno.EPROTONOSUPPORT, "other_version", "ABI 1, the node 2"),
        (request_of_version_1(), errno.EPROTONOSUPPORT, "other_version", "update libbacksight"),
        (
            request(version=9, oldest=7),
            errno.EPROTONOSUPPORT,
            "other_version",
            "ABI 7 to 9, the node 2: update backsight-node",
        ),
    ],
)
def test_garbage_is_answered_counted_and_closed(
    directory: Path, packet: bytes, status: int, counter: str, words: str
) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer = Peer.at(here.path)
            reply = await peer.ask(packet)
            assert reply.status == -status
            assert words in reply.message
            assert reply.fds == []
            assert await peer.hung_up()
            assert getattr(here.server.counters, counter) == 1
            assert here.dataplane.added == []
            peer.close()
            # It serves the next one.
            honest = Peer.at(here.path)
            good = await honest.ask(request())
            assert good.status == 0
            close_fds(good)
            honest.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "packet",
    [
        request(version=9, oldest=2),
        request(features=1 << 63),
        # What a newer one may have to say beyond that.
        request(version=9, oldest=1) + b"more",
    ],
)
def test_a_newer_library_is_spoken_to_as_the_node_can(directory: Path, packet: bytes) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer = Peer.at(here.path)
            reply = await peer.ask(packet)
            assert (reply.status, reply.version) == (0, 2)
            assert len(reply.fds) == 4
            close_fds(reply)
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize("token_is_said", [True, False])
def test_what_was_agreed_on_outlasts_an_upgrade_of_the_node(
    directory: Path, monkeypatch: pytest.MonkeyPatch, token_is_said: bool
) -> None:
    """Its memory is of ABI 2, whatever else library and node could speak by now."""

    async def run() -> None:
        store = Store(directory)
        newer = request(version=3, oldest=2, features=1)
        with ServiceManager(str(store.path)) as manager:
            async with node(directory, manager=manager) as before:
                peer = Peer.at(before.path)
                first = await peer.ask(newer)
                assert before.dataplane.abis == {1: Abi(2, 0)}
                close_fds(first)
                peer.close()
            stored, _ = store.take()
            monkeypatch.setattr("appliance.packets.ABI_VERSION", 3)
            monkeypatch.setattr("appliance.packets.ABI_FEATURES", 1)
            async with node(directory, manager=manager, stored=stored) as after:
                assert after.dataplane.abis == {1: Abi(2, 0)}
                peer = Peer.at(after.path)
                token = first.token if token_is_said else NO_TOKEN
                again = await peer.ask(request(version=3, oldest=2, features=1, token=token))
                assert (again.resumed, again.version, again.features) == (
                    (True, 2, 0) if token_is_said else (False, 3, 1)
                )
                close_fds(again)
                peer.close()
        store.close()

    asyncio.run(run())


@pytest.mark.parametrize("packet", [request(version=3), request(features=1)])
def test_what_this_node_does_not_speak_it_does_not_take_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch, packet: bytes
) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            with monkeypatch.context() as newer:
                newer.setattr("appliance.packets.ABI_VERSION", 3)
                newer.setattr("appliance.packets.ABI_FEATURES", 1)
                async with node(directory, manager=manager) as before:
                    peer = Peer.at(before.path)
                    close_fds(await peer.ask(packet))
                    peer.close()
            stored, _ = store.take()
            async with node(directory, manager=manager, stored=stored) as after:
                assert after.dataplane.adopted == []
                assert len(after.clients) == 0
                assert "which this node does not speak" in after.log[0]
        store.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("service", "name"),
    [
        (b"", "unnamed"),
        (b"\xff\xfe", "��"),
        (b"a\nb\x1b[2J", "a?b?[2J"),
        (b"x" * 64, "x" * 64),
    ],
)
def test_service_names_are_made_printable(directory: Path, service: bytes, name: str) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer = Peer.at(here.path)
            close_fds(await peer.ask(request(service=service)))
            assert here.dataplane.added == [(os.getpid(), name)]
            peer.close()

    asyncio.run(run())


def test_an_attached_client_that_talks_is_cut_off(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer = Peer.at(here.path)
            close_fds(await peer.ask(request()))
            peer.socket.send(b"more")
            assert await peer.hung_up()
            assert here.server.counters.malformed == 1
            peer.close()

    asyncio.run(run())


def test_one_connection_a_process(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            first, second = Peer.at(here.path), Peer.at(here.path)
            close_fds(await first.ask(request()))
            reply = await second.ask(request())
            assert reply.status == -errno.EBUSY
            assert "attached already" in reply.message
            assert len(here.dataplane.added) == 1
            first.close()
            second.close()

    asyncio.run(run())


def test_a_client_that_lost_its_connection_resumes_by_token(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer = Peer.at(here.path)
            first = await peer.ask(request())
            close_fds(first)
            peer.close()
            peer = Peer.at(here.path)
            again = await peer.ask(request(token=first.token))
            assert (again.status, again.resumed) == (0, True)
            # The policy table of this daemon, which comes as news.
            assert [os.pread(fd, 100, 0) for fd in again.fds] == [b"policy"]
            close_fds(again)
            assert here.dataplane.lost == []
            assert again.token == first.token
            assert len(here.dataplane.added) == 1
            assert here.server.counters.resumed == 1
            peer.close()

    asyncio.run(run())


def test_a_later_process_of_a_pid_does_not_resume_with_the_token_of_the_one_before(
    directory: Path,
) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer = Peer.at(here.path)
            first = await peer.ask(request())
            close_fds(first)
            peer.close()
            # As if the pid had gone round since.
            (client,) = here.clients
            client.start_ticks -= 1
            peer = Peer.at(here.path)
            again = await peer.ask(request(token=first.token))
            assert (again.status, again.resumed, len(again.fds)) == (0, False, 4)
            assert again.token != first.token
            close_fds(again)
            assert here.server.counters.resumed == 0
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize("with_token", [True, False])
def test_who_connects_again_is_attached_before_anybody_has_looked_at_its_hang_up(
    directory: Path, with_token: bool
) -> None:
    async def run() -> None:
        async with node(directory) as here:
            first = Peer.at(here.path)
            reply = await first.ask(request())
            close_fds(reply)
            first.close()
            again = Peer.at(here.path)
            again.socket.send(request(token=reply.token) if with_token else request())
            here.server._accept()
            reply = await again.reply()
            assert (reply.status, reply.resumed) == (0, with_token)
            close_fds(reply)
            # The hang-up of the first is not taken for one of the second.
            (client,) = [client for client in here.clients if client.token == reply.token]
            assert client.link is not None
            assert client.link.is_open()
            again.close()

    asyncio.run(run())


def test_a_token_nobody_knows_gets_a_fresh_attachment(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer = Peer.at(here.path)
            reply = await peer.ask(request(token=b"?" * 16))
            assert (reply.status, reply.resumed, len(reply.fds)) == (0, False, 4)
            assert reply.token != b"?" * 16
            # What it wrote to the memory of that one is lost.
            assert here.dataplane.lost == [1]
            close_fds(reply)
            peer.close()

    asyncio.run(run())


def test_a_process_that_proc_hides_is_told_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with node(directory) as here:
            # As hidepid has it: no file is there.
            monkeypatch.setattr("appliance.process.Path", lambda path: Path("/none", path[1:]))
            peer = Peer.at(here.path)
            reply = await peer.ask(request())
            assert reply.status == -errno.EACCES
            assert reply.message.endswith("/proc hides it from this user (hidepid=, ProtectProc=)")
            assert "hidepid" in here.log[0]
            peer.close()

    asyncio.run(run())


def test_a_process_that_is_gone_is_not_taken_for_hidden() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    os.waitpid(pid, 0)
    with pytest.raises(ProcessLookupError):
        start_ticks_of(pid, pidfd)
    os.close(pidfd)


@pytest.mark.parametrize("failure", [errno.ETOOMANYREFS, errno.EPIPE, errno.ECONNRESET])
def test_what_cannot_be_sent_is_counted_and_said_unless_nobody_is_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    def send_fds(*_: object) -> int:
        raise OSError(failure, os.strerror(failure))

    async def run() -> None:
        async with node(directory) as here:
            monkeypatch.setattr("socket.send_fds", send_fds)
            for _ in range(3):
                peer = Peer.at(here.path)
                peer.socket.send(request())
                assert await peer.hung_up()
                peer.close()
            counters = here.server.counters
            if failure == errno.ETOOMANYREFS:
                assert (counters.attached, counters.unsent) == (0, 3)
                (line,) = here.log
                assert "cannot be sent: Too many references" in line
            else:
                assert (counters.attached, counters.unsent, here.log) == (0, 0, [])

    asyncio.run(run())


def test_a_context_that_cannot_be_sent_is_counted_and_said(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_fds(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    async def run() -> None:
        async with node(directory) as here:
            peer = Peer.at(here.path)
            close_fds(await peer.ask(request()))
            monkeypatch.setattr("socket.send_fds", send_fds)
            here.clients.use_contexts(memfd_context)
            assert await peer.hung_up()
            assert here.server.counters.unsent == 1
            assert "cannot be sent" in here.log[0]
            peer.close()

    asyncio.run(run())


def test_after_exec_the_old_client_has_exited(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer = Peer.at(here.path)
            close_fds(await peer.ask(request()))
            peer.close()  # as exec() does
            peer = Peer.at(here.path)
            reply = await peer.ask(request())
            assert (reply.status, len(reply.fds)) == (0, 4)
            assert here.dataplane.exited.get_nowait() == 1
            assert len(here.dataplane.added) == 2
            close_fds(reply)
            peer.close()

    asyncio.run(run())


def test_over_clients_max_is_refused_with_the_reason(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            here.dataplane.clients_max = 0
            peer = Peer.at(here.path)
            reply = await peer.ask(request())
            assert reply.status == -errno.ENOSPC
            assert "clients_max" in reply.message
            assert here.server.counters.refused == 1
            peer.close()

    asyncio.run(run())


@pytest.mark.root
@pytest.mark.parametrize(
    ("uid", "gid", "groups", "status"),
    [
        (NOBODY, NOBODY, [], -errno.EACCES),
        (NOBODY, 4711, [], 0),  # by its group
        (NOBODY, NOBODY, [4711], 0),  # by a supplementary one
        (4712, NOBODY, [], 0),  # by its user
        (NOBODY, NOBODY, list(range(10_000, 10_300)), -errno.EACCES),
    ],
)
def test_only_whom_the_configuration_names_may_attach(
    directory: Path, uid: int, gid: int, groups: list[int], status: int
) -> None:
    async def run() -> None:
        async with node(directory, uids=frozenset({4712}), gids=frozenset({4711})) as here:
            async with program("client", here.path, uid, gid, *groups) as client:
                assert await client.says() == str(status)
            assert here.server.counters.not_allowed == (status != 0)
            told = [line for line in here.log if f"of user {uid} may not attach" in line]
            assert len(told) == (status != 0)
            # Of who comes later, what the node was told last counts.
            here.server.allowed = Allowed(frozenset({uid}) if status else frozenset(), frozenset())
            async with program("client", here.path, uid, gid, *groups) as client:
                assert (await client.says() == "0") == (status != 0)

    asyncio.run(run())


@pytest.mark.root
def test_death_is_told_by_the_process_not_by_the_connection(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here, program("client", here.path, 0, 0) as client:
            assert await client.says() == "0"
            assert here.dataplane.exited.empty()
            client.process.send_signal(signal.SIGKILL)
            assert await here.dataplane.exited.get() == 1

    asyncio.run(run())


def test_the_connection_of_a_dead_process_is_closed_whoever_holds_its_other_end(
    directory: Path,
) -> None:
    async def run() -> None:
        async with node(directory) as here, program("client_with_heir", here.path) as client:
            assert await client.says() == "0"
            assert await here.dataplane.exited.get() == 1
            assert await client.go_on() == "closed"

    asyncio.run(run())


@pytest.mark.root
@pytest.mark.parametrize(
    ("kernel", "accepted", "status"),
    [
        ("new", "before", -errno.ESRCH),
        ("new", "after", -errno.ESRCH),
        ("old", "before", -errno.ESRCH),
        # What remains there (appliance.process).
        ("old", "after", 0),
    ],
)
def test_who_has_a_pid_next_is_not_taken_for_who_connected(
    kernel: str, accepted: str, status: int
) -> None:
    async def run() -> None:
        namespace = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        async with program("pid_reuse", kernel, accepted, prefix=namespace) as reuse:
            assert await reuse.says() == str(status)

    asyncio.run(run())


@pytest.mark.root
def test_who_has_gone_before_it_is_accepted_is_not_attached_by_its_pid(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.process.SO_PEERPIDFD", UNKNOWN_OPTION)
    with (
        contextlib.closing(listen(directory / "socket", socket.SOCK_SEQPACKET)) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end,
    ):
        end.connect(str(directory / "socket"))
        accepted, _ = listener.socket.accept()
        with accepted:
            os.close(pidfd_of_peer(accepted, os.getpid()))
            # This process lives; but nothing says any more that it is the one.
            end.close()
            with pytest.raises(ProcessLookupError):
                pidfd_of_peer(accepted, os.getpid())


# ---------------------------------------------------------- over a restart


def test_a_restarted_daemon_knows_its_clients(directory: Path) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            async with node(directory, manager=manager) as before:
                peer = Peer.at(before.path)
                first = await peer.ask(request())
                close_fds(first)
                peer.close()
            stored, removed = store.take()
            names = [f"{first.token.hex()[:12]}.client"]
            assert [item.name for item in stored] == names
            assert removed == []
            managers = os.dup(stored[0].fd)
            async with node(directory, manager=manager, stored=stored) as after:
                assert after.log == []
                assert after.dataplane.adopted == [
                    (1, os.getpid(), "shop", b"arena channel context")
                ]
                peer = Peer.at(after.path)
                again = await peer.ask(request(token=first.token))
                assert (again.status, again.resumed) == (0, True)
                # The policy table of this daemon, which comes as news.
                assert [os.pread(fd, 100, 0) for fd in again.fds] == [b"policy"]
                close_fds(again)
                assert after.dataplane.exited.empty()
                peer.close()
                after.clients.drained(1)
                assert store.take() == ([], names)
                assert len(after.clients) == 0
                # For the next one it is as it was.
                said, fds = unbundled(managers)
                assert said["about"]["service"] == "shop"
                assert [os.pread(fd, 100, 0) for fd in fds] == [b"arena", b"channel", b"context"]
                for fd in fds:
                    os.close(fd)
        store.close()

    asyncio.run(run())


@pytest.mark.root
@pytest.mark.parametrize("is_kept", [True, False])
def test_clients_attach_and_go_though_the_service_manager_does_not_answer(
    directory: Path, is_kept: bool
) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            async with node(directory, manager=manager) as here:
                if not is_kept:
                    store.close()
                peer = Peer.at(here.path)
                reply = await peer.ask(request())
                store.close()
                assert (reply.status, len(reply.fds)) == (0, 4)
                (client,) = here.clients
                here.clients._exited(client)
                here.clients.drained(client.number)
                close_fds(reply)
                peer.close()
        (line,) = here.log
        if is_kept:
            assert "the service manager still keeps client" in line
        else:
            assert "(shop) will not outlast a restart of the node" in line

    asyncio.run(run())


@pytest.mark.parametrize("newest_first", [False, True])
def test_only_the_latest_of_a_process_lives_on(directory: Path, newest_first: bool) -> None:
    """One that executes another program keeps its pid; systemd gives the newest fds first."""

    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            tokens = []
            async with node(directory, manager=manager) as before:
                for _ in range(2):
                    peer = Peer.at(before.path)
                    reply = await peer.ask(request())
                    tokens.append(reply.token)
                    close_fds(reply)
                    peer.close()
            stored, _ = store.take()
            if newest_first:
                stored.reverse()
            async with node(directory, manager=manager, stored=stored) as after:
                assert [number for number, *_ in after.dataplane.adopted] == [1, 2]
                assert after.dataplane.exited.get_nowait() == 1
                peer = Peer.at(after.path)
                again = await peer.ask(request(token=tokens[1]))
                assert (again.status, again.resumed) == (0, True)
                close_fds(again)
                assert after.dataplane.exited.empty()
                peer.close()
        store.close()

    asyncio.run(run())


def unbundled(fd: int) -> tuple[dict[str, Any], list[int]]:
    """What is said in a bundle, and the fds, which are taken out of it."""
    with socket.socket(fileno=fd) as bundle:
        text, fds, _, _ = socket.recv_fds(bundle, 4096, 8)
    return json.loads(text), fds


def bundled(text: bytes, fds: list[int]) -> int:
    inner, outer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with inner, outer:
        if text:
            socket.send_fds(inner, [text], fds)
        for fd in fds:
            os.close(fd)
        return outer.detach()


async def kept_client(directory: Path, manager: ServiceManager, store: Store) -> StoredFd:
    """Of a process that goes on living, and was attached to a daemon that is gone."""
    async with node(directory, manager=manager) as before:
        peer = Peer.at(before.path)
        close_fds(await peer.ask(request()))
        peer.close()
    ((item,), _) = store.take()
    return item


async def kept_before_bundles(
    directory: Path, manager: ServiceManager, store: Store
) -> list[StoredFd]:
    """Of such a process, each part under a name of its own."""
    item = await kept_client(directory, manager, store)
    said, fds = unbundled(item.fd)
    parts = {
        **dict(zip(said["parts"], fds, strict=True)),
        "about": memfd(json.dumps(said["about"]).encode()),
    }
    client_id = item.name.partition(".")[0]
    return [StoredFd(f"{client_id}.{part}", fd) for part, fd in parts.items()]


def test_clients_of_before_there_were_bundles_are_taken_up(directory: Path) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            stored = await kept_before_bundles(directory, manager, store)
            names = [item.name for item in stored]
            client_id = names[0].partition(".")[0]
            async with node(directory, manager=manager, stored=stored) as after:
                assert (after.log, len(after.dataplane.adopted)) == ([], 1)
            bundle, removed = store.take()
            assert [item.name for item in bundle] == [f"{client_id}.client"]
            assert sorted(removed) == sorted(names)
            async with node(directory, manager=manager, stored=bundle) as after:
                assert (after.log, len(after.dataplane.adopted)) == ([], 1)
            assert store.take() == ([], [])
        store.close()

    asyncio.run(run())


def test_who_cannot_be_kept_in_a_bundle_is_taken_up_all_the_same(directory: Path) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            stored = await kept_before_bundles(directory, manager, store)
            store.close()
            async with node(directory, manager=manager, stored=stored) as after:
                assert len(after.clients) == len(after.dataplane.adopted) == 1
                assert [line.partition(":")[0] for line in after.log] == [
                    "clients are kept as they were"
                ]

    asyncio.run(run())


def test_of_two_bundles_the_one_counts_that_took_the_place_of_the_other(directory: Path) -> None:
    """A daemon died before it had the service manager let go of the other."""

    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            item = await kept_client(directory, manager, store)
            client_id = item.name.partition(".")[0]
            said, fds = unbundled(item.fd)
            whole = json.dumps(said).encode(), [os.dup(fd) for fd in fds]
            os.close(fds.pop(said["parts"].index("context")))
            said["parts"].remove("context")
            stored = [
                StoredFd(f"{client_id}.client-1", bundled(json.dumps(said).encode(), fds)),
                StoredFd(item.name, bundled(*whole)),
                StoredFd(f"{client_id}.context-1", memfd(b"next")),
            ]
            async with node(directory, manager=manager, stored=stored) as after:
                assert after.log == []
                ((_, _, _, contents),) = after.dataplane.adopted
                assert contents == b"arena channel next"
                assert after.clients.moving == 0
                assert store.take() == ([], [item.name])
        store.close()

    asyncio.run(run())


def test_a_process_in_thousands_of_groups_is_kept(directory: Path) -> None:
    about = {"gids": list(range(1 << 20, (1 << 20) + 10_000))}
    store = Store(directory)
    with ServiceManager(str(store.path)) as manager:
        arena = memfd(b"")
        with contextlib.closing(ClientStore(manager, SILENT)) as before:
            before.store("0123456789ab", about, {"arena": arena})
        os.close(arena)
        with contextlib.closing(ClientStore(manager, SILENT)) as after:
            (found,) = after.recover(store.take()[0])
            assert (found.about, found.error) == (about, None)
            os.close(found.parts["arena"])
    store.close()


@pytest.mark.parametrize(
    ("text", "fds"),
    [
        (b"", 0),  # nothing is in it
        (b"{", 3),
        (b"[]", 3),
        (b'{"about": {}, "parts": 3}', 3),
        (b'{"about": {}, "parts": ["arena", "channel", "context"]}', 2),
        (b'{"about": {}, "parts": ["arena"]}', 2),
        (b'{"about": {}, "parts": ["arena", "channel", "context"]}', 3),
    ],
)
def test_a_bundle_that_is_none_is_dropped(directory: Path, text: bytes, fds: int) -> None:
    async def run() -> None:
        store = Store(directory)
        name = "0123456789ab.client"
        with ServiceManager(str(store.path)) as manager:
            bundle = bundled(text, [memfd(b"") for _ in range(fds)])
            async with node(directory, manager=manager, stored=[StoredFd(name, bundle)]) as here:
                assert here.dataplane.adopted == []
                assert "client 0123456789ab of before the restart is lost" in here.log[0]
                assert store.take() == ([], [name])
            assert not any("memfd:test" in name for name in open_files())
        store.close()

    asyncio.run(run())


def test_a_process_that_died_meanwhile_has_exited(directory: Path) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            async with node(directory, manager=manager) as before:
                async with program("client", before.path, 0, 0) as client:
                    assert await client.says() == "0"
                    pid = client.process.pid
                await before.dataplane.exited.get()
            stored, _ = store.take()
            async with node(directory, manager=manager, stored=stored) as after:
                assert after.dataplane.adopted == [(1, pid, "other", b"arena channel context")]
                assert after.dataplane.exited.get_nowait() == 1
        store.close()

    asyncio.run(run())


def test_clients_that_are_lost_for_one_reason_are_told_in_one_line(directory: Path) -> None:
    async def run() -> None:
        names = [f"{number:012x}" for number in range(100)]
        stored = [StoredFd(f"{name}.arena", memfd(b"")) for name in names]
        async with node(directory, stored=stored) as here:
            assert [line for line in here.log if "before the restart" in line] == [
                f"100 clients of before the restart are lost, {names[0]} among them: KeyError('about')"
            ]

    asyncio.run(run())


def test_a_client_that_cannot_be_taken_up_has_exited(directory: Path) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            async with (
                node(directory, manager=manager) as before,
                program("client", before.path, 0, 0) as client,
            ):
                assert await client.says() == "0"
                stored, _ = store.take()
                with open_directory() as other:
                    async with node(other, stored=stored, has_memory=False) as after:
                        assert len(after.dataplane.adopted) == 1
                        # The process lives, but nobody would see it die.
                        assert after.dataplane.exited.get_nowait() == 1
                        assert "of before the restart is lost" in after.log[0]
        store.close()

    asyncio.run(run())


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def about(token: str) -> bytes:
    return b'{"token": "%s", "pid": 1, "start_ticks": 1, "service": ""}' % token.encode()


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{",
        b"[]",
        b'{"pid": 1}',
        b"\xff",
        b'{"pid": "x"}',
        about("0123456789ab"),  # too short
        about("f" * 32),  # of another client
    ],
)
def test_what_comes_back_incomplete_or_foreign_is_dropped(
    directory: Path, content: bytes | None
) -> None:
    async def run() -> None:
        store = Store(directory)
        stored = [
            StoredFd("0123456789ab.arena", memfd(b"")),
            StoredFd("0123456789ab.channel", memfd(b"")),
            StoredFd("0123456789ab.context", memfd(b"")),
            StoredFd("0123456789ab.context", memfd(b"twice")),
            StoredFd("socket", memfd(b"")),
        ]
        if content is not None:
            stored.append(StoredFd("0123456789ab.about", memfd(content)))
        with ServiceManager(str(store.path)) as manager:
            async with node(directory, manager=manager, stored=stored) as here:
                assert here.dataplane.adopted == []
                assert any(
                    "client 0123456789ab of before the restart is lost" in line for line in here.log
                )
                assert sorted(store.take()[1]) == sorted(
                    {item.name for item in stored} - {"socket"}
                )
                assert not any("memfd:test" in name for name in open_files())
        store.close()

    asyncio.run(run())


def test_a_socket_left_by_a_killed_daemon_is_replaced_a_live_one_is_not(directory: Path) -> None:
    async def run() -> None:
        path = directory / "node.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(path))
        async with node(directory) as here:
            words = "another daemon listens there; stop that one, or name another path as `socket`"
            with pytest.raises(OSError, match=words):
                async with node(directory):
                    pass
            peer = Peer.at(here.path)
            close_fds(await peer.ask(request()))
            peer.close()
        assert not path.exists()

    asyncio.run(run())


def test_listen_variables_do_not_reach_children() -> None:
    environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0", "LISTEN_FDNAMES": ""}
    assert take_stored_fds(environment) == []
    assert environment == {}


def test_nothing_but_a_socket_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "data.txt"
    precious.write_text("precious")
    with pytest.raises(OSError, match="no socket; remove it, or name another path as `socket`"):
        listen(precious, socket.SOCK_SEQPACKET)
    link = tmp_path / "link"
    link.symlink_to(precious)
    with pytest.raises(OSError, match="exists, and is no socket"):
        listen(link, socket.SOCK_SEQPACKET)
    with pytest.raises(OSError, match=r"the directory .*/none does not exist; make it"):
        listen(tmp_path / "none" / "node.sock", socket.SOCK_SEQPACKET)
    with pytest.raises(OSError, match=r"or name another path as `access\.socket`"):
        listen(tmp_path / "none" / "node.sock", socket.SOCK_STREAM, "access.socket")
    assert precious.read_text() == "precious"
