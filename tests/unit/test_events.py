# SPDX-License-Identifier: Apache-2.0
"""Waits for events, that are cancelled at any moment."""

from __future__ import annotations

import asyncio

import pytest

from runtime.events import is_set_within

FOREVER_S = 86400.0


def test_it_tells_whether_the_event_was_set() -> None:
    async def both() -> tuple[bool, bool]:
        event = asyncio.Event()
        late = await is_set_within(event, 0.0)
        event.set()
        return late, await is_set_within(event, FOREVER_S)

    assert asyncio.run(both()) == (False, True)


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_right_after_the_event_is_heeded(turns: int) -> None:
    """Whatever turn of the event loop it comes in until the wait is over."""

    async def waits(event: asyncio.Event) -> None:
        while True:
            await is_set_within(event, FOREVER_S)
            event.clear()

    async def cancelled() -> bool:
        event = asyncio.Event()
        waiting = asyncio.ensure_future(waits(event))
        await asyncio.sleep(0)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        # More turns than it takes to be cancelled where it waits.
        for _ in range(5):
            await asyncio.sleep(0)
        was_heeded = waiting.cancelled()
        while not waiting.done():
            waiting.cancel()
            await asyncio.sleep(0)
        return was_heeded

    assert asyncio.run(cancelled())
