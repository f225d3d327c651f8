# SPDX-License-Identifier: Apache-2.0
"""Probes that load nothing: what they say to a node."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from appliance.contexts import memfd_context
from appliance.probes_packets import VERSION, Packet, probes_path, receive, send

FIGURES = {
    "written": {"records": 7, "breadcrumbs": 8, "refused": 1},
    "kinds": {
        "kernel.run_queue": {
            "recorded": 9,
            "record_lost": 1,
            "fired": 3,
            "coalesced": 2,
            "limited": 4,
            "queue_full": 5,
        }
    },
    "programs": {
        "on_switch": {
            "runs": 100,
            "run_ns": 40_000,
            "recursion_misses": 6,
            "verified_instructions": 30_000,
            "map_errors": 11,
            "bytes": 4096,
        }
    },
    "memory": {"programs_bytes": 4096, "maps_bytes": 8192, "contexts_bytes": 188_544},
    "thresholds_raised": 1,
    "missing": {"run_queue": 1},
    "loader": {"core": 1},
    "bypassed": 1,
}


@dataclass
class FakeProbes:
    """A connection to a node's socket for probes."""

    socket: socket.socket

    @classmethod
    def of(cls, node_socket: Path) -> Self:
        """Connect to the node that applications reach there."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(probes_path(node_socket)))
        connection.setblocking(False)
        return cls(connection)

    def close(self) -> None:
        self.socket.close()

    def say(self, said: dict[str, Any], fds: Sequence[int] = ()) -> None:
        send(self.socket, said, fds)

    def hello(self, context_bytes: int, version: int = VERSION) -> None:
        self.say({"hello": version, "context_bytes": context_bytes, "loader": "none"})

    def give_contexts(self, count: int, size: int) -> None:
        """Memfds, which do as well for who does not look into them."""
        fds = [memfd_context(size) for _ in range(count)]
        self.say({"contexts": count}, fds)
        for fd in fds:
            os.close(fd)

    async def hear(self) -> Packet | None:
        """What the node says next; None: it has hung up."""
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self.socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self.socket)
        return receive(self.socket)
