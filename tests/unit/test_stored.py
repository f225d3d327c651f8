# SPDX-License-Identifier: Apache-2.0
"""What a node leaves with the service manager: how much that can be, and what if it is not taken."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import starts
from appliance.contexts import memfd_context
from appliance.daemon import Daemon
from appliance.native import NativeDataPlane
from appliance.packets import ABI_MAGIC
from appliance.words import KeptWords, Words
from protocol.messages import Policy
from runtime.service_manager import ServiceManager, StoredFd
from runtime.settings.node import Settings, stored_fds_max
from tests.unit.attach_harness import (
    NEWS,
    NEWS_CONTEXT,
    Peer,
    Store,
    another_turn,
    close_fds,
    open_directory,
    request,
)
from tests.unit.logs import SILENT, logs_to
from tests.unit.test_service_manager import held_daemon

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    with open_directory() as path:
        yield path


def settings(directory: Path) -> Settings:
    return Settings(
        node="here",
        socket=str(directory / "node.sock"),
        pool_bytes=8 << 20,
        arena_bytes=8 << 20,
        store_bytes=1 << 20,
        clients_max=1,
        clients_per_user_max=1,
    )


def test_a_node_leaves_no_more_than_it_says(directory: Path) -> None:
    """All that there can be of one client, which goes over to another context, and of the node."""

    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            starts.take_turn(manager, [], SILENT)
            async with Daemon(settings(directory), 1, manager, [], SILENT) as daemon:
                KeptWords(manager, SILENT).keep(Words(Policy(number=1)))
                peer = Peer.at(directory / "node.sock")
                reply = await peer.ask(request())
                daemon.use_contexts(memfd_context)
                _, fds = await peer.packet()
                peer.socket.send(NEWS.pack(ABI_MAGIC, NEWS_CONTEXT, 1))
                while daemon.status()["attach_moving"]:
                    await another_turn()
                stored, removed = store.take()
                names = [item.name for item in stored]
                assert len(set(names)) == len(names) == settings(directory).stored_fds_max
                # The policy before, which there was not, and last the bundle that is replaced.
                client = f"{reply.token.hex()[:12]}.client"
                assert (removed, names[-1]) == (["policy", client], f"{client}-1")
                close_fds(reply)
                os.close(fds[0])
                peer.close()
            for item in stored:
                os.close(item.fd)
        store.close()

    asyncio.run(run())


def test_all_say_the_same_of_how_many_fds_there_can_be() -> None:
    most = Settings(clients_max=1024).stored_fds_max
    assert stored_fds_max() == most
    running = (ROOT / "docs/running.md").read_text()
    unit = (ROOT / "systemd/backsight-node.service").read_text()
    for text in running, unit:
        assert re.findall(r"FileDescriptorStoreMax=(\d+)", text) == [str(most)]
    with held_daemon() as daemon:
        daemon.started()
        daemon.send("print(manager.stored_fds_max, flush=True)")
        assert daemon.line() == str(most)


@pytest.mark.parametrize(("room", "warns"), [(None, False), (7, False), (6, True), (0, True)])
def test_a_node_says_if_the_service_manager_has_not_room_for_all(
    directory: Path, room: int | None, warns: bool
) -> None:
    async def run() -> None:
        log: list[str] = []
        environment = {} if room is None else {"FDSTORE": str(room)}
        with ServiceManager.from_environment(environment) as manager:
            async with Daemon(settings(directory), 1, manager, [], logs_to(log)):
                pass
        assert environment == {}
        said = [line for line in log if "FileDescriptorStoreMax=7 in the unit" in line]
        assert len(said) == warns

    asyncio.run(run())


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (2, []),
        (4, []),
        (
            5,
            [
                "pool_bytes is 32MiB instead of 40MiB: what was kept over the restart",
                "store_bytes is 4MiB instead of 5MiB: what was kept over the restart",
            ],
        ),
    ],
)
def test_a_restart_takes_up_sizes_as_far_as_what_is_kept_has_room(
    directory: Path, times: int, said: list[str]
) -> None:
    async def run() -> None:
        store = Store(directory)
        first = settings(directory)
        other = dataclasses.replace(
            first, pool_bytes=times * first.pool_bytes, store_bytes=times * first.store_bytes
        )
        log: list[str] = []
        with ServiceManager(str(store.path)) as manager:
            async with Daemon(first, 1, manager, [], SILENT):
                stored, _ = store.take()
            async with Daemon(other, 2, manager, stored, logs_to(log)) as daemon:
                figures = daemon.status()["dataplane"]
                grown = min(times, 4)
                assert figures["pool_bytes"] == grown * first.pool_bytes
                assert figures["store_bytes"] == grown * first.store_bytes
        assert len(log) == len(said)
        for line, start in zip(log, said, strict=True):
            assert start in line
        store.close()

    asyncio.run(run())


def test_what_came_back_is_kept_for_the_next_start_where_this_one_is_short(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(_: NativeDataPlane, _fd: int) -> None:
        raise OSError(errno.ENOMEM, "the ledger of before the restart: Cannot allocate memory")

    async def run() -> None:
        store = Store(directory)
        with ServiceManager(str(store.path)) as manager:
            stored = [StoredFd("keep", os.memfd_create("keep"))]
            with monkeypatch.context() as patched, pytest.raises(OSError, match="allocate memory"):
                patched.setattr(NativeDataPlane, "adopt_keep", short)
                Daemon(settings(directory), 1, manager, stored, SILENT)
            assert store.take() == ([], [])
        store.close()

    asyncio.run(run())


class StuckManager(ServiceManager):
    """Takes nothing, as one that is stuck."""

    def __init__(self) -> None:
        super().__init__(None)

    def store(self, name: str, fd: int) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "the service manager took no message")

    def remove(self, name: str) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "the service manager took no message")


@pytest.mark.parametrize("came_back", [[], ["store"], ["keep"], ["store", "keep"]])
def test_a_node_starts_though_the_service_manager_takes_nothing(
    directory: Path, came_back: list[str]
) -> None:
    """Also where what came back is not its own, of which it would have it let go."""

    async def run() -> None:
        log: list[str] = []
        stored = [StoredFd(name, os.memfd_create(name)) for name in came_back]
        async with Daemon(settings(directory), 1, StuckManager(), stored, logs_to(log)):
            peer = Peer.at(directory / "node.sock")
            reply = await peer.ask(request())
            assert reply.status == 0
            close_fds(reply)
            peer.close()
        for name in ("store", "keep"):
            unkept = f"the service manager does not keep the {name}, so a restart"
            held = f"the service manager still keeps the old {name}: "
            assert sum(unkept in line for line in log) == 1
            assert sum(held in line for line in log) == (name in came_back)

    asyncio.run(run())
