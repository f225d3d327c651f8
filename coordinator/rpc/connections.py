# SPDX-License-Identifier: Apache-2.0
"""The connections that gRPC has taken for us, of which it says nothing itself.

Those over TCP are found among the file descriptors of this process. One that is shut ends for
gRPC as if its peer had hung up.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# tcpi_bytes_received in struct tcp_info (linux/tcp.h).
_RECEIVED = struct.Struct("128xQ")


class Connection(Protocol):
    """One of them, over TCP or not. ``peer`` as gRPC writes it, maybe without its quotes."""

    @property
    def peer(self) -> str: ...

    @property
    def bytes_received(self) -> int:
        """What its peer has sent so far."""

    def shut(self) -> None:
        """End it, in both directions."""


@dataclass(frozen=True, slots=True)
class TcpConnection:
    """One over TCP."""

    peer: str
    socket: socket.socket

    @property
    def bytes_received(self) -> int:
        """What its peer has sent so far."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        (received,) = _RECEIVED.unpack(info)
        return int(received)

    def shut(self) -> None:
        """End it, in both directions."""
        with contextlib.suppress(OSError):  # it ended meanwhile
            self.socket.shutdown(socket.SHUT_RDWR)


def connections(port: int) -> Iterator[TcpConnection]:
    """All over TCP that somebody has with a port of ours. Each is valid until the next."""
    for found in _sockets(port):
        try:
            peer = _in_words(found)
        except OSError:
            continue  # it listens, or has ended
        yield TcpConnection(peer, found)


def listening(port: int) -> Iterator[socket.socket]:
    """All that take connections at a port of ours. Each is valid until the next."""
    for found in _sockets(port):
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield found


def _sockets(port: int) -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.ExitStack() as opened:
            try:
                # A copy: gRPC may close its own at any time, and the number be another's then.
                copy = os.dup(int(entry.name))
            except OSError:
                continue  # closed meanwhile
            opened.callback(os.close, copy)
            try:
                # It takes what it is given, but not what is no socket.
                found = socket.socket(fileno=copy)
                opened.pop_all()
                opened.enter_context(found)
                if found.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if found.type != socket.SOCK_STREAM or found.getsockname()[1] != port:
                    continue
            except OSError:
                continue  # it is none
            yield found


def _in_words(connected: socket.socket) -> str:
    host, port, *of_ipv6 = connected.getpeername()
    mapped = host.removeprefix("::ffff:")
    if not of_ipv6 or mapped != host:
        return f"ipv4:{mapped}:{port}"
    _, interface = of_ipv6  # by its number, of a link-local address only
    return f"ipv6:[{host}%{interface}]:{port}" if interface else f"ipv6:[{host}]:{port}"


def shut_all(port: int) -> None:
    """End all connections over TCP with a port."""
    for connection in connections(port):
        connection.shut()
