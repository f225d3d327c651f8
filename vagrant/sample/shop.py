#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A sample application: a chain of services, one on each node, that Backsight records."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import secrets
import socket
import sys
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import backsight
from backsight.autotrigger import LatencyTrigger

USAGE = """\
shop serve [NEXT]        answer on port 8080; ask the service on host NEXT first
shop load HOST PER_S [HOST...]
                         order from the service on the first HOST, so many times a second, once
                         those on all the others answer

curl node-1:8080/order                  {"trace": ..., "visited": ["node-1", "node-2", "node-3"]}
curl node-1:8080/order?error=node-2     the service there fails: it and who asked it fire `error`
curl node-1:8080/order?slow=node-3      the service there takes a quarter of a second: it and
                                        who asked it fire `latency`
"""

PORT = 8080
HERE = os.uname().nodename

# Of a service that answers in a few milliseconds.
_SLOW_S = 0.25

# One that waits for the service behind it, whose machine may be gone.
_TIMEOUT_S = 5.0


class ShopError(Exception):
    """What a service has to tell who asked it."""


@dataclass(frozen=True, slots=True)
class Request:
    """An order in this service. ``faults``: by kind, the node where it shall happen."""

    trace_id: str
    trace: backsight.Trace
    span: int
    faults: Mapping[str, str]


class Shop:
    """What the services of this node do with an order."""

    def __init__(self, next_host: str | None) -> None:
        self._next_host = next_host
        # One in twenty may be slow before that becomes the rule.
        self._slow = LatencyTrigger(
            quantile_permille=950, warmup=50, window=500, factor_permille=3000
        )

    def order(self, request: Request) -> tuple[HTTPStatus, list[str]]:
        """The status, and who has seen it."""
        visited = [HERE]
        try:
            if self._next_host is not None:
                status, others = self._ask(self._next_host, request)
                visited += others
                if status != HTTPStatus.OK:
                    raise ShopError(f"{self._next_host} answered {status}")
            if request.faults.get("error") == HERE:
                raise ShopError("out of stock")
            if request.faults.get("slow") == HERE:
                time.sleep(_SLOW_S)
        except (ShopError, OSError, http.client.HTTPException) as error:
            request.trace.trigger("error", f"{type(error).__name__}: {error}")
            return HTTPStatus.INTERNAL_SERVER_ERROR, visited
        return HTTPStatus.OK, visited

    def _ask(self, host: str, request: Request) -> tuple[int, list[str]]:
        trace = request.trace
        call = secrets.randbits(63) + 1
        trace.span_start(
            call, request.span, time.time_ns(), f"ask {host}", backsight.SpanKind.CLIENT
        )
        connection = http.client.HTTPConnection(host, PORT, timeout=_TIMEOUT_S)
        try:
            headers = {
                "traceparent": f"00-{request.trace_id}-{call:016x}-01",
                "tracestate": f"bs={trace.serialize(call)}",
            }
            connection.request(
                "GET", f"/order?{urllib.parse.urlencode(request.faults)}", headers=headers
            )
            answer = connection.getresponse()
            trace.breadcrumb(answer.headers.get("backsight-node", ""))
            return answer.status, list(json.load(answer)["visited"])
        finally:
            connection.close()
            trace.span_end(call, time.time_ns())

    def is_slow(self, duration_ns: int) -> bool:
        return self._slow.observe(duration_ns, "GET /order")


class Handler(http.server.BaseHTTPRequestHandler):
    """A request: its trace goes on, or begins here."""

    shop: Shop
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        began_ns = time.time_ns()
        _, trace_id, parent, *_ = (self.headers.get("traceparent") or "---").split("-")
        state = self.headers.get("tracestate", "").removeprefix("bs=")
        trace_id = trace_id or secrets.token_hex(16)
        faults = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        with backsight.Trace(trace_id) as trace:
            if parent:
                trace.deserialize(int(parent, 16), state)
            span = secrets.randbits(63) + 1
            trace.span_start(
                span, int(parent or "0", 16), began_ns, "GET /order", backsight.SpanKind.SERVER
            )
            status, visited = self.shop.order(Request(trace_id, trace, span, faults))
            ended_ns = time.time_ns()
            trace.span_end(span, ended_ns, attributes={"http.response.status_code": int(status)})
            if self.shop.is_slow(ended_ns - began_ns):
                trace.trigger("latency", f"{(ended_ns - began_ns) / 1e6:.0f} ms")
            said = {"trace": trace_id, "visited": visited}
        body = f"{json.dumps(said)}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("backsight-node", backsight.node_ref())
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Orders are recorded by Backsight, and need no log."""


def serve(next_host: str | None) -> None:
    """Answer for ever."""
    Handler.shop = Shop(next_host)
    with http.server.ThreadingHTTPServer(("", PORT), Handler) as server:
        server.serve_forever()


def await_service(host: str) -> None:
    """Until somebody listens there: until then an order could only fail."""
    while True:
        try:
            socket.create_connection((host, PORT), _TIMEOUT_S).close()
        except OSError:
            time.sleep(1.0)
        else:
            return


def load(host: str, per_s: float) -> None:
    """Order for ever, whether it is answered or not."""
    while True:
        connection = http.client.HTTPConnection(host, PORT, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/order")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            print(f"{host}: {error}", file=sys.stderr)
        finally:
            connection.close()
        time.sleep(1 / per_s)


def main() -> int:
    """One of both, as the command line says."""
    match sys.argv[1:]:
        case ["serve"]:
            serve(None)
        case ["serve", next_host]:
            serve(next_host)
        case ["load", host, per_s, *others]:
            for other in others:
                await_service(other)
            load(host, float(per_s))
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
