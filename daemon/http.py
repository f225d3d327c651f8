# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for what scrapes and queries a daemon; WSGI inside, threads beside the loop.

The standard library's: a request a thread, no TLS, none of the defences that a server on the
internet needs. It listens on loopback unless configured otherwise; in front of it stands, where
that is wanted, a proxy.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import TYPE_CHECKING, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

# For a client to send its request, and to take the answer. One that does neither holds a thread.
_TIMEOUT_S = 30.0

# Scrapers and people, not a public site.
_REQUESTS_AT_ONCE = 32


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # none is waited for at the end
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, log: Callable[[str], None]) -> None:
        self._log = log
        self._slots = threading.BoundedSemaphore(_REQUESTS_AT_ONCE)
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

    def process_request_thread(self, request: object, client_address: object) -> None:
        with self._slots:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        """A peer that broke off is no error of ours; what is, the handler has answered with 500."""


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the parent's name
        """Not each request of a scraper."""


class HttpServer:
    """Serves an application while it is entered.

    ``endpoint`` is HOST:PORT or [IPV6]:PORT, with port 0 for any; ``port`` is the one it got.
    OSError if it cannot listen there.
    """

    def __init__(
        self, endpoint: str, application: WSGIApplication, log: Callable[[str], None]
    ) -> None:
        host, _, port = endpoint.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port), log)
        except OSError as error:
            raise OSError(f"cannot listen on {endpoint}: {error.strerror or error}") from error
        self._server.set_app(application)
        self._thread = threading.Thread(target=self._server.serve_forever, name="http")
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
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
