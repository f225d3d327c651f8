# SPDX-License-Identifier: Apache-2.0
"""OTLP as the JSON of Jaeger's UI, which its HTTP API answers with and its page imports.

The shape is that of jaegertracing/jaeger, internal/uimodel/model.go; how a span of
OTLP becomes one of Jaeger, that of opentelemetry-collector-contrib,
pkg/translator/jaeger. Times are microseconds.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status, TracesData

from protocol.otlp import UNFINISHED

Json = dict[str, Any]

SERVICE = "service.name"
NO_SERVICE = "unknown_service"

# Larger ones are not exact in JavaScript; Jaeger sends them as texts.
_EXACT_MAX = (1 << 53) - 1

KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
"""Jaeger's words for the kinds of spans."""


def trace_json(data: TracesData) -> Json:
    """One trace."""
    spans: list[Json] = []
    processes: dict[str, Json] = {}
    trace_id = ""
    for number, resource_spans in enumerate(data.resource_spans, 1):
        process = f"p{number}"
        attributes = resource_spans.resource.attributes
        processes[process] = {
            "serviceName": service_name(attributes),
            "tags": [_tag(item) for item in attributes if item.key != SERVICE],
        }
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                trace_id = span.trace_id.hex()
                spans.append(_span(span, scope_spans, process))
    return {"traceID": trace_id, "spans": spans, "processes": processes, "warnings": None}


def answer(data: list[Any] | None, total: int, errors: list[Json] | None = None) -> Json:
    """What all of Jaeger's legacy API puts around its data."""
    return {"data": data, "total": total, "limit": 0, "offset": 0, "errors": errors}


def service_name(attributes: Iterable[KeyValue]) -> str:
    """Of a resource."""
    for item in attributes:
        if item.key == SERVICE:
            return text_of(item.value) or NO_SERVICE
    return NO_SERVICE


def text_of(value: AnyValue) -> str:
    """A value as Jaeger shows, and compares, it."""
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return "true" if value.bool_value else "false"
        case "int_value":
            return str(value.int_value)
        case "double_value":
            number = value.double_value
            return str(int(number)) if number.is_integer() and abs(number) < 1e21 else repr(number)
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case None:
            return ""
        case _:
            return json.dumps(_plain(value), separators=(",", ":"))


def implied_tags(span: Span, scope: ScopeSpans) -> Iterator[tuple[str, str | bool]]:
    """What stands in fields of OTLP, and in tags with Jaeger."""
    if scope.scope.name:
        yield "otel.scope.name", scope.scope.name
    if scope.scope.version:
        yield "otel.scope.version", scope.scope.version
    if span.kind in KINDS:
        yield "span.kind", KINDS[span.kind]
    if span.status.code == Status.STATUS_CODE_ERROR:
        yield "otel.status_code", "ERROR"
        yield "error", True
    elif span.status.code == Status.STATUS_CODE_OK:
        yield "otel.status_code", "OK"
    if span.status.message:
        yield "otel.status_description", span.status.message
    if span.trace_state:
        yield "w3c.tracestate", span.trace_state


def _span(span: Span, scope: ScopeSpans, process: str) -> Json:
    references = []
    if span.parent_span_id:
        references.append(_reference("CHILD_OF", span.trace_id, span.parent_span_id))
    references += [_reference("FOLLOWS_FROM", link.trace_id, link.span_id) for link in span.links]
    unfinished = any(item.key == UNFINISHED for item in span.attributes)
    return {
        "traceID": span.trace_id.hex(),
        "spanID": span.span_id.hex() or "0" * 16,
        "flags": span.flags & 1,
        "operationName": span.name,
        "references": references,
        "startTime": span.start_time_unix_nano // 1000,
        "duration": max(span.end_time_unix_nano - span.start_time_unix_nano, 0) // 1000,
        "tags": [_tag(item) for item in span.attributes]
        + [
            {"key": key, "type": "bool" if value is True else "string", "value": value}
            for key, value in implied_tags(span, scope)
        ],
        "logs": [
            {
                "timestamp": event.time_unix_nano // 1000,
                "fields": [
                    {"key": "event", "type": "string", "value": event.name},
                    *(_tag(item) for item in event.attributes),
                ],
            }
            for event in span.events
        ],
        "processID": process,
        "warnings": ["no end was recorded: it still ran, or its process died"]
        if unfinished
        else None,
    }


def _reference(kind: str, trace_id: bytes, span_id: bytes) -> Json:
    return {"refType": kind, "traceID": trace_id.hex(), "spanID": span_id.hex()}


def _tag(item: KeyValue) -> Json:
    value = item.value
    kind, shown = "string", text_of(value)
    result: object = shown
    match value.WhichOneof("value"):
        case "bool_value":
            kind, result = "bool", value.bool_value
        case "int_value":
            kind = "int64"
            result = value.int_value if abs(value.int_value) <= _EXACT_MAX else shown
        case "double_value":
            kind = "float64"
            # JSON has no others.
            result = value.double_value if math.isfinite(value.double_value) else shown
        case "bytes_value":
            kind = "binary"
        case _:
            pass
    return {"key": item.key, "type": kind, "value": result}


def _plain(value: AnyValue) -> object:
    match value.WhichOneof("value"):
        case "array_value":
            return [_plain(item) for item in value.array_value.values]
        case "kvlist_value":
            return {item.key: _plain(item.value) for item in value.kvlist_value.values}
        case "int_value":
            return value.int_value
        case "bool_value":
            return value.bool_value
        case "double_value" if math.isfinite(value.double_value):
            return value.double_value
        case None:
            return None
        case _:
            return text_of(value)
