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

from appliance.probes.symptoms import SYMPTOMS
from testbed.faults import dropping, dropping_here, slow_device
from testbed.topology import PYTHON, Host, Network
from tests.probes.machine import Machine, kernel_spans, machine, trigger_of

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

PORT = 7000

OF_THE_NETWORK = {one.trigger for one in SYMPTOMS if one.kind.is_tcp}

# Go along with a trigger: those that wrote last (LATERALS_MAX of bpf/fire.h).
NEIGHBOURS_MAX = 4

# Of all segments that are not of the connection's begin or end, some.
ONE_IN_TEN = "tcp flags & (syn | fin) == 0 numgen random mod 10 == 0"

PROBES = {
    # Each trace of several, as soon as anything happens to it.
    "per_s": 1000,
    "burst": 1000,
    "tcp_read_delay": {"fire_ms": 100, "record_ms": 50},
    "tcp_reset_sent": {"fire_ms": 0, "record_ms": 0},
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
        """What a program on alpha says that happened to it, talking to one on beta.

        At the end of the block: nothing has happened to who wrote into another connection.
        """
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
            said = json.loads(talker.stdout.readline())
            yield said
            assert said["innocent_writes"] > 0
            assert not self.fired_for(said["innocent"])

    def fired_for(self, trace: str) -> set[str]:
        """What of the network fired for a trace, or for one that it was a neighbour of."""
        triggered = self.here.triggered().items()
        return {name for name, traces in triggered if trace in traces} & OF_THE_NETWORK


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
def pair(tmp_path_factory: pytest.TempPathFactory, build: Path, loader: str) -> Iterator[Pair]:
    with (
        Network("tcp") as network,
        machine(tmp_path_factory.mktemp("tcp"), build, loader, PROBES) as here,
    ):
        alpha, beta = network.host("alpha"), network.host("beta")
        # Segments of the size that a wire takes, so that one is lost at a time.
        alpha.run("ip", "link", "set", "eth0", "gso_max_segs", "1")
        yield Pair(here, alpha, beta)


def writers(said: dict[str, Any], position: int) -> set[str]:
    """Whose the byte at a position is: the writes are in turn, of one size.

    The connection's first byte may be counted as 0 or as 1 (tcp_retransmit.bpf.c).
    """
    traces, size = said["traces"], said["chunk_bytes"]
    return {traces[at // size % len(traces)] for at in (position - 1, position)}


def waits_ns(shown: dict[str, Any], event: str) -> list[int]:
    """How long each of them took."""
    return [span["end_ns"] - span["start_ns"] for span in kernel_spans(shown, event)]


def test_a_segment_that_is_sent_again_is_of_who_wrote_it(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        dropping(pair.beta, PORT, ONE_IN_TEN) as lost,
        pair.talk("retransmit", "reads_all") as said,
    ):
        right = Counter[bool]()
        sure = Counter[str]()
        probes = 0
        for trace in said["traces"]:
            shown = pair.here.shown(trace)
            trigger = trigger_of(shown, "kernel.tcp_retransmit")
            assert f"peer {pair.beta.address}:{PORT}" in trigger["why"]
            assert trigger["laterals"]
            assert set(trigger["laterals"]) <= {*said["traces"]} - {trace}
            probes += len(kernel_spans(shown, "tcp_loss_probe"))
            for span in kernel_spans(shown, "tcp_retransmit"):
                confidence = span["attributes"]["kernel.confidence"]
                sure[confidence] += 1
                if confidence == "exact":
                    position = span["attributes"]["kernel.tcp.position"]
                    right[trace in writers(said, position)] += 1
        with capsys.disabled():
            print(
                f"\n{sure.total()} segments sent again, and {probes} as a probe, of {lost()} that"
                f" were lost: {dict(sure)}; right: {dict(right)}"
            )
        assert sure.total() >= 1000
        assert right[True] >= 0.99 * sure.total()
        # What is lost is sent again until it arrives; on a busy machine more is thought to be lost.
        assert 0.99 * lost() <= sure.total() + probes


def test_who_wrote_last_is_told_where_nobody_knows_who_wrote(pair: Pair) -> None:
    with (
        dropping(pair.beta, PORT, "tcp flags & syn == 0"),
        pair.talk("forgotten", "reads_all") as said,
    ):
        shown = pair.here.shown(said["victim"])
        trigger = trigger_of(shown, "kernel.tcp_retransmit")
        assert trigger["why"].endswith(f"peer {pair.beta.address}:{PORT}, by the last writer")
        assert sorted(trigger["laterals"]) == sorted(said["neighbours"])
        spans = kernel_spans(shown, "tcp_retransmit")
        assert {span["attributes"]["kernel.confidence"] for span in spans} == {"socket"}


def test_a_connection_is_asked_for_as_often_as_it_is_told(pair: Pair) -> None:
    with (
        dropping(pair.beta, PORT, "tcp flags & syn != 0") as lost,
        pair.talk("syn_retransmit", "reads_all") as said,
    ):
        shown = pair.here.shown(said["victim"])
        trigger = trigger_of(shown, "kernel.tcp_syn_retransmit")
        assert f"peer {pair.beta.address}:{PORT}" in trigger["why"]
        assert trigger["laterals"] == []
        assert len(kernel_spans(shown, "tcp_syn_retransmit")) == lost() - 1 > 0


@pytest.mark.parametrize(
    ("cause", "how"),
    [
        ("reset_sent", "reads_all"),
        ("reset_received", "breaks_off"),
        ("zero_window", "does_not_read"),
        ("read_delay", "answers"),
    ],
)
def test_a_trouble_fires_for_its_trace(pair: Pair, cause: str, how: str) -> None:
    with pair.talk(cause, how) as said:
        shown = pair.here.shown(said["victim"])
        trigger = trigger_of(shown, f"kernel.tcp_{cause}")
        assert (trigger["source"], trigger["node"]) == ("kernel", "here")
        assert f"peer {pair.beta.address}:{PORT}" in trigger["why"]
        assert sorted(trigger["laterals"]) == sorted(said["neighbours"][-NEIGHBOURS_MAX:])
        if "took_ns" in said:
            waited_ns = sum(waits_ns(shown, f"tcp_{cause}"))
            assert 0.8 * said["took_ns"] <= waited_ns <= 1.5 * said["took_ns"]


def test_a_probe_for_a_loss_is_told_of_and_does_not_fire(pair: Pair) -> None:
    lossy = dropping(pair.beta, PORT, "ip length > 500 numgen inc mod 2 == 1")
    with lossy, pair.talk("loss_probe", "reads_all") as said:
        shown = pair.here.shown(said["victim"])
        assert kernel_spans(shown, "tcp_loss_probe")
        assert not pair.fired_for(said["victim"])


def test_a_queue_on_the_way_makes_round_trips_long(pair: Pair) -> None:
    with slow_device(pair.alpha, "1mbit", "2kb"), pair.talk("queue", "answers") as said:
        shown = pair.here.shown(said["victim"])
        trigger = trigger_of(shown, "kernel.tcp_rtt")
        assert "TCP round trip is long" in trigger["why"]
        assert trigger["laterals"] == said["neighbours"]
        longest_ns = max(waits_ns(shown, "tcp_rtt"))
        # It is what the kernel tells the application (tcp(7)), which smooths it: a new one counts
        # an eighth, so one that came between the two readings is in this. The last of ten segments
        # was under way for as long as the answer took.
        assert longest_ns == pytest.approx(said["rtt_us"] * 1000, rel=0.25)
        assert 0.25 * said["took_ns"] <= longest_ns <= said["took_ns"]


@pytest.mark.parametrize(("incoming", "confidence"), [(False, "exact"), (True, "socket")])
def test_a_packet_that_is_dropped_here_says_why(
    pair: Pair, incoming: bool, confidence: str
) -> None:
    """Of one that comes in, who wrote last is told."""
    rule = "tcp flags & (syn | fin) == 0 numgen inc mod 5 == 4"
    with (
        dropping_here(pair.alpha, PORT, rule, incoming=incoming),
        pair.talk("queue", "answers") as said,
    ):
        shown = pair.here.shown(said["victim"])
        trigger = trigger_of(shown, "kernel.packet_drop")
        assert trigger["why"].startswith("packet dropped: NETFILTER_DROP, peer ")
        assert trigger["laterals"] == said["neighbours"]
        spans = kernel_spans(shown, "packet_drop")
        assert {span["attributes"]["kernel.confidence"] for span in spans} == {confidence}


def test_a_packet_that_its_socket_does_not_take_says_why(pair: Pair) -> None:
    """It has no socket yet when it is dropped; the kernel says for which it was."""
    with pair.talk("filter", "answers") as said:
        shown = pair.here.shown(said["victim"])
        trigger = trigger_of(shown, "kernel.packet_drop")
        assert trigger["why"].startswith("packet dropped: SOCKET_FILTER, peer ")
        assert trigger["laterals"] == said["neighbours"]


def test_a_queue_of_this_host_is_told_of(pair: Pair) -> None:
    with slow_device(pair.alpha, "1mbit", "2kb"), pair.talk("queue", "answers") as said:
        shown = pair.here.shown(said["victim"])
        trigger = trigger_of(shown, "kernel.qdisc_delay")
        assert trigger["why"].startswith("packet waited in the queue of eth0: ")
        assert trigger["laterals"] == said["neighbours"]
        spans = kernel_spans(shown, "qdisc_delay")
        assert {span["attributes"]["kernel.confidence"] for span in spans} == {"exact"}
        # All is sent at once, and the last segment waits for all others: as long as the link
        # takes for them, but for the burst; and so long does the answer take.
        waited_ns = max(waits_ns(shown, "qdisc_delay"))
        link_ns = said["sent_bytes"] * 8 * 1e9 / 1e6
        assert 0.7 * link_ns <= waited_ns
        assert 0.7 * said["took_ns"] <= waited_ns <= said["took_ns"]
