# SPDX-License-Identifier: Apache-2.0
"""What must hold in each single situation, on both cores in virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from appliance.core.node import NodeConfig
from coordinator.core.policy import policy_of
from coordinator.core.verdict import ReasonKind
from formats.records import Data
from protocol.hashing import Domain, TraceHash
from protocol.messages import NO_POLICY, Collect, Group, SliceFlags, TraceId
from tests.simulation.network import MS, NOBODYS, Link, S
from tests.simulation.pool import Handle, PoolConfig
from tests.simulation.simulator import QUICK, Simulator
from tests.simulation.traffic import Call, Request


def cluster(*names: str, trace_log: bool = False) -> Simulator:
    sim = Simulator(seed=1, trace_log=trace_log)
    sim.add_nodes(*names)
    sim.run(0.2)
    return sim


def chain(*names: str) -> Call:
    """Each node calls the next."""
    call = Call(names[-1])
    for name in reversed(names[:-1]):
        call = Call(name, [call])
    return call


def reasons(sim: Simulator, trace: TraceId) -> set[tuple[str, str]]:
    verdict = sim.verdict(trace)
    assert verdict is not None
    return {(reason.kind.value, reason.node) for reason in verdict.reasons}


def delivered_nodes(sim: Simulator, trace: TraceId) -> set[str]:
    return {node for node, records in sim.delivered(trace).items() if records}


def collected_whole(sim: Simulator, request: Request) -> None:
    assert sim.kind(request.trace) == "coherent"
    assert sim.missing(request.trace, sim.scheduler.now_ns) == []
    assert delivered_nodes(sim, request.trace) == {visit.node for visit in request.visits}


# ------------------------------------------------------------------ shapes


def test_a_concurrent_fan_out_is_followed_on_all_branches_at_once() -> None:
    names = [f"leaf{i}" for i in range(20)]
    sim = cluster("root", *names, trace_log=True)
    request = sim.request(Call("root", [Call(name) for name in names]))
    sim.run(0.1)
    sim.log_lines.clear()
    sim.fire("root", request.trace)
    sim.run(0.02)
    asked = [line.split() for line in sim.log_lines if "<- Collect" in line]
    assert {words[1] for words in asked} == set(names)
    # All in one round: the last was asked before the first could have answered and led on.
    times = [float(words[0]) for words in asked]
    assert max(times) - min(times) < 1e-3
    sim.settle()
    sim.check()
    collected_whole(sim, request)


def test_a_cycle_of_calls_asks_each_node_once() -> None:
    sim = cluster("a", "b", "c", trace_log=True)
    request = sim.request(chain("a", "b", "c", "a", "b", "c", "a"))
    sim.run(0.1)
    sim.fire("b", request.trace)
    sim.settle()
    sim.check()
    collected_whole(sim, request)
    asked = [line.split()[1] for line in sim.log_lines if "<- Collect" in line]
    assert sorted(asked) == ["a", "c"]


@pytest.mark.parametrize("node", ["root", "middle", "leaf", "side"])
def test_a_trigger_on_one_node_only_finds_all(node: str) -> None:
    sim = cluster("root", "middle", "leaf", "side")
    root = Call("root", [Call("middle", [Call("leaf")]), Call("side")])
    request = sim.request(root)
    sim.run(0.1)
    sim.fire(node, request.trace)
    sim.settle()
    sim.check()
    collected_whole(sim, request)


def test_a_trigger_while_the_request_runs_waits_for_its_end() -> None:
    sim = cluster("a", "b", "c")
    root = chain("a", "b", "c")
    root.calls[0].calls[0].work_ns = 400 * MS
    request = sim.request(root)
    sim.run(0.05)
    sim.fire("b", request.trace)
    sim.run(0.3)
    assert sim.kind(request.trace) == "none"
    sim.settle()
    sim.check()
    collected_whole(sim, request)


# ------------------------------------------------------------ dead and slow


def test_a_dead_node_in_the_middle_is_named_and_does_not_cut_the_chain() -> None:
    sim = cluster("a", "b", "c", "d")
    request = sim.request(chain("a", "b", "c", "d"))
    sim.run(0.1)
    sim.nodes["b"].die()
    sim.fire("d", request.trace)
    sim.run(2.0)
    assert sim.kind(request.trace) == "partial"
    assert ("not_connected", "b") in reasons(sim, request.trace)
    assert delivered_nodes(sim, request.trace) == {"a", "c", "d"}
    sim.settle()
    sim.check()
    assert ("not_connected", "b") in reasons(sim, request.trace)


def test_a_slow_node_is_recorded_as_missing_and_not_waited_for() -> None:
    sim = cluster("a", "b", "c")
    request = sim.request(chain("a", "b", "c"))
    sim.run(0.1)
    sim.nodes["b"].link.slow_ns = 3 * S
    sim.fire("a", request.trace)
    sim.run(2.0)
    assert sim.kind(request.trace) == "partial"
    assert ("no_answer", "b") in reasons(sim, request.trace)
    sim.nodes["b"].link.slow_ns = 0
    sim.settle()
    sim.check()
    # It answered after all: a later version of the verdict says so.
    collected_whole(sim, request)
    assert [verdict.version for verdict in sim.verdicts[request.trace]] == [1, 2]


def test_a_call_that_reached_nobody_makes_the_trace_partial() -> None:
    sim = cluster("a", "b")
    sim.nodes["b"].die()
    request = sim.request(chain("a", "b"))
    sim.run(1.0)
    sim.fire("a", request.trace)
    sim.settle()
    sim.check()
    assert ("hop_out_unmet", "a") in reasons(sim, request.trace)


@pytest.mark.parametrize("arrives", [False, True])
def test_who_may_have_got_a_call_at_an_address_of_nobody_is_missing(arrives: bool) -> None:
    sim = cluster("a", "b")
    request = sim.request(Call("a", [Call("b", unheard_at=NOBODYS, arrives=arrives)]))
    sim.run(0.1)
    sim.fire("a", request.trace)
    sim.settle()
    sim.check()
    assert sim.kind(request.trace) == "partial"
    assert reasons(sim, request.trace) == {("hop_out_unmet", "a")}
    assert delivered_nodes(sim, request.trace) == {"a"}


def test_a_call_that_timed_out_is_missing_though_a_node_has_answered() -> None:
    sim = cluster("a", "b")
    (address,) = sim.nodes["b"].addresses
    request = sim.request(Call("a", [Call("b", unheard_at=address)]))
    sim.run(0.1)
    sim.fire("a", request.trace)
    sim.settle()
    sim.check()
    assert sim.kind(request.trace) == "partial"
    assert reasons(sim, request.trace) == {("hop_out_unmet", "a")}


# ----------------------------------------------------------------- messages


def test_lost_and_repeated_messages_change_nothing() -> None:
    for broken_ms in range(0, 40, 3):
        sim = cluster("a", "b", "c")
        request = sim.request(chain("a", "b", "c"))
        sim.run(0.1)
        sim.fire("b", request.trace)
        for name in ("a", "b", "c"):
            node = sim.nodes[name]
            sim.scheduler.after(broken_ms * MS // 10, node.cut)
            sim.scheduler.after(broken_ms * MS + 300 * MS, node.cut)
        sim.settle()
        sim.check()
        collected_whole(sim, request)


def test_a_half_open_connection_is_replaced() -> None:
    sim = cluster("a", "b")
    request = sim.request(chain("a", "b"))
    sim.run(0.1)
    sim.nodes["a"].cut(coordinator_notices_ns=5 * S)
    sim.nodes["b"].cut(node_notices_ns=2 * S)
    sim.fire("a", request.trace)
    sim.settle()
    sim.check()
    collected_whole(sim, request)


def test_duplicates_of_every_message_are_harmless() -> None:
    sim = cluster("a", "b", "c")
    for node in sim.nodes.values():
        node.duplicate = True
    request = sim.request(chain("a", "b", "c"))
    sim.run(0.1)
    sim.fire("c", request.trace)
    sim.settle()
    sim.check()
    collected_whole(sim, request)


@pytest.mark.parametrize("slow", ["control", "slices"])
def test_the_two_streams_may_overtake_each_other(slow: str) -> None:
    sim = cluster("a", "b", "c")
    for node in sim.nodes.values():
        node.link.stream_delay_ns[slow] = 300 * MS
    request = sim.request(chain("a", "b", "c"))
    sim.run(0.1)
    sim.fire("c", request.trace)
    sim.settle()
    sim.check()
    collected_whole(sim, request)


# ----------------------------------------------------------------- restarts


@pytest.mark.parametrize("after_ms", [1, 3, 5, 8, 12, 20, 100, 250])
def test_a_coordinator_restart_loses_no_trace_that_nodes_hold(after_ms: int) -> None:
    sim = cluster("a", "b", "c")
    sim.coordinator.store_latency_ns = 5 * MS
    request = sim.request(chain("a", "b", "c"))
    sim.run(0.1)
    sim.fire("b", request.trace)
    sim.scheduler.after(after_ms * MS, sim.coordinator.kill)
    sim.scheduler.after(after_ms * MS + S, sim.coordinator.start)
    sim.settle()
    sim.check()
    collected_whole(sim, request)


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("after_ms", [0, 2, 5, 10, 300])
def test_a_node_restart_loses_no_triggered_trace(name: str, after_ms: int) -> None:
    sim = cluster("a", "b", "c")
    request = sim.request(chain("a", "b", "c"))
    sim.run(0.1)
    sim.fire("b", request.trace)
    node = sim.nodes[name]
    sim.scheduler.after(after_ms * MS, node.kill_daemon)
    sim.scheduler.after(after_ms * MS + S, node.start)
    sim.settle()
    sim.check()
    collected_whole(sim, request)


@pytest.mark.parametrize("after_ms", [0, 10, 500, 5000])
def test_a_node_restart_does_not_change_who_fired_and_why(after_ms: int) -> None:
    sim = cluster("a", "b", "c")
    request = sim.request(chain("a", "b", "c"))
    sim.run(0.1)
    sim.fire("b", request.trace)
    sim.run(0.1)  # the coordinator has heard of it
    for node in sim.nodes.values():
        sim.scheduler.after(after_ms * MS, node.kill_daemon)
        sim.scheduler.after(after_ms * MS + S, node.start)
    sim.settle()
    sim.check()
    (trigger,) = sim.coordinator.store.triggers.values()
    assert (trigger.node, trigger.fired.why) == ("b", "test")


def test_a_node_that_is_away_may_have_more_than_it_had_told() -> None:
    sim = cluster("a", "b", "c")
    calls = [Call("b"), Call("c", work_ns=300 * MS), Call("b")]
    request = sim.request(Call("a", calls, concurrent=False))
    sim.run(0.05)
    sim.fire("b", request.trace)
    sim.run(0.1)
    sim.nodes["b"].kill_daemon()  # its slice is delivered, and it is visited again
    sim.run(5)
    assert ("hop_out_unmet", "a") in reasons(sim, request.trace)
    sim.nodes["b"].start()
    sim.settle()
    sim.check()
    collected_whole(sim, request)


def test_a_restarted_node_that_is_slow_to_speak_has_not_lost_its_slice() -> None:
    sim = cluster("a", "b")
    for node in sim.nodes.values():
        node.link.stream_delay_ns["slices"] = 500 * MS
    request = sim.request(chain("a", "b"))
    sim.run(0.05)
    sim.fire("a", request.trace)
    sim.run(0.1)  # the status is there, the bytes are not
    sim.nodes["b"].kill_daemon()
    sim.nodes["b"].link.slow_ns = 4 * S
    sim.nodes["b"].start()
    sim.run(3)
    assert ("restarted", "b") in reasons(sim, request.trace)
    sim.nodes["b"].link.slow_ns = 0
    sim.settle()
    sim.check()
    collected_whole(sim, request)


def test_a_trace_that_nobody_had_is_begun_anew_when_somebody_has_it() -> None:
    sim = cluster("a", "b")
    request = sim.request(Call("b"))
    other = sim.request(Call("a"))
    sim.run(0.1)
    sim.fire("a", other.trace, laterals=(request.trace,))  # a never saw it
    sim.run(5)
    assert reasons(sim, request.trace) == {("never_seen", "a")}
    sim.fire("b", request.trace)
    sim.settle()
    sim.check()
    collected_whole(sim, request)


def test_a_process_that_is_killed_leaves_its_records_and_its_unfinished_spans() -> None:
    sim = cluster("a", "b")
    root = chain("a", "b")
    root.calls[0].work_ns = 60 * S
    request = sim.request(root)
    sim.run(0.1)
    sim.kill_client(sim.nodes["b"])
    sim.run(1.0)
    sim.fire("b", request.trace)  # nobody answered, so the caller knows of nobody
    sim.settle()
    sim.check()
    assert sim.kind(request.trace) == "partial"
    assert ("unfinished", "b") in reasons(sim, request.trace)
    assert delivered_nodes(sim, request.trace) == {"a", "b"}


def slice_of_one_visit(sim: Simulator, request: Request, node: str) -> bytes:
    kept = sim.coordinator.store.traces[request.trace].slices[node]
    return bytes(kept.data)


@pytest.mark.parametrize("away_s", [0.05, 1, 10])
@pytest.mark.parametrize("sent", ["whole", "part", "nothing"])
def test_a_slice_after_the_store_was_lost_is_not_taken_for_the_one_before(
    sent: str, away_s: float
) -> None:
    sim = cluster("a")
    sim.add_node("b", NodeConfig("", chunk_bytes=100, triggered_ttl_ns=10 * S))
    sim.run(0.2)
    node = sim.nodes["b"]
    request = sim.request(chain("a", "b"))
    sim.run(0.1)
    if sent != "whole":
        node.link.bytes_per_s = 1000 if sent == "part" else 1
    sim.fire("b", request.trace)
    sim.run(0.3)
    before = slice_of_one_visit(sim, request, "b") if sent != "nothing" else b""
    assert (sent == "nothing") == (not before)
    node.link.bytes_per_s = None
    node.lose_store()
    # The next slice is longer: it has what the first had, and another visit.
    sim.request(Call("b", payload_bytes=900), request.trace)
    sim.scheduler.after(int(away_s * S), node.start)
    sim.run(away_s + 0.05)
    sim.fire("b", request.trace, "again")
    sim.settle()
    sim.check()
    after = slice_of_one_visit(sim, request, "b")
    assert sim.kind(request.trace) == "partial"
    late = {("late", "")} if sent == "whole" and away_s > 5 else set()  # it was closed meanwhile
    assert reasons(sim, request.trace) == {("restarted", "b"), *late}
    if sent == "whole":
        assert after == before
    else:
        # What came of the first is no part of the second.
        assert len(after) > 900
        assert sim.missing(request.trace, sim.scheduler.now_ns) == []


@pytest.mark.parametrize("more", [0, 900])
def test_a_trace_collected_again_after_its_mark_expired_is_not_mixed(more: int) -> None:
    sim = cluster("a", "b")
    request = sim.request(chain("a", "b"))
    sim.run(0.1)
    sim.fire("a", request.trace)
    sim.run(60)
    collected_whole(sim, request)
    node = sim.nodes["b"]
    assert node.pool.slice(request.trace) is None  # it was released, and the mark has expired
    before = slice_of_one_visit(sim, request, "b")
    if more:
        sim.request(Call("b", payload_bytes=more), request.trace)
    sim.fire("b", request.trace, "again")
    sim.settle()
    sim.check()
    assert slice_of_one_visit(sim, request, "b") == before
    if more:
        assert reasons(sim, request.trace) == {("late", ""), ("restarted", "b")}
    else:
        assert sim.kind(request.trace) == "coherent"
    found = node.pool.slice(request.trace)
    assert found is None or found.trimmed_bytes == found.bytes  # the node could let go of it


# ----------------------------------------------------------------- eviction


def small_pool() -> PoolConfig:
    return PoolConfig(pool_bytes=20 * 4096, segment_bytes=4096, stock_segments=2)


def evict(sim: Simulator, node: str, kilobytes: int = 100) -> None:
    """Write other traces until those from before are gone."""
    for _ in range(kilobytes):
        sim.request(Call(node, payload_bytes=900, work_ns=MS))
        sim.run(0.02)


def test_eviction_during_the_traversal_is_never_called_coherent() -> None:
    sim = Simulator(seed=1)
    sim.add_nodes("a", "c")
    sim.add_node("b", pool=small_pool(), link=Link(latency_ns=MS, slow_ns=3 * S))
    sim.run(7)
    request = sim.request(chain("a", "b", "c"))
    sim.run(0.1)
    sim.fire("a", request.trace)
    evict(sim, "b")  # before the slow node reads that it is to collect
    assert SliceFlags.EVICTED in sim.nodes["b"].pool.flags_of(request.trace)
    sim.nodes["b"].link.slow_ns = 0
    sim.settle()
    sim.check()
    assert sim.kind(request.trace) == "partial"
    assert ("evicted", "b") in reasons(sim, request.trace)


def test_a_collected_trace_outlives_the_pool() -> None:
    sim = Simulator(seed=1)
    sim.add_node("a", pool=small_pool())
    sim.run(0.2)
    sim.coordinator.kill()
    request = sim.request(Call("a"))
    sim.run(0.1)
    sim.fire("a", request.trace)
    sim.run(0.1)
    evict(sim, "a")
    sim.coordinator.start()
    sim.settle()
    sim.check()
    collected_whole(sim, request)


def test_a_trace_that_was_evicted_and_written_again_is_not_whole() -> None:
    sim = Simulator(seed=1)
    sim.add_node("a", pool=small_pool())
    sim.run(0.2)
    first = sim.request(Call("a"))
    sim.run(0.1)
    evict(sim, "a")
    assert SliceFlags.EVICTED in sim.nodes["a"].pool.flags_of(first.trace)
    sim.request(Call("a"), first.trace)
    sim.run(0.1)
    sim.fire("a", first.trace)
    sim.settle()
    sim.check()
    assert sim.kind(first.trace) == "partial"
    assert ("evicted", "a") in reasons(sim, first.trace)
    assert delivered_nodes(sim, first.trace) == {"a"}  # what there is, is there


def test_an_open_trace_gets_a_second_chance() -> None:
    sim = Simulator(seed=1)
    sim.add_node("a", pool=small_pool())
    sim.add_node("b")
    sim.run(0.2)
    root = Call("a", [Call("b", work_ns=400 * MS)])
    request = sim.request(root)
    sim.run(0.01)
    for _ in range(80):
        sim.request(Call("a", payload_bytes=900, work_ns=MS))
        sim.run(0.004)
    assert sim.nodes["a"].pool.counters.second_chances > 0
    sim.run(0.3)
    sim.fire("b", request.trace)
    sim.settle()
    sim.check()
    collected_whole(sim, request)


# ---------------------------------------------------------------- streaming


def test_a_trace_that_never_ends_stays_provisional_and_keeps_coming() -> None:
    sim = cluster("a", "b")
    node = sim.nodes["a"]
    request = sim.request(Call("a", [Call("b")], work_ns=10**15))
    sim.fire("a", request.trace)
    handle = next(iter(request.visits)).handle
    client = node.clients[0]
    stream = Handle(request.trace, client, handle, next_seq=1)
    sizes = []
    for _ in range(30):
        for _ in range(20):
            node.write(stream, 0, Data(1, bytes(200)))
            sim.run(0.05)
        kept = sim.coordinator.store.traces[request.trace]
        sizes.append(len(kept.slices["a"].data))
    assert sim.kind(request.trace) == "provisional"
    assert all(after > before for before, after in pairwise(sizes))
    # Verdicts come at the pace of the configuration, not of the writing.
    assert len(sim.verdicts[request.trace]) <= 30 / 5 + 2
    # What is durable does not pile up on the node.
    assert node.pool.store_usage().used_bytes < 64 << 10


# ------------------------------------------------------------------- clocks


def test_clock_offsets_and_steps_are_measured_and_do_no_harm() -> None:
    sim = Simulator(seed=1)
    sim.add_node("a", clock_offset_ns=3600 * S)
    sim.add_node("b", clock_offset_ns=-250 * MS)
    sim.add_node("c")
    sim.run(0.2)
    request = sim.request(chain("a", "b", "c"))
    sim.run(0.1)
    sim.nodes["c"].step_clock(-7200 * S)
    sim.fire("c", request.trace)
    # Long before the next probe is due.
    sim.run(0.2)
    assert sim.coordinator.core is not None
    clocks = {
        view.node: view.clock for view in sim.coordinator.core.nodes(sim.coordinator.mono_ns())
    }
    for name, offset_ns in (("a", 3600 * S), ("b", -250 * MS), ("c", -7200 * S)):
        clock = clocks[name]
        assert clock is not None
        assert abs(clock.offset_ns - offset_ns) <= clock.error_ns < 10 * MS
    sim.settle()
    sim.check()
    collected_whole(sim, request)


# ------------------------------------------------------------------- groups


def test_laterals_are_traversed_and_kept_as_one_group() -> None:
    sim = cluster("a", "b", "c", "d")
    one = sim.request(chain("a", "b"))
    two = sim.request(chain("c", "a"))
    three = sim.request(chain("a", "d", "c"))
    sim.run(0.1)
    sim.fire("a", one.trace, laterals=(two.trace, three.trace))
    sim.settle()
    sim.check()
    for request in (one, two, three):
        collected_whole(sim, request)


def test_a_group_is_given_up_as_a_whole_on_all_nodes() -> None:
    # What is not acknowledged yet may be given up too, and is coherent then.
    sim = Simulator(seed=1, coordinator_config=replace(QUICK, patience_ns=0))
    small = PoolConfig(store_bytes=40 * 2048)
    half = NodeConfig(
        "", report_bytes_per_s=20_000, report_burst_bytes=1000
    )  # of what it would take
    sim.add_node("a", half, small)
    sim.add_node("b")
    sim.run(0.2)
    groups: list[tuple[Group, Request, Request]] = []
    for _ in range(80):
        one = sim.request(Call("a", [Call("b")], payload_bytes=900))
        two = sim.request(Call("b", [Call("a")], payload_bytes=900))
        sim.run(0.05)
        groups.append((sim.fire("b", one.trace, laterals=(two.trace,)), one, two))
    sim.run(2)
    core_a, core_b = sim.nodes["a"].core, sim.nodes["b"].core
    assert core_a is not None and core_b is not None
    assert set(core_a.links[0].owed.abandoned_groups) == set(core_b.links[0].owed.abandoned_groups)
    assert 5 < len(core_a.links[0].owed.abandoned_groups) < 75
    sim.settle()
    sim.check()
    for group, one, two in groups:
        for request in (one, two):
            if group in core_a.links[0].owed.abandoned_groups:
                assert sim.kind(request.trace) == "partial"
                assert ReasonKind.ABANDONED.value in {k for k, _ in reasons(sim, request.trace)}
                for node in sim.nodes.values():
                    assert node.pool.slice(request.trace) is None
            else:
                collected_whole(sim, request)


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_is_here_whole_stays_coherent_though_a_node_gives_it_up(name: str) -> None:
    """It does so before it hears that the coordinator has all of it, as when its store runs full."""
    sim = cluster("a", "b")
    request = sim.request(chain("a", "b"))
    sim.run(0.1)
    group = sim.fire("a", request.trace)
    while sim.kind(request.trace) != "coherent":
        assert sim.scheduler.now_ns < 60 * S
        sim.run(0.0001)
    node = sim.nodes[name]
    assert node.core is not None
    assert node.core.triggered_traces == 1
    node.core._abandon(group, unanswered=True, now_ns=node.mono_ns())
    node.pump()
    sim.settle()
    sim.check()
    collected_whole(sim, request)
    assert held_nowhere(sim)
    for each in sim.nodes.values():
        assert each.core is not None
        assert group in each.core.links[0].owed.abandoned_groups
        assert each.pool.slice(request.trace) is None


def test_a_trace_in_two_groups_outlives_one_of_them() -> None:
    sim = cluster("a", "b")
    shared = sim.request(chain("a", "b"))
    one = sim.request(Call("a"))
    two = sim.request(Call("a"))
    sim.run(0.1)
    for node in sim.nodes.values():
        node.link.bytes_per_s = 100
    kept = sim.fire("a", one.trace, "kept", laterals=(shared.trace,))
    gone = sim.fire("a", two.trace, "gone", laterals=(shared.trace,))
    sim.run(0.1)
    for node in sim.nodes.values():
        assert node.core is not None
        node.core._abandon(gone, unanswered=True, now_ns=node.mono_ns())
        node.pump()
    sim.run(0.5)
    for node in sim.nodes.values():
        node.link.bytes_per_s = None
    sim.settle()
    sim.check()
    collected_whole(sim, shared)
    collected_whole(sim, one)
    assert sim.kind(two.trace) == "partial"
    assert kept.primary == one.trace


def test_a_trace_triggered_twice_is_collected_once() -> None:
    sim = cluster("a", "b", trace_log=True)
    request = sim.request(chain("a", "b"))
    sim.run(0.1)
    sim.fire("a", request.trace, "one")
    sim.fire("b", request.trace, "two")
    sim.settle()
    sim.check()
    collected_whole(sim, request)
    reported = sum(node.report_bytes for node in sim.nodes.values())
    kept = sim.coordinator.store.traces[request.trace]
    assert reported == sum(len(found.data) for found in kept.slices.values())


def test_a_node_asked_for_a_trace_of_a_group_that_was_given_up_says_so() -> None:
    sim = cluster("a", "b")
    request = sim.request(chain("a", "b"))
    sim.run(0.1)
    core = sim.nodes["a"].core
    assert core is not None
    group = Group("t", request.trace)
    core._abandon(group, unanswered=False, now_ns=sim.nodes["a"].mono_ns())
    real_ns = sim.nodes["a"].real_ns()
    core.on_control(Collect(group, (request.trace,)), sim.nodes["a"].mono_ns(), real_ns)
    (answer,) = core.take_control(sim.nodes["a"].mono_ns(), real_ns)
    assert getattr(answer, "flags", None) == SliceFlags.ABANDONED


def held_nowhere(sim: Simulator) -> bool:
    """Whether no node holds anything, and the coordinator waits for nothing."""
    cores = [node.core for node in sim.nodes.values()]
    core = sim.coordinator.core
    assert core is not None
    figures = core.figures()
    return (
        all(core is not None and not core._holdings.groups for core in cores)
        and all(core is not None and core.triggered_traces == 0 for core in cores)
        and figures.traces_open == figures.traces_settled == figures.groups == 0
    )


def test_more_triggers_of_a_trace_than_a_node_takes_leave_nothing_to_wait_for() -> None:
    sim = Simulator(seed=1)
    for name in ("a", "b"):
        sim.add_node(name, NodeConfig("", triggered_ttl_ns=10 * S, groups_per_trace_max=2))
    sim.run(0.2)
    common, *others = [sim.request(chain("a", "b")) for _ in range(8)]
    sim.run(0.1)
    for number, other in enumerate(others):
        sim.fire("ab"[number % 2], other.trace, laterals=(common.trace,))
        sim.run(0.01 * (number % 3))
    sim.fire("a", common.trace)
    sim.settle()
    sim.check()
    cores = [node.core for node in sim.nodes.values()]
    cut = [core.counters.triggers["t"].laterals_cut for core in cores if core is not None]
    assert all(cut)
    for request in (common, *others):
        collected_whole(sim, request)
    assert held_nowhere(sim)


def test_what_a_node_holds_for_others_goes_with_them_and_is_not_waited_for_for_ever() -> None:
    sim = Simulator(seed=1)
    slow = NodeConfig("a", report_bytes_per_s=1, report_burst_bytes=1, triggered_ttl_ns=10 * S)
    slow = replace(slow, groups_per_trace_max=2)
    sim.add_node("a", slow)
    sim.add_node("b", NodeConfig("", triggered_ttl_ns=10 * S))
    sim.run(0.2)
    common, *others = [sim.request(chain("a", "b")) for _ in range(4)]
    sim.run(0.1)
    groups = [sim.fire("a", other.trace, laterals=(common.trace,)) for other in others[:2]]
    sim.run(0.1)
    # The coordinator asks for it under this one too, and believes that it is held for that.
    sim.fire("b", others[2].trace, laterals=(common.trace,))
    sim.run(0.1)
    core = sim.nodes["a"].core
    assert core is not None
    (held,) = (h for h in core._holdings.traces.values() if h.trace == common.trace)
    assert [group.group for group in held.groups] == groups
    for group in groups:
        core._abandon(group, unanswered=True, now_ns=sim.nodes["a"].mono_ns())
    core.reconfigure(replace(slow, report_bytes_per_s=None), sim.nodes["a"].mono_ns())
    sim.settle(90.0)
    sim.check()
    assert sim.kind(common.trace) == "partial"
    assert ("bytes_missing", "a") in reasons(sim, common.trace)
    assert held_nowhere(sim)


def test_bandwidth_goes_to_the_highest_priorities() -> None:
    sim = Simulator(seed=1)
    config = NodeConfig(
        "", report_bytes_per_s=20_000, report_burst_bytes=1000, triggered_ttl_ns=10 * S
    )
    sim.add_node("a", config)
    sim.run(0.2)
    requests = [sim.request(Call("a", payload_bytes=900)) for _ in range(50)]
    sim.run(0.1)
    for request in requests:
        sim.fire("a", request.trace)
    sim.run(1.0)
    rank = TraceHash(Domain.PRIORITY, 0)
    ranked = sorted((r.trace for r in requests), key=rank, reverse=True)
    came = {trace for trace in ranked if delivered_nodes(sim, trace)}
    assert 5 < len(came) < 50
    assert came == set(ranked[: len(came)])
    sim.settle()
    sim.check()


def test_a_policy_reaches_all_nodes_and_outlasts_restarts_of_both_sides() -> None:
    sim = cluster("a", "b", "c", trace_log=True)
    first, second = policy_of(1 << 60), policy_of(1 << 61)
    sim.coordinator.set_policy(first)
    sim.run(0.2)
    assert {node.policy for node in sim.nodes.values()} == {first}
    sim.coordinator.kill()
    sim.nodes["a"].kill_daemon()
    sim.run(0.2)
    sim.nodes["a"].start()
    core = sim.nodes["a"].core
    assert core is not None
    assert core.policy == first  # with no coordinator there
    sim.nodes["b"].partition()
    sim.coordinator.start()
    sim.run(1.0)
    # Nobody takes up anew what it has.
    assert sum("records by policy" in line for line in sim.log_lines) == 3
    sim.coordinator.set_policy(second)
    sim.run(0.5)
    assert {name: node.policy for name, node in sim.nodes.items()} == {
        "a": second,
        "b": first,
        "c": second,
    }
    sim.nodes["b"].heal()
    sim.nodes["c"].lose_store()
    sim.nodes["c"].start()
    sim.settle(5)
    sim.check()
    sim.coordinator.set_policy(NO_POLICY)
    sim.run(0.2)
    assert {node.policy for node in sim.nodes.values()} == {NO_POLICY}
