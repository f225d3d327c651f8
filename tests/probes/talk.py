# SPDX-License-Identifier: Apache-2.0
"""A process whose TCP connections have troubles: ``talk.py CAUSE ADDRESS PORT``.

Each trouble happens to a trace of its own. Prints what happened, as JSON, when it is told to
begin by a line, and ends at the next.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import backsight
from tests.probes.answer import MORE_BYTES

TCP_NOTSENT_LOWAT = 25  # tcp(7); Python 3.11 has no name for it

TRACES = 8
CHUNK_BYTES = 3000

# Enough for more than a thousand losses of one segment in ten.
CHUNKS = 6000

# A SYN is sent again after a second.
SYN_AGAIN_S = 1.5

UNREAD_S = 0.3

# A receiver's window shrinks by steps, some 50 ms each at the end.
FULL_S = 1.5


@contextlib.contextmanager
def trace(name: str, number: bytes | None = None) -> Iterator[bytes]:
    """What is done in a trace."""
    number = number or secrets.token_bytes(16)
    backsight.begin(number)
    backsight.tracepoint(name.encode())
    try:
        yield number
    finally:
        backsight.end()


def connected(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address)


def loses_segments(address: tuple[str, int]) -> dict[str, Any]:
    """Several traces write into one connection, in turn."""
    traces = [secrets.token_bytes(16) for _ in range(TRACES)]
    with connected(address) as connection:
        # As servers of HTTP/2 do: what waits to be sent waits where it can be chosen.
        connection.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, 16384)
        for number in range(CHUNKS):
            with trace("writes", traces[number % TRACES]):
                connection.sendall(bytes([number % 256]) * CHUNK_BYTES)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
    return {"traces": [one.hex() for one in traces], "chunk_bytes": CHUNK_BYTES}


def asks_in_vain(address: tuple[str, int]) -> dict[str, Any]:
    """Nobody answers a connection's first segment."""
    with trace("asks") as victim, socket.socket() as asking:
        asking.settimeout(SYN_AGAIN_S)
        with contextlib.suppress(TimeoutError):
            asking.connect(address)
    return {"victim": victim.hex()}


def is_broken_off(address: tuple[str, int]) -> dict[str, Any]:
    """The peer breaks off when it has heard of us."""
    with connected(address) as connection:
        with trace("was there before") as neighbour:
            connection.sendall(b"wait")
        with trace("is broken off") as victim:
            connection.sendall(b"break")
            with contextlib.suppress(ConnectionResetError):
                connection.recv(1)
    return {"victim": victim.hex(), "neighbour": neighbour.hex()}


def is_not_read(address: tuple[str, int]) -> dict[str, Any]:
    """The peer does not read."""
    with connected(address) as connection, trace("is not read") as victim:
        connection.settimeout(FULL_S)
        with contextlib.suppress(TimeoutError):
            while True:
                connection.sendall(bytes(1 << 20))
    return {"victim": victim.hex()}


def does_not_read(address: tuple[str, int]) -> dict[str, Any]:
    """We do not read what the peer sends."""
    with connected(address) as connection, trace("does not read") as victim:
        connection.sendall(b"answer")
        # Its answer is there soon.
        time.sleep(UNREAD_S)
        connection.recv(1 << 16)
    return {"victim": victim.hex(), "took_ns": int(UNREAD_S * 1e9)}


def waits_in_a_queue(address: tuple[str, int]) -> dict[str, Any]:
    """More is under way than the link carries."""
    with connected(address) as connection:
        # The shortest round trip is that of an empty queue.
        connection.sendall(b"answer")
        connection.recv(1 << 16)
        with trace("waits in a queue") as victim:
            connection.sendall(bytes(MORE_BYTES))
            connection.recv(1 << 16)
    return {"victim": victim.hex()}


def tells_nobody_where(address: tuple[str, int]) -> dict[str, Any]:
    """Calls another service, and says which trace it is, but not from which node."""
    with connected(address) as connection, trace("calls") as victim:
        connection.sendall(victim)
        connection.recv(1)
        backsight.trigger(victim, "asked", "it is to be collected")
    return {"victim": victim.hex()}


CAUSES: dict[str, Callable[[tuple[str, int]], dict[str, Any]]] = {
    "retransmit": loses_segments,
    "syn_retransmit": asks_in_vain,
    "reset_received": is_broken_off,
    "zero_window": is_not_read,
    "read_delay": does_not_read,
    "rtt": waits_in_a_queue,
    "call": tells_nobody_where,
}


def main() -> None:
    """See above."""
    cause, address, port = sys.argv[1:]
    with trace("attaches"):
        pass
    backsight.wait_attached(30)
    with trace("takes a slot"):
        pass
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(CAUSES[cause]((address, int(port)))), flush=True)


if __name__ == "__main__":
    main()
