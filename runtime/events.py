# SPDX-License-Identifier: Apache-2.0
"""Waits for an event, but not for ever."""

from __future__ import annotations

import asyncio


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event that long at most; whether it was set.

    Not by asyncio.wait_for(): until Python 3.12 it drops a cancellation that comes when the event
    was just set (python/cpython#86296), and whoever cancelled waits for ever.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
