# SPDX-License-Identifier: Apache-2.0
"""Reads a recording: the columns that tests/data/nezha/README.md names.

The replay has a reader of its own (tests/replay/schedule.py), on purpose: a row that one of them
loses must show as a difference.
"""

from __future__ import annotations

import csv
import io
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.checker.errors import BadInput

_COLUMNS = (
    "TraceID",
    "SpanID",
    "ParentID",
    "PodName",
    "OperationName",
    "StartTimeUnixNano",
    "EndTimeUnixNano",
    "Duration",
)


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """One row.

    ``parent_id`` is empty for a root; times are Unix nanoseconds; ``duration_us`` is the column.
    """

    trace_id: str
    span_id: str
    parent_id: str
    pod: str
    operation: str
    start_ns: int
    end_ns: int
    duration_us: int


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path}: cannot be read: {error}; --file wants a CSV recording, plain or .xz"
        ) from error


def _rows(path: Path) -> Iterator[RecordedSpan]:
    reader = csv.reader(io.StringIO(_text(path), newline=""))
    header: list[str] = next(reader, [])
    if tuple(header) != _COLUMNS:
        raise BadInput(f"{path}:1: columns are {','.join(header)!r}, want {','.join(_COLUMNS)!r}")
    for row in reader:
        try:
            trace_id, span_id, parent_id, pod, operation, start, end, duration = row
            span = RecordedSpan(
                trace_id,
                span_id,
                "" if parent_id == "root" else parent_id,
                pod,
                operation,
                int(start),
                int(end),
                int(duration),
            )
        except ValueError as error:
            raise BadInput(
                f"{path}:{reader.line_num}: {error}; want {len(_COLUMNS)} fields, times as integers"
            ) from error
        if span.end_ns < span.start_ns:
            raise BadInput(
                f"{path}:{reader.line_num}: span {span_id} ends before it starts; the latency rule has no such duration"
            )
        yield span


def read_recording(path: Path) -> dict[str, dict[str, RecordedSpan]]:
    """The spans by trace id and span id.

    Raises BadInput if the file cannot be read, has other columns, ill-typed fields, a negative
    duration or a span twice.
    """
    traces: dict[str, dict[str, RecordedSpan]] = {}
    for span in _rows(path):
        spans = traces.setdefault(span.trace_id, {})
        if span.span_id in spans:
            raise BadInput(f"{path}: span {span.span_id} of trace {span.trace_id} is there twice")
        spans[span.span_id] = span
    if not traces:
        raise BadInput(f"{path}: holds no span")
    return traces
