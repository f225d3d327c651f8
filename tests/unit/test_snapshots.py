# SPDX-License-Identifier: Apache-2.0
"""The coordinator's part of a snapshot."""

from __future__ import annotations

import dataclasses

import pytest

from coordinator.core import snapshots
from coordinator.core.trace import Trace
from protocol.messages import SNAPSHOT_TRIGGER, Snapshot, SnapshotStatus
from tests.unit.coordinator_harness import Harness, S, trace_id

ORDER = Snapshot(0x1234, SNAPSHOT_TRIGGER, 30 * S, "shop")
TRIGGER = "snapshot.00001234"


def orders(harness: Harness) -> dict[str, Snapshot]:
    harness.fetch()
    return {name: m for name, m in harness.take_said() if isinstance(m, Snapshot)}


def rounds(harness: Harness) -> dict[str, int]:
    return {name: order.traces for name, order in orders(harness).items()}


def test_each_node_that_is_connected_is_asked() -> None:
    harness = Harness()
    for name in ("a", "b", "gone"):
        harness.connect(name)
    harness.lose("gone")
    state = harness.core.snapshots.start(ORDER, 1000, harness.now_ns)
    wanted = dataclasses.replace(ORDER, trigger=TRIGGER)
    assert orders(harness) == {"a": wanted, "b": wanted}
    assert (state.done, state.ended) == (0, False)
    harness.say("a", SnapshotStatus(0x1234, 10, 4, done=False))
    harness.say("a", SnapshotStatus(0x1234, 10, 10, done=True))
    harness.say("b", SnapshotStatus(0x9999, 1, 1, done=True))  # of no snapshot
    assert (state.done, state.ended) == (1, False)
    harness.say("b", SnapshotStatus(0x1234, 5, 2, done=True))
    assert (state.done, state.ended) == (2, True)
    assert [state.total(name) for name in ("found", "fired")] == [15, 12]


def test_a_round_begins_when_all_nodes_have_answered_for_the_last_and_the_bytes_are_those_of_all() -> (
    None
):
    harness = Harness()
    harness.cluster("a", "b")
    state = harness.core.snapshots.start(ORDER, 10_000, harness.now_ns)
    assert set(orders(harness)) == {"a", "b"}
    harness.say("a", SnapshotStatus(0x1234, 100, 0, done=False))
    assert rounds(harness) == {"a": 1}
    # a holds a little of it, and b much, which b has not said yet.
    first = trace_id("first")
    harness.fire("a", first, TRIGGER)
    harness.status("a", first, 10, ["b"])
    harness.say("a", SnapshotStatus(0x1234, 100, 1, done=False))
    harness.say("b", SnapshotStatus(0x1234, 100, 0, done=False))
    assert not rounds(harness)
    harness.status("b", first, 990)
    assert state.bytes == 1000
    # Nine more would fit, which two nodes share.
    assert rounds(harness) == {"a": 4, "b": 4}
    # The same trace by both is one.
    harness.fire("b", first, TRIGGER)
    big = trace_id("big")
    harness.fire("b", big, TRIGGER)
    harness.status("b", big, 9_500)
    harness.say("b", SnapshotStatus(0x1234, 100, 2, done=False))
    assert (state.bytes, len(state.traces)) == (10_500, 2)
    # That is enough: for the other one, too, as soon as it asks.
    assert rounds(harness) == {"b": 0}
    harness.say("a", SnapshotStatus(0x1234, 100, 5, done=False))
    assert rounds(harness) == {"a": 0}


def test_a_node_that_does_not_answer_holds_up_no_round_for_good() -> None:
    harness = Harness()
    harness.cluster("a", "b")
    harness.core.snapshots.start(ORDER, 10_000, harness.now_ns)
    orders(harness)
    harness.say("a", SnapshotStatus(0x1234, 100, 0, done=False))
    assert rounds(harness) == {"a": 1}
    harness.fire("a", trace_id("first"), TRIGGER)
    harness.status("a", trace_id("first"), 10, ["b"])
    harness.say("a", SnapshotStatus(0x1234, 100, 1, done=False))
    assert not rounds(harness)
    harness.wait(2 * S)
    assert rounds(harness) == {"a": 64}


def test_what_the_last_round_took_counts_though_nobody_waits_for_another() -> None:
    harness = Harness()
    harness.cluster("a")
    state = harness.core.snapshots.start(ORDER, 10_000, harness.now_ns)
    harness.say("a", SnapshotStatus(0x1234, 1, 0, done=False))
    harness.fire("a", trace_id("last"), TRIGGER)
    harness.say("a", SnapshotStatus(0x1234, 1, 1, done=True))
    assert state.bytes == 0
    harness.status("a", trace_id("last"), 700)
    assert (state.ended, state.bytes) == (True, 700)


def test_a_node_ends_what_a_coordinator_before_this_one_began() -> None:
    harness = Harness()
    harness.cluster("a")
    harness.say("a", SnapshotStatus(0x1234, 100, 7, done=False))
    assert orders(harness) == {"a": Snapshot(0x1234, TRIGGER, 0)}
    # Then it is done, and there is nothing to be said.
    harness.say("a", SnapshotStatus(0x1234, 100, 7, done=True))
    assert not orders(harness)


