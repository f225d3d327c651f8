# SPDX-License-Identifier: Apache-2.0
"""Clock offsets from probes: within the stated error, best of the last, and steps are seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.clock import DRIFT_PPM, OFFSET_NS_MAX, PROBES_AT_CONNECT, SAMPLES, ClockFilter
from protocol.messages import CLOCK_STEPPED, ClockProbe, ClockReply, Hello
from tests.unit.coordinator_harness import MS, REAL_NS, Harness, S, trace_id

US = 1000


def exchange(
    clock: ClockFilter,
    *,
    offset_ns: int,
    there_ns: int,
    back_ns: int,
    now_ns: int = 0,
    busy_ns: int = 0,
) -> bool:
    """One probe over a path of known delays, to a clock of known offset."""
    number = clock.probe(now_ns)
    received_ns = REAL_NS + now_ns + there_ns + offset_ns
    end_ns = now_ns + there_ns + busy_ns + back_ns
    return clock.answer(number, received_ns, received_ns + busy_ns, end_ns, REAL_NS + end_ns)


@given(
    offset_ns=st.integers(-(10**12), 10**12),
    delays=st.lists(
        st.tuples(st.integers(0, 50 * MS), st.integers(0, 50 * MS), st.integers(0, 10 * MS)),
        min_size=1,
        max_size=12,
    ),
)
def test_the_truth_is_within_the_error(offset_ns: int, delays: list[tuple[int, int, int]]) -> None:
    clock = ClockFilter()
    now_ns = 0
    for there_ns, back_ns, busy_ns in delays:
        assert exchange(
            clock,
            offset_ns=offset_ns,
            there_ns=there_ns,
            back_ns=back_ns,
            busy_ns=busy_ns,
            now_ns=now_ns,
        )
        now_ns += S
        estimate = clock.estimate(now_ns)
        assert estimate is not None
        assert abs(estimate.offset_ns - offset_ns) <= estimate.error_ns
    # The best of the last few counts, and what it lost by age.
    best = min((there + back) // 2 + 1 for there, back, _ in delays[-SAMPLES:])
    estimate = clock.estimate(now_ns)
    assert estimate is not None
    assert estimate.error_ns <= best + SAMPLES * S * DRIFT_PPM // 10**6 + 1


def test_a_queue_spoils_one_sample_and_not_the_estimate() -> None:
    clock = ClockFilter()
    exchange(clock, offset_ns=7 * MS, there_ns=100 * US, back_ns=100 * US)
    exchange(clock, offset_ns=7 * MS, there_ns=90 * MS, back_ns=100 * US, now_ns=S)
    estimate = clock.estimate(S + 200 * US)  # the first one is a second old
    assert estimate is not None
    assert (estimate.offset_ns, estimate.error_ns) == (7 * MS, 100 * US + 1 + 15 * US)


def test_a_step_is_believed_at_once() -> None:
    clock = ClockFilter()
    for second in range(8):
        exchange(clock, offset_ns=0, there_ns=US, back_ns=US, now_ns=second * S)
    exchange(clock, offset_ns=5 * S, there_ns=300 * US, back_ns=300 * US, now_ns=9 * S)
    estimate = clock.estimate(9 * S)
    assert estimate is not None
    assert estimate.offset_ns == 5 * S


def test_a_step_of_the_coordinators_own_clock_during_a_probe_does_no_harm() -> None:
    clock = ClockFilter()
    number = clock.probe(0)
    # It left when real time read REAL_NS; then an hour was added.
    clock.answer(number, REAL_NS + MS, REAL_NS + MS, 2 * MS, REAL_NS + 3600 * S + 2 * MS)
    estimate = clock.estimate(2 * MS)
    assert estimate is not None
    assert estimate.offset_ns == -3600 * S


def test_answers_that_make_no_sense_are_refused() -> None:
    clock = ClockFilter()
    number = clock.probe(0)
    assert not clock.answer(number + 1, REAL_NS, REAL_NS, MS, REAL_NS)
    # Busy for longer than the whole round trip, and for less than nothing.
    assert not clock.answer(number, REAL_NS, REAL_NS + 2 * MS, MS, REAL_NS)
    number = clock.probe(0)
    assert not clock.answer(number, REAL_NS, REAL_NS - 1, MS, REAL_NS)
    number = clock.probe(0)
    assert clock.answer(number, REAL_NS, REAL_NS, MS, REAL_NS + MS)
    assert not clock.answer(number, REAL_NS, REAL_NS, MS, REAL_NS + MS), "answered twice"
    # So far from here is no clock, and no store takes it.
    number = clock.probe(0)
    assert not clock.answer(number, -(1 << 63), -(1 << 63), MS, REAL_NS + MS)


def test_a_clock_that_is_set_further_than_any_goes_is_not_believed() -> None:
    clock = ClockFilter()
    number = clock.probe(0)
    assert clock.answer(number, REAL_NS, REAL_NS, MS, REAL_NS + MS)
    assert clock.stepped(OFFSET_NS_MAX // 2)
    assert not clock.stepped((1 << 63) - 1)
    assert clock.estimate(0) is None


def probes(harness: Harness) -> list[int]:
    return [m.number for _, m in harness.take_said() if isinstance(m, ClockProbe)]


def test_probes_are_few() -> None:
    """A few at connect, one after the other, then one a minute."""
    harness = Harness()
    harness.connect("n1")
    seen = []
    while sent := probes(harness):
        (number,) = sent
        seen.append(number)
        harness.now_ns += MS
        real_ns = REAL_NS + harness.now_ns + 42 * MS
        harness.say("n1", ClockReply(number, real_ns, real_ns))
    assert len(seen) == PROBES_AT_CONNECT
    (node,) = harness.core.nodes(harness.now_ns)
    assert node.clock is not None
    assert abs(node.clock.offset_ns - 42 * MS) <= node.clock.error_ns
    harness.wait(600 * S)
    assert len(probes(harness)) == 10
    harness.lose("n1")
    harness.wait(600 * S)
    assert probes(harness) == []
    assert harness.core.next_wakeup_ns(harness.now_ns) is None


def test_a_status_is_stored_with_the_clock_of_its_node() -> None:
    harness = Harness()
    harness.autosave = False
    harness.connect("n1")
    (number,) = probes(harness)
    real_ns = REAL_NS + harness.now_ns + 7
    harness.say("n1", ClockReply(number, real_ns, real_ns))
    harness.fire("n1", trace_id("T"))
    harness.written.clear()
    harness.status("n1", trace_id("T"), 10)
    (write,) = harness.written
    clock = getattr(write.record, "clock", None)
    assert clock is not None
    assert clock.offset_ns == 7


@given(
    offset_ns=st.integers(-(10**12), 10**12),
    step_ns=st.integers(-(10**12), 10**12),
    told_wrong_ns=st.integers(-MS, MS),
    waits_ns=st.integers(0, 60 * S),
)
def test_the_truth_is_within_the_error_after_a_step(
    offset_ns: int, step_ns: int, told_wrong_ns: int, waits_ns: int
) -> None:
    clock = ClockFilter()
    exchange(clock, offset_ns=offset_ns, there_ns=300 * US, back_ns=100 * US)
    clock.stepped(step_ns + told_wrong_ns)
    estimate = clock.estimate(waits_ns)
    assert estimate is not None
    assert abs(estimate.offset_ns - offset_ns - step_ns) <= estimate.error_ns
    assert estimate.error_ns <= 2 * MS + waits_ns * DRIFT_PPM // 10**6


def test_an_answer_from_before_a_step_counts_no_more() -> None:
    clock = ClockFilter()
    exchange(clock, offset_ns=0, there_ns=US, back_ns=US)
    number = clock.probe(S)
    clock.stepped(3600 * S)
    assert not clock.answer(number, REAL_NS + S, REAL_NS + S, S + MS, REAL_NS + S)
    estimate = clock.estimate(2 * S)
    assert estimate is not None
    assert estimate.offset_ns == 3600 * S


def test_a_node_that_was_set_is_believed_and_asked_anew() -> None:
    harness = Harness()
    harness.connect("n1")
    real_ns = REAL_NS + harness.now_ns
    for _ in range(PROBES_AT_CONNECT):
        (number,) = probes(harness)
        harness.say("n1", ClockReply(number, real_ns, real_ns))
    harness.say("n1", ClockReply(CLOCK_STEPPED, real_ns, real_ns - 7200 * S))
    (view,) = harness.core.nodes(harness.now_ns)
    assert view.clock is not None
    assert view.clock.offset_ns == -7200 * S
    harness.wait(S)
    assert len(probes(harness)) == 1
    # However often it says so.
    for _ in range(100):
        harness.say("n1", ClockReply(CLOCK_STEPPED, real_ns, real_ns + S))
    harness.wait(S)
    assert len(probes(harness)) == 1


def test_nodes_are_listed_also_when_they_are_gone() -> None:
    harness = Harness()
    harness.connect("n2")
    harness.connect("n1")
    harness.lose("n2")
    harness.restart()
    harness.core.on_node_connected(50, Hello("n1", 1, ("10.0.0.9",)), "elsewhere", 0)
    views = harness.core.nodes(0)
    assert [(view.node, view.connected, view.addresses) for view in views] == [
        ("n1", True, ("10.0.0.9",)),
        ("n2", False, ("10.0.0.1",)),
    ]
    assert views[0].peer == "elsewhere"


def test_nothing_is_said_when_nothing_happens() -> None:
    """But for the clock probes: a trace costs what it costs, and then silence."""
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", trace_id("T"))
    harness.status("n1", trace_id("T"), 100, ["n2"], open_handles=1)
    harness.status("n2", trace_id("T"), 100, ["n1"], open_handles=1)
    harness.take_said()
    harness.replied.clear()
    harness.wait(250 * S)
    assert all(isinstance(message, ClockProbe) for _, message in harness.take_said())
    assert harness.replied == []
