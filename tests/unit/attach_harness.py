# SPDX-License-Identifier: Apache-2.0
"""A node that processes can attach to, without its data plane, and clients that say what they are told to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from appliance.attach import AttachServer
from appliance.clients import ClientFds, Clients
from appliance.door import DoorLimits
from appliance.packets import ABI_MAGIC, ABI_OLDEST, ABI_VERSION, Abi
from appliance.quotas import Quotas
from runtime.service_manager import ServiceManager, StoredFd
from runtime.unix_socket import Allowed, listen
from tests.unit.logs import logs_to

# abi/attach.h; of a refusal, what version 1 has of it.
REQUEST = struct.Struct("=IIIiQ16s64s")
REPLY = struct.Struct("=IIiI16sQ128s")
REPLY_BYTES = 176
NEWS = struct.Struct("=IIQ")
NEWS_CONTEXT = 1
NEWS_POLICY = 2
NO_TOKEN = bytes(16)
ARENA_BYTES = 1 << 20
CONTEXT_BYTES = 4096
NOBODY = 65534
DOOR_LIMITS = DoorLimits()
NO_QUOTAS = Quotas()

# What no kernel knows as an option of a socket.
UNKNOWN_OPTION = 9999


@dataclass
class Reply:
    status: int
    resumed: bool
    token: bytes
    arena_bytes: int
    message: str
    fds: list[int]
    version: int
    size: int
    features: int


def request(
    *,
    magic: int = ABI_MAGIC,
    version: int = ABI_VERSION,
    oldest: int = ABI_OLDEST,
    features: int = 0,
    token: bytes = NO_TOKEN,
    service: bytes = b"shop",
) -> bytes:
    return REQUEST.pack(magic, version, oldest, 1, features, token, service)


def request_of_version_1() -> bytes:
    return struct.pack("=IIiI16s64s", ABI_MAGIC, 1, 1, 0, NO_TOKEN, b"shop")


@dataclass
class RecordingDataPlane:
    """Makes memfds, and remembers what it was told."""

    clients_max: int = 4
    added: list[tuple[int, str]] = field(default_factory=list)
    adopted: list[tuple[int, int, str, bytes]] = field(default_factory=list)
    abis: dict[int, Abi] = field(default_factory=dict)
    tenants: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    has_memory: bool = True
    takes_contexts: bool = True
    is_settled: bool = True
    adopt_error: int = errno.EPROTO
    """Where nothing stands in a context."""

    contexts: list[tuple[str, int, bytes]] = field(default_factory=list)
    """What was done with contexts of clients, and what stood in them."""

    exited: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.policy_fd = os.memfd_create("policy")
        os.write(self.policy_fd, b"policy")

    def close(self) -> None:
        os.close(self.policy_fd)

    def client_add(self, pid: int, service: str, abi: Abi) -> tuple[int, ClientFds]:
        if len(self.added) == self.clients_max:
            raise OSError(errno.ENOSPC, "full")
        self.added.append((pid, service))
        self.abis[len(self.added)] = abi
        fds = ClientFds(*(os.memfd_create(name) for name in ("arena", "channel", "context")))
        for name, fd in zip(("arena", "channel", "context"), fds, strict=True):
            os.write(fd, name.encode())
        return len(self.added), fds

    def client_adopt(self, number: int, pid: int, service: str, abi: Abi, fds: ClientFds) -> None:
        contents = b" ".join(os.pread(fd, 100, 0) for fd in fds)
        if not os.pread(fds.context, 1, 0):
            raise OSError(self.adopt_error, "nothing stands in the context")
        self.adopted.append((number, pid, service, contents))
        self.abis[number] = abi

    @property
    def context_bytes(self) -> int:
        return CONTEXT_BYTES

    def client_context(self, number: int, fd: int) -> None:
        if not self.takes_contexts:
            raise OSError(errno.ENOMEM, "no memory")
        self.contexts.append(("new", number, os.pread(fd, 100, 0).rstrip(b"\0")))

    def client_context_done(self, number: int) -> bool:
        self.contexts.append(("done" if self.is_settled else "not yet", number, b""))
        return self.is_settled

    def client_adopt_context(self, number: int, fd: int) -> None:
        self.contexts.append(("before", number, os.pread(fd, 100, 0).rstrip(b"\0")))

    def client_tenant(self, number: int, tenant: int) -> None:
        if not self.has_memory:
            raise OSError(errno.ENOMEM, "no memory")
        self.tenants[number] = tenant

    def client_lost(self, number: int) -> None:
        self.lost.append(number)

    def client_exited(self, number: int) -> None:
        self.exited.put_nowait(number)


@dataclass
class Node:
    path: Path
    dataplane: RecordingDataPlane
    clients: Clients
    server: AttachServer
    log: list[str]


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """One that other users may enter, as they may not enter pytest's."""
    with tempfile.TemporaryDirectory(prefix="backsight-attach-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.asynccontextmanager
async def node(
    directory: Path,
    *,
    uids: frozenset[int] = frozenset({os.getuid()}),
    gids: frozenset[int] = frozenset(),
    manager: ServiceManager | None = None,
    stored: list[StoredFd] | None = None,
    per_user_max: int = 4,
    quotas: Quotas = NO_QUOTAS,
    door_limits: DoorLimits = DOOR_LIMITS,
    has_memory: bool = True,
    adopt_error: int = errno.EPROTO,
) -> AsyncIterator[Node]:
    log: list[str] = []
    path = directory / "node.sock"
    dataplane = RecordingDataPlane(has_memory=has_memory, adopt_error=adopt_error)
    with (
        contextlib.closing(dataplane),
        Clients(
            dataplane,
            manager or ServiceManager(None),
            ARENA_BYTES,
            per_user_max,
            logs_to(log),
            quotas,
        ) as clients,
    ):
        clients.adopt(stored or [])
        listener = listen(path, socket.SOCK_SEQPACKET)
        allowed = Allowed(uids, gids)
        with AttachServer(listener, allowed, clients, logs_to(log), door_limits) as server:
            yield Node(path, dataplane, clients, server, log)


class Peer:
    """A client that says what it is told to."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.setblocking(False)

    @classmethod
    def at(cls, path: Path) -> Self:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(path))
        return cls(connection)

    async def ask(self, packet: bytes) -> Reply:
        await asyncio.get_running_loop().sock_sendall(self.socket, packet)
        return await self.reply()

    async def packet(self) -> tuple[bytes, list[int]]:
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self.socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self.socket)
        data, fds, _, _ = socket.recv_fds(self.socket, 1000, 8)
        return data, fds

    async def reply(self) -> Reply:
        data, fds = await self.packet()
        magic, version, status, resumed, token, arena_bytes, message = REPLY.unpack_from(data)
        assert magic == ABI_MAGIC
        assert len(data) == (REPLY.size if status else REPLY_BYTES)
        text = message.partition(b"\0")[0].decode()
        if resumed:
            news, fds = await self.packet()
            assert NEWS.unpack(news)[:2] == (ABI_MAGIC, NEWS_POLICY)
        # A refusal ends before them.
        features = int.from_bytes(data[REPLY.size :], sys.byteorder)
        return Reply(
            status, bool(resumed), token, arena_bytes, text, fds, version, len(data), features
        )

    async def hung_up(self) -> bool:
        try:
            return await asyncio.get_running_loop().sock_recv(self.socket, 1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()


async def another_turn() -> None:
    """Let the loop see what is there; for what sets no event."""
    await asyncio.sleep(0)


def close_fds(reply: Reply) -> None:
    for fd in reply.fds:
        os.close(fd)


class Store:
    """A service manager's end of the notification socket."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.setblocking(False)

    def close(self) -> None:
        self.socket.close()

    def take(self) -> tuple[list[StoredFd], list[str]]:
        """What was stored and which names were removed since the last call."""
        stored, removed = [], []
        with contextlib.suppress(BlockingIOError):
            while True:
                data, fds, _, _ = socket.recv_fds(self.socket, 1000, 4)
                said = dict(line.split("=") for line in data.decode().splitlines())
                if "FDSTORE" in said:
                    assert said["FDPOLL"] == "0"
                    stored.append(StoredFd(said["FDNAME"], fds[0]))
                else:
                    assert said["FDSTOREREMOVE"] == "1"
                    removed.append(said["FDNAME"])
        return stored, removed


class Program:
    """One of attach_programs.py, while it runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().rstrip()

    async def go_on(self) -> str:
        """Have it do what comes next; what it says then."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return await self.says()


@contextlib.asynccontextmanager
async def program(
    name: str, *arguments: object, prefix: tuple[str, ...] = ()
) -> AsyncIterator[Program]:
    """Run a program of attach_programs.py, until the block is left."""
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-m",
        "tests.unit.attach_programs",
        name,
        *map(str, arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield Program(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        # Closes the pipes too, which a child of it may hold longer than itself.
        await process.communicate()
