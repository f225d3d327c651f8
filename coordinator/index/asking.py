# SPDX-License-Identifier: Apache-2.0
"""What can be asked of the index."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from coordinator.index.making import TIME_MAX_NS, TraceSummary
from coordinator.store.reader import time_limit
from formats.rows import TAG_BYTES, tag_hash
from protocol.messages import TraceId

_Row = TypeVar("_Row")

NAMES_MAX = 10_000
"""In one list of services, operations or calls. Nobody finds one among more, and a program that
puts ids into names makes any number."""

# In all names of one list, each of which may be as long as a record: 10,000 usual ones are a tenth.
_NAMES_CHARACTERS_MAX = 4 << 20


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
    start_max_ns: int = TIME_MAX_NS
    duration_min_ns: int = 0
    duration_max_ns: int = TIME_MAX_NS
    limit: int = 20


@dataclass(frozen=True, slots=True)
class Listing(Generic[_Row]):
    """The first rows of a list; ``is_cut`` if there are more."""

    rows: list[_Row]
    is_cut: bool


_OF_OPERATIONS = (
    "AND s.operation IN (SELECT id FROM found.operations WHERE (:service = '' OR service = :service)"
    " AND (:operation = '' OR operation = :operation))"
)


class IndexReader:
    """Questions to the index, over a reader of the store, which the index is attached to.

    Nothing is found of a trace that is not stored any more.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.create_function("has_tags", 2, _has_tags, deterministic=True)

    def services(self) -> Listing[str]:
        found = self._listing("SELECT DISTINCT service FROM found.operations ORDER BY service", {})
        return Listing([service for (service,) in found.rows], found.is_cut)

    def operations(self, service: str, kind: str = "") -> Listing[tuple[str, str]]:
        """Names and kinds of a service; ``kind`` empty: of any."""
        found = self._listing(
            "SELECT operation, kind FROM found.operations WHERE service = :service"
            " AND (:kind = '' OR kind = :kind) ORDER BY operation, kind",
            {"service": service, "kind": kind},
        )
        return Listing([(operation, kind) for operation, kind in found.rows], found.is_cut)

    def _listing(self, query: str, parameters: Mapping[str, str | int]) -> Listing[tuple[Any, ...]]:
        """What a query gives, within all bounds. ReadTooLong if it is."""
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
        """The traces that match, those whose matching span began last first. ReadTooLong if it is."""
        with time_limit(self._connection):
            rows = self._connection.execute(
                "SELECT id, max(start_ns) AS latest FROM found.batches AS b"
                # In this order: each batch of that time is asked for the operations.
                " CROSS JOIN found.spans AS s ON s.batch = b.batch"
                f" {_OF_OPERATIONS if search.service or search.operation else ''}"
                " CROSS JOIN traces ON traces.key = trace"
                " WHERE first_ns <= :start_max AND last_ns >= :start_min"
                " AND start_ns BETWEEN :start_min AND :start_max"
                " AND duration_ns BETWEEN :duration_min AND :duration_max"
                " AND (:wanted = x'' OR has_tags(tags, :wanted))"
                " GROUP BY trace ORDER BY latest DESC, id LIMIT :limit",
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
                "SELECT summary FROM traces JOIN found.summaries ON trace = key WHERE id = ?"
                " AND summary IS NOT NULL",
                (trace,),
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
            "SELECT caller, callee, sum(count) FROM found.calls"
            " WHERE start_ns BETWEEN :start_min AND :start_max"
            " AND (:service = '' OR :service IN (caller, callee))"
            " GROUP BY caller, callee ORDER BY caller, callee",
            {"start_min": start_min_ns, "start_max": start_max_ns, "service": service},
        )
        return Listing([(caller, callee, n) for caller, callee, n in found.rows], found.is_cut)


def _has_tags(tags: bytes, wanted: bytes) -> bool:
    return all(_has_tag(tags, wanted[i : i + TAG_BYTES]) for i in range(0, len(wanted), TAG_BYTES))


def _has_tag(tags: bytes, wanted: bytes) -> bool:
    # Found by bytes, which is quick; where one hash ends and the next begins is none.
    at = tags.find(wanted)
    while at % TAG_BYTES and at >= 0:
        at = tags.find(wanted, at + 1)
    return at >= 0
