# SPDX-License-Identifier: Apache-2.0
"""The rows of the index made in Python, as it was before that was done in C: what that is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from coordinator.index.making import (
    SPANS_MAX,
    ServiceSummary,
    TraceIndex,
    TraceSummary,
)
from formats.otlp import resource_of
from formats.records import AttributeValue
from formats.rows import tag_hash
from formats.stamped import BYTES_LEFT_OUT, ShownTrace, service_of
from formats.tags import KINDS, fields_of, tags_of, text_of

_TAGS_MAX = 192
_SEARCHED_CHARACTERS_MAX = 256
_TIME_MAX_NS = (1 << 63) - 1
_ERROR = 2


def python_index(trace: ShownTrace, version: int) -> TraceIndex:
    """The index of a trace whose times are on one clock."""
    operations: dict[tuple[str, str, str], int] = {}
    spans: list[tuple[int, int, int, bytes]] = []
    service_by_id: dict[int, str] = {}
    children: list[tuple[int, str]] = []  # parent's id, own service
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    roots: list[tuple[int, str, str]] = []
    start_ns, end_ns = _TIME_MAX_NS, 0
    for part in trace.parts:
        resources: dict[int, list[bytes]] = {}
        for span in part.spans:
            service = service_of(span)
            begun_ns = min(max(span.start_ns - part.clock_offset_ns, 0), _TIME_MAX_NS)
            duration_ns = 0 if span.end_ns is None else max(span.end_ns - span.start_ns, 0)
            duration_ns = min(duration_ns, _TIME_MAX_NS - begun_ns)
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
            operation = (service, span.name, KINDS.get(span.kind, ""))
            number = operations.setdefault(operation, len(operations))
            spans.append((number, begun_ns, duration_ns, packed))
    if not counts:
        return TraceIndex(trace.trace, version)
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
    return TraceIndex(trace.trace, version, tuple(operations), tuple(spans), summary, calls)


def _hashes(tags: Iterable[tuple[str, AttributeValue]]) -> Iterator[bytes]:
    for key, value in tags:
        text = text_of(value)
        if len(text) <= _SEARCHED_CHARACTERS_MAX:
            yield tag_hash(key, text)
