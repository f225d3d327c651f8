# SPDX-License-Identifier: Apache-2.0
"""What many processes that do nothing cost a node: runs clients.c."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench.machine import load
from bench.report import Param, Result, rounded
from bench.scale import Scale
from testbed.daemons import bound

# Triggers a second of one of them, and threads of each.
_LOADS = ((0, 0), (0, 32), (1, 32))


def idle_clients(program: Path, scale: Scale) -> Iterator[Result]:
    """CPU share of a node to which many processes are attached, of which one triggers at most."""
    for triggers_per_s, threads in _LOADS:
        done = subprocess.run(
            bound(
                [
                    str(program),
                    *map(str, (scale.idle_clients, threads, scale.idle_clients_s, triggers_per_s)),
                ],
                None,
            ),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        if not done.stdout:
            continue  # a commit of another layout; the program has said so
        one = json.loads(done.stdout)
        params: dict[str, Param] = {
            "clients": scale.idle_clients,
            "threads": threads,
            "triggers_per_s": triggers_per_s,
            "seconds": scale.idle_clients_s,
            "polls": one["polls"],
            "poll_p90_ms": rounded(one["poll_ns"] / 1e6),
            "load": rounded(load()),
        }
        share = 100 * one["cpu_ns"] / one["elapsed_ns"]
        yield Result.of("idle_clients_cpu", "% of a core", [share], params)
