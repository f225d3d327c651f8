# SPDX-License-Identifier: Apache-2.0
"""Answers who may not ask, as gRPC would, and without it: its caller reads why, and costs next to nothing.

gRPC gathers what a caller sends before it asks us whether he may. So who may ask nothing never
comes to it. He hears of HTTP/2 (RFC 9113) and its headers (RFC 7541) what one answer needs.
"""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import quote

import grpc

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD_BYTES = 9
_HEADERS, _RST_STREAM, _SETTINGS = 1, 3, 4
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_NO_ERROR = bytes(4)

# All printable ASCII but the percent sign, as gRPC writes grpc-message.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

# For all his calls: a command has one, and hangs up when it is answered.
_PATIENCE_S = 10.0

# In that time. Of data he may send 64 KiB on a connection, since nobody here lets him send more.
_BYTES_MAX = 128 << 10


async def refuse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    status: grpc.StatusCode,
    reason: str,
) -> None:
    """Answer all calls that come, until their caller hangs up, or should have."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            writer.write(_frame(_SETTINGS))
            if await reader.readexactly(len(_PREFACE)) != _PREFACE:
                return
            left = _BYTES_MAX
            while left > 0:
                head = await reader.readexactly(_HEAD_BYTES)
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                await reader.readexactly(min(size, left))
                left -= _HEAD_BYTES + size
                if kind == _HEADERS:
                    number = int.from_bytes(head[5:], "big")
                    writer.write(
                        _frame(_HEADERS, _END_STREAM | _END_HEADERS, number, _said(status, reason))
                        + _frame(_RST_STREAM, 0, number, _NO_ERROR)
                    )
                elif kind == _SETTINGS and not flags & _ACK:
                    writer.write(_frame(_SETTINGS, _ACK))
                await writer.drain()


def _frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def _said(status: grpc.StatusCode, reason: str) -> bytes:
    fields = {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": str(status.value[0]),
        "grpc-message": quote(reason, safe=_PLAIN, errors="replace"),
    }
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields.items())


def _string(text: str) -> bytes:
    """A string literal without Huffman's code (RFC 7541, 5.2), after its length (5.1)."""
    left = len(text) - 127
    if left < 0:
        return bytes((len(text),)) + text.encode()
    length = bytearray((127,))
    while left >= 128:
        length.append(left % 128 | 128)
        left >>= 7
    return bytes((*length, left)) + text.encode()
