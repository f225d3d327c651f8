# SPDX-License-Identifier: Apache-2.0
"""A trace as an operator looks at it: slices of several nodes, joined into one tree of spans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import backsight_pb2 as pb

from formats.records import AttributeValue, Data, HopIn, HopOut
from formats.slices import Record
from formats.spans import SliceContent, Span, read_slice
from protocol.messages import NodeId, SliceFlags

_STATUS = {0: "unset", 1: "ok", 2: "error"}
_KIND = {0: "unspecified", 1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
_NOT_WHOLE = ~SliceFlags.HELD

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NodeSlice:
    """One node's part.

    ``clock_offset_ns`` is the node's clock minus the coordinator's, within ``clock_error_ns``; an
    error of 0 says that it was not measured. ``trigger``: under which the node
    collected it; only told by the node itself, and empty while it did not.
    """

    node: str
    bytes: int
    flags: SliceFlags
    open_handles: int
    content: SliceContent
    clock_offset_ns: int = 0
    clock_error_ns: int = 0
    trigger: str = ""

    @property
    def complete(self) -> bool:
        return self.content.whole and not self.flags & _NOT_WHOLE


@dataclass(frozen=True, slots=True)
class Placed:
    """A span with its node; ``start_ns`` and ``end_ns`` are on the coordinator's clock."""

    span: Span
    part: NodeSlice
    start_ns: int
    end_ns: int | None


@dataclass(frozen=True, slots=True)
class TraceView:
    """What is known of one trace. ``summary`` is the JSON of ``backsightctl traces``."""

    summary: Json
    slices: tuple[NodeSlice, ...]
    spans: tuple[Placed, ...] = field(init=False)

    def __post_init__(self) -> None:
        placed = [
            Placed(
                span,
                part,
                span.start_ns - part.clock_offset_ns,
                None if span.end_ns is None else span.end_ns - part.clock_offset_ns,
            )
            for part in self.slices
            for span in part.content.spans
        ]
        placed.sort(key=lambda p: (p.start_ns, p.span.span_id))
        object.__setattr__(self, "spans", tuple(placed))

    def to_json(self) -> Json:
        """The shape of ``backsightctl show --json``; times are raw, as each node wrote them."""
        return {
            **self.summary,
            "slices": [
                {
                    "node": part.node,
                    "bytes": part.bytes,
                    "complete": part.complete,
                    "open": part.open_handles,
                    "flags": flag_names(part.flags),
                    "clock_offset_ns": part.clock_offset_ns,
                    "clock_error_ns": part.clock_error_ns,
                }
                for part in self.slices
            ],
            "spans": [_span_json(placed) for placed in self.spans],
            "hops": [
                {"kind": kind, "node": part.node, **_hop_json(hop)}
                for part in self.slices
                for kind, hops in (("out", part.content.hops_out), ("in", part.content.hops_in))
                for hop in hops
            ],
            "records": [
                _record_json(part, record)
                for part in self.slices
                for record in part.content.records
            ],
        }


def flag_names(flags: SliceFlags) -> list[str]:
    """The names of the flags that are set, in lower case; without ``held``."""
    return [
        flag.name.lower()
        for flag in SliceFlags
        if flag.name is not None and flag & flags and flag is not SliceFlags.HELD
    ]


def _record_json(part: NodeSlice, record: Record) -> Json:
    """Bytes of the application: as text where they are printable, in hexadecimal anyway."""
    payload = record.body.payload if isinstance(record.body, Data) else b""
    try:
        text: str | None = payload.decode()
    except UnicodeDecodeError:
        text = None
    return {
        "node": part.node,
        "time_ns": part.content.clock.time_ns(record.ticks) if record.ticks else None,
        "bytes": len(payload),
        "truncated": record.truncated,
        "text": text if text is not None and text.isprintable() else None,
        "hex": payload.hex(),
    }


def _hop_json(hop: HopOut | HopIn) -> Json:
    return {
        "injected_on": f"#{NodeId(hop.node_id):016x}",
        "span_id": f"{hop.span_id:016x}",
        "hop": hop.hop,
        "handle": hop.handle,
    }


