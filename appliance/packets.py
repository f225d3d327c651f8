# SPDX-License-Identifier: Apache-2.0
"""The packets by which processes attach (native/src/abi/attach.h), and what stands in them.

Whoever sends them is untrusted: what makes no sense is refused, with a sentence for the
person who runs the application.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

from protocol.messages import cut_utf8
from runtime.printable import printable

ABI_MAGIC = 0x54475342
ABI_VERSION = 2
"""The newest that the node speaks; an older one that it speaks too is what a client of it gets."""

ABI_OLDEST = 2
ABI_FEATURES = 0

_REQUEST = struct.Struct("=IIIiQ2Q64s")
_REPLY = struct.Struct("=IIiI2QQ128sQ")
_NEWS = struct.Struct("=IIQ")
NEWS_CONTEXT = 1
NEWS_POLICY = 2

# Of any version: a magic number and the newest that is spoken.
_OPENING = struct.Struct("=II")

# What version 1 had of a reply. All versions can read a refusal of that size; who is
# refused before it is asked may be of any.
_REPLY_1_BYTES = 168


@dataclass(frozen=True, slots=True)
class Abi:
    """What client and node both speak: the newest common version of the ABI, and feature bits."""

    version: int = ABI_VERSION
    features: int = ABI_FEATURES

    @property
    def is_spoken(self) -> bool:
        """Whether this node speaks it; another one may have agreed on it."""
        return ABI_OLDEST <= self.version <= ABI_VERSION and not self.features & ~ABI_FEATURES


NEWEST = Abi()


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for. ``token`` names an earlier attachment; None: a first one."""

    token: bytes | None
    service: str
    abi: Abi


@dataclass(frozen=True, slots=True)
class Attachment:
    """What it is given. No fds: it may go on with those that it has.

    Its memory is of that ``abi``, whatever node and library could speak later on. ``policy``
    is the fd of the policy table, which stays the host's.
    """

    token: bytes
    abi: Abi
    arena_bytes: int
    policy: int
    fds: tuple[int, ...] = ()

    @property
    def resumed(self) -> bool:
        return not self.fds


class AttachRefused(Exception):
    """An application does not get what it asked for: an errno, and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def parse_request(data: bytes) -> Request:
    """Parse a bs_attach_request; AttachRefused says what is wrong with it."""
    if len(data) < _OPENING.size:
        raise AttachRefused(errno.EPROTO, f"not an attach request: {len(data)} bytes")
    magic, newest = _OPENING.unpack_from(data)
    if magic != ABI_MAGIC:
        raise AttachRefused(errno.EPROTO, f"not an attach request: magic {magic:#x}")
    if newest < ABI_OLDEST:
        raise AttachRefused(
            errno.EPROTONOSUPPORT,
            f"the library speaks ABI {newest}, the node {_window(ABI_OLDEST, ABI_VERSION)}:"
            " update libbacksight",
        )
    if len(data) < _REQUEST.size:
        raise AttachRefused(
            errno.EPROTO, f"not an attach request: {len(data)} bytes instead of {_REQUEST.size}"
        )
    _, _, oldest, _, features, token_hi, token_lo, service = _REQUEST.unpack_from(data)
    if oldest > ABI_VERSION:
        raise AttachRefused(
            errno.EPROTONOSUPPORT,
            f"the library speaks ABI {_window(oldest, newest)}, the node"
            f" {_window(ABI_OLDEST, ABI_VERSION)}: update backsight-node",
        )
    name = printable(service.partition(b"\0")[0].decode(errors="replace"))
    token = struct.pack("=2Q", token_hi, token_lo)
    return Request(
        token if any(token) else None,
        name or "unnamed",
        Abi(min(newest, ABI_VERSION), features & ABI_FEATURES),
    )


def parse_answer(data: bytes) -> int | None:
    """Which context a process says that it uses (bs_attach_news); None if it says anything else."""
    if len(data) < _NEWS.size:
        return None
    magic, kind, number = _NEWS.unpack_from(data)
    return int(number) if (magic, kind) == (ABI_MAGIC, NEWS_CONTEXT) else None


def _window(oldest: int, newest: int) -> str:
    return f"{oldest}" if oldest == newest else f"{oldest} to {newest}"


def pack_reply(attachment: Attachment) -> bytes:
    """Return the bs_attach_reply that goes with its fds, or with none if it is resumed."""
    return _REPLY.pack(
        ABI_MAGIC,
        attachment.abi.version,
        0,
        int(attachment.resumed),
        *struct.unpack("=2Q", attachment.token),
        attachment.arena_bytes,
        b"",
        attachment.abi.features,
    )


def pack_refusal(refused: AttachRefused) -> bytes:
    """Return a bs_attach_reply that a library of any version can read."""
    # 127 bytes, so that a NUL follows; cut between characters.
    message = cut_utf8(refused.message, 127).encode()
    reply = _REPLY.pack(ABI_MAGIC, ABI_VERSION, -refused.status, 0, 0, 0, 0, message, 0)
    return reply[:_REPLY_1_BYTES]


def pack_news(kind: int, number: int) -> bytes:
    """Return a bs_attach_news."""
    return _NEWS.pack(ABI_MAGIC, kind, number)
