# SPDX-License-Identifier: Apache-2.0
"""What triggers are called where something is kept for each name. Without I/O, so that cores can use it."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.messages import SNAPSHOT_TRIGGER

OTHER_NAMES = "(other)"
"""Stands for all trigger names over the bound; not a valid name."""


_SNAPSHOTS = f"{SNAPSHOT_TRIGGER}."


class TriggerNames:
    """Bounds the trigger names that have a queue, limits or counters of their own.

    Names are said by processes, so there may be any number. Configured names
    always have their own; of others the first ``names_max``. What is beyond
    shares OTHER_NAMES, and all snapshots the name of their kind.
    """

    def __init__(self, names_max: int, configured: Iterable[str] = ()) -> None:
        self._own = set(configured)
        self._left = names_max

    def configure(self, names: Iterable[str]) -> None:
        """Give these names their own; what was counted for others stays there."""
        self._own.update(names)

    def key(self, trigger: str) -> str:
        """The bounded name under which a trigger counts."""
        # Each has a number of its own, and together they are one kind of trigger.
        if trigger.startswith(_SNAPSHOTS):
            trigger = SNAPSHOT_TRIGGER
        if trigger in self._own:
            return trigger
        if self._left == 0:
            return OTHER_NAMES
        self._left -= 1
        self._own.add(trigger)
        return trigger
