# SPDX-License-Identifier: Apache-2.0
"""A question to the reading process, and its answers, each call on a socket of its own.

The coordinator makes a pair of stream sockets, and hands one of them over with the question
(``Call``). What is on it then:

    the reading process says          the coordinator says
    kind, length, an answer; any      what the call is fed with, if it is: traces, 16 bytes each
    number of them, and last          nothing any more: the caller is gone, the call is given up
    kind, length, why there are
    no more, or nothing if that
    was all

A socket that ends before that says that the process ended. Both read as fast as they get rid
of it, so the kernel's buffers are all that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from protocol.messages import TraceId

_TRACE_ID_BYTES = 16

# The kind, and how many bytes follow.
_FRAME = struct.Struct("=BI")

# Traces with which a call is fed, that it has not looked at yet; the rest waits at who feeds it.
_FED_MAX = 64


class _Kind(enum.IntEnum):
    ANSWER = 1
    REFUSED = 2
    END = 3


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked: the name of a question, and what it says, as on the wire."""

    method: str
    question: bytes


class Refused(Exception):
    """There is no answer. ``code`` is the name of a gRPC status, the message is for who asked."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class Feed(asyncio.Queue[TraceId]):
    """The traces with which a call is fed."""


Answers = Callable[[Call, Feed], AsyncGenerator[bytes, None]]
"""Answers a call; Refused if it cannot."""


# ---------------------------------------------------------- in the coordinator


async def ask(
    pass_on: Callable[[Call, socket.socket], None],
    call: Call,
    feed: Feed | None = None,
) -> AsyncGenerator[bytes, None]:
    """The answers to a call; Refused says why there are no more.

    ``pass_on`` hands the call and its socket over, or raises OSError. Closing this gives the
    call up.
    """
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as opened:
        opened.callback(ours.close)
        with theirs:
            try:
                pass_on(call, theirs)
            except OSError as error:
                raise Refused("UNAVAILABLE", _GONE) from error
        reader, writer = await asyncio.open_connection(sock=ours)
        opened.callback(writer.close)
        if feed is not None:
            feeding = asyncio.ensure_future(_feed(writer, feed))
            opened.callback(feeding.cancel)
        while True:
            try:
                kind, length = _FRAME.unpack(await reader.readexactly(_FRAME.size))
                data = await reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise Refused("UNAVAILABLE", _GONE) from error
            if kind == _Kind.END:
                return
            if kind == _Kind.REFUSED:
                raise Refused(*json.loads(data))
            yield data


_GONE = "the process that reads the store has just ended, and is begun again: ask again"


async def _feed(writer: asyncio.StreamWriter, feed: Feed) -> None:
    with contextlib.suppress(ConnectionError):  # the reader says so
        while True:
            writer.write(await feed.get())
            await writer.drain()


# -------------------------------------------------------------- in the process


async def serve(theirs: socket.socket, call: Call, answers: Answers) -> None:
    """Answer one call on the socket that came with it, until its end or that of who asks.

    What the answers raise but Refused is raised here, and ends the call without a word.
    """
    reader, writer = await asyncio.open_connection(sock=theirs)
    fed = Feed(_FED_MAX)
    answering = asyncio.ensure_future(_answer(writer, answers(call, fed)))
    hearing = asyncio.ensure_future(_hear(reader, fed))
    try:
        await asyncio.wait({answering, hearing}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
    finally:
        for task in answering, hearing:
            task.cancel()
        await asyncio.gather(answering, hearing, return_exceptions=True)
        writer.transport.abort()


async def _hear(reader: asyncio.StreamReader, fed: Feed) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            await fed.put(TraceId(await reader.readexactly(_TRACE_ID_BYTES)))


async def _answer(writer: asyncio.StreamWriter, answers: AsyncIterator[bytes]) -> None:
    with contextlib.suppress(ConnectionError):  # nobody waits for it any more
        try:
            async for answer in answers:
                _write(writer, _Kind.ANSWER, answer)
                await writer.drain()
        except Refused as refused:
            _write(writer, _Kind.REFUSED, json.dumps([refused.code, str(refused)]).encode())
        else:
            _write(writer, _Kind.END, b"")
        writer.close()
        await writer.wait_closed()  # until all is out


def _write(writer: asyncio.StreamWriter, kind: _Kind, data: bytes) -> None:
    writer.write(_FRAME.pack(kind, len(data)) + data)
