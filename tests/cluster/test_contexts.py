# SPDX-License-Identifier: Apache-2.0
"""Attached processes go over to other context segments while they fire, and no trigger is lost or doubled.

Real processes with the real library, the attach server and the data plane; in the place of
the core a list of what fired. Segments are memfds, and BPF array maps as probes will make them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import errno
import mmap
import os
import platform
import select
import signal
import socket
import statistics
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from appliance.attach import AttachServer
from appliance.clients import Clients
from appliance.contexts import ContextSource, memfd_context
from appliance.core.dataplane import ClientDrained, DataPlaneEvent, LocalTrigger
from appliance.daemon import Daemon
from appliance.native import NativeDataPlane
from appliance.pump import Pump
from appliance.ticks import choose_tick_source
from runtime.service_manager import ServiceManager, StoredFd
from runtime.settings.node import Settings
from runtime.unix_socket import Allowed, listen
from tests.cluster.test_upgrade import FrozenApplication
from tests.unit.attach_harness import Store, another_turn
from tests.unit.logs import SILENT, logs_to

pytestmark = pytest.mark.timeout(120)

PROCESSES = 4
THREADS = 4
REPLACEMENTS = 20

# Triggers of all threads between two contexts, at least.
TRIGGERS_BETWEEN = 200

SETTINGS = Settings(node="here", pool_bytes=64 << 20, arena_bytes=32 << 20, store_bytes=1 << 20)

_BPF = {"x86_64": 321, "aarch64": 280}
_BPF_MAP_CREATE = 0
_BPF_MAP_TYPE_ARRAY = 2
_BPF_F_MMAPABLE = 1 << 10

# struct bs_context_segment of native/src/abi/context.h.
_HEAD_AT = 64


def bpf_context(size: int) -> int:
    """Make a segment that is a BPF array map of one value: bpf(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(
        struct.pack("=5I", _BPF_MAP_TYPE_ARRAY, 4, size, 1, _BPF_F_MMAPABLE), 128
    )
    fd = int(libc.syscall(_BPF[platform.machine()], _BPF_MAP_CREATE, attributes, len(attributes)))
    if fd < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    os.set_inheritable(fd, False)
    return fd


@pytest.fixture(params=["memfd", pytest.param("bpf", marks=pytest.mark.bpf)])
def source(request: pytest.FixtureRequest) -> ContextSource:
    if request.param == "memfd":
        return memfd_context
    try:
        os.close(bpf_context(4096))
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        pytest.skip(f"no BPF maps here: {error.strerror}")
    return bpf_context


@dataclass
class Made:
    """A source, and all that it made, which stays open to be looked at."""

    source: ContextSource
    fds: list[int] = field(default_factory=list)

    def __call__(self, size: int) -> int:
        fd = self.source(size)
        self.fds.append(os.dup(fd))
        return fd


@dataclass
class Node:
    """A node, and what fired on it."""

    socket: Path
    plane: NativeDataPlane
    clients: Clients
    server: AttachServer
    log: list[str]
    fired: dict[bytes, int]
    """By the first 12 bytes of the trace: the process and its thread. The number of the last."""

    wrong: list[str]
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for events until that is so."""
        while not condition():
            self.news.clear()
            await self.news.wait()

    async def hear(self, fired: dict[bytes, int]) -> None:
        """So many of these threads."""
        await self.until(lambda: all(self.fired[thread] >= n for thread, n in fired.items()))

    @property
    def triggers(self) -> int:
        return sum(self.fired.values())

    async def hear_more(self) -> None:
        """Of each thread that has fired."""
        before = dict(self.fired)
        wanted = self.triggers + TRIGGERS_BETWEEN
        await self.until(
            lambda: (
                self.triggers >= wanted
                and all(self.fired[thread] > count for thread, count in before.items())
            )
        )

    def on_events(self, events: Iterable[DataPlaneEvent]) -> None:
        for event in events:
            if isinstance(event, ClientDrained):
                self.clients.drained(event.client)
            if not isinstance(event, LocalTrigger):
                continue
            thread, number = event.trace[:12], int.from_bytes(event.trace[12:], "big")
            if number != self.fired[thread] + 1:
                self.wrong.append(f"{thread.hex()}: {number} after {self.fired[thread]}")
            self.fired[thread] = number

    def on_done(self) -> None:
        self.clients.events_done()
        self.news.set()


@contextlib.asynccontextmanager
async def node(
    directory: Path,
    manager: ServiceManager | None = None,
    stored: Iterable[StoredFd] = (),
    fired: dict[bytes, int] | None = None,
) -> AsyncIterator[Node]:
    log: list[str] = []
    fds = {item.name: item.fd for item in stored if item.name in ("store", "keep")}
    manager = manager or ServiceManager(None)
    with NativeDataPlane(SETTINGS, choose_tick_source()) as plane:
        if fds:
            plane.adopt_store(fds["store"])
            plane.adopt_keep(fds["keep"])
        else:
            manager.store("store", plane.store_fd)
            manager.store("keep", plane.keep_fd)
        for fd in fds.values():
            os.close(fd)
        arena_bytes = SETTINGS.arena_bytes_or_default
        with Clients(plane, manager, arena_bytes, 100, logs_to(log)) as clients:
            clients.adopt([item for item in stored if item.name not in fds])
            path = directory / "node.sock"
            with AttachServer(
                listen(path, socket.SOCK_SEQPACKET),
                Allowed(frozenset({os.getuid()}), frozenset()),
                clients,
                logs_to(log),
            ) as server:
                if fired is None:
                    fired = collections.defaultdict(int)
                here = Node(path, plane, clients, server, log, fired, [])
                with Pump(plane, here.on_events, here.on_done):
                    yield here


class Load:
    """A process whose threads fire all the time (native/tests/client/trigger_load.c)."""

    def __init__(self, build: Path, socket: Path) -> None:
        self.process = subprocess.Popen(
            [build / "native/tests/client/trigger_load", str(THREADS)],
            env={**os.environ, "BACKSIGHT_SOCKET": str(socket)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def end(self) -> list[int]:
        """How many triggers of each thread were taken."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        counts = [int(count) for count in (await self.line()).split()]
        assert len(counts) == THREADS
        assert await asyncio.to_thread(self.process.wait) == 0
        return counts

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def threads(self) -> list[bytes]:
        return [
            self.process.pid.to_bytes(8, "big") + thread.to_bytes(4, "big")
            for thread in range(THREADS)
        ]


@contextlib.asynccontextmanager
async def loads(build: Path, socket: Path, count: int = PROCESSES) -> AsyncIterator[list[Load]]:
    started = [Load(build, socket) for _ in range(count)]
    try:
        for load in started:
            assert await load.line() == "attached"
        yield started
    finally:
        for load in started:
            load.kill()


def stop(process: subprocess.Popen[str]) -> None:
    """Until it stands."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


async def end_all(here: Node, all_loads: Iterable[Load]) -> int:
    """Have all end, and hear all that they fired. How much that was."""
    total = 0
    for load in all_loads:
        counts = await load.end()
        total += sum(counts)
        expected = dict(zip(load.threads(), counts, strict=True))
        await here.hear(expected)
        assert {thread: here.fired[thread] for thread in expected} == expected
    assert here.wrong == []
    return total


def triggers_in(fds: Iterable[int], plane: NativeDataPlane) -> int:
    """How many were ever fired into these segments."""
    heads = 0
    for fd in fds:
        with mmap.mmap(fd, plane.context_bytes, prot=mmap.PROT_READ) as segment:
            heads += int.from_bytes(segment[_HEAD_AT : _HEAD_AT + 4], "little")
    return heads


def test_processes_go_over_again_and_again_while_they_fire(
    tmp_path: Path, build: Path, source: ContextSource
) -> None:
    async def run() -> None:
        made = Made(source)
        async with node(tmp_path) as here, loads(build, here.socket) as all_loads:
            await here.hear_more()
            for i in range(REPLACEMENTS):
                # Also back, as when probes go.
                here.clients.use_contexts(memfd_context if i % 5 == 4 else made)
                await here.hear_more()
                await here.until(lambda: here.clients.moving == 0)
            took_ms = []
            for _ in range(REPLACEMENTS):
                began_ns = time.monotonic_ns()
                here.clients.use_contexts(made)
                await here.until(lambda: here.clients.moving == 0)
                took_ms.append((time.monotonic_ns() - began_ns) / 1e6)
            print(
                f"{PROCESSES} processes that fire go over to other contexts, {REPLACEMENTS} times:"
                f" min {min(took_ms):.1f}, median {statistics.median(took_ms):.1f},"
                f" max {max(took_ms):.1f} ms"
            )
            # Nobody writes to what was left: all heads but the last ones stand still.
            left = made.fds[:-PROCESSES]
            before = triggers_in(left, here.plane)
            await here.hear_more()
            assert triggers_in(left, here.plane) == before > 0
            assert here.server.counters.moved == PROCESSES * 2 * REPLACEMENTS
            assert here.server.counters.malformed == 0
            total = await end_all(here, all_loads)
            figures = here.plane.metrics()
            assert (figures["triggers"], figures["corrupt"]) == (total, 0)
            assert here.log == []
        for fd in made.fds:
            os.close(fd)

    asyncio.run(run())


def test_who_does_not_answer_holds_up_nobody_else(tmp_path: Path, build: Path) -> None:
    async def run() -> None:
        async with node(tmp_path) as here, loads(build, here.socket) as all_loads:
            await here.hear_more()
            stopped, killed = all_loads[0].process, all_loads[1].process
            for process in (stopped, killed):
                stop(process)
            for _ in range(3):
                here.clients.use_contexts(memfd_context)
                await here.until(lambda: here.clients.moving == 2)
            killed.kill()
            await here.until(lambda: here.clients.moving == 1)
            # It was asked once, and goes on to the latest from there.
            stopped.send_signal(signal.SIGCONT)
            await here.until(lambda: here.clients.moving == 0)
            assert here.server.counters.moved == 3 * (PROCESSES - 2) + 2
            await end_all(here, [all_loads[0], *all_loads[2:]])
            assert here.log == []

    asyncio.run(run())


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_daemon_that_dies_meanwhile_loses_and_doubles_nothing(
    tmp_path: Path, build: Path, source: ContextSource, has_answered: bool
) -> None:
    """The successor does not know whether the process has gone over: it may, or may not."""

    async def run() -> None:
        store = Store(tmp_path)
        kept: dict[str, int] = {}

        def keep() -> list[str]:
            stored, removed = store.take()
            kept.update({item.name: item.fd for item in stored})
            for name in removed:
                os.close(kept.pop(name))
            return removed

        with ServiceManager(str(store.path)) as manager, contextlib.ExitStack() as after_all:
            async with node(tmp_path, manager) as here:
                load = Load(build, here.socket)
                after_all.callback(load.kill)
                assert await load.line() == "attached"
                await here.hear_more()
                if not has_answered:
                    stop(load.process)
                here.clients.use_contexts(source)
                (client,) = here.clients
                if has_answered:
                    # The loop gets no turn to hear it.
                    select.select([client.link.socket], [], [])  # type: ignore[union-attr]
                assert here.clients.moving == 1
                fired, wrong = here.fired, here.wrong
            keep()
            assert sum(".context" in name for name in kept) == 1
            stored = [StoredFd(name, os.dup(fd)) for name, fd in kept.items()]
            async with node(tmp_path, manager, stored, fired) as here:
                assert here.clients.moving == 1
                load.process.send_signal(signal.SIGCONT)
                await here.until(lambda: here.clients.moving == 0)
                assert here.server.counters.moved == here.server.counters.resumed == 1
                assert keep() == [f"{client.stored_as}.client"]
                await here.hear_more()
                # It can go on from there.
                here.clients.use_contexts(source)
                await here.until(lambda: here.clients.moving == 0)
                await here.hear_more()
                await end_all(here, [load])
                assert (here.log, wrong) == ([], [])
        for fd in kept.values():
            os.close(fd)
        store.close()

    asyncio.run(run())


async def fire(here: Node, application: FrozenApplication, number: int) -> None:
    """The next trigger, and hear it."""
    assert await asyncio.to_thread(application.fire, f"{'ab' * 12}{number:08x}")
    await here.until(lambda: here.triggers == number)


async def fire_between_contexts(
    here: Node, source: ContextSource, application: FrozenApplication
) -> None:
    """Thirty triggers, with two changes of context in between."""
    for number in range(1, 31):
        if number in (10, 20):
            here.clients.use_contexts(source)
        await fire(here, application, number)
    assert (application.attached, application.resumed) == (1, 0)
    assert here.server.counters.malformed == 0
    assert (here.wrong, here.log) == ([], [])


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_library_of_the_day_when_the_abi_was_frozen_goes_over_and_one_that_is_deaf_goes_on(
    tmp_path: Path, source: ContextSource, is_deaf: bool
) -> None:
    async def run() -> None:
        async with node(tmp_path) as here:
            application = FrozenApplication(here.socket, is_deaf=is_deaf)
            with contextlib.ExitStack() as after_all:
                after_all.callback(application.__exit__)
                await asyncio.to_thread(application.__enter__)
                await fire_between_contexts(here, source, application)
                # It looks for news when it fires, and may be told of the second context only now.
                while here.clients.moving != is_deaf:
                    await fire(here, application, here.triggers + 1)
                assert (here.server.counters.moved == 0) == is_deaf

    asyncio.run(run())


def test_a_daemon_can_be_told_where_contexts_come_from(
    tmp_path: Path, build: Path, source: ContextSource
) -> None:
    async def run() -> None:
        settings = dataclasses.replace(SETTINGS, socket=str(tmp_path / "node.sock"))
        made = Made(source)
        async with (
            Daemon(settings, 1, ServiceManager(None), [], SILENT) as daemon,
            loads(build, settings.socket_path) as all_loads,
        ):
            daemon.use_contexts(made)
            while daemon.status()["attach"]["moved"] < PROCESSES:
                await another_turn()
            # Who comes later has such from the start.
            async with loads(build, settings.socket_path, 1) as others:
                assert len(made.fds) == PROCESSES + 1
                total = sum([sum(await load.end()) for load in (*all_loads, *others)])
            while daemon.status()["dataplane"]["clients"] > 0:
                await another_turn()
            status = daemon.status()
            assert status["dataplane"]["triggers"] == total
            assert (status["attach_moving"], status["attach"]["malformed"]) == (0, 0)
        for fd in made.fds:
            os.close(fd)

    asyncio.run(run())
