# SPDX-License-Identifier: Apache-2.0
"""Traces as the JSON of Jaeger's UI, which its HTTP API answers with and its page imports.

The shape is that of jaegertracing/jaeger, internal/uimodel/model.go; how a span of
OpenTelemetry becomes one of Jaeger, that of opentelemetry-collector-contrib,
pkg/translator/jaeger. Times are microseconds.
"""

from __future__ import annotations

import math
from typing import Any

from formats.otlp import resource_of
from formats.records import AttributeValue
from formats.spans import Span
from formats.stamped import ShownTrace, service_of
from formats.tags import fields_of, tags_of, text_of

Json = dict[str, Any]

SERVICE = "service.name"

# Larger ones are not exact in JavaScript; Jaeger sends them as texts.
_EXACT_MAX = (1 << 53) - 1


def trace_json(trace: ShownTrace) -> Json:
    """One trace."""
    spans: list[Json] = []
    processes = _Processes()
    for part in trace.parts:
        for span in part.spans:
            process = processes.of(span, part.node)
            spans.append(_span(trace.trace.hex(), span, part.clock_offset_ns, process))
    return {
        "traceID": trace.trace.hex(),
        "spans": spans,
        "processes": processes.json,
        "warnings": None,
    }


def answer(
    data: list[Any] | None, total: int, errors: list[Json] | None = None, limit: int = 0
) -> Json:
    """What all of Jaeger's legacy API puts around its data."""
    return {"data": data, "total": total, "limit": limit, "offset": 0, "errors": errors}


class _Processes:
    """The processes of a trace, each once, under names of their own."""

    def __init__(self) -> None:
        self.json: dict[str, Json] = {}
        self._by_content: dict[tuple[str, int, str], str] = {}
        self._by_object: dict[tuple[str, int, int], str] = {}

    def of(self, span: Span, node: str) -> str:
        # Of equal resources one object is made a handle; it lives as long as its spans.
        same_object = (node, span.client, id(span.resource))
        if span.resource is not None and same_object in self._by_object:
            return self._by_object[same_object]
        resource = resource_of(span, node)
        same_content = (node, span.client, repr(resource))
        name = self._by_content.get(same_content)
        if name is None:
            name = self._by_content[same_content] = f"p{len(self.json) + 1}"
            tags = [
                _tag(key, value) for key, value in resource.attributes.items() if key != SERVICE
            ]
            self.json[name] = {"serviceName": service_of(span), "tags": tags}
        self._by_object[same_object] = name
        return name


def _span(trace_id: str, span: Span, clock_offset_ns: int, process: str) -> Json:
    references = []
    if span.parent_id:
        references.append(_reference("CHILD_OF", trace_id, span.parent_id))
    references += [
        _reference("FOLLOWS_FROM", link.trace_id.hex(), link.span_id) for link in span.links
    ]
    end_ns = span.start_ns if span.end_ns is None else span.end_ns
    warning = "no end was recorded: it still ran, or its process died"
    return {
        "traceID": trace_id,
        "spanID": f"{span.span_id:016x}",
        "flags": span.flags & 1,
        "operationName": span.name,
        "references": references,
        "startTime": max(span.start_ns - clock_offset_ns, 0) // 1000,
        "duration": max(end_ns - span.start_ns, 0) // 1000,
        "tags": [_tag(key, value) for key, value in tags_of(span)],
        "logs": [
            {
                "timestamp": max(event.time_ns - clock_offset_ns, 0) // 1000,
                "fields": [_tag(key, value) for key, value in fields_of(event)],
            }
            for event in span.events
        ],
        "processID": process,
        "warnings": [warning] if span.unfinished else None,
    }


def _reference(kind: str, trace_id: str, span_id: int) -> Json:
    return {"refType": kind, "traceID": trace_id, "spanID": f"{span_id:016x}"}


def _tag(key: str, value: AttributeValue) -> Json:
    kind = "string"
    shown: object = text_of(value)
    match value:
        case bool():
            kind, shown = "bool", value
        case int():
            kind = "int64"
            if abs(value) <= _EXACT_MAX:
                shown = value
        case float():
            kind = "float64"
            # JSON has no others.
            if math.isfinite(value):
                shown = value
        case bytes():
            kind = "binary"
        case _:
            pass
    return {"key": key, "type": kind, "value": shown}
