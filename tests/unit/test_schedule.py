# SPDX-License-Identifier: Apache-2.0
"""The replay schedule: complete, in one total order, free of deadlock, and in the latency rule's order."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checker.recording import read_recording
from tests.checker.rule import Window, firing_spans, read_parameters
from tests.replay.schedule import (
    CloseTrace,
    EndSpan,
    Event,
    ReceiveResponse,
    Schedule,
    ScheduleError,
    SendContext,
    Span,
    StartSpan,
    build_schedule,
    read_spans,
)

DATA = Path(__file__).parent.parent / "data" / "nezha"
FILES = (
    "onlineboutique-cartservice-cpu-contention",
    "onlineboutique-cartservice-network-delay",
    "onlineboutique-normal",
    "trainticket-normal",
)
# (traces, spans, pods, hops between pods, spans whose scheduled start is before their recorded one)
GOLDEN = {
    "onlineboutique-cartservice-cpu-contention": (497, 23292, 10, 5574, 7),
    "onlineboutique-cartservice-network-delay": (479, 22164, 10, 5324, 32),
    "onlineboutique-normal": (502, 22969, 10, 5525, 8),
    "trainticket-normal": (71, 4890, 25, 783, 0),
}


@cache
def schedule_of(name: str) -> Schedule:
    return build_schedule(read_spans(DATA / f"{name}.csv.xz"))


def all_events(schedule: Schedule) -> Iterator[tuple[str, Event]]:
    for pod, events in schedule.pods.items():
        for event in events:
            yield pod, event


class Deadlock(Exception):
    pass


def run(schedule: Schedule, choose: Callable[[list[str]], str]) -> int:
    """Carries out all pods' events with mailboxes; ``choose`` picks who may go next. Returns the number of events.

    A pod goes on until it waits for a message that is not there. Checks what a worker relies on along the way.
    """
    position = dict.fromkeys(schedule.pods, 0)
    mail: set[tuple[str, str, str, str]] = set()
    opened: Counter[tuple[str, str]] = Counter()
    outstanding: Counter[tuple[str, str]] = Counter()
    closed: set[tuple[str, str]] = set()
    started: set[tuple[str, str]] = set()
    done = 0

    def wait(name: tuple[str, str, str, str]) -> bool:
        if name not in mail:
            return False
        mail.remove(name)
        return True

    def carry_out(pod: str, event: Event) -> bool:
        trace_id = event.trace_id if isinstance(event, CloseTrace) else event.span.trace_id
        here = (pod, trace_id)
        assert here not in closed
        match event:
            case StartSpan(span=span, receive_from=sender):
                if sender is not None and not wait((pod, "context", trace_id, span.span_id)):
                    return False
                if span.parent_id:
                    assert (trace_id, span.parent_id) in started
                started.add((trace_id, span.span_id))
                opened[here] += 1
            case SendContext(span=span, to=to):
                assert (trace_id, span.parent_id) in started
                mail.add((to, "context", trace_id, span.span_id))
                outstanding[here] += 1
            case EndSpan(span=span, respond_to=to):
                opened[here] -= 1
                if to is not None:
                    mail.add((to, "response", trace_id, span.span_id))
            case ReceiveResponse(span=span):
                if not wait((pod, "response", trace_id, span.span_id)):
                    return False
                outstanding[here] -= 1
            case CloseTrace():
                assert opened[here] == 0
                assert outstanding[here] == 0
                closed.add(here)
        return True

    able = list(schedule.pods)
    while able:
        pod = choose(able)
        events = schedule.pods[pod]
        if position[pod] < len(events) and carry_out(pod, events[position[pod]]):
            position[pod] += 1
            done += 1
            # What it did may have been what another waits for.
            if len(able) < len(schedule.pods) and isinstance(
                events[position[pod] - 1], SendContext | EndSpan
            ):
                able = [name for name in schedule.pods if position[name] < len(schedule.pods[name])]
        else:
            able.remove(pod)
    stuck = {
        pod: schedule.pods[pod][at] for pod, at in position.items() if at < len(schedule.pods[pod])
    }
    if stuck:
        raise Deadlock(stuck)
    assert not mail
    assert closed == set(opened)
    return done


def check_order(schedule: Schedule) -> None:
    """Keys are unique and sorted, and whatever is waited for has the strictly smaller key."""
    keys = [event.key for _, event in all_events(schedule)]
    assert len(set(keys)) == len(keys)
    sent: dict[tuple[str, str, str, str, str], Event] = {}
    starts: dict[tuple[str, str], StartSpan] = {}
    for pod, event in all_events(schedule):
        assert event.key.pod == pod
        match event:
            case SendContext(span=span, to=to):
                sent["context", pod, to, span.trace_id, span.span_id] = event
            case EndSpan(span=span, respond_to=str(to)):
                sent["response", pod, to, span.trace_id, span.span_id] = event
        if isinstance(event, StartSpan):
            starts[event.span.trace_id, event.span.span_id] = event
    received = 0
    for pod, event in all_events(schedule):
        match event:
            case StartSpan(span=span, receive_from=str(sender)):
                assert sent["context", sender, pod, span.trace_id, span.span_id].key < event.key
                received += 1
            case ReceiveResponse(span=span, sender=sender):
                assert sent["response", sender, pod, span.trace_id, span.span_id].key < event.key
                received += 1
            case EndSpan(span=span):
                assert starts[span.trace_id, span.span_id].key < event.key
        if isinstance(event, StartSpan | SendContext) and event.span.parent_id:
            assert starts[event.span.trace_id, event.span.parent_id].key < event.key
    assert received == len(sent)
    for events in schedule.pods.values():
        assert all(one.key < other.key for one, other in pairwise(events))
        ended = [event.span for event in events if isinstance(event, EndSpan)]
        assert ended == sorted(
            ended, key=lambda span: (span.end_ns, span.start_ns, span.span_id, span.trace_id)
        )


@pytest.mark.parametrize("name", FILES)
def test_golden_counts(name: str) -> None:
    schedule = schedule_of(name)
    traces, spans, pods, hops, early = GOLDEN[name]
    kinds = Counter(type(event) for _, event in all_events(schedule))
    assert (schedule.trace_count, schedule.span_count, len(schedule.pods)) == (traces, spans, pods)
    assert kinds[StartSpan] == kinds[EndSpan] == spans
    assert kinds[SendContext] == kinds[ReceiveResponse] == hops
    visits = {
        (pod, event.span.trace_id)
        for pod, event in all_events(schedule)
        if isinstance(event, StartSpan)
    }
    assert kinds[CloseTrace] == len(visits)
    moved = [
        event
        for _, event in all_events(schedule)
        if isinstance(event, StartSpan) and event.key.time_ns != event.span.start_ns
    ]
    assert all(event.key.time_ns < event.span.start_ns for event in moved)
    # Each early child moves its ancestors, so more spans are moved than were early.
    assert (len(moved) >= early) and bool(moved) == bool(early)
    assert early == sum(
        event.span.start_ns < starts[event.span.trace_id, event.span.parent_id].span.start_ns
        for starts in [
            {
                (e.span.trace_id, e.span.span_id): e
                for _, e in all_events(schedule)
                if isinstance(e, StartSpan)
            }
        ]
        for event in starts.values()
        if event.span.parent_id
    )


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_is_what_was_recorded(name: str) -> None:
    recorded = read_recording(DATA / f"{name}.csv.xz")
    seen = 0
    for pod, event in all_events(schedule_of(name)):
        if isinstance(event, StartSpan | EndSpan):
            want = recorded[event.span.trace_id][event.span.span_id]
            assert pod == want.pod
            assert asdict(event.span) == asdict(want)
            seen += 1
    assert seen == 2 * sum(map(len, recorded.values()))


@pytest.mark.parametrize("name", FILES)
def test_one_total_order(name: str) -> None:
    check_order(schedule_of(name))


@pytest.mark.parametrize("name", FILES)
def test_no_interleaving_deadlocks(name: str) -> None:
    schedule = schedule_of(name)
    total = sum(map(len, schedule.pods.values()))
    for seed in range(3):
        assert run(schedule, random.Random(seed).choice) == total
    # The unfairest schedulers: always the first pod that can, always the last.
    assert run(schedule, lambda able: able[0]) == total
    assert run(schedule, lambda able: able[-1]) == total


@pytest.mark.parametrize("name", FILES)
def test_the_pods_see_spans_in_the_order_of_the_rule(name: str) -> None:
    path = DATA / f"{name}.csv.xz"
    parameters = read_parameters(DATA / "rules.json", path)
    fired = set()
    for events in schedule_of(name).pods.values():
        windows: defaultdict[str, Window] = defaultdict(lambda: Window(parameters))
        for event in events:
            if isinstance(event, EndSpan) and windows[event.span.operation].present(
                event.span.end_ns - event.span.start_ns
            ):
                fired.add(event.span.span_id)
    spans = (span for trace in read_recording(path).values() for span in trace.values())
    assert fired == {span.span_id for span in firing_spans(spans, parameters)}
    assert fired


def span(name: str, parent: str, pod: str, start_ns: int, end_ns: int, trace: str = "t") -> Span:
    return Span(trace, name, parent, pod, "op", start_ns, end_ns, (end_ns - start_ns) // 1000)


def test_skewed_child_moves_its_ancestors_but_not_what_is_written() -> None:
    schedule = build_schedule(
        [span("a", "", "p", 100, 200), span("b", "a", "q", 110, 150), span("c", "b", "r", 90, 120)]
    )
    starts = {
        event.span.span_id: event
        for _, event in all_events(schedule)
        if isinstance(event, StartSpan)
    }
    assert {name: event.key.time_ns for name, event in starts.items()} == {
        "a": 90,
        "b": 90,
        "c": 90,
    }
    assert {name: event.span.start_ns for name, event in starts.items()} == {
        "a": 100,
        "b": 110,
        "c": 90,
    }
    ends = {
        event.span.span_id: event.key.time_ns
        for _, event in all_events(schedule)
        if isinstance(event, EndSpan)
    }
    assert ends == {"a": 200, "b": 150, "c": 120}
    assert (schedule.first_ns, schedule.last_ns) == (90, 200)


def test_trace_is_closed_when_the_last_response_has_come() -> None:
    # The child ends after its caller, and another span of the trace starts in the caller's pod later still.
    schedule = build_schedule(
        [
            span("a", "", "p", 0, 50),
            span("b", "a", "q", 10, 80),
            span("c", "b", "p", 60, 70),
        ]
    )
    assert [(type(event), event.key.time_ns) for event in schedule.pods["p"]] == [
        (StartSpan, 0),
        (SendContext, 10),
        (EndSpan, 50),
        (StartSpan, 60),
        (EndSpan, 70),
        (ReceiveResponse, 80),
        (CloseTrace, 80),
    ]
    assert [(type(event), event.key.time_ns) for event in schedule.pods["q"]] == [
        (StartSpan, 10),
        (SendContext, 60),
        (ReceiveResponse, 70),
        (EndSpan, 80),
        (CloseTrace, 80),
    ]


def test_a_wrong_order_would_deadlock() -> None:
    """The simulation can fail: two pods that each wait for the other before they send."""
    schedule = build_schedule(
        [
            span("a", "", "p", 0, 9, "t"),
            span("b", "a", "q", 1, 8, "t"),
            span("c", "", "q", 0, 9, "u"),
            span("d", "c", "p", 1, 8, "u"),
        ]
    )
    swapped = {
        pod: tuple(
            sorted(
                events,
                key=lambda event: (
                    not (isinstance(event, StartSpan) and event.receive_from),
                    event.key,
                ),
            )
        )
        for pod, events in schedule.pods.items()
    }
    broken = Schedule(
        swapped, schedule.first_ns, schedule.last_ns, schedule.trace_count, schedule.span_count
    )
    with pytest.raises(Deadlock):
        run(broken, random.Random(0).choice)


@st.composite
def recordings(draw: st.DrawFn) -> list[Span]:
    """Trees on a few pods, with times so close that ties, skew and late children are common."""
    spans = []
    for trace in draw(st.lists(st.sampled_from("tuv"), min_size=1, max_size=3, unique=True)):
        for index in range(draw(st.integers(1, 8))):
            parent = f"{draw(st.integers(0, index - 1)):x}" if index else ""
            start = draw(st.integers(0, 6))
            spans.append(
                span(
                    f"{index:x}",
                    parent,
                    draw(st.sampled_from("pqr")),
                    start,
                    start + draw(st.integers(0, 4)),
                    trace,
                )
            )
    return spans


@settings(deadline=None)
@given(recordings(), st.randoms(use_true_random=False))
def test_any_recording_has_a_replay(spans: list[Span], randomness: random.Random) -> None:
    schedule = build_schedule(spans)
    check_order(schedule)
    assert run(schedule, randomness.choice) == sum(map(len, schedule.pods.values()))
    shuffled = list(spans)
    randomness.shuffle(shuffled)
    assert build_schedule(shuffled) == schedule


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([], "no span"),
        ([span("a", "", "p", 2, 1)], "ends before it starts"),
        ([span("a", "", "p", 1, 2), span("a", "", "p", 1, 2)], "twice"),
        ([span("a", "x", "p", 1, 2)], "parent x, which is not in the recording"),
        (
            [span("r", "", "p", 1, 2), span("a", "b", "p", 1, 2), span("b", "a", "p", 1, 2)],
            "circle",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(spans: list[Span], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        build_schedule(spans)


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ScheduleError, match=r"other\.csv: no recording"):
        read_spans(other)
