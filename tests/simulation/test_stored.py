# SPDX-License-Identifier: Apache-2.0
"""The store of the simulator and the one on disk make the same of what a coordinator has to say.

All schedules, and all unit tests of the core, run over the one in memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.core.records import Record, StoredTrace
from coordinator.counters import StoreCounters
from coordinator.store.keeping import Keep, Keeping
from coordinator.store.reader import StoreReader
from coordinator.store.tables import Tables
from coordinator.store.takeover import open_store
from tests.conftest import new_seeds
from tests.simulation.faults import run_schedule
from tests.simulation.store import MemoryStore
from tests.unit.logs import SILENT

SCHEDULES = 40
NEW = 2
MANY = 2000
KEPT_ALL = 1 << 30


class Disk:
    """A store on disk that takes what becomes durable in the other, in the same transactions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection = open_store(path, SILENT)
        self.connection.execute("PRAGMA synchronous = OFF")
        keeping = Keeping(self.connection, Keep(1e9))
        self.tables = Tables(
            self.connection, StoreCounters(), SILENT, lambda: 1e6, lambda: 1.0, keeping
        )

    def write(self, records: list[Record]) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.tables.apply(records)
        self.connection.execute("COMMIT")

    def stored(self) -> Iterator[StoredTrace]:
        with StoreReader(self.path) as reader:
            yield from map(_plain, reader.recover_traces(KEPT_ALL))


def _plain(stored: StoredTrace) -> StoredTrace:
    """What counts: in one order, and chunks as one."""
    slices = [
        replace(part, chunks=tuple(filter(None, [b"".join(part.chunks)]))) for part in stored.slices
    ]
    return replace(
        stored,
        triggers=tuple(
            sorted(stored.triggers, key=lambda put: (put.fired.group.trigger, put.node))
        ),
        abandoned=tuple(sorted(stored.abandoned, key=lambda put: put.group.trigger)),
        slices=tuple(sorted(slices, key=lambda part: part.node)),
    )


def _check(seed: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a schedule over both; how many traces they have."""
    disk = Disk(directory / f"{seed}.sqlite")
    memory: list[MemoryStore] = []
    make_durable = MemoryStore.make_durable

    def make_both(store: MemoryStore, token: int, now_ns: int) -> None:
        records = [write.record for write, _ in store._pending if write.token <= token]
        make_durable(store, token, now_ns)
        disk.write(records)
        memory[:] = [store]

    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "make_durable", make_both)
        run_schedule(seed)
    expected = {stored.trace: _plain(stored) for stored in memory[0].recovered()[0]}
    found = {stored.trace: stored for stored in disk.stored()}
    disk.connection.close()
    for trace in expected.keys() | found.keys():
        assert found.get(trace) == expected.get(trace), f"seed {seed}: {trace.hex()}"
    return len(found)


@pytest.mark.timeout(600)
def test_what_is_stored_on_disk_is_what_the_simulator_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = [_check(seed, tmp_path, monkeypatch) for seed in range(SCHEDULES)]
    assert min(stored) > 0
    for seed in new_seeds(NEW):  # a few schedules fire nothing
        _check(seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_the_same_for_many_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(SCHEDULES, MANY):
        _check(seed, tmp_path, monkeypatch)
        (tmp_path / f"{seed}.sqlite").unlink()


def test_a_difference_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Tables.apply

    def without_the_last(tables: Tables, records: list[Record]) -> None:
        apply(tables, records[:-1])

    monkeypatch.setattr(Tables, "apply", without_the_last)
    with pytest.raises((AssertionError, sqlite3.Error)):
        _check(1, tmp_path, monkeypatch)
