# SPDX-License-Identifier: Apache-2.0
"""A configuration is taken as it stands, or refused with file, line, key, value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from runtime.schema import (
    ConfigError,
    InvalidValue,
    Matching,
    Range,
    Size,
    format_size,
    load,
    loads,
)
from runtime.settings.node import Settings


@dataclass(frozen=True)
class Policy:
    weight: Annotated[float, Range(0.5, 100)] = 1.0
    bytes_per_s: Annotated[int, Size(1, 1 << 40)] | None = None


@dataclass(frozen=True)
class Section:
    low: int = 1
    high: int = 2

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise InvalidValue("low", f"{self.low} is above high, {self.high}")


@dataclass(frozen=True)
class Example:
    name: Annotated[str, Matching("[a-z]+", "lower-case letters")]
    pool_bytes: Annotated[int, Size(1 << 20, 1 << 40)] = 1 << 20
    trust: bool = False
    users: tuple[str, ...] = ()
    ids: tuple[str | int, ...] = ()
    section: Section = field(default_factory=Section)
    policies: Mapping[Annotated[str, Matching("[a-z]+", "lower-case letters")], Policy] = field(
        default_factory=dict
    )


def test_what_is_left_out_has_its_default() -> None:
    assert loads("name: a", Example, "f") == Example("a")


def test_everything_that_can_be_said_is_read() -> None:
    text = """
name: abc
pool_bytes: 64MiB
trust: true
users: [alice, bob]
ids: [alice, 7]
section: {low: 5, high: 6}
policies:
  slow: {weight: 2, bytes_per_s: 1000}
  errors: {bytes_per_s: null}
