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
      quantile: 0.99      # fires if longer than factor times this quantile
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

A rule that makes no sense is told in the log, and the application runs on with the
others: whatever is wrong here, no request may fail for it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanKind, StatusCode

from backsight.autotrigger import LatencyTrigger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

ERROR, LATENCY, RARE, SAMPLED = "error", "latency", "rare", "sampled"
DRY_RUN_PREFIX = "dry."
"""Triggers of such names are counted by the node, and collect nothing."""

_DEFAULT = "error,latency"
_NAME = re.compile(r"[a-z0-9_.-]{1,27}")

# On the spans that the ASGI instrumentation makes of each message of a response.
_ASGI_MESSAGE = "asgi.event.type"

# Operations times types of errors, of one service.
_KEYS_MAX = 1024


class RuleError(ValueError):
    """A rule makes no sense; says which, why, and what is allowed."""


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
        if self.kind is not None and span.kind.name.lower() != self.kind:
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
            complain(f"BACKSIGHT_TRIGGERS_FILE: {error}; the default rules ({_DEFAULT}) hold")
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
            content = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise RuleError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise RuleError(f"{path}: must be a mapping of rules, not {content!r}")
    return from_mapping(content, path, complain)


def from_mapping(
    content: Mapping[str, Any], where: str, complain: Callable[[str], None]
) -> RuleSet:
    """Each rule by itself: one that makes no sense is told and left out."""
    found: dict[str, Any] = {}
    readers: dict[str, Callable[[Any], object]] = {
        "error": lambda value: _rule(Error, value),
        "latency": lambda value: _rule(Latency, value),
        "rare": lambda value: tuple(
            _rule(Rare, item) for item in (value if isinstance(value, list) else [value])
        ),
        "when": lambda value: tuple(_when(item) for item in _list(value)),
        "dry_run": _bool,
    }
    for key, value in content.items():
        reader = readers.get(key)
        try:
            if reader is None:
                raise RuleError(f"is no rule; allowed are {', '.join(readers)}")
            found[key] = reader(value)
        except RuleError as error:
            complain(f"{where}: {key}: {error}")
    return RuleSet(**found)


def _rule(kind: type, value: Any) -> Any:  # noqa: ANN401 # read from YAML
    value = {} if value is None else value
    known = {known.name: known for known in fields(kind)}
    if not isinstance(value, dict):
        raise RuleError(f"must be a mapping, not {value!r}")
    arguments: dict[str, Any] = {}
    for key, item in value.items():
        if key not in known:
            raise RuleError(f"{key}: is unknown; allowed are {', '.join(known)}")
        arguments[key] = _checked(key, item)
    if kind is Rare and "attribute" not in arguments:
        raise RuleError("attribute: is missing; name the attribute whose values are looked at")
    rule = kind(**arguments)
    if kind is not Error and rule.warmup > rule.window:
        raise RuleError(f"warmup: is {rule.warmup}; allowed: 1 to the window, {rule.window}")
    return rule


_RANGES: dict[str, tuple[float, float]] = {
    "per_s": (0.001, 1e6),
    "burst": (1, 1e6),
    "quantile": (0.001, 1.0),
    "factor": (0.001, 1e6),
    "share": (1e-6, 1.0),
    "window": (1, 100_000),
    "warmup": (1, 100_000),
}


def _checked(key: str, value: object) -> object:
    if key == "attribute":
        if isinstance(value, str) and value:
            return value
        raise RuleError(f"attribute: is {value!r}; the name of an attribute is wanted")
    low, high = _RANGES[key]
    whole = key in ("window", "warmup")
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator] # a number
        kind = "a whole number" if whole else "a number"
        raise RuleError(f"{key}: is {value!r}; allowed: {kind} from {low:g} to {high:g}")
    return value


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise RuleError(f"must be a list, not {value!r}")
    return value


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise RuleError(f"is {value!r}; allowed: true, false")
    return value


def _when(value: object) -> When:
    if not isinstance(value, dict):
        raise RuleError(f"must be mappings, not {value!r}")
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RuleError(f"name: is {name!r}; allowed: 1 to 27 of [a-z0-9_.-]")
    unknown = set(value) - {"name", "operation", "kind", "attributes"}
    if unknown:
        raise RuleError(
            f"{name}: {min(map(str, unknown))}: is unknown; allowed are name, operation, kind, attributes"
        )
    kinds = [kind.name.lower() for kind in SpanKind]
    kind, operation = value.get("kind"), value.get("operation")
    if kind is not None and kind not in kinds:
        raise RuleError(f"{name}: kind: is {kind!r}; allowed are {', '.join(kinds)}")
    if operation is not None and not isinstance(operation, str):
        raise RuleError(f"{name}: operation: is {operation!r}; the name of a span is wanted")
    attributes = value.get("attributes", {})
    if not isinstance(attributes, dict):
        raise RuleError(f"{name}: attributes: must be a mapping, not {attributes!r}")
    if kind is None and operation is None and not attributes:
        raise RuleError(f"{name}: would fire for every span; give operation, kind or attributes")
    conditions = {str(key): _condition(f"{name}: {key}", item) for key, item in attributes.items()}
    return When(name, operation, kind, conditions)


