# SPDX-License-Identifier: Apache-2.0
"""What one peer may take of a coordinator, and what it may make it say."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import pytest

from coordinator import server
from coordinator.counters import ServerCounters
from coordinator.rpc import budget, channelz, listener, streams
from coordinator.rpc.barred import BARRED_S
from coordinator.rpc.budget import (
    IDLE_CONNECTIONS_MAX,
    IDLE_S,
    UNDELIVERED_BYTES_MAX,
    UNFINISHED_S,
    Budget,
)
from coordinator.rpc.connections import connections, shut_all
from coordinator.rpc.identity import Identity, Role
from coordinator.rpc.peers import address_of, local_name
from protocol import wire
from protocol.messages import Hello
from runtime.log import Log, PeerLog
from tests.unit.logs import logs_to
from tests.unit.open_files import nothing_stays_open
from tests.unit.test_guard import World, said_to
from tests.unit.test_server import Client

NODE = Identity(Role.NODE, "n1", "spiffe://d/node/n1")
OTHER = Identity(Role.NODE, "n2", "spiffe://d/node/n2")
READER = Identity(Role.VIEWER, "ann", "spiffe://d/viewer/ann")

_OF_THE_LINK = "fe80::1"


@dataclass
class Fake:
    """A connection as the kernel would show it."""

    peer: str
    bytes_received: int = 0
    is_shut: bool = False

    def shut(self) -> None:
        self.is_shut = True


class Looked:
    """A budget, and the connections that it sees."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.counters = ServerCounters()
        self.now_s = 100.0
        self.budget = Budget(self.counters, PeerLog(logs_to(self.said)), lambda: self.now_s)
        self.fakes: list[Fake] = []
        self.bytes_max = 1 << 30
        self.settled = True

    def add(self, peer: str) -> Fake:
        self.fakes.append(Fake(peer))
        return self.fakes[-1]

    def look(self) -> None:
        self.settled = self.budget.look(lambda: self.fakes, self.bytes_max)


@pytest.fixture
def looked() -> Looked:
    return Looked()


def test_who_sends_more_than_a_message_and_never_its_end_is_ended(looked: Looked) -> None:
    one = looked.add("ipv4:10.0.0.1:1")
    with looked.budget.call(one.peer, NODE):
        looked.look()
        one.bytes_received = UNDELIVERED_BYTES_MAX
        looked.look()
        assert not one.is_shut
        one.bytes_received += 1
        looked.look()
        assert one.is_shut
    assert looked.counters.connections_ended_unfinished == 1
    (said,) = looked.said
    assert said == (
        "ipv4:10.0.0.1:1: its connection is ended: sent 8 MiB of a message that is not whole yet;"
        " messages have at most 4 MiB"
    )


def test_who_sends_much_in_whole_messages_goes_on(looked: Looked) -> None:
    one = looked.add("ipv4:10.0.0.1:1")
    with looked.budget.call(one.peer, NODE):
        for _ in range(100):
            one.bytes_received += UNDELIVERED_BYTES_MAX
            looked.budget.delivered(one.peer, UNDELIVERED_BYTES_MAX)
            looked.look()
    for _ in range(100):  # a call after the other, on the same connection
        with looked.budget.call(one.peer, NODE):
            one.bytes_received += UNDELIVERED_BYTES_MAX
            looked.look()
    assert not one.is_shut


def test_a_message_that_nobody_has_asked_for_yet_counts(looked: Looked) -> None:
    """GRPC reads the one of a question before it calls us."""
    one = looked.add("ipv4:10.0.0.1:1")
    one.bytes_received = UNDELIVERED_BYTES_MAX + 1
    looked.look()
    assert one.is_shut


def test_who_sends_a_part_of_a_message_and_not_the_rest_is_ended(looked: Looked) -> None:
    slow, fast = looked.add("ipv4:10.0.0.1:1"), looked.add("ipv4:10.0.0.2:1")
    with looked.budget.call(slow.peer, NODE), looked.budget.call(fast.peer, OTHER):
        looked.now_s += 3600  # it said nothing for an hour
        for _ in range(8):
            slow.bytes_received += 100_000
            fast.bytes_received += 100_000
            looked.budget.delivered(fast.peer, 100_000)
            assert not slow.is_shut
            looked.look()
            looked.now_s += UNFINISHED_S / 6
    assert slow.is_shut
    assert not fast.is_shut
    (said,) = looked.said
    assert said.endswith(
        "its connection is ended: sent a part of a message, and in 60 s not the rest of it"
    )


def test_who_is_only_there_goes_on(looked: Looked) -> None:
    """With gRPC's pings, for two weeks."""
    many = [looked.add(f"ipv4:10.0.0.1:{port}") for port in range(100)]
    looked.bytes_max = 0
    with contextlib.ExitStack() as calls:
        for port, one in enumerate(many):
            node = Identity(Role.NODE, f"n{port}", "")
            calls.enter_context(looked.budget.call(one.peer, node))
        for _ in range(14 * 24):
            looked.look()
            looked.now_s += 3600
            for one in many:
                one.bytes_received += 3 * 60 * 40
    assert not any(one.is_shut for one in many)


