# SPDX-License-Identifier: Apache-2.0
"""A traced service in small, as a user would write it: ``python3 -m tests.cluster.service PORT``.

Serves requests on a TCP port, and does what its standard input says, a line
each, answering each with a line:

    attach                         -> attached | alone
    request TRACE [HOST]           -> done          calls HOST:PORT inside, if given
    fire TRACE [HOST]              -> done          the same, and fires here at the end
    remote TRACE HOST              -> done          the same, and HOST fires
    leave TRACE                    -> left          starts a span, and leaves it open
    finish                         -> finished      ends those that were left open
    stats                          -> ATTACHMENTS
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time

import backsight

_ATTACH_TIMEOUT_S = 30.0


class Service:
    """Both sides of it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: list[tuple[backsight.Trace, int]] = []

    def call(self, trace_id: str, host: str | None, *, fire: bool, remote: bool) -> None:
        """Handle a request that comes from outside."""
        with backsight.Trace(trace_id) as trace:
            span = secrets.randbits(63) + 1
            trace.span_start(span, 0, time.time_ns(), "GET /")
            if host is not None:
                context = trace.serialize(span)
                said = f"{trace_id} {span} {int(remote)} {context}\n"
                with socket.create_connection((host, self._port)) as connection:
                    connection.sendall(said.encode())
                    with connection.makefile("r") as reply:
                        trace.breadcrumb(reply.readline().strip())
            trace.span_end(span, time.time_ns(), attributes={"remote": remote})
            if fire:
                trace.trigger("front", "told to")

    def leave(self, trace_id: str) -> None:
        """Start something, and do not end it."""
        trace = backsight.Trace(trace_id)
        span = secrets.randbits(63) + 1
        trace.span_start(span, 0, time.time_ns(), "endless")
        self._open.append((trace, span))

    def finish(self) -> None:
        """End it after all."""
        for trace, span in self._open:
            trace.span_end(span, time.time_ns())
            trace.close()
        self._open.clear()

    def serve(self) -> None:
        """Handle the requests of other services."""
        listener = socket.create_server(("", self._port))
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                trace_id, parent, fire, context = stream.readline().split(" ", 3)
                with backsight.Trace(trace_id) as trace:
                    trace.deserialize(int(parent), context.strip())
                    span = secrets.randbits(63) + 1
                    trace.span_start(span, int(parent), time.time_ns(), "serve")
                    trace.write(b"what a request leaves behind" * 400)
                    trace.span_end(span, time.time_ns())
                    if int(fire):
                        trace.trigger("back", "told to")
                stream.write(backsight.node_ref() + "\n")
                stream.flush()


def main() -> None:
    service = Service(int(sys.argv[1]))
    threading.Thread(target=service.serve, daemon=True).start()
    for line in sys.stdin:
        match line.split():
            case ["attach"]:
                attached = backsight.wait_attached(_ATTACH_TIMEOUT_S)
                answer = "attached" if attached else "alone"
            case ["request" | "fire" | "remote" as kind, trace_id, *host]:
                service.call(
                    trace_id,
                    host[0] if host else None,
                    fire=kind == "fire",
                    remote=kind == "remote",
                )
                answer = "done"
            case ["leave", trace_id]:
                service.leave(trace_id)
                answer = "left"
            case ["finish"]:
                service.finish()
                answer = "finished"
            case ["stats"]:
                answer = str(backsight.stats().attachments)
            case _:
                answer = f"what is {line!r}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
