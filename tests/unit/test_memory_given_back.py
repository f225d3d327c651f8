# SPDX-License-Identifier: Apache-2.0
"""runtime.memory: what is free in the heap goes back to the kernel."""

from __future__ import annotations

import subprocess
import sys

# Blocks too small to be mapped by themselves, of which each hundredth stays: so the heap's end does not move.
HEAP = """
import ctypes
from runtime.memory import give_back, resident_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [libc.malloc(65536) for _ in range(2000)]
for block in blocks:
    ctypes.memset(block, 1, 65536)
for number, block in enumerate(blocks):
    if number % 100:
        libc.free(ctypes.c_void_p(block))
free = resident_bytes()
give_back()
print(free - resident_bytes())
"""


def test_what_is_free_between_what_is_used_is_given_back() -> None:
    run = subprocess.run([sys.executable, "-c", HEAP], stdout=subprocess.PIPE, check=True)
    assert int(run.stdout) > 100 << 20
