# SPDX-License-Identifier: Apache-2.0
"""Which part of a changed configuration a running daemon can take up.

Keys say so themselves, in the schema: ``RELOADABLE`` stands beside the type of a
key, or of a whole section; ``AT_START`` beside that of a key in such a section that is not.
"""

# ruff: noqa: ANN401 (settings are any dataclass)

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from runtime.schema import AT_START, RELOADABLE

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Merged(Generic[T]):
    """What is in force from now on: keys ``taken`` are new, those that ``wait`` for a restart as before.

    ``others`` are new too, and are none of this daemon's.
    """

    settings: T
    taken: tuple[str, ...]
    waiting: tuple[str, ...]
    others: tuple[str, ...]


def merge(running: T, wanted: T, is_own: Callable[[str], bool]) -> Merged[T]:
    """The running settings, with all of the wanted ones that can be taken up now."""
    taken: list[str] = []
    waiting: list[str] = []
    others: list[str] = []

    def section(before: Any, after: Any, key: str, *, reloadable: bool) -> Any:
        hints = typing.get_type_hints(type(before), include_extras=True)
        changes = {}
        for field in dataclasses.fields(before):
            old, new = getattr(before, field.name), getattr(after, field.name)
            if old == new:
                continue
            path = f"{key}{field.name}"
            marks = getattr(hints[field.name], "__metadata__", ())
            may = (reloadable or RELOADABLE in marks) and AT_START not in marks
            if dataclasses.is_dataclass(old) and dataclasses.is_dataclass(new):
                changes[field.name] = section(old, new, f"{path}.", reloadable=may)
            elif not is_own(path):
                others.append(path)
                changes[field.name] = new
            elif may:
                taken.append(path)
                changes[field.name] = new
            else:
                waiting.append(path)
        return dataclasses.replace(before, **changes)

    settings = section(running, wanted, "", reloadable=False)
    return Merged(settings, tuple(taken), tuple(waiting), tuple(others))
