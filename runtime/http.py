# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for what scrapes and queries a daemon; WSGI inside, threads beside the loop.

The standard library's: a connection has one request, and a thread for it. There are few of these;
who connects and asks nothing gives his up to who comes after him. waitress, which needs no thread
for those, knows no TLS, and accepts nobody once it has as many connections as it may.
"""

# ruff: noqa: ANN401 (of the standard library's server: a request is a socket, an address anything)

from __future__ import annotations

import contextlib
import errno
import functools
import math
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from runtime import unix_socket
from runtime.log import Log
from runtime.unix_socket import credentials_of, uid_of

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# For a client to send its request, and to take the answer. One that does neither for so long is
# given up; one that does, but a byte at a time, if others want its thread.
_TIMEOUT_S = 30.0

# In the environment of a request: a function that ends it if it takes too long, for an application
# that lacks what its client holds by reading slowly.
GIVE_UP_OVERDUE = "backsight.give_up_overdue"

# Until it is tried again to accept, where this process has no more fds.
_NO_FDS_PAUSE_S = 1.0

PEER = "backsight.peer"
"""In the environment of a request that came over a Unix socket: whose it is (Credentials)."""

# Scrapers and people, not a public site.
_REQUESTS_AT_ONCE = 32

# For who is ended to let go of his thread.
_PLACE_TIMEOUT_S = 1.0

_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

_BACKLOG = 64

# The server looks by itself whether it shall end. It is told so by its socket, and needs no looking.
_LOOK_S = 3600.0


Context = Callable[[], ssl.SSLContext]
"""By which a connection is met at this moment."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # none is waited for at the end

    def __init__(self, listening: socket.socket, log: Log, context: Context | None) -> None:
        self.ending = threading.Event()
        self._log = log
        self._context = context
        self._slots = threading.BoundedSemaphore(_REQUESTS_AT_ONCE)
        self._overdue_s: dict[socket.socket, float] = {}  # who comes first, first
        self._asked: set[socket.socket] = set()
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        host, self.server_port, *_ = _name_of(listening)
        self.server_name = str(host)
        self.setup_environ()

    def get_request(self) -> Any:
        """The next connection; OSError if there is none."""
        try:
            connection, _ = super().get_request()
            return connection, _peer_of(connection)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self.ending.is_set():
                # It stays in the backlog, and we would spin.
                self._log.error(f"cannot accept on {self.server_address}: {error.strerror}")
                self.ending.wait(_NO_FDS_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread, if there may be one more; else say so at once, in this one."""
        if not self._has_place():
            for other in list(self._overdue_s):
                self.give_up_overdue(other)
            request.setblocking(False)
            if self._context is None:  # else it would have to be encrypted first
                with contextlib.suppress(OSError):
                    request.send(_BUSY)
            self.shutdown_request(request)
            return
        try:
            if self._context is not None:
                # It fails if the peer has already reset the connection.
                request = self._context().wrap_socket(
                    request, server_side=True, do_handshake_on_connect=False
                )
            self._overdue_s[request] = time.monotonic() + _TIMEOUT_S
            super().process_request(request, client_address)
        except BaseException:
            self._ended(request)
            raise

    def _has_place(self) -> bool:
        """Whether there is a thread, or somebody who has one and has asked for nothing yet."""
        if self._slots.acquire(blocking=False):
            return True
        # Of a copy: threads that end take their connections out meanwhile.
        idle = next((other for other in list(self._overdue_s) if other not in self._asked), None)
        if idle is None:
            return False
        _hang_up(idle)
        return self._slots.acquire(timeout=_PLACE_TIMEOUT_S)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve it; whatever Exception that raises, the connection alone ends (handle_error)."""
        if self._context is not None:
            request.settimeout(_TIMEOUT_S)
            request.do_handshake()
        super().finish_request(request, client_address)

    def _ended(self, request: socket.socket) -> None:
        self._overdue_s.pop(request, None)
        self._asked.discard(request)
        self._slots.release()

    def has_asked(self, connection: socket.socket) -> None:
        """Its request is here, and is worked on."""
        self._asked.add(connection)

    def give_up_overdue(self, request: socket.socket) -> None:
        """End the thread of a client if it takes too long; what it waits for fails."""
        if time.monotonic() >= self._overdue_s.get(request, math.inf):
            _hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that broke off is no error of ours; what is, the handler has answered with 500."""


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may just be closed
        # That of ssl forgets the encryption too: the connection's own thread would fail in its
        # handshake, or go on in clear text.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _name_of(listening: socket.socket) -> tuple[Any, ...]:
    if listening.family == socket.AF_UNIX:
        return ("localhost", 0)
    name: tuple[Any, ...] = listening.getsockname()
    return name


def _peer_of(connection: socket.socket) -> tuple[Any, ...]:
    if connection.family == socket.AF_UNIX:
        return (f"uid {uid_of(connection)}", 0)
    name: tuple[Any, ...] = connection.getpeername()
    return name


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def parse_request(self) -> bool:
        """Its line and headers, which are here then."""
        is_one = super().parse_request()
        if is_one:
            self.server.has_asked(self.connection)
        return is_one

    def get_environ(self) -> WSGIEnvironment:
        give_up = functools.partial(self.server.give_up_overdue, self.connection)
        environ = super().get_environ() | {GIVE_UP_OVERDUE: give_up}
        if self.connection.family == socket.AF_UNIX:
            environ[PEER] = credentials_of(self.connection)
        return environ

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the parent's name
        """Not each request of a scraper."""


def _guarded(application: WSGIApplication, log: Log) -> WSGIApplication:
    """The application; where it fails, that is in the log, and no more than that for who asked."""

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return application(environ, start_response)
        except Exception as error:  # noqa: BLE001 - whatever it is, the daemon goes on
            asked = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
            at = traceback.extract_tb(error.__traceback__)[-1]
            log.error(f"{asked} failed: {error!r}, in {at.filename}:{at.lineno}")
            text = [("Content-Type", "text/plain; charset=utf-8")]
            start_response("500 Internal Server Error", text, sys.exc_info())
            return [b"it failed; the daemon's log says how\n"]

    return serve


class _Serving:
    """Serves an application while it is entered."""

    def __init__(
        self,
        listening: socket.socket,
        application: WSGIApplication,
        log: Log,
        context: Context | None = None,
    ) -> None:
        self._server = _Server(listening, log, context)
        self._server.set_app(_guarded(application, log))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name="http"
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.ending.set()
        # Wakes the thread, which finds nobody to accept until it is told to end.
        self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class HttpServer(_Serving):
    """At HOST:PORT or [IPV6]:PORT, with port 0 for any; ``port`` is the one it got.

    By TLS with a ``context``. OSError if it cannot listen there.
    """

    def __init__(
        self, endpoint: str, application: WSGIApplication, log: Log, context: Context | None = None
    ) -> None:
        host, _, port = endpoint.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, int(port)))
            listening.listen(_BACKLOG)
            super().__init__(listening, application, log, context)
        except OSError as error:
            listening.close()
            raise OSError(f"cannot listen on {endpoint}: {error.strerror or error}") from error
        self.port: int = self._server.server_port


class UnixHttpServer(_Serving):
    """At a Unix socket, where requests have their PEER. OSError if it cannot listen there."""

    def __init__(self, path: Path, application: WSGIApplication, log: Log) -> None:
        self._listener = unix_socket.listen(path, socket.SOCK_STREAM)
        self._listener.socket.setblocking(True)
        super().__init__(self._listener.socket, application, log)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._listener.close()
