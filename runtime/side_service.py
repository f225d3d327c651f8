# SPDX-License-Identifier: Apache-2.0
"""What a daemon serves beside its work, and does without for as long as it cannot."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from runtime.log import Log

# Of a port that somebody else has, or an address that this machine has not yet.
_AGAIN_S = 5.0


_Made: TypeAlias = (
    "contextlib.AbstractContextManager[object] | contextlib.AbstractAsyncContextManager[object]"
)


@contextlib.asynccontextmanager
async def side_service(
    make: Callable[[], _Made],
    log: Log,
    again_s: float = _AGAIN_S,
) -> AsyncIterator[None]:
    """Enter what ``make`` makes; if that raises OSError, now and then again while this is entered.

    A daemon that ended for it would lose more: anybody on the machine can take a port.
    """
    async with contextlib.AsyncExitStack() as entered:
        why = await _try(make, entered)
        if why is None:
            yield
            return
        log.error(f"{why}; does without, and tries again every {again_s:g} s")

        async def try_again() -> None:
            failed: OSError | None = why
            while failed is not None:
                await asyncio.sleep(again_s)  # nothing tells when
                failed = await _try(make, entered)
            log.info(f"serves now what it could not: {why}")

        trying = asyncio.ensure_future(try_again())
        try:
            yield
        finally:
            trying.cancel()
            await asyncio.gather(trying, return_exceptions=True)


async def _try(make: Callable[[], _Made], entered: contextlib.AsyncExitStack) -> OSError | None:
    try:
        made = make()
        if isinstance(made, contextlib.AbstractAsyncContextManager):
            await entered.enter_async_context(made)
        else:
            entered.enter_context(made)
    except OSError as error:
        return error
    return None
