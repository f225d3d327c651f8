# SPDX-License-Identifier: Apache-2.0
"""What the kernel probes cost: ``make bench-probes``, as root.

Context switches with probes and without, in turn: of threads that are not attached, of threads
that are and work on a trace, and with the bypass against no probes process at all. Then
what a run of each program takes, how much memory the process has, and how soon the node has what
the kernel fired.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from bench.machine import description, load, stolen_told
from testbed.daemons import Cores, anywhere, bound
from testbed.probes import Probes
from testbed.topology import Node, await_ready

PAIRS = int(os.environ.get("PAIRS", "25"))
ROUND_TRIPS = 60_000
FIRINGS = 2_000

_PING_PONG = Path(__file__).resolve().parent.parent / "build/bench/ping_pong"

Settings = Mapping[str, Any]

ON: Settings = {}
BYPASS: Settings = {"bypass": True}

# As many as are allowed, of an event that comes with each switch.
FIRES: Settings = {
    "per_s": 200,
    "burst": 1,
    "coalesce_s": 0,
    "cpu_percent": 100_000,
    "blocked": {"fire_ms": 0, "record_ms": None},
}


@dataclass(frozen=True, slots=True)
class Bench:
    """A node and probes, which are started by who needs them."""

    node: Node
    probes: Probes

    def configure(self, settings: Settings) -> None:
        """Have the probes be so, and wait until they are."""
        self.probes.config_path.write_text(
            yaml.safe_dump({**self.node.config, "probes": dict(settings)})
        )
        os.kill(self.probes.daemon_pid(), signal.SIGHUP)
        wanted = not settings.get("bypass", False)
        self.probes.await_node(
            lambda status: ("on_switch" in status["probes"].get("programs", {})) == wanted
        )

    @contextlib.contextmanager
    def ping_pong(self, *, attached: bool) -> Iterator[Callable[[], float]]:
        """What measures a round trip, in ns."""
        with self.node.host.popen(
            bound([str(_PING_PONG), *(["attached"] if attached else [])], Cores.choose().writer),
            env=self.node.client_environment("ping_pong"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None
            assert stdout is not None
            stdout.readline()

            def measure() -> float:
                stdin.write(f"{ROUND_TRIPS}\n".encode())
                stdin.flush()
                return float(stdout.readline())

            yield measure


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and bounds within which it is with 95 % (order statistics, normal approximation)."""
    ordered = sorted(values)
    half = 0.98 * len(ordered) ** 0.5
    middle = (len(ordered) - 1) / 2
    low, high = max(0, round(middle - half)), min(len(ordered) - 1, round(middle + half))
    return statistics.median(ordered), ordered[low], ordered[high]


def tell(what: str, without: Sequence[float], with_it: Sequence[float]) -> None:
    """A line about pairs of round trips."""
    median, low, high = median_interval([a / b for a, b in zip(without, with_it, strict=True)])
    print(
        f"  {what:<44} {statistics.median(without):7.0f} {statistics.median(with_it):7.0f} ns"
        f"   speed kept {median:.4f} ({low:.4f} to {high:.4f})",
        flush=True,
    )


def switches(bench: Bench) -> None:
    """With probes and with the bypass, in turn."""
    for attached in (False, True):
        off: list[float] = []
        on: list[float] = []
        with bench.probes, bench.ping_pong(attached=attached) as measure:
            if attached:
                bench.probes.await_watched(1)
            for number in range(PAIRS):
                for settings in (ON, BYPASS) if number % 2 else (BYPASS, ON):
                    bench.configure(settings)
                    (on if settings is ON else off).append(measure())
        tell("attached, in a trace" if attached else "not attached", off, on)


def bypass(bench: Bench) -> None:
    """With the bypass and without any probes, in turn."""
    none, bypassed = [], []
    with bench.ping_pong(attached=False) as measure:
        for _ in range(PAIRS):
            none.append(measure())
            with bench.probes:
                bench.configure(BYPASS)
                bypassed.append(measure())
    tell("not attached, with the bypass", none, bypassed)


def runs(bench: Bench) -> None:
    """What a run of each program takes, by its own clock."""
    with bench.probes, bench.ping_pong(attached=True) as measure:
        bench.probes.await_watched(1)
        bench.configure(ON)
        for _ in range(5):
            measure()
        bench.configure(ON)
        status = bench.probes.await_node(
            lambda status: status["probes"]["programs"]["on_switch"]["runs"] > ROUND_TRIPS
        )
        for name, cost in status["probes"]["programs"].items():
            if cost["runs"]:
                print(f"  {name:<44} {cost['run_ns'] / cost['runs']:7.0f} ns a run", flush=True)


def footprint(bench: Bench) -> None:
    """From the start of the process until it is ready, and its memory then."""
    took_s, memory = [], []
    path = bench.node.directory / "ready"
    for _ in range(5):
        # Without the holder, which takes some time to start too.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(path))
            began_s = time.monotonic()
            process = bench.node.host.popen(
                bench.probes.command(), env={"NOTIFY_SOCKET": str(path)}, stderr=subprocess.DEVNULL
            )
            await_ready(notify, process, "backsight-probes", str)
            took_s.append(time.monotonic() - began_s)
            bench.probes.await_node(lambda status: bool(status["probes_connected"]))
            status = Path(f"/proc/{process.pid}/status").read_text()
            memory.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)
            process.terminate()
            process.wait()
            path.unlink()
    for what, values, unit in (("ready after", took_s, "s"), ("memory", memory, "MiB")):
        print(
            f"  {what:<44} {min(values):.2f} / {statistics.median(values):.2f} /"
            f" {max(values):.2f} {unit} (min / median / max)",
            flush=True,
        )


def pick_up(bench: Bench) -> None:
    """From the kernel's event until the node acted on the trigger."""
    with bench.probes, bench.ping_pong(attached=True) as measure:
        bench.probes.await_watched(1)
        bench.configure(FIRES)

        def fired(status: Mapping[str, Any]) -> bool:
            measure()
            return sum(map(int, status["pick_up"]["counts"])) >= FIRINGS

        histogram = bench.probes.await_node(fired)["pick_up"]
    total = sum(histogram["counts"])
    below = list(accumulate(histogram["counts"]))
    bounds = [f"{1000 * bound:g} ms" for bound in histogram["bounds"]] + ["more"]
    for share in (0.5, 0.99, 1):
        bound = next(b for b, n in zip(bounds, below, strict=True) if n >= share * total)
        print(f"  {100 * share:g} % of {total} triggers within {bound}", flush=True)


def main() -> int:
    """Measure and print it all."""
    for name, what in description().items():
        print(f"{name}: {what}")
    print(f"pairs: {PAIRS}, {ROUND_TRIPS} round trips each; load {load():.2f}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        node = Node(
            anywhere(), "bench", Path(directory), None, {"metrics": {"listen": None}, "probes": {}}
        )
        bench = Bench(node, Probes(node))
        with node, stolen_told():
            for title, part in (
                ("a round trip: median without and with probes", switches),
                ("a round trip: median without probes and with the bypass", bypass),
                ("programs", runs),
                ("the process", footprint),
                ("from the kernel to the node", pick_up),
            ):
                print(title, flush=True)
                part(bench)
    return 0


if __name__ == "__main__":
    sys.exit(main())
