# SPDX-License-Identifier: Apache-2.0
"""What honest processes write: all of it follows from the trace's id, so nothing need be kept.

A trace visits both nodes: its front side calls its back side. The id's upper half is
the run's, its lower half says which trace that is, and on which node its front is.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

NODES = ("alpha", "beta")

TRIGGER = "honest"

# Four records of 240 bytes and two spans: 1 KiB a trace on each node.
DATA_RECORDS = 4
_DATA_BYTES = 240
_DATA = struct.Struct(">QQBB6x")

RECORDS = DATA_RECORDS + 2
"""Of each side: the data, the span's start and its end."""

# Of a process that comes, writes some traces without a back side, and goes.
_ALONE = 1 << 62


@dataclass(frozen=True, slots=True, order=True)
class Honest:
    """An honest trace. ``front``: index of the node where it begins; ``alone``: it stays there."""

    run: int
    number: int
    front: int
    alone: bool = False

    @property
    def low(self) -> int:
        """The lower half of the id."""
        return (_ALONE if self.alone else 0) | self.number << 1 | self.front

    @property
    def trace_id(self) -> bytes:
        return self.run.to_bytes(8, "big") + self.low.to_bytes(8, "big")

    @property
    def sides(self) -> tuple[int, ...]:
        return (0,) if self.alone else (0, 1)

    def node(self, side: int) -> str:
        """Where a side is; 0 is the front."""
        return NODES[self.front ^ side]


def honest(trace_id: bytes, run: int) -> Honest | None:
    """The honest trace of that id; None if it is somebody else's."""
    high, low = struct.unpack(">QQ", trace_id)
    if high != run:
        return None
    return Honest(run, (low & ~_ALONE) >> 1, low & 1, bool(low & _ALONE))


def span_id(trace: Honest, side: int) -> int:
    """Of the one span that a side has."""
    return trace.low << 1 & (1 << 62) - 1 | side | 1 << 62


def payload(trace: Honest, side: int, index: int) -> bytes:
    """Bytes that no other record has."""
    head = _DATA.pack(trace.run, trace.low, side, index)
    return head + hashlib.shake_128(head).digest(_DATA_BYTES - _DATA.size)
