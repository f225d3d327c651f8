# SPDX-License-Identifier: Apache-2.0
"""Where processes at the priority of everybody else use all processors, nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from testbed.daemons import Cores, bound, lone_node

STARVED = Path(__file__).parents[2] / "build" / "bench" / "starved"

# Of 4 KiB, in bursts of a tenth of a second's.
TRACES_PER_S = 2000
BURST = 200

LOOPS = 4
WINDOWS = 5
WINDOW_MS = 1000


@pytest.mark.slow
def test_a_node_that_rarely_gets_a_processor_loses_nothing(tmp_path: Path) -> None:
    numbers = (TRACES_PER_S, BURST, WINDOW_MS, WINDOWS, LOOPS)
    cores = Cores.choose()
    with lone_node(tmp_path, cores, {"pool_bytes": "1GiB"}) as daemon:
        # The loops may run on any processor, the daemon's too.
        command = bound([str(STARVED), *map(str, numbers)], None)
        output = subprocess.run(
            command,
            env={**os.environ, **daemon.client_environment()},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
    windows = [json.loads(line) for line in output.splitlines()]
    assert len(windows) == WINDOWS
    assert all(window["traces"] >= BURST for window in windows)
    assert [window["lost"] for window in windows] == [0] * WINDOWS
