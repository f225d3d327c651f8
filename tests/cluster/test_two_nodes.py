# SPDX-License-Identifier: Apache-2.0
"""Two hosts with real daemons, services that call each other, and what the coordinator makes of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.topology import PYTHON, Coordinator, Host, Network, Node, started

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

PORT = 8080
DEADLINE_S = 60.0

Json = dict[str, Any]


class Service:
    """tests.cluster.service on a host, and the pipe by which it is told what to do."""

    def __init__(self, host: Host, environment: dict[str, str]) -> None:
        self.host = host
        self.process = host.popen(
            [PYTHON, "-m", "tests.cluster.service", str(PORT)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def do(self, *words: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(words).encode() + b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def service(node: Node, *, attach: bool = True) -> Iterator[Service]:
    here = Service(node.host, node.client_environment())
    try:
        if attach:
            assert here.do("attach") == "attached"
        yield here
    finally:
        here.close()


@dataclass
class Cluster:
    network: Network
    coordinator: Coordinator
    alpha: Node
    beta: Node

    @property
    def nodes(self) -> Sequence[Node]:
        return (self.alpha, self.beta)

    def trace(self, trace_id: str, until: Callable[[Json], bool]) -> Json:
        """What the coordinator shows of a trace, once it is as wanted."""
        deadline_s = time.monotonic() + DEADLINE_S
        shown: Json | None = None
        while time.monotonic() < deadline_s:
            with contextlib.suppress(subprocess.CalledProcessError):
                (shown,) = self.coordinator.ctl_json("show", trace_id)
                if until(shown):
                    return shown
        raise AssertionError(f"after {DEADLINE_S} s the coordinator shows {shown}")

    def coherent(self, trace_id: str) -> Json:
        return self.trace(trace_id, lambda shown: shown["verdict"]["kind"] == "coherent")


def new_trace() -> str:
    return secrets.token_hex(16)


# Settled quickly; released late enough for a daemon to come back meanwhile.
COORDINATOR = {"linger_s": 5.0}


@contextlib.contextmanager
def cluster(name: str, directory: Path) -> Iterator[Cluster]:
    with Network(name) as network:
        coordinator = Coordinator(network.host("coordinator"), directory, COORDINATOR)
        alpha = Node(network.host("alpha"), "alpha", directory, coordinator)
        beta = Node(network.host("beta"), "beta", directory, coordinator)
        with started([coordinator, alpha, beta]):
            yield Cluster(network, coordinator, alpha, beta)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster("two", tmp_path_factory.mktemp("two")) as here:
        yield here


@pytest.mark.parametrize(
    ("where", "name", "fired_on"), [("fire", "front", "alpha"), ("remote", "back", "beta")]
)
def test_a_trigger_on_one_node_brings_the_trace_of_both(
    two: Cluster, where: str, name: str, fired_on: str
) -> None:
    trace = new_trace()
    with service(two.alpha) as front, service(two.beta) as back:
        assert front.do(where, trace, two.beta.host.address) == "done"
        shown = two.coherent(trace)
        assert front.process.pid != back.process.pid
        spans = {span["name"]: span for span in shown["spans"]}
        assert spans["GET /"]["service"] == "alpha"
        assert spans["serve"]["service"] == "beta"
    assert shown["trace_id"] == trace
    assert shown["verdict"]["reasons"] == []
    assert shown["nodes"] == ["alpha", "beta"]
    assert [(t["name"], t["why"], t["node"]) for t in shown["triggers"]] == [
        (name, "told to", fired_on)
    ]
    assert set(spans) == {"GET /", "serve"}
    assert shown["span_count"] == 2
    root, child = spans["GET /"], spans["serve"]
    assert (root["node"], root["parent_id"]) == ("alpha", "")
    assert (child["node"], child["parent_id"]) == ("beta", root["span_id"])
    assert root["start_ns"] <= child["start_ns"] <= child["end_ns"] <= root["end_ns"]
    assert root["attributes"] == {"remote": where == "remote"}
    assert not root["unfinished"]
    assert {(hop["kind"], hop["node"]) for hop in shown["hops"]} == {
        ("out", "alpha"),
        ("in", "beta"),
    }
    assert all(part["complete"] and part["open"] == 0 for part in shown["slices"])
    assert trace in [line["trace_id"] for line in two.coordinator.ctl_json("traces")]


def test_what_is_written_after_the_trigger_on_another_node_is_reported_too(two: Cluster) -> None:
    trace = new_trace()
    with service(two.alpha) as front, service(two.beta) as back:
        back.do("leave", trace)
        front.do("fire", trace, two.beta.host.address)

        def beta_is_open(shown: Json) -> bool:
            return any(part["node"] == "beta" and part["open"] for part in shown["slices"])

        shown = two.trace(trace, beta_is_open)
        assert shown["verdict"]["kind"] == "provisional"
        # A record or two ring no bell: the node has to look by itself.
        assert back.do("finish") == "finished"
        shown = two.coherent(trace)
    assert {span["name"]: span["unfinished"] for span in shown["spans"]} == {
        "GET /": False,
        "serve": False,
        "endless": False,
    }


def test_what_was_not_triggered_stays_on_its_node(two: Cluster) -> None:
    quiet, loud = new_trace(), new_trace()
    with service(two.alpha) as front, service(two.beta):
        front.do("request", quiet, two.beta.host.address)
        front.do("fire", loud, two.beta.host.address)
        two.coherent(loud)
        with pytest.raises(subprocess.CalledProcessError) as caught:
            two.coordinator.ctl("show", quiet)
        assert caught.value.returncode == 1
        # The node has it, and shows it without triggering anything.
        done = subprocess.run(
            [PYTHON, "-m", "ctl", "--node", str(two.beta.socket_path), "show", quiet, "--json"],
            capture_output=True,
            check=True,
        )
        peeked = json.loads(done.stdout)
        assert [span["name"] for span in peeked["spans"]] == ["serve"]
        with pytest.raises(subprocess.CalledProcessError):
            two.coordinator.ctl("show", quiet)


def test_an_operator_fires_on_one_node(two: Cluster) -> None:
    trace = new_trace()
    with service(two.alpha) as front, service(two.beta):
        front.do("request", trace, two.beta.host.address)
        subprocess.run(
            [
                PYTHON, "-m", "ctl", "--node", str(two.beta.socket_path),
                "trigger", trace, "--name", "look", "--why", "I want to see it",
            ],
            check=True,
        )  # fmt: skip
        shown = two.coherent(trace)
    assert shown["nodes"] == ["alpha", "beta"]
    assert [(t["name"], t["why"], t["source"]) for t in shown["triggers"]] == [
        ("look", "I want to see it", "operator")
    ]


def test_a_snapshot_collects_the_last_seconds_of_all_nodes(two: Cluster) -> None:
    traces = {new_trace() for _ in range(200)}
    with service(two.alpha) as front, service(two.beta):
        for trace in traces:
            front.do("request", trace, two.beta.host.address)
        (few,) = two.coordinator.ctl_json("snapshot", "--last", "1m", "--bytes", "64KiB")
        (taken,) = two.coordinator.ctl_json("snapshot", "--last", "1m")
        (other,) = two.coordinator.ctl_json("snapshot", "--last", "1m", "--service", "nobody")
    # Who it was stands in the log of each.
    by = (
        f"{taken['trigger']}: the last 60 s are collected, as ordered by an unnamed caller at ipv4:"
    )
    for daemon in two.coordinator, two.alpha, two.beta:
        assert by in daemon.log_path.read_text()
    # Those few are the same ones on both nodes, of which one has little of each. What fits is
    # reckoned from those so far, which all take the same.
    assert few["nodes_done"] == few["nodes"] == 2
    assert few["found"] >= 2 * len(traces) > 2 * few["fired"] > 0
    assert few["judged"] == few["traces"] <= few["fired"]
    stored = two.coordinator.ctl_json("traces", "--trigger", few["trigger"])
    # The last round may give each node one trace more than fits.
    sizes_bytes = [trace["bytes"] for trace in stored]
    assert 32 << 10 <= sum(sizes_bytes) <= (64 << 10) + few["nodes"] * max(sizes_bytes)
    assert taken["fired"] == taken["found"] > 0
    collected = two.coordinator.ctl_json("traces", "--trigger", taken["trigger"])
    collected += two.coordinator.ctl_json("traces", "--trigger", few["trigger"])
    assert traces <= {trace["trace_id"] for trace in collected}
    for found in collected:
        if found["trace_id"] in traces:
            assert found["nodes"] == ["alpha", "beta"]
            assert found["verdict"]["kind"] == "coherent"
            assert {fired["source"] for fired in found["triggers"]} == {"operator"}
    assert (other["found"], other["traces"], other["judged"]) == (0, 0, 0)


def test_both_nodes_are_known_with_their_clocks(two: Cluster) -> None:
    nodes = {node["node"]: node for node in two.coordinator.ctl_json("nodes")}
    assert set(nodes) == {"alpha", "beta"}
    for name, node in nodes.items():
        assert node["connected"]
        assert node["addresses"] == [getattr(two, name).host.address]
        # One machine, one clock: what is measured is the error of measuring.
        assert node["clock_error_ns"] > 0
        assert abs(node["clock_offset_ns"]) <= node["clock_error_ns"]


def test_a_second_live_node_of_a_name_is_refused_with_both_addresses(
    two: Cluster, tmp_path: Path
) -> None:
    other = two.network.host("impostor")
    with Node(other, "alpha", tmp_path, two.coordinator, {"addresses": []}) as impostor:
        said = ""
        deadline_s = time.monotonic() + DEADLINE_S
        while two.alpha.host.address not in said or other.address not in said:
            assert time.monotonic() < deadline_s, impostor.last_words()
            said = str(impostor.control.status()["refused"])
        assert not impostor.control.status()["connected"]
    assert two.alpha.control.status()["connected"]


def test_an_idle_node_sleeps(two: Cluster, tmp_path: Path) -> None:
    with (
        Node(two.network.host("idle"), "idle", tmp_path, two.coordinator) as idle,
        service(idle) as here,
    ):
        assert here.do("request", new_trace()) == "done"
        before = idle.control.status()["polls"]
        # A second of another node's life, as long as anything could tick.
        other = new_trace()
        with service(two.alpha) as front, service(two.beta):
            front.do("fire", other, two.beta.host.address)
            two.coherent(other)
        # Asking for the status wakes nothing.
        assert idle.control.status()["polls"] <= before + 1


def test_a_killed_process_leaves_its_last_words(two: Cluster) -> None:
    trace = new_trace()
    with service(two.alpha) as front:
        front.do("leave", trace)
        front.close()
        subprocess.run(
            [PYTHON, "-m", "ctl", "--node", str(two.alpha.socket_path), "trigger", trace],
            check=True,
        )
        shown = two.trace(trace, lambda shown: shown["verdict"]["kind"] == "partial")
    (span,) = shown["spans"]
    assert (span["name"], span["unfinished"], span["end_ns"]) == ("endless", True, None)
    assert {reason["kind"] for reason in shown["verdict"]["reasons"]} >= {"unfinished"}


def test_a_killed_node_reports_after_its_restart(tmp_path: Path) -> None:
    with (
        cluster("node", tmp_path) as here,
        service(here.alpha) as front,
        service(here.beta) as back,
    ):
        # The coordinator is away: what is fired now is reported by nobody yet.
        os.kill(here.coordinator.daemon_pid(), signal.SIGSTOP)
        traces = [new_trace() for _ in range(5)]
        for trace in traces:
            front.do("fire", trace, here.beta.host.address)
        fired = 0
        while fired < len(traces):
            fired = here.alpha.control.status()["triggers_unreported"]
        here.alpha.kill_daemon()
        here.beta.kill_daemon()
        # Both processes write on into what they have.
        late = new_trace()
        assert front.do("attach") == back.do("attach") == "attached"
        front.do("fire", late, here.beta.host.address)
        os.kill(here.coordinator.daemon_pid(), signal.SIGCONT)
        for trace in (*traces, late):
            shown = here.coherent(trace)
            assert shown["nodes"] == ["alpha", "beta"]
            assert shown["span_count"] == 2
        # They resumed: nobody had to attach anew.
        for node in here.nodes:
            attach = node.control.status()["attach"]
            assert (attach["resumed"], attach["attached"]) == (1, 0)


def test_a_killed_coordinator_loses_nothing_that_nodes_hold(tmp_path: Path) -> None:
    with cluster("hub", tmp_path) as here, service(here.alpha) as front, service(here.beta):
        before, during = new_trace(), new_trace()
        front.do("fire", before, here.beta.host.address)
        here.coherent(before)
        os.kill(here.coordinator.daemon_pid(), signal.SIGSTOP)
        front.do("fire", during, here.beta.host.address)
        here.coordinator.kill_daemon()
        after = new_trace()
        front.do("fire", after, here.beta.host.address)
        for trace in (before, during, after):
            assert here.coherent(trace)["nodes"] == ["alpha", "beta"]


def test_a_program_without_a_daemon_runs_and_attaches_when_one_appears(tmp_path: Path) -> None:
    with Network("alone") as network:
        coordinator = Coordinator(network.host("coordinator"), tmp_path, COORDINATOR)
        node = Node(network.host("alpha"), "alpha", tmp_path, coordinator)
        with service(node, attach=False) as program:
            for _ in range(100):
                assert program.do("fire", new_trace()) == "done"
            assert program.do("stats") == "0"
            with started([coordinator, node]):
                assert program.do("attach") == "attached"
                trace = new_trace()
                assert program.do("fire", trace) == "done"
                here = Cluster(network, coordinator, node, node)
                assert here.coherent(trace)["span_count"] == 1
            # And on, when both are gone.
            assert program.do("fire", new_trace()) == "done"


GARBAGE = """
import socket, sys
host, port = sys.argv[1].rsplit(":", 1)
for data in (b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(1000), b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + b"\\xff" * 5000):
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(data)
        try:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except OSError:
            pass
