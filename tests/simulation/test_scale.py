# SPDX-License-Identifier: Apache-2.0
"""Many nodes: idle ones cost nothing, and a thousand busy ones are judged as few are."""

from __future__ import annotations

import random

import pytest

from tests.simulation.faults import run_at
from tests.simulation.network import S
from tests.simulation.simulator import Simulator
from tests.simulation.traffic import Call, Request

IDLE_STEPS = 0.7
"""Of an idle node in a second: its clock is asked now and then."""

NODES = 1000
REQUESTS_PER_S = 300
BUSY_S = 10
FIRED = 0.3
"""Of all requests, so many."""


def test_idle_nodes_cost_nothing() -> None:
    sim = Simulator(seed=1)
    sim.add_nodes(*(f"n{number}" for number in range(200)))
    sim.run(30)  # clocks are asked more often at first
    before, seconds = sim.scheduler.steps, 60
    sim.run(seconds)
    steps = sim.scheduler.steps - before
    assert 0 < steps <= IDLE_STEPS * len(sim.nodes) * seconds
    sim.check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_nodes_of_which_some_fail() -> None:
    sim = Simulator(seed=2)
    rng = random.Random(3)
    names = [f"n{number}" for number in range(NODES)]
    sim.add_nodes(*names)
    sim.run(1)

    def tree(depth: int) -> Call:
        calls = [tree(depth + 1) for _ in range(rng.choice((0, 1, 2)) if depth < 3 else 0)]
        return Call(rng.choice(names), calls)

    def fire(node: str, request: Request) -> None:
        sim.fire(node, request.trace)

    def begin() -> None:
        request = sim.request(tree(0))
        if rng.random() < FIRED:
            node = rng.choice(request.visits).node
            run_at(sim, 0.1, lambda: fire(node, request))

    def fail() -> None:
        node = sim.nodes[rng.choice(names)]
        node.kill_daemon()
        sim.scheduler.after(S, node.start)

    for number in range(BUSY_S * REQUESTS_PER_S):
        run_at(sim, number / REQUESTS_PER_S, begin)
    for number in range(BUSY_S * 5):
        run_at(sim, number / 5, fail)
    run_at(sim, BUSY_S / 2, sim.coordinator.kill)
    run_at(sim, BUSY_S / 2 + 1, sim.coordinator.start)
    sim.run(BUSY_S)
    sim.settle(60)
    sim.check()
    tally = sim.oracle.tally
    print(f"{sim.scheduler.steps} steps; {tally}")
    assert tally.traces > 0.9 * BUSY_S * REQUESTS_PER_S * FIRED
    assert tally.coherent > 0.9 * tally.traces