"""
    assert loads(text, Example, "f") == Example(
        "abc",
        64 << 20,
        True,
        ("alice", "bob"),
        ("alice", 7),
        Section(5, 6),
        {"slow": Policy(2.0, 1000), "errors": Policy()},
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "f:1: name: is missing, and has no default"),
        ("name: A", "f:1: name: A; allowed: lower-case letters"),
        ("name: 12", "f:1: name: 12; allowed: lower-case letters"),
        ("name:", "f:1: name: nothing; allowed: lower-case letters"),
        ("name: [a]", "f:1: name: a list; allowed: lower-case letters"),
        ("name: a\nname: b", "f:2: name: stands in line 1 already"),
        (
            "name: a\npoolbytes: 1",
            "f:2: poolbytes: unknown key; allowed: name, pool_bytes, trust, users, ids, section, policies",
        ),
        (
            "name: a\npool_bytes: 1",
            "1; allowed: 1MiB to 1TiB, as a number of bytes or with KiB, MiB, GiB or TiB",
        ),
        ("name: a\npool_bytes: 64MB", "f:2: pool_bytes: 64MB; allowed: 1MiB to 1TiB"),
        ("name: a\npool_bytes: -5MiB", "f:2: pool_bytes: -5MiB; allowed: 1MiB to 1TiB"),
        ("name: a\npool_bytes: 1.5", "f:2: pool_bytes: 1.5; allowed: 1MiB to 1TiB"),
        ("name: a\npool_bytes: yes", "f:2: pool_bytes: yes; allowed: 1MiB to 1TiB"),
        ("name: a\ntrust: 1", "f:2: trust: 1; allowed: true or false"),
        ("name: a\ntrust: 'true'", "f:2: trust: 'true'; allowed: true or false"),
        ("name: a\nusers: alice", "f:2: users: alice; allowed: a list"),
        ("name: a\nusers:\n- x\n- 7", "f:4: users[1]: 7; allowed: a text"),
        ("name: a\nids:\n- 1.5", "f:3: ids[0]: 1.5; allowed: a text, in quotes"),
        ("name: a\nids:\n- 2020-01-01", "f:3: ids[0]: 2020-01-01; allowed: a text, in quotes"),
        ("name: a\nsection: 1", "f:2: section: 1; allowed: a section with low, high"),
        ("name: a\nsection:\n  low: 3", "f:3: section.low: 3 is above high, 2"),
        ("name: a\nsection:\n  high: 1_0x", "f:3: section.high: 1_0x; allowed: a whole number"),
        ("name: a\npolicies: [x]", "f:2: policies: a list; allowed: a section of names"),
        (
            "name: a\npolicies:\n  Slow: {}",
            "f:3: policies.Slow: Slow; allowed: lower-case letters",
        ),
        (
            "name: a\npolicies:\n  slow:\n    weight: 0.1",
            "f:4: policies.slow.weight: 0.1; allowed: a number from 0.5 to 100",
        ),
        ("name: a\npolicies:\n  slow: {weight: .nan}", "f:3: policies.slow.weight: .nan; allowed"),
        # What YAML 1.1 takes for other numbers than they look like, and what a tag claims.
        ("name: a\npool_bytes: 010485760", "f:2: pool_bytes: 010485760; allowed: 1MiB to"),
        ("name: a\npool_bytes: 010MiB", "f:2: pool_bytes: 010MiB; allowed: 1MiB to"),
        ("name: a\nsection: {high: 1:30}", "high: 1:30; allowed: a whole number, written plainly"),
        ("name: a\nsection: {high: 0x7}", "high: 0x7; allowed: a whole number, written plainly"),
        ("name: a\nsection: {high: 1_0}", "high: 1_0; allowed: a whole number, written plainly"),
        ("name: a\nsection: {high: !!int abc}", "f:2: section.high: abc; allowed: a whole number"),
        ("name: a\ntrust: !!bool maybe", "f:2: trust: maybe; allowed: true or false"),
        ("name: a\npolicies: {slow: {weight: !!float x}}", "weight: x; allowed: a number from"),
        ("name: a\npolicies: {slow: {weight: .inf}}", "weight: .inf; allowed: a number from"),
        ("- a", "f:1: a list; allowed: a section with name"),
        ("name: a\n? [b]\n: c", "f:2: a key is a text"),
        ("name: {", "f:1: no valid YAML"),
        ("name: a\n---\nname: b", "no valid YAML"),
        ("name: \x00", "no valid YAML"),
        ("name: !!python/object:os.system a", "allowed: lower-case letters"),
        ("name: &a [*a]", "f:1: name: a list"),
    ],
)
def test_what_is_wrong_is_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text, Example, "f")
    assert problem in str(caught.value)


def test_quotes_are_not_named_where_they_do_not_help() -> None:
    with pytest.raises(ConfigError, match=r"f:1: name: 7; allowed: lower-case letters$"):
        loads("name: 7", Example, "f")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        loads("name: A\ntrust: 1\nsection:\n  low: x\n  nope: 1", Example, "f")
    assert [problem.split(": ")[0:2] for problem in caught.value.problems] == [
        ["f:1", "name"],
        ["f:2", "trust"],
        ["f:4", "section.low"],
        ["f:5", "section.nope"],
    ]


def test_a_file_that_cannot_be_read_is_a_problem_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load(tmp_path / "absent.yaml", Example)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"binary\.yaml: is no UTF-8 text"):
        load(tmp_path / "binary.yaml", Example)


@given(st.text(max_size=60))
def test_any_text_is_a_configuration_or_a_config_error(text: str) -> None:
    try:
        assert isinstance(loads(text, Example, "f"), Example)
    except ConfigError as error:
        assert error.problems


SCALARS = st.one_of(
    st.from_regex(r"[-+]?[0-9_:.eExob]{1,8}(KiB|MiB)?", fullmatch=True),
    st.sampled_from(["yes", "off", "~", "null", ".nan", "-.inf", "1e3", "!!int", "!!bool", "'"]),
    st.text(max_size=8),
)


@given(st.sampled_from(["pool_bytes", "trust", "section.low", "policies.slow.weight"]), SCALARS)
def test_any_value_of_a_key_is_taken_or_told_by_the_key(key: str, value: str) -> None:
    *sections, last = key.split(".")
    text = "name: a\n" + "".join(f"{'  ' * i}{name}:\n" for i, name in enumerate(sections))
    try:
        loads(f"{text}{'  ' * len(sections)}{last}: {value}\n", Example, "f")
    except ConfigError as error:
        assert all(re.match(r"f:\d+: |f: no valid YAML", problem) for problem in error.problems)


@pytest.mark.parametrize(
    ("text", "weight"),
    [("1e1", 10), ("2.5", 2.5), ("+3", 3), ("3.", 3), ("25e-1", 2.5), (".5", 0.5)],
)
def test_numbers_are_those_of_yaml_1_2(text: str, weight: float) -> None:
    read = loads(f"name: a\npolicies: {{slow: {{weight: {text}}}}}", Example, "f")
    assert read.policies["slow"].weight == weight


@pytest.mark.parametrize("text", ["''", '"a\\0b"'])
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"f:1: socket: .*; allowed: a path"):
        loads(f"socket: {text}", Settings, "f")


@given(st.integers(1, 1 << 40))
def test_sizes_read_as_they_are_written(size_bytes: int) -> None:
    assert Size(1, 1 << 40).admit(format_size(size_bytes)) == size_bytes


def leaves(
    settings: object, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """All keys of a configuration, and their values; not those that hold a list or a mapping."""
    assert is_dataclass(settings)
    for one in fields(settings):
        value = getattr(settings, one.name)
        if is_dataclass(value):
            yield from leaves(value, (*path, one.name))
        elif value is None or isinstance(value, bool | int | float | str):
            yield (*path, one.name), value


def test_a_key_that_is_given_leaves_those_beside_it_as_they_are() -> None:
    """Also where a section has other defaults than those of its kind, as each probe has."""
    keys = dict(leaves(Settings(node="n")))
    assert keys["probes", "run_queue", "record_ms"] == 1.0
    for path, value in keys.items():
        document: object = value
        for name in reversed(path):
            document = {name: document}
        text = yaml.safe_dump({"node": "n", **document}) if isinstance(document, dict) else ""
        assert loads(text, Settings, "f") == Settings(node="n"), path