def _condition(where: str, wanted: object) -> Callable[[object], bool]:
    if isinstance(wanted, list):
        return lambda value: any(_equal(value, item) for item in wanted)
    if not isinstance(wanted, dict):
        return lambda value: _equal(value, wanted)
    if set(wanted) == {"regex"}:
        try:
            pattern = re.compile(wanted["regex"])
        except (re.error, TypeError) as error:
            raise RuleError(f"{where}: regex: {wanted['regex']!r} is none: {error}") from error
        return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None
    if wanted and set(wanted) <= {"min", "max"}:
        low, high = wanted.get("min", float("-inf")), wanted.get("max", float("inf"))
        for bound in (low, high):
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise RuleError(f"{where}: min and max are numbers, not {bound!r}")
        return lambda value: _is_number(value) and low <= value <= high
    raise RuleError(f"{where}: is {wanted!r}; allowed: a value, a list of values, min, max, regex")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(value: object, wanted: object) -> bool:
    return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted


# -------------------------------------------------------------------- firing


class _Buckets:
    """A token bucket a key; of more keys than are remembered, the rest share one."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._levels: dict[tuple[str, str], tuple[float, float]] = {}

    def take(self, key: tuple[str, str]) -> bool:
        now = self._clock()
        if key not in self._levels and len(self._levels) >= _KEYS_MAX:
            key = ("", "")
        level, since = self._levels.get(key, (self._burst, now))
        level = min(self._burst, level + (now - since) * self._per_s)
        taken = level >= 1
        self._levels[key] = (level - taken, now)
        return taken


class _Shares:
    """How often each of the latest values came."""

    def __init__(self, rule: Rare) -> None:
        self._rule = rule
        self._latest: deque[object] = deque()
        self._counts: Counter[object] = Counter()

    def is_rare(self, value: object) -> bool:
        """Take it in; whether it is rare among those before it."""
        try:
            seen = self._counts[value]
        except TypeError:
            value = repr(value)
            seen = self._counts[value]
        count = len(self._latest)
        rare = count >= self._rule.warmup and seen < self._rule.share * count
        self._latest.append(value)
        self._counts[value] += 1
        if len(self._latest) > self._rule.window:
            oldest = self._latest.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        return rare


class Rules:
    """The rules at work. Threads may share one object; after a fork it begins anew."""

    def __init__(self, rules: RuleSet, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._prefix = DRY_RUN_PREFIX if rules.dry_run else ""
        latency = rules.latency
        self._slow = (
            LatencyTrigger(
                quantile_permille=max(1, round(latency.quantile * 1000)),
                warmup=latency.warmup,
                window=latency.window,
                factor_permille=max(1, round(latency.factor * 1000)),
            )
            if latency is not None
            else None
        )
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        error = self._rules.error
        self._buckets = _Buckets(error.per_s, error.burst, self._clock) if error else None
        self._rare = [(rule.attribute, _Shares(rule)) for rule in self._rules.rare]
        # Traces for which an error fired here: the exception passes through many spans.
        self._told: OrderedDict[int, None] = OrderedDict()

    def sampled(self) -> tuple[str, str]:
        """A trace begins that a sampler chose."""
        return self._prefix + SAMPLED, "chosen by the head sampler"

    def ended(
        self, span: ReadableSpan, attributes: Mapping[str, Any], *, answered: bool
    ) -> list[tuple[str, str]]:
        """The triggers that an ended span of these attributes fires, with the reason for each.

        ``answered``: a client span whose answer came from a node; its error is the
        callee's, who has seen it too.
        """
        fired = self._fired(span, attributes, answered=answered)
        return [(self._prefix + name, why) for name, why in fired]

    def _fired(
        self, span: ReadableSpan, attributes: Mapping[str, Any], *, answered: bool
    ) -> Iterator[tuple[str, str]]:
        if self._buckets is not None and not answered:
            why = self._error(span, self._buckets)
            if why is not None:
                yield ERROR, why
        parent = span._parent
        if self._slow is not None and (parent is None or parent.is_remote):
            duration_ns = (span.end_time or 0) - (span.start_time or 0)
            if self._slow.observe(duration_ns, span.name):
                yield LATENCY, f"{span.name} took {duration_ns / 1e6:.1f} ms"
        for attribute, shares in self._rare:
            value = attributes.get(attribute)
            if value is not None:
                with self._lock:
                    rare = shares.is_rare(value)
                if rare:
                    yield RARE, f"{attribute} is {value}"
        for rule in self._rules.when:
            if rule.holds(span, attributes):
                yield rule.name, f"{span.name} is {rule.name}"
                break

    def _error(self, span: ReadableSpan, buckets: _Buckets) -> str | None:
        is_error = span._status.status_code is StatusCode.ERROR
        exception = None
        for event in span._events or ():
            if event.name == "exception":
                exception = event
        if not is_error and exception is None:
            return None
        if exception is None and _ASGI_MESSAGE in (span.attributes or ()):
            return None  # the request's own span says the same a moment later, and why
        thrown = (exception.attributes or {}) if exception is not None else {}
        error_type = str(
            thrown.get("exception.type") or (span.attributes or {}).get("error.type") or "error"
        )
        assert span.context is not None
        trace = span.context.trace_id
        with self._lock:
            if trace in self._told or not buckets.take((span.name, error_type)):
                return None
            self._told[trace] = None
            if len(self._told) > _KEYS_MAX:
                self._told.popitem(last=False)
        message = thrown.get("exception.message") or span.status.description or ""
        return f"{span.name}: {error_type}" + (f": {message}" if message else "")
