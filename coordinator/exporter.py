# SPDX-License-Identifier: Apache-2.0
"""Sends traces that are closed to an OTLP receiver, by gRPC or HTTP.

What waits stands in the store, so nothing is lost when the coordinator is started
again, and no more is sent twice than what was under way: a trace is marked once
all of it was taken, or refused for good. In memory is one batch. It is sent as
OTLP's specification says: what may be tried again is, with growing pauses, for as
long as the store has the trace; a part that was rejected is not.

What is put off again and again goes behind what else waits, and from then on
trace by trace, each from its beginning: one of them may be at fault, and not the
receiver. Others may never end coming, so now and then it is its turn all the same;
and it is as new once a receiver works again that took nothing else either.

One thread does it all, so that a slow receiver holds up nothing else.
"""

from __future__ import annotations

import contextlib
import email.utils
import gzip
import http.client
import math
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias
from urllib.parse import SplitResult, urlsplit

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from rpc_status_pb2 import RetryInfo, Status

from coordinator.answers import trace_detail
from coordinator.follower import Follower
from coordinator.store import PutExported, Store, StoreReader
from formats.stamped import stamped
from protocol.messages import TraceId
from runtime import VERSION
from runtime.log import Log
from runtime.settings.coordinator import ExportSettings

# Receivers by gRPC take 4 MiB where nobody configured more.
_REQUEST_BYTES_MAX = 3 << 20

# Traces that go together: one request for a few hundred small ones a second.
_TRACES_AT_ONCE = 64
_BATCH_BYTES = 1 << 20

# Of one slice, which is in memory as a whole, and as spans some times as large. Nodes
# have slices of 16 MiB at most unless they are configured otherwise.
_SLICE_BYTES_MAX = 32 << 20

# What OTLP's specification allows a server to answer.
_RESPONSE_BYTES_MAX = 4 << 20

# The first pause, by how much it grows, and how long it gets, as with the
# OpenTelemetry Collector.
_BACKOFF_FIRST_S = 5.0
_BACKOFF_FACTOR = 1.5
_BACKOFF_MAX_S = 30.0

# A receiver may ask for a longer one, but not for ever.
_RETRY_AFTER_MAX_S = 3600.0

# So often in a row a request is put off before others have their turn.
_TRIES = 3

# Traces of which it is known that others go first. Further ones are forgotten, and are as new.
_BEHIND_MAX = 4096

# One of them has its turn after so many batches of others, and after twice as many each time
# that one is put off again: each costs the others a pause.
_TURN_FIRST = 3
_TURN_MAX = 192

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


# ----------------------------------------------------------------- transports


class GrpcTransport:
    """OTLP/gRPC."""

    def __init__(self, settings: ExportSettings) -> None:
        url = urlsplit(settings.endpoint or "")
        target = f"{url.hostname if ':' not in (url.hostname or '') else f'[{url.hostname}]'}"
        target += f":{url.port or _PORTS[url.scheme, settings.protocol]}"
        # gRPC has pauses of its own between connections, up to two minutes: no longer than ours.
        longest_ms = int(_BACKOFF_MAX_S * 1000)
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


# ------------------------------------------------------------------ requests


def requests_of(traces: Iterable[TracesData], bytes_max: int) -> Iterator[tuple[bytes, int]]:
    """ExportTraceServiceRequests of about so many bytes, and how many spans are in each.

    A span that is larger goes alone.
    """
    packed, size, count = TracesData(), 0, 0
    for data in traces:
        for resource_spans in data.resource_spans:
            of_resource = None
            for scope_spans in resource_spans.scope_spans:
                of_scope = None
                for span in scope_spans.spans:
                    span_bytes = span.ByteSize()
                    if count and size + span_bytes > bytes_max:
                        yield packed.SerializeToString(), count
                        packed, size, count = TracesData(), 0, 0
                        of_resource = of_scope = None
                    if of_resource is None:
                        of_resource = packed.resource_spans.add(
                            resource=resource_spans.resource, schema_url=resource_spans.schema_url
                        )
                        size += of_resource.ByteSize()
                    if of_scope is None:
                        of_scope = of_resource.scope_spans.add(
                            scope=scope_spans.scope if scope_spans.HasField("scope") else None,
                            schema_url=scope_spans.schema_url,
                        )
                        size += of_scope.ByteSize()
                    of_scope.spans.append(span)
                    size += span_bytes
                    count += 1
    if count:
        yield packed.SerializeToString(), count


# ------------------------------------------------------------------ exporter


@dataclass(slots=True)
class ExportCounters:
    """Since its start. They only rise."""

    traces: int = 0  # all of which was taken, but for rejected spans
    traces_refused: int = 0  # of which something was refused for good
    slices_cut: int = 0  # longer than may be sent
    slices_unreadable: int = 0
    requests: int = 0
    requests_retried: int = 0
    request_bytes: int = 0  # before compression
    spans: int = 0
    spans_rejected: int = 0
    spans_refused: int = 0