def test_who_is_not_listened_to_goes_on(looked: Looked) -> None:
    """Such as a node while the disk is full: what it has sent is in gRPC's window."""
    one = looked.add("ipv4:10.0.0.1:1")
    with looked.budget.call(one.peer, NODE):
        with looked.budget.unread(one.peer):
            for _ in range(10):
                one.bytes_received += 100_000
                looked.look()
                looked.now_s += UNFINISHED_S
        one.bytes_received += 100_000
        looked.look()
        assert not one.is_shut
        looked.now_s += UNFINISHED_S
        looked.look()
        assert one.is_shut


def test_who_only_reads_goes_on(looked: Looked) -> None:
    """With each answer gRPC says that there is room for more."""
    one = looked.add("ipv4:10.0.0.1:1")
    with looked.budget.call(one.peer, READER), looked.budget.unread(one.peer):
        for _ in range(10):
            one.bytes_received += UNDELIVERED_BYTES_MAX
            looked.look()
    one.bytes_received += UNDELIVERED_BYTES_MAX
    looked.look()
    looked.now_s += UNFINISHED_S
    looked.look()
    assert not one.is_shut


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_one_of_several_calls_of_a_connection_does_not_hide_the_others(
    looked: Looked, size: int
) -> None:
    """In clear text there may be so many."""
    one = looked.add("ipv4:10.0.0.1:1")
    with looked.budget.call(one.peer, None):
        looked.look()
        for _ in range(3):
            one.bytes_received += UNDELIVERED_BYTES_MAX // 2 + size
            with looked.budget.call(one.peer, None):
                looked.budget.delivered(one.peer, size)
            looked.look()
    assert one.is_shut


@pytest.mark.parametrize("late", [0, 200_000])
def test_what_a_call_that_ended_leaves_is_no_part_of_a_message(looked: Looked, late: int) -> None:
    """GRPC drops it, also what comes a little late, and the node has begun the next call."""
    one = looked.add("ipv4:10.0.0.1:1")
    with looked.budget.call(one.peer, None):
        with looked.budget.call(one.peer, None):
            looked.look()
            one.bytes_received += 1 << 20
            looked.look()
        with looked.budget.call(one.peer, None):
            looked.now_s += 0.1
            looked.look()
            one.bytes_received += late
            for _ in range(20):
                looked.now_s += 10
                one.bytes_received += 3000
                looked.budget.delivered(one.peer, 2900)
                looked.look()
            assert not one.is_shut
            # What comes on those that go on is one.
            one.bytes_received += 100_000
            looked.look()
            looked.now_s += UNFINISHED_S
            looked.look()
            assert one.is_shut


def test_what_calls_that_ended_leave_counts_with_what_the_others_have(looked: Looked) -> None:
    """Nobody knows whose it is, so who ends calls could hide a message without an end."""
    one = looked.add("ipv4:10.0.0.1:1")
    with looked.budget.call(one.peer, None):
        looked.look()
        for _ in range(5):
            with looked.budget.call(one.peer, None):
                one.bytes_received += 2 << 20
            looked.look()
            looked.now_s += 10
    assert one.is_shut
    (said,) = looked.said
    assert said.endswith(
        "sent 10 MiB of messages that are not whole, or whose calls ended; messages have at most 4 MiB"
    )


def test_what_is_hidden_from_time_by_calls_that_ended_gives_way_to_others(looked: Looked) -> None:
    """A part of a message may stay where another call ended, as long as there is room for all."""
    evil = [looked.add(f"ipv4:10.0.0.1:{n}") for n in range(12)]
    honest = looked.add("ipv4:10.0.1.1:1")
    looked.bytes_max = 100 << 20
    with contextlib.ExitStack() as calls:
        for one in (*evil, honest):
            for _ in range(2):
                calls.enter_context(looked.budget.call(one.peer, None))
        looked.look()
        for one in evil:
            with looked.budget.call(one.peer, None):
                one.bytes_received += 7 << 20
        looked.look()
        for _ in range(100):
            looked.now_s += 10
            looked.look()
        assert not looked.said
        honest.bytes_received += 7 << 20
        looked.bytes_max = 80 << 20
        looked.look()
        looked.look()
    assert not honest.is_shut
    assert sum(one.is_shut for one in evil) == 2


def test_what_messages_might_have_had_with_them_hides_nothing_later(looked: Looked) -> None:
    one = looked.add("ipv4:10.0.0.1:1")
    with looked.budget.call(one.peer, None), looked.budget.call(one.peer, None):
        for _ in range(1000):  # packed as no honest one does
            looked.budget.delivered(one.peer, 1 << 20)
            one.bytes_received += 1 << 20
            looked.look()
        one.bytes_received += UNDELIVERED_BYTES_MAX + 1
        looked.look()
    assert one.is_shut


