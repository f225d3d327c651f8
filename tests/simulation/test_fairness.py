# SPDX-License-Identifier: Apache-2.0
"""What overload leaves, as in figure 4 of the paper: rates are swept, and any node may be the bottleneck.

Every request visits a few services, whichever, and every one of them may report as much. A common
trigger fires for much more than that, rare ones for less. What is kept must be the traces of
highest priority, whole, and of each trigger as much as its weight says.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from appliance.core.config import TriggerPolicy
from appliance.core.node import NodeConfig, TriggerLimits
from coordinator.core.config import CoordinatorConfig
from protocol.hashing import Domain, TraceHash
from protocol.messages import Group
from tests.simulation.faults import run_at
from tests.simulation.network import MS, Link, S
from tests.simulation.pool import PoolConfig
from tests.simulation.simulator import Simulator
from tests.simulation.traffic import Call, Request

SERVICES = 12
VISITS = 3
PAYLOAD_BYTES = 4000
REQUESTS_PER_S = 150
REQUESTS = 1800

SEED = 77
"""Of priorities."""


@dataclass(slots=True)
class Outcome:
    sim: Simulator
    fired: dict[str, list[Group]] = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    """Bytes by trigger, over all nodes, while there was traffic."""

    def coherent(self, groups: list[Group]) -> float:
        kinds = [self.sim.kind(group.primary) for group in groups]
        return kinds.count("coherent") / len(groups)

    def by_priority(self, trigger: str) -> list[Group]:
        """What was fired under this name alone, the highest priority first."""
        rank = TraceHash(Domain.PRIORITY, SEED)
        others = {
            group.primary
            for name, groups in self.fired.items()
            for group in groups
            if name != trigger
        }
        alone = [group for group in self.fired[trigger] if group.primary not in others]
        return sorted(alone, key=lambda group: -rank(group.primary))


def overload(
    report_bytes_per_s: int,
    firings: Mapping[str, float],
    policies: Mapping[str, TriggerPolicy] | None = None,
) -> Outcome:
    """Fire each trigger for such a part of all requests."""
    sim = Simulator(
        seed=1,
        coordinator_config=CoordinatorConfig(
            linger_ns=2 * S,
            missing_linger_ns=60 * S,
            clock_probe_interval_ns=3600 * S,
            priority_seed=SEED,
        ),
    )
    config = NodeConfig(
        "",
        limits=TriggerLimits(10_000, 10_000, 10_000, 10_000),
        policies=policies or {},
        report_bytes_per_s=report_bytes_per_s,
        report_burst_bytes=16 << 10,
        triggered_ttl_ns=3600 * S,
    )
    pool = PoolConfig(pool_bytes=16 << 20, arena_bytes=16 << 20, store_bytes=512 << 10)
    names = [f"s{number}" for number in range(SERVICES)]
    for name in names:
        sim.add_node(name, config, pool, Link(latency_ns=MS, jitter_ns=MS))
    sim.run(0.5)
    outcome = Outcome(sim, {name: [] for name in firings})
    rng = random.Random(2)

    def fire(request: Request, trigger: str) -> None:
        node = rng.choice(request.visits).node
        outcome.fired[trigger].append(sim.fire(node, request.trace, trigger))

    def begin() -> None:
        root, *others = (
            Call(name, payload_bytes=PAYLOAD_BYTES) for name in rng.sample(names, VISITS)
        )
        root.calls = others
        request = sim.request(root)
        for trigger, part in firings.items():
            if rng.random() < part:
                run_at(sim, 0.05, lambda trigger=trigger: fire(request, trigger))  # type: ignore[misc]

    for number in range(REQUESTS):
        run_at(sim, number / REQUESTS_PER_S, begin)
    sim.run(REQUESTS / REQUESTS_PER_S)
    for trigger in firings:
        outcome.reported[trigger] = sum(
            node.core.counters.triggers[trigger].reported_bytes
            for node in sim.nodes.values()
            if node.core is not None and trigger in node.core.counters.triggers
        )
    sim.settle(30)
    return outcome


RARE = {"tA": 0.17, "tB": 0.2, "tF": 0.5}
"""What fires for which part of all requests: 325 times tA, 372 times tB, 927 times tF."""

ALL_FITS, TF_IS_TOO_MUCH, ALL_ARE_TOO_MUCH = 400_000, 90_000, 60_000
"""Bytes a second that a node may report: tA wants 27,000 of them, tB 31,000, tF 79,000."""

FIFTHS = 5


def fifths(outcome: Outcome, trigger: str) -> list[float]:
    """How many are coherent of each fifth, the one of the highest priority first."""
    ranked = outcome.by_priority(trigger)
    size = len(ranked) // FIFTHS
    return [outcome.coherent(ranked[n * size : (n + 1) * size]) for n in range(FIFTHS)]


def check_priorities(outcome: Outcome, bottlenecks: int) -> None:
    """The same traces are kept everywhere: those of the highest priority.

    ``bottlenecks``: how many nodes at least gave up anything by themselves. Who has least to do may find
    that others gave up what it would have.
    """
    kept = fifths(outcome, "tF")
    # With other seeds 0.8 to 0.92 where all are too much.
    assert kept[0] >= 0.75, kept
    # What still waits when the traffic ends is reported then.
    assert kept[-1] <= 0.35, kept
    assert all(higher >= lower - 0.1 for higher, lower in pairwise(kept)), kept
    gave_up = {name for names in outcome.sim.world.given_up.values() for name in names}
    assert len(gave_up) >= bottlenecks


def test_a_common_trigger_takes_only_what_rare_ones_leave_and_keeps_the_highest_priorities() -> (
    None
):
    outcome = overload(TF_IS_TOO_MUCH, RARE)
    assert len(outcome.fired["tA"]) >= 300
    assert outcome.coherent(outcome.fired["tA"]) >= 0.99
    assert outcome.coherent(outcome.fired["tB"]) >= 0.99
    assert 0.3 <= outcome.coherent(outcome.fired["tF"]) <= 0.9
    check_priorities(outcome, SERVICES // 2)


def test_triggers_share_what_there_is_by_their_weights() -> None:
    policies = {"tW": TriggerPolicy(weight=4.0)}
    outcome = overload(ALL_ARE_TOO_MUCH, {"tW": 0.45, "tF": 0.45}, policies)
    assert 3 <= outcome.reported["tW"] / outcome.reported["tF"] <= 5
    check_priorities(outcome, SERVICES - 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rate", "least"),
    [
        (ALL_FITS, {"tA": 0.99, "tB": 0.99, "tF": 0.99}),
        (TF_IS_TOO_MUCH, {"tA": 0.99, "tB": 0.99, "tF": 0.3}),
        (ALL_ARE_TOO_MUCH, {"tA": 0.7, "tB": 0.7, "tF": 0.3}),
    ],
)
def test_the_share_of_each_trigger_at_each_rate(rate: int, least: Mapping[str, float]) -> None:
    outcome = overload(rate, RARE)
    for trigger, share in least.items():
        assert outcome.coherent(outcome.fired[trigger]) >= share, trigger
    if rate != ALL_FITS:
        check_priorities(outcome, SERVICES - 2 if rate == ALL_ARE_TOO_MUCH else SERVICES // 2)
