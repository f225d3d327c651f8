# SPDX-License-Identifier: Apache-2.0
"""What gives way when there is too much in the coordinator's memory, and at whose cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from coordinator.core.config import CoordinatorConfig
from coordinator.core.memory import FIRING_BYTES
from coordinator.core.verdict import ReasonKind
from protocol.hashing import Domain, TraceHash
from protocol.messages import (
    Abandoned,
    Collect,
    Drop,
    Group,
    Release,
    Snapshot,
    SnapshotStatus,
    Source,
    TraceId,
    TriggerAck,
    TriggerFired,
)
from protocol.verdicts import VerdictKind
from tests.simulation.charges import check_charges
from tests.unit.coordinator_harness import Harness, S, preamble, run, span, trace_id, two_nodes

SEED = 7
WHOLE = preamble() + run(*span(1))


def fired(
    harness: Harness, node: str, trace: TraceId, laterals: Iterable[TraceId] = (), process: int = 0
) -> Group:
    group = Group("lat", trace)
    harness.say(node, TriggerFired(group, tuple(laterals), "slow", process=process))
    return group


def begun(harness: Harness, node: str, trace: TraceId) -> None:
    """Fired, and half of it here."""
    fired(harness, node, trace)
    harness.status(node, trace, len(WHOLE))
    harness.send(node, trace, 0, WHOLE[:-20])


def by_priority(traces: Iterable[TraceId]) -> list[TraceId]:
    """The highest first, as every node ranks them."""
    return sorted(traces, key=TraceHash(Domain.PRIORITY, SEED), reverse=True)


def kinds(harness: Harness, traces: Iterable[TraceId]) -> set[VerdictKind]:
    return {harness.verdicts[trace][-1].kind for trace in traces}


def test_who_fires_most_pays_for_it() -> None:
    """One process names 32 neighbours each time, and 100 nodes that are none for each of them."""
    config = CoordinatorConfig(traces_max=400, evidence_max=40_000, priority_seed=SEED)
    harness = Harness(config)
    harness.cluster("n1", "n2", "bad")
    honest = [trace_id(f"T{number}") for number in range(100)]
    for number, trace in enumerate(honest):
        laterals = [trace_id(f"L{number}.{lateral}") for lateral in range(32)]
        fired(harness, "bad", trace_id(f"L{number}"), laterals)
        for lateral in laterals:
            crumbs = [1 << 40 | (number + crumb) % 400 for crumb in range(100)]
            for begin in (0, 50):
                harness.status("bad", lateral, 10, crumbs[begin : begin + 50])
        fired(harness, "n1", trace)
        if number >= 10:
            # It takes a while until all nodes have sent all.
            harness.deliver(honest[number - 10], two_nodes())
        check_charges(harness.core)
    for trace in honest[-10:]:
        harness.deliver(trace, two_nodes())
    harness.wait(1 * S)
    assert kinds(harness, honest) == {VerdictKind.COHERENT}
    assert harness.core.counters.groups_given_up > 80


@pytest.mark.parametrize("laterals", [0, 3])
def test_those_of_the_lowest_priority_give_way_as_whole_groups(laterals: int) -> None:
    size = 1 + laterals
    harness = Harness(CoordinatorConfig(traces_max=100 * size, priority_seed=SEED))
    harness.cluster("n1", "n2")
    primaries = [trace_id(f"T{number}") for number in range(200)]
    members: dict[TraceId, list[TraceId]] = {}
    for number, primary in enumerate(primaries):
        others = [trace_id(f"L{number}.{lateral}") for lateral in range(laterals)]
        members[primary] = [primary, *others]
        fired(harness, "n1", primary, others)
        for trace in members[primary]:
            harness.status("n1", trace, len(two_nodes()["n1"]), ["n2"])
            harness.status("n2", trace, len(two_nodes()["n2"]))
    kept, gone = by_priority(primaries)[:100], by_priority(primaries)[100:]
    assert set(harness.core._traces) == {trace for primary in kept for trace in members[primary]}
    # Everybody is told who was asked for it.
    said = harness.take_said()
    dropped = {(name, message.group) for name, message in said if isinstance(message, Drop)}
    asked = {(name, message.group) for name, message in said if isinstance(message, Collect)}
    assert dropped == {
        (name, group)
        for name, group in {*asked, *(("n1", Group("lat", trace)) for trace in gone)}
        if group.primary in gone
    }
    assert len(dropped) > len(gone)
    for primary in gone:
        for trace in members[primary]:
            (verdict,) = harness.verdicts[trace]
            (reason,) = verdict.reasons
            assert (reason.kind, reason.node) == (ReasonKind.ABANDONED, "")
            assert "the coordinator" in reason.detail
            assert harness.store.traces[trace].released
    for primary in kept:
        for trace in members[primary]:
            for name, data in two_nodes().items():
                harness.send(name, trace, 0, data)
    harness.wait(S)
    assert kinds(harness, (t for primary in kept for t in members[primary])) == {
        VerdictKind.COHERENT
    }
    check_charges(harness.core)


def test_what_was_given_up_stays_so_whatever_comes_of_it() -> None:
    harness = Harness(CoordinatorConfig(traces_max=2, priority_seed=SEED))
    harness.cluster("n1")
    low, middle, high = reversed(by_priority(trace_id(f"T{number}") for number in range(3)))
    for trace in (low, middle, high):
        begun(harness, "n1", trace)
    assert set(harness.core._traces) == {middle, high}
    harness.take_said()
    # Under way when it was given up: it is not begun anew.
    harness.send("n1", low, len(WHOLE) - 20, WHOLE[-20:])
    harness.status("n1", low, len(WHOLE) + 1)
    assert set(harness.core._traces) == {middle, high}
    assert ("n1", Release(low)) in harness.take_said()
    assert harness.core.counters.traces_late == 0
    assert harness.verdicts[low][-1].reasons[0].kind is ReasonKind.ABANDONED
    # Who fires it again is told.
    fired(harness, "n1", low)
    assert ("n1", Drop(Group("lat", low))) in harness.take_said()
    # So is who has a coordinator that begins anew.
    harness.restart()
    harness.cluster("n1")
    fired(harness, "n1", low)
    assert ("n1", Drop(Group("lat", low))) in harness.take_said()


def test_who_mentions_what_was_given_up_before_that_is_durable_may_forget_it_then() -> None:
    harness = Harness(CoordinatorConfig(traces_max=2, priority_seed=SEED))
    harness.cluster("n1", "n2")
    low, middle, high = reversed(by_priority(trace_id(f"T{number}") for number in range(3)))
    harness.autosave = False
    for trace in (low, middle, high):
        begun(harness, "n1", trace)
    assert set(harness.core._traces) == {middle, high}
    # It had no part that anybody knew of, so no Drop went there.
    harness.take_said()
    harness.status("n2", low, len(WHOLE))
    assert harness.take_said() == []
    harness.save()
    harness.fetch()
    assert ("n2", Release(low)) in harness.take_said()


def test_of_a_node_the_process_that_fires_most_pays() -> None:
    harness = Harness(CoordinatorConfig(traces_max=100, priority_seed=SEED))
    harness.cluster("n1", "n2")
    modest = [trace_id(f"T{number}") for number in range(30)]
    for trace in modest:
        fired(harness, "n1", trace, process=1)
    other = [trace_id(f"N{number}") for number in range(30)]
    for trace in other:
        fired(harness, "n2", trace, process=1)
    for number in range(300):
        fired(harness, "n1", trace_id(f"F{number}"), process=2)
    assert {*modest, *other} < set(harness.core._traces)
    assert len(harness.core._traces) == 100


def test_a_node_of_many_processes_pays_as_one() -> None:
    harness = Harness(CoordinatorConfig(traces_max=100, priority_seed=SEED))
    harness.cluster("n1", "n2")
    honest = [trace_id(f"T{number}") for number in range(45)]
    for trace in honest:
        fired(harness, "n1", trace, process=1)
    for number in range(300):
        fired(harness, "n2", trace_id(f"F{number}"), process=number)
    assert set(honest) < set(harness.core._traces)


def test_who_fires_a_trace_too_is_not_charged_for_who_fired_it_first() -> None:
    harness = Harness(CoordinatorConfig(traces_max=100, priority_seed=SEED))
    harness.cluster("n1", "bad")
    honest = [trace_id(f"T{number}") for number in range(40)]
    for number, trace in enumerate(honest):
        # By the same name, or as a neighbour of another.
        if number % 2:
            fired(harness, "bad", trace)
        else:
            fired(harness, "bad", trace_id(f"B{number}"), [trace])
        fired(harness, "n1", trace)
    for number in range(200):
        fired(harness, "bad", trace_id(f"F{number}"))
        check_charges(harness.core)
    assert set(honest) < set(harness.core._traces)
    assert all(trace.abandoned_by is None for trace in harness.core._traces.values())


def test_traces_that_are_done_go_before_any_that_is_open() -> None:
    harness = Harness(CoordinatorConfig(traces_max=100))
    harness.cluster("n1")
    traces = [trace_id(f"T{number}") for number in range(300)]
    for begin in range(0, 300, 50):
        for trace in traces[begin : begin + 50]:
            fired(harness, "n1", trace)
        for trace in traces[begin : begin + 50]:
            harness.deliver(trace, {"n1": WHOLE})
        harness.wait(S)
    assert list(harness.core._traces) == traces[-100:]
    assert kinds(harness, traces) == {VerdictKind.COHERENT}
    assert harness.core.counters.traces_finished_early == 200
    assert harness.core.counters.groups_given_up == 0


def test_what_is_whole_is_closed_and_not_given_up() -> None:
    harness = Harness(CoordinatorConfig(traces_max=10, priority_seed=SEED))
    harness.cluster("n1")
    traces = by_priority(trace_id(f"T{number}") for number in range(50))
    for trace in reversed(traces):
        # At once, so that none is quiet. The next one has a higher priority.
        fired(harness, "n1", trace)
        harness.deliver(trace, {"n1": WHOLE})
    harness.wait(S)
    assert kinds(harness, traces) == {VerdictKind.COHERENT}
    assert harness.core.counters.groups_given_up == 0


def test_what_waits_to_be_healed_goes_before_what_is_open_with_its_verdict() -> None:
    harness = Harness(CoordinatorConfig(traces_max=100, priority_seed=SEED))
    harness.cluster("n1")
    waiting = [trace_id(f"T{number}") for number in range(60)]
    for trace in waiting:
        fired(harness, "n1", trace)
        harness.deliver(trace, {"n1": two_nodes()["n1"]})
    harness.wait(5 * S)
    assert kinds(harness, waiting) == {VerdictKind.PARTIAL}
    opened = [trace_id(f"N{number}") for number in range(80)]
    for trace in opened:
        begun(harness, "n1", trace)
    assert set(harness.core._traces) == {*opened, *by_priority(waiting)[:20]}
    reasons = {reason.kind for trace in waiting for reason in harness.verdicts[trace][-1].reasons}
    assert ReasonKind.ABANDONED not in reasons
    assert harness.core.counters.groups_given_up == 0


def test_what_is_done_waits_for_the_rest_of_its_group() -> None:
    """Else it could be called coherent, and its group be given up."""
    harness = Harness(CoordinatorConfig(traces_max=3, priority_seed=SEED))
    harness.cluster("n1")
    high, middle, low = by_priority([trace_id("A"), trace_id("B"), trace_id("C")])
    lateral = trace_id("L")
    group = fired(harness, "n1", low, [lateral])
    harness.status("n1", low, len(WHOLE))
    harness.deliver(lateral, {"n1": WHOLE})
    harness.wait(S)
    assert kinds(harness, [lateral]) == {VerdictKind.COHERENT}
    begun(harness, "n1", high)
    assert set(harness.core._traces) == {low, lateral, high}
    begun(harness, "n1", middle)
    assert set(harness.core._traces) == {high, middle}
    assert kinds(harness, [low, lateral]) == {VerdictKind.PARTIAL}
    assert ("n1", Drop(group)) in harness.take_said()


def test_more_bytes_than_the_store_may_hold_back_make_the_largest_give_way() -> None:
    harness = Harness(
        CoordinatorConfig(assembly_bytes_max=5 * (FIRING_BYTES + 200), priority_seed=SEED)
    )
    harness.cluster("n1", "n2")
    traces = [trace_id(f"T{n}") for n in range(20)]
    for trace in traces:
        fired(harness, "n1", trace)
        # Never whole, so that nothing else finishes it.
        harness.status("n1", trace, 300)
        harness.send("n1", trace, 0, bytes(200))
        assert sum(not kept.released for kept in harness.store.traces.values()) <= 5
    open_still = by_priority(traces)[:5]
    assert set(harness.core._traces) == set(open_still)
    assert harness.core.counters.traces_finished_early == 15
    # One that is too much alone goes too, and what comes of it then is not wanted.
    modest = trace_id("N")
    fired(harness, "n2", modest)
    harness.send("n1", open_still[0], 200, bytes(50_000))
    assert set(harness.core._traces) == {modest}
    harness.send("n1", open_still[0], 50_200, bytes(50_000))
    assert set(harness.core._traces) == {modest}


def test_a_node_fires_no_more_than_it_may() -> None:
    harness = Harness(CoordinatorConfig(fired_per_s=10, fired_burst=66))
    harness.cluster("n1", "n2")
    laterals = [trace_id(f"L{number}") for number in range(32)]
    groups = [fired(harness, "n1", trace_id(f"T{number}"), laterals) for number in range(4)]
    dropped = [message.group for _, message in harness.take_said() if isinstance(message, Drop)]
    assert dropped == groups[2:]
    assert harness.core.counters.groups_given_up == 2
    # What it repeats is nothing more, and others have their own.
    fired(harness, "n1", trace_id("T0"), laterals)
    fired(harness, "n2", trace_id("N"), laterals)
    # An operator's have a limit of their own.
    harness.say("n1", TriggerFired(Group("op", trace_id("O")), (), "", Source.OPERATOR))
    assert not any(isinstance(message, Drop) for _, message in harness.take_said())
    harness.wait(S)
    fired(harness, "n1", trace_id("X"))
    assert not any(isinstance(message, Drop) for _, message in harness.take_said())
    harness.wait(S)
    # It is known why the others are not there.
    assert harness.store.traces[trace_id("T2")].verdict is not None
    assert harness.store.traces[trace_id("T2")].released


def repeats(harness: Harness, number: int, laterals: list[TraceId]) -> None:
    """One group is fired, again and again, with other laterals."""
    fired(harness, "n1", trace_id("T"), laterals)


def renames(harness: Harness, number: int, laterals: list[TraceId]) -> None:
    """A closed trace is fired by other triggers."""
    harness.fire("n1", trace_id("C"), f"t{number}", tuple(laterals))


def pretends(harness: Harness, number: int, laterals: list[TraceId]) -> None:
    """An operator fired, it says."""
    group = Group("op", trace_id(f"O{number}"))
    harness.say("n1", TriggerFired(group, tuple(laterals), "", Source.OPERATOR))


@pytest.mark.parametrize("flood", [repeats, renames, pretends])
def test_whatever_is_fired_begins_no_more_than_its_node_may(
    flood: Callable[[Harness, int, list[TraceId]], None],
) -> None:
    config = CoordinatorConfig(fired_per_s=10, fired_burst=66)
    harness = Harness(config)
    harness.cluster("n1", "n2")
    fired(harness, "n1", trace_id("C"))
    harness.deliver(trace_id("C"), {"n1": preamble() + run(*span(1))})
    harness.wait(100 * S)
    assert harness.store.traces[trace_id("C")].released
    for number in range(100):
        flood(harness, number, [trace_id(f"L{number}.{each}") for each in range(32)])
    assert len(harness.core._traces) <= config.fired_burst + 33
    assert len(harness.store.traces) <= 2 * config.fired_burst + 33
    # Others have their own.
    fired(harness, "n2", trace_id("N"))
    assert trace_id("N") in harness.core._traces


def test_what_is_left_out_is_not_acknowledged_before_what_it_adds_to_is_durable() -> None:
    harness = Harness(CoordinatorConfig(fired_per_s=1, fired_burst=1))
    harness.cluster("n1")
    harness.autosave = False
    group = fired(harness, "n1", trace_id("T"))
    harness.lose("n1")
    harness.connect("n1")
    harness.take_said()
    # The same firing, which has one lateral more by now.
    fired(harness, "n1", trace_id("T"), [trace_id("L")])
    assert harness.core.counters.firings_left_out == 1
    assert ("n1", TriggerAck(group)) not in harness.take_said()
    harness.save()
    assert ("n1", TriggerAck(group)) in harness.take_said()


def test_what_is_refused_costs_the_store_next_to_nothing() -> None:
    harness = Harness(CoordinatorConfig(fired_per_s=1, fired_burst=1))
    harness.cluster("n1")
    harness.autosave = False
    rows = []
    for number in range(4):
        before = len(harness.written)
        laterals = [trace_id(f"L{number}.{each}") for each in range(32)]
        group = fired(harness, "n1", trace_id(f"T{number}"), laterals)
        rows.append(len(harness.written) - before)
        harness.save()
        said = [message for _, message in harness.take_said()]
        assert TriggerAck(group) in said
        assert (Drop(group) in said) == (number > 0)
    # The first is taken; of one that is refused it is written why it is not there, of no more not even that.
    assert rows[1] <= 4
    assert rows[2:] == [0, 0]


def test_what_a_snapshot_asked_for_is_counted_by_the_snapshot() -> None:
    harness = Harness(CoordinatorConfig(fired_per_s=1, fired_burst=1))
    harness.cluster("n1")
    state = harness.core.snapshots.start(Snapshot(7, "snapshot", S), 1 << 30, harness.now_ns)
    harness.fetch()
    for number in range(4):
        harness.say("n1", SnapshotStatus(7, 100, number, done=False))
        trace = trace_id(f"T{number}")
        harness.say("n1", TriggerFired(Group(state.trigger, trace), (), "", Source.OPERATOR))
        harness.status("n1", trace, 100)
    assert len(harness.core._traces) == 4
    assert not any(isinstance(message, Drop) for _, message in harness.take_said())


def test_charges_add_up_whatever_happens() -> None:
    rng = random.Random(5)
    for _ in range(20):
        harness = Harness(
            CoordinatorConfig(
                traces_max=rng.choice((5, 12, 1000)),
                evidence_max=rng.choice((200, 1 << 20)),
                assembly_bytes_max=rng.choice((20_000, 1 << 30)),
                groups_per_trace_max=rng.choice((2, 64)),
                linger_ns=S,
                missing_linger_ns=5 * S,
                priority_seed=SEED,
            )
        )
        names = ("n1", "n2", "n3")
        harness.cluster(*names)
        traces = [trace_id(f"T{number}") for number in range(15)]
        for _ in range(150):
            name, trace = rng.choice(names), rng.choice(traces)
            match rng.randrange(7):
                case 0 | 1:
                    others = rng.sample(traces, rng.randrange(4))
                    fired(harness, name, trace, others, rng.randrange(3))
                case 2:
                    harness.status(name, trace, rng.randrange(500), rng.sample(names, 1))
                case 3:
                    if harness.credit[name] > 1000:
                        epoch = rng.randint(1, 2)
                        harness.send(name, trace, 0, bytes(rng.randrange(1, 500)), epoch)
                case 4:
                    harness.say(name, Abandoned(Group("lat", trace)))
                case 5:
                    harness.wait(rng.choice((S // 10, S, 10 * S)))
                case 6:
                    if rng.random() < 0.1:
                        harness.restart()
                        harness.cluster(*names)
            check_charges(harness.core)
        harness.wait(100 * S)
        check_charges(harness.core)
        assert not harness.core._traces


def test_who_was_asked_for_a_trace_for_a_group_that_it_left_is_asked_for_the_next() -> None:
    """For that one alone its node holds it then: whoever gives the others up has it let go of it."""
    harness = Harness(replace(CoordinatorConfig(), traces_max=2))
    harness.cluster("n1", "n2", "n3")
    slices = two_nodes()
    trace, other = trace_id("T"), trace_id("other")
    harness.fire("n1", trace, "two")
    harness.fire("n3", other, "one", (trace,))
    for name, data in slices.items():
        harness.status(name, trace, len(data), ["n2"], held=True)
        harness.send(name, trace, 0, data)
    harness.status("n3", other, 0, ["ghost"], held=True)
    harness.status("n3", trace, 0, held=False)
    harness.wait(2 * S)
    harness.fire("n3", trace_id("third"), "three")
    assert [group.trigger for group in harness.core._traces[trace].groups] == ["two"]
    harness.take_said()
    harness.fire("n1", trace, "four")
    assert harness.asked()["n2"] == [trace]


def test_what_there_is_too_much_of_gives_way_in_pieces() -> None:
    """Bounds that are lowered hold up nobody for long."""
    harness = Harness(CoordinatorConfig(traces_max=1000))
    harness.cluster("n1")
    for number in range(1000):
        begun(harness, "n1", trace_id(f"T{number}"))
    assert len(harness.core._traces) == 1000
    harness.core.reconfigure(replace(harness.config, traces_max=100))
    left = 1000
    while left > 100:
        now_ns = harness.core.next_wakeup_ns(harness.now_ns)
        assert now_ns is not None
        harness.now_ns = now_ns
        harness.core.on_tick(now_ns)
        before, left = left, len(harness.core._traces)
        assert before - 64 <= left < before
        harness.fetch()
