# SPDX-License-Identifier: Apache-2.0
"""appliance/probes/link.py: what a node says to probes is checked before the loader gets it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest

from appliance.probes.link import Link
from appliance.probes.native import NativeProbes, Newcomer
from appliance.probes_packets import receive, send
from tests.unit.logs import logs_to

# They wait for what comes, which with a defect does not.
pytestmark = pytest.mark.timeout(20)


@dataclass
class Loader:
    """Keeps who is registered."""

    registered: dict[int, int] = field(default_factory=dict)
    unregistered: list[list[int]] = field(default_factory=list)
    """Those that were at once."""

    def set_bell(self, eventfd: int | None) -> None:
        pass

    def register(self, newcomers: Sequence[Newcomer]) -> list[int]:
        places = []
        for newcomer in newcomers:
            places.append(len(self.registered))
            self.registered[places[-1]] = newcomer.client
        return places

    def unregister(self, numbers: Sequence[int]) -> None:
        self.unregistered.append(list(numbers))
        for number in numbers:
            del self.registered[number]


@dataclass
class Side:
    node: socket.socket
    loader: Loader
    link: Link
    ended: asyncio.Event
    met: asyncio.Event
    log: list[str]


@asynccontextmanager
async def linked() -> AsyncIterator[Side]:
    node, probes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    probes.setblocking(False)
    loader, ended, met = Loader(), asyncio.Event(), asyncio.Event()
    log: list[str] = []
    link = Link(probes, cast(NativeProbes, loader), logs_to(log), ended.set, met.set)
    with node, contextlib.closing(link):
        yield Side(node, loader, link, ended, met, log)


WHO = {"who": 1, "namespace": 1 << 32, "device": 0, "port": 0, "within_ns": 1}


@pytest.mark.parametrize(
    ("said", "fds"),
    [
        ({"watch": 1 << 32}, 2),
        ({**WHO, "device": 1 << 32}, 0),
        ({**WHO, "port": 1 << 16}, 0),
        ({**WHO, "within_ns": 1 << 63}, 0),
        ({"want": 1 << 8}, 0),
    ],
)
def test_a_number_that_is_too_large_costs_the_connection(said: dict[str, int], fds: int) -> None:
    async def run() -> None:
        async with linked() as side:
            with contextlib.ExitStack() as exits:
                files = [os.open("/dev/null", os.O_RDONLY) for _ in range(fds)]
                for fd in files:
                    exits.callback(os.close, fd)
                send(side.node, said, files)
            await side.ended.wait()
            assert "no number of" in "".join(side.log)
            assert side.loader.registered == {}

    asyncio.run(run())


def test_that_a_node_takes_the_probes_is_news() -> None:
    async def run() -> None:
        async with linked() as side:
            send(side.node, {"welcome": 1, "node": "web-1"}, [os.eventfd(0)])
            await side.met.wait()
            assert side.link.welcomed

    asyncio.run(run())


def test_who_is_told_of_twice_at_once_has_one_place() -> None:
    async def run() -> None:
        async with linked() as side:
            # Of a process that is not this one: probes do not watch themselves.
            pidfd = os.pidfd_open(os.getppid())
            try:
                for _ in range(3):
                    send(side.node, {"watch": 7}, [pidfd, pidfd])
            finally:
                os.close(pidfd)
            answered = asyncio.Event()
            asyncio.get_running_loop().add_reader(side.node, answered.set)
            await answered.wait()
            asyncio.get_running_loop().remove_reader(side.node)
            answer = receive(side.node)
            assert answer is not None
            assert answer.said == {"watching": 7}
            assert list(side.loader.registered.values()) == [7]
        assert side.loader.registered == {}

    asyncio.run(run())


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (1, 2)])
def test_why_it_is_refused_is_read_though_nobody_hears_the_probes_out(
    before: int, after: int
) -> None:
    """As a node does with a user whom it does not trust, before or after they say something."""

    async def run() -> None:
        async with linked() as side:
            for _ in range(before):
                side.link.say({"hello": 1})
            send(side.node, {"refused": "user 7 is not ours"})
            side.node.close()
            for _ in range(after):
                side.link.say({"hello": 1})
            await side.ended.wait()
            assert side.link.refused == "user 7 is not ours"
            assert side.log == []

    asyncio.run(run())


def test_many_that_go_at_once_are_forgotten_at_once() -> None:
    """Each time the kernel is told, it waits for ten milliseconds."""

    async def run() -> None:
        async with linked() as side:
            pidfd = os.pidfd_open(os.getppid())
            answered = asyncio.Event()
            asyncio.get_running_loop().add_reader(side.node, answered.set)
            try:
                for number in range(6):
                    send(side.node, {"watch": number}, [pidfd, pidfd])
                # It was never watched.
                send(side.node, {"exited": 5})
            finally:
                os.close(pidfd)
            await answered.wait()
            assert list(side.loader.registered.values()) == [0, 1, 2, 3, 4]
            for number in range(2):
                send(side.node, {"exited": number})
            send(side.node, {"want": "nonsense"})
            await side.ended.wait()
        assert side.loader.unregistered == [[0, 1], [2, 3, 4]]
        assert side.loader.registered == {}

    asyncio.run(run())
