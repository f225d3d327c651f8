# SPDX-License-Identifier: Apache-2.0
"""Reads a YAML file into a dataclass, or says what is wrong with it.

The dataclass is the schema. Its fields are the keys, their defaults the
defaults, their types the types; bounds stand beside the type:

    pool_bytes: Annotated[int, Size(4 << 20, 1 << 50)] = 256 << 20
    node: Annotated[str, Matching(r"[a-z]+", "lower-case letters")]
    limits: Limits = Limits()             # a section: a dataclass of its own
    policies: Mapping[str, Policy] = ...  # names chosen by the user
    rate: Annotated[float, Range(1, 9), RELOADABLE] = 1  # runtime.reload

An unknown or repeated key, a wrong type, a value out of bounds: each becomes
one line with file, line, key, value and what is allowed, and all of them are
reported at once.
"""

# ruff: noqa: ANN401 (a schema is any dataclass, its fields of any type)

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import yaml

from runtime.printable import without_secrets

T = TypeVar("T")

EXIT_CONFIG = 2
"""What a program ends with that refuses its configuration; as of wrong usage."""

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class ConfigError(Exception):
    """Why a configuration was refused: one problem a line, for the person who wrote it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class InvalidValue(ValueError):
    """Raised by a section's ``__post_init__``: a key that does not go with the others."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class Bound(Protocol):
    """What a value beside its type must satisfy."""

    def allowed(self) -> str:
        """What is allowed, in words."""

    def admit(self, value: Any) -> Any:
        """Return the value, perhaps converted; ValueError if it is not allowed."""


@dataclass(frozen=True, slots=True)
class Range:
    """A number from minimum to maximum, both included."""

    minimum: float
    maximum: float

    def allowed(self) -> str:
        return f"a number from {_plain(self.minimum)} to {_plain(self.maximum)}"

    def admit(self, value: float) -> float:
        if not self.minimum <= value <= self.maximum:
            raise ValueError
        return value


def _plain(number: float) -> str:
    """Without a power of ten, and without a fraction where there is none."""
    return str(int(number)) if number == int(number) else str(number)


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, plain or with a binary unit ("64MiB"), within bounds."""

    minimum: int
    maximum: int

    def allowed(self) -> str:
        return (
            f"{format_size(self.minimum)} to {format_size(self.maximum)}, as a number of bytes"
            " or with KiB, MiB, GiB or TiB"
        )

    def admit(self, value: int | str) -> int:
        if isinstance(value, str):
            match = re.fullmatch(r"(0|[1-9][0-9]{0,14}) ?(KiB|MiB|GiB|TiB|)", value)
            if match is None:
                raise ValueError
            value = int(match[1]) * _UNITS[match[2]]
        if not self.minimum <= value <= self.maximum:
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Count:
    """How many there may be of something, and what each takes of the memory at most."""

    minimum: int
    maximum: int
    each_bytes: int

    def allowed(self) -> str:
        return (
            f"a number from {self.minimum} to {self.maximum}, each of which takes up to"
            f" {self.each_bytes} bytes of memory"
        )

    def admit(self, value: int) -> int:
        if not self.minimum <= value <= self.maximum:
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Matching:
    """A text that matches a regular expression as a whole."""

    pattern: str
    words: str

    def allowed(self) -> str:
        return self.words

    def admit(self, value: str) -> str:
        if not re.fullmatch(self.pattern, value):
            raise ValueError
        return value


@dataclass(frozen=True, slots=True)
class Secret:
    """A bound of values that no message shows: messages go to logs, which others read."""

    bound: Bound

    def allowed(self) -> str:
        return self.bound.allowed()

    def admit(self, value: Any) -> Any:
        return self.bound.admit(value)

    def shown(self, text: str) -> str:
        """What may be said of a value that was refused."""
        said = _size_of_secret(text)
        right = re.match(self.bound.pattern, text) if isinstance(self.bound, Matching) else None
        if right is not None and right.end() < len(text):
            said += f", wrong from character {right.end() + 1} on"
        return said


def _size_of_secret(text: str) -> str:
    return f"a secret of {len(text)} characters"


@dataclass(frozen=True, slots=True)
class SecretInUrl(Secret):
    """The same of URLs, which are shown without what is secret in them."""

    def shown(self, text: str) -> str:
        return without_secrets(text)


PATH = Matching(r"[^\0]+", "a path")


class Reloadable:
    """Beside the type of a key, or section: a daemon takes a change of it up while it runs."""


RELOADABLE = Reloadable()


class AtStart:
    """Beside the type of a key in a section that is RELOADABLE: this one waits for a restart."""


AT_START = AtStart()


def format_size(size_bytes: int) -> str:
    """Write a number of bytes with the largest binary unit that divides it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return f"{size_bytes}"


