# SPDX-License-Identifier: Apache-2.0
"""``make bench-nodes``: what node daemons take of three machines under an ordinary load.

Three nodes and a coordinator on hosts of their own (network namespaces, needs root), and on each
node a service; requests go through all three, and some go wrong. So it is like ``make bench-shop``
without the shop: what it needs is in the tree, and the services leave most of the cores free.

BASE (COMMIT): that commit too, in turn. ROUNDS (4): in each, either has the load once. LOAD_S (20):
for how long; daemons are watched until their next turn, so that what they do later counts. PER_S
(90): requests a second. WRONG_EVERY (64): one of so many is triggered. SPANS (4): of a request and
service. SETTLE_S (40): after a load, before anything is called idle. IDLE_S (20): for how long that
is watched.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import compare, report
from bench.collection import Program, services_on
from bench.costs import Costs
from bench.environment import given, whole_number
from bench.machine import description, load, stolen_told
from bench.trees import Tree, base_tree, this_tree
from testbed.topology import Coordinator, Network, Node, started

_NODES = 3


@dataclass(frozen=True, slots=True)
class Parameters:
    """See the module."""

    rounds: int = 4
    load_s: int = 20
    per_s: int = 90
    wrong_every: int = 64
    spans: int = 4
    settle_s: int = 40
    idle_s: int = 20


@dataclass(frozen=True, slots=True)
class _Reading:
    """CPU time of all nodes and of the coordinator, and when."""

    at_s: float
    nodes_ms: float
    coordinator_ms: float

    def per_s(self, later: _Reading) -> tuple[float, float]:
        """Milliseconds a second until then, of both."""
        seconds = later.at_s - self.at_s
        return (
            (later.nodes_ms - self.nodes_ms) / seconds,
            (later.coordinator_ms - self.coordinator_ms) / seconds,
        )


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The daemons of a tree, and who puts them under load."""

    coordinator: Coordinator
    nodes: Sequence[Node]
    services: Sequence[Program]

    def reading(self) -> _Reading:
        nodes_ns = sum(Costs.of(node.daemon_pid()).cpu_ns for node in self.nodes)
        coordinator_ns = Costs.of(self.coordinator.daemon_pid()).cpu_ns
        return _Reading(time.monotonic(), nodes_ns / 1e6, coordinator_ns / 1e6)

    def load(self, parameters: Parameters) -> int:
        """Put it under load; how many spans there were."""
        first, *rest = self.services
        first.tell(
            "load",
            str(parameters.load_s),
            str(parameters.per_s),
            str(parameters.wrong_every),
            str(parameters.spans),
            *(service.host.address for service in rest),
        )
        return int(first.answer()[0]) * parameters.spans * len(self.services)

    def memory(self) -> Iterator[report.Result]:
        """As it is now."""
        nodes = [Costs.of(node.daemon_pid()) for node in self.nodes]
        for name, size in (
            ("nodes_pss_mb", sum(one.pss_bytes for one in nodes)),
            ("nodes_own_mb", sum(one.pss_bytes - one.shared_bytes for one in nodes)),
            ("nodes_coordinator_pss_mb", Costs.of(self.coordinator.daemon_pid()).pss_bytes),
        ):
            yield report.Result.of(name, "MB", [size / 1e6], {})


@contextlib.contextmanager
def _fleet(name: str, tree: Tree, directory: Path) -> Iterator[_Fleet]:
    directory.mkdir()
    with tree.daemons(), Network(name) as network:
        coordinator = Coordinator(network.host("coordinator"), directory)
        nodes = [
            Node(network.host(f"node-{i}"), f"node-{i}", directory, coordinator)
            for i in range(_NODES)
        ]
        with started([coordinator, *nodes]), services_on(nodes) as services:
            yield _Fleet(coordinator, nodes, services)


def _measure(
    fleets: Mapping[str, _Fleet], parameters: Parameters
) -> Iterator[tuple[str, list[report.Result]]]:
    """The results of each round, by the fleet."""
    for fleet in fleets.values():
        fleet.load(parameters)  # imports, caches, connections; not measured
    time.sleep(parameters.settle_s)
    before = {name: fleet.reading() for name, fleet in fleets.items()}
    time.sleep(parameters.idle_s)
    idle = {name: before[name].per_s(fleet.reading()) for name, fleet in fleets.items()}
    moments: dict[str, list[_Reading]] = {name: [] for name in fleets}
    spans: dict[str, list[int]] = {name: [] for name in fleets}
    memory: dict[str, list[list[report.Result]]] = {name: [] for name in fleets}
    for number in range(parameters.rounds):
        print(f"round {number + 1} of {parameters.rounds}; load {load():.1f}", flush=True)
        for name, fleet in fleets.items():
            moments[name].append(fleet.reading())
            spans[name].append(fleet.load(parameters))
            memory[name].append(list(fleet.memory()))
        if len(fleets) == 1:
            time.sleep(parameters.load_s)  # as long as another's turn takes
    for name, fleet in fleets.items():
        moments[name].append(fleet.reading())
        time.sleep(parameters.load_s)
    for name in fleets:
        for i in range(parameters.rounds):
            begin, end = moments[name][i : i + 2]
            seconds = end.at_s - begin.at_s
            yield (
                name,
                [*_costs(begin.per_s(end), idle[name], spans[name][i] / seconds)] + memory[name][i],
            )


def _costs(
    rates: tuple[float, float], idle: tuple[float, float], spans_per_s: float
) -> Iterator[report.Result]:
    """Of all nodes and of the coordinator, by their CPU time in milliseconds a second."""
    for who, rate, idle_rate in zip(("nodes", "nodes_coordinator"), rates, idle, strict=True):
        net = (rate - idle_rate) / (spans_per_s / 1000)
        yield report.Result.of(f"{who}_cpu_ms", "ms per 1,000 spans, net of idle", [net], {})
        yield report.Result.of(f"{who}_idle_cpu_ms", "ms a second without load", [idle_rate], {})


def main(environment: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Measure and print it all."""
    if arguments:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        parameters = given(Parameters(), environment, whole_number(10_000))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if os.geteuid():
        sys.stderr.write("hosts are network namespaces, which needs root: sudo make bench-nodes\n")
        return 2
    base = environment.get("BASE", "")
    trees = [*([base_tree(base)] if base else []), this_tree()]
    for name, what in description().items():
        print(f"{name}: {what}")
    print(f"commits: {' '.join(tree.commit for tree in trees)}; {parameters}", flush=True)
    rounds: dict[str, list[list[report.Result]]] = {tree.commit: [] for tree in trees}
    with (
        tempfile.TemporaryDirectory(prefix="backsight-") as name,
        stolen_told(),
        contextlib.ExitStack() as stack,
    ):
        fleets = {
            tree.commit: stack.enter_context(
                _fleet(f"nodes{number}", tree, Path(name) / str(number))
            )
            for number, tree in enumerate(trees)
        }
        for commit, results in _measure(fleets, parameters):
            rounds[commit].append(results)
    *before, after = rounds.values()
    if before:
        print(compare.table(compare.compared(before[0], after), trees[0].commit, "now"))
    else:
        print(report.table(compare.merged(after)))
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ, sys.argv[1:]))
