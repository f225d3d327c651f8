# SPDX-License-Identifier: Apache-2.0
"""One service of a chain: ``python3 chain.py PORT``.

A request goes from host to host, each calling the next, with real contexts on
the way there and breadcrumbs from the way back. Told by lines on standard
input, each answered by a line:

    request TRACE HOST...   -> done      the chain is this service and those
    fire TRACE              -> the time of bs_trigger(), CLOCK_MONOTONIC ns
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import time

import backsight

_ATTACH_TIMEOUT_S = 60.0
_TRIGGER = "bench"


class Service:
    """One of the chain, and its way to the next."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("", port))

    def visit(self, trace_id: str, parent: int, context: str | None, rest: list[str]) -> None:
        """Do this service's part of a request, and have the rest do theirs."""
        span = secrets.randbits(63) + 1
        with backsight.Trace(trace_id) as trace:
            if context is not None:
                trace.deserialize(parent, context)
            trace.span_start(span, parent, time.time_ns(), "visit")
            if rest:
                said = json.dumps([trace_id, span, trace.serialize(span), rest[1:]])
                with socket.create_connection((rest[0], self._port)) as connection:
                    connection.sendall(said.encode() + b"\n")
                    with connection.makefile("r") as stream:
                        trace.breadcrumb(stream.readline().strip())
            trace.span_end(span, time.time_ns())

    def serve(self) -> None:
        """Requests come from another of the chain."""
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rw") as stream:
                self.visit(*json.loads(stream.readline()))
                stream.write(backsight.node_ref() + "\n")
                stream.flush()


def main() -> None:
    """Say ``attached``, then do as told until standard input ends."""
    service = Service(int(sys.argv[1]))
    if not backsight.wait_attached(_ATTACH_TIMEOUT_S):
        sys.exit("no node daemon to attach to")
    threading.Thread(target=service.serve, daemon=True).start()
    print("attached", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["request", trace_id, *rest]:
                service.visit(trace_id, 0, None, rest)
                print("done", flush=True)
            case ["fire", trace_id]:
                fired_ns = time.monotonic_ns()
                backsight.trigger(trace_id, _TRIGGER)
                print(fired_ns, flush=True)
            case _:
                sys.exit(f"what is {line!r}?")


if __name__ == "__main__":
    main()
