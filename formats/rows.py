# SPDX-License-Identifier: Apache-2.0
"""What searches look at of a trace: a row for each span, and what a list of traces shows.

Made in C (``native/src/decode.h``) of the joined slices, without an object for each span. Tags are
``formats.tags``, as hashes of ``TAG_BYTES`` each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

from backsight_decode_native import ffi, lib

from formats.records import text
from formats.slices import check
from formats.spans import text_of
from formats.stamped import StampedSlice
from formats.tags import KINDS
from protocol.values import dataclass

TAG_BYTES = 5
"""Half of what the index takes. A search over a million spans with 20 tags each finds one wrongly in
one of 50,000 times."""

_ROW = struct.Struct("=QQII")
_OPERATION = struct.Struct("=III")


@dataclass(frozen=True, slots=True)
class TraceRows:
    """All that searches look at. Times are Unix ns, without the offsets of the nodes' clocks.

    operations  (service, name, kind: one of ``formats.tags.KINDS``, or empty), each once
    rows      (which of the operations, start, duration in ns, hashes of tags), in the order of the spans
    services  name -> how many spans, and how many of them with an error; by the names
    calls     (caller, callee) -> how many
    root_service, root_operation  of the first span without a parent; empty if there is none
    orphan_count  spans whose parent nobody delivered
    """

    operations: tuple[tuple[str, str, str], ...]
    rows: tuple[tuple[int, int, int, bytes], ...]
    services: dict[str, tuple[int, int]]
    calls: dict[tuple[str, str], int]
    root_service: str
    root_operation: str
    start_ns: int
    end_ns: int
    span_count: int
    error_count: int
    orphan_count: int


def rows_of(parts: Iterable[StampedSlice], rows_max: int) -> TraceRows:
    """The rows of a trace, of its slices; of more spans than ``rows_max`` only the sums are known."""
    slot = ffi.new("struct bsd_index **")
    check(lib.bsd_index_new(rows_max, slot))
    index = ffi.gc(slot[0], lib.bsd_index_free)
    kept = []
    for part in parts:
        about, memory = part.about.native
        # What it made of a slice points into that.
        kept.append((part.content, memory))
        check(lib.bsd_index_add(index, part.content.native, about))
    made = lib.bsd_index_rows(index)
    check(made.error)
    names = [text_of(made.services[i].name) for i in range(made.n_services)]
    found = TraceRows(
        tuple(_operations(made)),
        tuple(_rows(made)),
        {name: (made.services[i].spans, made.services[i].errors) for i, name in enumerate(names)},
        {
            (names[made.calls[i].caller], names[made.calls[i].callee]): made.calls[i].count
            for i in range(made.n_calls)
        },
        text_of(made.root_service),
        text_of(made.root_operation),
        made.start_ns,
        made.end_ns,
        made.spans,
        made.errors,
        made.orphans,
    )
    del kept
    return found


def tag_hash(key: str, value: str) -> bytes:
    """What stands for a tag in the rows; the value as Jaeger shows it."""
    raw_key, raw_value = key.encode(errors="replace"), value.encode(errors="replace")
    number: int = lib.bsd_tag_hash(raw_key, len(raw_key), raw_value, len(raw_value))
    return number.to_bytes(TAG_BYTES, "little")


def _operations(made: Any) -> Iterator[tuple[str, str, str]]:  # noqa: ANN401 - of cffi
    if not made.n_operations:
        return
    names = ffi.buffer(made.names, made.n_names)[:] if made.n_names else b""
    at = 0
    for service_bytes, name_bytes, kind in _OPERATION.iter_unpack(
        ffi.buffer(made.operations, made.n_operations * _OPERATION.size)
    ):
        middle, end = at + service_bytes, at + service_bytes + name_bytes
        yield text(names[at:middle]), text(names[middle:end]), KINDS.get(kind, "")
        at = end


def _rows(made: Any) -> Iterator[tuple[int, int, int, bytes]]:  # noqa: ANN401 - of cffi
    if not made.n_rows:
        return
    tags = ffi.buffer(made.tags, made.n_tags)[:] if made.n_tags else b""
    at = 0
    for start_ns, duration_ns, operation, size in _ROW.iter_unpack(
        ffi.buffer(made.rows, made.n_rows * _ROW.size)
    ):
        yield operation, start_ns, duration_ns, tags[at : at + size]
        at += size