def load(path: Path, schema: type[T]) -> T:
    """Read a YAML file into a dataclass; ConfigError names all that is wrong with it."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is no UTF-8 text: {error.reason}"]) from error
    return loads(text, schema, str(path))


def loads(text: str, schema: type[T], name: str) -> T:
    """Read YAML text; as load(), with the name that errors shall give to the text."""
    return _Reader(name).read(text, schema)


_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}
OR_NULL = "; or null"
"""What follows where null is allowed too."""
_TAGS = {"bool": bool, "int": int, "float": float, "str": str}


def allowed_words(kind: type, bounds: Iterable[Bound]) -> str:
    """What is allowed for a scalar of that type within these bounds, but for null."""
    words = "; ".join(bound.allowed() for bound in bounds) or _WORDS[kind]
    return words.replace("a number from", "a whole number from") if kind is int else words


def _tag(node: yaml.Node) -> str:
    """What YAML takes the node for: str, int, map, ..."""
    return str(node.tag).rpartition(":")[2]


def _admitted(value: object, bounds: Iterable[Bound]) -> object:
    for bound in bounds:
        value = bound.admit(value)
    return value


def _how_to_write(node: yaml.ScalarNode, kind: type, bounds: tuple[Bound, ...]) -> str:
    """What helps where YAML took it for something else than was meant; empty if nothing is known."""
    tag = _tag(node)
    if kind is str and tag != "str":
        try:
            _admitted(node.value, bounds)
        except (ValueError, OverflowError):
            return ""
        return ", in quotes"
    # YAML 1.1 has octal, hexadecimal and sexagesimal numbers, among others.
    is_odd = _TAGS.get(tag) in (int, float) and not _NUMBER.fullmatch(node.value)
    return ", written plainly" if is_odd and kind in (int, float) else ""


# Of a value: what one sees it by.
_SHOWN_MAX = 80


def _holds_secrets(kind: Any) -> bool:
    """Whether there is a secret somewhere in a value of that type."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return any(map(_holds_secrets, typing.get_type_hints(kind, include_extras=True).values()))
    return isinstance(kind, Secret) or any(map(_holds_secrets, typing.get_args(kind)))


# Who forgets quotes may have begun a secret with a sign of YAML's. Its own words are in <>.
_QUOTED = re.compile(r"'(?!<)[^']{2,}'")


def _problem_of_yaml(error: yaml.MarkedYAMLError) -> str:
    """What the parser says, without what it quotes."""
    return _QUOTED.sub("'…'", str(error.problem))


def _shown(node: yaml.Node, bounds: tuple[Bound, ...] = (), *, hidden: bool = False) -> str:
    """A value as it was written, cut if it is long, as far as it is no secret."""
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a section"
    assert isinstance(node, yaml.ScalarNode)
    if hidden:
        return _size_of_secret(node.value)
    for bound in bounds:
        if isinstance(bound, Secret):
            return bound.shown(node.value)[:_SHOWN_MAX]
    return (repr(node.value) if node.style else (node.value or "nothing"))[:_SHOWN_MAX]


