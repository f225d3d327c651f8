# SPDX-License-Identifier: Apache-2.0
"""A node daemon that is stopped for ten seconds costs applications nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from testbed.daemons import Cores, lone_node

# What a service writes in a second: 350 kB, as in the field.
TRACES_PER_S = 85
TRACE_BYTES = 4096

# For each line it writes that many traces: those of the first lines at the pace of a
# service, so that the node knows its rate, the last ones as fast as it goes, since what
# counts is how much comes while the node is away, and not how long that takes.
WRITER = f"""
import sys, time, backsight
assert backsight.wait_attached(60)
number = 0
for line in sys.stdin:
    traces, pause_s = line.split()
    for _ in range(int(traces)):
        number += 1
        with backsight.Trace(f"{{number:032x}}") as trace:
            trace.write(bytes({TRACE_BYTES}))
        time.sleep(float(pause_s))
    print(backsight.stats().records_lost, flush=True)
"""


def test_a_daemon_that_is_stopped_for_ten_seconds_loses_nothing(tmp_path: Path) -> None:
    with (
        lone_node(tmp_path, Cores.choose(), {"pool_bytes": "64MiB"}) as daemon,
        subprocess.Popen(
            [sys.executable, "-c", WRITER],
            env={**os.environ, "BACKSIGHT_SOCKET": str(daemon.socket_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as writer,
    ):
        assert writer.stdin is not None and writer.stdout is not None

        def write(traces: int, pause_s: float) -> int:
            assert writer.stdin is not None and writer.stdout is not None
            writer.stdin.write(f"{traces} {pause_s}\n")
            writer.stdin.flush()
            return int(writer.stdout.readline())

        assert write(8 * TRACES_PER_S, 1 / TRACES_PER_S) == 0
        os.kill(daemon.daemon_pid(), signal.SIGSTOP)
        assert write(10 * TRACES_PER_S, 0) == 0
        os.kill(daemon.daemon_pid(), signal.SIGCONT)
        # And again, with what the node has granted since.
        assert write(TRACES_PER_S, 1 / TRACES_PER_S) == 0
        os.kill(daemon.daemon_pid(), signal.SIGSTOP)
        assert write(10 * TRACES_PER_S, 0) == 0
        os.kill(daemon.daemon_pid(), signal.SIGCONT)
        writer.stdin.close()
