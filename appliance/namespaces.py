# SPDX-License-Identifier: Apache-2.0
"""Network namespaces of processes, as far as anybody may know them."""

from __future__ import annotations

from pathlib import Path

from appliance.core.machine import Namespace


def namespace_of(process: int | str) -> Namespace | None:
    """The network namespace of a process, or of "self"; None if it is gone.

    By a file that each namespace has one of, since the namespace itself (ns/net) may only be
    asked for by who may trace the process: not a node for other users' processes.
    """
    try:
        return Path(f"/proc/{process}/net/netstat").stat().st_ino
    except OSError:
        return None
