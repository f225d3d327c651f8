# SPDX-License-Identifier: Apache-2.0
"""One service of a chain: ``python3 chain.py PORT``.

A request goes from host to host, each calling the next, with real contexts on
the way there and breadcrumbs from the way back. Told by lines on standard
input, each answered by a line:

    request TRACE HOST...   -> done      the chain is this service and those
    fire TRACE              -> the time of bs_trigger(), CLOCK_MONOTONIC ns
    load SECONDS PER_S WRONG_EVERY SPANS HOST...
                            -> how many requests there were, each of so many spans a service.
                               In one of WRONG_EVERY each service fires, when it is done
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass

import backsight

_ATTACH_TIMEOUT_S = 60.0
_TRIGGER = "bench"

# As much as OpenTelemetry says of a span of an HTTP server.
_DETAIL = bytes(400)


@dataclass(frozen=True, slots=True)
class Part:
    """What a service is asked to do. ``rest``: the hosts of those that come after it."""

    trace_id: str
    rest: tuple[str, ...]
    parent: int = 0
    context: str | None = None
    inner_spans: int = 0
    is_wrong: bool = False


class Service:
    """One of the chain, and its way to the next."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("", port))

    def visit(self, part: Part) -> None:
        """Do this service's part of a request, and have the rest do theirs."""
        span = _new_span()
        with backsight.Trace(part.trace_id) as trace:
            if part.context is not None:
                trace.deserialize(part.parent, part.context)
            trace.span_start(span, part.parent, time.time_ns(), "visit")
            for _ in range(part.inner_spans):
                inner = _new_span()
                trace.span_start(inner, span, time.time_ns(), "inner")
                trace.write(_DETAIL)
                trace.span_end(inner, time.time_ns())
            if part.rest:
                self._call_next(part, span, trace)
            if part.is_wrong:
                trace.trigger(_TRIGGER)
            trace.span_end(span, time.time_ns())

    def _call_next(self, part: Part, span: int, trace: backsight.Trace) -> None:
        host, *rest = part.rest
        said = Part(
            part.trace_id, tuple(rest), span, trace.serialize(span), part.inner_spans, part.is_wrong
        )
        with socket.create_connection((host, self._port)) as connection:
            connection.sendall(json.dumps(asdict(said)).encode() + b"\n")
            with connection.makefile("r") as stream:
                trace.breadcrumb(stream.readline().strip())

    def serve(self) -> None:
        """Requests come from another of the chain."""
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rw") as stream:
                self.visit(Part(**json.loads(stream.readline())))
                stream.write(backsight.node_ref() + "\n")
                stream.flush()

    def load(
        self, seconds: float, per_s: float, wrong_every: int, spans: int, rest: list[str]
    ) -> int:
        """Requests one after the other, each at its time; how many there were."""
        begin_s, count = time.monotonic(), int(seconds * per_s)
        for number in range(count):
            time.sleep(max(0.0, begin_s + number / per_s - time.monotonic()))
            self.visit(
                Part(
                    secrets.token_hex(16),
                    tuple(rest),
                    inner_spans=spans - 1,
                    is_wrong=number % wrong_every == 0,
                )
            )
        return count


def _new_span() -> int:
    return secrets.randbits(63) + 1


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
                service.visit(Part(trace_id, tuple(rest)))
                print("done", flush=True)
            case ["fire", trace_id]:
                fired_ns = time.monotonic_ns()
                backsight.trigger(trace_id, _TRIGGER)
                print(fired_ns, flush=True)
            case ["load", seconds, per_s, wrong_every, spans, *rest]:
                done = service.load(
                    float(seconds), float(per_s), int(wrong_every), int(spans), rest
                )
                print(done, flush=True)
            case _:
                sys.exit(f"what is {line!r}?")


if __name__ == "__main__":
    main()
