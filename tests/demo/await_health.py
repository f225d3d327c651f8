# SPDX-License-Identifier: Apache-2.0
"""``python3 -m tests.demo.await_health URL TIMES``: until it answered so often, or not for a minute."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request

_TIMEOUT_S = 60.0
_RETRY_S = 0.1  # nobody tells when a server begins to listen


def main() -> int:
    url, times = sys.argv[1], int(sys.argv[2])
    deadline_s = time.monotonic() + _TIMEOUT_S
    while times:
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
                response.read()
            times -= 1
        except (urllib.error.URLError, ConnectionError) as error:
            if time.monotonic() > deadline_s:
                sys.stderr.write(f"{url}: {error}\n")
                return 1
            time.sleep(_RETRY_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
