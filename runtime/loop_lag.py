# SPDX-License-Identifier: Apache-2.0
"""How late an event loop is: whatever it does for long, all else waits for.

Of one timer a second, so the share of them that are late is the share of time in which the loop
does not turn, whatever keeps it: a long callback, another thread with the interpreter, a
machine that gives it no CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_EVERY_S = 1.0

LAG_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


async def watch_loop(observe: Callable[[float], None], every_s: float = _EVERY_S) -> None:
    """Until cancelled, tell how many seconds late each timer fires."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, loop.time() - due_s))
