# SPDX-License-Identifier: Apache-2.0
"""Processes are sent other context segments; what they say to that, and what they do not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from appliance.client_store import ClientStore
from appliance.contexts import (
    REPLACED_A_TURN,
    Context,
    Contexts,
    context_part,
    memfd_context,
    number_of_part,
)
from appliance.packets import ABI_MAGIC
from runtime.service_manager import ServiceManager, StoredFd
from tests.unit.attach_harness import (
    CONTEXT_BYTES,
    NEWS,
    NEWS_CONTEXT,
    NEWS_POLICY,
    Node,
    Peer,
    RecordingDataPlane,
    Store,
    another_turn,
    close_fds,
    node,
    open_directory,
    program,
    request,
)
from tests.unit.logs import SILENT, logs_to
from tests.unit.open_files import nothing_stays_open, open_files

# They wait for what comes, which with a defect does not.
pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def directory() -> Iterator[Path]:
    with open_directory() as path:
        yield path


def answer(number: int, *, magic: int = ABI_MAGIC, kind: int = NEWS_CONTEXT) -> bytes:
    return NEWS.pack(magic, kind, number)


def named(name: bytes) -> Callable[[int], int]:
    """A source whose segments can be told from others."""

    def make(size: int) -> int:
        fd = memfd_context(size)
        os.pwrite(fd, name, 0)
        return fd

    return make


def fails(_: int) -> int:
    raise OSError(errno.ENOMEM, "no room for a map")


async def attached(here: Node, token: bytes | None = None) -> tuple[Peer, bytes]:
    peer = Peer.at(here.path)
    reply = await peer.ask(request() if token is None else request(token=token))
    assert (reply.status, reply.resumed) == (0, token is not None)
    close_fds(reply)
    return peer, reply.token


async def context_sent(peer: Peer) -> tuple[int, bytes]:
    """The number of the context that a process is sent next, and what stands in it."""
    data, (fd,) = await peer.packet()
    magic, kind, number = NEWS.unpack(data)
    assert (magic, kind) == (ABI_MAGIC, NEWS_CONTEXT)
    assert os.fstat(fd).st_size == CONTEXT_BYTES
    content = os.pread(fd, 100, 0).rstrip(b"\0")
    os.close(fd)
    return number, content


async def says(here: Node, peer: Peer, packet: bytes) -> None:
    """Until the server has heard it."""
    heard = here.server.counters.moved + here.server.counters.malformed
    peer.socket.send(packet)
    while here.server.counters.moved + here.server.counters.malformed == heard:
        await another_turn()


def close_all(stored: list[StoredFd]) -> None:
    for item in stored:
        os.close(item.fd)


def contexts_open() -> int:
    return sum("backsight-context" in link for link in open_files())


def test_a_process_goes_over_when_it_says_so(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer, _ = await attached(here)
            here.clients.use_contexts(named(b"map"))
            assert await context_sent(peer) == (1, b"map")
            # The data plane knew of it before the process did.
            assert here.dataplane.contexts == [("new", 1, b"map")]
            assert here.clients.moving == 1
            # A newer library may say more.
            await says(here, peer, answer(1) + b"more")
            assert here.dataplane.contexts == [("new", 1, b"map"), ("done", 1, b"")]
            assert here.clients.moving == 0
            assert (here.server.counters.moved, here.server.counters.malformed) == (1, 0)
            assert contexts_open() == 0
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "nonsense",
    [
        b"x",
        answer(1)[:-1],
        answer(1, magic=ABI_MAGIC + 1),
        answer(1, kind=NEWS_POLICY),
        answer(0),
        answer(2),
        answer((1 << 64) - 1),
        request(),
        b"\0" * 5000,
    ],
)
def test_nonsense_is_cut_off_and_asked_again_when_it_is_back(
    directory: Path, nonsense: bytes
) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer, token = await attached(here)
            here.clients.use_contexts(named(b"map"))
            assert await context_sent(peer) == (1, b"map")
            await says(here, peer, nonsense)
            assert here.server.counters.malformed == 1
            assert await peer.hung_up()
            # Both are in use as before.
            assert here.dataplane.contexts == [("new", 1, b"map")]
            assert here.clients.moving == 1
            peer.close()
            peer, _ = await attached(here, token)
            assert await context_sent(peer) == (1, b"map")
            await says(here, peer, answer(1))
            assert here.dataplane.contexts == [("new", 1, b"map"), ("done", 1, b"")]
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_settled", [True, False])
def test_an_answer_to_nothing_is_nonsense(directory: Path, is_settled: bool) -> None:
    async def run() -> None:
        async with node(directory) as here:
            here.dataplane.is_settled = is_settled
            peer, _ = await attached(here)
            here.clients.use_contexts(named(b"map"))
            await context_sent(peer)
            await says(here, peer, answer(1))
            done = list(here.dataplane.contexts)
            await says(here, peer, answer(1))
            assert here.server.counters.malformed == 1
            assert await peer.hung_up()
            assert here.dataplane.contexts == done
            peer.close()

    asyncio.run(run())


def test_who_does_not_answer_keeps_both_and_gets_the_latest_when_it_does(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer, _ = await attached(here)
            for name in (b"first", b"second", b"third"):
                here.clients.use_contexts(named(name))
            assert here.dataplane.contexts == [("new", 1, b"first")]
            assert await context_sent(peer) == (1, b"first")
            await says(here, peer, answer(1))
            # And not what nobody wants any more.
            assert await context_sent(peer) == (2, b"third")
            assert here.clients.moving == 1
            await says(here, peer, answer(2))
            assert [what for what, _, _ in here.dataplane.contexts] == ["new", "done"] * 2
            assert here.clients.moving == 0
            peer.close()

    asyncio.run(run())


def test_the_old_one_stays_until_what_fired_there_is_seen_to(directory: Path) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            async with node(directory, manager=manager) as here:
                peer, token = await attached(here)
                client_id = token.hex()[:12]
                close_all(store.take()[0])
                here.clients.use_contexts(named(b"map"))
                stored, removed = store.take()
                assert [item.name for item in stored] == [f"{client_id}.context-1"]
                close_all(stored)
                await context_sent(peer)
                here.dataplane.is_settled = False
                await says(here, peer, answer(1))
                here.clients.events_done()
                assert (here.clients.moving, removed) == (1, [])
                here.dataplane.is_settled = True
                here.clients.events_done()
                assert here.clients.moving == 0
                stored, removed = store.take()
                assert [item.name for item in stored] == [f"{client_id}.client-1"]
                assert removed == [f"{client_id}.client"]
                close_all(stored)
                here.clients.events_done()
                whats = [what for what, _, _ in here.dataplane.contexts]
                assert whats == ["new", "not yet", "not yet", "done"]
                peer.close()
        store.close()

    asyncio.run(run())


@pytest.mark.parametrize("takes_contexts", [True, False])
def test_without_another_a_process_stays_where_it_is(directory: Path, takes_contexts: bool) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            async with node(directory, manager=manager) as here:
                peer, token = await attached(here)
                close_all(store.take()[0])
                here.dataplane.takes_contexts = takes_contexts
                here.clients.use_contexts(fails if takes_contexts else named(b"map"))
                (line,) = here.log
                assert "stays in its context segment" in line
                stored, removed = store.take()
                names = [] if takes_contexts else [f"{token.hex()[:12]}.context-1"]
                assert ([item.name for item in stored], removed) == (names, names)
                close_all(stored)
                assert (here.clients.moving, contexts_open()) == (1, 0)
                # The next time it goes.
                here.dataplane.takes_contexts = True
                here.clients.use_contexts(named(b"map"))
                assert await context_sent(peer) == (1, b"map")
                peer.close()
        store.close()

    asyncio.run(run())


@dataclass
class Going:
    """A process that goes over: what it was sent."""

    number: int
    pid: int = 1
    pidfd: int | None = None
    stored_as: str = "0123456789ab"
    context: Context = field(default_factory=Context)
    sent: list[int] = field(default_factory=list)

    @property
    def link(self) -> Self:
        return self

    def send_context(self, number: int, _fd: int) -> None:
        self.sent.append(number)


class StuckManager(ServiceManager):
    """Takes so many messages, and counts who waits for it in vain."""

    def __init__(self, takes: int) -> None:
        super().__init__(None)
        self.takes = takes
        self.waited = 0

    def store(self, name: str, fd: int) -> None:
        if self.takes == 0:
            self.waited += 1
            raise TimeoutError(errno.ETIMEDOUT, "the service manager took no message")
        self.takes -= 1


@contextlib.contextmanager
def going(count: int, manager: ServiceManager, log: list[str]) -> Iterator[list[Going]]:
    """So many processes that are told to, and the first piece of them went."""
    processes = [Going(number) for number in range(count)]
    with contextlib.closing(RecordingDataPlane()) as plane:
        contexts = Contexts(plane, ClientStore(manager, logs_to(log)), logs_to(log))
        contexts.use(named(b"map"), processes)
        yield processes
        contexts.close()
        for process in processes:
            contexts.exited(process)


def gone(processes: list[Going]) -> int:
    assert all(process.sent in ([], [1]) for process in processes)
    return sum(process.sent == [1] for process in processes)


def test_many_go_over_in_pieces() -> None:
    async def run() -> None:
        pieces: list[int] = []
        with going(3 * REPLACED_A_TURN + 1, ServiceManager(None), []) as processes:
            while not pieces or gone(processes) > pieces[-1]:
                pieces.append(gone(processes))
                await another_turn()
        assert pieces == [REPLACED_A_TURN * i for i in (1, 2, 3)] + [len(processes)]

    asyncio.run(run())


def test_a_service_manager_that_is_stuck_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        log: list[str] = []
        manager = StuckManager(takes=20)
        with going(40, manager, log) as processes:
            for _ in range(5):
                await another_turn()
            assert (gone(processes), manager.waited) == (20, 1)
            (line,) = log
            assert "took no message" in line
        assert contexts_open() == 0
        # And once a time that it is tried again, until it listens.
        monkeypatch.setattr("appliance.contexts._AGAIN_S", 0.0)
        manager = StuckManager(takes=0)
        with going(40, manager, log) as processes:
            while manager.waited < 3:
                assert gone(processes) == 0
                await another_turn()
            manager.takes = len(processes)
            while gone(processes) < len(processes):
                await another_turn()
            assert manager.waited == 3

    asyncio.run(run())


@pytest.mark.parametrize("connects", [True, False])
def test_who_could_not_go_over_does_when_it_connects_or_later(
    directory: Path, monkeypatch: pytest.MonkeyPatch, connects: bool
) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer, token = await attached(here)
            here.dataplane.takes_contexts = False
            if not connects:
                monkeypatch.setattr("appliance.contexts._AGAIN_S", 0.0)
            here.clients.use_contexts(named(b"map"))
            assert len(here.log) == 1
            here.dataplane.takes_contexts = True
            if connects:
                peer.close()
                peer, _ = await attached(here, token)
            assert await context_sent(peer) == (1, b"map")
            assert here.clients.moving == 1
            peer.close()

    asyncio.run(run())


def test_who_dies_before_it_went_over_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr("appliance.contexts._AGAIN_S", 0.0)
        manager = StuckManager(takes=0)
        processes = [Going(number) for number in range(REPLACED_A_TURN + 2)]
        with contextlib.closing(RecordingDataPlane()) as plane:
            contexts = Contexts(plane, ClientStore(manager, SILENT), SILENT)
            contexts.use(named(b"map"), processes)
            contexts.exited(processes[0])  # it was tried
            contexts.exited(processes[-1])
            manager.takes = len(processes)
            while gone(processes) < len(processes) - 2:
                await another_turn()
            assert (processes[0].sent, processes[-1].sent) == ([], [])
            contexts.close()
            for process in processes[1:-1]:
                contexts.exited(process)

    asyncio.run(run())


def test_who_is_not_connected_is_sent_it_when_it_is(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            peer, token = await attached(here)
            peer.close()
            (client,) = here.clients
            while client.link is not None:
                await another_turn()
            here.clients.use_contexts(named(b"map"))
            assert here.dataplane.contexts == []
            peer, _ = await attached(here, token)
            assert await context_sent(peer) == (1, b"map")
            peer.close()

    asyncio.run(run())


def test_who_dies_meanwhile_leaves_nothing(directory: Path) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            async with node(directory, manager=manager) as here:
                async with program("client", here.path, 0, 0) as client:
                    assert await client.says() == "0"
                    here.clients.use_contexts(named(b"map"))
                    assert here.clients.moving == 1
                number = await here.dataplane.exited.get()
                assert here.clients.moving == 0
                stored, removed = store.take()
                # A successor takes up what it fired into either.
                assert removed == []
                here.clients.drained(number)
                assert sorted(store.take()[1]) == sorted(item.name for item in stored)
                close_all(stored)
                assert contexts_open() == 0
        store.close()

    asyncio.run(run())


def test_who_comes_is_given_one_of_the_source(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            here.clients.use_contexts(named(b"map"))
            peer = Peer.at(here.path)
            reply = await peer.ask(request())
            contents = [os.pread(fd, 100, 0).rstrip(b"\0") for fd in reply.fds]
            assert contents == [b"arena", b"channel", b"map", b"policy"]
            assert here.dataplane.contexts == [("new", 1, b"map"), ("done", 1, b"")]
            close_fds(reply)
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize("takes_contexts", [True, False])
def test_who_comes_and_cannot_be_given_one_is_refused(
    directory: Path, takes_contexts: bool
) -> None:
    async def run() -> None:
        async with node(directory) as here:
            here.dataplane.takes_contexts = takes_contexts
            here.clients.use_contexts(fails if takes_contexts else named(b"map"))
            with nothing_stays_open():
                peer = Peer.at(here.path)
                reply = await peer.ask(request())
                assert reply.status == -errno.ENOMEM
                assert here.dataplane.exited.get_nowait() == 1
                assert await peer.hung_up()
                peer.close()

    asyncio.run(run())


# ---------------------------------------------------------- over a restart


async def stored_while_moving(directory: Path, manager: ServiceManager, store: Store) -> bytes:
    """The token of a process that was sent another context by a daemon that is gone now."""
    async with node(directory, manager=manager) as before:
        peer, token = await attached(before)
        before.clients.use_contexts(named(b"map"))
        await context_sent(peer)
        peer.close()
    return token


def test_a_successor_goes_on_with_both_and_asks_again(directory: Path) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            token = await stored_while_moving(directory, manager, store)
            stored, _ = store.take()
            async with node(directory, manager=manager, stored=stored) as after:
                assert after.log == []
                assert [what for *_, what in after.dataplane.adopted] == [
                    b"arena channel map".ljust(len(b"arena channel ") + 100, b"\0")
                ]
                assert after.dataplane.contexts == [("before", 1, b"context")]
                assert after.clients.moving == 1
                peer, _ = await attached(after, token)
                assert await context_sent(peer) == (1, b"map")
                await says(after, peer, answer(1))
                assert after.clients.moving == 0
                stored, removed = store.take()
                assert [item.name for item in stored] == [f"{token.hex()[:12]}.client-1"]
                assert removed == [f"{token.hex()[:12]}.client"]
                close_all(stored)
                # Numbers go on.
                after.clients.use_contexts(named(b"next"))
                assert await context_sent(peer) == (2, b"next")
                peer.close()
        store.close()

    asyncio.run(run())


def test_a_context_that_nobody_was_sent_is_dropped(directory: Path) -> None:
    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            token = await stored_while_moving(directory, manager, store)
            stored, _ = store.take()
            name = f"{token.hex()[:12]}.context-1"
            close_all([item for item in stored if item.name == name])
            stored = [item for item in stored if item.name != name]
            # As it is before the data plane has it.
            stored.append(StoredFd(name, os.memfd_create("empty")))
            async with node(directory, manager=manager, stored=stored) as after:
                assert after.log == []
                assert [what for *_, what in after.dataplane.adopted] == [b"arena channel context"]
                assert after.clients.moving == 0
                assert store.take() == ([], [name])
        store.close()

    asyncio.run(run())


def test_a_context_is_not_dropped_for_want_of_memory(directory: Path) -> None:
    """The process may use it: triggers there would go nowhere."""

    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            await stored_while_moving(directory, manager, store)
            stored, _ = store.take()
            names = [item.name for item in stored]
            (newest,) = [item for item in stored if item.name.endswith("context-1")]
            stored[stored.index(newest)] = StoredFd(newest.name, os.memfd_create("empty"))
            close_all([newest])
            async with node(
                directory, manager=manager, stored=stored, adopt_error=errno.ENOMEM
            ) as after:
                assert after.dataplane.adopted == []
                assert len(after.clients) == 0
                assert sorted(store.take()[1]) == sorted(names)
        store.close()

    asyncio.run(run())


def test_names_of_what_is_kept_say_which_it_is() -> None:
    for number in (0, 1, 10, 123456):
        assert number_of_part(context_part(number)) == number
    for part in ("arena", "context-", "context-0", "context-01", "context-x", "context-1-1"):
        assert number_of_part(part) is None
