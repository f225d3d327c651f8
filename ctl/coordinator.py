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
_TRACE_TIMEOUT_S = 300.0  # of many nodes, and large, over a slow network


class AskError(RuntimeError):
    """The question was not answered; the message says by whom and why."""


class NotFound(AskError):
    """There is no such trace."""


class CoordinatorClient:
    """A connection to ``backsight-coordinator``, ``host:port``."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._channel = grpc.insecure_channel(endpoint)
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

    def tail(self, request: pb.ListTracesRequest) -> Iterator[pb.TraceSummary]:
        """Traces as verdicts are given on them, until the coordinator ends."""
        try:
            yield from self._stub.TailTraces(request)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def snapshot(self, request: pb.SnapshotRequest) -> Iterator[pb.SnapshotProgress]:
        """Have all nodes collect their last seconds; how far that is, until it has ended."""
        try:
            yield from self._stub.TakeSnapshot(request)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def trace(self, trace: bytes) -> pb.TraceDetail:
        """A trace with all its bytes, put together from the pieces in which it comes."""
        data: dict[str, list[bytes]] = {}
        try:
            pieces: Iterator[pb.TraceDetail] = iter(
                self._stub.GetTrace(pb.GetTraceRequest(trace=trace), timeout=_TRACE_TIMEOUT_S)
            )
            detail = next(pieces)
            for piece in pieces:
                for part in piece.slices:
                    data.setdefault(part.node, []).append(part.data)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        for part in detail.slices:
            part.data = b"".join(data.get(part.node, ()))
        return detail

    def nodes(self) -> list[pb.NodeStatus]:
        try:
            return list(self._stub.ListNodes(pb.ListNodesRequest(), timeout=_TIMEOUT_S))
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def counters(self) -> dict[str, int]:
        """What the coordinator counted since its start, by part and name."""
        try:
            reply = self._stub.GetCounters(pb.GetCountersRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        return dict(sorted(reply.counters.items()))

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
