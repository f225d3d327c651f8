# SPDX-License-Identifier: Apache-2.0
"""Real daemons with certificates of ``backsightctl pki``: who gets in, and that a renewal loses nothing."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ctl.__main__ import main
from ctl.pki import Authority
from testbed.topology import PYTHON, Coordinator, Host, Network, Node, started
from tests.cluster.test_two_nodes import COORDINATOR, DEADLINE_S, Cluster, new_trace, service
from tests.cluster.test_upgrade import Load

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


@dataclass
class Secured:
    """Two nodes and a coordinator that show each other certificates."""

    cluster: Cluster
    pki: Path
    gamma: Host  # a third machine

    def issue(self, *words: str) -> Path:
        """What ``backsightctl pki`` makes anew."""
        assert main(["pki", *words, "--replace", "--directory", str(self.pki)]) == 0
        return self.pki / "-".join(words[: 1 if words[0] == "coordinator" else 2])

    def node(self, name: str, shown: Path, ca: Path | None = None) -> Node:
        """One on the third machine, whatever it shows."""
        endpoint = self.cluster.coordinator.endpoint
        tls = tls_of(shown) | {"ca": str((ca or self.pki) / "ca.crt")}
        config = {"coordinator": {"endpoint": endpoint, "tls": tls}}
        return Node(self.gamma, name, self.pki.parent, None, config)

    def known(self) -> set[str]:
        """The nodes that the coordinator ever took in."""
        return {node["node"] for node in self.cluster.coordinator.ctl_json("nodes")}


def tls_of(directory: Path) -> dict[str, Any]:
    names = {"ca": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}
    return {key: str(directory / name) for key, name in names.items()}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("tls")
    with Network("tls") as network:
        hub = network.host("coordinator")
        pki = directory / "pki"
        assert main(["pki", "init", "--domain", "test.example", "--directory", str(pki)]) == 0
        for words in (
            ["coordinator", "--ip", hub.address],
            ["node", "alpha"],
            ["node", "beta"],
            ["viewer", "bob"],
            ["operator", "ann"],
        ):
            assert main(["pki", *words, "--directory", str(pki)]) == 0
        config = COORDINATOR | {"insecure": False, "tls": tls_of(pki / "coordinator")}
        coordinator = Coordinator(hub, directory, config)
        coordinator.shown = pki / "viewer-bob"
        nodes = [
            Node(
                network.host(name),
                name,
                directory,
                None,
                {
                    "coordinator": {
                        "endpoint": coordinator.endpoint,
                        "tls": tls_of(pki / f"node-{name}"),
                    }
                },
            )
            for name in ("alpha", "beta")
        ]
        with started([coordinator, *nodes]):
            cluster = Cluster(network, coordinator, *nodes)
            yield Secured(cluster, pki, network.host("gamma"))


@contextlib.contextmanager
def load_on(cluster: Cluster) -> Iterator[Load]:
    with service(cluster.alpha) as front, service(cluster.beta):
        with Load.over(front, cluster.beta.host.address) as load:
            yield load
        await_coherent(cluster.coordinator, load.traces)


def await_coherent(coordinator: Coordinator, traces: list[str]) -> None:
    """Until each of them is, by the listing: one question is for all."""
    deadline_s = time.monotonic() + DEADLINE_S
    others = set(traces)
    while others and time.monotonic() < deadline_s:
        others = set(traces) - {
            line["trace_id"]
            for line in coordinator.ctl_json("traces", "--verdict", "coherent")
            if line["nodes"] == ["alpha", "beta"]
        }
    assert not others, f"{len(others)} of {len(traces)} are not coherent"


def logged(node: Node, words: str) -> str:
    """The line of a daemon's log that has these words, once it is there."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        for line in node.log_path.read_text().splitlines():
            if words in line:
                return line
    raise AssertionError(f"no line with {words!r} in:\n{node.last_words()}")


