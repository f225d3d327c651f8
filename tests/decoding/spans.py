# SPDX-License-Identifier: Apache-2.0
"""Spans joined in Python, as it was before that was done in C: what that is compared with."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias, TypeVar, cast

from formats.records import (
    AttributeType,
    AttributeValue,
    Breadcrumb,
    HopIn,
    HopOut,
    ResourceRecord,
    ScopeRecord,
    SpanDetail,
    SpanEnd,
    SpanStart,
    Unanswered,
    text,
)
from formats.slices import Process, Record
from formats.spans import Event, Link, Resource, Scope, Span
from protocol.kernel_events import KernelEvent
from tests.decoding.msgpack_reader import Map, MsgpackReader, Unreadable
from tests.decoding.slices import ClockPairs, Handle, PythonDecoder

_Item = TypeVar("_Item")

_ATTRIBUTE = struct.Struct("<BBH")
_INT = struct.Struct("<q")
_DOUBLE = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class PythonContent:
    """All that a slice says, in the order in which it was written.

    ``records`` are the DATA records, ``ends_without_start`` the ends of spans
    whose start is not in the slice, ``whole`` says that the bytes end where a
    piece ends and that all of them made sense.
    """

    spans: tuple[Span, ...]
    records: tuple[Record, ...]
    hops_out: tuple[HopOut, ...]
    hops_in: tuple[HopIn, ...]
    breadcrumbs: tuple[Breadcrumb, ...]
    unanswered: tuple[Unanswered, ...]
    ends_without_start: tuple[SpanEnd, ...]
    handles: Mapping[tuple[int, int], Handle]
    processes: Mapping[int, Process]
    exited: frozenset[int]
    lossy: frozenset[int]
    malformed: int
    whole: bool
    clock: ClockPairs


_INTERNAL = 1  # OTLP's SpanKind

# Spans before an event, the latest first, among which the one around it is looked for. Both
# may be as many as a slice has room for.
_SPANS_LOOKED_AT = 256

_SpanKey: TypeAlias = tuple[int, int]  # client, span id


@dataclass(slots=True)
class _Joiner:
    """Spans from their records, which come in any order."""

    spans: list[Span] = field(default_factory=list)
    by_id: dict[_SpanKey, deque[Span]] = field(default_factory=dict)
    ends: list[tuple[int, SpanEnd]] = field(default_factory=list)
    details: dict[_SpanKey, list[SpanDetail]] = field(default_factory=dict)
    resources: dict[tuple[int, int], Resource] = field(default_factory=dict)
    scopes: dict[tuple[int, int, int], Scope] = field(default_factory=dict)
    long_names: list[tuple[Span, str]] = field(default_factory=list)
    without_start: list[SpanEnd] = field(default_factory=list)
    malformed: int = 0
    msgpack: MsgpackReader = field(default_factory=MsgpackReader)

    def start(self, record: Record, body: SpanStart) -> None:
        span = Span(
            body.span_id,
            body.parent_id,
            body.name,
            body.kind,
            body.start_ns,
            record.client,
            record.handle,
            None,
        )
        self.spans.append(span)
        self.by_id.setdefault((record.client, body.span_id), deque()).append(span)

    def resource(self, record: Record, body: ResourceRecord) -> None:
        fields = _Fields.of(self.msgpack, body.encoded)
        self.resources[record.client, record.handle] = Resource(fields.attributes(), fields.text())
        self.malformed += fields.malformed

    def scope(self, record: Record, body: ScopeRecord) -> None:
        fields = _Fields.of(self.msgpack, body.encoded)
        self.scopes[record.client, record.handle, body.number] = Scope(
            fields.text(), fields.text(), fields.text(), fields.attributes()
        )
        self.malformed += fields.malformed

    def join(self, processes: Mapping[int, Process]) -> None:
        """All records are there."""
        for key, parts in self.details.items():
            same_id = self.by_id.get(key)
            if same_id:
                # Ids are random: only who lies has one twice, and would have a copy for each.
                self._describe(same_id[0], parts)
        for client, end in self.ends:
            open_spans = self.by_id.get((client, end.span_id))
            if not open_spans:
                self.without_start.append(end)
                continue
            # Ends take the starts of their id in order.
            span = open_spans.popleft()
            span.end_ns = end.end_ns
            span.status = end.status
            span.name = end.name or span.name
            if end.encoded_attributes:
                span.attributes, bad = decode_attributes(end.encoded_attributes)
                self.malformed += bad
        # Those of their start and end records are cut.
        for span, name in self.long_names:
            span.name = name
        for span in self.spans:
            span.process = processes.get(span.client)
            span.resource = self.resources.get((span.client, span.handle))

    def _describe(self, span: Span, parts: list[SpanDetail]) -> None:
        """MessagePack: an array of what follows here, which may end early."""
        first = parts[0]
        if len(parts) != first.parts or any(
            (detail.part, detail.parts) != (number, first.parts)
            for number, detail in enumerate(parts)
        ):
            self.malformed += 1
            return
        fields = _Fields.of(self.msgpack, b"".join(detail.encoded for detail in parts))
        span.scope = self.scopes.get((span.client, span.handle, first.scope))
        span.attributes = fields.attributes()
        span.events = tuple(
            Event(event.text(), event.number(), event.attributes(), event.number())
            for event in fields.each()
        )
        span.links = tuple(
            Link(
                link.raw(16),
                link.number(),
                link.attributes(),
                link.text(),
                link.number(),
                link.number(),
            )
            for link in fields.each()
        )
        span.status_message = fields.text()
        span.trace_state = fields.text()
        span.flags = fields.number()
        span.dropped_attributes = fields.number()
        span.dropped_events = fields.number()
        span.dropped_links = fields.number()
        name = fields.text()
        if name:
            self.long_names.append((span, name))
        self.malformed += fields.malformed


class _Fields:
    """A MessagePack array, item by item. What makes no sense is counted, and reads as empty."""

    def __init__(self, items: object) -> None:
        self.malformed = 0
        self._items: Iterator[Any] = iter(())
        if isinstance(items, list):
            self._items = iter(items)
        else:
            self.malformed = 1

    @classmethod
    def of(cls, reader: MsgpackReader, encoded: bytes) -> Self:
        try:
            return cls(reader.read(encoded))
        except Unreadable:
            return cls(None)

    def _next(self, empty: _Item) -> _Item:
        """The next item, if it is of the type of ``empty``; that at the end, too."""
        item = next(self._items, empty)
        # Not isinstance: True is no number.
        if type(item) is type(empty):
            return item
        self.malformed += item is not empty
        return empty

    def text(self) -> str:
        return self._next("")

    def number(self) -> int:
        """Unsigned, of 64 bits."""
        number = self._next(0)
        if 0 <= number < 1 << 64:
            return number
        self.malformed += 1
        return 0

    def raw(self, size: int) -> bytes:
        raw = self._next(b"")
        if len(raw) == size:
            return raw
        self.malformed += 1
        return bytes(size)

    def attributes(self) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {}
        found = self._next(Map())
        self.malformed += found.others
        for key, value in found.items():
            if _is_value(value):
                attributes[key] = cast(AttributeValue, _plain(value))
            else:
                self.malformed += 1
        return attributes

    def each(self) -> Iterator[_Fields]:
        for item in self._next(cast(list[object], [])):
            fields = _Fields(item)
            # One that is no array takes a byte, and would be made an object of.
            if not fields.malformed:
                yield fields
            self.malformed += fields.malformed


# Deeper than any attribute is meant to be, and shallower than Python's stack.
_DEPTH_MAX = 32


def _is_value(value: object, depth: int = 0) -> bool:
    if value is None or isinstance(value, str | int | float | bytes):
        return True
    if depth == _DEPTH_MAX:
        return False
    if isinstance(value, list):
        return all(_is_value(item, depth + 1) for item in value)
    return (
        isinstance(value, Map)
        and not value.others
        and all(_is_value(item, depth + 1) for item in value.values())
    )


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Map) else value


def _kernel_span_id(event: KernelEvent) -> int:
    """The same each time, and unlike any other's as far as 64 bits go."""
    said = f"{event.client} {event.tid} {event.kind} {event.time_ns}".encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big")


