# SPDX-License-Identifier: Apache-2.0
"""``make bench-floor``: the memory that Python and its libraries take of each daemon, step by step.

As many processes as ``make bench-shop`` has daemons (three nodes and a coordinator) import the same
things, one after the other, and each time it is read what they have: Pss, in which pages that several
have count for a part each. What the daemons do comes on top of the last step; without what is
imported before it there is no gRPC in Python, whatever they do.

DAEMONS (4): how many; one of them is the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.costs import Costs
from bench.environment import given, whole_number
from bench.machine import description
from testbed.topology import PYTHON

_CHILD = Path(__file__).with_name("floor_child.py")

_NODE = ("appliance.serve", "appliance.counters", "appliance.links")
_COORDINATOR = ("coordinator.__main__",)


@dataclass(frozen=True, slots=True)
class Parameters:
    """See the module."""

    daemons: int = 4


@dataclass(frozen=True, slots=True)
class _Step:
    """What each process is told; ``last``: what the last one is told instead."""

    what: str
    told: str
    last: str = ""


_STEPS = (
    _Step("the interpreter", "import"),
    _Step("asyncio", "import asyncio"),
    _Step("gRPC, for asyncio", "import grpc grpc.aio"),
    _Step("protobuf, and our messages", "import backsight_pb2"),
    _Step("an event loop, a channel and a call", "connect"),
    _Step("YAML", "import yaml"),
    _Step(
        "an HTTP server, and Prometheus' client",
        "import http.server wsgiref.simple_server prometheus_client",
    ),
    _Step("of a node, codecs of netlink", "import appliance.netlink_codecs", "import"),
    _Step(
        "all that a node imports, or the coordinator",
        f"import {' '.join(_NODE)}",
        f"import {' '.join(_COORDINATOR)}",
    ),
)


class _Process:
    """One that imports what it is told."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PYTHON, _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pss_mb(self) -> float:
        return Costs.alone(self._process.pid).pss_bytes / 1e6

    def tell(self, line: str) -> None:
        """Wait until it has done so."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError(f"a process failed at {line!r}; its reason stands above")

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@contextlib.contextmanager
def _processes(count: int) -> Iterator[list[_Process]]:
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            processes.append(_Process())
            stack.callback(processes[-1].close)
        yield processes


def main(environment: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Measure and print it all."""
    if arguments:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        parameters = given(Parameters(), environment, whole_number(100))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for name, what in description().items():
        print(f"{name}: {what}")
    print(
        f"Pss of {parameters.daemons} processes at once, MB: all together, and the least and the most of one"
    )
    with _processes(parameters.daemons) as processes:
        for step in _STEPS:
            for process in processes[:-1]:
                process.tell(step.told)
            processes[-1].tell(step.last or step.told)
            sizes = [process.pss_mb for process in processes]
            spread = f"({min(sizes):.1f} to {max(sizes):.1f})"
            print(
                f"{'+ ' if step is not _STEPS[0] else ''}{step.what:<46} {sum(sizes):6.1f} {spread}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ, sys.argv[1:]))
