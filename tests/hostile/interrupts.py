# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, where it must not come between two things that belong together."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block. For the main thread.

    Without it a process may be started that nobody knows of yet, and so nobody ends. What is
    started in the block heeds Ctrl-C as always: a handler is not inherited.
    """
    came = False

    def note(_number: int, _frame: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