def _attribute_json(value: AttributeValue) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no number for it
    if isinstance(value, list):
        return [_attribute_json(item) for item in value]
    if isinstance(value, dict):
        return _attributes_json(value)
    return value


def _attributes_json(attributes: Mapping[str, AttributeValue]) -> Json:
    return {key: _attribute_json(value) for key, value in attributes.items()}


def _span_json(placed: Placed) -> Json:
    span = placed.span
    process = span.process
    return {
        "span_id": f"{span.span_id:016x}",
        "parent_id": f"{span.parent_id:016x}" if span.parent_id else "",
        "name": span.name,
        "node": placed.part.node,
        "service": process.service if process else "",
        "pid": process.pid if process else 0,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "kind": _KIND.get(span.kind, str(span.kind)),
        "status": _STATUS.get(span.status, str(span.status)),
        "status_message": span.status_message,
        "attributes": _attributes_json(span.attributes),
        "events": [
            {
                "name": event.name,
                "time_ns": event.time_ns,
                "attributes": _attributes_json(event.attributes),
            }
            for event in span.events
        ],
        "unfinished": span.unfinished,
    }


# -------------------------------------------------------------- from the wire


def summary_json(summary: pb.TraceSummary) -> Json:
    """One line of ``backsightctl traces --json``."""
    return {
        "trace_id": summary.trace.hex(),
        "triggers": [
            {
                "name": trigger.name,
                "why": trigger.why,
                "node": trigger.node,
                "source": pb.Source.Name(trigger.source).removeprefix("SOURCE_").lower(),
                "fired_at_ns": trigger.fired_at_ns,
                "primary": trigger.primary.hex(),
                "laterals": [lateral.hex() for lateral in trigger.laterals],
                "suppressed": trigger.suppressed,
            }
            for trigger in summary.triggers
        ],
        "triggers_omitted": summary.triggers_omitted,
        "verdict": {
            "kind": summary.verdict.kind,
            "version": summary.verdict.version,
            "reasons": [
                {"kind": reason.kind, "node": reason.node, "detail": reason.detail}
                for reason in summary.verdict.reasons
            ],
        },
        "pinned": summary.pinned,
        "nodes": list(summary.nodes),
        "span_count": summary.span_count,
        "bytes": summary.bytes,
        "start_ns": summary.start_ns,
        "end_ns": summary.end_ns,
    }


def trace_view(detail: pb.TraceDetail) -> TraceView:
    """A trace as the coordinator gave it."""
    return TraceView(
        summary_json(detail.summary),
        tuple(
            NodeSlice(
                part.node,
                part.bytes,
                SliceFlags(part.flags),
                part.open_handles,
                read_slice([part.data]),
                part.clock_offset_ns,
                part.clock_error_ns,
            )
            for part in detail.slices
        ),
    )


def children_of(spans: Sequence[Placed]) -> tuple[list[Placed], dict[int, list[Placed]]]:
    """The spans to begin with (no parent, or none that was delivered), and each one's children."""
    known = {placed.span.span_id for placed in spans}
    tops: list[Placed] = []
    children: dict[int, list[Placed]] = {}
    for placed in spans:
        parent = placed.span.parent_id
        if parent and parent in known and parent != placed.span.span_id:
            children.setdefault(parent, []).append(placed)
        else:
            tops.append(placed)
    return tops, children


def in_tree_order(spans: Sequence[Placed]) -> Iterable[tuple[int, Placed]]:
    """Each span once with its depth, parents first; spans in a circle come last, at depth 0."""
    tops, children = children_of(spans)
    seen: set[int] = set()
    for start in (*tops, *spans):
        waiting = [(0, start)]
        while waiting:
            depth, placed = waiting.pop()
            if id(placed) in seen:
                continue
            seen.add(id(placed))
            yield depth, placed
            waiting.extend(
                (depth + 1, child) for child in reversed(children.get(placed.span.span_id, []))
            )
