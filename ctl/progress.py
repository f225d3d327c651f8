# SPDX-License-Identifier: Apache-2.0
"""How far something is, for who waits for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

_WIDTH = 40
_LINE_EVERY_PERCENT = 20


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[float, str], None]]:
    """A bar on the terminal; a line now and then where there is none.

    What it gives draws a share, from 0 to 1, and a few words.
    """
    is_terminal = sys.stderr.isatty()
    last_percent = -1

    def draw(share: float, words: str) -> None:
        nonlocal last_percent
        percent = int(100 * share)
        text = f"{percent:3d} %  {words}"
        if is_terminal:
            done = _WIDTH * percent // 100
            sys.stderr.write(f"\r  [{'#' * done}{'.' * (_WIDTH - done)}] {text} ")
            sys.stderr.flush()
        elif percent // _LINE_EVERY_PERCENT != last_percent // _LINE_EVERY_PERCENT:
            sys.stderr.write(f"  {text}\n")
        last_percent = percent

    yield draw
    if is_terminal:
        sys.stderr.write("\n")
