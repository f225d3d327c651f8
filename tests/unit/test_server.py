# SPDX-License-Identifier: Apache-2.0
"""The coordinator's shell stays within its memory, whatever disk and nodes do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from coordinator import server
from coordinator.core.records import Write
from coordinator.server import CoordinatorServer
from coordinator.settings import Settings, StoreSettings
from coordinator.store import Store
from protocol import wire
from protocol.messages import Group, Hello, TraceId, TriggerFired

BATCHES = 50


def trigger(number: int) -> TriggerFired:
    return TriggerFired(Group("slow", TraceId(number.to_bytes(16, "big"))))


def test_nodes_are_not_listened_to_while_the_disk_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_works = threading.Event()
    commit = Store._commit

    def commit_later(store: Store, batch: Sequence[Write]) -> bool:
        disk_works.wait()
        return commit(store, batch)

    monkeypatch.setattr(Store, "_commit", commit_later)
    monkeypatch.setattr(server, "_UNDURABLE_WRITES_MAX", 10)
    heard = 0

    async def say() -> AsyncIterator[bytes]:
        nonlocal heard
        yield wire.encode_node_batch([Hello("n", 1)])
        for heard in range(1, BATCHES + 1):
            await asyncio.sleep(0)  # as reading from a socket would
            yield wire.encode_node_batch([trigger(heard)])

    async def run() -> None:
        settings = Settings("127.0.0.1:0", store=StoreSettings(str(tmp_path / "t.sqlite")))
        async with CoordinatorServer(settings, 1, lambda _: None) as here:
            hearing = asyncio.ensure_future(here._hear(say(), 1, "peer", server._Outgoing()))
            for _ in range(20 * BATCHES):
                await asyncio.sleep(0)
            heard_before = heard
            disk_works.set()
            await hearing
            assert 0 < heard_before < BATCHES
            assert heard == BATCHES

    asyncio.run(run())


def test_what_waits_for_a_node_is_bounded_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        def __init__(self) -> None:
            self.sent = 0

        async def write(self, item: bytes) -> None:
            self.sent += len(item)

    async def run() -> None:
        monkeypatch.setattr(server, "_WAITING_BYTES_MAX", 1000)
        outgoing, context = server._Outgoing(), Context()
        assert outgoing.put(bytes(600))
        assert not outgoing.put(bytes(600))
        assert outgoing.put(bytes(400))
        outgoing.end()
        await outgoing.send_all(context)  # type: ignore[arg-type]
        assert context.sent == 1000
        assert outgoing.put(bytes(1000))

    asyncio.run(run())
