# SPDX-License-Identifier: Apache-2.0
"""What is stored of a trace, as messages: for backsightctl, queries and exports."""

from __future__ import annotations

from typing import cast

import backsight_pb2 as pb

from coordinator.store.reader import StoreReader, TraceRow
from coordinator.store.rows import SliceRow
from protocol.messages import TraceId


def trace_detail(
    reader: StoreReader, trace: TraceId, bytes_max: int, node: str | None = None
) -> pb.TraceDetail | None:
    """A trace with its bytes, as of one moment; None if it is not stored.

    With ``node``, only that node's slice is in it. Of slices that are longer than
    ``bytes_max`` in all, the longest are cut short.
    """
    with reader.moment():
        row = reader.trace(trace)
        if row is None:
            return None
        parts = [part for part in reader.slices(trace) if node in (None, part.node)]
        detail = pb.TraceDetail(summary=summary_of(row), slices=map(slice_of, parts))
        pairs = sorted(zip(parts, detail.slices, strict=True), key=lambda pair: pair[0].bytes)
        for number, (part, message) in enumerate(pairs):
            message.data = reader.data(part, bytes_max // (len(pairs) - number))
            bytes_max -= len(message.data)
        return detail


def summary_of(row: TraceRow) -> pb.TraceSummary:
    """What a list of traces shows of one."""
    verdict = row.verdict
    summary = pb.TraceSummary(
        trace=row.trace,
        triggers=[
            pb.Trigger(
                name=put.fired.group.trigger,
                why=put.fired.why,
                node=put.node,
                # Not called: protobuf has it from 3.20 on.
                source=cast("pb.Source.ValueType", put.fired.source),
                fired_at_ns=put.fired.fired_at_ns,
                primary=put.fired.group.primary,
                laterals=put.fired.laterals,
                suppressed=put.fired.suppressed,
            )
            for put in row.triggers
        ],
        triggers_omitted=row.triggers_omitted,
    )
    if verdict is None:
        # Judged once it is quiet; until then nothing is claimed.
        summary.verdict.kind = "provisional"
        return summary
    summary.verdict.kind = verdict.kind
    summary.verdict.version = verdict.version
    for reason in verdict.reasons:
        summary.verdict.reasons.add(kind=reason.kind, node=reason.node, detail=reason.detail)
    summary.nodes.extend(verdict.nodes)
    summary.span_count = verdict.span_count
    summary.bytes = verdict.bytes
    summary.start_ns = verdict.start_ns or 0
    summary.end_ns = verdict.end_ns or 0
    return summary


def slice_of(row: SliceRow) -> pb.NodeSlice:
    """A slice without its data."""
    return pb.NodeSlice(
        node=row.node,
        bytes=row.bytes,
        flags=int(row.status.flags) if row.status else 0,
        open_handles=row.status.open_handles if row.status else 0,
        clock_offset_ns=row.clock.offset_ns if row.clock else 0,
        clock_error_ns=row.clock.error_ns if row.clock else 0,
    )
