# SPDX-License-Identifier: Apache-2.0
"""What makes a trace worth collecting, as seen from the spans of one process.

From ``BACKSIGHT_TRIGGERS``, a list of rules, or ``BACKSIGHT_TRIGGERS_FILE``, a YAML file:

    BACKSIGHT_TRIGGERS=error,latency            # what is on by itself
    BACKSIGHT_TRIGGERS=error,latency=0.999,rare=http.route
    BACKSIGHT_TRIGGERS=none

    # every key with its default; a rule that is left out is off
    error:
      per_s: 1.0          # of one operation and type of error; each trace fires once
      burst: 10
    latency:              # of local roots: what a request took in this process
      quantile: 0.99      # fires if longer than factor times this quantile; three digits
      factor: 1.5
      window: 500         # of the latest so many of the operation,
      warmup: 100         # not before so many
    rare:
      attribute: http.route
      share: 0.01         # fires for values seen in less of the latest spans
      window: 1000
      warmup: 200
    when:                 # the first that holds fires
      - name: refused     # of the trigger, [a-z0-9_.-], at most 27
        operation: POST /pay          # all that are given must hold; may be left out
        kind: server
        attributes:
          http.response.status_code: [402, 409]     # one of
          order.total: {min: 1000}                  # min, max: numbers
          user.agent: {regex: "curl/.*"}            # the whole text
          debug: true                               # equal
    dry_run: false        # only count, under the names dry.error, dry.latency, ...

A rule that makes no sense is told in the log (file, line, key, and what is allowed), and
the application runs on with the others: whatever is wrong here, no request may fail for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from opentelemetry.trace import SpanKind

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_DEFAULT = "error,latency"
_NAME = re.compile(r"[a-z0-9_.-]{1,27}")

_Path: TypeAlias = tuple[str | int, ...]
"""Of a key: all keys and numbers of items on the way to it."""

_Refuse: TypeAlias = Callable[[_Path, str], None]
"""Tells what is wrong at a key; the rule in which it stands is left out."""


class RuleError(ValueError):
    """There are no rules to be had of a file; says which, where, why, and what is allowed."""


@dataclass(frozen=True, slots=True)
class Error:
    """An error status or an exception, at most so often of one kind."""

    per_s: float = 1.0
    burst: float = 10.0


@dataclass(frozen=True, slots=True)
class Latency:
    """A local root that took much longer than most of its operation."""

    quantile: float = 0.99
    factor: float = 1.5
    window: int = 500
    warmup: int = 100


@dataclass(frozen=True, slots=True)
class Rare:
    """A value of an attribute that few spans have."""

    attribute: str
    share: float = 0.01
    window: int = 1000
    warmup: int = 200


@dataclass(frozen=True, slots=True)
class When:
    """A condition on one span."""

    name: str
    operation: str | None = None
    kind: str | None = None
    attributes: Mapping[str, Callable[[object], bool]] = field(default_factory=dict)

    def holds(self, span: ReadableSpan, attributes: Mapping[str, Any]) -> bool:
        if self.operation is not None and span.name != self.operation:
            return False
        # Applications may give what is no SpanKind.
        if self.kind is not None and getattr(span.kind, "name", "").lower() != self.kind:
            return False
        return all(
            key in attributes and condition(attributes[key])
            for key, condition in self.attributes.items()
        )


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All rules; None for one that is off."""

    error: Error | None = None
    latency: Latency | None = None
    rare: tuple[Rare, ...] = ()
    when: tuple[When, ...] = ()
    dry_run: bool = False


# ------------------------------------------------------------------- reading


def from_environment(environment: Mapping[str, str], complain: Callable[[str], None]) -> RuleSet:
    """The rules that this process is to have; what is wrong is told, and left out."""
    path = environment.get("BACKSIGHT_TRIGGERS_FILE")
    if path:
        try:
            return from_yaml(path, complain)
        except (OSError, RuleError, ImportError) as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 # whatever it is, the application goes on
            why = f"{path}: {error!r}"
        complain(f"BACKSIGHT_TRIGGERS_FILE: {why}; the default rules ({_DEFAULT}) hold")
        return from_list(_DEFAULT, complain)
    return from_list(environment.get("BACKSIGHT_TRIGGERS") or _DEFAULT, complain)


def from_list(text: str, complain: Callable[[str], None]) -> RuleSet:
    """``error,latency=0.99,rare=http.route``, or ``none``."""
    rules: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        match name, value:
            case ("none" | "", ""):
                pass
            case ("error", ""):
                rules["error"] = {}
            case ("latency", _):
                rules["latency"] = {"quantile": _number(value)} if value else {}
            case ("rare", _) if value:
                rules["rare"] = {"attribute": value}
            case ("dry_run", ""):
                rules["dry_run"] = True
            case _:
                complain(
                    f"BACKSIGHT_TRIGGERS: {item.strip()!r} is no rule; allowed are error, latency,"
                    " latency=QUANTILE, rare=ATTRIBUTE, dry_run, none"
                )
    return from_mapping(rules, "BACKSIGHT_TRIGGERS", complain)


