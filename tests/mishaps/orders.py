# SPDX-License-Identifier: Apache-2.0
"""A client of the shop that knows which trace each of its orders is: ``orders.py HOST PORT``.

Asks for order after order on a few connections. A line on its standard input, in JSON, is one
more order, ``{"order": 7, "trace": "..."}``, or ``{"burst": 64}``: so many connections at once.
Each order that is over is a line of its output.
"""

from __future__ import annotations

import http.client
import itertools
import json
import secrets
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass

import backsight

_CONNECTIONS = 4
# Some 30 requests a second together: no mishap misses them all, and they cause none.
_PAUSE_S = 0.12
_TIMEOUT_S = 20.0
# So long the queue stays full for others. Well below the second after which a SYN comes again.
_BURST_S = 0.2


@dataclass(frozen=True, slots=True)
class Asked:
    """An order that was asked for: which trace, from when till when (Unix time), what came of it."""

    order: int
    trace: str
    start_ns: int
    end_ns: int
    status: int
    """Of HTTP; 0: no answer."""


class Client:
    """Of one shop."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def say(self, asked: Asked) -> None:
        with self._lock:
            print(json.dumps(asdict(asked)), flush=True)

    def ask(self, connection: http.client.HTTPConnection, order: int, trace: str) -> None:
        """And say what came of it."""
        span, start_ns = secrets.randbits(63) | 1, time.time_ns()
        status = 0
        with backsight.Trace(trace) as here:
            here.span_start(span, 0, start_ns, f"order {order}", backsight.SpanKind.CLIENT)
            context = {
                "traceparent": f"00-{trace}-{span:016x}-00",
                "tracestate": f"bs={here.serialize(span)}",
            }
            try:
                connection.request("GET", f"/orders/{order}", headers=context)
                response = connection.getresponse()
                response.read()
                status = response.status
                here.breadcrumb(response.headers.get("backsight-node") or "")
            except (OSError, http.client.HTTPException):
                connection.close()  # it is made anew by the next request
            end_ns = time.time_ns()
            here.span_end(span, end_ns, attributes={"http.response.status_code": status})
        self.say(Asked(order, trace, start_ns, end_ns, status))

    def ask_on_and_on(self) -> None:
        """The usual load."""
        connection = self._connection()
        while True:
            self.ask(connection, next(self._numbers) % 400, secrets.token_hex(16))
            time.sleep(_PAUSE_S)

    def ask_once(self, order: int, trace: str) -> None:
        connection = self._connection()
        self.ask(connection, order, trace)
        connection.close()

    def burst(self, connections: int) -> None:
        """More at once than anybody has room for."""
        asking = [socket.socket() for _ in range(connections)]
        for one in asking:
            one.setblocking(False)
            one.connect_ex(self._address)
        time.sleep(_BURST_S)
        for one in asking:
            one.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self._address, timeout=_TIMEOUT_S)


def main() -> None:
    """See above."""
    backsight.node_ref()  # begins to attach
    backsight.wait_attached(30)
    client = Client(sys.argv[1], int(sys.argv[2]))

    def start(*work: object) -> None:
        call, *arguments = work
        threading.Thread(target=call, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    for _ in range(_CONNECTIONS):
        start(client.ask_on_and_on)
    for line in sys.stdin:
        match json.loads(line):
            case {"order": order, "trace": trace}:
                start(client.ask_once, order, trace)
            case {"burst": connections}:
                start(client.burst, connections)


if __name__ == "__main__":
    main()
