# SPDX-License-Identifier: Apache-2.0
"""Requests that no mishap can strike, beside the shop's: ``bystander.py CPU``.

They go over a connection of their own on loopback, in a process of their own, before all others
and never on that CPU. Each that is over is a line of its output, as with orders.py.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import sys
import time
from dataclasses import asdict

import backsight
from tests.mishaps.orders import Asked

# One is under way at any time, and none is short beside what a probe waits for.
_ECHOES = 5
_PAUSE_S = 0.02

# What starves the threads of the shop, on the machine's other CPUs too, does not starve these.
_NICE = -20


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


def ask(number: int, ours: socket.socket, theirs: socket.socket) -> Asked:
    """One request."""
    trace, span, start_ns = secrets.token_hex(16), secrets.randbits(63) | 1, time.time_ns()
    with backsight.Trace(trace) as here:
        here.span_start(span, 0, start_ns, "bystander")
        for _ in range(_ECHOES):
            for writes, reads in ((ours, theirs), (theirs, ours)):
                writes.sendall(b"?")
                reads.recv(1)
            time.sleep(_PAUSE_S)
        end_ns = time.time_ns()
        here.span_end(span, end_ns)
    return Asked(number, trace, start_ns, end_ns, 200)


def main() -> None:
    """See above."""
    backsight.node_ref()  # begins to attach
    backsight.wait_attached(30)
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {int(sys.argv[1])} or {int(sys.argv[1])})
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    ours, theirs = _connected()
    with ours, theirs:
        for number in itertools.count(1):
            print(json.dumps(asdict(ask(number, ours, theirs))), flush=True)


if __name__ == "__main__":
    main()
