# SPDX-License-Identifier: Apache-2.0
"""How much memory a node has, with all that it shares with applications."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK_BYTES = 512  # of st_blocks


@dataclass(frozen=True, slots=True)
class Sample:
    """At one moment. ``shared_bytes``: of the memfds, whoever touched them; ``files``: open ones."""

    node: str
    at_s: float
    rss_bytes: int
    private_bytes: int
    shared_bytes: int
    files: int

    @property
    def bytes(self) -> int:
        return self.private_bytes + self.shared_bytes


def sample(node: str, at_s: float, daemon: int, holder: int) -> Sample:
    """Of a daemon, and of the holder, which keeps its files."""
    status = Path(f"/proc/{daemon}/status").read_text()
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.M)}
    memfds = {
        (found.st_dev, found.st_ino): found.st_blocks * _BLOCK_BYTES
        for pid in (daemon, holder)
        for found in _memfds(pid)
    }
    return Sample(
        node,
        at_s,
        sizes["VmRSS"],
        sizes["RssAnon"] + sizes["RssFile"],
        sum(memfds.values()),
        sum(1 for _ in Path(f"/proc/{daemon}/fd").iterdir()),
    )


def _memfds(pid: int) -> Iterator[os.stat_result]:
    """Open or mapped."""
    for folder in ("fd", "map_files"):
        for entry in Path(f"/proc/{pid}/{folder}").iterdir():
            with contextlib.suppress(OSError):
                if str(entry.readlink()).startswith("/memfd:"):
                    yield entry.stat()
