# SPDX-License-Identifier: Apache-2.0
"""Reads what backsightctl printed: the objects of ``traces --json`` and of ``show TRACE --json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.checker.errors import BadInput

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CapturedSpan:
    """One collected span; attributes are as the coordinator gave them.

    ``end_ns`` is None if it was collected without its end.
    """

    span_id: str
    parent_id: str
    name: str
    node: str
    start_ns: int
    end_ns: int | None
    unfinished: bool
    pod: object
    duration_us: object


@dataclass(frozen=True, slots=True)
class CapturedTrace:
    """One collected trace in full."""

    trace_id: str
    triggers: tuple[str, ...]
    verdict: str
    span_count: int
    spans: tuple[CapturedSpan, ...]


@dataclass(frozen=True, slots=True)
class Captured:
    """What the coordinator holds: the traces that it showed, by id, and the ids that it listed."""

    shown: dict[str, CapturedTrace]
    listed: frozenset[str]


def _field(where: str, holder: object, name: str, kind: type[_T]) -> _T:
    if not isinstance(holder, dict) or name not in holder:
        raise BadInput(f"{where}: no field {name!r}; want what backsightctl prints with --json")
    value = holder[name]
    # bool is an int to Python, not to JSON
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadInput(f"{where}: field {name!r} is {value!r}, want {kind.__name__}")
    return value


def _span(where: str, item: object) -> CapturedSpan:
    attributes = _field(where, item, "attributes", dict)
    unfinished = _field(where, item, "unfinished", bool)
    ended = _field(where, item, "end_ns", object) is not None
    return CapturedSpan(
        span_id=_field(where, item, "span_id", str),
        parent_id=_field(where, item, "parent_id", str),
        name=_field(where, item, "name", str),
        node=_field(where, item, "node", str),
        start_ns=_field(where, item, "start_ns", int),
        end_ns=_field(where, item, "end_ns", int) if ended else None,
        unfinished=unfinished,
        pod=attributes.get("pod"),
        duration_us=attributes.get("duration_us"),
    )


def _trace(where: str, item: object) -> CapturedTrace:
    return CapturedTrace(
        trace_id=_field(where, item, "trace_id", str),
        triggers=tuple(
            _field(where, trigger, "name", str) for trigger in _field(where, item, "triggers", list)
        ),
        verdict=_field(where, _field(where, item, "verdict", dict), "kind", str),
        span_count=_field(where, item, "span_count", int),
        spans=tuple(_span(where, span) for span in _field(where, item, "spans", list)),
    )


def _objects(path: Path) -> Iterator[tuple[str, object]]:
    """Each JSON object with where it stands; objects may be spread over lines, as a pretty printer leaves them."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    decoder = json.JSONDecoder()
    at, line = 0, 1
    while True:
        start = at
        while at < len(text) and text[at].isspace():
            at += 1
        line += text.count("\n", start, at)
        if at == len(text):
            return
        try:
            item, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise BadInput(
                f"{path}:{line}: not JSON: {error.msg}; want what backsightctl prints with --json"
            ) from error
        yield f"{path}:{line}", item
        line += text.count("\n", at, end)
        at = end


def read_captured(path: Path) -> Captured:
    """Reads a file of JSON objects, or the ``*.json`` and ``*.jsonl`` files of a folder. Raises BadInput."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl"))
    else:
        files = [path]
    shown: dict[str, CapturedTrace] = {}
    listed: set[str] = set()
    for file in files:
        for where, item in _objects(file):
            if isinstance(item, dict) and "spans" in item:
                trace = _trace(where, item)
                if trace.trace_id in shown:
                    raise BadInput(
                        f"{where}: trace {trace.trace_id} is shown a second time; give each once"
                    )
                shown[trace.trace_id] = trace
            else:
                trace_id = _field(where, item, "trace_id", str)
                if trace_id in listed:
                    raise BadInput(
                        f"{where}: trace {trace_id} is listed a second time; give the listing once"
                    )
                listed.add(trace_id)
    return Captured(shown, frozenset(listed))
