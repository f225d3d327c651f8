# SPDX-License-Identifier: Apache-2.0
"""What the payload of a record says, by its type (``native/include/backsight.h``).. No input raises."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from backsight_decode_native import ffi

from protocol.kernel_events import KernelEvent
from protocol.messages import NodeId

PAYLOAD_BYTES_MAX = 32768
SPAN_START_NAME_BYTES_MAX = 32


class RecordType(enum.IntEnum):
    DATA = 1
    SPAN_START = 2
    SPAN_END = 3
    HOP_OUT = 4
    HOP_IN = 5
    BREADCRUMB = 6
    RESOURCE = 7
    SCOPE = 8
    SPAN_DETAIL = 9
    KERNEL = 10
    UNANSWERED = 11


class AttributeType(enum.IntEnum):
    STRING = 1
    INT = 2
    DOUBLE = 3
    BOOL = 4
    BYTES = 5


AttributeValue: TypeAlias = "str | int | float | bool | bytes | list[Any] | dict[str, Any] | None"
"""Lists and mappings hold values of this type again."""

Attributes: TypeAlias = Mapping[str, AttributeValue]

# Plain integers for the inner loop, where the arithmetic of enums is what costs.
_START, _END, _OUT, _IN, _CRUMB, _RESOURCE, _SCOPE, _DETAIL, _KERNEL, _UNANSWERED = (
    record.value
    for record in (
        RecordType.SPAN_START,
        RecordType.SPAN_END,
        RecordType.HOP_OUT,
        RecordType.HOP_IN,
        RecordType.BREADCRUMB,
        RecordType.RESOURCE,
        RecordType.SCOPE,
        RecordType.SPAN_DETAIL,
        RecordType.KERNEL,
        RecordType.UNANSWERED,
    )
)


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of the application, or of a record type that is newer than this reader."""

    type: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class SpanStart:
    """``parent_id`` 0: a root. ``start_ns`` is Unix time by the node's clock."""

    span_id: int
    parent_id: int
    start_ns: int
    kind: int
    name: str


@dataclass(frozen=True, slots=True)
class SpanEnd:
    """``name`` is empty where the start record held it whole."""

    span_id: int
    end_ns: int
    status: int
    name: str
    encoded_attributes: bytes


@dataclass(frozen=True, slots=True)
class HopOut:
    """A context was injected, on node ``node_id``."""

    node_id: NodeId
    span_id: int
    hop: int
    handle: int


@dataclass(frozen=True, slots=True)
class HopIn:
    """A context was extracted that had been injected on node ``node_id``."""

    node_id: NodeId
    span_id: int
    hop: int
    handle: int


@dataclass(frozen=True, slots=True)
class Breadcrumb:
    """The trace was on that node too; ``name`` may be empty."""

    node_id: NodeId
    name: str


@dataclass(frozen=True, slots=True)
class ResourceRecord:
    """What the spans of a handle are of: MessagePack, see ``formats.spans.Resource``."""

    encoded: bytes


@dataclass(frozen=True, slots=True)
class ScopeRecord:
    """What made some spans of a handle, which name it by its number: MessagePack, see ``formats.spans``."""

    number: int
    encoded: bytes


@dataclass(frozen=True, slots=True)
class SpanDetail:
    """All of a span that its end does not hold: MessagePack in ``parts`` parts, see ``formats.spans``.

    ``scope`` is a number of the handle's, 0 for none.
    """

    span_id: int
    scope: int
    part: int
    parts: int
    encoded: bytes


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Nobody answered what a client span sent to that IP address.

    ``unsent``: no connection came about, so that nobody can have got it; else that is not known.
    """

    span_id: int
    address: str
    error: str
    unsent: bool = False


Body: TypeAlias = (
    Data
    | SpanStart
    | SpanEnd
    | HopOut
    | HopIn
    | Breadcrumb
    | ResourceRecord
    | ScopeRecord
    | SpanDetail
    | KernelEvent
    | Unanswered
)


def text(raw: bytes) -> str:
    """What was cut within a character, or is no UTF-8, is text all the same."""
    return raw.decode("utf-8", "replace")


def body_of(raw: Any) -> Body:  # noqa: ANN401 - of cffi
    """What a ``struct bsd_record`` says (``native/src/decode.h``)."""
    name_bytes: int = raw.name_bytes
    size: int = name_bytes + raw.rest_bytes
    content = ffi.buffer(raw.bytes, size)[:] if size else b""
    kind: int = raw.type
    if kind == _START:
        return SpanStart(raw.span_id, raw.parent_id, raw.time_ns, raw.kind, text(content))
    if kind == _END:
        name, attributes = content[:name_bytes], content[name_bytes:]
        return SpanEnd(raw.span_id, raw.time_ns, raw.status, text(name), attributes)
    if kind in (_OUT, _IN):
        hop_type = HopOut if kind == _OUT else HopIn
        return hop_type(NodeId(raw.node_id), raw.span_id, raw.hop, raw.injector)
    if kind == _CRUMB:
        return Breadcrumb(NodeId(raw.node_id), text(content))
    if kind == _DETAIL:
        return SpanDetail(raw.span_id, raw.scope, raw.part, raw.parts, content)
    if kind == _RESOURCE:
        return ResourceRecord(content)
    if kind == _SCOPE:
        return ScopeRecord(raw.scope, content)
    if kind == _UNANSWERED:
        address, error = content[:name_bytes], content[name_bytes:]
        return Unanswered(raw.span_id, text(address), text(error), raw.unsent)
    if kind == _KERNEL:
        return KernelEvent.parse(content)
    return Data(kind, content)
