# SPDX-License-Identifier: Apache-2.0
"""A faulty trigger fires for half of all requests; the rare ones must not suffer.

93 services on 93 nodes, each of which may report 1 MB/s. Every request passes
three of them, whose slices under the faulty trigger come to 2.0, 1.7 and 1.4
MB/s: those are the bottlenecks, and they must give up the same traces.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from appliance.core.node import NodeConfig, TriggerLimits
from coordinator.core.config import CoordinatorConfig
from protocol.messages import Group, TraceId
from tests.simulation.network import MS, Link, S
from tests.simulation.pool import PoolConfig
from tests.simulation.simulator import Simulator
from tests.simulation.traffic import Call, Request

SERVICES = 93
RATE_BYTES_PER_S = 1_000_000
REQUESTS_PER_S = 200
BOTTLENECKS = {"s0": 20_000, "s1": 17_000, "s2": 14_000}
"""Payload bytes that a request leaves there: 100 requests/s of them are tF's."""


@dataclass(slots=True)
class Outcome:
    sim: Simulator
    groups: dict[str, list[Group]]
    reported: dict[str, int]
    """Bytes that each bottleneck reported in the second half of the traffic."""
    half_s: float


def tree(rng: random.Random) -> Call:
    """The three bottlenecks, and six more services that differ."""
    others = [f"s{n}" for n in rng.sample(range(3, SERVICES), 6)]
    leaves = [Call(name, payload_bytes=200) for name in others]
    third = Call("s2", leaves[4:], payload_bytes=BOTTLENECKS["s2"])
    second = Call("s1", [third, *leaves[2:4]], payload_bytes=BOTTLENECKS["s1"])
    return Call("s0", [second, *leaves[:2]], payload_bytes=BOTTLENECKS["s0"])


def overload(requests: int) -> Outcome:
    # What waits in a full store is sent or given up before a trace is judged without it.
    sim = Simulator(
        seed=1,
        coordinator_config=CoordinatorConfig(
            linger_ns=2 * S, missing_linger_ns=60 * S, clock_probe_interval_ns=3600 * S
        ),
    )
    config = NodeConfig(
        "",
        limits=TriggerLimits(10_000, 10_000, 10_000, 10_000),
        report_bytes_per_s=RATE_BYTES_PER_S,
        report_burst_bytes=64 << 10,
        triggered_ttl_ns=3600 * S,
    )
    pool = PoolConfig(pool_bytes=16 << 20, arena_bytes=16 << 20, store_bytes=4 << 20)
    for number in range(SERVICES):
        sim.add_node(f"s{number}", config, pool, Link(latency_ns=MS, jitter_ns=MS))
    sim.run(0.5)
    rng = random.Random(2)
    groups: dict[str, list[Group]] = {"tA": [], "tB": [], "tF": []}

    def fire(request: Request, name: str) -> None:
        node = rng.choice(request.visits).node
        groups[name].append(sim.fire(node, request.trace, name))

    def begin(number: int) -> None:
        request = sim.request(tree(rng))
        names = ["tA"] if number % 1000 == 500 else ["tB"] if number % 100 == 50 else []
        if rng.random() < 0.5:
            names.append("tF")
        for name in names:
            sim.scheduler.after(50 * MS, lambda name=name: fire(request, name))  # type: ignore[misc]

    for number in range(requests):
        sim.scheduler.after(number * S // REQUESTS_PER_S, lambda number=number: begin(number))  # type: ignore[misc]
    half_s = requests / REQUESTS_PER_S / 2
    sim.run(half_s)
    before = {name: sim.nodes[name].report_bytes for name in BOTTLENECKS}
    sim.run(half_s)
    reported = {name: sim.nodes[name].report_bytes - before[name] for name in BOTTLENECKS}
    sim.settle(30)
    return Outcome(sim, groups, reported, half_s)


def coherent(outcome: Outcome, name: str) -> float:
    groups = outcome.groups[name]
    kinds = [outcome.sim.kind(group.primary) for group in groups]
    return kinds.count("coherent") / len(groups)


def abandoned(sim: Simulator) -> dict[TraceId, set[Group]]:
    found: dict[TraceId, set[Group]] = {}
    for node in sim.nodes.values():
        assert node.core is not None
        for group in node.core.links[0].owed.abandoned_groups:
            found.setdefault(group.primary, set()).add(group)
    return found


def check(outcome: Outcome) -> None:
    sim = outcome.sim
    # The rare ones arrive whole.
    assert coherent(outcome, "tA") >= 0.99
    assert coherent(outcome, "tB") >= 0.99
    # What the faulty one gets uses the rest of the bandwidth, and is of use.
    for name, count in outcome.reported.items():
        assert count >= 0.9 * RATE_BYTES_PER_S * outcome.half_s, name
        assert count <= 1.1 * RATE_BYTES_PER_S * outcome.half_s, name
    useful = coherent(outcome, "tF")
    # The narrowest passes 1 MB/s of some 2 MB/s, the backlog of the store on top.
    assert 0.4 < useful < 0.9
    # Only the faulty one is given up, and the same traces everywhere.
    given_up = abandoned(sim)
    assert len(given_up) > 0.1 * len(outcome.groups["tF"])
    for trace, groups in given_up.items():
        (group,) = groups
        assert group.trigger == "tF"
        for node in sim.nodes.values():
            if trace in node.pool.ever_collected and not held_otherwise(outcome, trace):
                assert node.core is not None
                assert group in node.core.links[0].owed.abandoned_groups, (node.name, group)
                assert node.pool.slice(trace) is None


def held_otherwise(outcome: Outcome, trace: TraceId) -> bool:
    return any(group.primary == trace for name in ("tA", "tB") for group in outcome.groups[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_faulty_trigger_takes_only_what_the_others_leave() -> None:
    check(overload(3000))


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_the_same_for_longer() -> None:
    outcome = overload(20_000)
    check(outcome)
    assert len(outcome.groups["tA"]) == 20
    assert len(outcome.groups["tB"]) == 200
