# SPDX-License-Identifier: Apache-2.0
"""Compares the collected traces with the recording, span by span, and draws the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tests.checker.captured import Captured, CapturedSpan, CapturedTrace
from tests.checker.recording import RecordedSpan

TRIGGER = "latency"
# What the project promises of the collected traces.
_WANTED_SHARE = 0.99

Recording = Mapping[str, Mapping[str, RecordedSpan]]


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which a collected trace is not the file's.

    ``kind`` is one of README.md's table; ``span_id`` is empty if it is of the trace.
    """

    kind: str
    span_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class TraceResult:
    """``verdict`` is the coordinator's, "none" if it showed no such trace; ``complete`` is the checker's."""

    selected: bool
    collected: bool
    verdict: str
    complete: bool
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The fields of README.md's table; shares are between 0 and 1."""

    requests: int
    spans: int
    selected: int
    selected_share: float
    selected_span_share: float
    collected: int
    recall: float
    missing: tuple[str, ...]
    not_selected: tuple[str, ...]
    without_latency_trigger: tuple[str, ...]
    coherent_by_checker: float | None
    false_coherent: int
    false_incoherent: int
    verdicts: dict[str, int]
    excused: tuple[str, ...]
    per_trace: dict[str, TraceResult]
    failures: tuple[str, ...]
    ok: bool


def _same_integer(value: object, wanted: int) -> bool:
    """Attribute values come as the client library typed them: a JSON integer, or text of one."""
    return (
        not isinstance(value, bool) and isinstance(value, int | str) and str(value) == str(wanted)
    )


def _span_differences(span: CapturedSpan, recorded: RecordedSpan) -> list[Difference]:
    found = []

    def differ(kind: str, got: object, want: object) -> None:
        found.append(Difference(kind, span.span_id, f"is {got!r}, in the file {want!r}"))

    for kind, got, want in (
        ("parent", span.parent_id, recorded.parent_id),
        ("node", span.node, recorded.pod),
        ("operation", span.name, recorded.operation),
        ("start", span.start_ns, recorded.start_ns),
    ):
        if got != want:
            differ(kind, got, want)
    if span.unfinished or span.end_ns is None:
        # Cut off before its end, where attributes are written: they say nothing more.
        differ("unfinished", span.end_ns, recorded.end_ns)
        return found
    if span.end_ns != recorded.end_ns:
        differ("end", span.end_ns, recorded.end_ns)
    if span.pod != recorded.pod:
        differ("attribute", {"pod": span.pod}, {"pod": recorded.pod})
    if not _same_integer(span.duration_us, recorded.duration_us):
        differ(
            "attribute", {"duration_us": span.duration_us}, {"duration_us": recorded.duration_us}
        )
    return found


def compare(
    trace: CapturedTrace | None, recorded: Mapping[str, RecordedSpan] | None
) -> tuple[Difference, ...]:
    """All differences of one collected trace (None: listed, never shown) from the file's (None: not in the file)."""
    found = []
    if trace is None:
        found.append(Difference("not_shown", "", "listed by the coordinator, never shown"))
    if recorded is None:
        found.append(Difference("unknown_trace", "", "the file has no such trace"))
    if trace is None or recorded is None:
        return tuple(found)
    times_seen = Counter(span.span_id for span in trace.spans)
    for span in trace.spans:
        if span.span_id in recorded:
            found += _span_differences(span, recorded[span.span_id])
        else:
            found.append(
                Difference(
                    "extra_span", span.span_id, f"{span.name} on {span.node} is not in the file"
                )
            )
    for span_id, count in times_seen.items():
        if count > 1:
            found.append(Difference("duplicate_span", span_id, f"collected {count} times"))
    for span_id, wanted in recorded.items():
        if span_id not in times_seen:
            found.append(
                Difference(
                    "missing_span", span_id, f"{wanted.operation} on {wanted.pod} was not collected"
                )
            )
    if trace.span_count != len(trace.spans):
        found.append(
            Difference("span_count", "", f"says {trace.span_count}, shows {len(trace.spans)}")
        )
    return tuple(found)


def selected_span_share(recording: Recording, selected: frozenset[str]) -> float:
    """The selected traces' share of the file's spans."""
    return sum(len(recording[trace_id]) for trace_id in selected) / sum(
        map(len, recording.values())
    )


def judge(
    recording: Recording,
    selected: frozenset[str],
    captured: Captured,
    *,
    overwritten: frozenset[str] = frozenset(),
    allow_false_incoherent: bool = False,
) -> Result:
    """Judges what was captured.

    ``selected`` are the traces on which the rule fires, ``overwritten`` those that lost bytes.
    """
    collected = captured.listed | captured.shown.keys()
    per_trace = {}
    for trace_id in sorted(collected | selected):
        shown = captured.shown.get(trace_id)
        differences = compare(shown, recording.get(trace_id)) if trace_id in collected else ()
        per_trace[trace_id] = TraceResult(
            selected=trace_id in selected,
            collected=trace_id in collected,
            verdict=shown.verdict if shown else "none",
            complete=trace_id in collected and not differences,
            differences=differences,
        )
    complete = {trace_id for trace_id, trace in per_trace.items() if trace.complete}
    coherent = {
        trace_id for trace_id, trace in captured.shown.items() if trace.verdict == "coherent"
    }
    excused = overwritten & (per_trace.keys() - complete)

    wanted = selected - (excused - collected)
    missing = wanted - collected
    recall = 1 - len(missing) / len(wanted) if wanted else 1.0
    judged = collected - excused
    complete_share = len(complete) / len(judged) if judged else None
    false_coherent = coherent - complete
    false_incoherent = complete - coherent

    failures = []
    if missing:
        failures.append(
            f"recall: {len(missing)} of {len(wanted)} selected traces were not collected"
        )
    if false_coherent:
        failures.append(
            f"false_coherent: {len(false_coherent)} traces are called coherent and are not complete"
        )
    if complete_share is not None and complete_share < _WANTED_SHARE:
        failures.append(
            f"coherent_by_checker: {complete_share:.2%} of the collected traces are complete, "
            f"want {_WANTED_SHARE:.0%}"
        )
    if len(complete & coherent) < _WANTED_SHARE * len(complete) and not allow_false_incoherent:
        failures.append(
            f"false_incoherent: {len(false_incoherent)} of {len(complete)} complete traces are not called coherent"
        )
    return Result(
        requests=len(recording),
        spans=sum(map(len, recording.values())),
        selected=len(selected),
        selected_share=len(selected) / len(recording),
        selected_span_share=selected_span_share(recording, selected),
        collected=len(collected),
        recall=recall,
        missing=tuple(sorted(missing)),
        not_selected=tuple(sorted(collected - selected)),
        without_latency_trigger=tuple(
            sorted(
                trace_id
                for trace_id, trace in captured.shown.items()
                if trace_id in selected and TRIGGER not in trace.triggers
            )
        ),
        coherent_by_checker=complete_share,
        false_coherent=len(false_coherent),
        false_incoherent=len(false_incoherent),
        verdicts=dict(
            sorted(Counter(per_trace[trace_id].verdict for trace_id in collected).items())
        ),
        excused=tuple(sorted(excused)),
        per_trace=per_trace,
        failures=tuple(failures),
        ok=not failures,
    )
