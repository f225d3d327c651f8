# SPDX-License-Identifier: Apache-2.0
"""coordinator.rpc.barred and source_filter: from where a crowd came nobody comes again for a while."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest

from coordinator.counters import ServerCounters
from coordinator.rpc.admission import Admission
from coordinator.rpc.barred import BARRED_S, Barred
from coordinator.rpc.budget import Budget
from coordinator.rpc.connections import connections, listening
from coordinator.rpc.source_filter import ADDRESSES_MAX, keep_out
from runtime.log import PeerLog
from tests.unit.logs import SILENT, logs_to


class Kept:
    """Who is barred, at a time."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.counters = ServerCounters()
        self.now_s = 100.0
        self.barred = Barred(self.counters, PeerLog(logs_to(self.said)), lambda: self.now_s)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_an_address_is_barred_for_a_while(kept: Kept) -> None:
    kept.barred.add("ipv4:10.0.0.1:1")
    kept.now_s += BARRED_S / 2
    kept.barred.add("ipv6:%5Bfd00::1%5D:1")
    assert kept.barred.addresses() == ("10.0.0.1", "fd00::1")
    kept.now_s += BARRED_S / 2
    assert kept.barred.addresses() == ("fd00::1",)
    kept.now_s += BARRED_S / 2
    assert kept.barred.addresses() == ()
    assert kept.counters.addresses_barred == 2
    assert len(kept.said) == 2
    assert "10.0.0.1: for 30 s no more connections are taken from there" in kept.said[0]


def test_with_each_crowd_the_time_begins_anew_and_is_said_once(kept: Kept) -> None:
    for port in range(4):
        kept.barred.add(f"ipv4:10.0.0.1:{port}")
        kept.barred.add("ipv4:10.0.0.2:1") if port == 0 else None
        kept.now_s += BARRED_S / 3
    assert kept.barred.addresses() == ("10.0.0.1",)
    assert kept.counters.addresses_barred == len(kept.said) == 2


def test_the_calls_of_an_ended_connection_are_known_while_its_address_is_barred(kept: Kept) -> None:
    kept.barred.add("ipv6:[fd00::1]:1")
    assert "ipv6:%5Bfd00::1%5D:1" in kept.barred
    assert "ipv6:%5Bfd00::1%5D:2" not in kept.barred
    kept.now_s += BARRED_S
    kept.barred.addresses()
    assert "ipv6:%5Bfd00::1%5D:1" not in kept.barred


def test_no_more_are_barred_than_a_filter_has_room_for(kept: Kept) -> None:
    for number in range(ADDRESSES_MAX + 2):
        kept.barred.add(f"ipv4:10.0.1.{number}:1")
    assert kept.barred.addresses() == tuple(f"10.0.1.{n}" for n in range(2, ADDRESSES_MAX + 2))
    assert "ipv4:10.0.1.1:1" not in kept.barred


def test_a_user_of_this_machine_is_not_barred(kept: Kept) -> None:
    peer = "unix-abstract:backsight/1000:0123"
    kept.barred.add(peer)
    assert kept.barred.addresses() == ()
    assert peer not in kept.barred
    assert kept.counters.addresses_barred == 0


def test_a_call_of_an_ended_connection_is_not_let_in(kept: Kept) -> None:
    """Nor is asked who made it, which takes longest of all that is done with a call."""
    who = Mock(return_value=None)
    budget = Budget(kept.counters, PeerLog(SILENT))
    admission = Admission(who, lambda: None, budget, kept.counters, PeerLog(SILENT))
    converses = AsyncMock()
    handler = grpc.stream_stream_rpc_method_handler(converses)
    let_in: Any = admission.handlers({"Control": handler})["Control"].stream_stream

    def call(port: int) -> None:
        context = Mock(peer=lambda: f"ipv4:10.0.0.1:{port}")
        asyncio.run(let_in(iter(()), context))

    budget.barred.add("ipv4:10.0.0.1:1")
    with pytest.raises(asyncio.CancelledError):
        call(1)
    assert (who.call_count, converses.await_count) == (0, 0)
    call(2)
    assert (who.call_count, converses.await_count) == (1, 1)


