# SPDX-License-Identifier: Apache-2.0
"""Control groups of our own, in whichever of both hierarchies this machine has the controller."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_EMPTY_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Group:
    """A group; ``is_v1``: of the older hierarchy, whose files have other names."""

    path: Path
    is_v1: bool

    def set(self, file: str, value: str) -> None:
        """Write one of its files."""
        (self.path / file).write_text(value)

    def take(self, pids: Iterable[int]) -> None:
        """Move processes into it; those that are gone are left out."""
        _move(self.path, pids)

    def limit_cpu(self, share: float, period_us: int = 100_000) -> None:
        """Have it run for so much of each period."""
        quota_us = int(share * period_us)
        if self.is_v1:
            self.set("cpu.cfs_period_us", str(period_us))
            self.set("cpu.cfs_quota_us", str(quota_us))
        else:
            self.set("cpu.max", f"{quota_us} {period_us}")

    def prefer(self) -> None:
        """Have it run before all others."""
        # The most that is allowed (cgroups(7); cgroup-v2.rst "Weights").
        if self.is_v1:
            self.set("cpu.shares", "262144")
        else:
            self.set("cpu.weight", "10000")

    def limit_memory(self, size_bytes: int) -> None:
        """Have the OOM killer end who takes more."""
        self.set("memory.limit_in_bytes" if self.is_v1 else "memory.max", str(size_bytes))

    def shared_memory_bytes(self) -> int:
        """What it is charged for of memory without a file, memfds too."""
        lines = (self.path / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["shmem"])

    def oom_kills(self) -> int:
        """How many of its processes the OOM killer has ended."""
        file = "memory.oom_control" if self.is_v1 else "memory.events"
        lines = (self.path / file).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def limit_writes(self, device: str, bytes_per_s: int) -> None:
        """Have it write no faster to a device, by its major and minor number."""
        if self.is_v1:
            self.set("blkio.throttle.write_bps_device", f"{device} {bytes_per_s}")
        else:
            self.set("io.max", f"{device} wbps={bytes_per_s}")


def _move(group: Path, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _v1_name(controller: str) -> str:
    return "blkio" if controller == "io" else controller


def _parent(controller: str) -> tuple[Path, bool]:
    """Where a group with this controller can be made. OSError if nowhere."""
    older = _ROOT / _v1_name(controller)
    if (older / "cgroup.procs").exists():
        return older, True
    if controller in (_ROOT / "cgroup.controllers").read_text().split():
        (_ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
        return _ROOT, False
    raise OSError(f"this machine has no controller {controller} for control groups")


@contextlib.contextmanager
def group(controller: str, name: str = "") -> Iterator[Group]:
    """A group for ``cpu``, ``memory`` or ``io``; who is still in it at the end goes to its parent.

    ``name``: where there is more than one.
    """
    parent, is_v1 = _parent(controller)
    made = parent / f"backsight-{os.getpid()}-{controller}{name and f'-{name}'}"
    made.mkdir()
    try:
        yield Group(made, is_v1)
    finally:
        _remove(made, parent)


@contextlib.contextmanager
def unified_group() -> Iterator[Group]:
    """A group of the newer hierarchy, without a controller, wherever that is mounted."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["mount", "-t", "cgroup2", "none", directory], check=True)
        try:
            made = Path(directory) / f"backsight-{os.getpid()}"
            made.mkdir()
            try:
                yield Group(made, is_v1=False)
            finally:
                _remove(made, made.parent)
        finally:
            subprocess.run(["umount", directory], check=True)


def within(*groups: Path) -> list[str]:
    """What runs the command that follows it in those groups, one of each hierarchy."""
    enter = ("sh", "-euc", 'echo $$ >"$0/cgroup.procs"; exec "$@"')
    return [word for group in groups for word in (*enter, str(group))]


@contextlib.contextmanager
def subtree(name: str) -> Iterator[list[Path]]:
    """Groups below which an init system has all for itself, in each hierarchy that it uses."""
    mixed = [_ROOT / "unified", _ROOT / "systemd"]
    roots = [root for root in mixed if (root / "cgroup.procs").exists()] or [_ROOT]
    made = [root / f"backsight-{os.getpid()}-{name}" for root in roots]
    try:
        for group in made:
            group.mkdir()
        yield made
    finally:
        for top in made:
            for path, _, _ in os.walk(top, topdown=False):
                _remove(Path(path), top.parent)


def _remove(made: Path, parent: Path) -> None:
    deadline_s = time.monotonic() + _EMPTY_WITHIN_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            _move(parent, map(int, (made / "cgroup.procs").read_text().split()))
        try:
            made.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            # Of a process that has just ended something is left for a moment.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_LOOK_EVERY_S)
        else:
            return
