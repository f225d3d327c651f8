# SPDX-License-Identifier: Apache-2.0
"""What is stored of a trace: for the index, and as messages for backsightctl, queries and exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import backsight_pb2 as pb

from coordinator.store.reader import StoreReader, TraceRow
from coordinator.store.rows import SliceRow
from formats.stamped import CollectedSlice, StampedTrace, stamped_trace, stamps_of
from protocol.messages import TraceId
from protocol.verdicts import VerdictKind


@dataclass(frozen=True, slots=True)
class Collected:
    """What is stored of a trace as of one moment; of each slice as many bytes as were asked for."""

    row: TraceRow
    slices: Sequence[tuple[SliceRow, bytes]]

    @property
    def version(self) -> int:
        """Of the verdict; 0 without one."""
        return self.row.verdict.version if self.row.verdict is not None else 0

    def stamped(self, *, one_clock: bool) -> StampedTrace:
        """See formats.stamped."""
        verdict = self.row.verdict
        return stamped_trace(
            self.row.trace,
            stamps_of(
                self.row.trace,
                [(put.node, put.fired) for put in self.row.triggers],
                verdict.kind if verdict is not None else VerdictKind.PROVISIONAL,
                self.version,
                verdict.reasons if verdict is not None else (),
            ),
            (
                CollectedSlice(
                    row.node, data, row.bytes, row.clock.offset_ns if row.clock is not None else 0
                )
                for row, data in self.slices
            ),
            one_clock=one_clock,
        )


def collected(
    reader: StoreReader, trace: TraceId, bytes_max: int, node: str | None = None
) -> Collected | None:
    """What is stored of a trace; None if nothing is. To be called within a moment of the reader.

    With ``node``, only that node's slice is in it. Of slices that are longer than
    ``bytes_max`` in all, the longest are cut short.
    """
    row = reader.trace(trace)
    if row is None:
        return None
    parts = reader.slices_of(row)
    if node is None and sum(part.bytes for part in parts) <= bytes_max:
        return Collected(row, list(zip(parts, reader.all_data(row.key, parts), strict=True)))
    parts = [part for part in parts if node in (None, part.node)]
    data: dict[str, bytes] = {}
    for left, part in zip(
        range(len(parts), 0, -1), sorted(parts, key=lambda part: part.bytes), strict=True
    ):
        data[part.node] = reader.data(part, bytes_max // left)
        bytes_max -= len(data[part.node])
    return Collected(row, [(part, data[part.node]) for part in parts])


def trace_detail(
    reader: StoreReader, trace: TraceId, bytes_max: int, node: str | None = None
) -> pb.TraceDetail | None:
    """The same as a message."""
    with reader.moment():
        found = collected(reader, trace, bytes_max, node)
    if found is None:
        return None
    detail = pb.TraceDetail(
        summary=summary_of(found.row), slices=(slice_of(part) for part, _ in found.slices)
    )
    for message, (_, data) in zip(detail.slices, found.slices, strict=True):
        message.data = data
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
        pinned=row.pinned,
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
