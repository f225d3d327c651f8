# SPDX-License-Identifier: Apache-2.0
"""What node and probes say to each other, while the other side does not read."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from appliance.probes_outbox import UNSENT_MAX, Outbox
from appliance.probes_packets import Packet, receive
from tests.unit.attach_harness import another_turn
from tests.unit.open_files import nothing_stays_open

pytestmark = pytest.mark.timeout(20)


@contextmanager
def outbox(failures: list[OSError]) -> Iterator[tuple[Outbox, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        made = Outbox(ours, failures.append)
        try:
            yield made, theirs
        finally:
            made.close()


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scene()

    with nothing_stays_open():
        asyncio.run(whole())


def test_all_comes_in_order_with_its_fds() -> None:
    async def scene() -> None:
        failures: list[OSError] = []
        with outbox(failures) as (made, theirs):
            for number in range(1000):
                fds = [os.eventfd(number)] if number % 3 == 0 else []
                made.say({"number": number}, fds)
                for fd in fds:
                    os.close(fd)
            assert not made.is_empty
            for number in range(1000):
                while (packet := _next(theirs)) is None:
                    await another_turn()
                assert packet.said == {"number": number}
                assert [os.eventfd_read(fd) for fd in packet.fds if number] == (
                    [number] if number and number % 3 == 0 else []
                )
                packet.close()
            assert made.is_empty
            # And it goes on at once.
            made.say({"number": 1000})
            assert receive(theirs) is not None
        assert failures == []

    run(scene)


def test_who_never_reads_is_left() -> None:
    async def scene() -> None:
        failures: list[OSError] = []
        with outbox(failures) as (made, theirs):
            bell = os.eventfd(0)
            # Those that the socket holds come on top.
            for _ in range(2 * UNSENT_MAX):
                made.say({"number": 0}, [bell] if made.is_empty else [])
            os.close(bell)
            assert [failure.errno for failure in failures] == [errno.EAGAIN]
            # Nothing goes out after a gap, and it is told once.
            waiting = 0
            while (packet := _next(theirs)) is not None:
                packet.close()
                waiting += 1
                await another_turn()
            assert waiting < UNSENT_MAX
            theirs.close()
            await another_turn()
            assert len(failures) == 1

    run(scene)


@pytest.mark.parametrize("waits", [False, True])
def test_who_hangs_up_is_told_of_once(waits: bool) -> None:
    async def scene() -> None:
        failures: list[OSError] = []
        with outbox(failures) as (made, theirs):
            while waits and made.is_empty:
                made.say({"number": 0})
            theirs.close()
            while not failures:
                made.say({"number": 1})
                await another_turn()
            made.say({"number": 2})
            await another_turn()
            (failure,) = failures
            assert failure.errno in (errno.EPIPE, errno.ECONNRESET)

    run(scene)


def test_a_process_without_fds_to_spare_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    true_dup = os.dup
    left = [None]

    def dup(fd: int) -> int:
        if not left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        left.pop()
        return true_dup(fd)

    async def scene() -> None:
        failures: list[OSError] = []
        with outbox(failures) as (made, _):
            while made.is_empty:
                made.say({"number": 0})
            monkeypatch.setattr(os, "dup", dup)
            made.say({"number": 1}, [0, 0])
            assert [failure.errno for failure in failures] == [errno.EMFILE]

    run(scene)


def _next(theirs: socket.socket) -> Packet | None:
    try:
        return receive(theirs)
    except BlockingIOError:
        return None
