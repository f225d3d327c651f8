# SPDX-License-Identifier: Apache-2.0
"""A trace as nodes record it: a shop's request over two nodes and three services."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import backsight_pb2 as pb
import msgpack

from formats.records import ResourceRecord, ScopeRecord, SpanDetail, SpanEnd, SpanStart
from formats.slices import PieceKind, Process, RunFlags
from protocol.messages import SliceFlags, TraceId
from testbed.encoding import encode_piece, encode_process, encode_record

TRACE = TraceId(bytes.fromhex("0af7651916cd43dd8448eb211c80319c"))
MS = 1_000_000
BEGIN_NS = 1_790_000_000_000_000_000  # September 2026

SERVER, CLIENT = 2, 3
ERROR = 2


@dataclass(frozen=True, slots=True)
class Said:
    """What an OpenTelemetry SDK says of a span; times in ms from BEGIN_NS, None: no end."""

    span_id: int
    parent_id: int
    name: str
    start_ms: int
    end_ms: int | None
    kind: int = SERVER
    status: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[list[Any]] = field(default_factory=list)
    links: list[list[Any]] = field(default_factory=list)
    status_message: str = ""


def process_bytes(client: int, service: str, *spans: Said, offset_ms: int = 0) -> bytes:
    """What a process writes; ``offset_ms``: how far its node's clock is ahead."""

    def at_ns(time_ms: int) -> int:
        return BEGIN_NS + (time_ms + offset_ms) * MS

    resource = {"service.name": service, "process.pid": 100 + client}
    records = encode_record(ResourceRecord(msgpack.packb([resource])), 0)
    records += encode_record(ScopeRecord(1, msgpack.packb(["shop.instrumentation", "1.2"])), 0)
    for span in spans:
        start = SpanStart(
            span.span_id, span.parent_id, at_ns(span.start_ms), span.kind, span.name[:32]
        )
        records += encode_record(start, 0)
    for span in spans:
        events = [[event[0], at_ns(event[1]), *event[2:]] for event in span.events]
        said = [span.attributes, events, span.links, span.status_message]
        records += encode_record(SpanDetail(span.span_id, 1, 0, 1, msgpack.packb(said)), 0)
        if span.end_ms is not None:
            end = SpanEnd(span.span_id, at_ns(span.end_ms), span.status, span.name, b"")
            records += encode_record(end, 0)
    return encode_process(client, Process(100 + client, service)) + encode_piece(
        PieceKind.RUN, records, flags=RunFlags.FIRST | RunFlags.LAST, client=client, handle=client
    )


STACK = {"exception.type": "OutOfStock", "exception.stacktrace": "Traceback ..."}

FRONT = process_bytes(
    1,
    "front",
    Said(0x1, 0, "GET /buy", 0, 100, SERVER, ERROR, {"http.route": "/buy", "n": 1 << 60}),
    Said(0x2, 0x1, "POST cart", 10, 90, CLIENT, attributes={"ok": False, "share": 0.5}),
)
CART = process_bytes(
    1,
    "cart",
    Said(0x3, 0x2, "POST /cart", 20, 80, attributes={"tags": ["a", 1], "raw": b"\x00\xff"}),
    # Two at a time, so that one track cannot show both.
    Said(0x4, 0x3, "redis GET", 25, 50, CLIENT, links=[[bytes(15) + b"\x07", 0x99]]),
    Said(0x5, 0x3, "Reserve", 30, 70, CLIENT),
    offset_ms=5,
)
STOCK = process_bytes(
    2,
    "stock",
    Said(
        0x6,
        0x5,
        "stock.Stock/Reserve",
        40,
        60,
        SERVER,
        ERROR,
        {"rpc.system": "grpc"},
        [["exception", 55, STACK]],
        status_message="out of stock",
    ),
    Said(0x7, 0x6, "still runs", 45, None, 1),
    offset_ms=5,
)
SPANS = 7
FLOWS = 2  # front to cart; cart to stock
EVENTS = 1


def detail(trace: TraceId = TRACE) -> pb.TraceDetail:
    """As the coordinator gives it; back's clock is 5 ms ahead."""
    slices = {"edge": FRONT, "back": CART + STOCK}
    return pb.TraceDetail(
        summary=pb.TraceSummary(
            trace=trace,
            triggers=[
                pb.Trigger(
                    name=name,
                    why=why,
                    node="back",
                    source=pb.SOURCE_APPLICATION,
                    fired_at_ns=BEGIN_NS + fired_ms * MS,
                    primary=trace,
                )
                for name, why, fired_ms in (("latency", "99 ms", 101), ("error", "OutOfStock", 60))
            ],
            verdict=pb.Verdict(
                kind="partial",
                version=2,
                reasons=[pb.VerdictReason(kind="unfinished", node="back", detail="span 7")],
            ),
            nodes=list(slices),
            span_count=SPANS,
        ),
        slices=[
            pb.NodeSlice(
                node=node,
                bytes=len(data),
                flags=int(SliceFlags.HELD),
                data=data,
                clock_offset_ns=5 * MS if node == "back" else 0,
                clock_error_ns=1,
            )
            for node, data in slices.items()
        ],
    )
