# SPDX-License-Identifier: Apache-2.0
"""An application that does all that one can see: ``python3 -m tests.monitoring.application``.

It writes and fires until its standard input ends, and has a listening queue that is full.
Once it has lost a record it says so, in a line.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator

import backsight

_ATTACH_TIMEOUT_S = 30.0
_PAUSE_S = 0.01

# Of 4 MiB, which such a pool has: some seconds, and it is full for the first time.
_PAYLOAD = bytes(30_000)

# A queue of none takes one, and turns away what comes then.
_CONNECTIONS = 4


@contextlib.contextmanager
def crowd() -> Iterator[None]:
    """Ask again and again for connections that nobody accepts."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(_CONNECTIONS):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
        yield


def request(lock: threading.Lock) -> None:
    """Handle a request, which is slow, and waits for a lock."""
    with backsight.Trace(secrets.token_hex(16)) as trace:
        span = secrets.randbits(63) + 1
        trace.span_start(span, 0, time.time_ns(), "GET /")
        with lock:
            trace.write(_PAYLOAD)
        trace.span_end(span, time.time_ns())
        trace.trigger("slow", "told to")


def main() -> None:
    """Until the end of the input."""
    assert backsight.wait_attached(_ATTACH_TIMEOUT_S)
    lock = threading.Lock()
    has_lost = False
    with crowd():
        while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
            request(lock)
            if not has_lost and backsight.stats().records_lost:
                has_lost = True
                print("lost", flush=True)


if __name__ == "__main__":
    main()
