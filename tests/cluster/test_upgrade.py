# SPDX-License-Identifier: Apache-2.0
"""Real daemons are replaced by those of another release one by one, under load, and lose nothing.

Beside applications with the library of today runs one that was built when ABI 2 was frozen
(native/tests/frozen), and is not replaced.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from protocol.versions import Feature, Versions
from testbed.topology import Network, started
from tests.cluster.release import OtherCoordinator, OtherNode
from tests.cluster.test_two_nodes import (
    COORDINATOR,
    DEADLINE_S,
    Cluster,
    Service,
    new_trace,
    service,
)

BUILD = Path(__file__).parents[2] / "build"

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

OLDER = Versions(5, 6)
NEWER = Versions(6, 7, Feature.POLICY | Feature.CHUNK_LISTS | Feature.ZSTD)

# Twenty requests a second, each of which leaves 11 KB on the second node: what a process has in
# stock must last while its daemon is replaced.
_INTERVAL_S = 0.05


_RECORDS = 20


class FrozenApplication:
    """A process with a client of the day when ABI 2 was frozen."""

    def __init__(self, socket_path: Path, *, is_deaf: bool = False) -> None:
        """``is_deaf``: it goes on with the context that it was given first."""
        command = [BUILD / "native/tests/frozen/frozen_client", socket_path]
        self._process = subprocess.Popen(
            [*command, "deaf"] if is_deaf else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lost = self.attached = self.resumed = 0

    def __enter__(self) -> FrozenApplication:
        assert self._line() == "attached"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def fire(self, trace: str) -> bool:
        """Write a trace and fire a trigger for it. False when the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{trace[:16]} {trace[16:]} {_RECORDS} 1\n")
        self._process.stdin.flush()
        answer = self._line()
        if answer:
            self.lost, self.attached, self.resumed = map(int, answer.split())
        return bool(answer)


class Load:
    """One request after the other, each of which fires a trigger."""

    def __init__(self, fire: Callable[[str], bool]) -> None:
        self.traces: list[str] = []
        self._served: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._fire = fire
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @classmethod
    def over(cls, front: Service, peer: str) -> Self:
        """Each request goes on to another node."""
        return cls(lambda trace: front.do("fire", trace, peer) == "done")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(_INTERVAL_S):
            trace = new_trace()
            if not self._fire(trace):
                return
            self.traces.append(trace)
            self._served.put(trace)

    def goes_on(self) -> None:
        """Until some more requests were served."""
        for _ in range(self._served.qsize() + 20):
            self._served.get(timeout=DEADLINE_S)


@dataclass
class Releases:
    """A cluster whose daemons can be replaced by those of another release, by name."""

    cluster: Cluster
    daemons: dict[str, OtherCoordinator | OtherNode]


@contextlib.contextmanager
def releases(
    name: str, directory: Path, versions: Versions, node: Mapping[str, Any] | None = None
) -> Iterator[Releases]:
    """``node``: what its configuration has besides."""
    with Network(name) as network:
        # All are recorded: the policy shall be seen, and lose nothing.
        config = {**COORDINATOR, "policy": {"percentage": 100}}
        coordinator = OtherCoordinator(network.host("coordinator"), directory, config)
        alpha = OtherNode(network.host("alpha"), "alpha", directory, coordinator, node)
        beta = OtherNode(network.host("beta"), "beta", directory, coordinator, node)
        for daemon in (coordinator, alpha, beta):
            daemon.versions = versions
        with started([coordinator, alpha, beta]):
            yield Releases(
                Cluster(network, coordinator, alpha, beta),
                {"coordinator": coordinator, "alpha": alpha, "beta": beta},
            )


def await_spoken(here: Cluster, **protocols: int) -> None:
    """Until both sides say that so much is spoken with each node."""
    deadline_s = time.monotonic() + DEADLINE_S
    said: object = None
    while time.monotonic() < deadline_s:
        said = {node["node"]: node["protocol"] for node in here.coordinator.ctl_json("nodes")}
        if said == protocols:
            statuses = [node.control.status() for node in here.nodes]
            assert {status["node"]: status["protocol"] for status in statuses} == protocols
            return
    raise AssertionError(f"after {DEADLINE_S} s is spoken: {said}, not {protocols}")


def all_coherent(here: Cluster, traces: list[str], nodes: list[str]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    missing = set(traces)
    while missing:
        assert time.monotonic() < deadline_s, f"{len(missing)} of {len(traces)}: {missing}"
        missing -= {
            found["trace_id"]
            for found in here.coordinator.ctl_json("traces")
            if found["verdict"]["kind"] == "coherent" and found["nodes"] == nodes
        }


@dataclass(frozen=True)
class Step:
    """Which daemon is replaced, what is spoken with each node then, and which have the policy."""

    daemon: str
    alpha: int
    beta: int
    have_policy: frozenset[str] = frozenset()


BOTH = frozenset({"alpha", "beta"})
NODES_FIRST = (Step("alpha", 6, 6), Step("beta", 6, 6), Step("coordinator", 7, 7, BOTH))
COORDINATOR_FIRST = (
    Step("coordinator", 6, 6),
    Step("alpha", 7, 6, frozenset({"alpha"})),
    Step("beta", 7, 7, BOTH),
)


def upgrade_under_load(
    running: Releases, steps: Sequence[Step], on_step: Callable[[Step], None] = lambda _: None
) -> None:
    """All that the applications write meanwhile must be there, of the old library too."""
    here = running.cluster
    with (
        service(here.alpha) as front,
        service(here.beta),
        FrozenApplication(here.alpha.socket_path) as frozen,
    ):
        await_spoken(here, alpha=6, beta=6)
        with Load.over(front, here.beta.host.address) as load, Load(frozen.fire) as old_load:
            load.goes_on()
            old_load.goes_on()
            for step in steps:
                running.daemons[step.daemon].upgrade(NEWER)
                await_spoken(here, alpha=step.alpha, beta=step.beta)
                on_step(step)
                load.goes_on()
                old_load.goes_on()
        all_coherent(here, load.traces, ["alpha", "beta"])
        all_coherent(here, old_load.traces, ["alpha"])
        assert (frozen.lost, frozen.attached, frozen.resumed) == (0, 1, 1)


in_both_orders = pytest.mark.parametrize(
    "steps",
    [
        pytest.param(NODES_FIRST, id="nodes-first"),
        pytest.param(COORDINATOR_FIRST, id="coordinator-first", marks=pytest.mark.slow),
    ],
)


@in_both_orders
def test_one_after_the_other(tmp_path: Path, steps: Sequence[Step]) -> None:
    with releases("upgrade", tmp_path, OLDER) as running:
        nodes = running.cluster.nodes

        def who_has_the_policy(step: Step) -> None:
            statuses = [node.control.status() for node in nodes]
            assert {s["node"] for s in statuses if s["policy"]} == step.have_policy

        upgrade_under_load(running, steps, who_has_the_policy)
        # Nobody had to attach anew, and nothing was passed over.
        for node, resumed in zip(nodes, (2, 1), strict=True):
            status = node.control.status()
            assert (status["attach"]["resumed"], status["attach"]["attached"]) == (resumed, 0)
            assert status["core"]["unknown_messages"] == 0
