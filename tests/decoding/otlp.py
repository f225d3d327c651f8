# SPDX-License-Identifier: Apache-2.0
"""OTLP written in Python, as it was before that was done in C: what that is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourcePb
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, TracesData
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanPb

from formats.otlp import UNFINISHED, NodeSpans, resource_of
from formats.records import Attributes, AttributeValue
from formats.spans import Resource, Scope, Span
from protocol.messages import TraceId

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1
_UINT_MAX = (1 << 64) - 1


def traces_data(trace: TraceId, parts: Iterable[NodeSpans]) -> TracesData:
    """One trace, grouped by process and instrumentation scope.

    A process that said nothing of itself is described by what its node knows of
    it: ``service.name``, ``process.pid``, ``host.name``.
    """
    data = TracesData()
    for part in parts:
        groups = _Groups(data, part.node)
        for span in part.spans:
            groups.of(span).spans.append(_span(trace, span, part.clock_offset_ns))
    return data


class _Groups:
    """Where the spans of one node stand: by process and by scope."""

    def __init__(self, data: TracesData, node: str) -> None:
        self._data = data
        self._node = node
        self._by_object: dict[tuple[int, int, int], ScopeSpans] = {}
        self._resources: dict[tuple[int, int], ResourceSpans] = {}
        self._scopes: dict[tuple[int, int, int], ScopeSpans] = {}

    def of(self, span: Span) -> ScopeSpans:
        # One object is made a handle; it is looked at once, since it may be large.
        objects = (span.client, id(span.resource), id(span.scope))
        known = self._by_object.get(objects)
        if known is None:
            known = self._by_object[objects] = self._by_content(span)
        return known

    def _by_content(self, span: Span) -> ScopeSpans:
        resource = resource_of(span, self._node)
        resource_pb = _resource(resource)
        key = (span.client, hash(resource_pb.SerializeToString(deterministic=True)))
        if key not in self._resources:
            self._resources[key] = self._data.resource_spans.add(
                resource=resource_pb, schema_url=resource.schema_url
            )
        scope = span.scope if span.scope is not None else Scope()
        scope_pb = _scope(scope)
        scope_key = (
            *key,
            hash((scope_pb.SerializeToString(deterministic=True), scope.schema_url)),
        )
        if scope_key not in self._scopes:
            self._scopes[scope_key] = self._resources[key].scope_spans.add(
                scope=scope_pb if span.scope is not None else None,
                schema_url=scope.schema_url,
            )
        return self._scopes[scope_key]


def key_values(attributes: Attributes) -> Iterable[KeyValue]:
    """Attributes in their order."""
    for key, value in attributes.items():
        yield KeyValue(key=key, value=any_value(value))


def any_value(value: AttributeValue) -> AnyValue:
    """A value of whatever type. Integers beyond 64 bits become text, as in the SDKs."""
    result = AnyValue()
    match value:
        case None:
            pass
        case bool():
            result.bool_value = value
        case int():
            if _INT_MIN <= value <= _INT_MAX:
                result.int_value = value
            else:
                result.string_value = str(value)
        case float():
            result.double_value = value
        case str():
            result.string_value = value
        case bytes():
            result.bytes_value = value
        case dict():
            result.kvlist_value.SetInParent()
            result.kvlist_value.values.extend(key_values(value))
        case _:
            result.array_value.SetInParent()
            result.array_value.values.extend(any_value(item) for item in value)
    return result


def _resource(resource: Resource) -> ResourcePb:
    return ResourcePb(attributes=key_values(resource.attributes))


def _scope(scope: Scope) -> InstrumentationScope:
    return InstrumentationScope(
        name=scope.name, version=scope.version, attributes=key_values(scope.attributes)
    )


def _id(number: int) -> bytes:
    return number.to_bytes(8, "big") if number else b""


def _time(time_ns: int, clock_offset_ns: int) -> int:
    return min(max(time_ns - clock_offset_ns, 0), _UINT_MAX) if time_ns else 0


def _span(trace: TraceId, span: Span, clock_offset_ns: int) -> SpanPb:
    encoded = SpanPb(
        trace_id=trace,
        span_id=_id(span.span_id),
        trace_state=span.trace_state,
        parent_span_id=_id(span.parent_id),
        flags=span.flags & 0xFFFFFFFF,
        name=span.name,
        # Not called: protobuf has it from 3.20 on.
        kind=cast("SpanPb.SpanKind.ValueType", span.kind),
        start_time_unix_nano=_time(span.start_ns, clock_offset_ns),
        end_time_unix_nano=_time(span.end_ns or 0, clock_offset_ns),
        attributes=key_values(span.attributes),
        dropped_attributes_count=span.dropped_attributes & 0xFFFFFFFF,
        dropped_events_count=span.dropped_events & 0xFFFFFFFF,
        dropped_links_count=span.dropped_links & 0xFFFFFFFF,
    )
    for event in span.events:
        encoded.events.add(
            name=event.name,
            time_unix_nano=_time(event.time_ns, clock_offset_ns),
            attributes=key_values(event.attributes),
            dropped_attributes_count=event.dropped_attributes & 0xFFFFFFFF,
        )
    for link in span.links:
        encoded.links.add(
            trace_id=link.trace_id,
            span_id=_id(link.span_id),
            trace_state=link.trace_state,
            flags=link.flags & 0xFFFFFFFF,
            attributes=key_values(link.attributes),
            dropped_attributes_count=link.dropped_attributes & 0xFFFFFFFF,
        )
    encoded.status.code = span.status  # type: ignore[assignment] # any number is kept
    encoded.status.message = span.status_message
    if span.unfinished:
        encoded.attributes.add(key=UNFINISHED, value=AnyValue(bool_value=True))
    return encoded
