# SPDX-License-Identifier: Apache-2.0
"""The example configurations say of every key what the schema says."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

import runtime.settings.coordinator
import runtime.settings.node
from runtime.schema import AT_START, OR_NULL, RELOADABLE, ConfigError, allowed_words, load, loads

EXAMPLES = {
    "node.yaml": runtime.settings.node.Settings,
    "coordinator.yaml": runtime.settings.coordinator.Settings,
}

# A key that is commented out: "#" and no blank, or more than one.
KEY = re.compile(r"#(?! \S)( *)([\w.-]+):(.*)")

EXAMPLE = "(example)"


@dataclass(frozen=True)
class Documented:
    """A key of an example, what stands before it, and in which line it is."""

    words: str
    line: int


@dataclass(frozen=True)
class Key:
    """A key of a schema; ``allowed`` in words, None for a section."""

    path: str
    allowed: str | None
    reloadable: bool


def documented(text: str) -> dict[str, Documented]:
    """All keys of an example by their path."""
    found: dict[str, Documented] = {}
    words: list[str] = []
    path: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = KEY.fullmatch(line)
        if match is None:
            words = [*words, line[2:]] if line.startswith("# ") else []
            continue
        depth = len(match[1]) // 2
        path = [*path[:depth], match[2]]
        found[".".join(path)] = Documented(" ".join(words), number)
        words = []
    return found


def keys(schema: type[Any], prefix: str = "", *, reloadable: bool = False) -> Iterator[Key]:
    """All keys of a schema, sections before what is in them."""
    hints = typing.get_type_hints(schema, include_extras=True)
    for field in dataclasses.fields(schema):
        kind: Any = hints[field.name]
        bounds: tuple[Any, ...] = ()
        may = reloadable
        may_be_null = False
        while True:
            if typing.get_origin(kind) is Annotated:
                kind, *marks = typing.get_args(kind)
                may = (may or RELOADABLE in marks) and AT_START not in marks
                bounds += tuple(mark for mark in marks if mark not in (RELOADABLE, AT_START))
            elif typing.get_origin(kind) in (types.UnionType, typing.Union):
                may_be_null = type(None) in typing.get_args(kind)
                kind = next(k for k in typing.get_args(kind) if k is not type(None))
            elif typing.get_origin(kind) is tuple:
                kind = typing.get_args(kind)[0]
            else:
                break
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(kind):
            yield Key(path, None, may)
            assert isinstance(kind, type)
            yield from keys(kind, f"{path}.", reloadable=may)
        elif typing.get_origin(kind) is not None:  # a mapping of names
            name_kind = typing.get_args(kind)[0]
            is_bound = typing.get_origin(name_kind) is Annotated
            name_bounds = typing.get_args(name_kind)[1:] if is_bound else ()
            yield Key(path, allowed_words(str, name_bounds), may)
        else:
            allowed = allowed_words(kind, bounds) + (OR_NULL if may_be_null else "")
            yield Key(path, allowed, may)


def value(settings: Any, path: str) -> Any:
    """What stands there; None also where a section above is not there."""
    for step in path.split("."):
        settings = getattr(settings, step) if settings is not None else None
    return settings


def uncommented(text: str) -> str:
    """The example with every key in force."""
    return "\n".join(
        line.removeprefix("#") if KEY.fullmatch(line) else line for line in text.splitlines()
    )


@pytest.fixture(params=EXAMPLES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(name: str, repository: Path) -> Path:
    return repository / "packaging" / name


def test_as_it_is_it_changes_nothing(name: str, path: Path) -> None:
    assert load(path, EXAMPLES[name]) == EXAMPLES[name]()


def test_every_key_is_there_and_no_other(name: str, path: Path) -> None:
    found = set(documented(path.read_text()))
    wanted = {key.path for key in keys(EXAMPLES[name])}
    # Names in mappings are the user's own.
    own = (
        "triggers.policies.",
        "export.headers.",
        "store.retention.per_trigger.",
        "store.retention.per_verdict.",
        "quotas.users.",
        "quotas.groups.",
    )
    assert {path for path in found if not path.startswith(own)} == wanted


def test_what_is_shown_is_the_default_unless_it_says_otherwise(name: str, path: Path) -> None:
    schema = EXAMPLES[name]
    shown: Any = loads(uncommented(path.read_text()), schema, str(path))
    defaults = schema()
    for key in keys(schema):
        where = documented(path.read_text())[key.path]
        is_example = EXAMPLE in where.words
        section = key.path.rpartition(".")[0]
        if section and value(defaults, section) is None:
            assert is_example or value(shown, key.path) is False, key.path
        elif key.allowed is not None or is_example:
            same = value(shown, key.path) == value(defaults, key.path)
            assert same != is_example, f"{path}:{where.line}: {key.path}"
            assert not is_example or "Default: " in where.words, key.path


def test_it_says_what_is_allowed_and_what_reloads(name: str, path: Path) -> None:
    found = documented(path.read_text())
    for key in keys(EXAMPLES[name]):
        words = found[key.path].words
        if key.allowed is not None:
            assert "llowed: " in words, key.path
            assert key.allowed in words, f"{key.path}: want {key.allowed!r} in {words!r}"
        steps = key.path.split(".")
        above = [found[".".join(steps[: n + 1])].words for n in range(len(steps))]
        reloads = any("Reload." in text for text in above) and "Restart." not in words
        assert reloads == key.reloadable, key.path


def test_an_example_that_lacks_a_key_or_lies_is_found(repository: Path) -> None:
    """The reader of examples sees what it is for."""
    text = (repository / "packaging" / "node.yaml").read_text()
    found = documented(text)
    assert found["pool_bytes"].words.startswith("Memory for records")
    assert "triggers.default_policy.weight" in found
    assert "pool_bytes" not in documented(text.replace("#pool_bytes:", "# pool_bytes:"))
    with pytest.raises(ConfigError, match="pool_bytes"):
        loads(uncommented(text.replace("256MiB", "256MB")), EXAMPLES["node.yaml"], "f")
