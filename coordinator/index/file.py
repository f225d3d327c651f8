# SPDX-License-Identifier: Apache-2.0
"""The file of the index: its tables, and what is written to them.

Traces are named by their keys in the store. A row for each span is in the order (service and
operation, start).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from coordinator.beside import Beside, path_beside
from coordinator.index.making import TraceIndex
from protocol.messages import TraceId
from runtime.log import Log

_VERSION = 2

SCHEMA = """
CREATE TABLE summaries (
    trace INTEGER PRIMARY KEY,
    trace_id BLOB NOT NULL,
    version INTEGER NOT NULL,           -- of the verdict that it was made by
    summary TEXT                        -- JSON, see TraceSummary; NULL: it has no spans
);

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
    trace INTEGER NOT NULL,
    number INTEGER NOT NULL,            -- within the trace
    duration_ns INTEGER NOT NULL,
    tags BLOB NOT NULL,                 -- 5 bytes each, see formats.rows.tag_hash()
    PRIMARY KEY (operation, start_ns, trace, number)
) WITHOUT ROWID;
CREATE INDEX spans_by_trace ON spans (trace);

CREATE TABLE calls (
    trace INTEGER NOT NULL,
    caller TEXT NOT NULL,
    callee TEXT NOT NULL,
    start_ns INTEGER NOT NULL,          -- of the trace
    count INTEGER NOT NULL,
    PRIMARY KEY (trace, caller, callee)
) WITHOUT ROWID;
CREATE INDEX calls_by_start ON calls (start_ns);
"""


def index_path(store: Path) -> Path:
    """Where the index of a store is."""
    return path_beside(store, "index")


class IndexFile(Beside):
    """The writing side, for one thread."""

    def __init__(self, store: Path, store_id: str, log: Log) -> None:
        super().__init__(index_path(store), store_id, SCHEMA, _VERSION, log)

    def version(self, key: int, trace: TraceId) -> int | None:
        """By which verdict it has a trace; None: it has not."""
        row = self.connection.execute(
            "SELECT version FROM summaries WHERE trace = ? AND trace_id = ?", (key, trace)
        ).fetchone()
        return None if row is None else int(row[0])

    def keys(self, after: int, limit: int) -> list[tuple[int, TraceId]]:
        """Keys and ids of the traces that it has, in order."""
        rows = self.connection.execute(
            "SELECT trace, trace_id FROM summaries WHERE trace > ? ORDER BY trace LIMIT ?",
            (after, limit),
        )
        return [(key, TraceId(trace)) for key, trace in rows]

    def put(self, key: int, index: TraceIndex) -> None:
        """Write the index of a trace over what there was; within a transaction."""
        self.forget((key,))
        summary = None if index.summary is None else index.summary.to_json()
        self.connection.execute(
            "INSERT INTO summaries VALUES (?, ?, ?, ?)", (key, index.trace, index.version, summary)
        )
        if index.summary is None:
            return
        ids: dict[tuple[str, str, str], int] = {}
        rows = []
        for number, span in enumerate(index.spans):
            operation = (span.service, span.operation, span.kind)
            if operation not in ids:
                ids[operation] = self._operation_id(operation)
            rows.append((ids[operation], span.start_ns, key, number, span.duration_ns, span.tags))
        self.connection.executemany("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", rows)
        self.connection.executemany(
            "INSERT INTO calls VALUES (?, ?, ?, ?, ?)",
            [
                (key, caller, callee, index.summary.start_ns, count)
                for (caller, callee), count in index.calls.items()
            ],
        )

    def _operation_id(self, operation: tuple[str, str, str]) -> int:
        self.connection.execute(
            "INSERT OR IGNORE INTO operations (service, operation, kind) VALUES (?, ?, ?)",
            operation,
        )
        (number,) = self.connection.execute(
            "SELECT id FROM operations WHERE service = ? AND operation = ? AND kind = ?", operation
        ).fetchone()
        return int(number)

    def forget(self, keys: Iterable[int]) -> None:
        """Delete what it has of traces; within a transaction."""
        for key in keys:
            found = self.connection.execute("DELETE FROM summaries WHERE trace = ?", (key,))
            if not found.rowcount:
                continue
            operations = self.connection.execute(
                "SELECT DISTINCT operation FROM spans WHERE trace = ?", (key,)
            ).fetchall()
            self.connection.execute("DELETE FROM spans WHERE trace = ?", (key,))
            self.connection.execute("DELETE FROM calls WHERE trace = ?", (key,))
            # Names of operations may be made by a faulty program: none stays without a span.
            self.connection.executemany(
                "DELETE FROM operations WHERE id = ?"
                " AND NOT EXISTS (SELECT 1 FROM spans WHERE spans.operation = operations.id)",
                operations,
            )
