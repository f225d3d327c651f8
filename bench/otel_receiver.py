# SPDX-License-Identifier: Apache-2.0
"""An OTLP/gRPC receiver that takes everything, and counts it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from testbed.otlp import trace_service


class Receiver:
    """Listens on a free port of the loopback address while it is entered; ``spans`` is what came."""

    def __init__(self) -> None:
        self.spans = 0
        # One thread, since it counts without a lock.
        self._server = grpc.server(ThreadPoolExecutor(1))
        self._server.add_generic_rpc_handlers((trace_service(self._export),))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Receiver:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def _export(
        self, request: ExportTraceServiceRequest, _: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.spans += sum(
            len(scope.spans)
            for resource in request.resource_spans
            for scope in resource.scope_spans
        )
        return ExportTraceServiceResponse()
