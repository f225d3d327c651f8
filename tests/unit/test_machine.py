# SPDX-License-Identifier: Apache-2.0
"""The core that compares the machine's counters (appliance/core/machine.py)."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.machine import (
    LINK_SETTLES_NS,
    Limits,
    MachineWatch,
    Queue,
    QueueKey,
    Reading,
    Symptom,
)

S = 1_000_000_000
OWN, OTHER = 1, 2
ETH0, VETH, ETH1 = 3, 4, 5

LIMITS = Limits(
    qdisc_drops=10,
    qdisc_backlog=50,
    listen_overflows=2,
    pressures={"cpu": None, "io": 50.0, "memory": 10.0},
    quiet_ns=10 * S,
)


# uapi/linux/pkt_sched.h
TC_H_ROOT = 0xFFFFFFFF


def queue(drops: int, backlog: int = 0, kind: str = "tbf") -> dict[QueueKey, Queue]:
    return {(ETH0, TC_H_ROOT, 0x10000): Queue("eth0", kind, drops, backlog)}


def told(*readings: Reading, limits: Limits = LIMITS) -> list[list[Symptom]]:
    watch = MachineWatch(limits, OWN)
    return [watch.on_reading(reading) for reading in readings]


def names(symptoms: list[Symptom]) -> list[str]:
    return [symptom.trigger.removeprefix("machine.") for symptom in symptoms]


# ------------------------------------------------------------------- links


def test_a_link_that_goes_down_and_comes_up_is_told_each_time() -> None:
    watch = MachineWatch(LIMITS, OWN)
    watch.on_link(ETH0, "eth0", up=True, now_ns=0)
    assert watch.take_links(S) == []
    watch.on_link(ETH0, "eth0", up=False, now_ns=S)
    assert watch.take_links(S) == []
    assert watch.take_links(S + LINK_SETTLES_NS) == [
        Symptom("machine.link_down", "link eth0 went down", S, device=ETH0, namespace=OWN)
    ]
    assert watch.take_links(2 * S) == []
    watch.on_link(ETH0, "eth0", up=True, now_ns=3 * S)
    (up,) = watch.take_links(4 * S)
    assert (up.trigger, up.why) == ("machine.link_up", "link eth0 came up")


def test_a_device_that_is_new_comes_up_without_a_word() -> None:
    watch = MachineWatch(LIMITS, OWN)
    watch.on_link(ETH0, "eth0", up=False, now_ns=0)
    watch.on_link(ETH0, "eth0", up=True, now_ns=1)
    assert watch.take_links(S) == []
    watch.on_link(ETH0, "eth0", up=False, now_ns=S)
    assert names(watch.take_links(2 * S)) == ["link_down"]


@pytest.mark.parametrize("says_down", [True, False])
@pytest.mark.parametrize(("is_virtual", "expected"), [(True, []), (False, ["link_down"])])
def test_a_virtual_device_that_is_removed_did_not_fail(
    is_virtual: bool, expected: list[str], says_down: bool
) -> None:
    watch = MachineWatch(LIMITS, OWN)
    watch.on_link(ETH0, "eth0", up=True, now_ns=0, is_virtual=is_virtual)
    if says_down:
        watch.on_link(ETH0, "eth0", up=False, now_ns=S)
    watch.on_link_gone(ETH0, S)
    assert names(watch.take_links(2 * S)) == expected
    # The next one of that number has nothing to do with it.
    watch.on_link(ETH0, "eth0", up=False, now_ns=3 * S)
    watch.on_link(ETH0, "eth0", up=True, now_ns=3 * S)
    assert watch.take_links(4 * S) == []


def test_who_is_back_at_once_did_not_go() -> None:
    """Of a device that was moved to another namespace and back: told is how it is now."""
    watch = MachineWatch(LIMITS, OWN)
    watch.on_link(ETH0, "eth0", up=True, now_ns=0)
    watch.on_link_gone(ETH0, S)
    watch.on_link(ETH0, "eth0", up=True, now_ns=S)
    assert names(watch.take_links(2 * S)) == ["link_up"]
    watch.on_link(ETH0, "eth0", up=False, now_ns=20 * S)
    assert names(watch.take_links(30 * S)) == ["link_down"]


def test_of_a_device_that_went_while_nobody_was_told_the_same_is_known() -> None:
    watch = MachineWatch(LIMITS, OWN)
    watch.on_link(ETH0, "eth0", up=True, now_ns=0)
    watch.on_link(VETH, "veth4", up=True, now_ns=0, is_virtual=True)
    watch.on_link(ETH1, "eth1", up=True, now_ns=0)
    watch.only_links([ETH1], S)
    assert [symptom.why for symptom in watch.take_links(2 * S)] == ["link eth0 went down"]


def test_who_is_told_of_links_alone_keeps_no_more_than_what_is_recent() -> None:
    """While nobody records, no counter is read."""
    watch = MachineWatch(LIMITS, OWN)
    sizes = []
    for device in range(100, 200):
        at_ns = device * LIMITS.quiet_ns
        watch.on_link(device, "vlan", up=True, now_ns=at_ns, is_virtual=True)
        watch.on_link(device, "vlan", up=False, now_ns=at_ns)
        assert names(watch.take_links(at_ns + S)) == ["link_down"]
        watch.on_link_gone(device, at_ns + S)
        sizes.append(len(pickle.dumps(watch)))
    assert sizes[-1] < 1.2 * sizes[1]


def test_a_virtual_device_that_goes_down_is_doubtful_until_it_is_known_to_be_there() -> None:
    watch = MachineWatch(LIMITS, OWN)
    for device in (ETH0, VETH):
        is_virtual = device == VETH
        watch.on_link(device, f"link{device}", up=True, now_ns=0, is_virtual=is_virtual)
        watch.on_link(device, f"link{device}", up=False, now_ns=S)
    assert watch.doubtful_links(S) == set()
    doubtful = watch.doubtful_links(2 * S)
    assert doubtful == {VETH}
    assert [symptom.device for symptom in watch.take_links(2 * S, doubtful)] == [ETH0]
    assert [symptom.device for symptom in watch.take_links(2 * S)] == [VETH]


def test_links_may_be_left_out() -> None:
    watch = MachineWatch(dataclasses.replace(LIMITS, links=False), OWN)
    watch.on_link(ETH0, "eth0", up=True, now_ns=0)
    watch.on_link(ETH0, "eth0", up=False, now_ns=0)
    assert watch.take_links(S) == []


# ---------------------------------------------------------------- counters


def test_what_was_counted_before_we_came_is_not_told() -> None:
    first = Reading(0, queue(1000), {OWN: 500}, {80: 500}, {"io": 10**9})
    assert told(first, dataclasses.replace(first, time_ns=S)) == [[], []]


def test_what_is_new_between_two_readings_is_told() -> None:
    readings = (
        Reading(0, queue(0), {OWN: 0, OTHER: 7}, {80: 0}, {"io": 0, "memory": 0, "cpu": 0}),
        Reading(
            2 * S,
            queue(10, backlog=50),
            {OWN: 2, OTHER: 9},
            {80: 2},
            {"io": 1_000_000, "memory": 199_000, "cpu": 2_000_000},
        ),
    )
    _, found = told(*readings)
    assert found == [
        Symptom(
            "machine.qdisc_drops",
            "tbf of eth0 dropped 10 packets in 2.0 s",
            2 * S,
            device=ETH0,
            namespace=OWN,
        ),
        Symptom(
            "machine.qdisc_backlog",
            "50 packets wait in tbf of eth0",
            2 * S,
            device=ETH0,
            namespace=OWN,
        ),
        Symptom(
            "machine.listen_overflow",
            "the listening queue of port 80 turned 2 away in 2.0 s",
            2 * S,
            port=80,
            namespace=OWN,
        ),
        Symptom(
            "machine.listen_overflow",
            "listening queues turned 2 connections away in 2.0 s",
            2 * S,
            namespace=OTHER,
        ),
        Symptom("machine.io_pressure", "tasks waited for I/O in 50 % of 2.0 s", 2 * S),
    ]


def test_below_its_limit_nothing_is_told() -> None:
    _, found = told(
        Reading(0, queue(0), {OWN: 0}, {80: 0}, {"io": 0}),
        Reading(S, queue(9, backlog=49), {OWN: 1}, {80: 1}, {"io": 499_000}),
    )
    assert found == []


def test_where_no_port_is_known_the_namespace_is_told() -> None:
    _, found = told(Reading(0, overflows={OWN: 0}), Reading(S, overflows={OWN: 5}))
    assert found == [
        Symptom(
            "machine.listen_overflow",
            "listening queues turned 5 connections away in 1.0 s",
            S,
            namespace=OWN,
        )
    ]


def test_what_a_port_was_told_of_is_not_told_again_without_it() -> None:
    """Both counters are read one after the other: of one burst each may see a part before."""
    found = told(
        Reading(0, overflows={OWN: 0}, listeners={80: 1}),
        Reading(S, overflows={OWN: 3}, listeners={80: 6}),
        Reading(2 * S, overflows={OWN: 8, OTHER: 0}, listeners={80: 6}),
        Reading(3 * S, overflows={OWN: 8, OTHER: 9}, listeners={80: 6}),
    )
    assert [[(one.port, one.namespace) for one in some] for some in found] == [
        [],
        [(80, OWN)],
        [],
        [(0, OTHER)],
    ]


def test_a_listener_that_is_new_is_named() -> None:
    _, (symptom,) = told(
        Reading(0, overflows={OWN: 0}, listeners={22: 4}),
        Reading(S, overflows={OWN: 6}, listeners={22: 4, 80: 6}),
    )
    assert (symptom.port, symptom.namespace) == (80, OWN)
    # Where no listener could be read before, all may be old.
    _, (symptom,) = told(
        Reading(0, overflows={OWN: 0}),
        Reading(S, overflows={OWN: 6}, listeners={22: 4, 80: 6}),
    )
    assert (symptom.port, symptom.namespace) == (0, OWN)


def test_a_listener_that_was_missing_in_a_reading_is_not_new() -> None:
    """A dump that the kernel changes meanwhile may leave some out: theirs are of long ago."""
    _, some, none = told(
        Reading(0, overflows={OWN: 0}, listeners={22: 4}),
        Reading(S, overflows={OWN: 3}, listeners={22: 4, 80: 1000}),
        Reading(2 * S, overflows={OWN: 3}, listeners={22: 4, 80: 1000, 443: 1000}),
    )
    assert [symptom.why for symptom in some] == [
        "the listening queue of port 80 turned 3 away in 1.0 s"
    ]
    assert none == []


def test_another_queue_in_the_place_of_one_begins_anew() -> None:
    """Its counters have nothing to do with those of the one before."""
    _, found = told(Reading(0, queue(0)), Reading(S, queue(10**6, kind="fq_codel")))
    assert found == []


def test_what_lasts_is_told_again_after_a_while() -> None:
    readings = [Reading(second * S, queue(100 * second)) for second in range(23)]
    seconds = [second for second, found in enumerate(told(*readings)) if found]
    assert seconds == [1, 11, 21]


def test_after_a_pause_in_looking_it_begins_anew() -> None:
    watch = MachineWatch(LIMITS, OWN)
    watch.on_reading(Reading(0, queue(0)))
    watch.forget_reading()
    assert watch.on_reading(Reading(3600 * S, queue(10**6))) == []


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**64 - 1)), max_size=8))
def test_counters_that_jump_do_no_harm(jumps: list[tuple[int, int]]) -> None:
    """Of a namespace or device that is another one by now."""
    watch = MachineWatch(LIMITS, OWN)
    for time_ns, count in jumps:
        for symptom in watch.on_reading(
            Reading(time_ns, queue(count, count), {OWN: count}, {80: count}, {"io": count})
        ):
            assert symptom.why