def kernel_spans(
    records: Iterable[Record], spans: Iterable[Span], decoder: PythonDecoder
) -> Iterator[Span]:
    """What probes saw, as spans of the process that it happened to.

    Each is a child of the span of that process which began last before it and was not over.
    Without the moment by the clock of the node, nothing is shown.
    """
    by_client: dict[int, list[Span]] = {}
    for span in spans:
        by_client.setdefault(span.client, []).append(span)
    for begun in by_client.values():
        begun.sort(key=lambda span: span.start_ns)
    for record in records:
        event = cast(KernelEvent, record.body)
        end_ns = decoder.clock.time_ns(record.ticks)
        if end_ns is None:
            continue
        start_ns = max(0, end_ns - event.duration_ns)
        begun = by_client.get(event.client, [])
        last = bisect_right(begun, end_ns, key=lambda span: span.start_ns)
        parent = next(
            (
                span
                for span in reversed(begun[max(0, last - _SPANS_LOOKED_AT) : last])
                if span.end_ns is None or span.end_ns >= start_ns
            ),
            None,
        )
        yield Span(
            _kernel_span_id(event),
            parent.span_id if parent is not None else 0,
            event.title,
            _INTERNAL,
            start_ns,
            event.client,
            record.handle,
            decoder.processes.get(event.client),
            end_ns,
            attributes=event.attributes,
            resource=parent.resource if parent is not None else None,
        )


