# SPDX-License-Identifier: Apache-2.0
"""What the index has of a trace.

A row for each span, with the hashes of its tags; what a list of traces shows of it; and who called
whom. Times are Unix nanoseconds on the coordinator's clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field

from formats.rows import rows_of
from formats.stamped import StampedTrace
from protocol.messages import TraceId
from protocol.values import dataclass

SPANS_MAX = 20_000
"""Of one trace that can be found; the others are in it all the same."""

TIME_MAX_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ServiceSummary:
    name: str
    span_count: int
    error_span_count: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a list of traces shows; an orphan is a span whose parent nobody delivered."""

    root_service: str
    root_operation: str
    start_ns: int
    end_ns: int
    span_count: int
    error_span_count: int
    orphan_span_count: int
    services: tuple[ServiceSummary, ...]

    def to_json(self) -> str:
        services = [(s.name, s.span_count, s.error_span_count) for s in self.services]
        return json.dumps({name: getattr(self, name) for name in _SUMMARY} | {"services": services})

    @classmethod
    def from_json(cls, text: str) -> TraceSummary:
        said = json.loads(text)
        services = tuple(ServiceSummary(*service) for service in said.pop("services"))
        return cls(**said, services=services)


_SUMMARY = [name for name in TraceSummary.__slots__ if name != "services"]


@dataclass(frozen=True, slots=True)
class TraceIndex:
    """All that the index has of one trace, by its verdict of that version.

    operations  (service, name, kind), each once
    spans       (which of the operations, start, duration, hashes of tags)
    calls       (caller, callee) -> how many
    """

    trace: TraceId
    version: int
    operations: Sequence[tuple[str, str, str]] = ()
    spans: Sequence[tuple[int, int, int, bytes]] = ()
    summary: TraceSummary | None = None
    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)


def index_of(trace: StampedTrace, version: int) -> TraceIndex:
    """The index of a trace whose times are on one clock."""
    made = rows_of(trace.parts, SPANS_MAX)
    if not made.span_count:
        return TraceIndex(trace.trace, version)
    summary = TraceSummary(
        made.root_service,
        made.root_operation,
        made.start_ns,
        made.end_ns,
        made.span_count,
        made.error_count,
        made.orphan_count,
        tuple(ServiceSummary(name, *counts) for name, counts in made.services.items()),
    )
    return TraceIndex(trace.trace, version, made.operations, made.rows, summary, made.calls)
