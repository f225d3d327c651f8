# SPDX-License-Identifier: Apache-2.0
"""OTLP's service, for receivers that listen to what is exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


def trace_service(
    export: Callable[[ExportTraceServiceRequest, Any], ExportTraceServiceResponse],
) -> grpc.GenericRpcHandler[Any, Any]:
    """OTLP's service for a server of gRPC."""
    handler = grpc.unary_unary_rpc_method_handler(
        export,
        ExportTraceServiceRequest.FromString,
        ExportTraceServiceResponse.SerializeToString,
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    return grpc.method_handlers_generic_handler(service, {"Export": handler})