def read_slice(chunks: Iterable[bytes]) -> PythonContent:
    """Read a slice and join the records of its spans.

    The threads of a process write one trace into several runs, and the slice
    may hold the end of a span before its start, so they are joined last.
    """
    decoder = PythonDecoder()
    joiner = _Joiner()
    data: list[Record] = []
    hops_out: list[HopOut] = []
    hops_in: list[HopIn] = []
    breadcrumbs: list[Breadcrumb] = []
    unanswered: list[Unanswered] = []
    kernel: list[Record] = []
    for chunk in chunks:
        for record in decoder.feed(chunk):
            match record.body:
                case SpanStart() as body:
                    joiner.start(record, body)
                case SpanEnd() as body:
                    joiner.ends.append((record.client, body))
                case SpanDetail() as body:
                    joiner.details.setdefault((record.client, body.span_id), []).append(body)
                case ResourceRecord() as body:
                    joiner.resource(record, body)
                case ScopeRecord() as body:
                    joiner.scope(record, body)
                case HopOut() as body:
                    hops_out.append(body)
                case HopIn() as body:
                    hops_in.append(body)
                case Breadcrumb() as body:
                    breadcrumbs.append(body)
                case Unanswered() as body:
                    unanswered.append(body)
                case KernelEvent():
                    kernel.append(record)
                case _:
                    data.append(record)
    joiner.join(decoder.processes)
    malformed = decoder.malformed + joiner.malformed
    spans = [*joiner.spans, *kernel_spans(kernel, joiner.spans, decoder)]
    return PythonContent(
        tuple(spans),
        tuple(data),
        tuple(hops_out),
        tuple(hops_in),
        tuple(breadcrumbs),
        tuple(unanswered),
        tuple(joiner.without_start),
        decoder.handles,
        decoder.processes,
        frozenset(decoder.exited),
        frozenset(decoder.lossy),
        malformed,
        decoder.whole and not malformed,
        decoder.clock,
    )


def decode_attributes(encoded: bytes) -> tuple[dict[str, AttributeValue], int]:
    """The attributes of a span, and how many made no sense.

    After one whose sizes make no sense the rest cannot be told apart, and
    counts as one.
    """
    attributes: dict[str, AttributeValue] = {}
    malformed = position = 0
    while position < len(encoded):
        if len(encoded) - position < _ATTRIBUTE.size:
            return attributes, malformed + 1
        kind, key_bytes, value_bytes = _ATTRIBUTE.unpack_from(encoded, position)
        key_at = position + _ATTRIBUTE.size
        value_at = key_at + key_bytes
        position = value_at + value_bytes
        if position > len(encoded):
            return attributes, malformed + 1
        value = _attribute_value(kind, encoded[value_at:position])
        if value is None:
            malformed += 1
        else:
            attributes[text(encoded[key_at:value_at])] = value
    return attributes, malformed


def _attribute_value(kind: int, raw: bytes) -> AttributeValue | None:
    if kind == AttributeType.STRING:
        return text(raw)
    if kind == AttributeType.BYTES:
        return raw
    if kind == AttributeType.INT and len(raw) == _INT.size:
        integer: int = _INT.unpack(raw)[0]
        return integer
    if kind == AttributeType.DOUBLE and len(raw) == _DOUBLE.size:
        number: float = _DOUBLE.unpack(raw)[0]
        return number
    if kind == AttributeType.BOOL and len(raw) == 1:
        return raw != b"\0"
    return None