@pytest.mark.parametrize(("size", "each_look"), [(20, 5000), (1 << 20, 20)])
def test_who_sends_whole_messages_on_several_calls_goes_on(
    looked: Looked, size: int, each_look: int
) -> None:
    """Such as a node without TLS, with a message under way whenever it is looked at."""
    one = looked.add("ipv4:10.0.0.1:1")
    looked.bytes_max = 0
    with looked.budget.call(one.peer, None), looked.budget.call(one.peer, None):
        looked.look()
        for _ in range(100):
            for _ in range(each_look):
                looked.budget.delivered(one.peer, size)
            one.bytes_received += each_look * (size + 5 + 9 * (1 + (size >> 14)) + 10)
            under_way = size * 3 // 4
            one.bytes_received += under_way
            looked.look()
            one.bytes_received -= under_way  # it is one of the next ones
            looked.now_s += 10
    assert not one.is_shut


def test_of_an_identity_the_largest_unfinished_messages_are_ended(looked: Looked) -> None:
    """From however many addresses, and none that is there only now."""
    sizes = [size << 20 for size in (1, *[7] * 11)]
    many = [looked.add(f"ipv4:10.0.0.{n}:1") for n in range(len(sizes))]
    other = looked.add("ipv4:10.0.1.1:1")
    with contextlib.ExitStack() as calls:
        for one in many:
            calls.enter_context(looked.budget.call(one.peer, READER))
        calls.enter_context(looked.budget.call(other.peer, OTHER))
        looked.look()
        for one, size in zip(many, sizes, strict=True):
            one.bytes_received += size
        other.bytes_received += UNDELIVERED_BYTES_MAX
        looked.look()
        assert not looked.said
        looked.look()
    assert sum(one.is_shut for one in many) == 2
    assert not many[0].is_shut
    assert not other.is_shut
    assert looked.counters.connections_ended_unfinished == 2
    said = "viewer ann (spiffe://d/viewer/ann) has 78 MiB of messages that are not whole; allowed are 64"
    assert any(said in text for text in looked.said)


@pytest.mark.parametrize("asked", [True, False])
def test_who_has_the_most_gives_way_when_all_have_too_much(looked: Looked, *, asked: bool) -> None:
    """An identity, or where nobody is asked an address; whoever sends slowly loses nothing."""
    honest = [looked.add(f"ipv4:10.0.1.{n}:1") for n in range(60)]
    evil = [looked.add(f"ipv4:10.0.0.1:{n}") for n in range(20)]
    looked.bytes_max = 80 << 20
    with contextlib.ExitStack() as calls:
        for number, one in enumerate(honest):
            node = Identity(Role.NODE, f"n{number}", "")
            calls.enter_context(looked.budget.call(one.peer, node if asked else None))
        for one in evil:
            calls.enter_context(looked.budget.call(one.peer, NODE if asked else None))
        looked.look()
        for one in honest:
            one.bytes_received += 1 << 20
        for one in evil:
            one.bytes_received += 2 << 20
        looked.look()
        assert not looked.settled  # look again soon, since it may be
        looked.look()
        for one in evil:
            if one.is_shut:
                looked.fakes.remove(one)
        looked.look()
    assert looked.settled
    assert not any(one.is_shut for one in honest)
    assert sum(one.is_shut for one in evil) == 10
    holder = str(NODE) if asked else "10.0.0.1"
    said = (
        "its connection is ended: all messages that are not whole have 100 MiB, of which"
        f" {holder} has the most, 40 MiB; allowed are 80 MiB"
    )
    assert any(text.endswith(said) for text in looked.said)


class Waiting:
    """Calls that gRPC has, by connection."""

    def __init__(
        self, looked: Looked, monkeypatch: pytest.MonkeyPatch, calls: dict[str, int]
    ) -> None:
        self._looked = looked
        for peer in calls:
            looked.add(peer)
        monkeypatch.setattr(channelz, "calls", lambda: sum(calls.values()))
        monkeypatch.setattr(channelz, "calls_by_peer", calls.items)

    def ended(self) -> list[str]:
        self._looked.budget.end_crowds(lambda: self._looked.fakes)
        return [one.peer for one in self._looked.fakes if one.is_shut]


