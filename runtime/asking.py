# SPDX-License-Identifier: Apache-2.0
"""Questions of other threads to a daemon's event loop, which has all that is true of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


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
