# SPDX-License-Identifier: Apache-2.0
"""A process whose TCP connections have troubles: ``talk.py CAUSE ADDRESS PORT``.

Each trouble happens to a trace of its own (the victim). Before, other traces wrote into the same
connection (neighbours); meanwhile one writes into another connection, of the loopback device (the
innocent). Prints what happened, as JSON, when it is told to begin by a line, and ends at the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import backsight
from tests.probes.answer import MORE_BYTES

TCP_NOTSENT_LOWAT = 25  # tcp(7); Python 3.11 has no name for it
SO_ATTACH_FILTER = 26  # socket(7); nor for this
BPF_RET = 0x06  # linux/bpf_common.h: return a constant, here 0 bytes of the packet

# Of struct tcp_info (linux/tcp.h): where the smoothed round trip stands, in microseconds.
TCPI_RTT = slice(68, 72)

# More than go along with a trigger (LATERALS_MAX of bpf/fire.h).
NEIGHBOURS = 6

# More than a socket remembers (SENT_MAX of bpf/maps.h).
STRETCHES = 200

TRACES = 8
CHUNK_BYTES = 3000
SEGMENT_BYTES = 1000

# Enough for more than a thousand losses of one segment in ten.
CHUNKS = 8000

# A SYN is sent again after a second, and after one or two more.
SYN_AGAIN_S = 2.5

# Segments are sent again after 0.2 s, 0.6 s and so on.
GIVEN_UP_S = 0.8

INNOCENT_EVERY_S = 0.001

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


def neighbours(connection: socket.socket, said: bytes, count: int = NEIGHBOURS) -> list[str]:
    """Traces that wrote into a connection, one after the other."""
    wrote = []
    for _ in range(count):
        with trace("was there before") as neighbour:
            connection.sendall(said)
        wrote.append(neighbour.hex())
    return wrote


def asked_before(connection: socket.socket) -> list[str]:
    """One of them, whom the peer has answered."""
    wrote = neighbours(connection, b"answer", 1)
    connection.recv(1 << 16)
    return wrote


@contextlib.contextmanager
def innocent() -> Iterator[dict[str, Any]]:
    """A trace that writes into a connection of its own as long as the block; and what is told of it."""
    number = secrets.token_bytes(16)
    said: dict[str, Any] = {"innocent": number.hex(), "innocent_writes": 0}
    over, begun = threading.Event(), threading.Event()

    def works() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as asking,
            trace("innocent", number),
        ):
            answering, _ = listener.accept()
            with answering:
                while not over.wait(INNOCENT_EVERY_S):
                    for one, other in ((asking, answering), (answering, asking)):
                        one.sendall(b"!")
                        other.recv(1)
                    said["innocent_writes"] += 1
                    begun.set()

    thread = threading.Thread(target=works)
    thread.start()
    begun.wait()
    try:
        yield said
    finally:
        # What counts is that it still does at the end.
        said["innocent_writes"] = 0
        begun.clear()
        while thread.is_alive() and not begun.wait(INNOCENT_EVERY_S):
            pass
        over.set()
        thread.join()


def gives_up(connection: socket.socket) -> None:
    """Until the kernel does: nobody confirms what was sent."""
    with contextlib.suppress(TimeoutError):
        connection.recv(1)


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
        wrote = neighbours(connection, b"wait")
        with trace("is broken off") as victim:
            connection.sendall(b"break")
            with contextlib.suppress(ConnectionResetError):
                connection.recv(1)
    return {"victim": victim.hex(), "neighbours": wrote}


def breaks_off(address: tuple[str, int]) -> dict[str, Any]:
    """We break off, by closing what has not been read from."""
    connection = connected(address)
    wrote = neighbours(connection, b"first")
    with trace("breaks off") as victim:
        connection.sendall(b"second")
        # Close by a reset (socket(7), SO_LINGER).
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    return {"victim": victim.hex(), "neighbours": wrote}


def loses_its_end(address: tuple[str, int]) -> dict[str, Any]:
    """The last segment of what we send is lost, and nobody misses it but we."""
    with connected(address) as connection, trace("loses its end") as victim:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(bytes(SEGMENT_BYTES))
        connection.sendall(bytes(SEGMENT_BYTES))
        # Its end is there, and so is what was before.
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        backsight.trigger(victim, "asked", "it is to be collected")
    return {"victim": victim.hex()}


def is_not_read(address: tuple[str, int]) -> dict[str, Any]:
    """The peer does not read."""
    with connected(address) as connection:
        wrote = neighbours(connection, b"first")
        with trace("is not read") as victim:
            connection.settimeout(FULL_S)
            with contextlib.suppress(TimeoutError):
                while True:
                    connection.sendall(bytes(1 << 20))
    return {"victim": victim.hex(), "neighbours": wrote}


def does_not_read(address: tuple[str, int]) -> dict[str, Any]:
    """We do not read what the peer sends."""
    with connected(address) as connection:
        wrote = asked_before(connection)
        with trace("does not read") as victim:
            connection.sendall(bytes(MORE_BYTES))
            select.select([connection], [], [])
            came_ns = time.monotonic_ns()
            time.sleep(UNREAD_S)
            connection.recv(1 << 16)
            took_ns = time.monotonic_ns() - came_ns
    return {"victim": victim.hex(), "neighbours": wrote, "took_ns": took_ns}


def waits_in_a_queue(address: tuple[str, int]) -> dict[str, Any]:
    """More is sent at once than the link carries."""
    with connected(address) as connection:
        # The shortest round trip is that of an empty queue.
        wrote = asked_before(connection)
        with trace("waits in a queue") as victim:
            start_ns = time.monotonic_ns()
            connection.sendall(bytes(MORE_BYTES))
            connection.recv(1 << 16)
            took_ns = time.monotonic_ns() - start_ns
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCPI_RTT.stop)
    return {
        "victim": victim.hex(),
        "neighbours": wrote,
        "took_ns": took_ns,
        "sent_bytes": MORE_BYTES,
        "rtt_us": int.from_bytes(state[TCPI_RTT], sys.byteorder),
    }


def takes_nothing(address: tuple[str, int]) -> dict[str, Any]:
    """A filter of the socket's own drops all that comes."""
    with connected(address) as connection:
        wrote = asked_before(connection)
        with trace("takes nothing") as victim:
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GIVEN_UP_S * 1000)
            )
            instructions = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
            program = struct.pack("HP", 1, ctypes.addressof(instructions))
            connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
            connection.sendall(bytes(MORE_BYTES))
            gives_up(connection)
    return {"victim": victim.hex(), "neighbours": wrote}


