# SPDX-License-Identifier: Apache-2.0
"""The file of the index: its tables, and what is written to them.

Traces are named by their keys in the store, which only rise. What a transaction writes to a B-tree
costs a page of each place in it that it touches. So the spans of some hundred traces that were stored
one after the other, a *batch*, are beside each other, and within a batch those of an operation: most of
the pages of a batch are written once or twice, however many operations there are. Who searches asks each
batch that may have something of the time that he asks for.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from coordinator.beside import Beside, path_beside
from coordinator.index.making import TraceIndex, TraceSummary
from protocol.messages import TraceId
from runtime.log import Log

_VERSION = 3

# Of a trace's key; the rest is its batch. Fewer traces make more batches to ask; more make a batch
# that is written for longer, so each of its pages more often.
_BATCH_BITS = 9

# Ids of operations that are kept in memory, some 300 bytes each.
_OPERATIONS_KEPT = 65_536

SCHEMA = """
CREATE TABLE summaries (
    trace INTEGER PRIMARY KEY,
    trace_id BLOB NOT NULL,
    version INTEGER NOT NULL,           -- of the verdict that it was made by
    batch INTEGER NOT NULL,
    operations BLOB NOT NULL,           -- operations.id of its spans, 8 bytes each, each once
    summary TEXT                        -- JSON, see TraceSummary; NULL: it has no spans
);

CREATE TABLE operations (
    id INTEGER PRIMARY KEY,
    service TEXT NOT NULL,
    operation TEXT NOT NULL,
    kind TEXT NOT NULL,                 -- one of formats.tags.KINDS, or empty
    traces INTEGER NOT NULL DEFAULT 0,  -- how many have a span of it
    UNIQUE (service, operation, kind)
);

-- Between which times the spans of a batch began, those that were deleted too.
CREATE TABLE batches (
    batch INTEGER PRIMARY KEY,
    first_ns INTEGER NOT NULL,
    last_ns INTEGER NOT NULL
);

CREATE TABLE spans (
    batch INTEGER NOT NULL,
    operation INTEGER NOT NULL,         -- operations.id
    trace INTEGER NOT NULL,
    number INTEGER NOT NULL,            -- within the trace
    start_ns INTEGER NOT NULL,
    duration_ns INTEGER NOT NULL,
    tags BLOB NOT NULL,                 -- 5 bytes each, see formats.rows.tag_hash()
    PRIMARY KEY (batch, operation, trace, number)
) WITHOUT ROWID;

