# SPDX-License-Identifier: Apache-2.0
"""What searches look at, so that they need to read no trace: tables of the store.

A row for each span, in the order (service and operation, start), with the
hashes of its tags; what a list of traces shows of each; and who called whom.
All of it is made of the slices once a verdict was given on them, and made anew
with the next verdict. Times are Unix nanoseconds on the coordinator's clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from formats.otlp import resource_of
from formats.records import AttributeValue
from formats.stamped import BYTES_LEFT_OUT, StampedTrace, service_of
from formats.tags import KINDS, fields_of, tags_of, text_of
from protocol.messages import TraceId

_Row = TypeVar("_Row")

WAITING = """
-- Traces with a verdict newer than what is in the index, in the order in which they are taken:
-- by their ids those of whoever chooses these could come first for ever.
CREATE TABLE to_index (
    number INTEGER PRIMARY KEY,
    trace BLOB NOT NULL UNIQUE
);
"""

SCHEMA = f"""
{WAITING}

CREATE TABLE summaries (
    trace BLOB PRIMARY KEY,
    summary TEXT NOT NULL               -- JSON, see TraceSummary
) WITHOUT ROWID;

CREATE TABLE operations (
    id INTEGER PRIMARY KEY,
    service TEXT NOT NULL,
    operation TEXT NOT NULL,
    kind TEXT NOT NULL,                 -- one of formats.tags.KINDS, or empty
    UNIQUE (service, operation, kind)
);

CREATE TABLE spans (
    operation INTEGER NOT NULL,         -- operations.id
    start_ns INTEGER NOT NULL,
    trace BLOB NOT NULL,
    number INTEGER NOT NULL,            -- within the trace
    duration_ns INTEGER NOT NULL,
    tags BLOB NOT NULL,                 -- 5 bytes each, see tag_hash()
    PRIMARY KEY (operation, start_ns, trace, number)
) WITHOUT ROWID;
CREATE INDEX spans_by_trace ON spans (trace);

CREATE TABLE calls (
    trace BLOB NOT NULL,
    caller TEXT NOT NULL,
    callee TEXT NOT NULL,
    start_ns INTEGER NOT NULL,          -- of the trace
    count INTEGER NOT NULL,
    PRIMARY KEY (trace, caller, callee)
) WITHOUT ROWID;
CREATE INDEX calls_by_start ON calls (start_ns);
"""

SPANS_MAX = 20_000
"""Of one trace that can be found; the others are in it all the same."""

# Of one span: attributes, its resource's, those of its events. SDKs stop at 128 attributes.
_TAGS_MAX = 192

# Half of what the index takes. A search over a million spans with 20 tags each finds
# one wrongly in one of 50,000 times.
_HASH_BYTES = 5

# Nobody searches for a whole stack trace, or statement; as Jaeger over Elasticsearch.
_SEARCHED_CHARACTERS_MAX = 256

_TIME_MAX_NS = (1 << 63) - 1

_ERROR = 2  # OTLP's status code

# A search that reads so long is of no use to who waits for it; ten seconds is
# when Jaeger UI gives up.
_SEARCH_TIMEOUT_S = 10.0

# Steps of SQLite's machine between two looks at the clock: a millisecond or so.
_STEPS = 20_000


NAMES_MAX = 10_000
"""In one list of services, operations or calls. Nobody finds one among more, and a program that
puts ids into names makes any number."""

# In all names of one list, each of which may be as long as a record: 10,000 usual ones are a tenth.
_NAMES_CHARACTERS_MAX = 4 << 20


class SearchTooLong(Exception):
    """A search was given up; who asks must narrow it."""


@contextlib.contextmanager
def time_limit(
    connection: sqlite3.Connection, is_over: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """What is read within is given up after a time, or once ``is_over``: SearchTooLong."""
    deadline_s = time.monotonic() + _SEARCH_TIMEOUT_S
    connection.set_progress_handler(lambda: is_over() or time.monotonic() > deadline_s, _STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            raise SearchTooLong(
                f"given up after {_SEARCH_TIMEOUT_S:g} s; narrow it, as by service or time"
            ) from error
        raise
    finally:
        connection.set_progress_handler(None, 0)


@dataclass(frozen=True, slots=True)
class IndexedSpan:
    service: str
    operation: str
    kind: str
    start_ns: int
    duration_ns: int
    tags: bytes


@dataclass(frozen=True, slots=True)
class ServiceSummary:
    name: str
    span_count: int
    error_span_count: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a list of traces shows; an orphan is a span whose parent nobody delivered."""

    root_service: str
    root_operation: str
    start_ns: int
    end_ns: int
    span_count: int
    error_span_count: int
    orphan_span_count: int
    services: tuple[ServiceSummary, ...]

    def to_json(self) -> str:
        services = [(s.name, s.span_count, s.error_span_count) for s in self.services]
        return json.dumps({name: getattr(self, name) for name in _SUMMARY} | {"services": services})

    @classmethod
    def from_json(cls, text: str) -> TraceSummary:
        said = json.loads(text)
        services = tuple(ServiceSummary(*service) for service in said.pop("services"))
        return cls(**said, services=services)


