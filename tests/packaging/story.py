# SPDX-License-Identifier: Apache-2.0
"""What is done to the cluster, and what became of it: faults, and machines that go and come back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.packaging.cluster import Cluster, ClusterError

# On each node; and while a machine is away, and when it is back.
_FAULTS = 5


@dataclass(frozen=True, slots=True)
class Before:
    """An order that all nodes saw, and that was triggered when the last one had no power any more.

    ``missing``: the nodes that the reasons of its verdict name, also those which asked one that is
    missing. ``nodes``: who had it.
    """

    verdict: str
    missing: list[str]
    nodes: list[str]


@dataclass(frozen=True, slots=True)
class Loss:
    """A machine without power, and with it again: the verdicts on what failed then, counted."""

    machine: str
    away: Mapping[str, int]
    back: Mapping[str, int]
    before: Before | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """``build/cluster/result.json``. ``traces``: what failed with all machines there."""

    nodes: int
    traces: int
    coherent: int
    node_loss: Loss
    coordinator_loss: Loss

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def problems(self) -> list[str]:
        """What was not as it should be."""
        coherent = {"coherent": _FAULTS}
        node, coordinator = self.node_loss, self.coordinator_loss
        expected = {
            "not all traces are coherent": self.coherent == self.traces,
            "a node without power is not named as missing": node.before is not None
            and node.before.verdict == "partial"
            and node.machine in node.before.missing,
            "what failed with a node away is not all reported, as partial": node.away
            == {"partial": _FAULTS},
            "what failed with the node back is not coherent": node.back == coherent,
            "what failed with the coordinator away is not coherent": coordinator.away == coherent,
            "what failed with the coordinator back is not coherent": coordinator.back == coherent,
        }
        return [problem for problem, held in expected.items() if not held]


class Story:
    """The cluster's, from its first fault on."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say

    def tell(self) -> Result:
        """It takes a minute or two."""
        cluster = self._cluster
        cluster.await_orders()
        self._say("services fail, on each node")
        failed = [cluster.order(error=node) for node in cluster.names for _ in range(_FAULTS)]
        verdicts = self._coherent(failed)
        return Result(
            len(cluster.names),
            sum(verdicts.values()),
            verdicts.get("coherent", 0),
            self._lose_node(cluster.names[-1]),
            self._lose_coordinator(),
        )

    def _coherent(self, traces: list[str]) -> dict[str, int]:
        with contextlib.suppress(ClusterError):
            self._cluster.await_coherent(traces)
        return self._verdicts(traces)

    def _verdicts(self, traces: list[str]) -> dict[str, int]:
        judged = self._cluster.judged(traces)
        return dict(Counter(trace["verdict"]["kind"] for trace in judged.values()))

    def _fail(self) -> list[str]:
        return [self._cluster.order(error="node-1") for _ in range(_FAULTS)]

    def _lose_node(self, name: str) -> Loss:
        cluster = self._cluster
        seen = cluster.order()
        with cluster.without_power(name):
            self._say(f"{name} has no power")
            cluster.machines["node-1"].run("backsightctl", "trigger", seen)
            (before,) = cluster.judged([seen]).values()
            away = self._verdicts(self._fail())
        self._say(f"{name} has power again")
        cluster.await_orders()
        missing = {reason["node"] for reason in before["verdict"]["reasons"]}
        return Loss(
            name,
            away,
            self._coherent(self._fail()),
            Before(before["verdict"]["kind"], sorted(missing), before["nodes"]),
        )

    def _lose_coordinator(self) -> Loss:
        with self._cluster.without_power("coordinator"):
            self._say("the coordinator has no power")
            failed = self._fail()
        self._say("the coordinator has power again")
        return Loss("coordinator", self._coherent(failed), self._coherent(self._fail()))
