# SPDX-License-Identifier: Apache-2.0
"""What becomes of a store of an older schema when it is opened: all of it is ours then, or nothing.

4 brought the index and exports, 5 the records of ABI 2, 6 of which verdict traces were when they
were exported, and how long a closed slice would be if it were collected once more, 7 the
incarnation of nodes, and the order in which traces wait for the index. 8 has keys that rise in
place of ids, and neither index nor exports, which have files of their own since. 9 has for how
long each trace is kept, and which are pinned.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from coordinator.store.rows import Decompressor
from coordinator.store.schema import (
    APPLICATION_ID,
    CHUNK_NUMBER_BITS,
    EXPORTED_BEFORE,
    LOG_BYTES,
    PAGE_BYTES,
    SCHEMA,
    SCHEMA_VERSION,
    TABLES,
    WAITED_BEFORE,
    StoreError,
    connect,
    in_words,
)
from formats.records import Data, RecordType
from formats.slices import SliceDecoder
from runtime.log import Log

OLDEST_SCHEMA = 3
"""That is taken over."""

# That has the tables of today, but for some columns.
_LAST_WITH_KEYS = 8

# Of a slice at once, until its first record is there.
_LOOKED_AT_BYTES = 4096

_OLD_TABLES = ("nodes", "traces", "triggers", "members", "abandoned", "slices", "chunks")
_OLD_INDEX_TABLES = ("to_index", "summaries", "operations", "spans", "calls")
_OLD_INDEXES = ("traces_by_age", "triggers_by_primary", "members_by_group")

_ABOUT = """
INSERT INTO about (store_id, age_s, unix_s) SELECT lower(hex(randomblob(16))), 0, strftime('%s');
"""

# In this order each finds what it names. Chunks are numbered slice by slice.
_MOVE = f"""
INSERT INTO nodes (name, addresses, incarnation)
    SELECT node, addresses, incarnation FROM old_nodes ORDER BY node;
INSERT OR IGNORE INTO nodes (name)
    SELECT node FROM old_slices UNION SELECT node FROM old_triggers UNION SELECT node FROM old_abandoned;
INSERT INTO about (store_id, age_s, unix_s) SELECT lower(hex(randomblob(16))), coalesce(max(stored_ns), 0) / 1e9,
    coalesce(max(stored_ns), 0) / 1e9 FROM old_traces;
INSERT INTO traces (id, stored_ns, born_s, released, verdict, verdict_version, verdict_rest)
    SELECT trace, stored_ns, stored_ns / 1000000000, released, verdict, verdict_version, verdict_rest
    FROM old_traces ORDER BY stored_ns, trace;

CREATE TEMP TABLE old_groups (
    key INTEGER PRIMARY KEY, name TEXT, primary_id BLOB, UNIQUE (name, primary_id)
);
INSERT INTO old_groups (name, primary_id)
    SELECT name, primary_trace FROM old_members UNION SELECT name, primary_trace FROM old_triggers
    UNION SELECT name, primary_trace FROM old_abandoned;
INSERT INTO trigger_names (name) SELECT DISTINCT name FROM old_groups ORDER BY name;
INSERT INTO groups (key, trigger, primary_trace, primary_id, abandoned_by)
    SELECT g.key, n.key, t.key, iif(t.key IS NULL, g.primary_id, NULL),
        (SELECT nodes.key FROM old_abandoned AS a JOIN nodes ON nodes.name = a.node
            WHERE a.name = g.name AND a.primary_trace = g.primary_id)
    FROM old_groups AS g JOIN trigger_names AS n ON n.name = g.name
    LEFT JOIN traces AS t ON t.id = g.primary_id;
INSERT INTO firings
    SELECT g.key, n.key, f.laterals, f.why, f.source, f.fired_at_ns, f.suppressed
    FROM old_triggers AS f JOIN old_groups AS g ON g.name = f.name AND g.primary_id = f.primary_trace
    JOIN nodes AS n ON n.name = f.node;
