# SPDX-License-Identifier: Apache-2.0
"""``make bench-probes``, as root: what the kernel probes cost.

PAIRS (25): of measurements. LOADER (core): by which the probes are loaded; the memory is measured of both.
ONLY: names of parts, separated by blanks. QUICK=1: a little of each, whose figures mean nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.machine import description, load, stolen_told
from bench.probes.cpu import cpu
from bench.probes.parameters import Parameters
from bench.probes.process import footprint, moves, pick_up
from bench.probes.programs import programs
from bench.probes.rig import Rig
from bench.probes.speed import bypass, http, nothing, switches
from testbed.daemons import anywhere
from testbed.probes import Probes
from testbed.topology import Node

# Room for what the HTTP pair records in a few seconds.
_POOL_BYTES = 256 << 20

PARTS: Mapping[str, tuple[str, Callable[[Rig], None]]] = {
    "switches": ("a round trip: median with the bypass and with probes", switches),
    "http": ("two services that call each other: with the bypass and with probes", http),
    "nothing": ("a round trip: median without programs and with two that do nothing", nothing),
    "bypass": ("a round trip: median without probes and with the bypass", bypass),
    "cpu": ("CPU time of a round trip and of both daemons meanwhile: median", cpu),
    "programs": ("a run of each program, less that of one that does nothing", programs),
    "footprint": ("the process", footprint),
    "pick_up": ("from the kernel to the node", pick_up),
    "moves": ("until many processes are watched", moves),
}


def main() -> int:
    """Measure and print it all."""
    if os.geteuid() != 0:
        sys.stderr.write("probes are loaded by root alone: sudo make bench-probes\n")
        return 2
    try:
        parameters = Parameters.of_environment()
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    chosen = parameters.only or tuple(PARTS)
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        sys.stderr.write(f"ONLY: there is no {unknown[0]}; allowed: {' '.join(PARTS)}\n")
        return 2
    for name, what in description().items():
        print(f"{name}: {what}")
    print(
        f"loader: {parameters.loader}; repetitions: {parameters.pairs};"
        f" {parameters.round_trips} round trips each; load {load():.2f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "metrics": {"listen": None},
            "pool_bytes": _POOL_BYTES,
            "probes": {"loader": parameters.loader},
        }
        node = Node(anywhere(), "bench", Path(directory), None, config)
        rig = Rig(node, Probes(node), parameters)
        with node, stolen_told():
            for name in chosen:
                title, part = PARTS[name]
                print(f"{name}: {title}", flush=True)
                part(rig)
    return 0


if __name__ == "__main__":
    sys.exit(main())
