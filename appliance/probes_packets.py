# SPDX-License-Identifier: Apache-2.0
"""What ``backsight-probes`` and ``backsight-node`` say to each other.

A Unix socket of packets beside the one where applications attach (its path with ``.bpf``
added). The node listens; probes connect, since they come and go. Each packet is an object of JSON:

    probes   {"hello": VERSION, "context_bytes": N, "loader": "core" or "bcc"}
    node     {"welcome": VERSION, "node": NAME}       with an eventfd, to be rung for triggers
             {"refused": "..."}                       and it hangs up
    node     {"want": N}                              so many context segments more
    probes   {"contexts": N}                          with so many fds
    node     {"watch": NUMBER}                        with the pidfd and the context of a process
             {"exited": NUMBER}                       that one
    probes   {"watching": NUMBER} or {"watching": NUMBER, "error": "..."}
             {"figures": {...}}                       now and then
    node     {"who": N, "namespace": INODE, "device": INDEX, "port": PORT, "within_ns": NS}
    probes   {"who": N, "traces": [HEX, ...]}         that used it lately, the last one first;
                                                      device or port is 0: any

Both sides are daemons of the machine's administrator, and the kernel says whose they are.
What cannot be read ends the connection.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1

SERVICE = "kernel"
"""As which probes write into traces."""

# As many fds as go into one packet; the kernel's own limit is 253 (SCM_MAX_FD).
FDS_MAX = 16

USERS_MAX = 64
"""Traces of an answer: more than are collected for one symptom."""

# As C has them: a port, what else the maps hold, and counts and nanoseconds of Python's own.
PORT_BITS = 16
MAP_BITS = 32
_BITS = 63

_BYTES_MAX = 64 << 10


class BadPacket(Exception):
    """What the other side said makes no sense."""


@dataclass(frozen=True, slots=True)
class Packet:
    """What came; whoever takes it closes the fds."""

    said: dict[str, Any]
    fds: tuple[int, ...]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def probes_path(socket_path: Path) -> Path:
    """Where the node listens for probes that applications reach at ``socket_path``."""
    return socket_path.with_name(socket_path.name + ".bpf")


def send(connection: socket.socket, said: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a packet; OSError if it cannot be sent now."""
    data = json.dumps(said).encode()
    if fds:
        socket.send_fds(connection, [data], fds)
    else:
        connection.send(data)


def receive(connection: socket.socket) -> Packet | None:
    """Receive a packet, None if the other side has hung up; BlockingIOError if there is none.

    BadPacket if it is none of ours.
    """
    try:
        data, fds, flags, _ = socket.recv_fds(connection, _BYTES_MAX, FDS_MAX)
    except ConnectionResetError:
        # It hung up before it heard us out. What it said before can be read all the same.
        data, fds, flags, _ = socket.recv_fds(connection, _BYTES_MAX, FDS_MAX)
    packet = None
    try:
        if not data and not fds:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise BadPacket("it is larger than any that is known")
        try:
            said = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadPacket(f"it is no JSON: {error}") from error
        if not isinstance(said, dict):
            raise BadPacket("it is no object of JSON")
        packet = Packet(said, tuple(fds))
        return packet
    finally:
        if packet is None:
            for fd in fds:
                os.close(fd)


def number_of(packet: Packet, key: str, bits: int = _BITS) -> int:
    """Return a number that a packet says; BadPacket if it is none of so many bits."""
    value = packet.said.get(key)
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise BadPacket(f"{key} is {value!r}, and no number of {bits} bits")
    return value


def fds_of(packet: Packet, count: int) -> tuple[int, ...]:
    """Return the fds that came with it; BadPacket if they are not so many."""
    if len(packet.fds) != count:
        raise BadPacket(f"{len(packet.fds)} fds came with it instead of {count}")
    return packet.fds