def test_traces_come_by_tls_and_are_shown_to_who_may_see_them(secured: Secured) -> None:
    cluster, coordinator = secured.cluster, secured.cluster.coordinator
    trace = new_trace()
    with service(cluster.alpha) as front, service(cluster.beta):
        front.do("fire", trace, cluster.beta.host.address)
        assert cluster.coherent(trace)["nodes"] == ["alpha", "beta"]

    def asked(shown: str, *words: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", coordinator.host.namespace, PYTHON, "-m", "ctl"]
            + ["--coordinator", coordinator.endpoint, "--tls", str(secured.pki / shown), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        return f"{done.returncode} {done.stderr}"

    assert asked("viewer-bob", "show", trace).startswith("0 ")
    assert "TakeSnapshot is not for viewer bob" in asked("viewer-bob", "snapshot")
    assert asked("operator-ann", "snapshot").startswith("0 ")
    assert "ListTraces is not for node alpha" in asked("node-alpha", "traces")


def test_a_renewal_of_everything_under_load_loses_no_trace(secured: Secured) -> None:
    cluster = secured.cluster
    address = cluster.coordinator.host.address
    pid = cluster.coordinator.daemon_pid()
    pids = [node.daemon_pid() for node in cluster.nodes]
    with load_on(cluster) as load:
        load.goes_on()
        secured.issue("coordinator", "--ip", address)
        for name in ("alpha", "beta"):
            secured.issue("node", name)
        # At once by a reload, and else within seconds.
        cluster.coordinator.reload()
        for node in cluster.nodes:
            logged(node, "tls.crt: taken up, spiffe://test.example/node/")
        load.goes_on()
        # Who trusts another CA as well ends all connections once.
        other = Authority.create(secured.pki.parent / "other", "test.example")
        both = (secured.pki / "ca.crt").read_bytes() + (other.directory / "ca.crt").read_bytes()
        (secured.pki / "coordinator/ca.crt").write_bytes(both)
        cluster.coordinator.reload()
        load.goes_on()
    assert len(load.traces) >= 60
    assert cluster.coordinator.daemon_pid() == pid
    assert [node.daemon_pid() for node in cluster.nodes] == pids
    ends = cluster.coordinator.log_path.read_text().count("all connections begin anew")
    assert ends == 1


def test_a_stream_whose_certificate_is_over_comes_back_with_the_next_and_loses_nothing(
    secured: Secured,
) -> None:
    cluster = secured.cluster
    authority = Authority(secured.pki)
    with load_on(cluster) as load:
        # Long enough to connect with it.
        authority.issue("node/beta", is_server=False, days=20 / 86400, replace=True)
        logged(cluster.beta, "only; renew it, and it is taken up by itself")
        cluster.beta.kill_daemon()
        while not cluster.beta.control.status()["connected"]:
            pass
        secured.issue("node", "beta")
        logged(
            cluster.beta, "the certificate of node beta (spiffe://test.example/node/beta) is over"
        )
        load.goes_on()
        while not cluster.beta.control.status()["connected"]:
            pass


def test_who_does_not_belong_is_told_why_and_nothing_of_it_is_taken_in(secured: Secured) -> None:
    before = secured.known()
    other = Authority.create(secured.pki.parent / "foreign", "test.example")
    past = datetime.now(UTC) - timedelta(days=9)
    authority = Authority(secured.pki)
    cases = {
        "gamma1": (
            secured.issue("node", "another"),
            "its certificate is of node another (spiffe://test.example/node/another)",
        ),
        "gamma2": (
            authority.issue("node/gamma2", is_server=False, days=1, now=past).directory,
            "tls.crt: it was valid until ",
        ),
        "gamma3": (
            secured.issue("viewer", "gamma3"),
            "refuses this node: Control is not for viewer gamma3",
        ),
        "gamma4": (
            other.issue("node/gamma4", is_server=False).directory,
            "it hung up when it saw the certificate in ",
        ),
        "gamma5": (
            authority.issue("something/gamma5", is_server=False).directory,
            "refuses this node: the certificate is of spiffe://test.example/something/gamma5; wanted",
        ),
    }
    nodes = {name: secured.node(name, shown) for name, (shown, _) in cases.items()}
    stranger = Node(secured.gamma, "gamma6", secured.pki.parent, secured.cluster.coordinator)
    nodes["gamma6"] = stranger
    doubtful = secured.node("gamma7", secured.issue("node", "gamma7"), other.directory)
    nodes["gamma7"] = doubtful
    with started(list(nodes.values())):
        for name, (_, words) in cases.items():
            logged(nodes[name], words)
        logged(stranger, "no coordinator at ")
        logged(doubtful, "its certificate is not accepted: ")
        for name, node in nodes.items():
            # What they have they keep, and report nothing.
            with service(node) as alone:
                assert alone.do("fire", new_trace()) == "done"
            status = node.control.status()
            assert not status["connected"], name
            assert status["not_connected"], name
    assert secured.known() == before
    listed = secured.cluster.coordinator.ctl_json("traces")
    assert not any("gamma" in node for trace in listed for node in trace["nodes"])
