# SPDX-License-Identifier: Apache-2.0
"""Probes connect to a node: who may, whom they watch, and what is there without them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from appliance.contexts import Context, ContextSource, Watcher
from appliance.probes_packets import FDS_MAX, BadPacket, Packet, probes_path, receive
from appliance.probes_server import STOCK, ProbesServer
from tests.unit.attach_harness import CONTEXT_BYTES, NOBODY, another_turn, open_directory
from tests.unit.logs import logs_to
from tests.unit.open_files import nothing_stays_open
from tests.unit.probes_harness import FIGURES, FakeProbes

# They wait for what comes, which with a defect does not.
pytestmark = pytest.mark.timeout(20)


@dataclass
class Host:
    """Gives processes their contexts, as far as it is told to."""

    source: ContextSource | None = None
    watcher: Watcher | None = None
    asked_again: int = 0

    def use_contexts(self, source: ContextSource, watcher: Watcher | None = None) -> None:
        self.source, self.watcher = source, watcher

    def no_contexts(self) -> None:
        self.source = self.watcher = None

    def contexts_again(self) -> None:
        self.asked_again += 1


@dataclass
class Somebody:
    """A process that is attached: this one."""

    number: int
    pidfd: int | None
    pid: int = os.getpid()
    stored_as: str = "0123456789ab"
    context: Context = field(default_factory=Context)
    link: None = None


@dataclass
class Node:
    path: Path
    server: ProbesServer
    host: Host
    log: list[str]
    rung: list[None]

    @asynccontextmanager
    async def probes(self) -> AsyncIterator[FakeProbes]:
        """Some that are welcome."""
        probes = FakeProbes.of(self.path)
        try:
            probes.hello(CONTEXT_BYTES)
            welcome = await heard(probes)
            assert (welcome.said["node"], len(welcome.fds)) == ("here", 1)
            welcome.close()
            yield probes
        finally:
            probes.close()
        await self.until(lambda: not self.server.connected)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await another_turn()


async def heard(probes: FakeProbes) -> Packet:
    packet = await probes.hear()
    assert packet is not None
    return packet


@pytest.fixture
def directory() -> Iterator[Path]:
    with open_directory() as path:
        yield path


@asynccontextmanager
async def node(directory: Path) -> AsyncIterator[Node]:
    path, host = directory / "node.sock", Host()
    log: list[str] = []
    rung: list[None] = []
    server = ProbesServer(
        probes_path(path), "here", CONTEXT_BYTES, host, lambda: rung.append(None), logs_to(log)
    )
    with server:
        yield Node(path, server, host, log, rung)


def test_probes_make_segments_and_are_told_whose_they_are(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here, here.probes() as probes:
            wanted = await heard(probes)
            assert wanted.said == {"want": STOCK}
            assert here.host.source is not None
            assert here.host.watcher is not None
            with pytest.raises(BlockingIOError):
                here.host.source(CONTEXT_BYTES)
            probes.give_contexts(STOCK, CONTEXT_BYTES)
            await here.until(lambda: here.host.asked_again == 1)
            fd = here.host.source(CONTEXT_BYTES)
            pidfd = os.pidfd_open(os.getpid())
            here.host.watcher.watch(Somebody(7, pidfd), fd)
            watch = await heard(probes)
            assert watch.said == {"watch": 7}
            assert [os.fstat(one).st_ino for one in watch.fds] == [
                os.fstat(one).st_ino for one in (pidfd, fd)
            ]
            watch.close()
            probes.say({"watching": 7})
            await here.until(lambda: here.server.watched == 1)
            here.host.watcher.exited(Somebody(7, None))
            assert (await heard(probes)).said == {"exited": 7}
            assert here.server.watched == 0
            os.close(pidfd)
            os.close(fd)

    asyncio.run(run())


def test_who_ended_before_it_was_watched_is_not_counted(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here, here.probes() as probes:
            (await heard(probes)).close()
            assert here.host.watcher is not None
            pidfd = os.pidfd_open(os.getpid())
            for number in (7, 8, 9):
                here.host.watcher.watch(Somebody(number, pidfd), pidfd)
                (await heard(probes)).close()
            os.close(pidfd)
            for number in (7, 8):
                here.host.watcher.exited(Somebody(number, None))
                (await heard(probes)).close()
            probes.say({"watching": 7})
            probes.say({"watching": 8, "error": "no such process"})
            probes.say({"watching": 9})
            # What comes last has been heard last.
            probes.say({"figures": FIGURES})
            await here.until(lambda: here.server.figures == FIGURES)
            assert here.server.watched == 1
            assert not [line for line in here.log if "cannot watch" in line]

    asyncio.run(run())


def test_what_keeps_processes_from_being_watched_is_said_once(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here, here.probes() as probes:
            (await heard(probes)).close()
            assert here.host.watcher is not None
            pidfd = os.pidfd_open(os.getpid())
            for number in range(5):
                here.host.watcher.watch(Somebody(number, pidfd), pidfd)
                (await heard(probes)).close()
                probes.say({"watching": number, "error": "no memory"})
            here.host.watcher.watch(Somebody(5, pidfd), pidfd)
            (await heard(probes)).close()
            os.close(pidfd)
            probes.say({"watching": 5})
            await here.until(lambda: here.server.watched == 1)
            (said,) = [line for line in here.log if "cannot watch" in line]
            assert "cannot watch client 0, and maybe others: no memory" in said

    asyncio.run(run())


def test_a_thousand_that_end_at_once_are_told_of(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here, here.probes() as probes:
            (await heard(probes)).close()
            assert here.host.watcher is not None
            for number in range(1000):
                here.host.watcher.exited(Somebody(number, None))
            for number in range(1000):
                assert (await heard(probes)).said == {"exited": number}
            assert here.server.connected

    asyncio.run(run())


def test_the_stock_is_filled_up_before_it_is_empty(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here, here.probes() as probes:
            await heard(probes)
            probes.give_contexts(STOCK, CONTEXT_BYTES)
            await here.until(lambda: here.host.asked_again == 1)
            assert here.host.source is not None
            for _ in range(STOCK // 2):
                os.close(here.host.source(CONTEXT_BYTES))
            assert (await heard(probes)).said == {"want": STOCK // 2}

    asyncio.run(run())


def test_a_ring_wakes_the_node(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            probes = FakeProbes.of(here.path)
            probes.hello(CONTEXT_BYTES)
            welcome = await heard(probes)
            os.eventfd_write(welcome.fds[0], 1)
            await here.until(lambda: len(here.rung) == 1)
            welcome.close()
            probes.close()
            await here.until(lambda: not here.server.connected)

    asyncio.run(run())


def test_without_them_processes_get_the_nodes_own(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            for _ in range(2):
                async with here.probes():
                    assert here.host.source is not None
                assert here.host.source is None
            assert sum("probes are gone" in line for line in here.log) == 2

    asyncio.run(run())


CONNECT = """
import socket, sys
socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("who", "said"),
    [
        (("--reuid=65534", "--regid=65534", "--clear-groups"), "Permission denied"),
        # Root without a right to override permissions, and of a node that is another user's.
        (("--bounding-set=-all", "--inh-caps=-all"), ""),
    ],
)
def test_only_root_and_the_nodes_own_user_connect(
    directory: Path, who: tuple[str, ...], said: str
) -> None:
    async def run() -> None:
        async with node(directory) as here:
            path = probes_path(here.path)
            if not said:
                os.chown(path, NOBODY, NOBODY)
            command = ["setpriv", *who, sys.executable, "-c", CONNECT, str(path)]
            done = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
            _, stderr = await done.communicate()
            assert (said in stderr.decode(), done.returncode) == (True, 1 if said else 0)

    asyncio.run(run())


