# SPDX-License-Identifier: Apache-2.0
"""The seed of priorities is drawn once for a store, kept, and told to each node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from coordinator.core.groups import Owner
from coordinator.seed import priority_seed, seed_path
from coordinator.server import CoordinatorServer
from protocol import wire
from protocol.hashing import Domain, TraceHash
from protocol.messages import Group, Hello, NodeId, TraceId, Welcome
from runtime.settings.coordinator import Settings, StoreSettings
from testbed.ports import free_port
from tests.unit.logs import SILENT

TRACE = TraceId(bytes(range(16)))


def settings(directory: Path, seed: int | None = None) -> Settings:
    return Settings(
        f"127.0.0.1:{free_port()}",
        store=StoreSettings(str(directory / "t.sqlite")),
        priority_seed=seed,
    )


def test_it_is_drawn_once_for_a_store(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = priority_seed(settings(tmp_path / "a"))
    assert 0 < first < 1 << 64
    assert priority_seed(settings(tmp_path / "a")) == first
    assert priority_seed(settings(tmp_path / "b")) != first
    kept = seed_path(tmp_path / "a/t.sqlite")
    assert kept.name == "t.sqlite.seed"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / "a").iterdir()) == [kept]


def test_what_is_configured_holds(tmp_path: Path) -> None:
    assert priority_seed(settings(tmp_path, 7)) == 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", ["", "0" * 16 + "\n", "x" * 16 + "\n", "1" * 17 + "\n"])
def test_a_spoilt_one_is_not_guessed_at(tmp_path: Path, kept: str) -> None:
    seed_path(tmp_path / "t.sqlite").write_text(kept)
    with pytest.raises(OSError, match="delete it, and another is drawn"):
        priority_seed(settings(tmp_path))


def test_coordinator_and_nodes_rank_by_the_same(tmp_path: Path) -> None:
    async def ranks() -> int:
        async with CoordinatorServer(settings(tmp_path, 7), 1, SILENT) as server:
            server.reconfigure(settings(tmp_path, 7))
            return server._core._memory.new_group(Group("t", TRACE), Owner(NodeId(1))).order[0]

    assert asyncio.run(ranks()) == -TraceHash(Domain.PRIORITY, 7)(TRACE)


def test_each_node_is_told(tmp_path: Path) -> None:
    async def told() -> int:
        here = settings(tmp_path)
        async with (
            CoordinatorServer(here, 1, SILENT),
            grpc.aio.insecure_channel(here.listen) as channel,
        ):
            call = channel.stream_stream("/backsight.v1.Coordinator/Control", None, None)(None)
            await call.write(wire.encode_node_batch([Hello("n", 1)]))
            data = await call.read()
            assert isinstance(data, bytes)
            welcome = wire.decode_coordinator_batch(data)[0]
            assert isinstance(welcome, Welcome)
            call.cancel()
            return welcome.priority_seed

    first = asyncio.run(told())
    assert first == priority_seed(settings(tmp_path))
    assert asyncio.run(told()) == first
