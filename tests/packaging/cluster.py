# SPDX-License-Identifier: Apache-2.0
"""The cluster of vagrant/ in containers: booted trees on a bridge, made by the same provisioning."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from testbed.machines import Machine, tree_with
from testbed.topology import Host, Network, Opened

_VAGRANT = Path(__file__).parents[2] / "vagrant"

# A busy machine boots one in some seconds, and a trace is judged in less than one.
_DEADLINE_S = 120.0


class ClusterError(RuntimeError):
    """The cluster does not do what it is for; the message says what."""


class Cluster(Opened):
    """One coordinator and nodes; all run, and orders are recorded, when it is entered.

    Closed, nothing is left of it but what its machines said, in ``directory``.
    """

    def __init__(
        self,
        packages: Sequence[Path],
        nodes: int,
        directory: Path,
        say: Callable[[str], None],
        suite: str = "bookworm",
    ) -> None:
        self.names = [f"node-{number}" for number in range(1, nodes + 1)]
        self.machines: dict[str, Machine] = {}
        self._hosts: dict[str, Host] = {}
        self._network = Network("cluster")
        self._packages = packages
        self._directory = directory
        self._say = say
        self._suite = suite
        self._stack = contextlib.ExitStack()

    def open(self) -> None:
        self._say(f"a plain Debian {self._suite}, and what the packages need")
        self._stack.callback(shutil.rmtree, self._directory / "trees", ignore_errors=True)
        (self._directory / "trees").mkdir()
        tree = tree_with(self._packages, self._suite, self._directory / "trees")
        shutil.copytree(_VAGRANT, tree / "vagrant")
        network = self._stack.enter_context(self._network)
        for name in ("coordinator", *self.names):
            self._say(f"{name} boots")
            self._hosts[name] = network.host(name)
            machine = Machine(name, tree, self._directory, self._hosts[name])
            self.machines[name] = self._stack.enter_context(machine)
        self._say("all are provisioned")
        addresses = [f"{name}={host.address}" for name, host in self._hosts.items()]
        provision = ("/vagrant/provision", "/dist", *addresses)
        # Two at a time, as this machine has processors. The first is the coordinator.
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda m: m.run(*provision), self.machines.values()))

    def close(self) -> None:
        self._stack.close()

    def order(self, **faults: str) -> str:
        """Order of the first service, with faults by kind on a node; the trace."""
        return str(self._order(faults)["trace"])

    def _order(self, faults: Mapping[str, str]) -> dict[str, Any]:
        query = "&".join(f"{kind}={node}" for kind, node in faults.items())
        said = self.machines["node-1"].run("curl", "-s", f"localhost:8080/order?{query}")
        answer: dict[str, Any] = json.loads(said)
        return answer

    def await_orders(self) -> None:
        """Until an order comes as far as the last node, and each of them has the coordinator."""

        def reaches_all() -> bool:
            try:
                return bool(self._order({})["visited"] == self.names)
            except RuntimeError:
                return False  # a service that was just started does not listen yet

        self._await("orders", reaches_all)
        connected = dict.fromkeys(self.names, True)
        self._await(
            "the nodes",
            lambda: {node["node"]: node["connected"] for node in self._ask("nodes")} == connected,
        )

    @contextlib.contextmanager
    def without_power(self, name: str) -> Iterator[None]:
        """A machine is gone at once, without a word; it boots at the end."""
        with self._network.unplugged(self._hosts[name]):
            self.machines[name].cut_power()
            yield
        self.machines[name].boot()

    def judged(self, wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Those traces, once each is judged: by a first verdict, which may not be the last."""
        found: dict[str, dict[str, Any]] = {}

        def are_judged() -> bool:
            for trace in self._ask("traces", "--limit", "0"):
                if trace["verdict"]["kind"] != "provisional":
                    found[trace["trace_id"]] = trace
            return found.keys() >= set(wanted)

        self._await(f"verdicts on {len(wanted)} traces", are_judged)
        return {trace: found[trace] for trace in wanted}

    def await_coherent(self, wanted: Sequence[str]) -> None:
        """Until all of those traces are; a node that comes back late makes them so after a while."""

        def are_coherent() -> bool:
            coherent = self._ask("traces", "--limit", "0", "--verdict", "coherent")
            return {trace["trace_id"] for trace in coherent} >= set(wanted)

        self._await(f"{len(wanted)} coherent traces", are_coherent)

    def show(self, trace: str) -> str:
        """The picture of a trace over all its nodes."""
        return self.machines["coordinator"].run("backsightctl", "show", trace)

    def _await(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while not is_there():
            if time.monotonic() > deadline_s:
                raise ClusterError(f"{what} did not come in {_DEADLINE_S:g} s")

    def _ask(self, *question: str) -> Iterator[dict[str, Any]]:
        answer = self.machines["coordinator"].run("backsightctl", *question, "--json")
        return map(json.loads, answer.splitlines())
