# SPDX-License-Identifier: Apache-2.0
"""Parameters of a benchmark as the environment has them: each a variable of its name in capitals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_P = TypeVar("_P", bound="DataclassInstance")


def given(
    parameters: _P, environment: Mapping[str, str], value: Callable[[str, str, object], object]
) -> _P:
    """These, with what the environment says.

    ``value`` makes one of a variable's name, its text, and what it would be otherwise; ValueError if
    it cannot be.
    """
    said: dict[str, object] = {}
    for known in fields(parameters):
        name = known.name.upper()
        if text := environment.get(name, ""):
            said[known.name] = value(name, text, getattr(parameters, known.name))
    return replace(parameters, **said)


def whole_number(most: int) -> Callable[[str, str, object], object]:
    """A ``value`` for ``given``: whole numbers from 1 to that."""

    def value(name: str, text: str, _: object) -> int:
        if not text.isdecimal() or not 0 < int(text) <= most:
            raise ValueError(f"{name}={text}: want a whole number from 1 to {most}")
        return int(text)

    return value
