# SPDX-License-Identifier: Apache-2.0
"""What the index has of a trace.

A row for each span, with the hashes of its tags; what a list of traces shows of it; and who called
whom. Times are Unix nanoseconds on the coordinator's clock.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from formats.otlp import resource_of
from formats.records import AttributeValue
from formats.stamped import BYTES_LEFT_OUT, StampedTrace, service_of
from formats.tags import KINDS, fields_of, tags_of, text_of
from protocol.messages import TraceId

SPANS_MAX = 20_000
"""Of one trace that can be found; the others are in it all the same."""

# Of one span: attributes, its resource's, those of its events. SDKs stop at 128 attributes.
_TAGS_MAX = 192

# Half of what the index takes. A search over a million spans with 20 tags each finds
# one wrongly in one of 50,000 times.
HASH_BYTES = 5

# Nobody searches for a whole stack trace, or statement; as Jaeger over Elasticsearch.
_SEARCHED_CHARACTERS_MAX = 256

TIME_MAX_NS = (1 << 63) - 1

_ERROR = 2  # OTLP's status code


@dataclass(frozen=True, slots=True)
class IndexedSpan:
    service: str
    operation: str
    kind: str
    start_ns: int
    duration_ns: int
    tags: bytes


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
    """All that the index has of one trace, by its verdict of that version."""

    trace: TraceId
    version: int
    spans: tuple[IndexedSpan, ...]
    summary: TraceSummary | None
    calls: Mapping[tuple[str, str], int]


def tag_hash(key: str, value: str) -> bytes:
    """What stands for a tag in the index; the value as Jaeger shows it."""
    joined = key.encode(errors="replace") + b"\0" + value.encode(errors="replace")
    return hashlib.blake2b(joined, digest_size=HASH_BYTES).digest()


def index_of(trace: StampedTrace, version: int) -> TraceIndex:
    """The index of a trace whose times are on one clock."""
    spans: list[IndexedSpan] = []
    service_by_id: dict[int, str] = {}
    children: list[tuple[int, str]] = []  # parent's id, own service
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    roots: list[tuple[int, str, str]] = []
    start_ns, end_ns = TIME_MAX_NS, 0
    for part in trace.parts:
        resources: dict[int, list[bytes]] = {}
        for span in part.spans:
            service = service_of(span)
            begun_ns = min(max(span.start_ns - part.clock_offset_ns, 0), TIME_MAX_NS)
            duration_ns = 0 if span.end_ns is None else max(span.end_ns - span.start_ns, 0)
            duration_ns = min(duration_ns, TIME_MAX_NS - begun_ns)
            start_ns, end_ns = min(start_ns, begun_ns), max(end_ns, begun_ns + duration_ns)
            service_by_id[span.span_id] = service
            counts[service] += 1
            errors[service] += span.status == _ERROR
            if span.parent_id:
                children.append((span.parent_id, service))
            else:
                roots.append((begun_ns, service, span.name))
            if len(spans) == SPANS_MAX:
                continue
            resource = resource_of(span, part.node)
            of_resource = resources.get(id(resource))
            if of_resource is None:
                of_resource = list(_hashes(resource.attributes.items()))
                if span.resource is not None:  # else it is made for each span
                    resources[id(resource)] = of_resource
            # Of what is read for the index; no export leaves as much out.
            said = (tag for tag in tags_of(span) if tag[0] != BYTES_LEFT_OUT)
            tags = [*_hashes(said), *of_resource]
            for event in span.events:
                tags += _hashes(fields_of(event))
            packed = b"".join(dict.fromkeys(tags[:_TAGS_MAX]))
            kind = KINDS.get(span.kind, "")
            spans.append(IndexedSpan(service, span.name, kind, begun_ns, duration_ns, packed))
    if not counts:
        return TraceIndex(trace.trace, version, (), None, {})
    calls = Counter(
        (service_by_id[parent], service)
        for parent, service in children
        if service_by_id.get(parent, service) != service
    )
    _, root_service, root_operation = min(roots, default=(0, "", ""))
    summary = TraceSummary(
        root_service,
        root_operation,
        start_ns,
        end_ns,
        counts.total(),
        errors.total(),
        sum(parent not in service_by_id for parent, _ in children),
        tuple(ServiceSummary(name, counts[name], errors[name]) for name in sorted(counts)),
    )
    return TraceIndex(trace.trace, version, tuple(spans), summary, calls)


def _hashes(tags: Iterable[tuple[str, AttributeValue]]) -> Iterator[bytes]:
    for key, value in tags:
        text = text_of(value)
        if len(text) <= _SEARCHED_CHARACTERS_MAX:
            yield tag_hash(key, text)