# As in YAML 1.2, but for numbers that are not decimal.
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(rf"({_WHOLE.pattern}(\.[0-9]*)?|[-+]?\.[0-9]+)([eE][-+]?[0-9]+)?")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _parsed(node: yaml.ScalarNode, kind: type) -> object:
    """The value as one of that type; ValueError if it is none. Whatever its tag claims."""
    text = node.value
    if kind is str and _tag(node) == "str":
        return text
    if node.style is None:
        if kind is bool and text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        if kind is int and _WHOLE.fullmatch(text):
            return int(text)
        if kind is float and _NUMBER.fullmatch(text):
            return float(text)
    raise ValueError


def _default_of(field: dataclasses.Field[Any]) -> object:
    """What it is where nothing is given; None where that is nothing, or must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


class _Absent:
    """What stands for a value that was refused."""


_ABSENT = _Absent()


# Where the name itself must not be shown.
_HIDDEN_NAME = "{} (a name)"


class _Reader:
    def __init__(self, name: str) -> None:
        self._name = name
        self._problems: list[str] = []

    def read(self, text: str, schema: type[T]) -> T:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(
                [f"{self._name}:{line}: no valid YAML: {_problem_of_yaml(error)}"]
            ) from error
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError([f"{self._name}: no valid YAML: {error}"]) from error
        if root is None:
            mark = yaml.Mark(self._name, 0, 0, 0, "", 0)
            root = yaml.MappingNode("tag:yaml.org,2002:map", [], mark, mark)
        value = self._value(root, schema, "")
        if self._problems:
            raise ConfigError(self._problems)
        assert isinstance(value, schema)
        return value

    def _refuse(self, node: yaml.Node, key: str, problem: str) -> _Absent:
        where = f"{self._name}:{node.start_mark.line + 1}"
        self._problems.append(f"{where}: {key}: {problem}" if key else f"{where}: {problem}")
        return _ABSENT

    def _value(
        self,
        node: yaml.Node,
        kind: Any,
        key: str,
        default: object = None,
        *,
        may_be_null: bool = False,
    ) -> Any:
        bounds: tuple[Bound, ...] = ()
        if typing.get_origin(kind) is Annotated:
            kind, *bounds_list = typing.get_args(kind)
            bounds = tuple(bound for bound in bounds_list if bound not in (RELOADABLE, AT_START))
        origin = typing.get_origin(kind)
        if origin in (types.UnionType, typing.Union):
            may_be_null = type(None) in typing.get_args(kind)
            if may_be_null and node.tag.endswith(":null"):
                return None
            inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
            # Of several scalars, the one that it is written as.
            kind = next((arg for arg in inner if _TAGS.get(_tag(node)) is arg), inner[0])
            kind = Annotated[(kind, *bounds)] if bounds else kind
            return self._value(node, kind, key, default, may_be_null=may_be_null)
        if dataclasses.is_dataclass(kind):
            return self._section(node, kind, key, default, may_be_null=may_be_null)
        if origin is tuple:
            return self._list(node, typing.get_args(kind)[0], key)
        if origin is not None and issubclass(origin, Mapping):
            name_kind, value_kind = typing.get_args(kind)
            return self._mapping(node, name_kind, value_kind, key)
        return self._scalar(node, kind, bounds, key, may_be_null=may_be_null)

    def _scalar(
        self,
        node: yaml.Node,
        kind: type,
        bounds: tuple[Bound, ...],
        key: str,
        *,
        may_be_null: bool,
    ) -> object:
        allowed = allowed_words(kind, bounds)
        or_null = OR_NULL if may_be_null else ""
        if not isinstance(node, yaml.ScalarNode):
            return self._refuse(node, key, f"{_shown(node)}; allowed: {allowed}{or_null}")
        refusal = f"{_shown(node, bounds)}; allowed: {allowed}"
        sized = any(isinstance(bound, Size) for bound in bounds)
        try:
            value = node.value if sized and _tag(node) == "str" else _parsed(node, kind)
            return _admitted(value, bounds)
        except (ValueError, OverflowError):
            return self._refuse(node, key, refusal + _how_to_write(node, kind, bounds) + or_null)

    def _list(self, node: yaml.Node, kind: Any, key: str) -> object:
        if not isinstance(node, yaml.SequenceNode):
            shown = _shown(node, hidden=_holds_secrets(kind))
            return self._refuse(node, key, f"{shown}; allowed: a list")
        items = [self._value(item, kind, f"{key}[{i}]") for i, item in enumerate(node.value)]
        return _ABSENT if any(item is _ABSENT for item in items) else tuple(items)

    def _keys(
        self, node: yaml.MappingNode, key: str, *, hidden: bool = False
    ) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Each key once, its node, and that of its value; ``hidden``: a message names none of them."""
        seen: dict[str, int] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                self._refuse(name_node, key, "a key is a text")
                continue
            name = name_node.value
            if name in seen:
                path = _HIDDEN_NAME.format(key) if hidden else f"{key}.{name}" if key else name
                self._refuse(name_node, path, f"stands in line {seen[name]} already")
                continue
            seen[name] = name_node.start_mark.line + 1
            yield name, name_node, value_node

    def _mapping(
        self,
        node: yaml.Node,
        name_kind: Any,
        value_kind: Any,
        key: str,
    ) -> object:
        if not isinstance(node, yaml.MappingNode):
            shown = _shown(node, hidden=_holds_secrets(name_kind) or _holds_secrets(value_kind))
            return self._refuse(node, key, f"{shown}; allowed: a section of names")
        result: dict[object, object] = {}
        hidden = _holds_secrets(name_kind)
        for name, name_node, value_node in self._keys(node, key, hidden=hidden):
            path = f"{key}.{name}"
            hidden_path = _HIDDEN_NAME.format(key) if hidden else path
            admitted = self._value(name_node, name_kind, hidden_path)
            path = hidden_path if admitted is _ABSENT else path
            value = self._value(value_node, value_kind, path)
            if admitted is not _ABSENT and value is not _ABSENT:
                result[admitted] = value
        return result

    def _section(
        self, node: yaml.Node, kind: Any, key: str, default: object, *, may_be_null: bool
    ) -> object:
        """What is not given is as in the default of this very section, if it has one."""
        fields = {field.name: field for field in dataclasses.fields(kind)}
        if not isinstance(node, yaml.MappingNode):
            allowed = f"allowed: a section with {', '.join(fields)}{OR_NULL if may_be_null else ''}"
            shown = _shown(node, hidden=_holds_secrets(kind))
            return self._refuse(node, key, f"{shown}; {allowed}")
        hints = typing.get_type_hints(kind, include_extras=True)
        values: dict[str, object] = {}
        nodes: dict[str, yaml.Node] = {}
        for name, name_node, value_node in self._keys(node, key):
            path = f"{key}.{name}" if key else name
            if name not in fields:
                self._refuse(name_node, path, f"unknown key; allowed: {', '.join(fields)}")
                continue
            nodes[name] = name_node
            values[name] = self._value(value_node, hints[name], path, _default_of(fields[name]))
        for name, field in fields.items():
            required = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            if required and name not in nodes:
                path = f"{key}.{name}" if key else name
                values[name] = self._refuse(node, path, "is missing, and has no default")
        if any(value is _ABSENT for value in values.values()):
            return _ABSENT
        try:
            if isinstance(default, kind):
                return dataclasses.replace(default, **values)
            return kind(**values)
        except InvalidValue as invalid:
            path = f"{key}.{invalid.key}" if key else invalid.key
            return self._refuse(nodes.get(invalid.key, node), path, invalid.problem)