INSERT INTO members
    SELECT t.key, g.key FROM old_members AS m JOIN traces AS t ON t.id = m.trace
    JOIN old_groups AS g ON g.name = m.name AND g.primary_id = m.primary_trace
    WHERE m.trace != m.primary_trace;
DROP TABLE old_groups;

CREATE TEMP TABLE moved (id INTEGER PRIMARY KEY, old INTEGER, trace INTEGER, node INTEGER);
INSERT INTO moved
    SELECT t.key << {CHUNK_NUMBER_BITS}
            | row_number() OVER (PARTITION BY t.key ORDER BY n.key, c.offset),
        c.rowid, t.key, n.key
    FROM old_chunks AS c JOIN traces AS t ON t.id = c.trace JOIN nodes AS n ON n.name = c.node;
INSERT INTO chunks
    SELECT moved.id, moved.node, old_chunks.offset, old_chunks.data
    FROM moved JOIN old_chunks ON old_chunks.rowid = moved.old ORDER BY moved.id;
CREATE INDEX temp.moved_by_slice ON moved (trace, node, id);
INSERT INTO slices
    SELECT t.key, n.key, s.epoch, s.bytes,
        coalesce((SELECT min(id) FROM moved WHERE trace = t.key AND node = n.key), 0),
        coalesce((SELECT max(id) FROM moved WHERE trace = t.key AND node = n.key), 0),
        s.restarted, s.least, s.held, s.status_epoch, s.flags, s.status_bytes, s.open_handles,
        s.crumbs, s.clock_offset_ns, s.clock_error_ns
    FROM old_slices AS s JOIN traces AS t ON t.id = s.trace JOIN nodes AS n ON n.name = s.node;
DROP TABLE moved;

-- The first is missing, so the index looks at all that is stored. Of no trace: nothing is exported for it.
INSERT INTO changes VALUES (2, 0, 0);
"""


_AFTER_8 = """
ALTER TABLE about ADD COLUMN kept_by TEXT NOT NULL DEFAULT '';
ALTER TABLE traces ADD COLUMN keep_s INTEGER NOT NULL DEFAULT 0;
ALTER TABLE traces ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
CREATE INDEX traces_that_may_go ON traces (keep_s) WHERE released = 1 AND pinned = 0;
CREATE INDEX traces_pinned ON traces (pinned) WHERE pinned > 0;
"""


def _statements(script: str) -> Iterator[str]:
    """One by one: executescript() would end the transaction that it is called in."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _is_before_abi_2(chunks: Iterable[bytes]) -> bool:
    """Whether the records of a slice are in the format before ABI 2, by the first of them.

    Its header had 16 bytes: the length in 32 bits, the type and the flags in 16 each, the time. Read as
    today's, the upper half of the length is type 0, which nobody writes, and the type begins the time.
    """
    decoder = SliceDecoder()
    for chunk in chunks:
        for at in range(0, len(chunk), _LOOKED_AT_BYTES):
            records = decoder.feed(chunk[at : at + _LOOKED_AT_BYTES])
            if records:
                body, ticks = records[0].body, records[0].ticks
                return (
                    isinstance(body, Data)
                    and body.type == 0
                    and ticks & 0xFFFF in set(RecordType)
                    and ticks >> 16 & 0xFFFF <= 1
                )
    return False


def _old_chunks(connection: sqlite3.Connection, key: tuple[bytes, str]) -> Iterator[bytes]:
    rows = connection.execute(
        "SELECT data FROM chunks WHERE trace = ? AND node = ? ORDER BY offset", key
    )
    decompressor = Decompressor()
    return (decompressor.plain(data) for (data,) in rows)


