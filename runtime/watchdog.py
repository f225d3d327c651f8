# SPDX-License-Identifier: Apache-2.0
"""Tells the service manager that the daemon lives, which is only so while all its threads do.

Each thread is asked for a sign, and gives it when it next passes through its loop, so that none is
waked for it more often than the service manager wants to hear. Without a watchdog nothing happens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

from runtime.events import is_set_within
from runtime.log import Log, MessageId
from runtime.service_manager import ServiceManager

Ask: TypeAlias = Callable[[Callable[[], None]], None]
"""Asks a thread for a sign: it shall call the argument when it passes, in whatever thread."""


async def sign_of(ask: Ask) -> None:
    """Return when a thread has given its sign."""
    loop = asyncio.get_running_loop()
    sign = asyncio.Event()

    def give() -> None:
        # The loop may be closed already when the thread passes for the last time.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(sign.set)

    ask(give)
    await sign.wait()


async def watch(manager: ServiceManager, threads: Mapping[str, Ask], log: Log) -> None:
    """Until cancelled, tell the manager twice in its time that this loop and these threads live.

    There may be no thread beside the loop's.
    """
    interval_s = manager.watchdog_s / 2 if manager.watchdog_s else None
    if interval_s is None:
        return
    while True:
        waiting = {
            asyncio.ensure_future(sign_of(ask)): f"the {name} thread"
            for name, ask in threads.items()
        }
        try:
            late: set[asyncio.Task[None]] = set()
            if waiting:
                _, late = await asyncio.wait(waiting, timeout=interval_s)
            if late:
                names = ", ".join(sorted(waiting[sign] for sign in late))
                log.error(
                    f"{names} did not move for {interval_s:g} s; as long as that lasts, the service"
                    " manager is not told that the daemon lives",
                    message_id=MessageId.HANGS,
                )
                await asyncio.wait(late)
        finally:
            for sign in waiting:
                sign.cancel()
        manager.alive()
        await asyncio.sleep(interval_s)


async def report(
    manager: ServiceManager,
    status: Callable[[], str],
    news: asyncio.Event,
    interval_s: float = 10.0,
    settle_s: float = 0.2,
) -> None:
    """Until cancelled, tell the manager how the daemon is, in a line, if that has changed.

    Soon after ``news`` is set, since more may come with it, and now and then.
    """
    told = ""
    while manager.is_there:
        news.clear()
        text = status()
        if text != told:
            told = text
            manager.status(text)
        if await is_set_within(news, interval_s):
            await asyncio.sleep(settle_s)
