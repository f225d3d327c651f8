# SPDX-License-Identifier: Apache-2.0
"""What this process has open."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def open_files() -> list[str]:
    """What each descriptor leads to, in order: a path, or "socket:[3512]"."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            links.append(str(link.readlink()))
    return sorted(links)


@contextlib.contextmanager
def nothing_stays_open() -> Iterator[None]:
    """Fail if more is open afterwards. What closes is no matter.

    A test before may have left garbage that holds descriptors, and Python
    collects that when it likes: so it goes first.
    """
    gc.collect()
    before = Counter(open_files())
    yield
    assert Counter(open_files()) - before == Counter()
