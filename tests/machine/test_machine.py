# SPDX-License-Identifier: Apache-2.0
"""A link that goes down, a queue that drops, a listener that is full, a machine under pressure."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.faults import slow_device
from testbed.probes import Probes
from testbed.topology import PYTHON, Coordinator, Host, Network, Node, started

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

PORT = 7100
SPARE = "10.78.0."
"""A second network, between alpha and beta alone."""

# As often as the node is told to look: nothing new is there to be seen before.
LOOK_EVERY_S = 0.2
_DEADLINE_S = 30.0
_CALLERS = 8

# It takes the kernel a while to remove so many at once, which a group is.
_DEVICES = 200
_GROUP = 77

both_loaders = pytest.mark.parametrize(
    "loader", ["core", pytest.param("bcc", marks=pytest.mark.slow)]
)


@dataclass
class Site:
    """A node on alpha, and another host; two networks lie between them."""

    coordinator: Coordinator
    node: Node
    probes: Probes | None
    alpha: Host
    beta: Host

    @contextlib.contextmanager
    def at_work(
        self, what: str, *arguments: str, host: Host | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A process of this node, attached."""
        watched = self.node.control.status()["probes_watched"]
        with (host or self.alpha).popen(
            [PYTHON, "-m", "tests.machine.at_work", what, *arguments],
            # Of one service all: it says nothing of where somebody runs.
            env=self.node.client_environment("worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"attached\n"
                if self.probes is not None:
                    self.probes.await_watched(watched + 1)
                yield process
            finally:
                process.terminate()

    def triggered(self, name: str) -> dict[str, Any]:
        """The first firing of a trigger: its why, and the traces that it was for."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline_s:
            found: dict[str, Any] = {"traces": set()}
            for trace in self.coordinator.ctl_json("traces"):
                for trigger in trace["triggers"]:
                    if trigger["name"] == name:
                        found["why"] = trigger["why"]
                        found["traces"].add(trace["trace_id"])
            if found["traces"]:
                return found
            time.sleep(LOOK_EVERY_S)
        raise AssertionError(f"{name} did not fire:\n{self.node.last_words()}")

    def await_looks(self, looks: int) -> None:
        """Until the machine's counters have been read so often from here on."""
        before = self.node.control.status()["machine"]["looks"]
        deadline_s = time.monotonic() + _DEADLINE_S
        while self.node.control.status()["machine"]["looks"] < before + looks:
            assert time.monotonic() < deadline_s
            time.sleep(LOOK_EVERY_S / 4)


def tell(process: subprocess.Popen[bytes]) -> str:
    """Tell a process to go on; what it says then."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()
    return process.stdout.readline().decode().strip()


@contextlib.contextmanager
def site(
    tmp_path: Path, *, probes: Mapping[str, Any] | None = None, **machine: Any
) -> Iterator[Site]:
    """``probes``: how they are configured, if they are to be there; the rest: other limits."""
    with Network("machine") as network:
        hub, alpha, beta = (network.host(name) for name in ("hub", "alpha", "beta"))
        alpha.run(
            *("ip", "link", "add", "spare0", "type", "veth"),
            *("peer", "name", "spare0", "netns", beta.namespace),
        )
        for host, number in ((alpha, 1), (beta, 2)):
            host.run("ip", "address", "add", f"{SPARE}{number}/24", "dev", "spare0")
            host.run("ip", "link", "set", "spare0", "up")
        coordinator = Coordinator(hub, tmp_path)
        # The last moments last longer than a test: what is told is told of those in it.
        config = {"look_every_s": LOOK_EVERY_S, "window_s": 60, **machine}
        parts = {"machine": config, "probes": dict(probes or {})}
        node = Node(alpha, "alpha", tmp_path, coordinator, parts)
        with started([coordinator, node]), contextlib.ExitStack() as stack:
            watching = stack.enter_context(Probes(node)) if probes is not None else None
            yield Site(coordinator, node, watching, alpha, beta)


@contextlib.contextmanager
def answering(host: Host, port: int) -> Iterator[None]:
    """A peer, of no node."""
    with host.popen(
        [PYTHON, "-m", "tests.probes.answer", "reads_all", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def two_networks(here: Site) -> Iterator[tuple[str, str, subprocess.Popen[bytes]]]:
    """A trace that uses the spare network, one that uses the other, and the first one's process."""
    with (
        answering(here.beta, PORT),
        answering(here.beta, PORT + 1),
        here.at_work("sends", f"{SPARE}2", str(PORT)) as victim,
        here.at_work("sends", here.beta.address, str(PORT + 1)) as innocent,
    ):
        yield tell(victim), tell(innocent), victim


@contextlib.contextmanager
def served(here: Site, server: subprocess.Popen[bytes], port: int) -> Iterator[str]:
    """The trace in which a process serves one caller, who stays."""
    assert tell(server) == "listens"
    assert server.stdout is not None
    call = f"""
import socket, sys
connection = socket.create_connection(({here.alpha.address!r}, {port}))
connection.sendall(b"x")
sys.stdin.read()
"""
    with here.beta.popen([PYTHON, "-c", call], stdin=subprocess.PIPE):
        yield server.stdout.readline().decode().strip()


def connect_often(host: Host, address: str, port: int) -> None:
    """More connections than a listener has room for."""
    host.run(
        PYTHON,
        "-c",
        f"""
import socket
asking = [socket.socket() for _ in range({_CALLERS})]
for one in asking:
    one.setblocking(False)
    one.connect_ex(({address!r}, {port}))
""",
    )


# ------------------------------------------------------------------- links


@pytest.mark.bpf
@both_loaders
def test_a_link_that_goes_down_hits_whoever_used_it(tmp_path: Path, loader: str) -> None:
    with (
        site(tmp_path, probes={"loader": loader}) as here,
        two_networks(here) as (victim, innocent, _),
    ):
        here.beta.run("ip", "link", "set", "spare0", "down")
        down = here.triggered("machine.link_down")
        assert down == {"why": "link spare0 went down", "traces": {victim}}
        here.beta.run("ip", "link", "set", "spare0", "up")
        assert here.triggered("machine.link_up")["traces"] == {victim}
        assert innocent not in {one["trace_id"] for one in here.coordinator.ctl_json("traces")}


@pytest.mark.bpf
@both_loaders
def test_it_hits_whoever_uses_it_all_the_time(tmp_path: Path, loader: str) -> None:
    """And nobody who is done with it since before the last moments."""
    window_s = 2.0
    with (
        site(tmp_path, probes={"loader": loader}, window_s=window_s) as here,
        answering(here.beta, PORT),
        here.at_work("chats", f"{SPARE}2", str(PORT)) as talker,
        here.at_work("chats", f"{SPARE}2", str(PORT)) as silent,
    ):
        hit, unhurt = tell(talker), tell(silent)
        until_s = time.monotonic() + 2 * window_s
        while time.monotonic() < until_s:
            assert tell(talker) == "done"
        here.beta.run("ip", "link", "set", "spare0", "down")
        assert here.triggered("machine.link_down")["traces"] == {hit}
        assert unhurt not in {one["trace_id"] for one in here.coordinator.ctl_json("traces")}


def test_without_probes_it_hits_whoever_was_at_work(tmp_path: Path) -> None:
    with site(tmp_path) as here, two_networks(here) as (victim, other, _):
        here.beta.run("ip", "link", "set", "spare0", "down")
        assert {victim, other} <= here.triggered("machine.link_down")["traces"]


def test_the_end_of_a_container_is_no_link_that_goes_down(tmp_path: Path) -> None:
    """Its device in the host's network is a bridge's port, and goes with it.

    Then the bridge is down: there is no other port.
    """
    with site(tmp_path) as here, here.at_work("waits") as worker:
        trace = tell(worker)
        run = here.alpha.run
        run("ip", "link", "add", "bridge", "up", "type", "bridge")
        run("ip", "link", "add", "inside", "type", "veth", "peer", "name", "outside")
        run("ip", "link", "set", "outside", "master", "bridge", "up")
        run("ip", "link", "set", "inside", "up")
        run("ip", "link", "del", "inside")
        # What comes after it is seen after it.
        here.beta.run("ip", "link", "set", "spare0", "down")
        down = here.triggered("machine.link_down")
        assert (down["why"], trace in down["traces"]) == ("link spare0 went down", True)


def test_many_devices_that_are_removed_do_not_go_down(tmp_path: Path) -> None:
    """They belong to no bridge, as where routes lead to containers; it takes the kernel a while."""
    with site(tmp_path) as here, here.at_work("waits") as worker:
        tell(worker)
        many = range(_DEVICES)
        made = [
            line
            for i in many
            for line in (
                f"link add h{i} up type veth peer name c{i}",
                f"link set h{i} group {_GROUP}",
                f"link set c{i} up",
            )
        ]
        here.alpha.run("ip", "-batch", "-", said="\n".join(made))
        here.alpha.run("ip", "link", "delete", "group", str(_GROUP))
        here.beta.run("ip", "link", "set", "spare0", "down")
        assert here.triggered("machine.link_down")["why"] == "link spare0 went down"
        assert here.node.control.status()["machine"]["seen"]["machine.link_down"] == 1


# ------------------------------------------------------------------ queues


@pytest.mark.bpf
def test_a_queue_that_drops_hits_whoever_used_its_device(tmp_path: Path) -> None:
    limits = {"qdisc_drops": 5, "qdisc_backlog": 2}
    with (
        site(tmp_path, probes={}, **limits) as here,
        two_networks(here) as (victim, innocent, process),
        slow_device(here.alpha, "1mbit", "3000", limit="9000", device="spare0"),
    ):
        here.alpha.run("ip", "link", "set", "spare0", "gso_max_segs", "1")
        here.await_looks(2)
        assert tell(process) == "done"
        dropped = here.triggered("machine.qdisc_drops")
        assert dropped["traces"] == {victim}
        assert dropped["why"].startswith("tbf of spare0 dropped ")
        waiting = here.triggered("machine.qdisc_backlog")
        assert waiting["traces"] == {victim}
        assert waiting["why"].endswith(" packets wait in tbf of spare0")
        assert innocent not in {one["trace_id"] for one in here.coordinator.ctl_json("traces")}


def test_each_queue_of_a_device_is_read() -> None:
    """By default those of a device with several have no handles of their own."""
    with Network("queues") as network:
        host = network.host("alpha")
        veth = ("type", "veth", "peer", "name", "other0")
        host.run("ip", "link", "add", "many0", "numtxqueues", "4", *veth)
        host.run("tc", "qdisc", "add", "dev", "many0", "root", "mq")
        host.run("ip", "link", "set", "many0", "up")
        program = """
import socket
from appliance.counters import Counters
with Counters() as counters:
    queues = counters.read([]).queues
print(sum(device == socket.if_nametoindex("many0") for device, _, _ in queues))
"""
        shown = host.run("tc", "qdisc", "show", "dev", "many0").splitlines()
        assert int(host.run(PYTHON, "-c", program)) == len(shown) == 5


# --------------------------------------------------------------- listeners


def test_a_listener_that_is_full_is_named_by_its_port(tmp_path: Path) -> None:
    with (
        site(tmp_path) as here,
        here.at_work("listens", str(PORT)) as server,
        here.at_work("waits", host=here.beta) as elsewhere,
    ):
        trace, innocent = tell(server), tell(elsewhere)
        here.await_looks(2)
        connect_often(here.beta, here.alpha.address, PORT)
        full = here.triggered("machine.listen_overflow")
        assert (trace in full["traces"], innocent in full["traces"]) == (True, False)
        assert full["why"].startswith(f"the listening queue of port {PORT} turned ")


@pytest.mark.bpf
def test_what_the_kernel_wrote_into_a_trace_hits_nobody(tmp_path: Path) -> None:
    """The probes write it, into traces of all namespaces; they are no application of one."""
    probes = {"loader": "core", "breadcrumbs": False, "run_queue": {"record_ms": 0}}
    with (
        site(tmp_path, probes=probes) as here,
        here.at_work("listens", str(PORT)) as server,
        here.at_work("waits", host=here.beta) as elsewhere,
    ):
        trace, innocent = tell(server), tell(elsewhere)

        assert here.probes is not None
        before = here.probes.await_node(lambda status: "written" in status["probes"])

        def is_written(status: dict[str, Any]) -> bool:
            # It comes back from a wait each time, to a CPU that it may have to wait for.
            tell(elsewhere)
            written = [one["probes"]["written"]["records"] for one in (before, status)]
            return bool(written[1] > written[0] + 2)

        here.probes.await_node(is_written)
        here.await_looks(2)
        connect_often(here.beta, here.alpha.address, PORT)
        full = here.triggered("machine.listen_overflow")
        assert (trace in full["traces"], innocent in full["traces"]) == (True, False)


def test_who_has_just_ended_is_hit_too(tmp_path: Path) -> None:
    """As by the OOM killer, under pressure."""
    with site(tmp_path) as here, here.at_work("waits") as other:
        living = tell(other)
        with here.at_work("waits") as worker:
            trace = tell(worker)
        limits = {**here.node.config["machine"], "cpu_pressure_percent": 20}
        here.node.reload(machine=limits)
        with spinning(here.alpha):
            hit = here.triggered("machine.cpu_pressure")["traces"]
        assert {trace, living} <= hit


@pytest.mark.bpf
def test_it_hits_whoever_was_served_by_that_port(tmp_path: Path) -> None:
    """Whom the probes know, though they drop no breadcrumbs."""
    probes = {"loader": "core", "breadcrumbs": False}
    with (
        site(tmp_path, probes=probes) as here,
        here.at_work("serves", str(PORT)) as server,
        here.at_work("serves", str(PORT + 1)) as other,
        served(here, server, PORT) as trace,
        served(here, other, PORT + 1),
    ):
        here.await_looks(2)
        connect_often(here.beta, here.alpha.address, PORT)
        assert here.triggered("machine.listen_overflow")["traces"] == {trace}


def test_in_another_namespace_it_hits_who_is_there(tmp_path: Path) -> None:
    with (
        site(tmp_path) as here,
        here.at_work("waits") as other,
        here.at_work("listens", str(PORT), host=here.beta) as server,
    ):
        innocent, trace = tell(other), tell(server)
        here.await_looks(2)
        connect_often(here.alpha, here.beta.address, PORT)
        full = here.triggered("machine.listen_overflow")
        assert (trace in full["traces"], innocent in full["traces"]) == (True, False)
        assert full["why"].startswith("listening queues turned ")


def test_whose_namespace_it_is_anybody_may_know() -> None:
    """A node is neither root nor the user of its applications."""
    program = f"""
from appliance.namespaces import namespace_of
print(namespace_of({os.getpid()}) == namespace_of("self") is not None)
"""
    nobody = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
    said = subprocess.run(
        [*nobody, PYTHON, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert said == "True\n"


# ---------------------------------------------------------------- pressure


@contextlib.contextmanager
def spinning(host: Host) -> Iterator[None]:
    """Four that share a CPU."""
    processes = [
        host.popen(["taskset", "--cpu-list", "0", PYTHON, "-c", "while True: pass"])
        for _ in range(4)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def test_a_machine_under_pressure(tmp_path: Path) -> None:
    with site(tmp_path, cpu_pressure_percent=20) as here, here.at_work("waits") as worker:
        trace = tell(worker)
        with spinning(here.alpha):
            pressed = here.triggered("machine.cpu_pressure")
        assert trace in pressed["traces"]
        assert pressed["why"].startswith("tasks waited for a CPU in ")


# ------------------------------------------------------------------ at rest


def test_a_quiet_machine_fires_nothing(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"qdisc_drops": 1, "qdisc_backlog": 50}
    with site(tmp_path, **limits) as here, two_networks(here) as (_, _, process):
        assert tell(process) == "done"
        here.await_looks(5)
        assert here.coordinator.ctl_json("traces") == []


def test_nothing_is_looked_for_where_nothing_is_wanted(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {
        "links": False,
        "qdisc_drops": None,
        "listen_overflows": None,
        "io_pressure_percent": None,
        "memory_pressure_percent": None,
    }
    with site(tmp_path, **nothing) as here:
        process = Path(f"/proc/{here.node.daemon_pid()}")
        # The last field of each is its inode.
        of_netlink = {
            f"socket:[{line.split()[-1]}]"
            for line in (process / "net/netlink").read_text().splitlines()[1:]
        }
        assert not of_netlink & {str(fd.readlink()) for fd in (process / "fd").iterdir()}
        assert here.node.control.status()["machine"]["looks"] == 0
