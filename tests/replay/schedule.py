# SPDX-License-Identifier: Apache-2.0
"""The replay schedule of a recording: what each pod's writer process does, in which order.

One pod = one node = one writer process. A pod's schedule is a list of events, to be carried out
one after the other in one thread:

===================  =============================================================================
``StartSpan``        Open the span. If ``receive_from`` names a pod, first wait for that pod's
                     context of this span; it is what the request brought (backward breadcrumb). A
                     pod's first event of a trace is always a StartSpan: open the trace's handle
                     there.
``SendContext``      Serialize the trace's context, for a child span that pod ``to`` will start,
                     and send it there. ``span`` is the child; the span that calls is
                     ``span.parent_id``, of this pod.
``EndSpan``          Write the end of the span, evaluate the latency rule on it, fire if it says
                     so. If ``respond_to`` names a pod, then send it the response of this span.
``ReceiveResponse``  Wait for the response of ``span`` (the child, run in pod ``sender``) and take
                     the forward breadcrumb from it. This may come after the calling span's own
                     end.
``CloseTrace``       The pod has no open span of the trace, no response to wait for, and will
                     start no further span of it: close the handle. Once per (pod, trace), and its
                     last event of that trace.
===================  =============================================================================

Messages. There are two kinds, context and response, and each span has at most one of either,
between its parent's pod and its own. So (kind, trace_id, span_id) names a message. The receiver
keeps what arrives in a mailbox by that name and takes the one that it waits for; arrival order
means nothing.

Time. ``key.time_ns`` is when the event is due, on the recording's clock (Unix nanoseconds); the
worker waits until ``(key.time_ns - Schedule.first_ns) / speed`` nanoseconds after the common start, and if it is
late it carries on at once, in order. The times that it *writes* are the recorded ones,
``span.start_ns`` and ``span.end_ns``. They differ from when it is due in one case: the pods'
clocks were not equal, and some spans were recorded as starting before their parent. No request
can arrive before it is sent, so a span is due to start at the earliest recorded start among
itself and its descendants. It is due to end at its recorded end.

Order. All events of all pods have one total order, ``OrderKey``; a pod's list is sorted by it.
Whatever has to happen first has the strictly smaller key: a parent's start before the sending of
a context, that before the child's start, that before the child's end, that before the receiving
of its response, and all of them before the trace is closed. So of all events not yet carried out
the least never waits, and a replay cannot deadlock, however the processes are scheduled. EndSpan
events of a pod are in the order in which the latency rule takes spans (end, start, span id, trace
id as recorded; tests/checker/README.md), so the process that ends them sees what the checker
sees.

The reader here is not the checker's, on purpose: see tests/checker/recording.py.
"""

from __future__ import annotations

import csv
import enum
import lzma
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO


class ScheduleError(ValueError):
    """The recording cannot be replayed; the message says which span and why."""


@dataclass(frozen=True, slots=True)
class Span:
    """A recorded span, and what the replay writes of it.

    Ids are lower-case hex text (trace 32 digits, span 16); ``parent_id`` is empty for a root.
    Times are Unix nanoseconds as recorded; ``duration_us`` is the file's column (the
    ``duration_us`` attribute), not what the latency rule takes (``end_ns - start_ns``).
    """

    trace_id: str
    span_id: str
    parent_id: str
    pod: str
    operation: str
    start_ns: int
    end_ns: int
    duration_us: int


class Phase(enum.IntEnum):
    """At the same nanosecond, what begins goes before what ends: a span of no length starts before it ends."""

    BEGIN = 0
    FINISH = 1


class Step(enum.IntEnum):
    """What goes first at the same point of the same span."""

    SEND_CONTEXT = 0
    START_SPAN = 1
    END_SPAN = 2
    RECEIVE_RESPONSE = 3
    CLOSE_TRACE = 4


class OrderKey(NamedTuple):
    """The place of an event in the total order of all pods' events; unique.

    ``rank`` is the span's depth under the root in Phase.BEGIN (a parent goes before its child
    that starts at the same time) and its recorded start in Phase.FINISH (the latency rule's
    order). ``span_id`` is that of the span at whose start or end it happens: the child's for
    messages, the last one's for CloseTrace.
    """

    time_ns: int
    phase: Phase
    rank: int
    span_id: str
    trace_id: str
    step: Step
    pod: str


@dataclass(frozen=True, slots=True)
class StartSpan:
    """Open ``span``, after its context has come from pod ``receive_from``.

    None: nothing comes; the parent is of this pod, or there is none.
    """

    key: OrderKey
    span: Span
    receive_from: str | None


@dataclass(frozen=True, slots=True)
class SendContext:
    """Send the context for the child ``span`` to pod ``to``."""

    key: OrderKey
    span: Span
    to: str


@dataclass(frozen=True, slots=True)
class EndSpan:
    """Write the end of ``span``, then send its response to pod ``respond_to``.

    None: nothing is sent; the parent is of this pod, or there is none.
    """

    key: OrderKey
    span: Span
    respond_to: str | None


@dataclass(frozen=True, slots=True)
class ReceiveResponse:
    """Wait for the response of the child ``span`` from pod ``sender``."""

    key: OrderKey
    span: Span
    sender: str


@dataclass(frozen=True, slots=True)
class CloseTrace:
    """The pod is done with the trace."""

    key: OrderKey
    trace_id: str


Event = StartSpan | SendContext | EndSpan | ReceiveResponse | CloseTrace


