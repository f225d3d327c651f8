# SPDX-License-Identifier: Apache-2.0
"""bpf/sockets.bpf.c and the probes of TCP: each trouble is of the trace to which it happens."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.topology import PYTHON, Host, Network
from tests.probes.machine import Machine, kernel_spans, machine, trigger_of

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

PORT = 7000

PROBES = {
    # Each trace of several, as soon as anything happens to it.
    "per_s": 1000,
    "burst": 1000,
    "tcp_read_delay": {"fire_ms": 100, "record_ms": 50},
    "tcp_rtt": {"fire_ms": 20, "record_ms": 20},
    "qdisc_delay": {"fire_ms": 5, "record_ms": 5},
}


@dataclass
class Pair:
    """Two hosts, of which one is watched; the node and its probes are on no host's network."""

    here: Machine
    alpha: Host
    beta: Host

    @contextlib.contextmanager
    def talk(
        self, cause: str, how: str, environment: dict[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """What a program on alpha says that happened to it, talking to one on beta."""
        self.here.probes.await_watched(0)
        with (
            _program(self.beta, environment or {}, "tests.probes.answer", how, str(PORT)),
            _program(
                self.alpha,
                self.here.node.client_environment("talker"),
                "tests.probes.talk",
                cause,
                self.beta.address,
                str(PORT),
            ) as talker,
        ):
            self.here.probes.await_watched(1)
            assert talker.stdin is not None
            assert talker.stdout is not None
            talker.stdin.write(b"go\n")
            talker.stdin.flush()
            yield json.loads(talker.stdout.readline())


@contextlib.contextmanager
def _program(
    host: Host, environment: dict[str, str], module: str, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    with host.popen(
        [PYTHON, "-m", module, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, build: Path) -> Iterator[Pair]:
    with (
        Network("tcp") as network,
        machine(tmp_path_factory.mktemp("tcp"), build, PROBES) as here,
    ):
        alpha, beta = network.host("alpha"), network.host("beta")
        # Segments of the size that a wire takes, so that one is lost at a time.
        alpha.run("ip", "link", "set", "eth0", "gso_max_segs", "1")
        yield Pair(here, alpha, beta)


@contextlib.contextmanager
def dropping(host: Host, rule: str) -> Iterator[None]:
    """What comes to a host of which the rule says so is lost, as on a bad cable."""
    table = "netdev lossy"
    said = f"""table {table} {{
  chain in {{
    type filter hook ingress device eth0 priority 0
    tcp dport {PORT} {rule} drop
  }}
}}
"""
    host.run("nft", "-f", "-", said=said)
    try:
        yield
    finally:
        host.run("nft", "delete", "table", *table.split())


@contextlib.contextmanager
def slow_device(host: Host, rate: str, burst: str) -> Iterator[None]:
    """A host's device sends no faster than that: what is more waits in its queue (tc-tbf(8))."""
    host.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
             "rate", rate, "burst", burst, "limit", "512kb")  # fmt: skip
    try:
        yield
    finally:
        host.run("tc", "qdisc", "del", "dev", "eth0", "root")


def writers(said: dict[str, Any], position: int) -> set[str]:
    """Whose the byte at a position is: the writes are in turn, of one size.

    The connection's first byte may be counted as 0 or as 1 (tcp_retransmit.bpf.c).
    """
    traces, size = said["traces"], said["chunk_bytes"]
    return {traces[at // size % len(traces)] for at in (position - 1, position)}


def test_a_segment_that_is_sent_again_is_of_who_wrote_it(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        dropping(pair.beta, "tcp flags & (syn | fin) == 0 numgen random mod 10 == 0"),
        pair.talk("retransmit", "reads_all") as said,
    ):
        right = Counter[bool]()
        sure = Counter[str]()
        for trace in said["traces"]:
            shown = pair.here.shown(trace)
            trigger = trigger_of(shown, "kernel.tcp_retransmit")
            assert f"peer {pair.beta.address}:{PORT}" in trigger["why"]
            assert set(trigger["laterals"]) <= {*said["traces"]} - {trace}
            for span in kernel_spans(shown, "tcp_retransmit"):
                confidence = span["attributes"]["kernel.confidence"]
                sure[confidence] += 1
                if confidence == "exact":
                    position = span["attributes"]["kernel.tcp.position"]
                    right[trace in writers(said, position)] += 1
        with capsys.disabled():
            print(f"\n{sure.total()} segments sent again: {dict(sure)}; right: {dict(right)}")
        assert sure.total() >= 1000
        assert right[True] >= 0.99 * sure.total()


@pytest.mark.parametrize(
    ("cause", "how", "rule"),
    [
        ("syn_retransmit", "reads_all", "tcp flags & syn != 0"),
        ("reset_received", "breaks_off", None),
        ("zero_window", "does_not_read", None),
        ("read_delay", "answers", None),
    ],
)
def test_a_trouble_fires_for_its_trace(pair: Pair, cause: str, how: str, rule: str | None) -> None:
    lossy = dropping(pair.beta, rule) if rule else contextlib.nullcontext()
    with lossy, pair.talk(cause, how) as said:
        shown = pair.here.shown(said["victim"])
        trigger = trigger_of(shown, f"kernel.tcp_{cause}")
        assert (trigger["source"], trigger["node"]) == ("kernel", "here")
        assert f"peer {pair.beta.address}:{PORT}" in trigger["why"]
        spans = kernel_spans(shown, f"tcp_{cause}")
        if "took_ns" in said:
            waited_ns = sum(span["end_ns"] - span["start_ns"] for span in spans)
            assert 0.8 * said["took_ns"] <= waited_ns <= 1.2 * said["took_ns"]
        if "neighbour" in said:
            assert trigger["laterals"] == [said["neighbour"]]


def test_a_queue_on_the_way_makes_round_trips_long(pair: Pair) -> None:
    with slow_device(pair.alpha, "8mbit", "8kb"), pair.talk("rtt", "answers") as said:
        shown = pair.here.shown(said["victim"])
        trigger = trigger_of(shown, "kernel.tcp_rtt")
        assert "TCP round trip is long" in trigger["why"]


def test_a_packet_that_is_dropped_here_says_why(pair: Pair) -> None:
    rules = f"""table inet lossy {{
  chain out {{
    type filter hook output priority 0
    tcp dport {PORT} tcp flags & (syn | fin) == 0 numgen inc mod 5 == 4 drop
  }}
}}
"""
    pair.alpha.run("nft", "-f", "-", said=rules)
    try:
        with pair.talk("rtt", "answers") as said:
            shown = pair.here.shown(said["victim"])
            trigger = trigger_of(shown, "kernel.packet_drop")
            assert trigger["why"].startswith("packet dropped: NETFILTER_DROP, peer ")
    finally:
        pair.alpha.run(*["nft", "delete", "table", "inet", "lossy"])


def test_a_queue_of_this_host_is_told_of(pair: Pair) -> None:
    with slow_device(pair.alpha, "1mbit", "2kb"), pair.talk("rtt", "answers") as said:
        shown = pair.here.shown(said["victim"])
        trigger = trigger_of(shown, "kernel.qdisc_delay")
        assert trigger["why"].startswith("packet waited in the queue of eth0: ")
        spans = kernel_spans(shown, "qdisc_delay")
        assert {span["attributes"]["kernel.confidence"] for span in spans} == {"exact"}
