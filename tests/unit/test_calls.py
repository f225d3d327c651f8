# SPDX-License-Identifier: Apache-2.0
"""Questions to the reading process: all of the answer comes, or why not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator

import pytest

from coordinator.calls import Answers, Call, Feed, Refused, ask, serve
from protocol.messages import TraceId

# More than the kernel takes of a message that nobody reads.
LARGE_BYTES = 4 << 20


class Process:
    """Where calls are answered, in this one."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.tasks: list[asyncio.Task[None]] = []

    def pass_on(self, call: Call, theirs: socket.socket) -> None:
        self.tasks.append(asyncio.ensure_future(serve(theirs.dup(), call, self._answers)))

    def ask(self, question: bytes = b"", feed: Feed | None = None) -> AsyncGenerator[bytes, None]:
        return ask(self.pass_on, Call("Any", question), feed)


def test_all_answers_come_however_long_and_then_their_end() -> None:
    async def answers(call: Call, _: Feed) -> AsyncGenerator[bytes, None]:
        assert call == Call("Any", b"how many?")
        yield b""
        yield bytes(LARGE_BYTES)
        yield b"last"

    async def run() -> None:
        process = Process(answers)
        sizes = [len(answer) async for answer in process.ask(b"how many?")]
        assert sizes == [0, LARGE_BYTES, 4]
        await asyncio.gather(*process.tasks)

    asyncio.run(run())


def test_the_end_comes_to_who_reads_slowly() -> None:
    piece, pieces = bytes(40 << 10), 12

    async def answers(_: Call, __: Feed) -> AsyncGenerator[bytes, None]:
        for _piece in range(pieces):
            yield piece

    async def run() -> None:
        process = Process(answers)
        asked = process.ask()
        assert await anext(asked) == piece
        for _ in range(1000):
            await asyncio.sleep(0)  # all is said by then that the kernel takes
        assert [answer async for answer in asked] == [piece] * (pieces - 1)

    asyncio.run(run())


def test_a_refusal_comes_after_what_was_answered() -> None:
    async def answers(_: Call, __: Feed) -> AsyncGenerator[bytes, None]:
        yield b"first"
        raise Refused("NOT_FOUND", "it was here")

    async def run() -> None:
        asked = Process(answers).ask()
        assert await anext(asked) == b"first"
        with pytest.raises(Refused, match="it was here") as refused:
            await anext(asked)
        assert refused.value.code == "NOT_FOUND"

    asyncio.run(run())


def test_an_end_without_a_word_is_no_end_of_the_answers() -> None:
    async def answers(_: Call, __: Feed) -> AsyncGenerator[bytes, None]:
        yield b"first"
        raise OSError("the disk is gone")

    async def run() -> None:
        process = Process(answers)
        asked = process.ask()
        assert await anext(asked) == b"first"
        with pytest.raises(Refused, match="ask again"):
            await anext(asked)
        with pytest.raises(OSError, match="the disk is gone"):
            await process.tasks[0]

    asyncio.run(run())


def test_who_cannot_hand_a_call_over_says_so() -> None:
    def full(_: Call, __: socket.socket) -> None:
        raise BlockingIOError

    async def run() -> None:
        with pytest.raises(Refused, match="ask again") as refused:
            await anext(ask(full, Call("Any", b"")))
        assert refused.value.code == "UNAVAILABLE"

    asyncio.run(run())


def test_who_is_gone_is_answered_no_more() -> None:
    ended = asyncio.Event()

    async def answers(_: Call, __: Feed) -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def run() -> None:
        process = Process(answers)
        asked = process.ask()
        assert await anext(asked) == b"first"
        await asked.aclose()
        await ended.wait()
        await asyncio.gather(*process.tasks)

    asyncio.run(run())


def test_a_call_is_fed_as_fast_as_it_looks() -> None:
    traces = [TraceId(number.to_bytes(16, "big")) for number in range(10_000)]

    async def answers(_: Call, feed: Feed) -> AsyncGenerator[bytes, None]:
        for _trace in traces:
            yield await feed.get()

    async def run() -> None:
        feed = Feed(len(traces))
        for trace in traces:
            feed.put_nowait(trace)
        assert [answer async for answer in Process(answers).ask(feed=feed)] == traces

    asyncio.run(run())
