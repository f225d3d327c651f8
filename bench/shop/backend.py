# SPDX-License-Identifier: Apache-2.0
"""``python3 -m bench.shop.backend ADDRESS FILE``: where traces are sent by OTLP, and when they come.

Appends a line of JSON a trace and request to the file: ``trace``, ``arrived_ns``, ``spans``; of the
request to the front end, if its span is there, ``path`` and ``end_ns``. All times are Unix times.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from testbed.otlp import trace_service


@dataclass(slots=True)
class Arrival:
    """A part of a trace, or all of it. ``end_ns`` 0: the request's own span is not in it."""

    trace: str
    arrived_ns: int
    spans: int = 0
    path: str = ""
    end_ns: int = 0


def arrivals(request: ExportTraceServiceRequest, now_ns: int) -> Iterable[Arrival]:
    """Of each trace in a request."""
    found: dict[bytes, Arrival] = {}
    for span in _spans(request):
        arrival = found.setdefault(span.trace_id, Arrival(span.trace_id.hex(), now_ns))
        arrival.spans += 1
        if not span.parent_span_id:
            arrival.end_ns = span.end_time_unix_nano
            arrival.path = next(
                (one.value.string_value for one in span.attributes if one.key == "url.path"), ""
            )
    return found.values()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Any]:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            yield from scope.spans


def read(path: Path) -> list[Arrival]:
    """What was written so far."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Arrival(**json.loads(line)) for line in lines if line.endswith("\n")]


def main() -> None:
    """Listen until the end."""
    address, path = sys.argv[1:]
    with Path(path).open("a") as file:

        def export(
            request: ExportTraceServiceRequest, _: grpc.ServicerContext
        ) -> ExportTraceServiceResponse:
            for arrival in arrivals(request, time.time_ns()):
                file.write(json.dumps(asdict(arrival)) + "\n")
            file.flush()
            return ExportTraceServiceResponse()

        # One thread, since it writes without a lock.
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers((trace_service(export),))
        if not server.add_insecure_port(address):
            raise SystemExit(f"backend: cannot listen on {address}")
        server.start()
        server.wait_for_termination()


if __name__ == "__main__":
    main()
