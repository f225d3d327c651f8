# SPDX-License-Identifier: Apache-2.0
"""What others can bring about as often as they like, and the log says seldom."""

from __future__ import annotations

from collections.abc import Hashable

_AGAIN_S = 3600.0

# A user and a reason each; more users than that tell an operator nothing more.
_MAX = 64


class Seldom:
    """Lets each thing through once an hour, and at most so many things."""

    def __init__(self) -> None:
        self._let_through: set[Hashable] = set()
        self._until_s = 0.0

    def is_due(self, what: Hashable, now_s: float) -> bool:
        """Whether to say this now."""
        if now_s >= self._until_s:
            self._let_through.clear()
            self._until_s = now_s + _AGAIN_S
        if what in self._let_through or len(self._let_through) >= _MAX:
            return False
        self._let_through.add(what)
        return True
