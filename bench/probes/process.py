# SPDX-License-Identifier: Apache-2.0
"""The process of the probes: its start and its memory, and how soon others have what it brings."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.probes.lines import tell_spread
from bench.probes.parameters import LOADERS
from bench.probes.rig import BUILD, ON, Rig, Settings
from testbed.topology import await_ready

# As many as are allowed, of an event that comes with each switch.
_FIRES: Settings = {
    "per_s": 200,
    "burst": 1,
    "coalesce_s": 0,
    "cpu_percent": 100_000,
    "blocked": {"fire_ms": 0, "record_ms": None},
}


def footprint(rig: Rig) -> None:
    """From the start of the process until it is ready, and its memory then; by each loader."""
    for loader in LOADERS:
        rig.write({"loader": loader})
        _footprint(rig, loader)
    rig.write(ON)


def _footprint(rig: Rig, loader: str) -> None:
    took_s, memory = [], []
    path = rig.node.directory / "ready"
    for _ in range(rig.parameters.starts):
        # Without the holder, which takes some time to start too.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(path))
            began_s = time.monotonic()
            process = rig.node.host.popen(
                rig.probes.command(), env={"NOTIFY_SOCKET": str(path)}, stderr=subprocess.DEVNULL
            )
            await_ready(notify, process, "backsight-probes", str)
            took_s.append(time.monotonic() - began_s)
            rig.probes.await_node(lambda status: bool(status["probes_connected"]))
            status = Path(f"/proc/{process.pid}/status").read_text()
            memory.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)
            process.terminate()
            process.wait()
            path.unlink()
    tell_spread(f"{loader}: ready after", took_s, "s")
    tell_spread(f"{loader}: memory", memory, "MiB")


def pick_up(rig: Rig) -> None:
    """From the kernel's event until the node acted on the trigger."""
    with rig.probes, rig.ping_pong("attached") as measure:
        rig.probes.await_watched(1)
        rig.configure(_FIRES)

        def fired(status: Mapping[str, Any]) -> bool:
            measure()
            return sum(map(int, status["pick_up"]["counts"])) >= rig.parameters.firings

        histogram = rig.probes.await_node(fired)["pick_up"]
    rig.write(ON)
    total = sum(histogram["counts"])
    below = list(accumulate(histogram["counts"]))
    bounds = [f"{1000 * bound:g} ms" for bound in histogram["bounds"]] + ["more"]
    for share in (0.5, 0.99, 1):
        bound = next(b for b, n in zip(bounds, below, strict=True) if n >= share * total)
        print(f"  {100 * share:g} % of {total} triggers within {bound}", flush=True)


def moves(rig: Rig) -> None:
    """Until all of many processes are watched: since probes have come, and since the node was killed."""
    processes = rig.parameters.processes

    with contextlib.ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(
                rig.node.host.popen(
                    [str(BUILD / "tests/suffer"), "sleep"],
                    env=rig.node.client_environment("moves"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            assert process.stdout is not None
            process.stdout.readline()
        first_s, again_s = [], []
        for _ in range(rig.parameters.starts):
            with rig.probes:
                began_s = time.monotonic()
                rig.probes.await_watched(processes)
                first_s.append(time.monotonic() - began_s)
                killed_s = time.monotonic()
                rig.node.kill_daemon()
                rig.probes.await_watched(processes)
                again_s.append(time.monotonic() - killed_s)
    tell_spread(f"{processes} processes watched after", first_s, "s")
    tell_spread("again, since the node was killed", again_s, "s")
