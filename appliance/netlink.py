# SPDX-License-Identifier: Apache-2.0
"""Sockets of netlink(7), whose messages pyroute2 codes.

Its own sockets want an event loop of theirs since 0.9, and refuse where one runs already.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from appliance.netlink_codecs import NetlinkDecodeError

T = TypeVar("T")

NETLINK_ROUTE, NETLINK_SOCK_DIAG = 0, 4
"""uapi/linux/netlink.h. Python's socket module has them not."""

# uapi/linux/netlink.h: struct nlmsghdr (length, type, flags, sequence number, port), the types
# that end an answer, the flags of who asks for all there is, and the one of an answer that has
# some of before a change, and some of after it.
HEADER = struct.Struct("=IHHII")
_ERROR, _DONE = 2, 3
_REQUEST, _DUMP = 0x1, 0x300
_DUMP_INTR = 0x10

# A machine that starts or ends a hundred containers changes its devices for a second.
_TRIES = 10

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

    def dump(self, kind: int, request: Any, decode: Callable[[bytes], T | None]) -> list[T]:  # noqa: ANN401
        """All that the kernel has of a kind, each decoded; without those that are None.

        OSError if it refuses; InterruptedError if it says each time that something was changed
        meanwhile, so that others may be missing. ``request``: one of pyroute2's messages.
        """
        for _ in range(_TRIES):
            found, is_whole = self._dump_once(kind, request, decode)
            if is_whole:
                return found
        raise InterruptedError(errno.EINTR, "what was asked for changed during each try")

    def _dump_once(
        self,
        kind: int,
        request: Any,  # noqa: ANN401
        decode: Callable[[bytes], T | None],
    ) -> tuple[list[T], bool]:
        self._sequence += 1
        request["header"]["type"] = kind
        request["header"]["flags"] = _REQUEST | _DUMP
        request["header"]["sequence_number"] = self._sequence
        request.encode()
        self._socket.send(request.data)
        found: list[T] = []
        is_whole = True
        while True:
            data = self._socket.recv(_DATAGRAM_BYTES)
            for kind_of_message, flags, sequence, message in _messages(data):
                # Of a dump before, which a signal cut off.
                if sequence != self._sequence:
                    continue
                is_whole = is_whole and not flags & _DUMP_INTR
                if kind_of_message in (_ERROR, _DONE):
                    _raise_if_failed(message)
                    return found, is_whole
                decoded = decode(message)
                if decoded is not None:
                    found.append(decoded)

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

    def changes(self, decode: Callable[[bytes], T | None]) -> list[T]:
        """What came since, at most one datagram. OSError: changes were lost (ENOBUFS)."""
        try:
            data = self._socket.recv(_DATAGRAM_BYTES)
        except BlockingIOError:
            return []
        decoded = [
            decode(message)
            for kind, _, _, message in _messages(data)
            if kind not in (_ERROR, _DONE)
        ]
        return [one for one in decoded if one is not None]


def by_pyroute2(answer: type[Any]) -> Callable[[bytes], Any]:
    """What decodes a message as one of its classes; None if it cannot, as if it is cut off."""

    def decode(message: bytes) -> Any:  # noqa: ANN401
        made = answer(message)
        try:
            made.decode()
        except (NetlinkDecodeError, struct.error):
            return None
        return made

    return decode


def _messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Of each its type, its flags, its sequence number, and itself with its header."""
    offset = 0
    while offset + HEADER.size <= len(data):
        length, kind, flags, sequence, _ = HEADER.unpack_from(data, offset)
        # NLMSG_OK
        if length < HEADER.size or offset + length > len(data):
            return
        yield kind, flags, sequence, data[offset : offset + length]
        # NLMSG_ALIGN
        offset += (length + 3) & ~3


def _raise_if_failed(message: bytes) -> None:
    # The end of a dump may be without (before 2.6.35).
    if len(message) < HEADER.size + 4:
        return
    (negative_errno,) = struct.unpack_from("=i", message, HEADER.size)
    if negative_errno < 0:
        raise OSError(-negative_errno, os.strerror(-negative_errno))
