# SPDX-License-Identifier: Apache-2.0
"""What the store calls durable is there after a power cut, whatever the disk did not write.

A kill leaves all that was written in the page cache; here a disk is asked that forgets
(native/tests/disk/forgetful.c).
"""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.core.records import PutVerdict
from coordinator.store.keeping import Keep
from coordinator.store.reader import StoreReader
from coordinator.store.retention import StoreLimits
from coordinator.store.writer import Store
from tests.conftest import BUILD, REPOSITORY, new_seeds
from tests.unit.logs import SILENT
from tests.unit.power_cut_writer import RECORDS, records_of, slice_of, trace_of

FORGETFUL = BUILD / "native/tests/disk/libbacksight-forgetful.so"

# What a disk writes as a whole, or not.
SECTOR = 512

# By then the log was taken into the file once, which happens at four megabytes.
CHECKPOINTED = 8000


def write_until(durable: int, disk: Path, synced: Path) -> int:
    """Have a store written until so many records are durable; up to which it told that they are."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(FORGETFUL),
        "BACKSIGHT_DISK": str(disk),
        "BACKSIGHT_DISK_SYNCED": str(synced),
    }
    command = [sys.executable, "-m", "tests.unit.power_cut_writer", str(disk / "t.sqlite")]
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None
        told = 0
        for line in writer.stdout:
            told = int(line)
            if told >= durable:
                break
        writer.kill()
        # What it had told by then holds as well.
        return max([told, *(int(line) for line in writer.stdout if line.endswith(b"\n"))])


def what_is_left(disk: Path, synced: Path, left: Path, rng: random.Random, also: float) -> None:
    """What a disk has after a power cut: what was synced, and some of what else was written."""
    left.mkdir()
    for kept in synced.iterdir():
        sectors = bytearray(kept.read_bytes())
        written = (disk / kept.name).read_bytes() if (disk / kept.name).exists() else b""
        for at in range(0, len(written), SECTOR):
            if rng.random() < also:
                sector = written[at : at + SECTOR]
                sectors.extend(bytes(max(0, at + len(sector) - len(sectors))))
                sectors[at : at + len(sector)] = sector
        (left / kept.name).write_bytes(sectors)


@pytest.mark.parametrize("also", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("durable", [100, CHECKPOINTED])
def test_what_is_durable_outlasts_a_power_cut(tmp_path: Path, durable: int, also: float) -> None:
    (seed,) = new_seeds(1)
    rng = random.Random(f"{seed} {durable} {also}")
    disk, synced, left = (tmp_path / name for name in ("disk", "synced", "left"))
    disk.mkdir()
    synced.mkdir()
    told = write_until(durable + rng.randrange(500), disk, synced)
    what_is_left(disk, synced, left, rng, also)
    path = left / "t.sqlite"
    limits = StoreLimits(1 << 40, Keep(1e9))
    with Store(path, limits, lambda _: None, SILENT):
        pass
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    with StoreReader(path) as reader:
        for number in range(told // RECORDS):
            trace = trace_of(number)
            (verdict,) = (r.verdict for r in records_of(number) if isinstance(r, PutVerdict))
            row = reader.trace(trace)
            assert row is not None, f"of {told} durable records, trace {number} is not there"
            assert reader.verdict(trace) == verdict
            (part,) = reader.slices(trace)
            assert reader.data(part, 1 << 20) == slice_of(number)
            assert reader.is_released(trace)
