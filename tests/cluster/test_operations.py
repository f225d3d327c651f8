# SPDX-License-Identifier: Apache-2.0
"""Real daemons as who operates them sees them: their figures, and a configuration that changes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.metrics import TAKEN_AT
from testbed.topology import PYTHON, Daemon, Node
from tests.cluster.test_two_nodes import Cluster, Service, cluster, new_trace, service

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

# What it was served a moment ago is from before what a test did since.
SCRAPE = f"""
import sys, time, urllib.request
asked_s = taken_s = time.time()
while taken_s <= asked_s:
    with urllib.request.urlopen(sys.argv[1]) as answer:
        text, taken_s = answer.read().decode(), float(answer.headers["{TAKEN_AT}"])
print(text)
"""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster("ops", tmp_path_factory.mktemp("ops")) as here:
        yield here


def scrape(daemon: Daemon, port: int) -> Samples:
    """A daemon's samples, asked on its own host, where it serves them by default."""
    text = daemon.host.run(PYTHON, "-c", SCRAPE, f"http://127.0.0.1:{port}/metrics")
    subprocess.run(["promtool", "check", "metrics"], input=text, text=True, check=True)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


def node_figure(node: Node, name: str, **labels: str) -> float:
    return scrape(node, 4771).get((f"backsight_node_{name}", frozenset(labels.items())), 0.0)


def coordinator_figure(two: Cluster, name: str, **labels: str) -> float:
    samples = scrape(two.coordinator, 4772)
    return samples[f"backsight_coordinator_{name}", frozenset(labels.items())]


def test_a_trace_shows_in_the_figures_of_all_who_had_a_part_in_it(two: Cluster) -> None:
    before = coordinator_figure(two, "verdicts_total", kind="coherent")
    trace = new_trace()
    with service(two.alpha) as front, service(two.beta):
        front.do("fire", trace, two.beta.host.address)
        two.coherent(trace)
        assert node_figure(two.alpha, "clients") == node_figure(two.beta, "clients") == 1
    admitted = {"trigger": "front", "outcome": "admitted"}
    assert node_figure(two.alpha, "triggers_total", **admitted) == 1
    assert node_figure(two.beta, "triggers_total", **admitted) == 0
    assert node_figure(two.alpha, "pick_up_seconds_count") == 1
    assert node_figure(two.beta, "pick_up_seconds_count") == 0
    for node in two.nodes:
        # Only what was triggered leaves, and nothing else was written.
        generated = node_figure(node, "generated_bytes_total")
        assert 0 < generated <= node_figure(node, "reported_bytes_total", trigger="front")
        assert node_figure(node, "groups_collected_total", trigger="front") == 1
        assert node_figure(node, "connected") == 1
    assert coordinator_figure(two, "nodes_connected") == 2
    assert coordinator_figure(two, "verdicts_total", kind="coherent") == before + 1
    assert coordinator_figure(two, "traversal_seconds_count") == before + 1
    assert coordinator_figure(two, "store_bytes") > 0


def test_limits_change_while_a_node_runs_and_lose_nothing(two: Cluster) -> None:
    limited = {"trigger": "front", "outcome": "refused_by_trigger_limit"}
    with service(two.alpha) as front, service(two.beta):
        pid = two.alpha.daemon_pid()
        # A token an hour, and one to begin with.
        two.alpha.reload(triggers={"per_trigger_per_s": 0.001, "per_trigger_burst": 1})
        assert node_figure(two.alpha, "triggers_total", **limited) == 0
        for _ in range(3):
            assert front.do("fire", new_trace(), two.beta.host.address) == "done"
        while (refused := node_figure(two.alpha, "triggers_total", **limited)) < 2:
            pass
        assert refused == 2
        two.alpha.reload(triggers={"per_trigger_per_s": 1e6, "per_trigger_burst": 100})
        trace = new_trace()
        front.do("fire", trace, two.beta.host.address)
        two.coherent(trace)
        assert two.alpha.daemon_pid() == pid
        assert node_figure(two.alpha, "clients") == 1


def test_the_coordinators_policy_holds_on_all_nodes_and_over_their_restarts(two: Cluster) -> None:
    def recorded(front: Service) -> bool:
        """Whether the services record what happens now."""
        before = node_figure(two.alpha, "generated_bytes_total")
        assert front.do("request", new_trace(), two.beta.host.address) == "done"
        return node_figure(two.alpha, "generated_bytes_total") > before

    def await_percentage(wanted: float) -> None:
        for node in two.nodes:
            while node_figure(node, "percentage") != wanted:
                pass

    with service(two.alpha) as front, service(two.beta):
        # A node learns of a thread a moment after its first record: what is counted then is exact.
        first = node_figure(two.alpha, "generated_bytes_total")
        assert front.do("request", new_trace(), two.beta.host.address) == "done"
        while node_figure(two.alpha, "generated_bytes_total") == first:
            pass
        two.coordinator.reload(policy={"percentage": 0})
        await_percentage(0)
        assert not recorded(front)
        # With the coordinator stopped, what a node knows it knows from before.
        pid = two.coordinator.daemon_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            two.alpha.kill_daemon()
            assert node_figure(two.alpha, "connected") == 0
            assert node_figure(two.alpha, "percentage") == 0
            assert not recorded(front)
        finally:
            os.kill(pid, signal.SIGCONT)
        two.coordinator.reload(policy=None)
        await_percentage(100)
        assert recorded(front)
        trace = new_trace()
        front.do("fire", trace, two.beta.host.address)
        # What else it did, while nothing was recorded, nobody knows.
        shown = two.trace(trace, lambda shown: shown["verdict"]["kind"] == "lossy")
        assert {reason["kind"] for reason in shown["verdict"]["reasons"]} == {"maybe_lossy"}


def test_a_bad_configuration_changes_nothing_and_is_in_the_log(two: Cluster) -> None:
    text = two.alpha.config_path.read_text()
    pid = two.alpha.daemon_pid()
    two.alpha.reload(pool_bytes="1 elephant", tombstones=5)
    assert two.alpha.daemon_pid() == pid
    words = two.alpha.last_words()
    assert "pool_bytes: 1 elephant; allowed: 4MiB to 512GiB" in words
    assert words.endswith("the configuration is kept as it was")
    two.alpha.config_path.write_text(text)
    two.alpha.reload(tombstones=5)
    assert "these changes wait for a restart: tombstones" in two.alpha.last_words()
