# SPDX-License-Identifier: Apache-2.0
"""Sockets of netlink(7), whose messages pyroute2 codes.

Its own sockets want an event loop of theirs since 0.9, and refuse where one runs already.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from pyroute2.netlink.exceptions import NetlinkDecodeError

# uapi/linux/netlink.h: struct nlmsghdr (length, type, flags, sequence number, port), the types
# that end an answer, and the flags of who asks for all there is.
_HEADER = struct.Struct("=IHHII")
_ERROR, _DONE = 2, 3
_REQUEST, _DUMP = 0x1, 0x300

# The kernel sends at most 32 KiB at once of an answer (af_netlink.c), and one device at a time.
_DATAGRAM_BYTES = 64 * 1024


class NetlinkSocket:
    """Use as ``with``, from one thread at a time. ``groups``: of whose changes it is told."""

    def __init__(self, protocol: int, groups: int = 0) -> None:
        # Who is told of changes must not wait for one; a dump comes when it is asked for.
        kind = socket.SOCK_RAW | (socket.SOCK_NONBLOCK if groups else 0)
        self._socket = socket.socket(socket.AF_NETLINK, kind, protocol)
        try:
            self._socket.bind((0, groups))
        except OSError:
            self._socket.close()
            raise
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Readable when there is a change."""
        return self._socket.fileno()

    def dump(self, kind: int, request: Any, answer: type[Any]) -> list[Any]:  # noqa: ANN401
        """All that the kernel has of a kind, each an ``answer`` of pyroute2. OSError if it refuses.

        What is changed meanwhile may be missing, or there twice (NLM_F_DUMP_INTR).
        """
        self._sequence += 1
        request["header"]["type"] = kind
        request["header"]["flags"] = _REQUEST | _DUMP
        request["header"]["sequence_number"] = self._sequence
        request.encode()
        self._socket.send(request.data)
        found: list[Any] = []
        while True:
            data = self._socket.recv(_DATAGRAM_BYTES)
            for offset, kind_of_message, sequence in _messages(data):
                # Of a dump before, which a signal cut off.
                if sequence != self._sequence:
                    continue
                if kind_of_message in (_ERROR, _DONE):
                    _raise_if_failed(data, offset)
                    return found
                found += _decoded(answer, data, offset)

    def forget(self) -> None:
        """Leave out the changes that came until now, and that some were lost. OSError."""
        while True:
            try:
                self._socket.recv(_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise

    def changes(self, answer: type[Any]) -> list[Any]:
        """What came since, at most one datagram. OSError: changes were lost (ENOBUFS)."""
        try:
            data = self._socket.recv(_DATAGRAM_BYTES)
        except BlockingIOError:
            return []
        return [
            message
            for offset, kind, _ in _messages(data)
            if kind not in (_ERROR, _DONE)
            for message in _decoded(answer, data, offset)
        ]


def _messages(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Where each begins, its type and its sequence number."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
        # NLMSG_OK
        if length < _HEADER.size or offset + length > len(data):
            return
        yield offset, kind, sequence
        # NLMSG_ALIGN
        offset += (length + 3) & ~3


def _decoded(answer: type[Any], data: bytes, offset: int) -> list[Any]:
    """One; none if pyroute2 cannot, as of a kind that it has not heard of."""
    message = answer(data, offset=offset)
    try:
        message.decode()
    except (NetlinkDecodeError, struct.error):
        return []
    return [message]


def _raise_if_failed(data: bytes, offset: int) -> None:
    # The end of a dump may be without (before 2.6.35).
    if len(data) < offset + _HEADER.size + 4:
        return
    (negative_errno,) = struct.unpack_from("=i", data, offset + _HEADER.size)
    if negative_errno < 0:
        raise OSError(-negative_errno, os.strerror(-negative_errno))