class Listening:
    """A port at which connections are taken, and who tries."""

    def __init__(self, stack: contextlib.ExitStack, host: str) -> None:
        self._stack = stack
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = stack.enter_context(
            socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
        )
        self.port: int = self._server.getsockname()[1]

    def keep_out(self, *addresses: str) -> None:
        keep_out(listening(self.port), addresses)

    def tries(self, source: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in source else socket.AF_INET
        one = self._stack.enter_context(socket.socket(family))
        one.bind((source, 0))
        one.setblocking(False)
        one.connect_ex(("::1" if ":" in source else "127.0.0.1", self.port))
        return one

    def accept(self) -> socket.socket:
        return self._stack.enter_context(self._server.accept()[0])


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def is_taken(one: socket.socket, timeout_ms: int = 0) -> bool:
    waiting = select.poll()
    waiting.register(one, select.POLLOUT)
    return bool(waiting.poll(timeout_ms))


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_nobody_connects_from_an_address_that_is_kept_out(
    stack: contextlib.ExitStack, host: str
) -> None:
    here = Listening(stack, host)
    here.keep_out("10.0.0.1", "127.0.0.2", "fd00::7", "127.0.0.3")
    # On one machine a connection is there, or not, when connect(2) comes back.
    assert [is_taken(here.tries(f"127.0.0.{n}")) for n in (2, 3, 4)] == [False, False, True]


def test_of_ipv6_a_whole_network_is_kept_out(stack: contextlib.ExitStack) -> None:
    here = Listening(stack, "::1")
    here.keep_out("::2", "127.0.0.1")
    assert not is_taken(here.tries("::1"))
    here.keep_out("0:0:0:1::1", "0:1::1")
    assert is_taken(here.tries("::1"))


def test_who_was_kept_out_is_let_in_again(stack: contextlib.ExitStack) -> None:
    here = Listening(stack, "127.0.0.1")
    here.keep_out("127.0.0.2")
    waits = here.tries("127.0.0.2")
    assert not is_taken(waits)
    here.keep_out()
    # Its kernel tries again, after a second.
    assert is_taken(waits, 10_000)


def test_connections_that_are_there_go_on(stack: contextlib.ExitStack) -> None:
    here = Listening(stack, "127.0.0.1")
    first = here.tries("127.0.0.2")
    accepted = here.accept()
    here.keep_out("127.0.0.2")
    first.setblocking(True)
    first.sendall(b"on")
    assert accepted.recv(2) == b"on"
    # And one that is taken meanwhile, from elsewhere, also afterwards.
    second = here.tries("127.0.0.3")
    accepted = here.accept()
    here.keep_out()
    second.setblocking(True)
    second.sendall(b"on")
    assert accepted.recv(2) == b"on"
    here.keep_out("127.0.0.3")
    second.sendall(b"on")
    assert accepted.recv(2) == b"on"


def test_a_port_that_listens_is_told_from_its_connections(stack: contextlib.ExitStack) -> None:
    here = Listening(stack, "127.0.0.1")
    peer = here.tries("127.0.0.2").getsockname()[1]
    here.accept()
    assert [one.getsockname()[1] for one in listening(here.port)] == [here.port]
    assert [one.peer for one in connections(here.port)] == [f"ipv4:127.0.0.2:{peer}"]


def test_too_many_addresses_are_an_error_and_change_nothing(stack: contextlib.ExitStack) -> None:
    here = Listening(stack, "127.0.0.1")
    with pytest.raises(ValueError, match="65 addresses; at most 64 can be kept out"):
        here.keep_out(*(f"127.0.0.{n}" for n in range(1, ADDRESSES_MAX + 2)))
    assert is_taken(here.tries("127.0.0.2"))
