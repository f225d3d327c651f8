# SPDX-License-Identifier: Apache-2.0
"""The gRPC health checking protocol (grpc.health.v1) on the coordinator's port.

Whoever gets through the handshake may ask, whatever its certificate says, and learns whether
the coordinator is ready. Why not, its own machine is told (runtime.health).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc
import health_pb2 as pb
from google.protobuf.message import DecodeError

from runtime.health import Health

SERVICE = "grpc.health.v1.Health"

# Between two looks for who watches. Nothing tells when it changes.
_LOOK_S = 1.0

# They are let in without a role, so no role's budget bounds them.
_WATCHING_MAX = 64


class HealthService:
    """Answers for the services that are named, and for the server as a whole."""

    def __init__(self, health: Health, services: Collection[str]) -> None:
        self._health = health
        self._known = frozenset({"", *services})
        self._watching = 0

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By the names of the calls."""
        encode = pb.HealthCheckResponse.SerializeToString
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, None, encode),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, None, encode),
        }

    async def _service(self, data: bytes, context: grpc.aio.ServicerContext[bytes, Any]) -> str:
        try:
            return pb.HealthCheckRequest.FromString(data).service
        except DecodeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("an aborted call went on") from error

    async def _status(self) -> pb.HealthCheckResponse.ServingStatus.ValueType:
        if await self._health.why_not_ready():
            return pb.HealthCheckResponse.NOT_SERVING
        return pb.HealthCheckResponse.SERVING

    async def _check(
        self, data: bytes, context: grpc.aio.ServicerContext[bytes, pb.HealthCheckResponse]
    ) -> pb.HealthCheckResponse:
        service = await self._service(data, context)
        if service not in self._known:
            names = ", ".join(sorted(self._known - {""}))
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no such service; allowed: {names}, or none"
            )
        return pb.HealthCheckResponse(status=await self._status())

    async def _watch(
        self, data: bytes, context: grpc.aio.ServicerContext[bytes, pb.HealthCheckResponse]
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        service = await self._service(data, context)
        if self._watching >= _WATCHING_MAX:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_WATCHING_MAX} watch already; allowed are no more. Ask by Check",
            )
        self._watching += 1
        said: int | None = None
        try:
            while True:
                status = pb.HealthCheckResponse.SERVICE_UNKNOWN
                if service in self._known:
                    status = await self._status()
                if status != said:
                    said = status
                    yield pb.HealthCheckResponse(status=status)
                await asyncio.sleep(_LOOK_S)
        finally:
            self._watching -= 1
