# SPDX-License-Identifier: Apache-2.0
"""Spans as flat tags, names with texts: what searches look for, and what viewers show of a span.

What OpenTelemetry has in fields becomes tags of the names that its specification gives for
formats other than its own. The coordinator's index holds hashes of these texts, which are made in C
(``native/src/decode/index.c`` and ``words.c``): who changes one changes both, and must have the index
made anew. A viewer that wants another prints its own.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator

from formats.otlp import UNFINISHED
from formats.records import AttributeValue
from formats.spans import Event, Span

KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
"""OpenTelemetry's kinds of spans, in words."""

_OK, _ERROR = 1, 2


def text_of(value: AttributeValue) -> str:
    """A value as searches compare it."""
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case float():
            return str(int(value)) if value.is_integer() and abs(value) < 1e21 else repr(value)
        case bytes():
            return base64.b64encode(value).decode()
        case None:
            return ""
        case list() | dict():
            return json.dumps(_plain(value), separators=(",", ":"))
        case _:
            return str(value)


def tags_of(span: Span) -> Iterator[tuple[str, AttributeValue]]:
    """A span's attributes, and what stands in fields with OpenTelemetry."""
    yield from span.attributes.items()
    if span.unfinished:
        yield UNFINISHED, True
    if span.scope is not None and span.scope.name:
        yield "otel.scope.name", span.scope.name
    if span.scope is not None and span.scope.version:
        yield "otel.scope.version", span.scope.version
    if span.kind in KINDS:
        yield "span.kind", KINDS[span.kind]
    if span.status == _ERROR:
        yield "otel.status_code", "ERROR"
        yield "error", True
    elif span.status == _OK:
        yield "otel.status_code", "OK"
    if span.status_message:
        yield "otel.status_description", span.status_message
    if span.trace_state:
        yield "w3c.tracestate", span.trace_state


def fields_of(event: Event) -> Iterator[tuple[str, AttributeValue]]:
    """An event's name and attributes."""
    yield "event", event.name
    yield from event.attributes.items()


def _plain(value: AttributeValue) -> object:
    match value:
        case list():
            return [_plain(item) for item in value]
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case bytes():
            return text_of(value)
        case float() if not math.isfinite(value):
            return text_of(value)
        case _:
            return value
