# SPDX-License-Identifier: Apache-2.0
"""A node daemon that is stopped for ten seconds, or dead for some, costs applications nothing.

If it is away for so long that something is lost, no trace passes for whole that is not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.daemons import Cores, coordinator_on, lone_node, this_machine
from testbed.topology import PYTHON, Node, await_settled

# What a service writes in a second: 350 kB, as in the field.
TRACES_PER_S = 85
TRACE_BYTES = 4096

# What one trigger names: the trace and its laterals.
GROUP = 33

# All that was written meanwhile is triggered at once.
AT_ONCE = dict.fromkeys(("per_process_burst", "per_trigger_burst"), 10_000)

# For each line it writes that many traces: those of the first lines at the pace of a
# service, so that the node knows its rate, the last ones as fast as it goes, since what
# counts is how much comes while the node is away, and not how long that takes.
# "keep": triggers for all that it wrote so far.
WRITER = f"""
import sys, time, backsight
assert backsight.wait_attached(60)
number, written = 0, []
for line in sys.stdin:
    if line.strip() == "keep":
        while written:
            group, written = written[:{GROUP}], written[{GROUP}:]
            backsight.trigger(group[0], "kept", None, group[1:])
    else:
        traces, pause_s = line.split()
        for _ in range(int(traces)):
            number += 1
            written.append(f"{{number:032x}}")
            with backsight.Trace(written[-1]) as trace:
                trace.write(bytes({TRACE_BYTES}))
            time.sleep(float(pause_s))
    stats = backsight.stats()
    print(stats.records_lost + stats.triggers_lost, flush=True)
"""

# Writes traces until one is lost. The one before is whole by then; of that it loses a
# record by another handle, and waits in the middle of it to be killed.
LOSER = f"""
import sys, backsight
assert backsight.wait_attached(60)
number = 0
while not backsight.stats().records_lost:
    number += 1
    with backsight.Trace(f"{{number:032x}}") as trace:
        trace.write(bytes({TRACE_BYTES}))
    if number == 1:
        print(flush=True)
        sys.stdin.readline()
whole = f"{{number - 1:032x}}"
open_handle = backsight.Trace(whole)
open_handle.write(bytes({TRACE_BYTES}))
print(whole, backsight.stats().records_lost, flush=True)
sys.stdin.readline()
"""


class Writer:
    """The process that writes. What it does returns how much it has lost so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def write(self, traces: int, pause_s: float) -> int:
        """Write so many, at a steady rate; how many records and triggers were lost since the start."""
        return self._do(f"{traces} {pause_s}")

    def keep_all(self) -> int:
        return self._do("keep")

    def _do(self, line: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def writer(daemon: Node) -> Iterator[Writer]:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER],
        env={**os.environ, "BACKSIGHT_SOCKET": str(daemon.socket_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Writer(process)
        assert process.stdin is not None
        process.stdin.close()


def test_a_daemon_that_is_stopped_for_ten_seconds_loses_nothing(tmp_path: Path) -> None:
    config = {"pool_bytes": "64MiB"}
    with lone_node(tmp_path, Cores.choose(), config) as daemon, writer(daemon) as service:
        assert service.write(8 * TRACES_PER_S, 1 / TRACES_PER_S) == 0
        os.kill(daemon.daemon_pid(), signal.SIGSTOP)
        assert service.write(10 * TRACES_PER_S, 0) == 0
        os.kill(daemon.daemon_pid(), signal.SIGCONT)
        # And again, with what the node has granted since.
        assert service.write(TRACES_PER_S, 1 / TRACES_PER_S) == 0
        os.kill(daemon.daemon_pid(), signal.SIGSTOP)
        assert service.write(10 * TRACES_PER_S, 0) == 0
        os.kill(daemon.daemon_pid(), signal.SIGCONT)


@pytest.mark.slow
def test_a_daemon_that_is_killed_and_started_seconds_later_loses_nothing(tmp_path: Path) -> None:
    machine = this_machine(Cores.choose().daemons)
    quiet: dict[str, Any] = {"metrics": {"listen": None}}
    coordinator = coordinator_on(machine, tmp_path)
    config = {"pool_bytes": "64MiB", "triggers": AT_ONCE, **quiet}
    daemon = Node(machine, "node", tmp_path, coordinator, config)
    with coordinator, daemon, writer(daemon) as service:
        written = 2 * TRACES_PER_S
        assert service.write(written, 1 / TRACES_PER_S) == 0
        for _ in range(2):
            # While the holder is stopped nobody starts a new daemon.
            os.kill(daemon.holder_pid(), signal.SIGSTOP)
            os.kill(daemon.daemon_pid(), signal.SIGKILL)
            assert service.write(5 * TRACES_PER_S, 0) == 0
            os.kill(daemon.holder_pid(), signal.SIGCONT)
            daemon.wait_ready()
            # The second time with what the new one has granted.
            assert service.write(TRACES_PER_S, 1 / TRACES_PER_S) == 0
            written += 6 * TRACES_PER_S
        assert service.keep_all() == 0
        assert await_settled(coordinator, [daemon])
        kept = coordinator.ctl_json("traces")
    assert len(kept) == written
    assert {trace["verdict"]["kind"] for trace in kept} == {"coherent"}


def test_who_is_killed_in_the_middle_of_a_loss_leaves_nothing_coherent(tmp_path: Path) -> None:
    machine = this_machine(Cores.choose().daemons)
    coordinator = coordinator_on(machine, tmp_path)
    config: dict[str, Any] = {"pool_bytes": "8MiB", "metrics": {"listen": None}}
    daemon = Node(machine, "node", tmp_path, coordinator, config)
    with coordinator, daemon:
        with subprocess.Popen(
            [PYTHON, "-c", LOSER],
            env={**os.environ, "BACKSIGHT_SOCKET": str(daemon.socket_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as loser:
            assert loser.stdin is not None and loser.stdout is not None
            loser.stdout.readline()
            os.kill(daemon.daemon_pid(), signal.SIGSTOP)
            loser.stdin.write("\n")
            loser.stdin.flush()
            trace, lost = loser.stdout.readline().split()
            loser.kill()
        assert int(lost) == 2
        os.kill(daemon.daemon_pid(), signal.SIGCONT)
        machine.run(PYTHON, "-m", "ctl", "--node", str(daemon.socket_path), "trigger", trace)
        assert await_settled(coordinator, [daemon])
        (kept,) = coordinator.ctl_json("traces")
    assert kept["trace_id"] == trace
    assert kept["verdict"]["kind"] == "lossy"
