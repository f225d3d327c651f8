# SPDX-License-Identifier: Apache-2.0
"""Questions to a coordinator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import backsight_pb2 as pb
import grpc
from backsight_pb2_grpc import CoordinatorStub

from runtime.settings.tls import TlsFiles
from runtime.tls import Credentials, TlsError, Usage, leave_words_to_us, load, why_not

_TIMEOUT_S = 30.0
_TRACE_TIMEOUT_S = 300.0  # of many nodes, and large, over a slow network


class AskError(RuntimeError):
    """The question was not answered; the message says by whom and why."""


class NotFound(AskError):
    """There is no such trace."""


class CoordinatorClient:
    """A connection to ``backsight-coordinator``, ``host:port``."""

    def __init__(self, endpoint: str, tls: Path | None = None) -> None:
        """``tls``: where the files are by which both sides prove who they are; AskError if they do not."""
        self._endpoint = endpoint
        self._shown: Credentials | None = None
        self._files: TlsFiles | None = None
        if tls is None:
            self._channel = grpc.insecure_channel(endpoint)
        else:
            leave_words_to_us()
            self._files = TlsFiles.of_directory(tls)
            try:
                shown = self._shown = load(self._files, "--tls", Usage.CLIENT)
            except TlsError as error:
                raise AskError(str(error)) from error
            credentials = grpc.ssl_channel_credentials(shown.ca, shown.key, shown.certificate)
            self._channel = grpc.secure_channel(endpoint, credentials)
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

    def forget_node(self, name: str) -> None:
        """Have the coordinator forget a node that is gone."""
        try:
            self._stub.ForgetNode(pb.ForgetNodeRequest(node=name), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def pin(self, trace: bytes, *, unpin: bool = False) -> None:
        """Keep a trace, or let it go again when its time is over."""
        try:
            self._stub.PinTrace(pb.PinTraceRequest(trace=trace, unpin=unpin), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def delete(self, trace: bytes) -> None:
        """Delete all that is stored of a trace."""
        try:
            self._stub.DeleteTrace(pb.DeleteTraceRequest(trace=trace), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def status(self, node: str = "") -> dict[str, Any]:
        """How the coordinator is, or one of its nodes."""
        try:
            reply = self._stub.GetStatus(pb.GetStatusRequest(node=node), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        try:
            status = json.loads(reply.json)
        except ValueError as error:
            raise AskError(f"what node {node} says makes no sense: {error}") from error
        if not isinstance(status, dict):
            raise AskError(f"what node {node} says makes no sense: it is no object")
        return status

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
            if self._files is not None and self._shown is not None:
                why = why_not(self._endpoint, self._files, None, self._shown.facts)
                if why is not None:
                    return AskError(f"coordinator {self._endpoint}: {why}")
            if self._endpoint.startswith("unix:"):
                return AskError(
                    f"no coordinator answers at {self._endpoint} ({detail}); is a coordinator running on"
                    " this machine? Its log says why it has no `access.socket`; or name another by"
                    " --coordinator HOST:PORT or BACKSIGHT_COORDINATOR, with --tls DIR if it wants"
                    " certificates"
                )
            return AskError(
                f"no coordinator answers at {self._endpoint} ({detail}); "
                "give --coordinator HOST:PORT or set BACKSIGHT_COORDINATOR, and --tls DIR or BACKSIGHT_TLS if"
                " it wants certificates"
            )
        return AskError(f"coordinator {self._endpoint}: {detail}")
