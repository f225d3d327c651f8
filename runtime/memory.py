# SPDX-License-Identifier: Apache-2.0
"""How much memory a program has."""

from __future__ import annotations

import os

# Seven numbers.
_STATM_BYTES = 256

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Of this process, shared memory too; OSError where no file can be opened."""
    # By its descriptor: some ask ten times a second, and a file object costs more than what it reads.
    statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(statm, _STATM_BYTES).split()[1]) * _PAGE_BYTES
    finally:
        os.close(statm)


def give_back() -> None:
    """Give what is free in the heap back to the kernel: some 40 ms where that is 200 MB, else 2 ms.

    By itself glibc gives back the end of the heap only (malloc_trim(3)).
    """
    import ctypes  # who is never attacked does without

    ctypes.CDLL(None).malloc_trim(0)
