# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 by hand, as no library would speak it: calls of gRPC whose messages never end.

RFC 9113 for the frames, RFC 7541 for headers as literals.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4
_WINDOW_BYTES = 65535
_FRAME_BYTES = 16384
_HEAD_BYTES = 9


@dataclass(frozen=True, slots=True)
class Shown:
    """What a peer shows of itself, and by what it checks the other side."""

    ca: Path
    directory: Path | None

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        context.set_alpn_protocols(["h2"])
        if self.directory is not None:
            context.load_cert_chain(self.directory / "tls.crt", self.directory / "tls.key")
        return context


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


@dataclass(slots=True)
class Stream:
    """One call: what may be sent on it, and what was."""

    window: int
    sent: int = 0


@dataclass(slots=True)
class Http2:
    """A connection. Use as ``with``. ``source``: from which of this machine's addresses; any if empty.

    ``heeds``: says that it heard what the other side allows, which then holds it to that.
    ``reads``: has room for what the other side answers.
    """

    endpoint: str
    shown: Shown | None = None
    source: str = ""
    heeds: bool = True
    reads: bool = True
    streams: dict[int, Stream] = field(default_factory=dict)
    ended: bool = False
    _socket: socket.socket | ssl.SSLSocket | None = None
    _window: int = _WINDOW_BYTES
    _stream_window: int = _WINDOW_BYTES
    _received: bytearray = field(default_factory=bytearray)

    def __enter__(self) -> Self:
        plain = connected(self.endpoint, self.source)
        host = self.endpoint.rpartition(":")[0]
        try:
            self._socket = (
                plain
                if self.shown is None
                else self.shown.context().wrap_socket(plain, server_hostname=host)
            )
        except BaseException:
            plain.close()
            raise
        no_room = struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0)
        self._send(_PREFACE + _frame(_SETTINGS, 0, 0, b"" if self.reads else no_room))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._socket is not None:
            self._socket.close()

    def _send(self, data: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(data)
        except OSError:
            self.ended = True

    def call(
        self,
        method: str,
        announced_bytes: int,
        encoding: bytes = b"",
        service: str = "backsight.v1.Coordinator",
    ) -> int:
        """Open a stream, and announce a message on it. The stream's number."""
        number = 2 * len(self.streams) + 1
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", f"/{service}/{method}".encode()),
            (b":authority", b"x"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            *([(b"grpc-encoding", encoding)] if encoding else []),
        ]
        block = b"".join(_literal(name, value) for name, value in headers)
        self._send(_frame(_HEADERS, _END_HEADERS, number, block))
        self.streams[number] = Stream(self._stream_window)
        self._data(number, struct.pack(">BI", bool(encoding), announced_bytes))
        return number

    def _data(self, number: int, data: bytes) -> None:
        self._send(_frame(_DATA, 0, number, data))
        self._window -= len(data)
        self.streams[number].window -= len(data)
        self.streams[number].sent += len(data)

    def fill(self, bytes_max: int) -> int:
        """Send as much on all streams as the other side lets, of each at most so much. How much."""
        sent = 0
        for number, stream in list(self.streams.items()):
            while not self.ended:
                size = min(_FRAME_BYTES, self._window, stream.window, bytes_max - stream.sent)
                if size <= 0:
                    break
                self._data(number, bytes(size))
                sent += size
        return sent

    def write(self, number: int, data: bytes) -> None:
        """Send these bytes, which the windows must have room for."""
        for start in range(0, len(data), _FRAME_BYTES):
            self._data(number, data[start : start + _FRAME_BYTES])

    def listen(self, seconds: float) -> None:
        """Take in what the other side says meanwhile."""
        assert self._socket is not None
        until_s = time.monotonic() + seconds
        while not self.ended and (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                data = self._socket.recv(1 << 16)
            except (TimeoutError, ssl.SSLWantReadError):
                break
            except OSError:
                data = b""
            if not data:
                self.ended = True
            self._received += data
            self._heed()
        self._socket.settimeout(10)

    def _heed(self) -> None:
        while len(self._received) >= _HEAD_BYTES:
            size = int.from_bytes(self._received[:3], "big")
            if len(self._received) < _HEAD_BYTES + size:
                return
            kind, flags = self._received[3], self._received[4]
            number = int.from_bytes(self._received[5:_HEAD_BYTES], "big") & 0x7FFFFFFF
            payload = bytes(self._received[_HEAD_BYTES : _HEAD_BYTES + size])
            del self._received[: _HEAD_BYTES + size]
            self._heed_frame(kind, flags, number, payload)

    def _heed_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        match kind:
            case 8:
                more = int.from_bytes(payload, "big")
                if number == 0:
                    self._window += more
                elif number in self.streams:
                    self.streams[number].window += more
            case 4 if not flags & _ACK:
                for start in range(0, len(payload), 6):
                    key, value = struct.unpack_from(">HI", payload, start)
                    if key == _INITIAL_WINDOW_SIZE:
                        for stream in self.streams.values():
                            stream.window += value - self._stream_window
                        self._stream_window = value
                if self.heeds:
                    self._send(_frame(_SETTINGS, _ACK, 0))
            case 6 if not flags & _ACK:
                self._send(_frame(_PING, _ACK, 0, payload))
            case 3:
                if number in self.streams:
                    self.streams[number].window = -(1 << 40)  # nothing more on it
            case 7:
                self.ended = True


def connected(endpoint: str, source: str = "") -> socket.socket:
    """A connection with HOST:PORT, from that address, or unix:PATH, on which nothing was said yet."""
    host, _, port = endpoint.rpartition(":")
    if host == "unix":
        at_the_socket = socket.socket(socket.AF_UNIX)
        at_the_socket.connect(port)
        return at_the_socket
    return socket.create_connection((host, int(port)), 10, (source, 0))


def is_open(connection: socket.socket) -> bool:
    """Whether the other side has not hung up."""
    connection.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        try:
            return connection.recv(1) != b""
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                return False
            raise
    return True
