# SPDX-License-Identifier: Apache-2.0
"""Questions of other threads to a daemon's event loop, which has all that is true of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """What ``make`` makes, for all threads that ask: one makes it, who comes meanwhile waits for it.

    It is handed out for ``fresh_s``, then made anew for who asks.
    """

    def __init__(
        self,
        make: Callable[[], T],
        fresh_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._fresh_s = fresh_s
        self._clock = clock
        self._lock = threading.Lock()
        self._made: tuple[T, float] | None = None  # and until when it is handed out

    def get(self) -> T:
        """May be asked for by any thread."""
        with self._lock:
            if self._made is None or self._clock() >= self._made[1]:
                made = self._make()
                self._made = made, self._clock() + self._fresh_s
            return self._made[0]


class Hangs(Exception):
    """The event loop does not answer in time, or is gone."""


def ask_loop(
    loop: asyncio.AbstractEventLoop, ask: Callable[[], Awaitable[T]], timeout_s: float
) -> T:
    """What ``ask`` comes to on the event loop, for another thread; Hangs if it takes too long."""

    async def on_loop() -> T:
        return await ask()

    asked = on_loop()
    try:
        answer = asyncio.run_coroutine_threadsafe(asked, loop)
    except RuntimeError as error:
        asked.close()
        raise Hangs("the daemon ends") from error
    try:
        return answer.result(timeout_s)
    except TimeoutError as error:
        answer.cancel()
        raise Hangs(f"the daemon's event loop did not answer within {timeout_s:g} s") from error
