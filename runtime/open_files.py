# SPDX-License-Identifier: Apache-2.0
"""How many files a program may have open."""

from __future__ import annotations

import resource


def raise_open_files_limit() -> None:
    """As many as the hard limit allows.

    The soft one is 1024 mostly, for the sake of programs that use select() (systemd.exec(5)).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