def from_yaml(path: str, complain: Callable[[str], None]) -> RuleSet:
    """OSError, RuleError, or ImportError where PyYAML is not installed."""
    import yaml

    with open(path, encoding="utf-8") as file:  # noqa: PTH123 # no more imports than needed
        try:
            loader = yaml.SafeLoader(file.read())
            root = loader.get_single_node()
            if root is None:
                raise RuleError(f"{path}: nothing; allowed: a section with {', '.join(_READERS)}")
            # Of the nodes as they were written, before merge keys are put into them.
            lines = _lines(root, path, complain)
            content: object = loader.construct_document(root)  # type: ignore[no-untyped-call]
        except UnicodeDecodeError as error:
            raise RuleError(f"{path}: is no UTF-8 text: {error.reason}") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}" if mark else path
            why = getattr(error, "problem", None) or " ".join(str(error).split())
            raise RuleError(f"{where}: no valid YAML: {why}") from error
    if not isinstance(content, dict):
        allowed = f"a section with {', '.join(_READERS)}"
        raise RuleError(f"{path}:{lines[()]}: {_shown(content)}; allowed: {allowed}")
    return from_mapping(content, path, complain, lines)


def _lines(root: Any, where: str, complain: Callable[[str], None]) -> dict[_Path, int]:  # noqa: ANN401 # yaml.Node
    """In which line each key and item stands. Of a key that stands twice the last one holds, as told."""
    lines: dict[_Path, int] = {(): root.start_mark.line + 1}
    nodes: list[tuple[_Path, Any]] = [((), root)]
    seen: set[int] = set()  # an alias is a node that was there before
    for path, node in nodes:
        if isinstance(node.value, str) or id(node) in seen:
            continue
        seen.add(id(node))
        names: dict[str, int] = {}
        for number, item in enumerate(node.value):
            if isinstance(item, tuple):
                key, value = item
                if not isinstance(key.value, str):
                    continue  # no rule has such a key
                here, line = (*path, key.value), key.start_mark.line + 1
                if key.value in names:
                    told = f"stands in line {names[key.value]} already; the last one holds"
                    complain(f"{where}:{line}: {_dotted(here)}: {told}")
                names.setdefault(key.value, line)
            else:
                value, here, line = item, (*path, number), item.start_mark.line + 1
            lines[here] = line
            nodes.append((here, value))
    return lines


def _dotted(path: _Path) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def _shown(value: object) -> str:
    """A value in a message, which must not grow with it."""
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    return repr(value)[:80]


def from_mapping(
    content: Mapping[str, Any],
    where: str,
    complain: Callable[[str], None],
    lines: Mapping[_Path, int] | None = None,
) -> RuleSet:
    """Each rule by itself: one that makes no sense is told and left out."""
    lines = lines or {}
    found: dict[str, Any] = {}
    for key, value in content.items():
        problems: list[str] = []

        def refuse(path: _Path, problem: str, problems: list[str] = problems) -> None:
            at = path
            # What is missing has no line, and what an alias stands for is elsewhere.
            while at and at not in lines:
                at = at[:-1]
            line = f":{lines[at]}" if at in lines else ""
            problems.append(f"{where}{line}: {_dotted(path)}: {problem}")

        if key not in _READERS:
            refuse((str(key),), f"unknown key; allowed: {', '.join(_READERS)}")
        else:
            rule = _READERS[key](value, (key,), refuse)
            if not problems:
                found[key] = rule
        for problem in problems:
            complain(problem)
    return RuleSet(**found)


def _section(
    value: object, path: _Path, refuse: _Refuse, known: Sequence[str]
) -> dict[str, Any] | None:
    """The known keys of a section, None if it is none."""
    if not isinstance(value, dict):
        refuse(path, f"{_shown(value)}; allowed: a section with {', '.join(known)}")
        return None
    for key in value:
        if key not in known:
            refuse((*path, str(key)), f"unknown key; allowed: {', '.join(known)}")
    return {key: item for key, item in value.items() if key in known}


_RANGES: dict[str, tuple[float, float]] = {
    "per_s": (0.001, 1e6),
    "burst": (1, 1e6),
    "quantile": (0.001, 1.0),
    "factor": (0.001, 1e6),
    "share": (1e-6, 1.0),
    "window": (1, 100_000),
    "warmup": (1, 100_000),
}


