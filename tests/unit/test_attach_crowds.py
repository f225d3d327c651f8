# SPDX-License-Identifier: Apache-2.0
"""Whatever local users do, and however often: it is their own attaching that suffers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from appliance.attach import ACCEPTS_A_TURN, SILENT_PER_USER_MAX
from appliance.door import Door, DoorLimits
from appliance.quotas import PROBES, Quota, Quotas
from appliance.seldom import Seldom
from appliance.waiting import Waiting
from runtime.service_manager import ServiceManager
from tests.unit.attach_harness import (
    NOBODY,
    Node,
    Peer,
    Store,
    another_turn,
    close_fds,
    node,
    open_directory,
    program,
    request,
)

ROOT, ANN, BEN = 0, 4711, 4712

CROWD = 400


@pytest.fixture
def directory() -> Iterator[Path]:
    with open_directory() as path:
        yield path


async def attach(here: Node) -> int:
    """Have this process attach; the status."""
    peer = Peer.at(here.path)
    reply = await peer.ask(request())
    close_fds(reply)
    peer.close()
    return reply.status


# ------------------------------------------------------- silent connections


@pytest.mark.root
def test_strangers_are_answered_at_once_and_hold_no_place(directory: Path) -> None:
    async def run() -> None:
        async with (
            node(directory, uids=frozenset({ROOT})) as here,
            program("silent", here.path, NOBODY, CROWD) as strangers,
        ):
            assert await strangers.says() == "open"
            # They came before, and all of them hold on to their connections.
            start_s = time.perf_counter()
            assert await attach(here) == 0
            print(
                f"attached beside {CROWD} silent ones in "
                f"{(time.perf_counter() - start_s) * 1e3:.1f} ms"
            )
            outcomes = json.loads(await strangers.go_on())
            assert outcomes == {f"{-errno.EACCES}, closed": CROWD}
            assert here.server.counters.not_allowed == CROWD
            assert here.server.waiting == 0
            assert len([line for line in here.log if f"of user {NOBODY}" in line]) == 1

    asyncio.run(run())


@pytest.mark.root
def test_who_may_attach_and_is_silent_takes_places_of_nobody_else(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow the machine is, nobody goes for having waited too long.
    monkeypatch.setattr("appliance.attach._REQUEST_TIMEOUT_S", 3600.0)

    async def run() -> None:
        async with node(directory, uids=frozenset({ROOT, ANN})) as here, AsyncExitStack() as stack:
            slow = Peer.at(here.path)
            crowd = await stack.enter_async_context(program("silent", here.path, ANN, CROWD))
            assert await crowd.says() == "open"
            reply = await slow.ask(request())
            assert reply.status == 0
            close_fds(reply)
            slow.close()
            assert await attach(here) == 0
            outcomes = json.loads(await crowd.go_on())
            too_many = CROWD - SILENT_PER_USER_MAX
            assert outcomes == {f"{-errno.EBUSY}, closed": too_many, "waits": SILENT_PER_USER_MAX}
            assert here.server.counters.too_many == too_many
            assert here.server.waiting == SILENT_PER_USER_MAX
            # Nor do they take them of a process of the same user that says what it wants.
            async with program("client", here.path, ANN, ANN) as client:
                assert await client.says() == "0"

    asyncio.run(run())


def test_who_waits_longest_goes_first_of_the_same_user_if_that_has_too_many() -> None:
    waiting: Waiting[str] = Waiting(per_user_max=2, total_max=4)
    assert [waiting.add(name, ANN) for name in ("a", "b", "c")] == [None, None, "a"]
    assert [waiting.add(name, BEN) for name in ("x", "y")] == [None, None]
    # As many as there may be: of all then.
    assert waiting.add("z", ROOT) == "b"
    assert waiting.add("y2", BEN) == "x"
    waiting.remove("c")
    assert waiting.add("d", ANN) is None
    assert len(waiting) == 4
    assert [name in waiting for name in ("a", "b", "c", "d")] == [False, False, False, True]


def test_a_turn_of_the_loop_accepts_several_and_not_all(directory: Path) -> None:
    async def run() -> None:
        async with node(directory) as here:
            crowd = [Peer.at(here.path) for _ in range(5 * ACCEPTS_A_TURN)]
            seen = [here.server.counters.connections]
            while seen[-1] < len(crowd):
                await asyncio.sleep(0)
                seen.append(here.server.counters.connections)
            a_turn = [after - before for before, after in itertools.pairwise(seen)]
            assert max(a_turn) == ACCEPTS_A_TURN
            for peer in crowd:
                peer.close()

    asyncio.run(run())


# --------------------------------------------------------- connecting in a loop


def test_no_more_users_are_kept_out_than_a_filesystem_can_name(directory: Path) -> None:
    async def run() -> None:
        path = directory / "door"
        path.touch()
        limits = DoorLimits(connections_per_s=1, kept_out_s=3600)
        with contextlib.closing(Door(path, limits, frozenset())) as door:
            assert [door.knocked(ANN + number) for number in range(258)] == [True] * 256 + [
                False
            ] * 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("failure", "tries"), [(errno.ENOSPC, 3), (errno.EIO, 3), (errno.ENOENT, 1)]
)
def test_who_cannot_be_let_in_is_let_in_later(
    directory: Path, monkeypatch: pytest.MonkeyPatch, failure: int, tries: int
) -> None:
    """Unless its entry is gone with the file."""

    async def run() -> None:
        path = directory / "door"
        path.touch()
        limits = DoorLimits(connections_per_s=1, kept_out_s=0.0)
        writes: list[bytes] = []
        write = os.setxattr

        def setxattr(*arguments: Any, **options: Any) -> None:
            writes.append(arguments[2])
            if len(writes) in (2, 3):
                raise OSError(failure, os.strerror(failure))
            write(*arguments, **options)

        with contextlib.closing(Door(path, limits, frozenset())) as door:
            monkeypatch.setattr(os, "setxattr", setxattr)
            assert door.knocked(ANN)
            while door.keeps_out(ANN):
                await another_turn()
        # After the one that keeps it out.
        assert len(writes) == 1 + tries
        assert set(writes[1:]) == {writes[-1]} != {writes[0]}

    asyncio.run(run())


@pytest.mark.root
@pytest.mark.parametrize("allowed", [frozenset({ROOT}), frozenset({ROOT, ANN, BEN})])
def test_who_connects_in_a_loop_is_kept_out_for_a_while_and_nobody_else_is(
    directory: Path, allowed: frozenset[int]
) -> None:
    async def run() -> None:
        # Longer than a busy machine leaves the one who connects without a CPU.
        limits = DoorLimits(connections_per_s=20, kept_out_s=1)
        async with (
            node(directory, uids=allowed, door_limits=limits) as here,
            program("loop", here.path, ANN, 10_000) as loop,
        ):
            assert await loop.says() == "kept out"
            assert await loop.go_on() == "in"
            assert here.server.counters.kept_out >= 1
            told = [line for line in here.log if "in a loop" in line]
            assert len(told) == 1
            assert f"user {ANN} connects to" in told[0]

    asyncio.run(run())


@pytest.mark.root
def test_others_come_in_while_one_is_kept_out(directory: Path) -> None:
    async def run() -> None:
        limits = DoorLimits(connections_per_s=20, kept_out_s=3600)
        everybody = frozenset({ROOT, ANN, BEN})
        async with (
            node(directory, uids=everybody, door_limits=limits) as here,
            program("loop", here.path, ANN, 10_000) as loop,
            program("loop", here.path, NOBODY, 10_000) as stranger,
        ):
            assert await loop.says() == "kept out"
            assert await stranger.says() == "kept out"
            async with program("client", here.path, BEN, BEN) as client:
                assert await client.says() == "0"
            # Root is not held to any number.
            for _ in range(2 * limits.connections_per_s):
                Peer.at(here.path).close()
            assert await attach(here) == 0
            assert here.server.counters.kept_out == 2

    asyncio.run(run())


@pytest.mark.root
def test_a_filesystem_that_cannot_keep_anybody_out_is_told_of_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any, **__: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", cannot)

    async def run() -> None:
        limits = DoorLimits(connections_per_s=20)
        async with (
            node(directory, uids=frozenset({ROOT}), door_limits=limits) as here,
            program("loop", here.path, NOBODY, 1000) as stranger,
        ):
            assert await stranger.says() == "never"
            assert await attach(here) == 0
            told = [line for line in here.log if "cannot be kept out" in line]
            assert len(told) == 1
            assert here.server.counters.kept_out == 0

    asyncio.run(run())


# ------------------------------------------------------------------ the log


@pytest.mark.root
@pytest.mark.parametrize(
    ("uid", "status", "counter"),
    [(NOBODY, errno.EACCES, "not_allowed"), (ANN, errno.EDQUOT, "refused")],
)
def test_who_is_refused_again_and_again_costs_a_line_of_the_log(
    directory: Path, uid: int, status: int, counter: str
) -> None:
    async def run() -> None:
        async with (
            node(directory, uids=frozenset({ANN}), per_user_max=0) as here,
            program("client_again_and_again", here.path, uid, 100) as client,
        ):
            assert json.loads(await client.says()) == {str(-status): 100}
            assert getattr(here.server.counters, counter) == 100
            assert len(here.log) == 1

    asyncio.run(run())


def test_the_log_is_bounded_whatever_number_of_users_is_refused() -> None:
    seldom = Seldom()
    said = [
        (uid, now_s)
        for now_s in (0, 1800, 3600)
        for uid in range(1000)
        if seldom.is_due(uid, now_s)
    ]
    assert said == [(uid, now_s) for now_s in (0, 3600) for uid in range(64)]


# ------------------------------------------------------- how many of one user


@pytest.mark.root
def test_a_user_has_so_many_processes_attached_and_others_have_theirs(directory: Path) -> None:
    async def run() -> None:
        async with node(directory, uids=frozenset({ROOT, ANN, BEN}), per_user_max=1) as here:
            async with program("client", here.path, ANN, ANN) as first:
                assert await first.says() == "0"
                async with program("client", here.path, ANN, ANN) as second:
                    assert await second.says() == str(-errno.EDQUOT)
                assert "clients_per_user_max" in here.log[0]
                async with program("client", here.path, BEN, BEN) as other:
                    assert await other.says() == "0"
            # The first has ended, and left its place.
            await here.dataplane.exited.get()
            await here.dataplane.exited.get()
            async with program("client", here.path, ANN, ANN) as third:
                assert await third.says() == "0"

    asyncio.run(run())


@pytest.mark.root
def test_root_is_held_to_no_number(directory: Path) -> None:
    async def run() -> None:
        async with (
            node(directory, per_user_max=0) as here,
            program("client", here.path, ROOT, ROOT) as client,
        ):
            assert await client.says() == "0"

    asyncio.run(run())


@pytest.mark.root
def test_who_was_attached_before_a_restart_counts(directory: Path) -> None:
    async def run() -> None:
        store = Store(directory)
        everybody = frozenset({ROOT, ANN})
        with ServiceManager(str(store.path)) as manager, contextlib.ExitStack() as stack:
            async with (
                node(directory, uids=everybody, manager=manager) as before,
                program("client", before.path, ANN, ANN) as first,
            ):
                assert await first.says() == "0"
                stored, _ = store.take()
                # Two daemons in one process, so that the client lives on.
                other = stack.enter_context(open_directory())
                async with node(other, uids=everybody, stored=stored, per_user_max=1) as after:
                    assert [client.uid for client in after.clients] == [ANN]
                    async with program("client", after.path, ANN, ANN) as second:
                        assert await second.says() == str(-errno.EDQUOT)
        store.close()

    asyncio.run(run())


@pytest.mark.root
def test_what_probes_write_is_nobodys_but_theirs(directory: Path) -> None:
    """Others cause it. Who says of itself that it is the probes may be so, if it is trusted."""

    async def run() -> None:
        store = Store(directory)
        everybody = frozenset({ROOT, ANN})
        with ServiceManager(str(store.path)) as manager, contextlib.ExitStack() as stack:
            async with (
                node(directory, uids=everybody, manager=manager) as before,
                contextlib.AsyncExitStack() as programs,
            ):
                stored = []
                for service, uid in (("kernel", ROOT), ("kernel", ANN), ("shop", ROOT)):
                    one = program("client_of", service, before.path, uid)
                    assert await (await programs.enter_async_context(one)).says() == "0"
                    stored += store.take()[0]
                tenants = before.dataplane.tenants
                assert list(tenants.values()) == [PROBES, ANN, ROOT]
                other = stack.enter_context(open_directory())
                async with node(other, stored=stored) as after:
                    assert after.dataplane.tenants == tenants
        store.close()

    asyncio.run(run())


@pytest.mark.root
def test_a_process_keeps_its_quota_over_a_restart(directory: Path) -> None:
    """By its user, and by a group that got one only now."""

    async def run() -> None:
        store = Store(directory)
        everybody = frozenset({ROOT, ANN, BEN})
        before_quotas = Quotas({ANN: Quota("user ann", 1 << 20)})
        after_quotas = Quotas(before_quotas.users, {BEN: Quota("group ben", 1 << 20)})
        with ServiceManager(str(store.path)) as manager, contextlib.ExitStack() as stack:
            async with (
                node(directory, uids=everybody, manager=manager, quotas=before_quotas) as before,
                program("client", before.path, ANN, ANN) as ann,
                program("client", before.path, BEN, BEN) as ben,
            ):
                assert (await ann.says(), await ben.says()) == ("0", "0")
                assert set(before.dataplane.tenants.values()) == {ANN, BEN}
                stored, _ = store.take()
                other = stack.enter_context(open_directory())
                async with node(other, stored=stored, quotas=after_quotas) as after:
                    tenants = {
                        client.uid: after.dataplane.tenants[client.number]
                        for client in after.clients
                    }
                    assert tenants == {ANN: ANN, BEN: (1 << 32) + BEN}
        store.close()

    asyncio.run(run())