CREATE TABLE calls (
    start_ns INTEGER NOT NULL,          -- of the trace
    trace INTEGER NOT NULL,
    caller TEXT NOT NULL,
    callee TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (start_ns, trace, caller, callee)
) WITHOUT ROWID;
"""

_Operation = tuple[str, str, str]


def index_path(store: Path) -> Path:
    """Where the index of a store is."""
    return path_beside(store, "index")


class IndexFile(Beside):
    """The writing side, for one thread."""

    def __init__(self, store: Path, store_id: str, log: Log) -> None:
        super().__init__(index_path(store), store_id, SCHEMA, _VERSION, log)
        self._operations: dict[_Operation, int] = {}  # ids of those that were met
        self._last_key = self._highest_key()

    def _highest_key(self) -> int:
        (key,) = self.connection.execute("SELECT max(trace) FROM summaries").fetchone()
        return key or 0

    def version(self, key: int, trace: TraceId) -> int | None:
        """By which verdict it has a trace; None: it has not."""
        if key > self._last_key:
            return None  # as nearly all are that are asked for
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

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        try:
            with super().transaction():
                yield
        except BaseException:
            self._operations.clear()
            self._last_key = self._highest_key()
            raise

    def put(self, made: Mapping[int, TraceIndex]) -> None:
        """Write the index of traces, by their keys, over what there was; within a transaction."""
        self.forget(key for key in made if key <= self._last_key)
        self._last_key = max((self._last_key, *made))
        counts: Counter[int] = Counter()
        times: dict[int, tuple[int, int]] = {}
        summaries: list[tuple[object, ...]] = []
        spans: list[tuple[int, int, int, int, int, int, bytes]] = []
        calls: list[tuple[int, int, str, str, int]] = []
        for key, index in made.items():
            batch = key >> _BATCH_BITS
            ids = [self._operation_id(operation) for operation in index.operations]
            counts.update(ids)
            summary = index.summary
            summaries.append(
                (
                    key,
                    index.trace,
                    index.version,
                    batch,
                    struct.pack(f"<{len(ids)}q", *ids),
                    None if summary is None else summary.to_json(),
                )
            )
            if summary is None:
                continue
            spans += [
                (batch, ids[operation], key, number, start_ns, duration_ns, tags)
                for number, (operation, start_ns, duration_ns, tags) in enumerate(index.spans)
            ]
            last_ns = max(start_ns for _, start_ns, _, _ in index.spans)
            before = times.get(batch, (summary.start_ns, last_ns))
            times[batch] = (min(before[0], summary.start_ns), max(before[1], last_ns))
            calls += [
                (summary.start_ns, key, caller, callee, count)
                for (caller, callee), count in index.calls.items()
            ]
        spans.sort()
        many = self.connection.executemany
        many("INSERT INTO summaries VALUES (?, ?, ?, ?, ?, ?)", summaries)
        many("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?, ?)", spans)
        many("INSERT INTO calls VALUES (?, ?, ?, ?, ?)", calls)
        many("UPDATE operations SET traces = traces + ?2 WHERE id = ?1", counts.items())
        many(
            "INSERT INTO batches VALUES (?, ?, ?) ON CONFLICT (batch) DO UPDATE"
            " SET first_ns = min(first_ns, excluded.first_ns), last_ns = max(last_ns, excluded.last_ns)",
            ((batch, *between) for batch, between in times.items()),
        )

    def _operation_id(self, operation: _Operation) -> int:
        known = self._operations.get(operation)
        if known is not None:
            return known
        self.connection.execute(
            "INSERT OR IGNORE INTO operations (service, operation, kind) VALUES (?, ?, ?)",
            operation,
        )
        (number,) = self.connection.execute(
            "SELECT id FROM operations WHERE service = ? AND operation = ? AND kind = ?", operation
        ).fetchone()
        if len(self._operations) == _OPERATIONS_KEPT:
            self._operations.clear()
        self._operations[operation] = int(number)
        return int(number)

    def forget(self, keys: Iterable[int]) -> None:
        """Delete what it has of traces; within a transaction."""
        counts: Counter[int] = Counter()
        batches: set[int] = set()
        for key in keys:
            row = self.connection.execute(
                "DELETE FROM summaries WHERE trace = ? RETURNING batch, operations, summary", (key,)
            ).fetchone()
            if row is None:
                continue
            batch, packed, summary = row
            operations = struct.unpack(f"<{len(packed) // 8}q", packed)
            self.connection.executemany(
                "DELETE FROM spans WHERE batch = ? AND operation = ? AND trace = ?",
                ((batch, operation, key) for operation in operations),
            )
            if summary is not None:
                self.connection.execute(
                    "DELETE FROM calls WHERE start_ns = ? AND trace = ?",
                    (TraceSummary.from_json(summary).start_ns, key),
                )
            counts.update(operations)
            batches.add(batch)
        self._forget_operations(counts)
        self.connection.executemany(
            "DELETE FROM batches WHERE batch = ?1"
            " AND NOT EXISTS (SELECT 1 FROM spans WHERE spans.batch = ?1)",
            ((batch,) for batch in batches),
        )

    def _forget_operations(self, counts: Mapping[int, int]) -> None:
        """So many traces of each are gone."""
        self.connection.executemany(
            "UPDATE operations SET traces = traces - ?2 WHERE id = ?1", counts.items()
        )
        # Names of operations may be made by a faulty program: none stays without a span.
        gone = self.connection.executemany(
            "DELETE FROM operations WHERE id = ? AND traces = 0", ((each,) for each in counts)
        )
        if gone.rowcount > 0:
            self._operations.clear()
