# SPDX-License-Identifier: Apache-2.0
"""Who may read over HTTP: who shows a token, whom the kernel names, or whoever is let in unasked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

from coordinator.access import role_of
from coordinator.web.parameters import Refused
from coordinator.web.tokens import Tokens
from formats.jaeger import answer
from runtime.hosts import NAME_MAX, foreign_name, in_one_form
from runtime.http import PEER
from runtime.log import Log, PeerLog
from runtime.schema import InvalidValue
from runtime.settings.coordinator import Settings
from runtime.unix_socket import Credentials

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# RFC 6750, and what b64token is there.
_BEARER = re.compile(r"(?i:bearer) +([A-Za-z0-9._~+/=-]+)")


class Gate:
    """Stands before an application; in the threads of an HTTP server.

    ``settings`` are those in force at the moment.
    """

    def __init__(self, settings: Callable[[], Settings], log: Log) -> None:
        self._settings = settings
        self._tokens = Tokens(log)
        self._peer_log = PeerLog(log)

    def before(self, application: WSGIApplication) -> WSGIApplication:
        """The same one, for who may ask it."""

        def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            try:
                self._admit(environ)
            except Refused as refused:
                peer = environ.get("REMOTE_ADDR", "")
                self._peer_log.warning(peer, f"query: {peer} is refused: {refused}")
                return _refusal(refused, start_response)
            return application(environ, start_response)

        return serve

    def _admit(self, environ: WSGIEnvironment) -> None:
        """Refused says why not, and what to do."""
        settings = self._settings()
        peer = environ.get(PEER)
        if peer is not None:
            _admit_user(peer, settings)
            return
        if settings.everybody_queries:
            _check_host(environ, settings)
            return
        shown = _BEARER.fullmatch(environ.get("HTTP_AUTHORIZATION", "").strip())
        if shown is None:
            raise Refused(
                HTTPStatus.UNAUTHORIZED,
                "show a token, as `Authorization: Bearer TOKEN`; `backsightctl token NAME` makes one for"
                " the file `query.tokens` of the coordinator. Or it lets everybody read who comes"
                " (`query.anonymous: viewer`)",
            )
        if self._tokens.owner(settings.query.tokens, shown[1]) is None:
            raise Refused(
                HTTPStatus.UNAUTHORIZED,
                "that token is not among those of the coordinator (`query.tokens`)",
            )


def _admit_user(peer: Credentials, settings: Settings) -> None:
    try:
        role = role_of(settings.access, peer)
    except InvalidValue as error:
        raise Refused(HTTPStatus.FORBIDDEN, str(error)) from error
    if role is None:
        raise Refused(
            HTTPStatus.FORBIDDEN,
            f"uid {peer.uid} is neither operator nor viewer; root can name him, or one of his groups, in"
            " `access.viewers` of the coordinator",
        )


def _check_host(environ: WSGIEnvironment, settings: Settings) -> None:
    """Not for somebody else's page."""
    name = foreign_name(environ)
    if name is not None and name not in map(in_one_form, settings.query.hosts):
        raise Refused(
            HTTPStatus.MISDIRECTED_REQUEST,
            f"this is asked for as {name[:NAME_MAX]}; name that in `query.hosts` of the coordinator if it"
            " is it, or ask by its IP address",
        )


def _refusal(refused: Refused, start_response: StartResponse) -> Iterable[bytes]:
    status = HTTPStatus(refused.status)
    told = answer(None, 0, [{"code": status.value, "msg": str(refused)}])
    body = json.dumps(told).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    if status is HTTPStatus.UNAUTHORIZED:
        headers.append(("WWW-Authenticate", 'Bearer realm="backsight"'))
    start_response(f"{status.value} {status.phrase}", headers)
    return [body]
