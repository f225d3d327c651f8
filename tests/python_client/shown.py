# SPDX-License-Identifier: Apache-2.0
"""What threads of this process show (abi/context.h), read from its memory, as a probe reads it."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

_SLOTS_OFFSET = 128
_SLOT = struct.Struct("<II8s8s40x")
_SLOTS = 256


def shown() -> str:
    """The trace that the calling thread shows, in hex; "" for none, or where it has no slot."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:backsight-context" in line:
            start = int(line.partition("-")[0], 16)
            break
    else:
        raise AssertionError("not attached")
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        memory.seek(start + _SLOTS_OFFSET)
        slots = memory.read(_SLOTS * _SLOT.size)
    for tid, _, high, low in _SLOT.iter_unpack(slots):
        if tid == threading.get_native_id():
            trace: str = (high[::-1] + low[::-1]).hex()
            return "" if int(trace, 16) == 0 else trace
    return ""
