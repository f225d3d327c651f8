# SPDX-License-Identifier: Apache-2.0
"""What ``backsightctl`` and the node on its own machine agree on.

A Unix stream socket beside the one where applications attach (its path with
``.ctl`` added). One line of JSON each way, then the connection is closed:

    {"command": "status"}               -> {"status": {...}}
    {"command": "peek", "trace": HEX}   -> {"node", "flags", "open_handles", "trigger", "bytes": N}
                                           and N bytes of slice behind the line
    {"command": "trigger", "name", "trace", "why"}  -> {"node", "flags", "bytes"} as for peek, of what it holds,
                                           and "reported_bytes", of what it has reported already;
                                           or {}, if that cannot be told soon

or ``{"error": "..."}``.
"""

from __future__ import annotations

from pathlib import Path

REQUEST_BYTES_MAX = 4096


def control_path(socket_path: Path) -> Path:
    """Where the control socket of a node is that applications reach at ``socket_path``."""
    return socket_path.with_name(socket_path.name + ".ctl")