def forgets_who_wrote(address: tuple[str, int]) -> dict[str, Any]:
    """Nothing arrives; so many wrote in turn that nobody knows whose the first byte was."""
    with connected(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GIVEN_UP_S * 1000))
        (first,) = neighbours(connection, b"!", 1)
        others = [secrets.token_bytes(16) for _ in range(2)]
        for number in range(STRETCHES):
            with trace("writes", others[number % len(others)]):
                connection.sendall(b"!")
        with trace("writes last") as victim:
            connection.sendall(b"!")
            gives_up(connection)
    return {
        "victim": victim.hex(),
        "first": first,
        "neighbours": [one.hex() for one in others],
    }


def tells_nobody_where(address: tuple[str, int]) -> dict[str, Any]:
    """Calls another service, and says which trace it is, but not from which node."""
    with connected(address) as connection, trace("calls") as victim:
        connection.sendall(victim)
        connection.recv(1)
        backsight.trigger(victim, "asked", "it is to be collected")
    return {"victim": victim.hex()}


def only_reads(address: tuple[str, int]) -> dict[str, Any]:
    """Hears which trace it is, and of it; writes nothing while it works on it."""
    with connected(address) as connection:
        number = connection.recv(16)
        connection.sendall(b"!")
        with trace("reads", number):
            connection.recv(1 << 10)
            backsight.trigger(number, "asked", "it is to be collected")
    return {"victim": number.hex()}


CAUSES: dict[str, Callable[[tuple[str, int]], dict[str, Any]]] = {
    "retransmit": loses_segments,
    "syn_retransmit": asks_in_vain,
    "reset_sent": breaks_off,
    "reset_received": is_broken_off,
    "loss_probe": loses_its_end,
    "zero_window": is_not_read,
    "read_delay": does_not_read,
    "queue": waits_in_a_queue,
    "filter": takes_nothing,
    "forgotten": forgets_who_wrote,
    "call": tells_nobody_where,
    "only_reads": only_reads,
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
        with innocent() as beside:
            happened = CAUSES[cause]((address, int(port)))
        print(json.dumps(happened | beside), flush=True)


if __name__ == "__main__":
    main()
