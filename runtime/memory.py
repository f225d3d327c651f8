# SPDX-License-Identifier: Apache-2.0
"""How much memory a program has."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Of this process, shared memory too; OSError where no file can be opened."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
