# SPDX-License-Identifier: Apache-2.0
"""A cluster is upgraded daemon by daemon while requests go on, and loses nothing by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.core.policy import policy_of
from protocol.messages import NO_POLICY, Policy
from protocol.versions import Agreed, Feature, Versions
from tests.simulation.simulator import Simulator
from tests.simulation.traffic import Call, Request

# Two releases one after the other: the newer one knows a version and a feature more.
OLDER = Versions(5, 6)
NEWER = Versions(6, 7, Feature.POLICY)
# And one that came long after.
MUCH_NEWER = Versions(7, 8, Feature.POLICY)

NODES = ("a", "b", "c")
POLICY = policy_of(1 << 60)

Step = Callable[[Simulator], None]


def upgrade_nodes(*names: str, to: Versions) -> Step:
    def step(sim: Simulator) -> None:
        for name in names:
            sim.nodes[name].upgrade(to)

    return step


def upgrade_coordinator(to: Versions) -> Step:
    return lambda sim: sim.coordinator.upgrade(to)


def cluster(versions: Versions) -> Simulator:
    sim = Simulator(seed=1)
    sim.coordinator.upgrade(versions)
    sim.coordinator.set_policy(POLICY)
    sim.add_nodes(*NODES)
    upgrade_nodes(*NODES, to=versions)(sim)
    sim.run(0.5)
    return sim


def spoken(sim: Simulator) -> dict[str, Agreed | None]:
    """What each node speaks, of which the coordinator must think the same."""
    assert sim.coordinator.core is not None
    thought = {view.node: view.agreed for view in sim.coordinator.core.nodes(0)}
    said = {
        name: node.core.links[0].agreed for name, node in sim.nodes.items() if node.core is not None
    }
    assert said == {**dict.fromkeys(NODES), **thought}
    return said


def under_load(sim: Simulator, step: Step) -> list[Request]:
    """Requests over all nodes, each triggered somewhere, before, during and after a step."""
    requests = []
    for number in range(20):
        if number == 10:
            step(sim)
        where = NODES[number % len(NODES)]
        request = sim.request(Call(where, [Call(name) for name in NODES if name != where]))
        requests.append(request)
        sim.run(0.02)
        sim.fire(where, request.trace)
        sim.run(0.02)
    sim.run(1.0)
    return requests


def nobody_is_parted(sim: Simulator) -> None:
    # While the coordinator has not noticed that a node was killed, the next one must wait.
    reasons = [reason for node in sim.nodes.values() for reason in node.refusals]
    assert not [reason for reason in reasons if "protocol" in reason]


def nothing_is_lost(sim: Simulator, requests: list[Request]) -> None:
    sim.settle(30)
    sim.check()
    for request in requests:
        assert sim.kind(request.trace) == "coherent"
        assert set(sim.delivered(request.trace)) == set(NODES)
        assert not sim.missing(request.trace, sim.scheduler.now_ns)
    for node in sim.nodes.values():
        assert node.core is not None
        counters = node.core.counters
        assert (counters.unknown_messages, counters.unexpected_messages) == (0, 0)


def test_nodes_first_then_the_coordinator() -> None:
    sim = cluster(OLDER)
    assert set(spoken(sim).values()) == {Agreed(6)}
    requests = []
    for name in NODES:
        requests += under_load(sim, upgrade_nodes(name, to=NEWER))
        # The older one speaks what it knows, and says nothing of a policy.
        assert set(spoken(sim).values()) == {Agreed(6)}
        assert {node.policy for node in sim.nodes.values()} == {NO_POLICY}
    requests += under_load(sim, upgrade_coordinator(NEWER))
    assert set(spoken(sim).values()) == {Agreed(7, Feature.POLICY)}
    assert {node.policy for node in sim.nodes.values()} == {POLICY}
    nobody_is_parted(sim)
    nothing_is_lost(sim, requests)


def test_the_coordinator_first_then_nodes() -> None:
    sim = cluster(OLDER)
    requests = under_load(sim, upgrade_coordinator(NEWER))
    assert set(spoken(sim).values()) == {Agreed(6)}
    policies: dict[str, Policy] = dict.fromkeys(NODES, NO_POLICY)
    agreed: dict[str, Agreed] = dict.fromkeys(NODES, Agreed(6))
    for name in NODES:
        requests += under_load(sim, upgrade_nodes(name, to=NEWER))
        agreed[name] = Agreed(7, Feature.POLICY)
        policies[name] = POLICY
        assert spoken(sim) == agreed
        assert {name: node.policy for name, node in sim.nodes.items()} == policies
    nobody_is_parted(sim)
    nothing_is_lost(sim, requests)


def test_and_back_again() -> None:
    sim = cluster(NEWER)
    requests = under_load(sim, upgrade_coordinator(OLDER))
    # Nobody is there who could take it back: the last one holds.
    assert {node.policy for node in sim.nodes.values()} == {POLICY}
    for name in NODES:
        requests += under_load(sim, upgrade_nodes(name, to=OLDER))
        assert set(spoken(sim).values()) == {Agreed(6)}
    nothing_is_lost(sim, requests)


@pytest.mark.parametrize(
    ("steps", "refused", "older"),
    [
        (
            [upgrade_nodes(*NODES, to=MUCH_NEWER), upgrade_coordinator(MUCH_NEWER)],
            "the node speaks protocol 7 to 8, the coordinator 5 to 6",
            "coordinator",
        ),
        (
            [upgrade_coordinator(MUCH_NEWER), upgrade_nodes(*NODES, to=MUCH_NEWER)],
            "the node speaks protocol 5 to 6, the coordinator 7 to 8",
            "node",
        ),
    ],
)
def test_a_release_that_is_left_out_parts_them_for_a_while_and_loses_nothing(
    steps: list[Step], refused: str, older: str
) -> None:
    sim = cluster(OLDER)
    first, second = steps
    requests = under_load(sim, first)
    assert set(spoken(sim).values()) == {None}
    for node in sim.nodes.values():
        assert node.core is not None
        assert node.core.links[0].refused == node.refusals[-1]
        assert node.refusals[-1].endswith(f"{refused}: update the {older}")
    requests += under_load(sim, second)
    assert set(spoken(sim).values()) == {Agreed(8, Feature.POLICY)}
    nothing_is_lost(sim, requests)
