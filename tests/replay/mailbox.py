# SPDX-License-Identifier: Apache-2.0
"""Contexts and responses between the replayed services, over TCP.

One line a message: ``kind trace_id span_id value``. A context carries what a
request would (the tracestate member), a response what a response header would
(the callee's node reference), and a cancellation says that a request will
never come, because the service that should have sent it has died.
"""

from __future__ import annotations

import enum
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

PORT = 7000


class Kind(enum.Enum):
    CONTEXT = "context"
    RESPONSE = "response"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Key:
    kind: Kind
    trace_id: str
    span_id: str


@dataclass(slots=True)
class _Peer:
    sock: socket.socket
    rest: bytes = b""


@dataclass(slots=True)
class Mailbox:
    """Sends to the other pods and keeps what comes from them until it is asked for."""

    address: str
    peers: Mapping[str, str]
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _letters: dict[Key, str] = field(default_factory=dict)
    _outgoing: dict[str, socket.socket | None] = field(default_factory=dict)
    _dead: set[str] = field(default_factory=set)
    _incoming: set[socket.socket] = field(default_factory=set)
    _listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self._listener = socket.create_server((self.address, PORT), backlog=128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sock in [self._listener, *self._outgoing.values(), *self._incoming]:
            if sock is not None:
                sock.close()
        self._selector.close()

    def watch(self, fd: int) -> None:
        """Let `wait` return early when fd is readable (a control pipe)."""
        self._selector.register(fd, selectors.EVENT_READ, fd)

    def mark_dead(self, pod: str) -> None:
        """Nothing will come from that pod any more; what is sent to it is dropped."""
        self._dead.add(pod)

    def is_dead(self, pod: str) -> bool:
        return pod in self._dead

    def send(self, pod: str, key: Key, value: str = "") -> None:
        """Send to a pod. A pod that has died gets nothing, as in real life."""
        if pod in self._dead:
            return
        try:
            if pod not in self._outgoing:
                self._outgoing[pod] = socket.create_connection((self.peers[pod], PORT))
            sock = self._outgoing[pod]
            if sock is not None:
                line = f"{key.kind.value} {key.trace_id} {key.span_id} {value}\n"
                sock.sendall(line.encode())
        except OSError:
            self._outgoing[pod] = None

    def take(self, key: Key) -> str | None:
        """What came under that name, or None if nothing did yet."""
        return self._letters.pop(key, None)

    def wait(self, deadline_ns: int | None) -> bool:
        """Receive until something came or the deadline (CLOCK_MONOTONIC) passed.

        Returns True when a watched fd is readable.
        """
        timeout_s = (
            None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        )
        watched = False
        for entry, _ in self._selector.select(timeout_s):
            if entry.fileobj is self._listener:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                self._incoming.add(sock)
                self._selector.register(sock, selectors.EVENT_READ, _Peer(sock))
            elif isinstance(entry.data, _Peer):
                self._receive(entry.data)
            else:
                watched = True
        return watched

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(peer.sock)
            self._incoming.discard(peer.sock)
            peer.sock.close()
            return
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        for line in lines:
            kind, trace_id, span_id, value = line.decode().split(" ", 3)
            self._letters[Key(Kind(kind), trace_id, span_id)] = value