def test_what_waits_costs_no_message_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traces of a round are looked at once each, and not all of them at each message."""
    looked = 0

    def count(trace: Trace | None) -> bool:
        nonlocal looked
        looked += 1
        return is_answered(trace)

    is_answered = snapshots._is_answered
    monkeypatch.setattr(snapshots, "_is_answered", count)
    harness = Harness()
    names = [f"n{number}" for number in range(100)]
    harness.cluster(*names, "silent")
    state = harness.core.snapshots.start(ORDER, 10_000, harness.now_ns)
    for name in names:
        harness.say(name, SnapshotStatus(0x1234, 1, 0, done=False))
    for name in names:
        harness.fire(name, trace_id(name), TRIGGER)
        harness.say(name, SnapshotStatus(0x1234, 2, 1, done=False))
        harness.status(name, trace_id(name), 10, ["silent"])
    assert state.bytes == 0
    harness.wait(2 * S)
    assert state.bytes == 1000
    # At each message one, and at the end all.
    assert looked <= 3 * len(names) + len(names) + 10


def test_what_a_node_was_not_told_to_trigger_is_no_part_of_it() -> None:
    harness = Harness()
    harness.cluster("a", "liar")
    state = harness.core.snapshots.start(ORDER, 10_000, harness.now_ns)
    for number in range(3):
        harness.fire("liar", trace_id(f"early{number}"), TRIGGER)
    harness.say("liar", SnapshotStatus(0x1234, 100, 0, done=False))
    for number in range(3):
        harness.fire("liar", trace_id(f"lie{number}"), TRIGGER)
    assert state.traces == {trace_id("lie0")}


def test_one_of_very_many_traces_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.core.snapshots._TRACES_MAX", 2)
    harness = Harness()
    harness.cluster("a")
    harness.core.snapshots.start(ORDER, 10_000, harness.now_ns)
    orders(harness)
    told = []
    for number in range(3):
        harness.say("a", SnapshotStatus(0x1234, 100, number, done=False))
        told.append(rounds(harness)["a"])
        if told[-1]:
            harness.fire("a", trace_id(f"empty{number}"), TRIGGER)
            harness.status("a", trace_id(f"empty{number}"), held=False)
    assert told == [1, 64, 0]


def test_a_node_that_leaves_is_named_until_it_is_back() -> None:
    harness = Harness()
    harness.connect("a")
    harness.connect("b")
    state = harness.core.snapshots.start(ORDER, 1000, harness.now_ns)
    harness.say("b", SnapshotStatus(0x1234, 5, 5, done=True))
    harness.lose("a")
    harness.lose("b")
    assert list(state.lost.values()) == ["a"]
    assert state.ended
    harness.connect("a")
    orders(harness)
    harness.say("a", SnapshotStatus(0x1234, 5, 1, done=False))
    assert not state.lost
    assert not state.ended
    assert rounds(harness) == {"a": 1}


def test_a_node_that_came_back_is_told_to_go_on_when_it_asks() -> None:
    harness = Harness()
    harness.cluster("a", "b")
    harness.core.snapshots.start(ORDER, 10_000, harness.now_ns)
    first = trace_id("first")
    harness.say("a", SnapshotStatus(0x1234, 100, 0, done=False))
    harness.fire("a", first, TRIGGER)
    harness.status("a", first, 10, ["b"])
    for name in ("a", "b"):
        harness.say(name, SnapshotStatus(0x1234, 100, 1, done=False))
    harness.lose("a")
    harness.connect("a")
    orders(harness)
    harness.status("b", first, 10)
    assert set(rounds(harness)) == {"b"}
    harness.say("a", SnapshotStatus(0x1234, 100, 1, done=False))
    assert set(rounds(harness)) == {"a"}


def test_one_that_nobody_remembers_has_ended() -> None:
    harness = Harness()
    harness.connect("a")
    states = [
        harness.core.snapshots.start(
            dataclasses.replace(ORDER, number=number), 1000, harness.now_ns
        )
        for number in range(17)
    ]
    assert [state.ended for state in states] == [True, *[False] * 16]
    assert list(states[0].lost.values()) == ["a"]


def test_nobody_is_connected() -> None:
    harness = Harness()
    assert harness.core.snapshots.start(ORDER, 1000, harness.now_ns).ended


def test_nobody_waits_for_a_node_that_does_not_do_what_it_is_asked() -> None:
    harness = Harness()
    harness.cluster("a", "silent")
    state = harness.core.snapshots.start(ORDER, 10_000, harness.now_ns)
    harness.say("a", SnapshotStatus(0x1234, 0, 0, done=True))
    harness.wait(59 * S)
    assert not state.ended
    harness.wait(2 * S)
    assert state.ended
    assert list(state.lost.values()) == ["silent"]
    # It may still do it; then it may not stop in the middle either.
    harness.say("silent", SnapshotStatus(0x1234, 100, 0, done=False))
    assert not state.ended
    assert set(orders(harness)) == {"a", "silent"}
    harness.wait(61 * S)
    assert state.ended
    harness.say("silent", SnapshotStatus(0x1234, 100, 1, done=True))
    assert (state.done, state.lost) == (2, {})


def test_a_connection_that_is_replaced_takes_its_orders_with_it() -> None:
    harness = Harness()
    harness.cluster("a", "b")
    state = harness.core.snapshots.start(ORDER, 10_000, harness.now_ns)
    harness.say("b", SnapshotStatus(0x1234, 100, 0, done=False))
    orders(harness)
    # Nobody had noticed that the first one was gone.
    for name in ("a", "b"):
        harness.connect(name)
    assert state.ended
    assert orders(harness) == {}
    # Who has heard it says so, and goes on.
    harness.say("b", SnapshotStatus(0x1234, 100, 0, done=False))
    assert set(orders(harness)) == {"b"}
    harness.say("b", SnapshotStatus(0x1234, 100, 7, done=True))
    assert (state.done, state.ended, list(state.lost.values())) == (1, True, ["a"])
