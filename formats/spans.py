# SPDX-License-Identifier: Apache-2.0
"""The spans of a slice, joined from its records.

They are read and joined in C (``native/src/decode.h``), and made objects of where somebody looks at
them. What is said beyond the records of spans' starts and ends is MessagePack (RESOURCE, SCOPE,
SPAN_DETAIL): arrays, of which the last items may be left out where they are empty or zero. Times are
Unix nanoseconds, span ids unsigned integers, trace ids 16 bytes. No input raises.

A record of MessagePack that is broken, or says more than a slice may, counts as malformed and reads
as empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from typing import Any

import msgpack
from backsight_decode_native import ffi, lib

from formats.records import (
    Attributes,
    AttributeValue,
    Breadcrumb,
    Data,
    HopIn,
    HopOut,
    SpanEnd,
    Unanswered,
    body_of,
    text,
)
from formats.slices import ClockPairs, Handle, Process, Record, SliceInfo, check, record_of
from protocol.kernel_events import KernelEvent
from protocol.messages import TraceId
from protocol.values import dataclass


@dataclass(frozen=True, slots=True)
class Resource:
    """What a process says that it is. MessagePack: ``[attributes, schema_url]``."""

    attributes: Attributes = field(default_factory=dict)
    schema_url: str = ""


@dataclass(frozen=True, slots=True)
class Scope:
    """The instrumentation that made a span. MessagePack: ``[name, version, schema_url, attributes]``."""

    name: str = ""
    version: str = ""
    schema_url: str = ""
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """MessagePack: ``[name, time_ns, attributes, dropped_attributes]``."""

    name: str
    time_ns: int
    attributes: Attributes = field(default_factory=dict)
    dropped_attributes: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """MessagePack: ``[trace_id, span_id, attributes, trace_state, flags, dropped_attributes]``."""

    trace_id: bytes
    span_id: int
    attributes: Attributes = field(default_factory=dict)
    trace_state: str = ""
    flags: int = 0
    dropped_attributes: int = 0


@dataclass(slots=True)
class Span:
    """A span as its node saw it; times are Unix time by the node's clock.

    ``end_ns`` is None for a span without its end (``unfinished``). What is
    said from ``resource`` on is OTLP's, and only written by its SDKs.
    """

    span_id: int
    parent_id: int
    name: str
    kind: int
    start_ns: int
    client: int
    handle: int
    process: Process | None
    end_ns: int | None = None
    status: int = 0
    attributes: Attributes = field(default_factory=dict)
    resource: Resource | None = None
    scope: Scope | None = None
    events: tuple[Event, ...] = ()
    links: tuple[Link, ...] = ()
    status_message: str = ""
    trace_state: str = ""
    flags: int = 0
    dropped_attributes: int = 0
    dropped_events: int = 0
    dropped_links: int = 0

    @property
    def unfinished(self) -> bool:
        return self.end_ns is None


@dataclass(frozen=True, slots=True)
class About:
    """Of what node a slice is; ``clock_offset_ns`` is taken off all times.

    ``stamps`` stand besides on the local roots, the first span of the trace in each process, and
    go over what they have by these names.
    """

    node: str
    clock_offset_ns: int = 0
    stamps: Attributes = field(default_factory=dict)

    @property
    def native(self) -> tuple[Any, list[Any]]:
        """A ``struct bsd_about``, and what it points to."""
        stamps = msgpack.packb(dict(self.stamps)) if self.stamps else b""
        node = self.node.encode(errors="replace")
        kept = [ffi.from_buffer(stamps), ffi.from_buffer(node)]
        about = ffi.new(
            "struct bsd_about *",
            (kept[0], len(stamps), kept[1], len(node), self.clock_offset_ns),
        )
        return about[0], [about, *kept]


class SliceContent:
    """All that a slice says, in the order in which it was written.

    ``records`` are the DATA records, ``ends_without_start`` the ends of spans
    whose start is not in the slice, ``whole`` says that the bytes end where a
    piece ends and that all of them made sense.
    """

    def __init__(self, native: Any) -> None:  # noqa: ANN401 - of cffi
        self.native = native
        slice_ = lib.bsd_spans_slice(native)
        self._info = SliceInfo(slice_)
        # bsd_slice_time() sorts what it looks at.
        self.clock = ClockPairs(ffi.cast("struct bsd_slice *", slice_))

    @property
    def malformed(self) -> int:
        return int(lib.bsd_spans_malformed(self.native))

    @property
    def whole(self) -> bool:
        return self._info.whole and not self.malformed

    @property
    def span_count(self) -> int:
        return int(lib.bsd_spans_count(self.native))

    def otlp(self, trace: TraceId, about: About) -> bytes:
        """The spans as OTLP's TracesData; those of several slices, one behind the other, are one again."""
        native, kept = about.native
        made = lib.bsd_spans_otlp(self.native, bytes(trace), native)
        del kept
        check(made.error)
        return ffi.buffer(made.at, made.n)[:] if made.n else b""

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        return tuple(_Making(self.processes).spans(self.native))

    @cached_property
    def _others(self) -> list[Record]:
        first = lib.bsd_spans_others(self.native)
        return [record_of(first[i]) for i in range(lib.bsd_spans_others_count(self.native))]

    @cached_property
    def records(self) -> tuple[Record, ...]:
        return tuple(record for record in self._others if isinstance(record.body, Data))

    @cached_property
    def hops_out(self) -> tuple[HopOut, ...]:
        return tuple(r.body for r in self._others if isinstance(r.body, HopOut))

    @cached_property
    def hops_in(self) -> tuple[HopIn, ...]:
        return tuple(r.body for r in self._others if isinstance(r.body, HopIn))

    @cached_property
    def breadcrumbs(self) -> tuple[Breadcrumb, ...]:
        return tuple(r.body for r in self._others if isinstance(r.body, Breadcrumb))

    @cached_property
    def unanswered(self) -> tuple[Unanswered, ...]:
        return tuple(r.body for r in self._others if isinstance(r.body, Unanswered))

    @cached_property
    def ends_without_start(self) -> tuple[SpanEnd, ...]:
        first = lib.bsd_spans_unstarted(self.native)
        bodies = (body_of(first[i]) for i in range(lib.bsd_spans_unstarted_count(self.native)))
        return tuple(body for body in bodies if isinstance(body, SpanEnd))

    @cached_property
    def handles(self) -> Mapping[tuple[int, int], Handle]:
        return self._info.handles

    @cached_property
    def processes(self) -> Mapping[int, Process]:
        return self._info.processes

    @cached_property
    def exited(self) -> frozenset[int]:
        return frozenset(self._info.exited)

    @cached_property
    def lossy(self) -> frozenset[int]:
        return frozenset(self._info.lossy)