_SUMMARY = [name for name in TraceSummary.__slots__ if name != "services"]


@dataclass(frozen=True, slots=True)
class TraceIndex:
    """All that the index has of one trace, by its verdict of that version."""

    trace: TraceId
    version: int
    spans: tuple[IndexedSpan, ...]
    summary: TraceSummary | None
    calls: Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Search:
    """Traces with a span that is all of this; an empty text is any.

    The span began from ``start_min_ns`` to ``start_max_ns``, and took from
    ``duration_min_ns`` to ``duration_max_ns``; ``tags`` are texts as Jaeger shows them.
    """

    service: str = ""
    operation: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    start_min_ns: int = 0
    start_max_ns: int = _TIME_MAX_NS
    duration_min_ns: int = 0
    duration_max_ns: int = _TIME_MAX_NS
    limit: int = 20


@dataclass(frozen=True, slots=True)
class Listing(Generic[_Row]):
    """The first rows of a list; ``is_cut`` if there are more."""

    rows: list[_Row]
    is_cut: bool


def tag_hash(key: str, value: str) -> bytes:
    """What stands for a tag in the index; the value as Jaeger shows it."""
    joined = key.encode(errors="replace") + b"\0" + value.encode(errors="replace")
    return hashlib.blake2b(joined, digest_size=_HASH_BYTES).digest()


# -------------------------------------------------------------------- making


def index_of(trace: StampedTrace, version: int) -> TraceIndex:
    """The index of a trace whose times are on one clock."""
    spans: list[IndexedSpan] = []
    service_by_id: dict[int, str] = {}
    children: list[tuple[int, str]] = []  # parent's id, own service
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    roots: list[tuple[int, str, str]] = []
    start_ns, end_ns = _TIME_MAX_NS, 0
    for part in trace.parts:
        resources: dict[int, list[bytes]] = {}
        for span in part.spans:
            service = service_of(span)
            begun_ns = min(max(span.start_ns - part.clock_offset_ns, 0), _TIME_MAX_NS)
            duration_ns = 0 if span.end_ns is None else max(span.end_ns - span.start_ns, 0)
            duration_ns = min(duration_ns, _TIME_MAX_NS - begun_ns)
            start_ns, end_ns = min(start_ns, begun_ns), max(end_ns, begun_ns + duration_ns)
            service_by_id[span.span_id] = service
            counts[service] += 1
            errors[service] += span.status == _ERROR
            if span.parent_id:
                children.append((span.parent_id, service))
            else:
                roots.append((begun_ns, service, span.name))
            if len(spans) == SPANS_MAX:
                continue
            resource = resource_of(span, part.node)
            of_resource = resources.get(id(resource))
            if of_resource is None:
                of_resource = list(_hashes(resource.attributes.items()))
                if span.resource is not None:  # else it is made for each span
                    resources[id(resource)] = of_resource
            # Of what is read for the index; no export leaves as much out.
            said = (tag for tag in tags_of(span) if tag[0] != BYTES_LEFT_OUT)
            tags = [*_hashes(said), *of_resource]
            for event in span.events:
                tags += _hashes(fields_of(event))
            packed = b"".join(dict.fromkeys(tags[:_TAGS_MAX]))
            kind = KINDS.get(span.kind, "")
            spans.append(IndexedSpan(service, span.name, kind, begun_ns, duration_ns, packed))
    if not counts:
        return TraceIndex(trace.trace, version, (), None, {})
    calls = Counter(
        (service_by_id[parent], service)
        for parent, service in children
        if service_by_id.get(parent, service) != service
    )
    _, root_service, root_operation = min(roots, default=(0, "", ""))
    summary = TraceSummary(
        root_service,
        root_operation,
        start_ns,
        end_ns,
        counts.total(),
        errors.total(),
        sum(parent not in service_by_id for parent, _ in children),
        tuple(ServiceSummary(name, counts[name], errors[name]) for name in sorted(counts)),
    )
    return TraceIndex(trace.trace, version, tuple(spans), summary, calls)


