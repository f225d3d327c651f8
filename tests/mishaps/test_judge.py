# SPDX-License-Identifier: Apache-2.0
"""The judge of ``make demo-probes``: it must see what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from tests.mishaps.judge import Firing, Happened, Row, Seen, in_flight, judge_quiet
from tests.mishaps.judge import judge as judge_seen
from tests.mishaps.orders import Asked

S = 1_000_000_000

ASKED = [
    Asked(1, "long-before", 0, 1 * S, 200),
    Asked(2, "struck", 10 * S, 12 * S, 200),
    Asked(3, "beside", 10 * S, 13 * S, 200),
    Asked(4, "after", 20 * S, 21 * S, 200),
]
BYSTANDER = Asked(1, "bystander", 10 * S, 15 * S, 200)
HAPPENED = Happened(
    "lock",
    "a lock is held",
    "kernel.lock_wait",
    "node-2",
    10 * S,
    11 * S,
    14 * S,
    untouched=(BYSTANDER,),
)
ALL = frozenset({"struck", "beside", "after", "long-before", "holder", "another", "hog"})
KNOWN = dataclasses.replace(HAPPENED, victims=frozenset({"struck"}), laterals=frozenset({"holder"}))


def firing(
    primary: str,
    *laterals: str,
    name: str = "kernel.lock_wait",
    node: str = "node-2",
    at_s: int = 12,
) -> Firing:
    return Firing(name, node, primary, frozenset(laterals), "waited", at_s * S)


def judge(
    happened: Happened,
    asked: Collection[Asked],
    firings: Iterable[Firing],
    collected: frozenset[str] = ALL,
) -> Row:
    return judge_seen(happened, asked, Seen(tuple(firings), collected))


def test_in_flight_is_who_was_under_way_or_had_just_ended() -> None:
    assert in_flight(ASKED, 11 * S, 14 * S) == {"struck", "beside"}
    assert in_flight(ASKED, 14 * S, 15 * S) == {"struck", "beside"}
    assert in_flight(ASKED, 16 * S, 20 * S) == {"after"}


def test_the_right_trace_with_the_right_lateral_is_right() -> None:
    row = judge(KNOWN, ASKED, [firing("struck", "holder", "another")])
    assert row.is_right
    assert (row.fired, row.node, row.latency_ms) == ("kernel.lock_wait", "node-2", 1000)
    assert (row.victim_right, row.lateral_right, row.innocent_triggered) == (True, True, 0)


def test_nothing_that_fires_is_wrong() -> None:
    row = judge(KNOWN, ASKED, [])
    assert (row.fired, row.is_right) == ("", False)


def test_what_fired_before_does_not_count() -> None:
    assert not judge(KNOWN, ASKED, [firing("struck", "holder", at_s=10)]).is_right


def test_another_node_is_wrong() -> None:
    assert not judge(KNOWN, ASKED, [firing("struck", "holder", node="node-3")]).is_right


def test_another_trigger_is_told_of_and_does_not_do() -> None:
    row = judge(KNOWN, ASKED, [firing("struck", "holder", name="kernel.run_queue")])
    assert (row.fired, len(row.others), row.innocent_triggered) == ("", 1, 0)


def test_another_trace_is_innocent() -> None:
    for innocent in ("beside", "after", "long-before", "nobody's"):
        row = judge(KNOWN, ASKED, [firing("struck", "holder"), firing(innocent)])
        assert (row.victim_right, row.innocent_triggered, row.is_right) == (True, 1, False)


def test_only_another_trace_is_no_victim() -> None:
    row = judge(KNOWN, ASKED, [firing("beside", "holder")])
    assert (row.victim_right, row.lateral_right, row.innocent_triggered) == (False, False, 1)


def test_a_lateral_that_is_missing_is_wrong() -> None:
    row = judge(KNOWN, ASKED, [firing("struck", "another")])
    assert (row.victim_right, row.lateral_right, row.is_right) == (True, False, False)


def test_where_nobody_is_known_whoever_was_in_flight_may_be_struck() -> None:
    assert judge(HAPPENED, ASKED, [firing("beside")]).is_right
    assert not judge(HAPPENED, ASKED, [firing("after", at_s=20)]).is_right


def test_who_broke_it_may_be_struck_too() -> None:
    happened = dataclasses.replace(HAPPENED, others=frozenset({"hog"}))
    row = judge(happened, ASKED, [firing("hog", at_s=11), firing("struck")])
    assert (row.victim, row.is_right) == ("struck", True)
    # But not alone.
    assert not judge(happened, ASKED, [firing("hog")]).is_right


def test_when_all_is_quiet_nothing_may_fire() -> None:
    assert judge_quiet("quiet", []).is_right
    assert not judge_quiet("quiet", [firing("struck")]).is_right


def test_an_order_that_was_not_in_flight_is_no_lateral_of_a_connection() -> None:
    happened = dataclasses.replace(HAPPENED, order_lateral=True)
    assert judge(happened, ASKED, [firing("struck", "beside")]).is_right
    for lateral in ("long-before", "after", "nobody's", "struck"):
        row = judge(happened, ASKED, [firing("struck", lateral)])
        assert (row.victim_right, row.lateral_right, row.is_right) == (True, False, False)


def test_where_anybody_may_be_struck_a_bystander_is_innocent() -> None:
    row = judge(HAPPENED, ASKED, [firing("beside"), firing("bystander")])
    assert (row.victim_right, row.innocent_triggered, row.is_right) == (True, 1, False)


def test_a_bystander_that_is_named_beside_who_is_struck_is_innocent() -> None:
    row = judge(KNOWN, ASKED, [firing("struck", "holder", "bystander")])
    assert (row.lateral_right, row.innocent_triggered, row.is_right) == (True, 1, False)


def test_what_fires_while_it_is_set_up_is_not_what_came_of_it() -> None:
    early = firing("after", at_s=10)
    row = judge(HAPPENED, ASKED, [early])
    assert (row.fired, row.innocent_triggered, row.is_right) == ("", 1, False)
    row = judge(HAPPENED, ASKED, [early, firing("struck", at_s=12)])
    assert (row.latency_ms, row.innocent_triggered, row.is_right) == (1000, 1, False)


def test_without_a_bystander_nothing_shows_that_the_innocent_are_left_alone() -> None:
    for untouched in ((), (Asked(1, "bystander", 15 * S, 16 * S, 200),)):
        happened = dataclasses.replace(KNOWN, untouched=untouched)
        row = judge(happened, ASKED, [firing("struck", "holder")])
        assert (row.untouched, row.innocent_triggered, row.is_right) == (0, 0, False)


def test_who_is_named_and_not_collected_does_not_do() -> None:
    row = judge(KNOWN, ASKED, [firing("struck", "holder", "another")], ALL - {"holder"})
    assert (row.lateral_right, row.laterals_collected, row.is_right) == (False, 1, False)
    row = judge(KNOWN, ASKED, [firing("struck", "holder", "another")])
    assert (row.lateral_right, row.laterals_collected, row.is_right) == (True, 2, True)


def test_who_is_struck_and_not_collected_does_not_do() -> None:
    row = judge(KNOWN, ASKED, [firing("struck", "holder")], ALL - {"struck"})
    assert (row.victim_right, row.lateral_right, row.is_right) == (False, True, False)
