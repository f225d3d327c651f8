# SPDX-License-Identifier: Apache-2.0
"""runtime/threads.py: whoever waits for a thread goes on when that has ended, not before."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from runtime.threads import in_thread


def test_what_it_returns_or_raises_comes_back() -> None:
    async def run() -> None:
        assert await in_thread(int, "7") == 7
        with pytest.raises(ValueError, match="seven"):
            await in_thread(int, "seven")

    asyncio.run(run())


@pytest.mark.parametrize("times", [1, 2, 3])
def test_who_is_cancelled_waits_for_the_end_however_often(times: int) -> None:
    """And what the thread raises then is nobody's, and is not told."""
    begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        may_end.wait()
        has_ended.set()
        raise ValueError("too late")

    async def run() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        waits = asyncio.ensure_future(in_thread(call))
        await asyncio.to_thread(begun.wait)
        for _ in range(times):
            waits.cancel()
            # Turns enough to be woken up, and to wait again.
            for _ in range(4):
                await asyncio.sleep(0)
        is_early = waits.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert not is_early
        assert has_ended.is_set()
        del waits
        gc.collect()
        assert told == []

    asyncio.run(run())
