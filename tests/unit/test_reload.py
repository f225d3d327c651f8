# SPDX-License-Identifier: Apache-2.0
"""Of a changed configuration, what can be taken up is, and the rest is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest

from runtime.log import Level
from runtime.main import Configuration
from runtime.reload import Merged, merge
from runtime.schema import AT_START, RELOADABLE, ConfigError, InvalidValue, Range, loads


@dataclass(frozen=True, slots=True)
class Inner:
    low: int = 1
    high: int = 2
    fixed: Annotated[int, Range(1, 9), AT_START] = 3


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


def every(_: str) -> bool:
    return True


def test_the_same_changes_nothing() -> None:
    merged = merge(Example(), Example(), every)
    assert merged == Merged(Example(), (), (), ())


def test_each_key_is_taken_or_waits() -> None:
    wanted = Example(
        "m", 2.0, Inner(3, 4, 5), Mixed("b", 6), Inner(), Inner(), {"x": Inner(), "y": Inner(7)}
    )
    merged = merge(Example(), wanted, every)
    assert merged.taken == (
        "rate",
        "inner.low",
        "inner.high",
        "mixed.bytes_max",
        "maybe",
        "policies",
    )
    assert merged.waiting == ("name", "inner.fixed", "mixed.path", "fixed")
    assert merged.settings == Example(
        "n", 2.0, Inner(3, 4), Mixed("a", 6), Inner(), None, {"x": Inner(), "y": Inner(7)}
    )
    # What waits, waits still when it is asked for again.
    again = merge(merged.settings, wanted, every)
    assert (again.taken, again.waiting) == ((), merged.waiting)


def test_keys_of_others_wait_for_nothing() -> None:
    wanted = Example("m", 2.0, Inner(1, 4, 5), Mixed("b", 6))
    merged = merge(Example(), wanted, lambda key: key in ("name", "inner.high", "mixed.bytes_max"))
    assert merged.taken == ("inner.high", "mixed.bytes_max")
    assert merged.waiting == ("name",)
    assert merged.others == ("rate", "inner.fixed", "mixed.path")
    assert merged.settings == Example("n", 2.0, Inner(1, 4, 5), Mixed("b", 6))


@dataclass(frozen=True, slots=True)
class Bounded:
    """The one must stay below the other, which can only be changed by a restart."""

    low: Annotated[int, RELOADABLE] = 1
    high: int = 2

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise InvalidValue("low", f"{self.low} is above high, {self.high}")

    @property
    def level(self) -> Level:
        return Level.INFO

    @staticmethod
    def readers_of(_: str) -> tuple[str, ...]:
        return ("bounded",)


def test_what_does_not_go_with_the_rest_of_the_running_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("low: 5\nhigh: 6\n")
    configuration = Configuration("bounded", Bounded(), path)
    with pytest.raises(ConfigError, match="low: 5 is above high, 2: with the keys that wait"):
        configuration.reload(lambda _: None)
    assert configuration.settings == Bounded()
    path.write_text("low: 2\nhigh: 6\n")
    assert configuration.reload(lambda _: None).settings == Bounded(2, 2)


def test_the_mark_is_no_bound() -> None:
    assert loads("rate: 3\nmaybe: {low: 0}", Example, "f") == Example(rate=3.0, maybe=Inner(0))
