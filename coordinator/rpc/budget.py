# SPDX-License-Identifier: Apache-2.0
"""What one peer may take of the coordinator, which is everybody's.

gRPC puts no bound to the messages that it gathers: whatever length a peer announces, it takes
in, and compares that with grpc.max_receive_message_length when all is there. Nor does it tell
what it has, or bound the connections. So they are looked at from outside: what the kernel has
received on a connection, and what of it came out as messages. Since a connection has one call
at a time (with TLS), all that came since its last message is one that is not whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from coordinator.counters import ServerCounters
from coordinator.rpc.connections import Connection, connections
from coordinator.rpc.identity import Identity, Role
from protocol import wire
from runtime.log import PeerLog
from runtime.memory import resident_bytes

# Of one identity. A node has a Control and a Slices stream, and each twice while it comes
# back before the old one is known to be gone; people call several things from a script.
_CALLS_MAX = {Role.NODE: 8, Role.OPERATOR: 32, Role.VIEWER: 32}

# On a connection, since its last whole message: twice the longest message, since the kernel
# has as much again. Where gRPC's windows are full, nothing comes beyond.
UNDELIVERED_BYTES_MAX = 2 * wire.MESSAGE_BYTES_MAX

# Connections of an address on which nobody calls, though they are there for so long: all nodes
# may come at once from behind one, when a coordinator begins.
IDLE_CONNECTIONS_MAX = 128
IDLE_S = 5.0

# A look costs some 10 ms with 2,000 connections. So one is taken at once when memory has grown
# by what a peer may have, and else seldom.
_GLANCE_S = 0.1
_LOOK_EVERY_S = 10.0
_GROWN_BYTES = UNDELIVERED_BYTES_MAX


@dataclass(slots=True)
class _Seen:
    """Of a connection at the last look: what the kernel had received, what was delivered.

    ``since_s``: when it was seen first.
    """

    received: int
    delivered: int
    since_s: float


class Budget:
    """Who has how many calls, and what is on its way in."""

    def __init__(
        self,
        counters: ServerCounters,
        log: PeerLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._log = log
        self._calls: Counter[Identity] = Counter()
        self._peers: Counter[str] = Counter()  # that call something now
        self._delivered: Counter[str] = Counter()  # messages, by peer as gRPC writes it
        self._seen: dict[str, _Seen] = {}

    # ------------------------------------------------------------------ calls

    def why_not(self, identity: Identity | None) -> str | None:
        """Why one more call is one too many of an identity; None if it is not."""
        if identity is None or self._calls[identity] < _CALLS_MAX[identity.role]:
            return None
        return (
            f"{identity} has {_CALLS_MAX[identity.role]} calls at once already; allowed are no more. Does"
            " somebody else use its certificate?"
        )

    @contextlib.contextmanager
    def call(self, peer: str, identity: Identity | None) -> Iterator[None]:
        """While a call goes on."""
        self.delivered(peer)  # or the call would not have begun
        peer = unquote(peer)  # gRPC writes the brackets of IPv6 so
        if identity is not None:
            self._calls[identity] += 1
        self._peers[peer] += 1
        try:
            yield
        finally:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]
            if identity is not None:
                self._calls[identity] -= 1
                if not self._calls[identity]:
                    del self._calls[identity]

    def delivered(self, peer: str) -> None:
        """A message of that peer came out of gRPC whole."""
        self._delivered[peer] += 1

    # ------------------------------------------------------------ connections

    async def watch(self, port: Callable[[], int]) -> None:
        """Look at the connections with a port of ours, until cancelled."""
        looked_s, bytes_then = time.monotonic(), 0
        while True:
            await asyncio.sleep(_GLANCE_S)  # nothing tells
            # Where all files are taken by connections nothing can be opened, until gRPC has
            # closed those that are idle.
            with contextlib.suppress(OSError):
                now_s, bytes_now = time.monotonic(), resident_bytes()
                bytes_then = min(bytes_then or bytes_now, bytes_now)
                if now_s - looked_s >= _LOOK_EVERY_S or bytes_now - bytes_then >= _GROWN_BYTES:
                    self.look(port())
                    looked_s, bytes_then = time.monotonic(), resident_bytes()

    def look(self, port: int) -> None:
        """End the connections that hold too much."""
        now_s = self._clock()
        idle: Counter[str] = Counter()
        messages: Counter[str] = Counter()
        for peer, count in self._delivered.items():
            messages[unquote(peer)] += count
        seen: dict[str, _Seen] = {}
        for connection in connections(port):
            peer = connection.peer
            try:
                received = connection.bytes_received
            except OSError:
                continue  # it has ended
            delivered = messages[peer]
            before = self._seen.get(peer, _Seen(0, 0, now_s))
            if delivered != before.delivered:
                before = _Seen(received, delivered, before.since_s)
            seen[peer] = before
            address = peer.rpartition(":")[0]
            if received - before.received > UNDELIVERED_BYTES_MAX:
                self._counters.connections_ended_unfinished += 1
                self._end(
                    connection,
                    f"sent {received - before.received >> 20} MiB of a message that is not whole yet;"
                    f" messages have at most {wire.MESSAGE_BYTES_MAX >> 20} MiB",
                )
            elif peer not in self._peers and now_s - before.since_s >= IDLE_S:
                idle[address] += 1
                if idle[address] > IDLE_CONNECTIONS_MAX:
                    self._counters.connections_ended_idle += 1
                    self._end(
                        connection,
                        f"its address has more than {IDLE_CONNECTIONS_MAX} connections on which it calls"
                        " nothing",
                    )
        self._seen = seen
        here = seen.keys() | self._peers.keys()
        for peer in [peer for peer in self._delivered if unquote(peer) not in here]:
            del self._delivered[peer]

    def _end(self, connection: Connection, why: str) -> None:
        connection.shut()
        self._log.warning(connection.peer, f"{connection.peer}: its connection is ended: {why}")