def _hashes(tags: Iterable[tuple[str, AttributeValue]]) -> Iterator[bytes]:
    for key, value in tags:
        text = text_of(value)
        if len(text) <= _SEARCHED_CHARACTERS_MAX:
            yield tag_hash(key, text)


def put(connection: sqlite3.Connection, index: TraceIndex) -> None:
    """Write the index of a trace over what there was, within the caller's transaction."""
    row = connection.execute(
        "SELECT verdict_version FROM traces WHERE trace = ?", (index.trace,)
    ).fetchone()
    if row is None or row[0] is None:
        return  # deleted meanwhile; and it may have come up again
    forget(connection, index.trace)
    if row[0] > index.version:
        connection.execute("INSERT INTO to_index (trace) VALUES (?)", (index.trace,))
    if index.summary is None:
        return
    connection.execute(
        "INSERT INTO summaries VALUES (?, ?)", (index.trace, index.summary.to_json())
    )
    ids: dict[tuple[str, str, str], int] = {}
    for number, span in enumerate(index.spans):
        key = (span.service, span.operation, span.kind)
        if key not in ids:
            ids[key] = _operation_id(connection, key)
        connection.execute(
            "INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)",
            (ids[key], span.start_ns, index.trace, number, span.duration_ns, span.tags),
        )
    connection.executemany(
        "INSERT INTO calls VALUES (?, ?, ?, ?, ?)",
        [
            (index.trace, caller, callee, index.summary.start_ns, count)
            for (caller, callee), count in index.calls.items()
        ],
    )


def _operation_id(connection: sqlite3.Connection, key: tuple[str, str, str]) -> int:
    connection.execute(
        "INSERT OR IGNORE INTO operations (service, operation, kind) VALUES (?, ?, ?)", key
    )
    (number,) = connection.execute(
        "SELECT id FROM operations WHERE service = ? AND operation = ? AND kind = ?", key
    ).fetchone()
    return int(number)


def forget(connection: sqlite3.Connection, trace: bytes) -> None:
    """Delete what the index has of a trace, within the caller's transaction."""
    operations = connection.execute(
        "SELECT DISTINCT operation FROM spans WHERE trace = ?", (trace,)
    ).fetchall()
    for table in ("to_index", "summaries", "spans", "calls"):
        connection.execute(f"DELETE FROM {table} WHERE trace = ?", (trace,))
    # Names of operations may be made by a faulty program: none stays without a span.
    connection.executemany(
        "DELETE FROM operations WHERE id = ?"
        " AND NOT EXISTS (SELECT 1 FROM spans WHERE spans.operation = operations.id)",
        operations,
    )


# -------------------------------------------------------------------- asking


