# SPDX-License-Identifier: Apache-2.0
"""``make bench-idle``: what the daemons take of a machine that does nothing.

Configured as they are by default, but for their ports.

WINDOWS (7): how often it is measured. WINDOW_S (20): for how long. CLIENTS (20): idle processes that
are attached to the node. As root, the kernel probes are there too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.machine import cpu_ns, description, load, stolen_told
from bench.probes.lines import tell_spread
from testbed.daemons import anywhere, coordinator_on, free_endpoint
from testbed.probes import Probes
from testbed.topology import PYTHON, Coordinator, Host, Node

_DEFAULTS = {"WINDOWS": 7, "WINDOW_S": 20, "CLIENTS": 20}

_APPLICATION = """
import sys
import backsight

assert backsight.wait_attached(30.0)
print("attached", flush=True)
sys.stdin.read()
"""


def _numbers(environment: Mapping[str, str]) -> dict[str, int]:
    """ValueError names the variable."""
    numbers = {}
    for name, default in _DEFAULTS.items():
        text = environment.get(name, str(default))
        if not text.isdecimal() or not 0 < int(text) <= 10_000:
            raise ValueError(f"{name}={text}: want a whole number from 1 to 10000")
        numbers[name] = int(text)
    return numbers


@contextlib.contextmanager
def _applications(host: Host, node: Node, count: int) -> Iterator[None]:
    """Processes that are attached, and do nothing."""
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = host.popen(
                [PYTHON, "-c", _APPLICATION],
                env=node.client_environment(),
                stdin=-1,
                stdout=-1,
            )
            stack.callback(process.wait)
            assert process.stdin is not None
            stack.callback(process.stdin.close)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            if process.stdout.readline() != b"attached\n":
                raise RuntimeError("a process does not attach")
        yield


def _memory_mib(pid: int) -> float:
    """What is resident, but for shared memory: the pool is that."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = {name: int(status.partition(f"{name}:")[2].split()[0]) for name in ("VmRSS", "RssShmem")}
    return (kib["VmRSS"] - kib["RssShmem"]) / 1024


def _measure(title: str, pids: Mapping[str, int], windows: int, window_s: int) -> None:
    print(title, flush=True)
    shares: dict[str, list[float]] = {name: [] for name in pids}
    for _ in range(windows):
        before = {name: cpu_ns(pid) for name, pid in pids.items()}
        began_ns = time.monotonic_ns()
        time.sleep(window_s)
        took_ns = time.monotonic_ns() - began_ns
        for name, pid in pids.items():
            shares[name].append(100 * (cpu_ns(pid) - before[name]) / took_ns)
    for name, pid in pids.items():
        tell_spread(f"{name}: CPU", shares[name], "% of a core")
        print(f"  {name}: memory {_memory_mib(pid):.1f} MiB, without shared memory", flush=True)


def _run(directory: Path, windows: int, window_s: int, clients: int) -> None:
    host = anywhere()
    coordinator: Coordinator = coordinator_on(
        host,
        directory,
        {"metrics": {"listen": free_endpoint(host)}, "query": {"listen": free_endpoint(host)}},
    )
    with coordinator, contextlib.ExitStack() as stack:
        node = Node(
            host, "bench", directory, coordinator, {"metrics": {"listen": free_endpoint(host)}}
        )
        stack.enter_context(node)
        pids = {"node": node.daemon_pid(), "coordinator": coordinator.daemon_pid()}
        _measure("nobody is attached", pids, windows, window_s)
        stack.enter_context(_applications(host, node, clients))
        _measure(f"{clients} processes are attached", pids, windows, window_s)
        if os.geteuid() == 0:
            probes = stack.enter_context(Probes(node))
            probes.await_watched(clients)
            pids["probes"] = probes.daemon_pid()
            _measure("and the kernel probes look at them", pids, windows, window_s)


def main(environment: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Measure and print it all."""
    if arguments:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        numbers = _numbers(environment)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for name, what in description().items():
        print(f"{name}: {what}")
    windows, window_s = numbers["WINDOWS"], numbers["WINDOW_S"]
    print(f"windows: {windows} of {window_s} s; load {load():.2f}", flush=True)
    with tempfile.TemporaryDirectory() as directory, stolen_told():
        _run(Path(directory), windows, window_s, numbers["CLIENTS"])
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ, sys.argv[1:]))
