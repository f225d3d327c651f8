# SPDX-License-Identifier: Apache-2.0
"""Rules at work: which triggers the spans of this process fire, as ``_rules`` says.

What is remembered for that is bounded, whatever applications put into spans.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import StatusCode

from backsight.autotrigger import LatencyTrigger
from backsight.otel._rules import Rare, RuleSet, is_number

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

ERROR, LATENCY, RARE, SAMPLED = "error", "latency", "rare", "sampled"
DRY_RUN_PREFIX = "dry."
"""Triggers of such names are counted by the node, and collect nothing."""

STATUS_ERROR = StatusCode.ERROR
"""By a name of ours, for what is done for every span: an enumeration takes long to find a member."""

# On the spans that the ASGI instrumentation makes of each message of a response.
_ASGI_MESSAGE = "asgi.event.type"

# What a server says that the semantic conventions make an error of its span. Of all else,
# HTTP 404 or gRPC's NOT_FOUND say, only the client's span is one.
_HTTP_SERVER_ERROR_MIN = 500
_GRPC_SERVER_ERRORS = (
    *(2, "UNKNOWN", 4, "DEADLINE_EXCEEDED", 12, "UNIMPLEMENTED"),
    *(13, "INTERNAL", 14, "UNAVAILABLE", 15, "DATA_LOSS"),
)

# What a client says by itself if no answer comes. A server may say it too; then it is one of
# those that name themselves in what they answer, or nobody asks it.
_GRPC_CLIENT_ERRORS = (4, "DEADLINE_EXCEEDED", 14, "UNAVAILABLE")

# Operations times types of errors, of one service.
_KEYS_MAX = 1024

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
        return is_number(status) and status >= _HTTP_SERVER_ERROR_MIN
    code = attributes.get("rpc.grpc.status_code", attributes.get("rpc.response.status_code"))
    return code in _GRPC_SERVER_ERRORS


def is_answer(attributes: Mapping[str, Any]) -> bool:
    """Whether this client span tells of an answer, or may: not of what a client says by itself."""
    if "http.response.status_code" in attributes or "http.status_code" in attributes:
        return True
    code = attributes.get("rpc.grpc.status_code", attributes.get("rpc.response.status_code"))
    return code is not None and code not in _GRPC_CLIENT_ERRORS


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
