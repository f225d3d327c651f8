# SPDX-License-Identifier: Apache-2.0
"""How many calls gRPC has taken, also such as it has not brought to us yet.

It counts them for its service Channelz, which we do not offer; grpcio-channelz reads the same.

Each question leaks its answer in Debian's grpcio 1.51, and nothing can be done about it from here:
0.7 KiB for ``calls()``, and as much for each connection for ``calls_by_peer()``. (1.85 leaks nothing.)
So nobody may ask by a timer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from grpc._cython import cygrpc

# As many at once as gRPC gives.
_PAGE = 500


def _servers() -> list[dict[str, Any]]:
    servers: list[dict[str, Any]] = json.loads(cygrpc.channelz_get_servers(0)).get("server", [])
    return servers


def _open(data: dict[str, str], what: str) -> int:
    started, *ended = (
        int(data.get(f"{what}{how}", 0)) for how in ("Started", "Succeeded", "Failed")
    )
    return started - sum(ended)


def calls() -> int:
    """All that this process has."""
    return sum(_open(server["data"], "calls") for server in _servers())


def calls_by_peer() -> Iterator[tuple[str, int]]:
    """Of each connection, and some of those that we ended: not all that are over are taken off."""
    for server in _servers():
        number, start, is_end = int(server["ref"]["serverId"]), 0, False
        while not is_end:
            page = json.loads(cygrpc.channelz_get_server_sockets(number, start, _PAGE))
            sockets = page.get("socketRef", [])
            is_end = page.get("end", False) or not sockets
            for socket in sockets:
                start = int(socket["socketId"]) + 1
                try:
                    told = json.loads(cygrpc.channelz_get_socket(start - 1))
                except ValueError:
                    continue  # it has ended
                peer = unquote(socket["name"].rpartition(" ")[2])
                yield peer, _open(told["socket"]["data"], "streams")
