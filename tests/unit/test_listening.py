# SPDX-License-Identifier: Apache-2.0
"""A node that a socket unit of systemd starts uses the socket that systemd listens on."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.daemon import Daemon
from appliance.door import Door, DoorLimits
from runtime.service_manager import ServiceManager, StoredFd
from runtime.settings.node import Settings
from runtime.unix_socket import take_over
from tests.unit.attach_harness import NOBODY, Peer, close_fds, open_directory, request
from tests.unit.logs import SILENT


@pytest.fixture
def directory() -> Iterator[Path]:
    with open_directory() as path:
        yield path


def socket_at(path: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> socket.socket:
    """As a socket unit makes it, before any daemon is there."""
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(str(path))
    listener.listen(8)
    return listener


def daemon(path: Path, *listeners: socket.socket) -> Daemon:
    """One that is given its own fds of them."""
    given = [StoredFd("attach", os.dup(listener.fileno())) for listener in listeners]
    settings = Settings(
        node="here",
        socket=str(path),
        pool_bytes=8 << 20,
        arena_bytes=8 << 20,
        store_bytes=1 << 20,
        clients_max=4,
    )
    return Daemon(settings, 1, ServiceManager(None), given, SILENT)


def test_who_connects_while_no_node_is_there_is_attached_by_the_next(directory: Path) -> None:
    path = directory / "node.sock"

    async def run() -> None:
        with socket_at(path) as listener:
            for _ in range(2):
                early = Peer.at(path)
                asked = asyncio.ensure_future(early.ask(request()))
                async with daemon(path, listener):
                    reply = await asked
                    assert (reply.status, reply.message) == (0, "")
                    close_fds(reply)
                early.close()
            assert path.is_socket()

    asyncio.run(run())


@pytest.mark.root
@pytest.mark.parametrize("is_killed", [True, False])
def test_who_was_kept_out_is_let_in_by_the_next_node(directory: Path, *, is_killed: bool) -> None:
    path = directory / "node.sock"
    connect = f"import socket; socket.socket(1, socket.SOCK_SEQPACKET).connect({str(path)!r})"
    as_nobody = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", sys.executable, "-Ic", connect]

    async def run() -> None:
        with socket_at(path) as listener:
            path.chmod(0o666)
            door = Door(path, DoorLimits(connections_per_s=1), frozenset())
            assert door.knocked(NOBODY)
            assert await asyncio.to_thread(subprocess.call, as_nobody, stderr=subprocess.DEVNULL)
            if is_killed:
                async with daemon(path, listener):
                    await asyncio.to_thread(subprocess.check_call, as_nobody)
            door.close()
            await asyncio.to_thread(subprocess.check_call, as_nobody)

    asyncio.run(run())


def test_a_socket_that_listens_elsewhere_is_refused(directory: Path) -> None:
    async def run() -> None:
        elsewhere = directory / "elsewhere.sock"
        said = f"listens at {elsewhere}, and `socket` says {directory / 'node.sock'}; make"
        with socket_at(elsewhere) as listener, pytest.raises(OSError, match=re.escape(said)):
            daemon(directory / "node.sock", listener)

    asyncio.run(run())


def test_two_sockets_are_refused(directory: Path) -> None:
    async def run() -> None:
        path = directory / "node.sock"
        said = r"gave 2 sockets named attach; allowed: one"
        with socket_at(path) as listener, pytest.raises(OSError, match=said):
            daemon(path, listener, listener)

    asyncio.run(run())


@pytest.mark.parametrize("what", ["a stream", "one that does not listen", "one of a network"])
def test_what_applications_cannot_connect_to_is_refused(directory: Path, what: str) -> None:
    path = directory / "node.sock"
    if what == "a stream":
        given = socket_at(path, socket.SOCK_STREAM)
    elif what == "one of a network":
        given = socket.create_server(("127.0.0.1", 0))
    else:
        given = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given.bind(str(path))
    said = f"its unit needs ListenSequentialPacket={path}"
    with given, pytest.raises(OSError, match=re.escape(said)):
        take_over(os.dup(given.fileno()), path, socket.SOCK_SEQPACKET)
