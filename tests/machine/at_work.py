# SPDX-License-Identifier: Apache-2.0
"""A process that is in the middle of a trace: ``at_work.py sends ADDRESS PORT | listens PORT | waits``.

Says which, when it is at work on it, and what it is told by a line it does. Ends with its input.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable

import backsight

_MANY_BYTES = 1 << 18


def sends(address: str, port: str) -> Callable[[], None]:
    """To a peer that reads: a little, and when it is told to, much."""
    connection = socket.create_connection((address, int(port)))
    connection.sendall(b"x")
    return lambda: connection.sendall(bytes(_MANY_BYTES))


def chats(address: str, port: str) -> Callable[[], None]:
    """With a peer that reads: a little, each time."""
    connection = socket.create_connection((address, int(port)))
    connection.sendall(b"x")
    return lambda: connection.sendall(b"x")


def serves(port: str) -> Callable[[], None]:
    """Has read from one caller, and has room for two more."""
    listener = socket.create_server(("0.0.0.0", int(port)), backlog=1)
    print("listens", flush=True)
    caller, _ = listener.accept()
    assert caller.recv(1) == b"x"

    def close() -> None:
        caller.close()
        listener.close()

    return close


def listens(port: str) -> Callable[[], None]:
    """Takes no connection, and has room for two."""
    listener = socket.create_server(("0.0.0.0", int(port)), backlog=1)
    return listener.close


def waits() -> Callable[[], None]:
    """For nothing."""
    return lambda: None


_WORK: dict[str, Callable[..., Callable[[], None]]] = {
    "sends": sends,
    "chats": chats,
    "serves": serves,
    "listens": listens,
    "waits": waits,
}


def main() -> None:
    """See above."""
    what, *arguments = sys.argv[1:]
    backsight.begin(bytes(15) + b"\1")
    backsight.end()
    backsight.wait_attached(30)
    print("attached", flush=True)
    sys.stdin.readline()
    trace = secrets.token_bytes(16)
    backsight.begin(trace)
    backsight.tracepoint(what.encode())
    do = _WORK[what](*arguments)
    print(trace.hex(), flush=True)
    for _ in sys.stdin:
        backsight.tracepoint(b"again")
        do()
        print("done", flush=True)
    backsight.end()


if __name__ == "__main__":
    main()
