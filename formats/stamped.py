# SPDX-License-Identifier: Apache-2.0
"""A collected trace, ready to be exported: why it is there stands on its spans.

The local roots, the first span of the trace in each process, get attributes
that say which trigger fired and what the verdict is. Their names are these,
and stand nowhere else:

    attribute                    type      says
    backsight.trigger            string    the trigger that fired first; missing if none is known
    backsight.trigger_why        string    in its words
    backsight.trigger_node       string    where
    backsight.trigger_source     string    application, context, kernel, node or operator
    backsight.other_triggers     string[]  the others that fired, if any did
    backsight.lateral            bool      true if it was only collected with the trace that fired
    backsight.verdict            string    coherent, partial, lossy, truncated, provisional
    backsight.verdict_version    int       rises with each
    backsight.verdict_reasons    string[]  what is missing, where
    backsight.node               string    on which node the span was recorded
    backsight.bytes_left_out     int       how much of what that node collected is too long for this export;
                                           missing if none is: the verdict speaks of all of it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import backsight_pb2 as pb
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from formats.otlp import NodeSpans
from formats.records import Attributes, AttributeValue
from formats.spans import About, SliceContent, Span, read_slice
from protocol.messages import Group, Source, TraceId, TriggerFired
from protocol.values import dataclass

TRIGGER = "backsight.trigger"
TRIGGER_WHY = "backsight.trigger_why"
TRIGGER_NODE = "backsight.trigger_node"
TRIGGER_SOURCE = "backsight.trigger_source"
OTHER_TRIGGERS = "backsight.other_triggers"
LATERAL = "backsight.lateral"
VERDICT = "backsight.verdict"
VERDICT_VERSION = "backsight.verdict_version"
VERDICT_REASONS = "backsight.verdict_reasons"
NODE = "backsight.node"
BYTES_LEFT_OUT = "backsight.bytes_left_out"

# They stand on each local root; a reader of one span wants the gist.
_REASONS_MAX = 16


class StampedSlice:
    """What one node collected, with its stamps; ``spans`` are made when somebody looks at them."""

    def __init__(self, content: SliceContent, about: About) -> None:
        self.content = content
        self.about = about
        self.node = about.node
        self.clock_offset_ns = about.clock_offset_ns

    @cached_property
    def spans(self) -> Sequence[Span]:
        return tuple(_stamped(self.content.spans, self.about.stamps))


@dataclass(frozen=True, slots=True)
class ShownTrace:
    """The spans of one trace by node."""

    trace: TraceId
    parts: tuple[NodeSpans | StampedSlice, ...]


@dataclass(frozen=True, slots=True)
class StampedTrace(ShownTrace):
    """What was collected of one, with its stamps."""

    parts: tuple[StampedSlice, ...]

    def otlp_bytes(self) -> bytes:
        """All of it as OTLP's TracesData, encoded."""
        return b"".join(part.content.otlp(self.trace, part.about) for part in self.parts)

    def otlp(self) -> TracesData:
        """All of it as OTLP."""
        return TracesData.FromString(self.otlp_bytes())

    @property
    def span_count(self) -> int:
        return sum(part.content.span_count for part in self.parts)


class Reason(Protocol):
    """What a verdict misses: ``pb.Reason``, or the coordinator's own."""

    @property
    def kind(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def detail(self) -> str: ...


@dataclass(frozen=True, slots=True)
class CollectedSlice:
    """What one node collected: ``data`` of ``bytes`` bytes."""

    node: str
    data: bytes
    bytes: int
    clock_offset_ns: int


def stamped(detail: pb.TraceDetail, *, one_clock: bool) -> StampedTrace:
    """The message of a trace, with its bytes, as spans; see stamped_trace."""
    summary = detail.summary
    fired = [
        (
            trigger.node,
            TriggerFired(
                Group(trigger.name, TraceId(trigger.primary)),
                why=trigger.why,
                source=Source(trigger.source),
                fired_at_ns=trigger.fired_at_ns,
            ),
        )
        for trigger in summary.triggers
    ]
    trace, verdict = TraceId(summary.trace), summary.verdict
    return stamped_trace(
        trace,
        stamps_of(trace, fired, verdict.kind, verdict.version, verdict.reasons),
        (
            CollectedSlice(part.node, part.data, part.bytes, part.clock_offset_ns)
            for part in detail.slices
        ),
        one_clock=one_clock,
    )


def stamped_trace(
    trace: TraceId,
    stamps: dict[str, AttributeValue],
    slices: Iterable[CollectedSlice],
    *,
    one_clock: bool,
) -> StampedTrace:
    """What is stored of a trace, with its bytes, as spans.

    ``one_clock``: times are put on the coordinator's clock, as pictures want
    them; else they are as each node wrote them.
    """
    return StampedTrace(
        trace,
        tuple(
            StampedSlice(
                read_slice([part.data]),
                About(
                    part.node, part.clock_offset_ns if one_clock else 0, stamps | _about_part(part)
                ),
            )
            for part in slices
        ),
    )


def service_of(span: Span) -> str:
    """What the span's process calls itself."""
    if span.resource is not None:
        name = span.resource.attributes.get("service.name")
        if isinstance(name, str) and name:
            return name
    return (span.process.service if span.process else "") or "unknown_service"


def _stamped(spans: Sequence[Span], about: Attributes) -> Iterator[Span]:
    known = {(span.client, span.span_id) for span in spans}
    for span in spans:
        is_local_root = (span.client, span.parent_id) not in known
        yield replace(span, attributes={**span.attributes, **about}) if is_local_root else span


def _about_part(part: CollectedSlice) -> dict[str, AttributeValue]:
    about: dict[str, AttributeValue] = {NODE: part.node}
    if len(part.data) < part.bytes:
        about[BYTES_LEFT_OUT] = part.bytes - len(part.data)
    return about


def stamps_of(
    trace: TraceId,
    fired: Sequence[tuple[str, TriggerFired]],
    kind: str,
    version: int,
    reasons: Sequence[Reason],
) -> dict[str, AttributeValue]:
    """What stands on local roots: who fired, each with its node, and the verdict."""
    about: dict[str, AttributeValue] = {}
    if fired:
        node, first = min(fired, key=lambda each: each[1].fired_at_ns)
        about[TRIGGER] = first.group.trigger
        about[TRIGGER_WHY] = first.why
        about[TRIGGER_NODE] = node
        about[TRIGGER_SOURCE] = first.source.name.lower()
        others: list[AttributeValue] = [
            *sorted({each.group.trigger for _, each in fired} - {first.group.trigger})
        ]
        if others:
            about[OTHER_TRIGGERS] = others
        if all(each.group.primary != trace for _, each in fired):
            about[LATERAL] = True
    about[VERDICT] = str(kind)
    about[VERDICT_VERSION] = version
    if reasons:
        words: list[AttributeValue] = [
            " ".join(filter(None, (f"{reason.kind}", reason.node and f"on {reason.node}")))
            + f": {reason.detail}"
            for reason in reasons[:_REASONS_MAX]
        ]
        if len(reasons) > _REASONS_MAX:
            words.append(f"and {len(reasons) - _REASONS_MAX} more")
        about[VERDICT_REASONS] = words
    return about