def test_who_begins_the_most_calls_is_ended_when_too_many_wait(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {f"ipv4:10.0.1.{n}:1": 2 for n in range(200)}
    calls |= {"ipv4:10.0.0.1:1": 400, "ipv4:10.0.0.2:1": 70, "ipv4:10.0.0.3:1": 500}
    waiting = Waiting(looked, monkeypatch, calls)
    with contextlib.ExitStack() as let_in:
        for peer in calls:
            let_in.enter_context(looked.budget.call(peer, None))
        for _ in range(461):  # so that 38 of its calls wait
            let_in.enter_context(looked.budget.call("ipv4:10.0.0.3:1", None))
        assert waiting.ended() == ["ipv4:10.0.0.1:1"]
    assert looked.counters.connections_ended_calls == 1
    said, _ = looked.said
    assert said.endswith(
        "its connection is ended: began 399 calls at once; of all that are not let in yet 10.0.0.1 has the"
        " most, 395 beyond 4 on each connection, and all together 494; allowed are 455"
    )


@pytest.mark.parametrize("on_each", [64, 8])
def test_who_has_many_connections_has_no_more_calls_that_wait(
    looked: Looked, monkeypatch: pytest.MonkeyPatch, on_each: int
) -> None:
    """Of an address; a script of somebody else, which begins more on one, loses nothing."""
    script = "ipv4:10.0.0.2:1"
    evil = {f"ipv4:10.0.0.1:{n}": on_each for n in range(128)}
    waiting = Waiting(looked, monkeypatch, {**evil, script: 65})
    ended = waiting.ended()
    assert script not in ended
    beyond = (len(evil) - len(ended)) * (on_each - 4)
    assert 300 < beyond < 400


@pytest.mark.parametrize(
    "peers",
    [
        [f"ipv4:10.0.{n % 8}.{n // 8}:1" for n in range(2000)],
        [f"ipv4:127.0.0.1:{n}" for n in range(2000)],
    ],
    ids=["of many addresses", "of one address"],
)
def test_many_who_come_at_once_go_on(
    looked: Looked, monkeypatch: pytest.MonkeyPatch, peers: list[str]
) -> None:
    """Also beside a script of the same address that calls more."""
    calls = {**dict.fromkeys(peers, 2), "ipv4:127.0.0.1:5000": 64}
    assert not Waiting(looked, monkeypatch, calls).ended()


def test_that_nothing_can_be_opened_does_not_end_the_coordinator(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def resident() -> int:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise OSError(24, "Too many open files")
        return looks * UNDELIVERED_BYTES_MAX

    one = looked.add("ipv4:10.0.0.1:1")
    one.bytes_received = UNDELIVERED_BYTES_MAX + 1
    monkeypatch.setattr(budget, "resident_bytes", resident)
    monkeypatch.setattr(budget, "_GLANCE_S", 0)

    async def run() -> None:
        watching = asyncio.ensure_future(
            looked.budget.watch(lambda: looked.fakes, lambda: 1 << 30, keeps_nobody_out)
        )
        async with asyncio.timeout(30):
            while not one.is_shut:  # noqa: ASYNC110 # nobody tells
                await asyncio.sleep(0)
        watching.cancel()

    asyncio.run(run())


def keeps_nobody_out(addresses: Sequence[str]) -> None:
    raise AssertionError(addresses)


def _not_opened() -> Iterator[Any]:
    raise OSError(24, "Too many open files")
    yield


def test_a_question_for_which_nothing_can_be_opened_is_not_asked_at_each_glance(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaks too. When something can be opened again, it is answered."""
    memory = Memory(looked, monkeypatch)
    memory.calls = 1000
    memory.is_opened = False
    crowd = looked.add("ipv4:10.0.0.1:1")
    monkeypatch.setattr(channelz, "calls_by_peer", lambda: [(crowd.peer, 1000)])

    def grow() -> None:
        memory.bytes += UNDELIVERED_BYTES_MAX if memory.glances == 2 else 0
        memory.is_opened = memory.glances > 100

    memory.each_glance = grow
    memory.watch(glances=130)
    gaps = [after - before for before, after in itertools.pairwise(memory.asked_s)]
    assert len(gaps) > 5
    assert min(gaps) > 0.99
    assert max(gaps) < 1.2
    assert crowd.is_shut


def test_though_memory_cannot_be_read_connections_are_looked_at(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(looked, monkeypatch)
    memory.each_glance = lambda: next(_not_opened())
    endless = looked.add("ipv4:10.0.0.1:1")
    endless.bytes_received = UNDELIVERED_BYTES_MAX + 1
    memory.watch(glances=110)
    assert endless.is_shut


def test_though_a_question_comes_to_nothing_connections_are_looked_at(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(looked, monkeypatch)
    monkeypatch.setattr(looked.budget, "end_crowds", lambda _: next(_not_opened()))
    endless = looked.add("ipv4:10.0.0.1:1")
    endless.bytes_received = UNDELIVERED_BYTES_MAX + 1

    def grow() -> None:
        memory.bytes += UNDELIVERED_BYTES_MAX if memory.glances == 2 else 0

    memory.each_glance = grow
    memory.watch(glances=5)
    assert endless.is_shut


def test_what_an_ended_connection_had_is_given_back_when_grpc_is_through_with_it(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(looked, monkeypatch)
    given_back_s: list[float] = []
    monkeypatch.setattr(budget, "give_back", lambda: given_back_s.append(looked.now_s))
    memory.watch(glances=5)
    for number in range(2):
        endless = looked.add(f"ipv4:10.0.0.{number}:1")
        endless.bytes_received = UNDELIVERED_BYTES_MAX + 1
        looked.look()
        assert endless.is_shut
    ended_s = looked.now_s
    memory.watch(glances=50)
    (at_s,) = given_back_s
    assert at_s - ended_s == pytest.approx(1, abs=0.2)


def test_from_where_a_crowd_came_nobody_comes_again_for_a_while(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(looked, monkeypatch)
    memory.calls = 1000
    memory.keeps_out = False
    crowd = looked.add("ipv4:10.0.0.1:1")
    monkeypatch.setattr(channelz, "calls_by_peer", lambda: [(crowd.peer, 1000)])

    def grow() -> None:
        memory.bytes += UNDELIVERED_BYTES_MAX if memory.glances == 2 else 0
        memory.keeps_out = memory.glances > 10

    memory.each_glance = grow
    memory.watch(glances=int(BARRED_S / 0.1) + 20)
    assert crowd.is_shut
    # What the kernel had no room for at first was tried again, and nothing twice that it did.
    assert memory.kept_out == [("10.0.0.1",), ()]
    assert crowd.peer not in looked.budget.barred


class Memory:
    """Of a process whose budget is watched: glances, and when gRPC was asked for its calls."""

    def __init__(self, looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 100 << 20
        self.glances = 0
        self.asked_s: list[float] = []
        self.leaks_bytes = 0
        self.calls = 0
        self.is_opened = True
        self.glance_s = 0.1
        self.each_glance: Callable[[], None] = lambda: None
        self.kept_out: list[tuple[str, ...]] = []
        self.keeps_out = True
        self._is_asked = False
        self._looked = looked
        monkeypatch.setattr(budget, "resident_bytes", self._resident)
        monkeypatch.setattr(channelz, "calls", self._calls)
        monkeypatch.setattr(budget, "_GLANCE_S", 0)

    def keep_out(self, addresses: Sequence[str]) -> None:
        if not self.keeps_out:
            raise OSError(errno.ENOMEM, "no room")
        self.kept_out.append(tuple(addresses))

    def _resident(self) -> int:
        if self._is_asked:  # it is looked at after the question too
            self._is_asked = False
            return self.bytes
        self.glances += 1
        self.each_glance()
        return self.bytes

    def _calls(self) -> int:
        self.asked_s.append(self._looked.now_s)
        self.bytes += self.leaks_bytes
        self._is_asked = True
        return self.calls

    def watch(self, glances: int) -> None:
        """As many, each that long after the one before."""

        async def run() -> None:
            here = self._looked

            def opened() -> Iterable[Fake]:
                return here.fakes if self.is_opened else _not_opened()

            watching = asyncio.ensure_future(
                here.budget.watch(opened, lambda: 1 << 30, self.keep_out)
            )
            until = self.glances + glances
            seen = self.glances
            async with asyncio.timeout(60):
                while self.glances < until:
                    await asyncio.sleep(0)
                    if self.glances > seen:
                        seen = self.glances
                        here.now_s += self.glance_s
            watching.cancel()

        asyncio.run(run())


def test_while_nothing_grows_grpc_is_never_asked_for_its_calls(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Debian's version each question leaks."""
    memory = Memory(looked, monkeypatch)
    memory.watch(glances=10_000)
    assert looked.now_s > 1000
    assert not memory.asked_s


def test_when_memory_has_grown_grpc_is_asked_for_its_calls(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a peer may have, from the least that it was."""
    memory = Memory(looked, monkeypatch)

    def grow() -> None:
        memory.bytes += 1 << 20 if memory.glances != 5 else -(50 << 20)

    memory.each_glance = grow
    memory.watch(glances=35)
    # Eight glances after the least, and then again after the next.
    assert len(memory.asked_s) == 3


def test_what_a_question_leaks_is_no_reason_for_another(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(looked, monkeypatch)
    memory.leaks_bytes = 2 * UNDELIVERED_BYTES_MAX

    def grow() -> None:
        memory.bytes += UNDELIVERED_BYTES_MAX if memory.glances == 2 else 0

    memory.each_glance = grow
    memory.watch(glances=1000)
    assert len(memory.asked_s) == 1


def test_what_comes_after_a_question_is_a_reason_for_another(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the next glance, from which a crowd may keep the loop."""
    memory = Memory(looked, monkeypatch)

    def grow() -> None:
        memory.bytes += UNDELIVERED_BYTES_MAX if memory.glances in {2, 3} else 0

    memory.each_glance = grow
    memory.watch(glances=1000)
    assert len(memory.asked_s) == 2


def test_that_the_loop_was_kept_is_not_forgotten(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though gRPC was asked in vain just before."""
    memory = Memory(looked, monkeypatch)

    def keep() -> None:
        memory.glance_s = 1.5 if memory.glances in {1, 2} else 0.1

    memory.each_glance = keep
    memory.watch(glances=1000)
    first_s, second_s = memory.asked_s
    assert second_s - first_s == pytest.approx(2, abs=0.11)


def test_that_memory_grows_does_not_put_off_what_keeps_the_loop(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(looked, monkeypatch)

    def grow_and_keep() -> None:
        memory.bytes += UNDELIVERED_BYTES_MAX if 1 < memory.glances < 10 else 0
        memory.glance_s = 1.5 if memory.glances == 10 else 0.1

    memory.each_glance = grow_and_keep
    memory.watch(glances=11)
    assert len(memory.asked_s) == 9


def test_when_the_loop_was_kept_grpc_is_asked_for_its_calls_ever_later(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd in memory that is used again keeps it, but so does a full machine."""
    memory = Memory(looked, monkeypatch)
    memory.glance_s = 1.5
    memory.watch(glances=200)
    gaps = [after - before for before, after in itertools.pairwise(memory.asked_s)]
    assert gaps == [3, 4.5, 9, 16.5, 33, 64.5, 64.5, 64.5]
    # As soon as before when there was one.
    memory.calls = 1000
    monkeypatch.setattr(
        channelz, "calls_by_peer", lambda: [(one.peer, 1000) for one in looked.fakes]
    )

    def come() -> None:
        looked.fakes[:] = [Fake(f"ipv4:10.0.0.1:{memory.glances}")]

    memory.each_glance = come
    memory.asked_s.clear()
    memory.watch(glances=60)
    gaps = [after - before for before, after in itertools.pairwise(memory.asked_s)]
    assert gaps
    assert set(gaps) == {1.5}


def test_after_a_fleet_came_at_once_a_crowd_is_still_ended(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet came at once, and was let in; then one peer begins as many calls as all of it."""
    fleet = {f"ipv4:10.0.{n % 8}.{n // 8}:1": 2 for n in range(2000)}
    evil = "ipv4:10.1.0.1:1"
    calls = {**fleet, evil: 0}
    waiting = Waiting(looked, monkeypatch, calls)
    assert not waiting.ended()
    calls.update(dict.fromkeys(fleet, 0))
    calls[evil] = 4000
    assert waiting.ended() == [evil]


def test_connections_without_a_call_are_few_for_each_address(looked: Looked) -> None:
    many = [looked.add(f"ipv4:10.0.0.1:{port}") for port in range(IDLE_CONNECTIONS_MAX + 5)]
    other = looked.add("ipv4:10.0.0.2:1")
    with looked.budget.call(many[-1].peer, NODE):
        looked.look()
        # A fleet behind one address may have come at once, and is about to call.
        assert not any(one.is_shut for one in many)
        looked.now_s += IDLE_S
        looked.look()
    assert sum(one.is_shut for one in many) == 4
    assert not many[-1].is_shut
    assert not other.is_shut
    assert looked.counters.connections_ended_idle == 4


def test_a_connection_is_ended_once(looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there until gRPC closes it, with all its calls."""
    crowd = looked.add("ipv4:10.0.0.1:1")
    endless = looked.add("ipv4:10.0.0.2:1")
    idle = [looked.add(f"ipv4:10.0.0.3:{port}") for port in range(IDLE_CONNECTIONS_MAX + 1)]
    monkeypatch.setattr(channelz, "calls", lambda: 1000)
    monkeypatch.setattr(channelz, "calls_by_peer", lambda: [(crowd.peer, 1000)])
    looked.look()
    looked.now_s += IDLE_S
    for _ in range(5):
        endless.bytes_received += UNDELIVERED_BYTES_MAX + 1
        looked.budget.end_crowds(lambda: looked.fakes)
        looked.look()
        looked.fakes.reverse()
    assert crowd.is_shut
    assert endless.is_shut
    assert sum(one.is_shut for one in idle) == 1
    assert len([text for text in looked.said if "its connection is ended" in text]) == 3
    assert looked.counters.addresses_barred == 1
    assert looked.counters.connections_ended_calls == 1
    assert looked.counters.connections_ended_unfinished == 1
    assert looked.counters.connections_ended_idle == 1
    # Another that comes from there later is no ended one.
    looked.fakes.clear()
    looked.look()
    again = looked.add(crowd.peer)
    looked.look()
    assert not again.is_shut


def test_what_is_known_of_connections_goes_with_them(looked: Looked) -> None:
    for port in range(50):
        one = looked.add(f"ipv4:10.0.0.1:{port}")
        with looked.budget.call(one.peer, NODE):
            pass
        looked.look()
        looked.fakes.clear()
    looked.look()
    assert not looked.budget._delivered
    assert not looked.budget._ended
    assert not looked.budget._whole
    assert not looked.budget._seen
    assert not looked.budget._calls
    assert not looked.budget._peers
    assert not looked.budget._unread


def test_an_identity_has_so_many_calls_at_once(looked: Looked) -> None:
    calls = [looked.budget.call(f"ipv4:10.0.0.{n}:1", NODE) for n in range(8)]
    for call in calls:
        assert looked.budget.why_not(NODE) is None
        call.__enter__()
    assert "node n1 (spiffe://d/node/n1) has 8 calls at once already" in (
        looked.budget.why_not(NODE) or ""
    )
    assert looked.budget.why_not(Identity(Role.NODE, "n2", "x")) is None
    assert looked.budget.why_not(None) is None
    calls[0].__exit__(None, None, None)
    assert looked.budget.why_not(NODE) is None


def test_a_call_over_ipv6_is_of_its_connection(looked: Looked) -> None:
    many = [looked.add(f"ipv6:[::1]:{port}") for port in range(IDLE_CONNECTIONS_MAX + 1)]
    with looked.budget.call(f"ipv6:%5B::1%5D:{IDLE_CONNECTIONS_MAX}", NODE):
        looked.look()
        looked.now_s += IDLE_S
        looked.look()
    assert not any(one.is_shut for one in many)


def test_to_look_at_connections_leaves_nothing_open() -> None:
    """Most descriptors of a process are of no socket."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, Path("/dev/null").open():
            taken, _ = listening.accept()
            with taken, nothing_stays_open():
                found = [one.peer for one in connections(port)]
            assert found == [f"ipv4:127.0.0.1:{client.getsockname()[1]}"]


def test_one_call_too_many_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.setattr(budget, "_CALLS_MAX", dict.fromkeys(Role, 0))
    world = World(tmp_path)
    directory = world.issued("node/n1")

    async def run() -> None:
        async with world.serving() as here, world.channel(directory) as channel:
            hello = wire.encode_node_batch([Hello("n1", 1)])
            code, said = await said_to(channel, "Control", hello)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert said.startswith("node n1 (spiffe://d/node/n1) has 0 calls at once already")
            assert here.counters.too_many_calls == 1

    asyncio.run(run())


def test_streams_say_when_a_message_is_there_and_when_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the disk had not taken a thing.
    monkeypatch.setattr(server, "_UNDURABLE_WRITES_MAX", -1)

    async def run() -> None:
        async with Client(tmp_path) as client, asyncio.timeout(30):
            here = client.server._budget
            for method, first in (
                ("Control", wire.encode_node_batch([Hello("n1", 1)])),
                ("Slices", wire.encode_opening(wire.Opening("n1", 1))),
            ):
                call = client.call(method)
                await call.write(first)
                while not here._unread:  # noqa: ASYNC110 # nobody tells
                    await asyncio.sleep(0)
                # It has begun, and said who it is.
                ((peer, messages),) = here._delivered.items()
                assert messages == 2
                call.cancel()
                while here._peers:  # noqa: ASYNC110 # nobody tells
                    await asyncio.sleep(0)
                assert not here._unread
                del here._delivered[peer]

    asyncio.run(run())


def test_nothing_is_read_of_a_tail(tmp_path: Path) -> None:
    """All that it sends is that it reads on, for as long as it likes."""

    async def run() -> None:
        async with Client(tmp_path) as client, asyncio.timeout(30):
            here = client.server._budget
            call = client.call("TailTraces")
            await call.write(b"")
            while not here._unread:  # noqa: ASYNC110 # nobody tells
                await asyncio.sleep(0)
            assert {peer: calling.calls for peer, calling in here._peers.items()} == here._unread
            call.cancel()
            while here._peers:  # noqa: ASYNC110 # nobody tells
                await asyncio.sleep(0)
            assert not here._unread

    asyncio.run(run())


def unfinished(channel: grpc.aio.Channel, method: str) -> Any:
    """A question that does not come."""
    return channel.stream_stream(f"/backsight.v1.Coordinator/{method}", None, None)(
        None, timeout=60
    )


@pytest.mark.parametrize("method", ["GetTrace", "GetStatus"])
def test_a_question_is_refused_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    world = World(tmp_path)
    node, reader = world.issued("node/n1"), world.issued("viewer/ann")

    async def run() -> None:
        async with world.serving() as here:
            async with world.channel(node) as channel:
                asked = unfinished(channel, method)
                assert await asked.code() is grpc.StatusCode.PERMISSION_DENIED
            monkeypatch.setattr(budget, "_CALLS_MAX", dict.fromkeys(Role, 0))
            async with world.channel(reader) as channel:
                asked = unfinished(channel, method)
                assert await asked.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert here.counters.too_many_calls == 1

    asyncio.run(run())


def test_a_question_comes_soon_or_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.setattr(streams, "GREETING_TIMEOUT_S", 0.1)
    world = World(tmp_path)
    reader = world.issued("viewer/ann")

    async def run() -> None:
        async with world.serving() as here, world.channel(reader) as channel:
            asked = unfinished(channel, "GetTrace")
            assert await asked.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await asked.details() == "no question came whole within 0.1 s"
            asked = unfinished(channel, "GetTrace")
            await asked.done_writing()
            assert await asked.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await asked.details() == "no question came"
            assert here.counters.no_question == 2

    asyncio.run(run())


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
    ):
        accepted, _ = listening.accept()
        with accepted:
            yield client, accepted


def test_connections_of_ours_are_found_and_shut(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    port = accepted.getsockname()[1]
    client.sendall(bytes(1000))
    assert accepted.recv(1000, socket.MSG_WAITALL) == bytes(1000)
    found = [(one.peer, one.bytes_received) for one in connections(port)]
    host, own = client.getsockname()
    assert found == [(f"ipv4:{host}:{own}", 1000)]
    shut_all(port)
    assert client.recv(1) == b""


def test_grpc_tells_how_many_calls_each_connection_has(tmp_path: Path) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            before = channelz.calls()
            calls = [client.call(method) for method in ("Control", "Slices", "Control")]
            await calls[0].write(wire.encode_node_batch([Hello("n", 1)]))
            await calls[0].read()
            (peer,) = client.server._budget._peers
            async with asyncio.timeout(30):
                while channelz.calls() < before + 3:  # noqa: ASYNC110 # nobody tells
                    await asyncio.sleep(0)
                assert dict(channelz.calls_by_peer())[peer] == 3
                for call in calls:
                    call.cancel()
                while channelz.calls() > before:  # noqa: ASYNC110 # nobody tells
                    await asyncio.sleep(0)

    asyncio.run(run())


async def names_as_grpc(host: str, target: str) -> None:
    """We name a peer as gRPC does, that comes from where a server listens."""
    peers: list[str] = []

    async def answer(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        peers.append(context.peer())
        return b""

    listening = grpc.aio.server()
    handlers = {"y": grpc.unary_unary_rpc_method_handler(answer)}
    listening.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", handlers),))
    port = listener.add_port(listening, f"{host}:0", None)
    await listening.start()
    try:
        async with grpc.aio.insecure_channel(f"{target}:{port}") as channel:
            await channel.unary_unary("/x/y", None, None)(b"", timeout=30)
            (peer,) = map(unquote, peers)
            assert peer in {one.peer for one in connections(port)}
            assert peer in dict(channelz.calls_by_peer())
    finally:
        await listening.stop(None)


@pytest.mark.parametrize(
    ("host", "target"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("[::]", "127.0.0.1"),
        ("[::]", "[::1]"),
        ("[::1]", "[::1]"),
    ],
)
def test_peers_are_named_as_grpc_names_them(host: str, target: str) -> None:
    asyncio.run(names_as_grpc(host, target))


@pytest.mark.root
def test_a_peer_of_the_same_link_is_named_as_grpc_names_it() -> None:
    """In a network of its own, where the loopback interface has such an address."""
    # Not as a name, for which gRPC would ask servers that are not there.
    target = f"ipv6:[{_OF_THE_LINK}%25lo]"
    do = f"asyncio.run(names_as_grpc('[::]', '{target}'))"
    subprocess.run(
        [
            *("unshare", "--net", "--", "sh", "-ec"),
            f'ip link set lo up; ip address add {_OF_THE_LINK}/64 dev lo; exec "$@"',
            *("-", sys.executable, "-c"),
            f"import asyncio; from {__name__} import names_as_grpc; {do}",
        ],
        check=True,
        timeout=60,
    )


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_one_address_makes_few_lines() -> None:
    said: list[str] = []
    clock = Clock()
    limited = PeerLog(logs_to(said), clock)
    for _ in range(1000):
        limited.warning("10.0.0.1", "refused")
    assert said == ["refused"] * 10
    limited.warning("10.0.0.2", "another")
    assert said[10:] == ["another"]
    clock.now_s += 60
    limited.warning("10.0.0.1", "again")
    assert said[11:] == ["990 more warnings about peers were left out", "again"]


@pytest.mark.parametrize(
    ("one", "another", "are_one"),
    [
        ("203.0.113.7", "203.0.113.8", False),
        ("uid 1000", "uid 1001", False),
        ("2001:db8:0:1::7", "2001:db8:0:1:ffff::8", True),
        ("2001:db8:0:1::7", "2001:db8:0:2::7", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("::ffff:203.0.113.7", "203.0.113.7", True),
        ("::ffff:203.0.113.7", "::ffff:203.0.113.8", False),
    ],
)
def test_who_says_much_hides_nobody_else(one: str, another: str, are_one: bool) -> None:
    said: list[str] = []
    limited = PeerLog(logs_to(said), Clock())
    for _ in range(10):
        limited.warning(one, "refused")
    limited.warning(another, "another")
    assert ("another" not in said) == are_one


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:203.0.113.7:50051", "203.0.113.7"),
        ("ipv6:%5B2001:db8::7%5D:50051", "2001:db8::7"),
        ("ipv6:[2001:db8::7]:50051", "2001:db8::7"),
        ("ipv6:%5Bfe80::7%253%5D:50051", "fe80::7%3"),
        (f"unix-abstract:{local_name(1000, '0af3')}", "uid 1000"),
        ("unix:", "unix:"),
    ],
)
def test_all_connections_of_a_peer_have_one_address(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_threads_count_one_after_the_other() -> None:
    is_locked: list[bool] = []
    limited = PeerLog(Log(lambda _: is_locked.append(limited._lock.locked())))
    limited.warning("10.0.0.1", "refused")
    assert is_locked == [True]


def test_many_addresses_make_no_more_lines_than_all_may() -> None:
    said: list[str] = []
    limited = PeerLog(logs_to(said), Clock())
    for number in range(1000):
        limited.warning(f"2001:db8:0:{number:x}::1", "refused")
    assert len(said) == 100
