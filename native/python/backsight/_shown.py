# SPDX-License-Identifier: Apache-2.0
"""Which trace each thread works on, for who watches threads from outside: the node's probes.

A thread shows one handle at a time (``bs_show``). What a block of code works on it shows until
the block ends, and then again what it showed before. In asyncio blocks of many tasks interleave on
one thread, so there a context variable says what the task works on, and each step of the loop
shows what its task's context says. Between two steps, while the loop waits, it shows nothing.

Loops that are not asyncio's own (uvloop) run steps that nobody can follow from Python: their
threads show nothing, which is better than a trace that they have left.
"""

from __future__ import annotations

import sys
import threading
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, TypeAlias

from backsight._native import ffi, lib

if TYPE_CHECKING:
    from backsight._native import CData

Before: TypeAlias = "tuple[int, CData | None, Token[CData | None] | None]"
"""What leave() needs: the thread, what it showed, and where the task's variable was set."""


class _Thread(threading.local):
    handle: CData | None = None


_thread = _Thread()
_of_task: ContextVar[CData | None] = ContextVar("backsight.shown", default=None)


def _show(handle: CData | None) -> None:
    _thread.handle = handle
    # One that is closed by now shows nothing.
    lib.bs_show(ffi.NULL if handle is None else handle)


def enter(handle: CData) -> Before | None:
    """What this thread or task does from here on it does for this trace; None: as before."""
    if _thread.handle is handle:
        return None
    token: Token[CData | None] | None = None
    # Who has not imported asyncio need not pay for it.
    events = sys.modules.get("asyncio.events")
    if events is not None and (loop := events._get_running_loop()) is not None:
        if not isinstance(loop, sys.modules["asyncio"].BaseEventLoop):
            return None
        token = _of_task.set(handle)
        if _follow_steps(events):
            # In the midst of a step whose end nobody sees.
            return (threading.get_ident(), None, token)
    before = (threading.get_ident(), _thread.handle, token)
    _show(handle)
    return before


def leave(before: Before) -> None:
    """The end of what began with enter(): also in another thread or task, where it changes nothing."""
    ident, handle, token = before
    if token is not None:
        try:
            _of_task.reset(token)
        except ValueError:  # another task's, or a generator's that the loop finalises
            return
        _show(_of_task.get())
    elif ident == threading.get_ident():
        _show(handle)


def _follow_steps(events: Any) -> bool:  # noqa: ANN401 # the module
    """Have each step of asyncio's loops show what it works on; False: they do already."""
    run = events.Handle._run
    if hasattr(run, "followed"):
        return False

    def followed(self: Any) -> None:  # noqa: ANN401 # asyncio.Handle
        handle = self._context.get(_of_task)
        if handle is not None:
            _show(handle)
        try:
            run(self)
        finally:
            if _thread.handle is not None:
                _show(None)

    followed.followed = run  # type: ignore[attr-defined]
    events.Handle._run = followed
    return True
