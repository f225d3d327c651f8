# SPDX-License-Identifier: Apache-2.0
"""A stream that a peer opened: what waits to be sent, and how the stream ends.

gRPC puts no bound to what a peer does not read, nor to how long it says nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine

import grpc

# What waits for a node which does not read; then it is dropped, the stream ends,
# and the node will be told again on the next one. Ten times what a node is told
# that comes back to a coordinator full of its traces.
WAITING_BYTES_MAX = 32 << 20

# How long a message may take to be sent: a node that is alive, so that pings are
# answered, and does not read gets no longer than one that vanished.
UNREAD_TIMEOUT_S = 60.0

# For a peer to say who it is. Until then nobody misses it.
GREETING_TIMEOUT_S = 10.0


class Unread(Exception):
    """A peer does not read what it is sent."""


class Outgoing:
    """What waits to be sent on one stream."""

    def __init__(self) -> None:
        self._items: deque[bytes] = deque()
        self.waiting_bytes = 0
        self._changed = asyncio.Event()
        self._ended = False
        self._overflowed = False
        self._writing_since_s: float | None = None
        self._late = False
        self._watch: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None

    def put(self, item: bytes) -> None:
        """Queue a message. One too many drops them all, and ends the stream."""
        self._changed.set()
        self._overflowed = self._overflowed or self.waiting_bytes + len(item) > WAITING_BYTES_MAX
        if self._overflowed:
            self._drop()
        else:
            self._items.append(item)
            self.waiting_bytes += len(item)

    def end(self) -> None:
        """Let the stream end after what is queued."""
        self._ended = True
        self._changed.set()

    def end_within(self, after_s: float) -> None:
        """Let the stream end then at the latest."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(after_s, self.end)

    def _drop(self) -> None:
        self._items.clear()
        self.waiting_bytes = 0

    async def send_all(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Send until the end. Unread if the peer reads too little, or too late."""
        task = asyncio.current_task()
        assert task is not None
        try:
            while True:
                while self._items:
                    item = self._items.popleft()
                    self.waiting_bytes -= len(item)
                    await self._write(context, item, task)
                if self._overflowed:
                    raise Unread
                if self._ended:
                    return
                self._changed.clear()
                await self._changed.wait()
        except asyncio.CancelledError:
            if self._late and not task.uncancel():
                self._drop()
                raise Unread from None
            raise
        finally:
            for timer in (self._watch, self._ending):
                if timer is not None:
                    timer.cancel()

    async def _write(
        self,
        context: grpc.aio.ServicerContext[bytes, bytes],
        item: bytes,
        task: asyncio.Task[None],
    ) -> None:
        # One timer for many messages: nearly all are taken at once, and a timer for each is
        # a tenth of what sending it costs.
        loop = task.get_loop()
        self._writing_since_s = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(UNREAD_TIMEOUT_S, self._look, task)
        await context.write(item)
        self._writing_since_s = None

    def _look(self, task: asyncio.Task[None]) -> None:
        """End the task if its message takes too long; if it may yet, look again then."""
        self._watch = None
        if self._writing_since_s is None:
            return
        loop = task.get_loop()
        left_s = self._writing_since_s + UNREAD_TIMEOUT_S - loop.time()
        if left_s > 0:
            self._watch = loop.call_later(left_s, self._look, task)
        else:
            self._late = True
            task.cancel()


async def first(requests: AsyncIterator[bytes]) -> bytes | None:
    """The message by which a peer says who it is; None if it ended instead, TimeoutError if neither."""
    async with asyncio.timeout(GREETING_TIMEOUT_S):
        return await anext(requests, None)


async def converse(
    context: grpc.aio.ServicerContext[bytes, bytes],
    outgoing: Outgoing,
    receiver: Coroutine[None, None, None],
) -> bool:
    """Run both halves of a stream. It ends when all is sent; the receiver's errors end it too.

    False: the peer does not read.
    """
    sending = asyncio.ensure_future(outgoing.send_all(context))
    receiving = asyncio.ensure_future(receiver)
    try:
        await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
        if receiving.done():
            receiving.result()
        await sending
    except Unread:
        return False
    finally:
        sending.cancel()
        receiving.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)
    return True
