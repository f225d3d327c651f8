# SPDX-License-Identifier: Apache-2.0
"""Stores as older versions wrote them: schema 7, and what 3 to 6 lacked of it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

from coordinator.core.records import (
    AppendSlice,
    PutAbandoned,
    PutNode,
    PutReleased,
    PutStatus,
    PutTrigger,
    PutVerdict,
    Record,
)
from coordinator.store.rows import verdict_rest
from protocol.messages import TraceId

_SCHEMA_7 = """
CREATE TABLE nodes (
    node TEXT PRIMARY KEY,
    addresses TEXT NOT NULL,
    incarnation TEXT
) WITHOUT ROWID;
CREATE TABLE traces (
    trace BLOB PRIMARY KEY,
    stored_ns INTEGER NOT NULL,
    released INTEGER NOT NULL DEFAULT 0,
    verdict TEXT,
    verdict_version INTEGER,
    verdict_rest TEXT
) WITHOUT ROWID;
CREATE INDEX traces_by_age ON traces (released, stored_ns);
CREATE TABLE triggers (
    name TEXT NOT NULL,
    primary_trace BLOB NOT NULL,
    node TEXT NOT NULL,
    laterals BLOB NOT NULL,
    why TEXT NOT NULL,
    source INTEGER NOT NULL,
    fired_at_ns INTEGER NOT NULL,
    suppressed INTEGER NOT NULL,
    PRIMARY KEY (name, primary_trace, node)
) WITHOUT ROWID;
CREATE INDEX triggers_by_primary ON triggers (primary_trace);
CREATE TABLE members (
    trace BLOB NOT NULL,
    name TEXT NOT NULL,
    primary_trace BLOB NOT NULL,
    PRIMARY KEY (trace, name, primary_trace)
) WITHOUT ROWID;
CREATE INDEX members_by_group ON members (name, primary_trace);
CREATE TABLE abandoned (
    name TEXT NOT NULL,
    primary_trace BLOB NOT NULL,
    node TEXT NOT NULL,
    PRIMARY KEY (name, primary_trace)
) WITHOUT ROWID;
CREATE TABLE slices (
    trace BLOB NOT NULL,
    node TEXT NOT NULL,
    epoch INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    restarted INTEGER NOT NULL DEFAULT 0,
    least INTEGER,
    held INTEGER,
    status_epoch INTEGER,
    flags INTEGER,
    status_bytes INTEGER,
    open_handles INTEGER,
    crumbs BLOB,
    clock_offset_ns INTEGER,
    clock_error_ns INTEGER,
    PRIMARY KEY (trace, node)
) WITHOUT ROWID;
CREATE TABLE chunks (
    trace BLOB NOT NULL,
    node TEXT NOT NULL,
    offset INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (trace, node, offset)
);
CREATE TABLE to_index (
    number INTEGER PRIMARY KEY,
    trace BLOB NOT NULL UNIQUE
);
CREATE TABLE summaries (
    trace BLOB PRIMARY KEY,
    summary TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE operations (
    id INTEGER PRIMARY KEY,
    service TEXT NOT NULL,
    operation TEXT NOT NULL,
    kind TEXT NOT NULL,
    UNIQUE (service, operation, kind)
);
CREATE TABLE spans (
    operation INTEGER NOT NULL,
    start_ns INTEGER NOT NULL,
    trace BLOB NOT NULL,
    number INTEGER NOT NULL,
    duration_ns INTEGER NOT NULL,
    tags BLOB NOT NULL,
    PRIMARY KEY (operation, start_ns, trace, number)
) WITHOUT ROWID;
CREATE INDEX spans_by_trace ON spans (trace);
CREATE TABLE calls (
    trace BLOB NOT NULL,
    caller TEXT NOT NULL,
    callee TEXT NOT NULL,
    start_ns INTEGER NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (trace, caller, callee)
) WITHOUT ROWID;
CREATE INDEX calls_by_start ON calls (start_ns);
CREATE TABLE to_export (
    number INTEGER PRIMARY KEY,
    trace BLOB NOT NULL UNIQUE
);
CREATE TABLE exported (
    trace BLOB PRIMARY KEY,
    bytes INTEGER NOT NULL,
    verdict TEXT NOT NULL
) WITHOUT ROWID;
PRAGMA application_id = 0x42534754;
"""

_LACKED = {
    7: "",
    6: """
        DROP TABLE to_index;
        CREATE TABLE to_index (trace BLOB PRIMARY KEY) WITHOUT ROWID;
        ALTER TABLE nodes DROP COLUMN incarnation;
    """,
    5: """
        ALTER TABLE slices DROP COLUMN least;
        ALTER TABLE exported DROP COLUMN verdict;
    """,
    4: "",
    3: "".join(
        f"DROP TABLE {table};"
        for table in (
            "to_index",
            "summaries",
            "operations",
            "spans",
            "calls",
            "to_export",
            "exported",
        )
    ),
}
"""By schema, from the one after it."""


class OldStore:
    """Writes what a coordinator of then would have: each record by itself, the second later than the one before."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._now_ns = 10**18

    def _touch(self, *traces: TraceId) -> None:
        self._now_ns += 10**9
        self.connection.executemany(
            "INSERT OR IGNORE INTO traces (trace, stored_ns) VALUES (?, ?)",
            [(trace, self._now_ns) for trace in traces],
        )

    def write(self, *records: Record) -> None:
        execute = self.connection.execute
        for record in records:
            match record:
                case PutNode():
                    execute(
                        "INSERT INTO nodes (node, addresses) VALUES (?, ?)",
                        (record.node, json.dumps(record.addresses)),
                    )
                case PutTrigger():
                    fired, group = record.fired, record.fired.group
                    execute(
                        "INSERT INTO triggers VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        (
                            group.trigger,
                            group.primary,
                            record.node,
                            b"".join(fired.laterals),
                            fired.why,
                            int(fired.source),
                            fired.fired_at_ns,
                            fired.suppressed,
                        ),
                    )
                    traces = (group.primary, *fired.laterals)
                    self._touch(*traces)
                    self.connection.executemany(
                        "INSERT OR IGNORE INTO members VALUES (?, ?, ?)",
                        [(trace, group.trigger, group.primary) for trace in traces],
                    )
                case PutAbandoned():
                    self._touch(record.group.primary)
                    row = (record.group.trigger, record.group.primary, record.node)
                    execute("INSERT INTO abandoned VALUES (?, ?, ?)", row)
                case PutStatus():
                    status, clock = record.status, record.clock
                    self._slice(status.trace, record.node)
                    execute(
                        "UPDATE slices SET restarted = ?, held = ?, status_epoch = ?, flags = ?,"
                        " status_bytes = ?, open_handles = ?, crumbs = ?, clock_offset_ns = ?,"
                        " clock_error_ns = ? WHERE trace = ? AND node = ?",
                        (
                            int(record.restarted),
                            int(status.held),
                            status.epoch,
                            int(status.flags),
                            status.bytes,
                            status.open_handles,
                            b"".join(crumb.to_bytes(8, "little") for crumb in status.crumbs),
                            clock.offset_ns if clock else None,
                            clock.error_ns if clock else None,
                            status.trace,
                            record.node,
                        ),
                    )
                case AppendSlice():
                    self._slice(record.trace, record.node)
                    key = (record.trace, record.node)
                    execute(
                        "INSERT INTO chunks VALUES (?, ?, ?, ?)",
                        (*key, record.offset, zlib.compress(record.data)),
                    )
                    execute(
                        "UPDATE slices SET epoch = ?, bytes = ? WHERE trace = ? AND node = ?",
                        (record.epoch, record.offset + len(record.data), *key),
                    )
                case PutVerdict():
                    self._touch(record.trace)
                    execute(
                        "UPDATE traces SET verdict = ?, verdict_version = ?, verdict_rest = ?"
                        " WHERE trace = ?",
                        (
                            str(record.verdict.kind),
                            record.verdict.version,
                            verdict_rest(record.verdict),
                            record.trace,
                        ),
                    )
                case PutReleased():
                    self._touch(record.trace)
                    execute(
                        "UPDATE traces SET released = ? WHERE trace = ?",
                        (int(record.released), record.trace),
                    )
                case _:
                    raise TypeError(f"{record} is not written by this")

    def _slice(self, trace: TraceId, node: str) -> None:
        self._touch(trace)
        self.connection.execute(
            "INSERT OR IGNORE INTO slices (trace, node) VALUES (?, ?)", (trace, node)
        )


@contextlib.contextmanager
def old_store(path: Path, schema: int = 7) -> Iterator[OldStore]:
    """Make one; what is written within is there afterwards, as far as that schema had room for it."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_SCHEMA_7)
        yield OldStore(connection)
        for older in range(7, schema - 1, -1):
            connection.executescript(_LACKED[older])
        connection.execute(f"PRAGMA user_version = {schema}")