def _rule(kind: type, value: object, path: _Path, refuse: _Refuse) -> Any:  # noqa: ANN401 # a kind
    known = [known.name for known in fields(kind)]
    given = _section({} if value is None else value, path, refuse, known)
    if given is None:
        return None
    if "attribute" in known:
        given = {"attribute": None, **given}
    wrong = {key: words for key, item in given.items() if (words := _wrong(key, item))}
    for key, allowed in wrong.items():
        refuse((*path, key), f"{_shown(given[key])}; allowed: {allowed}")
    if wrong:
        return None
    rule = kind(**given)
    if kind is not Error and rule.warmup > rule.window:
        allowed = f"a whole number from 1 to the window, {rule.window}"
        refuse((*path, "warmup"), f"{rule.warmup}; allowed: {allowed}")
    return rule


# What is compared with durations is made of whole thousandths.
_THOUSANDTHS = ("quantile", "factor")


def _wrong(key: str, value: object) -> str:
    """What is allowed for a key if this is not; else empty."""
    if key == "attribute":
        return "" if isinstance(value, str) and value else "the name of an attribute"
    low, high = _RANGES[key]
    whole = key in ("window", "warmup")
    if (
        is_number(value)
        and low <= value <= high
        and (isinstance(value, int) or not whole)
        and (key not in _THOUSANDTHS or round(value * 1000) / 1000 == value)
    ):
        return ""
    low_shown, high_shown = (f"{bound:f}".rstrip("0").rstrip(".") for bound in (low, high))
    fine = ", of at most three digits after the point" if key in _THOUSANDTHS else ""
    return f"a {'whole ' if whole else ''}number from {low_shown} to {high_shown}{fine}"


def _rare(value: object, path: _Path, refuse: _Refuse) -> tuple[Rare, ...]:
    if not isinstance(value, list):
        return (_rule(Rare, value, path, refuse),)
    return tuple(_rule(Rare, item, (*path, i), refuse) for i, item in enumerate(value))


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _bool(value: object, path: _Path, refuse: _Refuse) -> object:
    if not isinstance(value, bool):
        refuse(path, f"{_shown(value)}; allowed: true or false")
    return value


_WHEN = ("name", "operation", "kind", "attributes")


def _whens(value: object, path: _Path, refuse: _Refuse) -> tuple[When | None, ...]:
    if not isinstance(value, list):
        refuse(path, f"{_shown(value)}; allowed: a list of sections with {', '.join(_WHEN)}")
        return ()
    return tuple(_when(item, (*path, i), refuse) for i, item in enumerate(value))


def _when(value: object, path: _Path, refuse: _Refuse) -> When | None:
    given = _section(value, path, refuse, _WHEN)
    if given is None:
        return None
    name, kind, operation = given.get("name"), given.get("kind"), given.get("operation")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse((*path, "name"), f"{_shown(name)}; allowed: 1 to 27 characters of a-z 0-9 _ . -")
    kinds = [kind.name.lower() for kind in SpanKind]
    if kind is not None and kind not in kinds:
        refuse((*path, "kind"), f"{_shown(kind)}; allowed: {', '.join(kinds)}")
    if operation is not None and not isinstance(operation, str):
        refuse((*path, "operation"), f"{_shown(operation)}; allowed: the name of a span")
    attributes = given.get("attributes", {})
    if not isinstance(attributes, dict):
        refuse(
            (*path, "attributes"), f"{_shown(attributes)}; allowed: a section of attributes' names"
        )
        return None
    if kind is None and operation is None and not attributes:
        refuse(path, "would fire for every span; give operation, kind or attributes")
    conditions = {
        str(key): _condition(item, (*path, "attributes", str(key)), refuse)
        for key, item in attributes.items()
    }
    return When(str(name), operation, kind, conditions)


def _condition(wanted: object, path: _Path, refuse: _Refuse) -> Callable[[object], bool]:
    if isinstance(wanted, list):
        return lambda value: any(_equal(value, item) for item in wanted)
    if not isinstance(wanted, dict):
        return lambda value: _equal(value, wanted)
    if set(wanted) == {"regex"}:
        try:
            pattern = re.compile(wanted["regex"])
        except (re.error, TypeError) as error:
            told = f"{_shown(wanted['regex'])}; allowed: a regular expression ({error})"
            refuse((*path, "regex"), told)
            return lambda _: False
        return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None
    if wanted and set(wanted) <= {"min", "max"}:
        low, high = wanted.get("min", float("-inf")), wanted.get("max", float("inf"))
        for key, bound in wanted.items():
            if not is_number(bound):
                refuse((*path, key), f"{_shown(bound)}; allowed: a number")
        return lambda value: is_number(value) and low <= value <= high
    keys = ", ".join(map(str, wanted)) or "no key"
    refuse(
        path,
        f"a section with {keys[:80]}; allowed: a value, a list of values, or a section with min and"
        " max, or with regex",
    )
    return lambda _: False


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(value: object, wanted: object) -> bool:
    return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted


_READERS: dict[str, Callable[[object, _Path, _Refuse], object]] = {
    "error": partial(_rule, Error),
    "latency": partial(_rule, Latency),
    "rare": _rare,
    "when": _whens,
    "dry_run": _bool,
}
