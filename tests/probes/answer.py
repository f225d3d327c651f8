# SPDX-License-Identifier: Apache-2.0
"""The other side of talk.py: ``answer.py HOW PORT``, a connection after the other.

It is attached to no node, unless it records.
"""

from __future__ import annotations

import secrets
import socket
import struct
import sys
from collections.abc import Callable

import backsight

# What a new connection sends at once (RFC 6928): ten segments.
MORE_BYTES = 10 * 1400


def reads_all(connection: socket.socket) -> None:
    """And says so at the end."""
    while connection.recv(1 << 16):
        pass
    connection.sendall(b"!")


def answers(connection: socket.socket) -> None:
    """At once, and again when so many more bytes are there; then reads all."""
    connection.recv(1 << 10)
    connection.sendall(b"here")
    left = MORE_BYTES
    while received := connection.recv(1 << 16):
        left -= len(received)
        if left == 0:
            connection.sendall(b"here")


def breaks_off(connection: socket.socket) -> None:
    """When it is told to."""
    while b"break" not in connection.recv(1 << 10):
        pass
    # Close by a reset (socket(7), SO_LINGER).
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def does_not_read(connection: socket.socket) -> None:
    """Until the other side has gone."""
    hung_up = socket.MSG_PEEK
    sys.stdin.readline()
    connection.recv(1, hung_up)


def records(connection: socket.socket) -> None:
    """Work on the trace that it is told of, for the node of its own host."""
    trace = connection.recv(16)
    backsight.begin(trace)
    backsight.tracepoint(b"was called")
    backsight.end()
    connection.sendall(b"!")
    while connection.recv(1):
        pass


def tells_what_it_works_on(connection: socket.socket) -> None:
    """Which trace, for the node of its own host; and something of it a moment later."""
    trace = secrets.token_bytes(16)
    backsight.begin(trace)
    backsight.tracepoint(b"began it")
    connection.sendall(trace)
    connection.recv(1)
    connection.sendall(b"news")
    backsight.end()
    while connection.recv(1):
        pass


HOW: dict[str, Callable[[socket.socket], None]] = {
    "reads_all": reads_all,
    "answers": answers,
    "breaks_off": breaks_off,
    "does_not_read": does_not_read,
    "records": records,
    "tells": tells_what_it_works_on,
}


def main() -> None:
    """See above."""
    how, port = sys.argv[1:]
    if how in ("records", "tells"):
        backsight.begin(bytes(15) + b"\1")
        backsight.end()
        backsight.wait_attached(30)
    with socket.create_server(("0.0.0.0", int(port))) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                HOW[how](connection)


if __name__ == "__main__":
    main()
