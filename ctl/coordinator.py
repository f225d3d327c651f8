# SPDX-License-Identifier: Apache-2.0
"""Questions to a coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

import backsight_pb2 as pb
import grpc
from backsight_pb2_grpc import CoordinatorStub

_TIMEOUT_S = 30.0
_MESSAGE_BYTES_MAX = 1 << 30  # a trace of many nodes is one message


class AskError(RuntimeError):
    """The question was not answered; the message says by whom and why."""


class NotFound(AskError):
    """There is no such trace."""


class CoordinatorClient:
    """A connection to ``backsight-coordinator``, ``host:port``."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._channel = grpc.insecure_channel(
            endpoint, options=[("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX)]
        )
        self._stub = CoordinatorStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def traces(self, request: pb.ListTracesRequest) -> Iterator[pb.TraceSummary]:
        try:
            yield from self._stub.ListTraces(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def trace(self, trace: bytes) -> pb.TraceDetail:
        try:
            return self._stub.GetTrace(pb.GetTraceRequest(trace=trace), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def nodes(self) -> list[pb.NodeStatus]:
        try:
            return list(self._stub.ListNodes(pb.ListNodesRequest(), timeout=_TIMEOUT_S).nodes)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def _failure(self, error: grpc.RpcError) -> AskError:
        code, detail = error.code(), error.details() or str(error)
        if code is grpc.StatusCode.NOT_FOUND:
            return NotFound(detail)
        if code is grpc.StatusCode.UNAVAILABLE:
            return AskError(
                f"no coordinator answers at {self._endpoint} ({detail}); "
                "give --coordinator HOST:PORT or set BACKSIGHT_COORDINATOR"
            )
        return AskError(f"coordinator {self._endpoint}: {detail}")