@dataclass(slots=True)
class _Batch:
    """Traces on their way; ``request`` is the one that is due, None if all were sent.

    ``behind``: it is a trace that was put off before.
    """

    notes: list[PutExported]
    requests: Iterator[tuple[bytes, int]]
    behind: bool
    request: tuple[bytes, int] | None = None
    refused: bool = False
    failures: int = 0  # of this request, in a row

    def go_on(self) -> None:
        self.request = next(self.requests, None)
        self.failures = 0


class _Receiver:
    """Where it goes, and what the exporter knows of it. One without an endpoint takes nothing."""

    def __init__(self, settings: ExportSettings) -> None:
        self.settings = settings
        self.transport = transport_of(settings) if settings.endpoint else None
        self.failures = 0  # in a row
        self.batches_failed = 0  # since it last took something; new ones
        self.is_said_to_fail = False
        self.last_message = ""

    @property
    def endpoint(self) -> str:
        return self.settings.endpoint or ""

    def interrupt(self) -> None:
        if self.transport is not None:
            self.transport.interrupt()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


class Exporter:
    """Exports while it is entered. ``waiting`` is how many traces wait, as last seen.

    OSError if the settings name a file that cannot be read.
    """

    def __init__(
        self,
        settings: ExportSettings,
        store: Store,
        path: Path,
        log: Log,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.counters = ExportCounters()
        self.waiting = 0
        self._store = store
        self._log = log
        self._receiver = self._wanted = _Receiver(settings)
        self._chance = chance
        self._batch: _Batch | None = None
        self._behind: dict[TraceId, bool] = {}  # the next first; whether that was said
        self._pardoned: frozenset[TraceId] = frozenset()  # were behind when it last worked again
        self._others = 0  # batches since one that was behind
        self._turn = _TURN_FIRST
        self._follower = Follower("exporter", store, path, self.work)

    def __enter__(self) -> Self:
        self._follower.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._follower.ending.set()
        self._wanted.interrupt()
        self._follower.__exit__(kind, error, traceback)
        self._receiver.close()

    def reconfigure(self, settings: ExportSettings) -> None:
        """Send to another receiver, or in another way, or no more; OSError leaves all as it was.

        For another thread than that which works. What is under way is interrupted, and begins
        anew there: what waits stands in the store, and is only marked once it was taken.
        """
        before = self._wanted
        if settings == before.settings and settings.ca_file is None:
            return  # else the file may have changed
        self._wanted = _Receiver(settings)
        before.interrupt()
        self._follower.wake()

    def work(self, reader: StoreReader) -> float | None:
        """Send one request, if there is one; in how many seconds to go on, None when there are news."""
        wanted = self._wanted
        if self._receiver is not wanted:
            self._receiver.close()
            self._receiver, self._batch = wanted, None
            self._behind.clear()
            self._turn = _TURN_FIRST
        if wanted.transport is None:
            self.waiting = 0
            return None
        if self._batch is not None and not self._is_due_again(reader, self._batch):
            self._batch = None
        if self._batch is None:
            self._batch = self._next_batch(reader)
            if self._batch is None:
                return None
        if self._batch.request is not None:
            pause_s = self._send(wanted.transport, self._batch, *self._batch.request)
            if pause_s:
                return pause_s
        if self._batch.request is None:
            self._store.note(self._batch.notes)
            for note in self._batch.notes:
                self._behind.pop(note.trace, None)
            if self._batch.refused:
                self.counters.traces_refused += len(self._batch.notes)
            else:
                self.counters.traces += len(self._batch.notes)
            self._batch = None
        return 0

    def _next_batch(self, reader: StoreReader) -> _Batch | None:
        self.waiting = reader.waiting_for_export()
        notes: list[PutExported] = []
        slices: list[tuple[TraceId, str]] = []
        size = 0
        traces, behind = self._next_traces(reader)
        for trace in traces:
            found = trace_detail(reader, trace, 0)
            if found is None:
                continue  # deleted since
            notes.append(PutExported(trace, found.summary.bytes))
            slices += ((trace, part.node) for part in found.slices)
            size += sum(part.bytes for part in found.slices)
            if size >= _BATCH_BYTES:
                break
        if not notes:
            return None
        batch = _Batch(notes, requests_of(self._read(reader, slices), _REQUEST_BYTES_MAX), behind)
        batch.go_on()
        return batch

    def _next_traces(self, reader: StoreReader) -> tuple[list[TraceId], bool]:
        """What goes together next; where nothing else waits, one that others went before."""
        waiting = reader.to_export(_TRACES_AT_ONCE + len(self._behind))
        new = [trace for trace in waiting if trace not in self._behind]
        if new and self._others < self._turn:
            self._others += bool(self._behind)
            return new[:_TRACES_AT_ONCE], False
        self._others = 0
        for trace in list(self._behind):
            if reader.waits_for_export(trace):
                return [trace], True
            del self._behind[trace]
        return new[:_TRACES_AT_ONCE], False

    def _is_due_again(self, reader: StoreReader, batch: _Batch) -> bool:
        """Whether what failed is next, and not deleted in part, or behind all else that waits."""
        if not batch.failures:
            return True
        mine = [note.trace for note in batch.notes]
        if not all(map(reader.waits_for_export, mine)):
            return False
        if batch.failures < (1 if batch.behind else _TRIES):
            return True
        if set(reader.to_export(len(mine) + 1)) <= set(mine):
            return True
        for trace in mine:
            self._behind[trace] = self._behind.pop(trace, False)
        for trace in list(self._behind)[:-_BEHIND_MAX]:
            del self._behind[trace]
        return False

    def _read(
        self, reader: StoreReader, slices: Iterable[tuple[TraceId, str]]
    ) -> Iterator[TracesData]:
        """The spans of slices, one slice after the other, each when it is its turn."""
        for trace, node in slices:
            found = trace_detail(reader, trace, _SLICE_BYTES_MAX, node)
            if found is None or not found.slices:
                continue  # deleted since
            (part,) = found.slices
            where = {"trace_id": trace.hex(), "node": node}
            if len(part.data) < part.bytes:
                self.counters.slices_cut += 1
                self._log.warning(
                    f"slice {trace.hex()} of {node}: only its first {len(part.data)} of"
                    f" {part.bytes} bytes are exported",
                    **where,
                )
            try:
                yield stamped(found, one_clock=False).otlp()
            except Exception as error:  # noqa: BLE001 - what applications wrote must not stop the others
                self.counters.slices_unreadable += 1
                self._log.warning(
                    f"slice {trace.hex()} of {node}: cannot be exported: {error!r}", **where
                )

    def _send(self, transport: Transport, batch: _Batch, request: bytes, spans: int) -> float:
        """Send what is due; how long to wait before it is tried again, 0 if it need not be."""
        self.counters.requests += 1
        self.counters.request_bytes += len(request)
        try:
            outcome = transport.send(request)
        except Exception as error:  # noqa: BLE001 - it must not end the thread, and the coordinator
            outcome = TryAgain(f"{type(error).__name__}: {error}")
        match outcome:
            case TryAgain():
                return self._put_off(batch, outcome)
            case Accepted():
                self.counters.spans += max(spans - outcome.rejected_spans, 0)
                self.counters.spans_rejected += min(outcome.rejected_spans, spans)
                if outcome.message or outcome.rejected_spans:
                    self._complain(
                        f"rejected {outcome.rejected_spans} of {spans} spans", outcome.message
                    )
            case Refused():
                self.counters.spans_refused += spans
                batch.refused = True
                self._complain(f"refused {spans} spans for good", outcome.why)
        self._receiver.failures = 0
        if batch.behind:
            self._turn = _TURN_FIRST
        if self._receiver.batches_failed > 1:
            self._pardon()
        self._receiver.batches_failed = 0
        if self._receiver.is_said_to_fail:
            self._receiver.is_said_to_fail = False
            self._log.info(f"export to {self._receiver.endpoint} works again")
        batch.go_on()
        return 0.0

    def _pardon(self) -> None:
        """What is behind is as new, but for what was before, or failed while others were taken."""
        before, self._pardoned = self._pardoned, frozenset(self._behind)
        self._behind = {
            trace: said for trace, said in self._behind.items() if said or trace in before
        }

    def _put_off(self, batch: _Batch, outcome: TryAgain) -> float:
        if self._follower.ending.is_set() or self._receiver is not self._wanted:
            return _BACKOFF_FIRST_S  # interrupted, and woken: it is sent by who comes next
        receiver = self._receiver
        self.counters.requests_retried += 1
        self._say_put_off(batch, outcome.why)
        # Jitter: half to one and a half, so that many coordinators do not come together.
        grown_s = _BACKOFF_FIRST_S * _BACKOFF_FACTOR ** min(receiver.failures, 64)
        pause_s = min(grown_s, _BACKOFF_MAX_S) * (0.5 + self._chance())
        if batch.behind:
            self._turn = min(self._turn * 2, _TURN_MAX)
        elif not batch.failures:
            receiver.batches_failed += 1
        receiver.failures += 1
        batch.failures += 1
        asked_s = outcome.after_s or 0.0
        return max(pause_s, min(asked_s, _RETRY_AFTER_MAX_S) if math.isfinite(asked_s) else 0.0)

    def _say_put_off(self, batch: _Batch, why: str) -> None:
        """Once, until it works again; of a trace while others are taken, once."""
        endpoint = self._receiver.endpoint
        if self._receiver.is_said_to_fail:
            return
        if not batch.behind:
            self._receiver.is_said_to_fail = True
            self._log.warning(
                f"export to {endpoint} fails, and will be tried again: {why}."
                " What is to be exported waits in the store."
            )
            return
        for trace in (note.trace for note in batch.notes):
            if not self._behind.get(trace):
                self._behind[trace] = True
                self._log.warning(
                    f"trace {trace.hex()}: {endpoint} puts it off again and again, and takes others:"
                    f" {why}. It is tried again, but more rarely than others.",
                    trace_id=trace.hex(),
                )

    def _complain(self, what: str, message: str) -> None:
        """Once, until it says something else: it may say so with each request."""
        if message != self._receiver.last_message:
            self._receiver.last_message = message
            self._log.warning(f"export: {self._receiver.endpoint} {what}: {message}")
