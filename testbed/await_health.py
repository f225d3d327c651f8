# SPDX-License-Identifier: Apache-2.0
"""``python3 -m testbed.await_health URL TIMES``: until it answered so often, or not for a minute.

With ``tcp://HOST:PORT``: until it took so many connections.
"""

from __future__ import annotations

import socket
import sys
import time
import urllib.parse
import urllib.request

_TIMEOUT_S = 60.0
_RETRY_S = 0.1  # nobody tells when a server begins to listen


def main() -> int:
    url, times = sys.argv[1], int(sys.argv[2])
    deadline_s = time.monotonic() + _TIMEOUT_S
    while times:
        try:
            _ask(url)
            times -= 1
        except OSError as error:
            if time.monotonic() > deadline_s:
                sys.stderr.write(f"{url}: {error}\n")
                return 1
            time.sleep(_RETRY_S)
    return 0


def _ask(url: str) -> None:
    """OSError if nobody listens, or what answers is an error."""
    address = urllib.parse.urlsplit(url)
    if address.scheme == "tcp":
        assert address.hostname is not None
        assert address.port is not None
        socket.create_connection((address.hostname, address.port), _TIMEOUT_S).close()
        return
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        response.read()


if __name__ == "__main__":
    sys.exit(main())
