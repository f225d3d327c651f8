# SPDX-License-Identifier: Apache-2.0
"""Compares what was collected of an honest trace with what was written, record by record.

Reads slices by itself (native/src/abi/slice.h, native/include/backsight.h): the
decoder of the tree is a part of what is tested.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from tests.hostile.truth import DATA_RECORDS, Honest, payload, span_id

_PIECE = struct.Struct("<IHHIIII")
_RECORD = struct.Struct("<HBBQ")
_PROCESS = struct.Struct("<II64s")
_RUN, _PROCESS_KIND = 1, 3
_DATA, _SPAN_START, _SPAN_END = 1, 2, 3

Key = tuple[int, bytes]
"""A record: its type, and its content as far as the writer alone decides on it."""


@dataclass(frozen=True, slots=True)
class Compared:
    """``missing`` of ``wanted`` records were not there; ``wrong`` ones were there that nobody wrote."""

    wanted: int
    missing: int
    wrong: int

    @property
    def whole(self) -> bool:
        return not self.missing and not self.wrong


def wanted(trace: Honest, side: int) -> Counter[Key]:
    """What a side of the trace wrote."""
    span = struct.pack("<Q", span_id(trace, side))
    keys: Counter[Key] = Counter({(_SPAN_START, span): 1, (_SPAN_END, span): 1})
    keys.update((_DATA, payload(trace, side, index)) for index in range(DATA_RECORDS))
    return keys


def compare(trace: Honest, slices: Mapping[str, bytes], pids: Mapping[str, Set[int]]) -> Compared:
    """Judge the slices of a trace, by node. ``pids``: the honest processes of each node."""
    total = missing = wrong = 0
    for side in trace.sides:
        node = trace.node(side)
        want = wanted(trace, side)
        found = written(slices.get(node, b""), pids.get(node, frozenset()))
        total += want.total()
        missing += (want - found).total()
        wrong += (found - want).total()
    return Compared(total, missing, wrong)


def written(data: bytes, pids: Set[int]) -> Counter[Key]:
    """The records of those processes; what else stands there is somebody else's."""
    runs: dict[tuple[int, int, int], bytearray] = {}
    clients: set[int] = set()
    for kind, client, handle, seq, start, content in _pieces(data):
        if kind == _PROCESS_KIND and len(content) == _PROCESS.size:
            # The daemon's word: it asked the kernel who connected.
            if _PROCESS.unpack(content)[0] in pids:
                clients.add(client)
        elif kind == _RUN:
            run = runs.setdefault((client, handle, seq), bytearray())
            if start <= len(run):
                run[start : start + len(content)] = content
    found: Counter[Key] = Counter()
    for (client, _, _), run in runs.items():
        if client in clients:
            found.update(_records(bytes(run)))
    return found


def _pieces(data: bytes) -> Iterator[tuple[int, int, int, int, int, bytes]]:
    at = 0
    while at + _PIECE.size <= len(data):
        size, kind, _, client, handle, seq, start = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        yield kind, client, handle, seq, start, data[at : at + size]
        at += size


def _records(run: bytes) -> Iterator[Key]:
    at = 0
    while at + _RECORD.size <= len(run):
        size, kind, _, _ = _RECORD.unpack_from(run, at)
        at += _RECORD.size
        content = run[at : at + size]
        if kind == _DATA:
            yield kind, content
        elif kind in (_SPAN_START, _SPAN_END):
            yield kind, content[:8]
        at += size + -size % 4
