# SPDX-License-Identifier: Apache-2.0
"""The order in which the coordinator says what it decided, and what waits for the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.coordinator import CoordinatorConfig
from coordinator.core.credit import ADVANCE_BYTES, QUANTUM_BYTES, Credit
from coordinator.core.outbox import WAITING_MAX, Outbox
from protocol.messages import (
    Collect,
    CoordinatorMessage,
    Drop,
    Group,
    Refused,
    Release,
    SliceAck,
    SliceReply,
    TraceId,
    TriggerAck,
)
from protocol.versions import OURS, Feature
from tests.unit.coordinator_harness import Harness, S, trace_id

FIRST, SECOND = TraceId(bytes(16)), TraceId(bytes(15) + b"\x01")
GROUP = Group("edge", FIRST)
MIB = 1 << 20


def trace(number: int) -> TraceId:
    return TraceId(number.to_bytes(16, "big"))


def test_what_is_asked_for_after_a_drop_is_said_after_it() -> None:
    outbox = Outbox()
    outbox.collect(1, GROUP, FIRST)
    outbox.say(1, Drop(GROUP))
    outbox.collect(1, GROUP, SECOND)
    said = [Collect(GROUP, (FIRST,)), Drop(GROUP), Collect(GROUP, (SECOND,))]
    assert outbox.take_control(0) == [(1, said)]


@pytest.mark.parametrize("hurried", [Drop(GROUP), Refused("why"), None])
def test_what_nobody_waits_for_goes_with_what_somebody_does(
    hurried: CoordinatorMessage | None,
) -> None:
    outbox = Outbox(patience_ns=100)
    waiting: list[CoordinatorMessage] = [TriggerAck(GROUP), Release(FIRST)]
    for message in waiting:
        outbox.say(1, message, hurried=False)
    assert outbox.take_control(0) == []
    assert outbox.next_ns() == 100
    if hurried is not None:
        outbox.say(1, hurried)
        said: list[CoordinatorMessage] = [*waiting, hurried]
    else:
        outbox.collect(1, GROUP, FIRST)
        said = [*waiting, Collect(GROUP, (FIRST,))]
    assert outbox.take_control(99) == [(1, said)]
    assert outbox.next_ns() is None
    assert outbox.take_control(1000) == []


def test_nobody_waits_for_longer_than_that() -> None:
    outbox = Outbox(patience_ns=100)
    outbox.say(1, Release(FIRST), hurried=False)
    assert outbox.take_control(0) == []
    outbox.say(2, Release(FIRST), hurried=False)
    outbox.say(1, Release(SECOND), hurried=False)
    assert outbox.take_control(50) == []
    assert outbox.next_ns() == 100
    assert outbox.take_control(100) == [(1, [Release(FIRST), Release(SECOND)])]
    assert outbox.next_ns() == 150
    assert outbox.take_control(150) == [(2, [Release(FIRST)])]


def test_who_is_gone_is_told_nothing() -> None:
    outbox, credit = Outbox(patience_ns=100), Credit(MIB, MIB)
    for number in (1, 2):
        outbox.say(number, Release(FIRST), hurried=False)
        outbox.ack(number, FIRST, 1, 10)
    assert (outbox.take_control(0), outbox.take_replies(credit, 0)) == ([], [])
    outbox.forget_session(1)
    outbox.forget_stream(1)
    assert outbox.take_control(100) == [(2, [Release(FIRST)])]
    assert outbox.take_replies(credit, 100) == [(2, SliceReply((SliceAck(FIRST, 10, 1),)))]
    assert outbox.next_ns() is None


def test_much_for_one_node_waits_no_longer() -> None:
    outbox, credit = Outbox(patience_ns=100), Credit(MIB, MIB)
    for number in range(WAITING_MAX - 1):
        outbox.say(1, Release(trace(number)), hurried=False)
        outbox.ack(1, trace(number), 1, 10)
    assert (outbox.take_control(0), outbox.take_replies(credit, 0)) == ([], [])
    outbox.say(1, Release(trace(WAITING_MAX)), hurried=False)
    outbox.ack(1, trace(WAITING_MAX), 1, 10)
    ((_, said),) = outbox.take_control(0)
    ((_, reply),) = outbox.take_replies(credit, 0)
    assert (len(said), len(reply.acks)) == (WAITING_MAX, WAITING_MAX)


def test_a_node_that_must_go_on_from_elsewhere_is_told_so_at_once() -> None:
    outbox, credit = Outbox(patience_ns=100), Credit(MIB, MIB)
    outbox.ack(1, FIRST, 1, 10)
    assert outbox.take_replies(credit, 0) == []
    outbox.ack(1, SECOND, 1, 20, hurried=True)
    acks = (SliceAck(FIRST, 10, 1), SliceAck(SECOND, 20, 1))
    assert outbox.take_replies(credit, 0) == [(1, SliceReply(acks))]


def test_credit_waits_while_a_node_has_enough() -> None:
    outbox, credit = Outbox(patience_ns=100), Credit(MIB, MIB)
    credit.open(1)
    assert outbox.take_replies(credit, 0) == [(1, SliceReply((), ADVANCE_BYTES))]
    eighth = ADVANCE_BYTES // 8
    assert credit.arrived(1, eighth)
    credit.top_up(1)
    outbox.ack(1, FIRST, 1, eighth)
    assert outbox.take_replies(credit, 0) == []
    assert credit.arrived(1, eighth + 1)
    credit.top_up(1)
    acks = (SliceAck(FIRST, eighth, 1),)
    assert outbox.take_replies(credit, 0) == [(1, SliceReply(acks, 2 * eighth + 1))]
    assert outbox.next_ns() is None


def test_credit_does_not_wait_for_who_has_more_to_send() -> None:
    outbox, credit = Outbox(patience_ns=100), Credit(MIB, MIB)
    credit.open(1)
    outbox.take_replies(credit, 0)
    eighth = ADVANCE_BYTES // 8
    assert credit.arrived(1, eighth)
    credit.demand(1, 2 * eighth)
    assert not credit.hurries(1)
    assert outbox.take_replies(credit, 0) == []
    credit.demand(1, 4 * ADVANCE_BYTES)
    assert credit.hurries(1)
    ((_, reply),) = outbox.take_replies(credit, 0)
    assert reply.credit_bytes == QUANTUM_BYTES + eighth


def test_who_knows_nothing_of_late_acks_has_none() -> None:
    harness = Harness(CoordinatorConfig(), patience_ns=5 * S)
    old = replace(OURS, features=OURS.features & ~Feature.LATE_ACKS)
    harness.connect("n1", versions=old)
    harness.open_slices("n1")
    harness.replied.clear()
    harness.take_said()
    trace = trace_id("T")
    harness.fire("n1", trace)
    assert harness.take_said() == [("n1", TriggerAck(Group("lat", trace)))]
    harness.status("n1", trace, 100)
    harness.send("n1", trace, 0, bytes(100))
    assert harness.replied == [("n1", SliceReply((SliceAck(trace, 100, 1),)))]


def test_a_trace_is_acknowledged_with_what_comes_next() -> None:
    harness = Harness(CoordinatorConfig(), patience_ns=5 * S)
    harness.cluster("n1", "n2")
    harness.take_said()
    harness.replied.clear()
    first, second = trace_id("T"), trace_id("U")
    harness.fire("n1", first)
    harness.status("n1", first, 100)
    harness.send("n1", first, 0, bytes(100))
    assert [m for n, m in harness.take_said() if n == "n1"] == []
    harness.fire("n2", second)
    harness.status("n2", second, 100, crumbs=["n1"])
    said = [m for n, m in harness.take_said() if n == "n1"]
    assert said == [TriggerAck(Group("lat", first)), Collect(Group("lat", second), (second,))]
    assert harness.replied == []
    harness.wait(5 * S)
    assert harness.replied == [("n1", SliceReply((SliceAck(first, 100, 1),)))]


def test_a_gap_is_told_at_once() -> None:
    harness = Harness(CoordinatorConfig(), patience_ns=5 * S)
    harness.cluster("n1")
    trace = trace_id("T")
    harness.fire("n1", trace)
    harness.replied.clear()
    harness.send("n1", trace, 50, bytes(10))
    assert harness.replied == [("n1", SliceReply((SliceAck(trace, 0, 1, again=True),)))]


def test_of_two_acks_that_wait_both_hold() -> None:
    outbox, credit = Outbox(patience_ns=100), Credit(MIB, MIB)
    outbox.ack(1, FIRST, 1, 30)
    outbox.ack(1, FIRST, 1, 20)
    outbox.ack(1, SECOND, 1, 20, again=True)
    outbox.ack(1, SECOND, 1, 30)
    acks = (SliceAck(FIRST, 30, 1), SliceAck(SECOND, 30, 1, again=True))
    assert outbox.take_replies(credit, 0) == [(1, SliceReply(acks))]
