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

import os
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from opentelemetry.trace import SpanKind, StatusCode

from backsight.autotrigger import LatencyTrigger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

ERROR, LATENCY, RARE, SAMPLED = "error", "latency", "rare", "sampled"
DRY_RUN_PREFIX = "dry."
"""Triggers of such names are counted by the node, and collect nothing."""

STATUS_ERROR = StatusCode.ERROR
"""By a name of ours, for what is done for every span: an enumeration takes long to find a member."""

_DEFAULT = "error,latency"
_NAME = re.compile(r"[a-z0-9_.-]{1,27}")

# On the spans that the ASGI instrumentation makes of each message of a response.
_ASGI_MESSAGE = "asgi.event.type"

# What a server says that the semantic conventions make an error of its span. Of all else,
# HTTP 404 or gRPC's NOT_FOUND say, only the client's span is one.
_HTTP_SERVER_ERROR_MIN = 500
_GRPC_SERVER_ERRORS = (
    *(2, "UNKNOWN", 4, "DEADLINE_EXCEEDED", 12, "UNIMPLEMENTED"),
    *(13, "INTERNAL", 14, "UNAVAILABLE", 15, "DATA_LOSS"),
)

# Operations times types of errors, of one service.
_KEYS_MAX = 1024


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
        _is_number(value)
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
            if not _is_number(bound):
                refuse((*path, key), f"{_shown(bound)}; allowed: a number")
        return lambda value: _is_number(value) and low <= value <= high
    keys = ", ".join(map(str, wanted)) or "no key"
    refuse(
        path,
        f"a section with {keys[:80]}; allowed: a value, a list of values, or a section with min and"
        " max, or with regex",
    )
    return lambda _: False


def _is_number(value: object) -> TypeGuard[float]:
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


# -------------------------------------------------------------------- firing


_REST = ("", "")


@dataclass(slots=True)
class _Bucket:
    level: float
    since_s: float
    suppressed: int = 0  # how many were refused since the last that was not


class _Buckets:
    """A token bucket a key; of more keys than are remembered, the rest share one."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def take(self, key: tuple[str, str]) -> int | None:
        """How many were suppressed before this one, since the last that was not; None if it is too."""
        if key not in self._buckets and len(self._buckets) >= _KEYS_MAX:
            key = _REST
        now_s = self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(self._burst, now_s))
        # No call from here on, after which a finalizer or a signal handler could be at it too.
        level = bucket.level + (now_s - bucket.since_s) * self._per_s
        if level > self._burst:
            level = self._burst
        bucket.since_s = now_s
        if level < 1:
            bucket.level = level
            bucket.suppressed += 1
            return None
        bucket.level = level - 1
        suppressed, bucket.suppressed = bucket.suppressed, 0
        # Of the rest nobody knows which they were.
        return 0 if key is _REST else suppressed


class _Shares:
    """How often each of the latest values came."""

    def __init__(self, rule: Rare) -> None:
        self._rule = rule
        self._latest: deque[object] = deque()
        self._counts: Counter[object] = Counter()
        self._at_work = False

    def is_rare(self, value: object) -> bool:
        """Take it in; whether it is rare among those before it.

        One in the middle of another in the same thread is left out, and is not.
        """
        if self._at_work:
            return False
        self._at_work = True
        try:
            return self._take(value)
        finally:
            self._at_work = False

    def _take(self, value: object) -> bool:
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


def _is_callees(attributes: Mapping[str, Any]) -> bool:
    """Whether who gave the answer that this client span tells of counts it as an error of its own."""
    status = attributes.get("http.response.status_code", attributes.get("http.status_code"))
    if status is not None:
        return _is_number(status) and status >= _HTTP_SERVER_ERROR_MIN
    code = attributes.get("rpc.grpc.status_code", attributes.get("rpc.response.status_code"))
    return code in _GRPC_SERVER_ERRORS


def listed(items: Any) -> Any:  # noqa: ANN401 # the SDK's container, or a sequence, or None
    """What can be iterated over: of the SDK's own container, which locks and copies, the one inside."""
    try:
        return items._dq
    except AttributeError:
        return items or ()


class Rules:
    """The rules at work. Threads may share one object; after a fork it begins anew."""

    def __init__(self, rules: RuleSet, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._prefix = DRY_RUN_PREFIX if rules.dry_run else ""
        latency = rules.latency
        self._slow = (
            LatencyTrigger(
                quantile_permille=round(latency.quantile * 1000),
                warmup=latency.warmup,
                window=latency.window,
                factor_permille=round(latency.factor * 1000),
            )
            if latency is not None
            else None
        )
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # Finalizers and signal handlers may end spans while their own thread holds it.
        self._lock = threading.RLock()
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

        ``answered``: a client span whose answer came from a node. An error that is one
        of the callee too is told there.
        """
        # A list and no generator, as this is done for every span.
        fired: list[tuple[str, str]] = []
        if self._buckets is not None and not (answered and _is_callees(attributes)):
            why = self._error(span, self._buckets)
            if why is not None:
                fired.append((self._prefix + ERROR, why))
        parent = span._parent
        if self._slow is not None and (parent is None or parent.is_remote):
            duration_ns = (span.end_time or 0) - (span.start_time or 0)
            if self._slow.observe(duration_ns, span.name):
                why = f"{span.name} took {duration_ns / 1e6:.1f} ms"
                fired.append((self._prefix + LATENCY, why))
        for attribute, shares in self._rare:
            value = attributes.get(attribute)
            if value is not None:
                with self._lock:
                    rare = shares.is_rare(value)
                if rare:
                    fired.append((self._prefix + RARE, f"{attribute} is {value}"))
        for rule in self._rules.when:
            if rule.holds(span, attributes):
                fired.append((self._prefix + rule.name, f"{span.name} is {rule.name}"))
                break
        return fired

    def _error(self, span: ReadableSpan, buckets: _Buckets) -> str | None:
        is_error = span._status._status_code is STATUS_ERROR
        exception = None
        for event in listed(span._events):
            if event._name == "exception":
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
            if trace in self._told:
                return None
            suppressed = buckets.take((span.name, error_type))
            # Or it was told by a finalizer or a signal handler in the meantime.
            if suppressed is None or trace in self._told:
                return None
            self._told[trace] = None
            if len(self._told) > _KEYS_MAX:
                self._told.popitem(last=False)
        message = thrown.get("exception.message") or span.status.description or ""
        before = f" ({suppressed} suppressed before)" if suppressed else ""
        return f"{span.name}: {error_type}{before}" + (f": {message}" if message else "")
