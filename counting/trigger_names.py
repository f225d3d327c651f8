# SPDX-License-Identifier: Apache-2.0
"""What triggers are called where something is kept for each name. Without I/O, so that cores can use it."""

from __future__ import annotations

from collections.abc import Container, Iterable

from protocol.messages import SNAPSHOT_TRIGGER

UNUSED_NS = 600_000_000_000
"""A name that nobody fires by for so long, or twice that, gives its place to another. So who
says ever new names has no place that others use."""

OTHER_NAMES = "(other)"
"""Stands for all trigger names over the bound; not a valid name."""


_SNAPSHOTS = f"{SNAPSHOT_TRIGGER}."


class TriggerNames:
    """Bounds the trigger names that have a queue, limits or counters of their own.

    Names are said by processes, so there may be any number. Configured names
    always have their own; of others ``names_max``, the first of those that are in use: which are
    not, ``forget()`` finds out. What is beyond shares OTHER_NAMES, and all snapshots the name of
    their kind.
    """

    def __init__(self, names_max: int, configured: Iterable[str] = ()) -> None:
        self._configured = set(configured)
        self._used: dict[str, bool] = {}  # since forget() was last called
        self._names_max = names_max

    def configure(self, names: Iterable[str]) -> None:
        """Give these names their own; what was counted for others stays there."""
        self._configured.update(names)

    def key(self, trigger: str) -> str:
        """The bounded name under which a trigger counts."""
        # Each has a number of its own, and together they are one kind of trigger.
        if trigger.startswith(_SNAPSHOTS):
            trigger = SNAPSHOT_TRIGGER
        if trigger in self._configured:
            return trigger
        if trigger not in self._used and len(self._used) >= self._names_max:
            return OTHER_NAMES
        self._used[trigger] = True
        return trigger

    def forget(self, held: Container[str] = ()) -> list[str]:
        """The names that were not used since the last time, nor are held: others may have their places."""
        unused = [name for name, used in self._used.items() if not used and name not in held]
        for name in unused:
            del self._used[name]
        self._used = dict.fromkeys(self._used, False)
        return unused
