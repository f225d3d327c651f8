# SPDX-License-Identifier: Apache-2.0
"""How late a loop is, is told: by the loop's own clock, which these tests set."""

from __future__ import annotations

import asyncio
import contextlib

from runtime.loop_lag import watch_loop


class Clock(asyncio.SelectorEventLoop):
    """A loop with a clock that goes on when nothing else is to be done, or when it is told to."""

    now_s = 100.0

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, *args: object, **kwargs: object) -> asyncio.TimerHandle:
        handle: asyncio.TimerHandle = super().call_at(when, *args, **kwargs)  # type: ignore[arg-type]
        self.call_soon(self._pass_to, when)
        return handle

    def _pass_to(self, when: float) -> None:
        self.now_s = max(self.now_s, when)


def test_a_loop_that_is_held_up_is_late_by_that_and_else_is_not() -> None:
    late: list[float] = []
    loop = Clock()

    def observe(late_s: float) -> None:
        late.append(late_s)
        if len(late) == 2:
            # What a callback does for 3 s after the next timer was set.
            loop.call_soon(lambda: loop.call_soon(lambda: loop._pass_to(loop.now_s + 3.0)))
        if len(late) == 4:
            raise asyncio.CancelledError

    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(watch_loop(observe))
    loop.close()
    assert late == [0.0, 0.0, 3.0, 0.0]
