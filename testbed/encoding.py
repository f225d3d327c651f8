# SPDX-License-Identifier: Apache-2.0
"""Slices and records, written as the data plane and the library write them.

By the layouts of ``native/src/abi/slice.h`` and ``native/include/backsight.h`` anew, and not
by those of the reader (``formats.slices``): what both had wrong nobody would find.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Mapping

from formats.records import (
    SPAN_START_NAME_BYTES_MAX,
    AttributeType,
    AttributeValue,
    Body,
    Breadcrumb,
    HopIn,
    HopOut,
    RecordType,
    ResourceRecord,
    ScopeRecord,
    SpanDetail,
    SpanEnd,
    SpanStart,
    Unanswered,
)
from formats.slices import ALIGN_BYTES, PieceKind, Process, RunFlags
from protocol.kernel_events import KernelEvent

_PIECE = struct.Struct("<IHHIIII")
_RECORD = struct.Struct("<HBBQ")
_CLOCK = struct.Struct("<QQQ")
_PROCESS = struct.Struct("<II64s")
_SPAN_START = struct.Struct("<QQQBB6x")
_SPAN_END = struct.Struct("<QQHHI")
_HOP = struct.Struct("<QQII")
_BREADCRUMB = struct.Struct("<Q")
_KERNEL_EVENT = struct.Struct("=QQIIHHIIIQ16s24sQ")
_SCOPE_HEADER = struct.Struct("<I")
_DETAIL_HEADER = struct.Struct("<QIHH")
_UNANSWERED = struct.Struct("<QII")
_ATTRIBUTE = struct.Struct("<BBH")
_INT = struct.Struct("<q")
_DOUBLE = struct.Struct("<d")

_RECORD_TRUNCATED = 1


def encode_piece(
    kind: PieceKind,
    content: bytes = b"",
    *,
    flags: RunFlags = RunFlags.NONE,
    client: int = 0,
    handle: int = 0,
    seq: int = 0,
    start: int = 0,
) -> bytes:
    """One piece; ``start`` is the offset of the content in its run."""
    return _PIECE.pack(len(content), kind, flags, client, handle, seq, start) + content


def encode_clock(ticks: int, realtime_ns: int, ticks_per_s: int) -> bytes:
    """A pair of clock values, by which the records near to it get their time."""
    return encode_piece(PieceKind.CLOCK, _CLOCK.pack(ticks, realtime_ns, ticks_per_s))


def encode_process(client: int, process: Process) -> bytes:
    """A piece that names a client."""
    content = _PROCESS.pack(process.pid, 0, process.service.encode()[:63])
    return encode_piece(PieceKind.PROCESS, content, client=client)


def encode_record(body: Body, ticks: int, *, truncated: bool = False) -> bytes:
    """One record with its padding, as it stands in a run."""
    kind, payload = encode_body(body)
    flags = _RECORD_TRUNCATED if truncated else 0
    return (
        _RECORD.pack(len(payload), kind, flags, ticks)
        + payload
        + bytes(-len(payload) % ALIGN_BYTES)
    )


def encode_body(body: Body) -> tuple[int, bytes]:
    """A record's type and payload."""
    if isinstance(body, SpanStart):
        name = body.name.encode()[:SPAN_START_NAME_BYTES_MAX]
        return RecordType.SPAN_START, (
            _SPAN_START.pack(body.span_id, body.parent_id, body.start_ns, body.kind, len(name))
            + name
        )
    if isinstance(body, SpanEnd):
        name = body.name.encode()
        attributes = body.encoded_attributes
        return RecordType.SPAN_END, (
            _SPAN_END.pack(body.span_id, body.end_ns, len(name), body.status, len(attributes))
            + name
            + attributes
        )
    if isinstance(body, HopOut):
        return RecordType.HOP_OUT, _HOP.pack(body.node_id, body.span_id, body.hop, body.handle)
    if isinstance(body, HopIn):
        return RecordType.HOP_IN, _HOP.pack(body.node_id, body.span_id, body.hop, body.handle)
    if isinstance(body, Breadcrumb):
        return RecordType.BREADCRUMB, _BREADCRUMB.pack(body.node_id) + body.name.encode()
    if isinstance(body, ResourceRecord):
        return RecordType.RESOURCE, body.encoded
    if isinstance(body, ScopeRecord):
        return RecordType.SCOPE, _SCOPE_HEADER.pack(body.number) + body.encoded
    if isinstance(body, SpanDetail):
        header = _DETAIL_HEADER.pack(body.span_id, body.scope, body.part, body.parts)
        return RecordType.SPAN_DETAIL, header + body.encoded
    if isinstance(body, KernelEvent):
        return RecordType.KERNEL, encode_kernel_event(body)
    if isinstance(body, Unanswered):
        address = body.address.encode()
        head = _UNANSWERED.pack(body.span_id, len(address), body.unsent)
        return RecordType.UNANSWERED, head + address + body.error.encode()
    return body.type, body.payload


def encode_kernel_event(event: KernelEvent) -> bytes:
    """A struct bs_kernel_event (native/src/abi/kernel_event.h)."""
    return _KERNEL_EVENT.pack(
        event.time_ns,
        event.duration_ns,
        event.client,
        event.tid,
        event.kind,
        event.cpu,
        0xFFFFFFFF if event.number is None else event.number,
        event.other_pid,
        event.confidence,
        event.other_ns,
        _peer(event) if event.peer else (event.device or event.other_comm).encode(),
        event.name.encode(),
        event.position or event.asked_bytes,
    )


def _peer(event: KernelEvent) -> bytes:
    address = ipaddress.ip_address(event.peer.rpartition(":")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return bytes(10) + b"\xff\xff" + address.packed
    return address.packed


def encode_attributes(attributes: Mapping[str, AttributeValue]) -> bytes:
    """Attributes as they stand in the record of a span's end.

    ValueError for a key over 255 or a value over 65535 bytes.
    """
    encoded = bytearray()
    for key, value in attributes.items():
        kind, raw = _encode_value(value)
        key_raw = key.encode()
        if len(key_raw) > 255 or len(raw) > 65535:
            raise ValueError(
                f"attribute {key[:40]!r}: {len(key_raw)} bytes of key and {len(raw)} of value; "
                "255 and 65535 are allowed"
            )
        encoded += _ATTRIBUTE.pack(kind, len(key_raw), len(raw)) + key_raw + raw
    return bytes(encoded)


def _encode_value(value: AttributeValue) -> tuple[AttributeType, bytes]:
    if isinstance(value, bool):
        return AttributeType.BOOL, bytes([value])
    if isinstance(value, int):
        return AttributeType.INT, _INT.pack(value)
    if isinstance(value, float):
        return AttributeType.DOUBLE, _DOUBLE.pack(value)
    if isinstance(value, bytes):
        return AttributeType.BYTES, value
    if isinstance(value, str):
        return AttributeType.STRING, value.encode()
    raise ValueError(f"an attribute of the plain form is no {type(value).__name__}")
