# SPDX-License-Identifier: Apache-2.0
"""Writes down which spans a service had, beside whatever else records them.

``opentelemetry-instrument`` calls install() by an entry point (testbed/processes.py). A line of
JSON a span goes to the file WITNESS.
"""

from __future__ import annotations

import json
import os

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import get_tracer_provider


class Witness(SpanProcessor):
    """Appends to a file, at once and in one piece, so that threads and processes may share it."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None:
            return
        line = {
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
            "parent_id": "" if span.parent is None else f"{span.parent.span_id:016x}",
            "name": span.name,
            "kind": span.kind.name.lower(),
            "start_ns": span.start_time,
            "end_ns": span.end_time,
            "status": span.status.status_code.name.lower(),
            "attributes": dict(span.attributes or {}),
            "events": [event.name for event in span.events],
        }
        os.write(self._file, f"{json.dumps(line, default=str)}\n".encode())


def install() -> None:
    provider = get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(Witness(os.environ["WITNESS"]))