import grpc
# Well-formed gRPC, malformed messages, on each method.
with grpc.insecure_channel(sys.argv[1]) as channel:
    for method in ("Control", "Slices"):
        for data in (b"\\xff\\xff\\xff", b"\\x0a\\x02\\x12\\x00", b"\\xff" * 3_000_000, b"x" * 5_000_000):
            call = channel.stream_stream(f"/backsight.v1.Coordinator/{method}")
            try:
                answers = list(call(iter([data]), timeout=10))
                print(method, "answered", len(answers))
            except grpc.RpcError as error:
                print(method, error.code().name)
    for method in ("ListTraces", "GetTrace", "ListNodes", "Nothing"):
        try:
            channel.unary_unary(f"/backsight.v1.Coordinator/{method}")(b"\\xff\\xff", timeout=10)
            print(method, "answered")
        except grpc.RpcError as error:
            print(method, error.code().name)
"""


ATTACK = """
import socket, sys
for data in (b"", b"x", bytes(96), bytes(50_000)):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(sys.argv[1])
    s.send(data)
    print(len(s.recv(1000)))
"""


def test_garbage_does_no_harm(two: Cluster) -> None:
    pids = [daemon.daemon_pid() for daemon in (two.coordinator, *two.nodes)]
    output = two.coordinator.host.run(PYTHON, "-c", GARBAGE, two.coordinator.endpoint)
    # A refusal with its reason on Control, an error on the others.
    assert output.splitlines() == [
        "Control answered 1",
        "Control answered 1",
        "Control answered 1",
        "Control RESOURCE_EXHAUSTED",
        "Slices INVALID_ARGUMENT",
        "Slices INVALID_ARGUMENT",
        "Slices INVALID_ARGUMENT",
        "Slices RESOURCE_EXHAUSTED",
        "ListTraces INVALID_ARGUMENT",
        "GetTrace INVALID_ARGUMENT",
        "ListNodes INVALID_ARGUMENT",
        "Nothing UNIMPLEMENTED",
    ]
    attacked = two.alpha.host.run(PYTHON, "-c", ATTACK, str(two.alpha.socket_path))
    assert attacked.split() == ["0", "168", "168", "168"]
    assert two.alpha.control.status()["attach"]["malformed"] == 3
    trace = new_trace()
    with service(two.alpha) as front, service(two.beta):
        front.do("fire", trace, two.beta.host.address)
        two.coherent(trace)
    assert pids == [daemon.daemon_pid() for daemon in (two.coordinator, *two.nodes)]
