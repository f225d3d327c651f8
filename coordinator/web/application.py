# SPDX-License-Identifier: Apache-2.0
"""Jaeger's HTTP API, legacy and v3, over what is stored: for Jaeger UI and Grafana.

Paths, parameters and answers are those of jaegertracing/jaeger. Times are put on the
coordinator's clock, unless raw traces are wanted.

Runs in the threads of runtime.http, each request with a reader of its own.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.index.file import index_path
from coordinator.store.reader import ReadTooLong, StoreReader
from coordinator.web import legacy, v3
from coordinator.web.bodies import Body, NoRoom, Room, encoded
from coordinator.web.parameters import Parameters, Refused
from coordinator.web.requests import Json, Request
from runtime.http import GIVE_UP_OVERDUE
from runtime.log import Log

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# Each takes as much memory as the traces of coordinator.web.requests.
_ANSWERS_AT_ONCE = 2

_STATUS = {
    200: "200 OK",
    400: "400 Bad Request",
    404: "404 Not Found",
    405: "405 Method Not Allowed",
    413: "413 Content Too Large",
    500: "500 Internal Server Error",
    503: "503 Service Unavailable",
}

_ROUTES = [
    (re.compile(re.escape(path).replace(r"\*", "(.+)")), handler, depth, version.error)
    for version in (legacy, v3)
    for path, (handler, depth) in version.ROUTES.items()
]


def application(path: Path, log: Log, now_ns: Callable[[], int] = time.time_ns) -> WSGIApplication:
    """Serves the store at ``path``."""
    places = threading.BoundedSemaphore(_ANSWERS_AT_ONCE)
    room = Room(_ANSWERS_AT_ONCE)
    said_cut: set[str] = set()

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        give_up_overdue = environ.get(GIVE_UP_OVERDUE, lambda: None)
        with places:
            status, pieces, error = _respond(path, environ, now_ns, log, said_cut)
        # In no place: what waits for a slow reader holds up nobody who makes an answer.
        try:
            body = Body(pieces, room, give_up_overdue)
        except NoRoom as full:
            status, pieces = 503, _pieces(error(503, str(full)))
            body = Body(pieces, room, give_up_overdue)
        headers = [("Content-Type", "application/json"), ("Content-Length", str(body.size))]
        start_response(_STATUS[status], headers)
        return body

    return serve


def _pieces(answered: Json, depth: int = 0) -> list[bytes]:
    return list(encoded(answered, depth))


def _respond(
    path: Path,
    environ: WSGIEnvironment,
    now_ns: Callable[[], int],
    log: Log,
    said_cut: set[str],
) -> tuple[int, list[bytes], Callable[[int, str], Json]]:
    """Status, answer, and the form that errors have there."""
    # WSGI gives the bytes of a path as characters.
    asked = environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace")
    for pattern, handler, depth, error in _ROUTES:
        match = pattern.fullmatch(asked)
        if match is None:
            continue
        try:
            if environ["REQUEST_METHOD"] != "GET":
                raise Refused(405, "allowed: GET")
            try:
                parameters = Parameters(environ.get("QUERY_STRING", ""))
            except ValueError as invalid:  # too many of them
                raise Refused(400, str(invalid)) from invalid
            with StoreReader(path, index_path(path)) as reader:
                request = Request(reader, parameters, match.groups(), now_ns(), log, said_cut)
                answered = handler(request)
            return 200, _pieces(answered, depth), error
        except Refused as refused:
            return refused.status, _pieces(error(refused.status, str(refused))), error
        except ReadTooLong as too_long:
            return 503, _pieces(error(503, str(too_long))), error
    described = ", ".join((*legacy.ROUTES, *v3.ROUTES))
    missing = legacy.error(404, f"nothing is at {asked[:200]}; allowed: {described}")
    return 404, _pieces(missing), legacy.error
