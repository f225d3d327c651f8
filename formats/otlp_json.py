# SPDX-License-Identifier: Apache-2.0
"""OTLP as JSON, by the rules that its specification adds to those of protobuf.

Ids are hexadecimal, enums are numbers; 64-bit integers are texts and bytes
Base64, as in all JSON of protobuf.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

Json = dict[str, Any]


def otlp_json(data: TracesData) -> Json:
    """The JSON of a TracesData; that of an ExportTraceServiceRequest is the same."""
    encoded: Json = MessageToDict(data, use_integers_for_enums=True)
    for span_json, span in zip(_spans_json(encoded), _spans(data), strict=True):
        _name(span_json, traceId=span.trace_id, spanId=span.span_id)
        _name(span_json, parentSpanId=span.parent_span_id)
        for link_json, link in zip(span_json.get("links", ()), span.links, strict=True):
            _name(link_json, traceId=link.trace_id, spanId=link.span_id)
    return encoded


def _name(json_object: Json, **ids: bytes) -> None:
    for key, raw in ids.items():
        if raw:
            json_object[key] = raw.hex()


def _spans_json(encoded: Json) -> Iterator[Json]:
    for resource_spans in encoded.get("resourceSpans", ()):
        for scope_spans in resource_spans.get("scopeSpans", ()):
            yield from scope_spans.get("spans", ())


def _spans(data: TracesData) -> Iterator[Any]:
    for resource_spans in data.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            yield from scope_spans.spans
