# SPDX-License-Identifier: Apache-2.0
"""Whether an error of a call tells that no connection came about, so that no byte of the request was sent.

By what instrumentations leave of an exception: its type and its message. What is not listed here
says nothing, and neither does what may also come of a request that was sent: a reset, a timeout
of whatever, "no route to host" (which ends connections too), an error of TLS (with TLS 1.3 a client
hears of its certificate after its request).

Who sends again by himself tells of the last try alone, though an earlier one may have been sent.
urllib3 does by default, so its MaxRetryError is not listed; requests only by an adapter of the
application, aiohttp only on a connection that was kept, and gRPC only by a retry policy.
"""

from __future__ import annotations

import errno

_NEVER_CONNECTED = frozenset(
    {
        # Only connect() has it.
        "ConnectionRefusedError",
        # Without an address there is nothing to connect to.
        "socket.gaierror",
        # Which raise these for connecting alone, reading has others.
        "requests.exceptions.ConnectTimeout",
        "urllib3.exceptions.ConnectTimeoutError",
        "urllib3.exceptions.NewConnectionError",
        "urllib3.exceptions.NameResolutionError",
        "httpx.ConnectError",
        "httpx.ConnectTimeout",
        "aiohttp.client_exceptions.ClientConnectorError",
        "aiohttp.client_exceptions.ClientConnectorDNSError",
        "aiohttp.client_exceptions.ConnectionTimeoutError",
    }
)

# What other libraries have for other things, too: connect-python has a ConnectError for whatever
# the server answers.
_OF_SEVERAL = frozenset({"ConnectError", "ConnectTimeout", "ConnectionTimeoutError"})

# Older SDKs leave the module out of the type, and who has a status alone does.
_WITHOUT_MODULES = frozenset(kind.rpartition(".")[2] for kind in _NEVER_CONNECTED) - _OF_SEVERAL

# requests has one exception for all that urllib3 says, and names that one last, after the URL, which
# may be anything.
_CAUSE = "(Caused by "
_CAUSES = ("NewConnectionError(", "ConnectTimeoutError(", "NameResolutionError(")

# urllib has one for all that ends while it sends. Negative numbers are those of getaddrinfo().
_URLLIB = (f"<urlopen error [Errno {errno.ECONNREFUSED}] ", "<urlopen error [Errno -")

# gRPC has a status for all. A server may pass on what it heard of another, after it got the request;
# then that one's address stands there.
_GRPC = "failed to connect to all addresses; last error: "


def is_unsent(kind: str, message: str, address: str) -> bool:
    """Whether an exception of that type, with or without its module, tells so of a call to an address."""
    if kind in _NEVER_CONNECTED or kind in _WITHOUT_MODULES:
        return True
    match kind.rpartition(".")[2]:
        case "ConnectionError" | "ProxyError":
            _, found, cause = message.rpartition(_CAUSE)
            return bool(found) and cause.startswith(_CAUSES)
        case "URLError":
            return message.startswith(_URLLIB)
        case "_InactiveRpcError" | "_MultiThreadedRendezvous" | "AioRpcError":
            _, _, last = message.partition(_GRPC)
            return f" ipv4:{address}:" in last or f" ipv6:%5B{address}%5D:" in last
    return False