@dataclass(frozen=True, slots=True)
class Schedule:
    """Each pod's events in order.

    ``first_ns`` and ``last_ns`` are when the first and the last event of all are due (Unix ns).
    """

    pods: Mapping[str, tuple[Event, ...]]
    first_ns: int
    last_ns: int
    trace_count: int
    span_count: int


def _spans(lines: TextIO) -> tuple[Span, ...]:
    return tuple(
        Span(
            trace_id=row["TraceID"],
            span_id=row["SpanID"],
            parent_id="" if row["ParentID"] == "root" else row["ParentID"],
            pod=row["PodName"],
            operation=row["OperationName"],
            start_ns=int(row["StartTimeUnixNano"]),
            end_ns=int(row["EndTimeUnixNano"]),
            duration_us=int(row["Duration"]),
        )
        for row in csv.DictReader(lines)
    )


def read_spans(path: Path) -> tuple[Span, ...]:
    """The spans of a recording (.csv or .csv.xz; columns in tests/data/nezha/README.md), in the file's order.

    Raises OSError if it cannot be read, ScheduleError if it is no recording.
    """
    try:
        with (
            lzma.open(path, "rt", newline="")
            if path.suffix == ".xz"
            else path.open(newline="") as lines
        ):
            return _spans(lines)
    except (KeyError, TypeError, ValueError, lzma.LZMAError) as error:
        raise ScheduleError(
            f"{path}: no recording: {error!r}; its columns stand in tests/data/nezha/README.md"
        ) from error


def _trace_events(spans: Mapping[str, Span]) -> list[tuple[str, Event]]:
    """The events of one trace, each with its pod, in no order. ``spans`` are the trace's, by span id."""
    children: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans.values():
        if span.end_ns < span.start_ns:
            raise ScheduleError(
                f"span {span.span_id} of trace {span.trace_id} ends before it starts"
            )
        if span.parent_id and span.parent_id not in spans:
            raise ScheduleError(
                f"span {span.span_id} of trace {span.trace_id} has parent {span.parent_id}, "
                f"which is not in the recording"
            )
        children[span.parent_id].append(span)

    depth = {"": -1}
    parents_first: list[Span] = []
    waiting = [""]
    while waiting:
        parent_id = waiting.pop()
        for child in children[parent_id]:
            depth[child.span_id] = depth[parent_id] + 1
            parents_first.append(child)
            waiting.append(child.span_id)
    if len(parents_first) < len(spans):
        circular = next(span for span in spans.values() if span.span_id not in depth)
        raise ScheduleError(
            f"span {circular.span_id} of trace {circular.trace_id} has no root: its parents form a circle"
        )

    due_ns = {span.span_id: span.start_ns for span in parents_first}
    for span in reversed(parents_first):
        if span.parent_id:
            due_ns[span.parent_id] = min(due_ns[span.parent_id], due_ns[span.span_id])

    events: list[tuple[str, Event]] = []
    for span in parents_first:
        parent = spans[span.parent_id] if span.parent_id else None
        caller = parent.pod if parent is not None and parent.pod != span.pod else None
        begin = OrderKey(
            due_ns[span.span_id],
            Phase.BEGIN,
            depth[span.span_id],
            span.span_id,
            span.trace_id,
            Step.START_SPAN,
            span.pod,
        )
        finish = OrderKey(
            span.end_ns,
            Phase.FINISH,
            span.start_ns,
            span.span_id,
            span.trace_id,
            Step.END_SPAN,
            span.pod,
        )
        events.append((span.pod, StartSpan(begin, span, caller)))
        events.append((span.pod, EndSpan(finish, span, caller)))
        if caller is not None:
            events.append(
                (
                    caller,
                    SendContext(begin._replace(step=Step.SEND_CONTEXT, pod=caller), span, span.pod),
                )
            )
            events.append(
                (
                    caller,
                    ReceiveResponse(
                        finish._replace(step=Step.RECEIVE_RESPONSE, pod=caller), span, span.pod
                    ),
                )
            )

    # Every start is followed by its end, and every sending by a receiving, so the last event
    # of a pod is always one of Phase.FINISH, and the close that takes its place comes after all.
    last: dict[str, OrderKey] = {}
    for pod, event in events:
        last[pod] = max(last.get(pod, event.key), event.key)
    for pod, key in last.items():
        events.append((pod, CloseTrace(key._replace(step=Step.CLOSE_TRACE), key.trace_id)))
    return events


def build_schedule(spans: Iterable[Span]) -> Schedule:
    """The schedule that replays ``spans``; a pure function of the set of spans.

    Raises ScheduleError for a span that is there twice, ends before it starts, or has no root,
    and if there are no spans.
    """
    traces: defaultdict[str, dict[str, Span]] = defaultdict(dict)
    for span in spans:
        if span.span_id in traces[span.trace_id]:
            raise ScheduleError(f"span {span.span_id} of trace {span.trace_id} is there twice")
        traces[span.trace_id][span.span_id] = span
    if not traces:
        raise ScheduleError("the recording holds no span")
    pods: defaultdict[str, list[Event]] = defaultdict(list)
    for trace in traces.values():
        for pod, event in _trace_events(trace):
            pods[pod].append(event)
    for events in pods.values():
        events.sort(key=lambda event: event.key)
    return Schedule(
        pods={pod: tuple(pods[pod]) for pod in sorted(pods)},
        first_ns=min(events[0].key.time_ns for events in pods.values()),
        last_ns=max(events[-1].key.time_ns for events in pods.values()),
        trace_count=len(traces),
        span_count=sum(map(len, traces.values())),
    )