def read_slice(chunks: Iterable[bytes]) -> SliceContent:
    """Read a slice and join the records of its spans."""
    slot = ffi.new("struct bsd_spans **")
    check(lib.bsd_spans_new(slot))
    native = ffi.gc(slot[0], lib.bsd_spans_free)
    for chunk in chunks:
        check(lib.bsd_spans_feed(native, chunk, len(chunk)))
    _describe_kernel_events(native)
    check(lib.bsd_spans_join(native))
    return SliceContent(native)


def _describe_kernel_events(native: Any) -> None:  # noqa: ANN401 - of cffi
    """What probes saw, in words; without the moment by the clock of the node nothing is shown."""
    count = check(lib.bsd_spans_kernels(native))
    if not count:
        return
    end_ns = ffi.new("uint64_t *")
    for number in range(count):
        raw = lib.bsd_spans_kernel(native, number, end_ns)
        event = KernelEvent.parse(ffi.buffer(raw.bytes, raw.rest_bytes)[:])
        title = event.title.encode()
        attributes = msgpack.packb(event.attributes)
        check(
            lib.bsd_spans_kernel_words(
                native,
                number,
                _kernel_span_id(event),
                title,
                len(title),
                attributes,
                len(attributes),
            )
        )


def _kernel_span_id(event: KernelEvent) -> int:
    """The same each time, and unlike any other's as far as 64 bits go."""
    said = f"{event.client} {event.tid} {event.kind} {event.time_ns}".encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big")


