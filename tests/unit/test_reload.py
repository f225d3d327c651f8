# SPDX-License-Identifier: Apache-2.0
"""Of a changed configuration, what can be taken up is, and the rest is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from config.reload import merge
from config.schema import RELOADABLE, Range, loads


@dataclass(frozen=True, slots=True)
class Inner:
    low: int = 1
    high: int = 2


@dataclass(frozen=True, slots=True)
class Mixed:
    path: str = "a"
    bytes_max: Annotated[int, Range(1, 9), RELOADABLE] = 5


@dataclass(frozen=True, slots=True)
class Example:
    name: str = "n"
    rate: Annotated[float, Range(0, 10), RELOADABLE] = 1.0
    inner: Annotated[Inner, RELOADABLE] = field(default_factory=Inner)
    mixed: Mixed = field(default_factory=Mixed)
    maybe: Annotated[Inner | None, RELOADABLE] = None
    fixed: Inner | None = None
    policies: Annotated[Mapping[str, Inner], RELOADABLE] = field(default_factory=dict)


def test_the_same_changes_nothing() -> None:
    merged = merge(Example(), Example())
    assert (merged.settings, merged.taken, merged.waiting) == (Example(), (), ())


def test_each_key_is_taken_or_waits() -> None:
    wanted = Example(
        "m", 2.0, Inner(3, 4), Mixed("b", 6), Inner(), Inner(), {"x": Inner(), "y": Inner(7)}
    )
    merged = merge(Example(), wanted)
    assert merged.taken == (
        "rate",
        "inner.low",
        "inner.high",
        "mixed.bytes_max",
        "maybe",
        "policies",
    )
    assert merged.waiting == ("name", "mixed.path", "fixed")
    assert merged.settings == Example(
        "n", 2.0, Inner(3, 4), Mixed("a", 6), Inner(), None, {"x": Inner(), "y": Inner(7)}
    )
    # What waits, waits still when it is asked for again.
    again = merge(merged.settings, wanted)
    assert (again.taken, again.waiting) == ((), merged.waiting)


def test_the_mark_is_no_bound() -> None:
    assert loads("rate: 3\nmaybe: {low: 0}", Example, "f") == Example(rate=3.0, maybe=Inner(0))