class IndexReader:
    """Questions to the index, over a connection that only this thread uses."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.create_function("has_tags", 2, _has_tags, deterministic=True)

    def services(self) -> Listing[str]:
        found = self._listing("SELECT DISTINCT service FROM operations ORDER BY service", {})
        return Listing([service for (service,) in found.rows], found.is_cut)

    def operations(self, service: str, kind: str = "") -> Listing[tuple[str, str]]:
        """Names and kinds of a service; ``kind`` empty: of any."""
        found = self._listing(
            "SELECT operation, kind FROM operations WHERE service = :service"
            " AND (:kind = '' OR kind = :kind) ORDER BY operation, kind",
            {"service": service, "kind": kind},
        )
        return Listing([(operation, kind) for operation, kind in found.rows], found.is_cut)

    def _listing(self, query: str, parameters: Mapping[str, str | int]) -> Listing[tuple[Any, ...]]:
        """What a query gives, within all bounds. SearchTooLong if it is."""
        rows: list[tuple[Any, ...]] = []
        left = _NAMES_CHARACTERS_MAX
        with time_limit(self._connection):
            limited = {**parameters, "limit": NAMES_MAX + 1}
            for row in self._connection.execute(f"{query} LIMIT :limit", limited):
                left -= sum(len(name) for name in row if isinstance(name, str))
                if len(rows) == NAMES_MAX or left < 0:
                    return Listing(rows, is_cut=True)
                rows.append(row)
        return Listing(rows, is_cut=False)

    def search(self, search: Search) -> list[TraceId]:
        """The traces that match, those whose matching span began last first. SearchTooLong if it is."""
        with time_limit(self._connection):
            rows = self._connection.execute(
                "SELECT trace, max(start_ns) AS latest FROM spans WHERE operation IN"
                " (SELECT id FROM operations WHERE (:service = '' OR service = :service)"
                "   AND (:operation = '' OR operation = :operation))"
                " AND start_ns BETWEEN :start_min AND :start_max"
                " AND duration_ns BETWEEN :duration_min AND :duration_max"
                " AND (:wanted = x'' OR has_tags(tags, :wanted))"
                " GROUP BY trace ORDER BY latest DESC, trace LIMIT :limit",
                {
                    "service": search.service,
                    "operation": search.operation,
                    "start_min": search.start_min_ns,
                    "start_max": search.start_max_ns,
                    "duration_min": search.duration_min_ns,
                    "duration_max": search.duration_max_ns,
                    "wanted": b"".join(tag_hash(*tag) for tag in search.tags.items()),
                    "limit": search.limit,
                },
            ).fetchall()
        return [TraceId(trace) for trace, _ in rows]

    def summaries(self, traces: Sequence[TraceId]) -> Iterator[tuple[TraceId, TraceSummary]]:
        """What a list shows of each, in this order; none of one that was deleted meanwhile."""
        for trace in traces:
            row = self._connection.execute(
                "SELECT summary FROM summaries WHERE trace = ?", (trace,)
            ).fetchone()
            if row is not None:
                yield trace, TraceSummary.from_json(row[0])

    def calls(
        self, start_min_ns: int, start_max_ns: int, service: str = ""
    ) -> Listing[tuple[str, str, int]]:
        """Caller, callee and how often, in traces that began in this time.

        With ``service``, only those that it made or took.
        """
        found = self._listing(
            "SELECT caller, callee, sum(count) FROM calls"
            " WHERE start_ns BETWEEN :start_min AND :start_max"
            " AND (:service = '' OR :service IN (caller, callee))"
            " GROUP BY caller, callee ORDER BY caller, callee",
            {"start_min": start_min_ns, "start_max": start_max_ns, "service": service},
        )
        return Listing([(caller, callee, n) for caller, callee, n in found.rows], found.is_cut)


def _has_tags(tags: bytes, wanted: bytes) -> bool:
    return all(
        _has_tag(tags, wanted[i : i + _HASH_BYTES]) for i in range(0, len(wanted), _HASH_BYTES)
    )


def _has_tag(tags: bytes, wanted: bytes) -> bool:
    # Found by bytes, which is quick; where one hash ends and the next begins is none.
    at = tags.find(wanted)
    while at % _HASH_BYTES and at >= 0:
        at = tags.find(wanted, at + 1)
    return at >= 0
