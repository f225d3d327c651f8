# SPDX-License-Identifier: Apache-2.0
"""Ways to an OTLP receiver, by gRPC and by HTTP, and what becomes of a request.

Each is of one thread; another may interrupt it. Whatever happens is an outcome, as
OTLP's specification says: taken, refused for good, or to be tried again.
"""

from __future__ import annotations

import contextlib
import email.utils
import gzip
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from urllib.parse import SplitResult, urlsplit

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from rpc_status_pb2 import RetryInfo, Status

from runtime import VERSION
from runtime.settings.coordinator import ExportSettings

BACKOFF_MAX_S = 30.0
"""How long a pause before the next try gets, as with the OpenTelemetry Collector."""

# What OTLP's specification allows a server to answer.
_RESPONSE_BYTES_MAX = 4 << 20

# OTLP's specification, "Failures": what may be tried again.
_RETRYABLE_CODES = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_RETRYABLE_STATUS = frozenset({429, 502, 503, 504})

# Nobody reads it: who interrupts has an outcome of its own in mind.
_INTERRUPTED = "interrupted"

# Where a URL has none. 443 is what a https URL means, with gRPC and all SDKs too.
_PORTS = {
    ("http", "grpc"): 4317,
    ("http", "http/protobuf"): 4318,
    ("https", "grpc"): 443,
    ("https", "http/protobuf"): 443,
}

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_HTTP_PATH = "/v1/traces"
_USER_AGENT = f"Backsight-Coordinator/{VERSION}"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The receiver took it, but for some spans; ``message`` is for a person, and mostly empty."""

    rejected_spans: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class TryAgain:
    """It may be taken later: not before ``after_s``, if the receiver says so."""

    why: str
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """It will never be taken."""

    why: str


Outcome: TypeAlias = Accepted | TryAgain | Refused


class Transport(Protocol):
    """A way to a receiver, for one thread."""

    def send(self, request: bytes) -> Outcome:
        """Send an ExportTraceServiceRequest. What it raises is a try that failed."""

    def interrupt(self) -> None:
        """From another thread: let what is being sent fail at once, and all that comes after it."""

    def close(self) -> None: ...


class GrpcTransport:
    """OTLP/gRPC."""

    def __init__(self, settings: ExportSettings) -> None:
        url = urlsplit(settings.endpoint or "")
        target = f"{url.hostname if ':' not in (url.hostname or '') else f'[{url.hostname}]'}"
        target += f":{url.port or _PORTS[url.scheme, settings.protocol]}"
        # gRPC has pauses of its own between connections, up to two minutes: no longer than ours.
        longest_ms = int(BACKOFF_MAX_S * 1000)
        options = [
            ("grpc.primary_user_agent", _USER_AGENT),
            ("grpc.max_reconnect_backoff_ms", longest_ms),
        ]
        if url.scheme == "https":
            roots = Path(settings.ca_file).read_bytes() if settings.ca_file else None
            credentials = grpc.ssl_channel_credentials(roots)
            self._channel = grpc.secure_channel(target, credentials, options)
        else:
            self._channel = grpc.insecure_channel(target, options)
        self._export = self._channel.unary_unary(_METHOD, None, None)
        self._metadata = tuple((name.lower(), value) for name, value in settings.headers.items())
        gzipped = settings.compression == "gzip"
        self._compression = grpc.Compression.Gzip if gzipped else grpc.Compression.NoCompression
        self._timeout_s = settings.timeout_s

    def send(self, request: bytes) -> Outcome:
        try:
            reply = self._export(
                request,
                timeout=self._timeout_s,
                metadata=self._metadata,
                compression=self._compression,
            )
        except grpc.RpcError as error:
            return _grpc_failure(error)
        return _accepted(reply)

    def interrupt(self) -> None:
        self._channel.close()

    def close(self) -> None:
        self._channel.close()


def _grpc_failure(error: grpc.RpcError) -> Outcome:
    code = error.code()
    why = f"{code.name}: {error.details()}"
    after_s = _retry_delay_s(error.trailing_metadata() or ())
    # A server that is overloaded for good says so without a delay.
    if code in _RETRYABLE_CODES or (
        code is grpc.StatusCode.RESOURCE_EXHAUSTED and after_s is not None
    ):
        return TryAgain(why, after_s)
    return Refused(why)


def _retry_delay_s(metadata: Iterable[Any]) -> float | None:
    for key, value in metadata:
        if key != "grpc-status-details-bin" or isinstance(value, str):
            continue
        with contextlib.suppress(DecodeError):
            for detail in Status.FromString(value).details:
                if detail.type_url.endswith("/google.rpc.RetryInfo"):
                    delay = RetryInfo.FromString(detail.value).retry_delay
                    return max(delay.seconds + delay.nanos / 1e9, 0.0)
    return None


# The other side closed. By TLS, the last two.
_CLOSED = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


class _Response(http.client.HTTPResponse):
    """RemoteDisconnected means here that not a byte of it came, for whatever reason."""

    def begin(self) -> None:
        try:
            self.fp.peek(1)
        except _CLOSED as error:
            raise http.client.RemoteDisconnected(str(error)) from error
        super().begin()


class _Connection(http.client.HTTPConnection):
    """One that another thread can break off at any time, also while it is being made.

    ``tls``: in clear text without it.
    """

    response_class = _Response

    def __init__(
        self, host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._timeout_s = timeout_s
        self._tls = tls
        if tls is not None:
            self.default_port = http.client.HTTPS_PORT
        self._connecting: Future[socket.socket] = Future()
        self._made: socket.socket | None = None  # also while only the answer still has it
        self._is_broken_off = False
        self._late = ""  # with what; empty while it is in time

    @contextlib.contextmanager
    def in_time(self) -> Iterator[None]:
        """For one request with its answer, however slowly they come. TimeoutError if it is late."""
        self._late = ""
        timer = threading.Timer(self._timeout_s, self._be_late)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            if self._late:
                raise TimeoutError(
                    f"no {self._late} {self.host} in {self._timeout_s:g} s"
                ) from None

    def connect(self) -> None:
        # Each is first where _end() finds it, and then it is looked whether that was already.
        self._made = None
        self._connecting = Future()
        self._go_on()
        self.sock = self._made = self._connected(self._connecting)
        self._go_on()
        self.sock.settimeout(None)  # in_time() is for all of it
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            self.sock = self._made = self._tls.wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self._go_on()
            self.sock.do_handshake()

    def _connected(self, connecting: Future[socket.socket]) -> socket.socket:
        """In a thread of its own, since nothing can end the look-up of a name."""

        def work() -> None:
            try:
                made = socket.create_connection((self.host, self.port), self._timeout_s)
            except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
                with contextlib.suppress(InvalidStateError):
                    connecting.set_exception(error)
                return
            try:
                connecting.set_result(made)
            except InvalidStateError:  # nobody waits for it any more
                made.close()

        threading.Thread(target=work, name="connect", daemon=True).start()
        return connecting.result()

    def _go_on(self) -> None:
        if self._is_broken_off or self._late:
            raise OSError(_INTERRUPTED)

    def break_off(self) -> None:
        """Let what is under way fail, and all that comes after it."""
        self._is_broken_off = True
        self._end()

    def _be_late(self) -> None:
        self._late = "connection to" if self._made is None else "answer of"
        self._end()

    def _end(self) -> None:
        self._connecting.cancel()
        made = self._made  # once: the other thread may make another meanwhile
        if made is not None:
            with contextlib.suppress(OSError):
                # Not TLS's own, which takes away what the other thread works with.
                socket.socket.shutdown(made, socket.SHUT_RDWR)


class HttpTransport:
    """OTLP/HTTP with binary protobuf. The connection is kept, and made anew after a failure."""

    def __init__(self, settings: ExportSettings, clock: Callable[[], float] = time.time) -> None:
        url = urlsplit(settings.endpoint or "")
        self._clock = clock
        self._connection = _http_connection(url, settings)
        self._path = (url.path if url.path not in ("", "/") else _HTTP_PATH) + (
            f"?{url.query}" if url.query else ""
        )
        self._gzip = settings.compression == "gzip"
        self._headers = {
            "User-Agent": _USER_AGENT,
            **settings.headers,
            "Content-Type": "application/x-protobuf",
        }
        if self._gzip:
            self._headers["Content-Encoding"] = "gzip"

    def send(self, request: bytes) -> Outcome:
        body = gzip.compress(request) if self._gzip else request
        try:
            with self._connection.in_time():
                return self._post(body)
        except Exception as error:  # noqa: BLE001 - whatever it is, the connection is of no more use
            self._connection.close()
            return TryAgain(f"{type(error).__name__}: {error}")

    def _post(self, body: bytes) -> Outcome:
        was_idle = self._connection.sock is not None
        try:
            response = self._answer_to(body)
        except http.client.RemoteDisconnected:
            self._connection.close()
            if not was_idle:
                raise
            # A server may close a connection that was idle, which says nothing about it.
            response = self._answer_to(body)
        reply = response.read(_RESPONSE_BYTES_MAX + 1)
        if len(reply) > _RESPONSE_BYTES_MAX:
            self._connection.close()  # there is more that nobody reads
        if 200 <= response.status < 300:
            return _accepted(reply if response.headers.get_content_subtype() != "json" else b"")
        why = f"HTTP {response.status} {response.reason}{_said(reply)}"
        if response.status in _RETRYABLE_STATUS:
            return TryAgain(why, self._retry_after_s(response.headers.get("Retry-After")))
        return Refused(why)

    def _answer_to(self, body: bytes) -> http.client.HTTPResponse:
        """Its beginning; RemoteDisconnected if there is none."""
        try:
            self._connection.request("POST", self._path, body, self._headers)
        except _CLOSED as error:
            raise http.client.RemoteDisconnected(str(error)) from error
        return self._connection.getresponse()

    def _retry_after_s(self, text: str | None) -> float | None:
        """Of the header: seconds, or a date."""
        if text is None:
            return None
        if text.strip().isascii() and text.strip().isdigit():
            return float(text)
        try:
            return max(email.utils.parsedate_to_datetime(text).timestamp() - self._clock(), 0.0)
        except (TypeError, ValueError, OverflowError):
            return None

    def interrupt(self) -> None:
        self._connection.break_off()

    def close(self) -> None:
        self._connection.close()


def _http_connection(url: SplitResult, settings: ExportSettings) -> _Connection:
    tls = ssl.create_default_context(cafile=settings.ca_file) if url.scheme == "https" else None
    port = url.port or _PORTS[url.scheme, settings.protocol]
    return _Connection(url.hostname or "", port, settings.timeout_s, tls)


def _said(reply: bytes) -> str:
    """What a google.rpc.Status says, for a log."""
    with contextlib.suppress(DecodeError):
        message = Status.FromString(reply).message
        return f": {message}" if message else ""
    return ""


def _accepted(reply: bytes) -> Accepted:
    try:
        partial = ExportTraceServiceResponse.FromString(reply).partial_success
    except DecodeError:
        return Accepted()
    return Accepted(max(partial.rejected_spans, 0), partial.error_message)


def transport_of(settings: ExportSettings) -> Transport:
    """As configured. OSError if the file of certificates cannot be read."""
    try:
        if settings.protocol == "grpc":
            return GrpcTransport(settings)
        return HttpTransport(settings)
    except OSError as error:
        raise OSError(f"export.ca_file: {settings.ca_file}: {error.strerror or error}") from error
