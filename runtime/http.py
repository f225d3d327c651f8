# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for what scrapes and queries a daemon; WSGI inside, threads beside the loop.

The standard library's: a request a thread, no TLS, none of the defences that a server on the
internet needs. It listens on loopback unless configured otherwise; in front of it stands, where
that is wanted, a proxy.
"""

# ruff: noqa: ANN401 (of the standard library's server: a request is a socket, an address anything)

from __future__ import annotations

import contextlib
import errno
import functools
import math
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from runtime.log import Log

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

# Scrapers and people, not a public site.
_REQUESTS_AT_ONCE = 32

_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

# The server looks by itself whether it shall end. It is told so by its socket, and needs no looking.
_LOOK_S = 3600.0


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # none is waited for at the end
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, log: Log) -> None:
        self.ending = threading.Event()
        self._log = log
        self._slots = threading.BoundedSemaphore(_REQUESTS_AT_ONCE)
        self._overdue_s: dict[socket.socket, float] = {}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without the look-up of our own name that the parent makes, which may take its time."""
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def get_request(self) -> Any:
        """The next connection; OSError if there is none."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self.ending.is_set():
                # It stays in the backlog, and we would spin.
                self._log.error(f"cannot accept on {self.server_address}: {error.strerror}")
                self.ending.wait(_NO_FDS_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread, if there may be one more; else say so at once, in this one."""
        if not self._slots.acquire(blocking=False):
            for other in list(self._overdue_s):
                self.give_up_overdue(other)
            request.setblocking(False)
            with contextlib.suppress(OSError):
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        self._overdue_s[request] = time.monotonic() + _TIMEOUT_S
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: socket.socket) -> None:
        del self._overdue_s[request]
        self._slots.release()

    def give_up_overdue(self, request: socket.socket) -> None:
        """End the thread of a client if it takes too long; what it waits for fails."""
        if time.monotonic() >= self._overdue_s.get(request, math.inf):
            with contextlib.suppress(OSError):  # it may just be closed
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that broke off is no error of ours; what is, the handler has answered with 500."""


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def get_environ(self) -> WSGIEnvironment:
        give_up = functools.partial(self.server.give_up_overdue, self.connection)
        return super().get_environ() | {GIVE_UP_OVERDUE: give_up}

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


class HttpServer:
    """Serves an application while it is entered.

    ``endpoint`` is HOST:PORT or [IPV6]:PORT, with port 0 for any; ``port`` is the one it got.
    OSError if it cannot listen there.
    """

    def __init__(self, endpoint: str, application: WSGIApplication, log: Log) -> None:
        host, _, port = endpoint.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port), log)
        except OSError as error:
            raise OSError(f"cannot listen on {endpoint}: {error.strerror or error}") from error
        self._server.set_app(_guarded(application, log))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name="http"
        )
        self.port: int = self._server.server_port

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