class _Making:
    """Objects of what C has; a resource and a scope are one for all their spans."""

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self._processes = processes
        self._resources: dict[Any, Resource] = {}
        self._scopes: dict[Any, Scope] = {}

    def spans(self, native: Any) -> Iterator[Span]:  # noqa: ANN401 - of cffi
        first = lib.bsd_spans_at(native)
        return (self._span(first[i]) for i in range(lib.bsd_spans_count(native)))

    def _span(self, raw: Any) -> Span:  # noqa: ANN401 - of cffi
        return Span(
            raw.span_id,
            raw.parent_id,
            text_of(raw.name),
            raw.kind,
            raw.start_ns,
            raw.client,
            raw.handle,
            self._processes.get(raw.client),
            raw.end_ns if raw.finished else None,
            raw.status,
            _map(raw.attributes),
            self._resource(raw.resource) if raw.resource else None,
            self._scope(raw.scope) if raw.scope else None,
            tuple(
                Event(text_of(e.name), e.time_ns, _map(e.attributes), e.dropped_attributes)
                for e in _each(raw.events, raw.n_events)
            ),
            tuple(
                Link(
                    ffi.buffer(link.trace_id)[:],
                    link.span_id,
                    _map(link.attributes),
                    text_of(link.trace_state),
                    link.flags,
                    link.dropped_attributes,
                )
                for link in _each(raw.links, raw.n_links)
            ),
            text_of(raw.status_message),
            text_of(raw.trace_state),
            raw.flags,
            raw.dropped_attributes,
            raw.dropped_events,
            raw.dropped_links,
        )

    def _resource(self, raw: Any) -> Resource:  # noqa: ANN401 - of cffi
        known = self._resources.get(raw)
        if known is None:
            known = self._resources[raw] = Resource(_map(raw.attributes), text_of(raw.schema_url))
        return known

    def _scope(self, raw: Any) -> Scope:  # noqa: ANN401 - of cffi
        known = self._scopes.get(raw)
        if known is None:
            known = self._scopes[raw] = Scope(
                text_of(raw.name),
                text_of(raw.version),
                text_of(raw.schema_url),
                _map(raw.attributes),
            )
        return known


def text_of(raw: Any) -> str:  # noqa: ANN401 - of cffi
    """A ``struct bsd_text``."""
    return text(ffi.buffer(raw.at, raw.bytes)[:]) if raw.bytes else ""


def _each(first: Any, count: int) -> Iterator[Any]:  # noqa: ANN401 - of cffi
    return (first[i] for i in range(count))


def _map(raw: Any) -> dict[str, AttributeValue]:  # noqa: ANN401 - of cffi
    items = raw.items
    return {text(_bytes(items[2 * i])): _value(items[2 * i + 1]) for i in range(raw.n)}


def _bytes(raw: Any) -> bytes:  # noqa: ANN401 - of cffi
    return ffi.buffer(raw.bytes, raw.n)[:] if raw.n else b""


def _value(raw: Any) -> AttributeValue:  # noqa: ANN401 - of cffi
    kind: int = raw.type
    if kind == lib.BSD_VALUE_TEXT:
        return text(_bytes(raw))
    if kind == lib.BSD_VALUE_INT:
        return int(raw.integer)
    if kind == lib.BSD_VALUE_BOOL:
        return bool(raw.integer)
    if kind == lib.BSD_VALUE_REAL:
        return float(raw.real)
    if kind == lib.BSD_VALUE_UINT:
        return int(raw.natural)
    if kind == lib.BSD_VALUE_BYTES:
        return _bytes(raw)
    if kind == lib.BSD_VALUE_LIST:
        return [_value(item) for item in _each(raw.items, raw.n)]
    return _map(raw) if kind == lib.BSD_VALUE_MAP else None
