# SPDX-License-Identifier: Apache-2.0
"""How much memory a node has, with all that it shares with applications."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK_BYTES = 512  # of st_blocks

_ARENA = "/memfd:backsight-arena"


@dataclass(frozen=True, slots=True)
class Sample:
    """At one moment.

    ``shared_bytes``: of the memfds, whoever touched them; ``arenas_bytes``: of those with the
    records of applications; ``files``: open ones.
    """

    node: str
    at_s: float
    rss_bytes: int
    private_bytes: int
    shared_bytes: int
    arenas_bytes: int
    files: int

    @property
    def bytes(self) -> int:
        return self.private_bytes + self.shared_bytes


def sample(node: str, at_s: float, daemon: int, holder: int) -> Sample:
    """Of a daemon, and of the holder, which keeps its files."""
    status = Path(f"/proc/{daemon}/status").read_text()
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.M)}
    memfds = dict(found for pid in (daemon, holder) for found in _memfds(pid))
    return Sample(
        node,
        at_s,
        sizes["VmRSS"],
        sizes["RssAnon"] + sizes["RssFile"],
        sum(memfd.bytes for memfd in memfds.values()),
        sum(memfd.bytes for memfd in memfds.values() if memfd.name == _ARENA),
        sum(1 for _ in Path(f"/proc/{daemon}/fd").iterdir()),
    )


@dataclass(frozen=True, slots=True)
class _Memfd:
    name: str
    bytes: int


def _memfds(pid: int) -> Iterator[tuple[tuple[int, int], _Memfd]]:
    """Those that are open or mapped, each with what tells it from others."""
    for folder in ("fd", "map_files"):
        for entry in Path(f"/proc/{pid}/{folder}").iterdir():
            with contextlib.suppress(OSError):
                name = str(entry.readlink())
                if name.startswith("/memfd:"):
                    found = entry.stat()
                    size = found.st_blocks * _BLOCK_BYTES
                    yield (found.st_dev, found.st_ino), _Memfd(name.split()[0], size)
