# SPDX-License-Identifier: Apache-2.0
"""What is to be said on a connection between node and probes (packets.py), whenever it takes it.

A thousand processes that begin or end at once are a thousand packets, of which a socket holds
some 280.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from appliance.probes_packets import send
from runtime.main import die_if_it_fails

UNSENT_MAX = 4096
"""Packets that wait, some with fds: each process that a node may have, a few times over."""


class Outbox:
    """Sends in order. ``failed`` is told, once, that nothing more goes out."""

    def __init__(self, connection: socket.socket, failed: Callable[[OSError], None]) -> None:
        self._socket = connection
        self._on_failure = failed
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[dict[str, Any], list[int]]] = deque()
        self._has_failed = False

    @property
    def is_empty(self) -> bool:
        """Whether all is sent."""
        return not self._unsent

    def close(self) -> None:
        """Forget what is not sent yet. Before the connection is closed."""
        self._has_failed = True
        self._loop.remove_writer(self._socket)
        while self._unsent:
            _close(self._unsent.popleft()[1])

    def say(self, said: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send at once, or in its turn. The caller closes fds."""
        if self._has_failed:
            return
        try:
            if self._unsent:
                self._keep(said, fds)
            else:
                self._send_or_keep(said, fds)
        except OSError as error:
            self._fail(error)

    def _send_or_keep(self, said: dict[str, Any], fds: Sequence[int]) -> None:
        try:
            send(self._socket, said, fds)
        except BlockingIOError:
            self._keep(said, fds)
            self._loop.add_writer(self._socket, self._writable)

    def _keep(self, said: dict[str, Any], fds: Sequence[int]) -> None:
        if len(self._unsent) >= UNSENT_MAX:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        kept: list[int] = []
        try:
            kept.extend(os.dup(fd) for fd in fds)
        except OSError:
            _close(kept)
            raise
        self._unsent.append((said, kept))

    @die_if_it_fails
    def _writable(self) -> None:
        try:
            while self._unsent:
                send(self._socket, *self._unsent[0])
                _close(self._unsent.popleft()[1])
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
            return
        self._loop.remove_writer(self._socket)

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        self._loop.remove_writer(self._socket)
        self._on_failure(error)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
