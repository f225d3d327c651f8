# SPDX-License-Identifier: Apache-2.0
"""What each trace and node takes of the coordinator's memory, as the schema tells operators."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from coordinator.core.config import CoordinatorConfig
from coordinator.settings import core_config
from runtime.schema import ConfigError, loads
from runtime.settings.coordinator import CLOSED_BYTES, NODE_BYTES, TRACE_BYTES, Settings
from tests.unit.coordinator_harness import Harness, S, trace_id, two_nodes

COUNT = 200

# What stands in the schema is for people: true, and no waste.
LEAST = 0.8


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def taken_bytes(act: Callable[[], object]) -> int:
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    act()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def forget_what_tests_keep(harness: Harness) -> None:
    harness.verdicts.clear()
    harness.said.clear()
    harness.sent.clear()
    harness.replied.clear()
    harness._asked.clear()
    harness.store.traces.clear()
    harness.store.triggers.clear()
    harness.store.fired_ns.clear()


def test_an_open_trace_takes_no_more_than_is_said() -> None:
    harness = Harness()
    harness.cluster("n1", "n2", "n3")

    def begin() -> None:
        for number in range(COUNT):
            trace = trace_id(f"T{number}")
            harness.fire("n1", trace)
            harness.status("n1", trace, 1000, ["n2"])
            harness.status("n2", trace, 1000, ["n1", "n3"])
            harness.status("n3", trace, 1000, ["n2"], open_handles=1)
        forget_what_tests_keep(harness)

    each = taken_bytes(begin) / COUNT
    assert harness.core.figures().traces_open == COUNT
    assert LEAST * TRACE_BYTES < each < TRACE_BYTES


def test_a_closed_trace_takes_no_more_than_is_said() -> None:
    harness = Harness(CoordinatorConfig(linger_ns=S))
    harness.cluster("n1", "n2")

    def close() -> None:
        for number in range(COUNT):
            trace = trace_id(f"T{number}")
            harness.fire("n1", trace)
            harness.deliver(trace, two_nodes())
        harness.wait(5 * S)
        forget_what_tests_keep(harness)

    each = taken_bytes(close) / COUNT
    assert harness.core.figures().traces_closed == COUNT
    assert LEAST * CLOSED_BYTES < each < CLOSED_BYTES


def test_a_node_takes_no_more_than_is_said() -> None:
    harness = Harness()

    def come() -> None:
        harness.cluster(*(f"node-{number}.example.org" for number in range(COUNT)))
        for name in list(harness.sessions):
            harness.lose_slices(name)
            harness.lose(name)
        forget_what_tests_keep(harness)

    each = taken_bytes(come) / COUNT
    assert harness.core.figures().nodes_known == COUNT
    assert LEAST * NODE_BYTES < each < NODE_BYTES


def test_a_limit_that_cannot_be_says_what_can_and_what_it_costs() -> None:
    with pytest.raises(ConfigError) as caught:
        loads("traces_max: 63\nnodes_max: many", Settings, "f")
    traces, nodes = caught.value.problems
    costs = "each of which takes up to"
    assert traces == (
        "f:1: traces_max: 63; allowed: a whole number from 64 to 1048576,"
        f" {costs} {TRACE_BYTES} bytes of memory"
    )
    assert nodes == (
        "f:2: nodes_max: many; allowed: a whole number from 1 to 1048576,"
        f" {costs} {NODE_BYTES} bytes of memory"
    )


def test_limits_reach_the_core() -> None:
    text = "{traces_max: 100, evidence_max: 300000, closed_max: 200, nodes_max: 4}"
    config = core_config(loads(text, Settings, "f"), 1)
    limits = (config.traces_max, config.evidence_max, config.closed_max, config.nodes_max)
    assert limits == (100, 300_000, 200, 4)


def test_as_by_default_they_are_those_of_the_core() -> None:
    configured, own = core_config(Settings(), 1), CoordinatorConfig()
    for name in ("traces_max", "evidence_max", "closed_max", "nodes_max"):
        assert getattr(configured, name) == getattr(own, name)


def test_fewer_nodes_are_known_after_a_reload_but_none_that_is_connected() -> None:
    harness = Harness(CoordinatorConfig(nodes_max=5))
    for name in ("a", "b", "c", "d", "e"):
        harness.connect(name)
    for name in ("b", "a", "c"):
        harness.lose(name)
    harness.core.reconfigure(CoordinatorConfig(nodes_max=3))
    harness.fetch()
    assert [view.node for view in harness.core.nodes(harness.now_ns)] == ["c", "d", "e"]
    harness.core.reconfigure(CoordinatorConfig(nodes_max=1))
    harness.fetch()
    assert [view.node for view in harness.core.nodes(harness.now_ns)] == ["d", "e"]
    assert set(harness.store.nodes) == {"d", "e"}
