# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM, where they must not come between two things that belong together."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_ENDS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """What ends a program waits for the end of the block. For the main thread.

    Without it a process may be started that nobody knows of yet, and so nobody ends. What is
    started in the block heeds these signals as always: a handler is not inherited.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda one, _: came.append(one)) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