def test_others_beside_them_are_refused(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here, here.probes():
            second = FakeProbes.of(here.path)
            second.hello(CONTEXT_BYTES)
            why = (await heard(second)).said["refused"]
            assert why == f"others are connected to it (process {os.getpid()})"
            assert await second.hear() is None
            second.close()
            assert here.server.connected

    asyncio.run(run())


@pytest.mark.parametrize(
    ("version", "size"), [(2, CONTEXT_BYTES), (1, CONTEXT_BYTES + 64)], ids=["version", "size"]
)
def test_those_of_another_release_are_refused(directory: Path, version: int, size: int) -> None:
    async def run() -> None:
        async with node(directory) as here:
            probes = FakeProbes.of(here.path)
            probes.hello(size, version)
            assert "of one release" in (await heard(probes)).said["refused"]
            probes.close()
            assert not here.server.connected

    asyncio.run(run())


@pytest.mark.parametrize(
    "said",
    [
        {"contexts": 3},
        {"contexts": "many"},
        {"watching": -1},
    ],
)
def test_who_makes_no_sense_is_left(directory: Path, said: dict[str, object]) -> None:
    async def run() -> None:
        async with node(directory) as here:
            async with here.probes() as probes:
                probes.say(said)
                await here.until(lambda: not here.server.connected)
            assert any("makes no sense" in line for line in here.log)

    asyncio.run(run())


@pytest.mark.parametrize("said", [b"", b"no JSON", b"[]", b"{}", b'{"hello": true}'])
def test_who_says_no_hello_is_not_taken(directory: Path, said: bytes) -> None:
    async def run() -> None:
        async with node(directory) as here:
            probes = FakeProbes.of(here.path)
            probes.socket.send(said)
            while (answer := await probes.hear()) is not None:
                assert "refused" in answer.said
            probes.close()
            assert not here.server.connected

    asyncio.run(run())


def test_figures_are_numbers_under_names(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here, here.probes() as probes:
            probes.say({"figures": FIGURES})
            await here.until(lambda: here.server.figures == FIGURES)
            # Prometheus is told of numbers; of others there would be no answer at all.
            probes.say({"figures": {"kinds": "all"}})
            probes.say({"figures": json.loads('{"a":' * 900 + "1" + "}" * 900)})
            probes.give_contexts(1, CONTEXT_BYTES)
            await here.until(lambda: here.host.asked_again == 1)
            assert here.server.figures == FIGURES

    asyncio.run(run())


def test_what_comes_with_a_packet_that_is_none_is_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, Path(os.devnull).open() as something:
        socket.send_fds(theirs, [b"no JSON"], [something.fileno()] * FDS_MAX)
        with nothing_stays_open(), pytest.raises(BadPacket, match="no JSON"):
            receive(ours)
