# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of the descriptors of a process (proc_pid_fdinfo(5))."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def fdinfo(pid: int) -> Iterator[str]:
    """A text for each that is open; the process may close some while we look."""
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield path.read_text()