def _drop_unreadable(connection: sqlite3.Connection) -> tuple[int, int]:
    """Drop the bytes of slices from before ABI 2: of how many slices, of how many traces.

    What else is known of their traces stays. Those that are still in assembly go on as if their
    nodes had lost the slice, as they did: no node takes up a report store from before ABI 2.
    """
    slices = connection.execute("SELECT trace, node FROM slices WHERE bytes > 0").fetchall()
    dropped = [key for key in slices if _is_before_abi_2(_old_chunks(connection, key))]
    for key in dropped:
        connection.execute("DELETE FROM chunks WHERE trace = ? AND node = ?", key)
        connection.execute(
            "UPDATE slices SET epoch = 0, bytes = 0, restarted = 1, held = CASE WHEN EXISTS"
            " (SELECT 1 FROM traces WHERE traces.trace = slices.trace AND released = 1)"
            " THEN held END WHERE trace = ? AND node = ?",
            key,
        )
    return len(dropped), len({trace for trace, _ in dropped})


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def _add_column(connection: sqlite3.Connection, table: str, column: str) -> None:
    if column.split()[0] not in _columns(connection, table):
        connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")


def _make_ours(connection: sqlite3.Connection, version: int) -> tuple[int, int]:
    """Within a transaction; see _drop_unreadable for what it returns."""
    _add_column(connection, "slices", "least INTEGER")
    _add_column(connection, "nodes", "incarnation TEXT")
    dropped = _drop_unreadable(connection) if version < 5 else (0, 0)
    for table in _OLD_INDEX_TABLES:
        connection.execute(f"DROP TABLE IF EXISTS {table}")
    if _columns(connection, "to_export"):
        connection.execute(f"ALTER TABLE to_export RENAME TO {WAITED_BEFORE}")
    if "verdict" in _columns(connection, "exported"):
        connection.execute(f"ALTER TABLE exported RENAME TO {EXPORTED_BEFORE}")
    else:
        # As of what kind is not known. What is closed again goes once more at most.
        connection.execute("DROP TABLE IF EXISTS exported")
    for index in _OLD_INDEXES:
        connection.execute(f"DROP INDEX IF EXISTS {index}")
    for table in _OLD_TABLES:
        connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    for statement in _statements(TABLES + _MOVE):
        connection.execute(statement)
    for table in _OLD_TABLES:
        connection.execute(f"DROP TABLE old_{table}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return dropped


def _take_over(connection: sqlite3.Connection, version: int, path: Path, log: Log) -> None:
    log.info(
        f"{path}: takes over schema {version}; this reads and writes all of it, and needs as much"
        " room again on the disk for as long"
    )
    # The journal of before: it keeps what is overwritten, which is little. The log of WAL would
    # have all that is written.
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("BEGIN EXCLUSIVE")
    try:
        slices, traces = _make_ours(connection, version)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    if slices:
        log.warning(
            f"{path}: taken over from schema {version}; dropped {slices} slices of {traces} traces, whose"
            " records are in the format before ABI 2, which this version cannot read."
            " Their triggers and verdicts stay"
        )
    else:
        log.info(f"{path}: taken over from schema {version}")


def open_store(path: Path, log: Log) -> sqlite3.Connection:
    """Open a store to write to it: a new one, or one of before. StoreError says why that cannot be."""
    try:
        connection = connect(path, writable=True)
    except sqlite3.Error as error:
        raise StoreError(f"{path}: cannot be opened: {in_words(path, error)}") from error
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables == 0:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.executescript(f"BEGIN EXCLUSIVE; {SCHEMA} {_ABOUT} COMMIT;")
        elif application != APPLICATION_ID:
            raise StoreError(f"{path}: is a database, but not a store of Backsight")
        elif version == _LAST_WITH_KEYS:
            connection.executescript(
                f"BEGIN EXCLUSIVE; {_AFTER_8} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        elif OLDEST_SCHEMA <= version < SCHEMA_VERSION:
            _take_over(connection, version, path, log)
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{path}: has schema {version}, this coordinator knows {SCHEMA_VERSION};"
                " give it another file, or run the version that wrote this one"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_BYTES // page_bytes}")
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(f"{path}: cannot be used: {in_words(path, error)}") from error
    except StoreError:
        connection.close()
        raise
    return connection
