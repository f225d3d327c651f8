# SPDX-License-Identifier: Apache-2.0
"""What a daemon costs the machine: all of its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine import cpu_ns


def family(pid: int) -> list[int]:
    """A process and those that it started, and so on."""
    children: list[int] = []
    for told in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that ended
            children += map(int, told.read_text().split())
    return [pid, *(one for child in children for one in family(child))]


@dataclass(frozen=True, slots=True)
class Costs:
    """What a process and those below it used since their start, and have now.

    ``shared_bytes``: of ``pss_bytes``, in files of shared memory, as pools are.
    """

    cpu_ns: int
    written_bytes: int
    pss_bytes: int
    shared_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, pid: int) -> Costs:
        """Read it."""
        return cls._sum(family(pid))

    @classmethod
    def alone(cls, pid: int) -> Costs:
        """Of that process, without those below it."""
        return cls._sum([pid])

    @classmethod
    def _sum(cls, pids: Sequence[int]) -> Costs:
        folders = [Path(f"/proc/{one}") for one in pids]
        return cls(
            sum(cpu_ns(one) for one in pids),
            sum(_field(folder / "io", "write_bytes") for folder in folders),
            sum(1024 * _field(folder / "smaps_rollup", "Pss") for folder in folders),
            sum(1024 * _field(folder / "smaps_rollup", "Pss_Shmem") for folder in folders),
            sum(1024 * _field(folder / "status", "VmHWM") for folder in folders),
        )


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise ValueError(f"{path} has no {name}")
