# SPDX-License-Identifier: Apache-2.0
"""The parameters of Jaeger's HTTP API: numbers, durations, times, tags and trace ids.

What is allowed is what jaegertracing/jaeger allows (query_parser.go, apiv3/), and what
Jaeger UI and Grafana write.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import json
import re
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import parse_qs

from protocol.messages import TraceId
from protocol.wire import WireError, parse_trace_id

_Value = TypeVar("_Value")

TIME_MAX_NS = (1 << 63) - 1
"""The latest that can be asked for: what SQLite's integers hold."""

_UNITS_NS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,  # micro sign
    "μs": 10**3,  # Greek mu
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86400 * 10**9,  # in Jaeger UI's lookback
    "w": 7 * 86400 * 10**9,
}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([a-zµμ]+)")
# No part can begin with what the part before may end with: so no text is read more than twice.
_PAIR = re.compile(r'\s*([^\s="]+)(?:=("(?:[^"\\]|\\.)*"|[^\s"]*))?')
_TRUE = {"1", "t", "T", "true", "TRUE", "True"}
_FALSE = {"0", "f", "F", "false", "FALSE", "False"}


class Refused(Exception):
    """A request that is not answered, by which status, and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Parameters:
    """Of one request: each by its name, or by an older one."""

    def __init__(self, query: str) -> None:
        self._values = parse_qs(
            query, keep_blank_values=True, errors="replace", max_num_fields=1000
        )

    def text(self, *names: str) -> str:
        """The first value of the first name that has one."""
        return self._named(*names)[1]

    def all(self, name: str) -> list[str]:
        return [value for value in self._values.get(name, ()) if value]

    def number(self, *names: str) -> int | None:
        """A whole number, not negative."""
        return self._parsed(_number, *names)

    def duration_ns(self, *names: str) -> int | None:
        return self._parsed(duration_ns, *names)

    def time_ns(self, *names: str) -> int | None:
        """A time of RFC 3339."""
        return self._parsed(_rfc3339_ns, *names)

    def flag(self, *names: str) -> bool:
        return bool(self._parsed(_flag, *names))

    def _named(self, *names: str) -> tuple[str, str]:
        for name in names:
            for value in self._values.get(name, ()):
                if value:
                    return name, value
        return names[0], ""

    def _parsed(self, parse: Callable[[str], _Value], *names: str) -> _Value | None:
        name, value = self._named(*names)
        if not value:
            return None
        try:
            return parse(value)
        except (ValueError, OverflowError) as error:
            raise Refused(400, f"malformed parameter {name}: {error}") from error


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _flag(text: str) -> bool:
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return text in _TRUE


def duration_ns(text: str) -> int:
    """A duration as Go writes it, as "1.5s", "1h30m" or "100us"; ValueError if it is none."""
    end, total_ns = 0, 0.0
    while match := _DURATION_PART.match(text, end):
        if match[2] not in _UNITS_NS:
            break
        total_ns += float(match[1]) * _UNITS_NS[match[2]]
        end = match.end()
    if end != len(text) or not 0 <= total_ns <= TIME_MAX_NS:
        raise ValueError(f'{text!r} is no duration, as "1.5s", "100ms" or "1h30m"')
    return round(total_ns)


def _rfc3339_ns(text: str) -> int:
    # A plus sign that was not encoded arrives as a space, and clients do not encode it.
    match = re.fullmatch(
        r"([0-9-]{10}[Tt][0-9:]{8})(\.[0-9]{1,9})?[0-9]*([Zz]|[+ -][0-9:]{5})", text, re.ASCII
    )
    if match is None:
        raise ValueError(f'{text!r} is no time, as "2026-11-21T20:00:00.123456789Z"')
    zone = "+00:00" if match[3] in "Zz" else match[3].replace(" ", "+")
    seconds = int(datetime.datetime.fromisoformat(match[1].upper() + zone).timestamp())
    return seconds * 10**9 + int((match[2] or ".")[1:].ljust(9, "0"))


def logfmt(text: str) -> dict[str, str]:
    """Pairs as ``error=true http.route="/a b"``; a key alone is true. ValueError if it is none."""
    pairs: dict[str, str] = {}
    end = 0
    # Only there: a search would try each character of what is no pair, and read on from each.
    while match := _PAIR.match(text, end):
        end = match.end()
        value = match[2]
        if value is None:
            value = "true"
        elif value.startswith('"'):
            value = json.loads(value)
        pairs[match[1]] = value
    if text[end:].strip():
        raise ValueError(f"{text[end:].strip()!r} is no pair, as key=value")
    return pairs


def tags_of(text: str) -> dict[str, str]:
    """Tags as a JSON object of texts, or as logfmt; ValueError if it is neither."""
    if not text.lstrip().startswith("{"):
        return logfmt(text)
    try:
        pairs = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    tags = {}
    for key, value in pairs.items():
        match value:
            case bool():
                tags[key] = "true" if value else "false"
            case str() | int() | float():
                tags[key] = str(value)
            case _:
                raise ValueError(f"{key!r} must have a text")
    return tags


def trace_id(text: str) -> TraceId:
    """From hexadecimal, leading zeros left out, or from Base64, as with Jaeger."""
    raw = text
    if not re.fullmatch(r"[0-9a-fA-F]{1,32}", text):
        try:
            raw = base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True).hex()
        except (binascii.Error, ValueError):
            raw = ""
    try:
        return parse_trace_id(raw.zfill(32) if raw else text)
    except (WireError, ValueError) as error:
        raise Refused(400, f"malformed parameter traceID: {error}") from error
