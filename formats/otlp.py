# SPDX-License-Identifier: Apache-2.0
"""Spans as OTLP has them, the form in which everybody else wants them.

It is written in C (``SliceContent.otlp``): grouped by process and instrumentation scope. Times and ids
are as the application wrote them, unless a clock's offset is given. What is known of a span beyond
that stands in attributes named ``backsight.*``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formats.records import AttributeValue
from formats.spans import Resource, Span

UNFINISHED = "backsight.unfinished"
"""True on a span whose end nobody wrote: it was running when its process died, or still runs."""


@dataclass(frozen=True, slots=True)
class NodeSpans:
    """The spans of one node, under its name; ``clock_offset_ns`` is taken off all their times."""

    node: str
    spans: Sequence[Span]
    clock_offset_ns: int = 0


def resource_of(span: Span, node: str) -> Resource:
    """What a span's process says that it is, or else what its node knows of it.

    A process that said nothing of itself is described by ``service.name``, ``process.pid``,
    ``host.name``.
    """
    if span.resource is not None:
        return span.resource
    attributes: dict[str, AttributeValue] = {}
    if span.process is not None:
        attributes["service.name"] = span.process.service or "unknown_service"
        attributes["process.pid"] = span.process.pid
    attributes["host.name"] = node
    return Resource(attributes)
