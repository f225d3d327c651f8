# SPDX-License-Identifier: Apache-2.0
"""Names by which an HTTP server is asked for.

A page that somebody visits may have a name that its owner made to lead here (DNS rebinding), and read
with the visitor's browser. Such a page cannot have the browser name another host than its own, nor
an address. For the browser it asks its own site: so it sends no Origin, and in clear text no
Sec-Fetch-Site either.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# RFC 1035.
NAME_MAX = 253

# Browsers send the first with every request, and a page cannot take it away; the others with some.
_OF_BROWSERS = frozenset(
    {"HTTP_ACCEPT_LANGUAGE", "HTTP_ORIGIN", "HTTP_REFERER", "HTTP_SEC_FETCH_SITE"}
)
# In the User-Agent of all of them, unless a page says another one.
_BROWSER = "Mozilla/"


def in_one_form(name: str) -> str:
    """Names that differ in capitals, or in the dot at their end, are the same."""
    return name.rstrip(".").lower()


def foreign_name(environ: WSGIEnvironment) -> str | None:
    """By which name this is asked for, in one form, if somebody else's page could have that name.

    None: as localhost, by an IP address, or by none.
    """
    host = environ.get("HTTP_HOST", "")
    name = in_one_form(re.sub(r":[0-9]*\Z", "", host).strip("[]"))
    if not name or name == "localhost":
        return None
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name
    return None


def not_for_foreign_pages(application: WSGIApplication) -> WSGIApplication:
    """The same one, for whoever asks by any name, but for browsers by a name of this machine only.

    For what is asked by programs, which come by names that nobody configures here.
    """

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        name = foreign_name(environ)
        if name is None or name in _own_names() or not _is_of_a_browser(environ):
            return application(environ, start_response)
        status = HTTPStatus.MISDIRECTED_REQUEST
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        start_response(f"{status.value} {status.phrase}", headers)
        why = f"a browser asks for this as {name[:NAME_MAX]}, which may be the name of somebody else's page"
        return [f"{why}; ask by the IP address of this machine\n".encode()]

    return serve


def _own_names() -> tuple[str, ...]:
    name = in_one_form(socket.gethostname())
    return name, name.partition(".")[0]


def _is_of_a_browser(environ: WSGIEnvironment) -> bool:
    return bool(_OF_BROWSERS & environ.keys()) or _BROWSER in environ.get("HTTP_USER_AGENT", "")
