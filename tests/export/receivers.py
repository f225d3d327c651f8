# SPDX-License-Identifier: Apache-2.0
"""OTLP receivers that a test can ask what they heard, and tell what to answer."""

from __future__ import annotations

import gzip
import queue
import ssl
import subprocess
import threading
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from rpc_status_pb2 import Any as AnyDetail
from rpc_status_pb2 import Duration, RetryInfo, Status

from testbed.otlp import trace_service


@dataclass(frozen=True, slots=True)
class Answer:
    """What a receiver says to one request; ``code`` and ``status`` are gRPC's and HTTP's."""

    code: grpc.StatusCode = grpc.StatusCode.OK
    status: int = 200
    retry_after_s: float | None = None
    rejected: int = 0
    message: str = ""


OK = Answer()
BUSY = Answer(grpc.StatusCode.UNAVAILABLE, 503, message="busy")


@dataclass(frozen=True, slots=True)
class Certificate:
    """Of 127.0.0.1, signed by itself."""

    key: Path
    certificate: Path

    @classmethod
    def new(cls, directory: Path) -> Certificate:
        made = cls(directory / "key.pem", directory / "certificate.pem")
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", made.key, "-out", made.certificate),
            ],
            check=True,
            capture_output=True,
        )
        return made


@dataclass(slots=True)
class Heard:
    """A request as it arrived."""

    request: ExportTraceServiceRequest
    headers: dict[str, str]
    compressed: bool

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for resource in self.request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class Receiver(Protocol):
    """A live OTLP receiver, while it is entered."""

    protocol: str
    port: int
    url: str
    heard: queue.Queue[Heard]
    answers: list[Answer]

    def __enter__(self) -> Receiver: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass
class GrpcReceiver:
    """The service of the vendored definition, by gRPC."""

    port: int
    answers: list[Answer] = field(default_factory=list)
    heard: queue.Queue[Heard] = field(default_factory=queue.Queue)
    tls: Certificate | None = None
    protocol = "grpc"

    def __post_init__(self) -> None:
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def __enter__(self) -> GrpcReceiver:
        self._server = grpc.server(
            futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)]
        )
        self._server.add_generic_rpc_handlers((trace_service(self._export),))
        address = f"127.0.0.1:{self.port}"
        if self.tls is None:
            port = self._server.add_insecure_port(address)
        else:
            pair = (self.tls.key.read_bytes(), self.tls.certificate.read_bytes())
            port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        assert port == self.port
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def _export(self, request: ExportTraceServiceRequest, context: Any) -> Any:
        headers = dict(context.invocation_metadata())
        self.heard.put(Heard(request, headers, compressed=False))
        answer = self.answers.pop(0) if self.answers else OK
        if answer.retry_after_s is not None:
            seconds, part = divmod(answer.retry_after_s, 1)
            delay = RetryInfo(retry_delay=Duration(seconds=int(seconds), nanos=int(part * 1e9)))
            packed = AnyDetail(
                type_url="type.googleapis.com/google.rpc.RetryInfo", value=delay.SerializeToString()
            )
            said = Status(code=8, details=[packed]).SerializeToString()
            context.set_trailing_metadata((("grpc-status-details-bin", said),))
        if answer.code is not grpc.StatusCode.OK:
            context.abort(answer.code, answer.message)
        return response_of(answer)


def response_of(answer: Answer) -> ExportTraceServiceResponse:
    if not answer.rejected and not answer.message:
        return ExportTraceServiceResponse()
    return ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(
            rejected_spans=answer.rejected, error_message=answer.message
        )
    )


@dataclass
class HttpReceiver:
    """OTLP/HTTP with binary protobuf."""

    port: int
    answers: list[Answer] = field(default_factory=list)
    heard: queue.Queue[Heard] = field(default_factory=queue.Queue)
    tls: Certificate | None = None
    protocol = "http/protobuf"

    def __post_init__(self) -> None:
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def __enter__(self) -> HttpReceiver:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:  # the parent's name
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                compressed = self.headers.get("Content-Encoding") == "gzip"
                request = ExportTraceServiceRequest.FromString(
                    gzip.decompress(body) if compressed else body
                )
                headers = {key.lower(): value for key, value in self.headers.items()}
                receiver.heard.put(Heard(request, headers, compressed))
                answer = receiver.answers.pop(0) if receiver.answers else OK
                reply: Any = response_of(answer)
                if answer.status != 200:
                    reply = Status(message=answer.message)
                self.send_response(answer.status)
                if answer.retry_after_s is not None:
                    self.send_header("Retry-After", str(int(answer.retry_after_s)))
                encoded = reply.SerializeToString()
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        if self.tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self.tls.certificate, self.tls.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
