# SPDX-License-Identifier: Apache-2.0
"""The file of the store: its tables, who has it, and what becomes of an older one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from coordinator import index
from coordinator.rows import Chunks
from formats.records import Data, RecordType
from formats.slices import SliceDecoder
from runtime.log import Log

SCHEMA_VERSION = 7

# "BSGT", so that `file` and we can tell a store from any other database.
_APPLICATION_ID = 0x42534754

_EXPORTED = """
-- What was exported of a trace; failed or not.
CREATE TABLE exported (
    trace BLOB PRIMARY KEY,
    bytes INTEGER NOT NULL,             -- as the verdict says, of the last time
    verdict TEXT NOT NULL               -- its kind
) WITHOUT ROWID;
"""

_FOLLOWED = f"""
{index.SCHEMA}

-- Traces that shall be exported, in the order in which they were closed.
CREATE TABLE to_export (
    number INTEGER PRIMARY KEY,
    trace BLOB NOT NULL UNIQUE
);

{_EXPORTED}
"""

_OLDEST_SCHEMA = 3
"""That is taken over. 4 brought the index and exports, 5 the records of ABI 2, 6 of which verdict
traces were when they were exported, and how long a closed slice would be if it were collected once more,
7 the incarnation of nodes, and the order in which traces wait for the index."""

# Of a slice at once, until its first record is there.
_LOOKED_AT_BYTES = 4096

_SCHEMA = f"""
CREATE TABLE nodes (
    node TEXT PRIMARY KEY,
    addresses TEXT NOT NULL,            -- JSON list
    incarnation TEXT                    -- decimal, of the last that connected; NULL: not known
) WITHOUT ROWID;

-- A row for each trace of which anything is stored.
CREATE TABLE traces (
    trace BLOB PRIMARY KEY,
    stored_ns INTEGER NOT NULL,         -- Unix time of its first write
    released INTEGER NOT NULL DEFAULT 0,
    verdict TEXT,                       -- kind; NULL before the first
    verdict_version INTEGER,
    verdict_rest TEXT                   -- JSON object, see verdict_rest()
) WITHOUT ROWID;
CREATE INDEX traces_by_age ON traces (released, stored_ns);

CREATE TABLE triggers (
    name TEXT NOT NULL,
    primary_trace BLOB NOT NULL,
    node TEXT NOT NULL,
    laterals BLOB NOT NULL,             -- 16 bytes each
    why TEXT NOT NULL,
    source INTEGER NOT NULL,
    fired_at_ns INTEGER NOT NULL,
    suppressed INTEGER NOT NULL,
    PRIMARY KEY (name, primary_trace, node)
) WITHOUT ROWID;
CREATE INDEX triggers_by_primary ON triggers (primary_trace);

-- Which groups a trace belongs to, as primary or lateral.
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
    epoch INTEGER NOT NULL DEFAULT 0,   -- of the chunks; 0 before the first
    bytes INTEGER NOT NULL DEFAULT 0,   -- stored in chunks
    restarted INTEGER NOT NULL DEFAULT 0,
    least INTEGER,                      -- bytes; see PutReleased, NULL before it
    held INTEGER,                       -- NULL before the first status
    status_epoch INTEGER,
    flags INTEGER,
    status_bytes INTEGER,
    open_handles INTEGER,
    crumbs BLOB,                        -- 8 bytes each, little-endian
    clock_offset_ns INTEGER,
    clock_error_ns INTEGER,
    PRIMARY KEY (trace, node)
) WITHOUT ROWID;

-- With rowids: blobs do not belong into an index.
CREATE TABLE chunks (
    trace BLOB NOT NULL,
    node TEXT NOT NULL,
    offset INTEGER NOT NULL,
    data BLOB NOT NULL,                 -- zlib
    UNIQUE (trace, node, offset)
);

{_FOLLOWED}

PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


class StoreError(Exception):
    """The store cannot be used, and why."""


def connect(path: Path, *, writable: bool) -> sqlite3.Connection:
    """Open the file; only to read from it, unless it is to be ``writable``."""
    mode = "rwc" if writable else "ro"
    # Transactions are ours to begin; threads hand connections on, one at a time.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA busy_timeout = 10000")
    return connection


def lock_store(path: Path) -> int:
    """Make the file, for our eyes only, if there is none; a descriptor that holds it for us alone.

    Beside the file, since SQLite has locks of its own in it, of each write.
    """
    lock = Path(f"{path}.lock")
    try:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise StoreError(
            f"{path}: the directory {path.parent} does not exist; make it, or name another"
            " file as `store.path`"
        ) from None
    except OSError as error:
        raise StoreError(
            f"{lock}: cannot be opened: {error.strerror}; let the coordinator's user write to"
            f" {path.parent}, or name another file as `store.path`"
        ) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileExistsError):
            # What is captured is whatever applications said: not for everybody.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except BlockingIOError:
        os.close(held)
        raise StoreError(
            f"{path}: another coordinator has it; stop that one, or name another file as"
            " `store.path`"
        ) from None
    except OSError as error:
        os.close(held)
        raise StoreError(f"{path}: cannot be made: {error.strerror}") from error
    return held


# Whatever the upper bits say more of it.
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def in_words(path: Path, error: sqlite3.Error) -> str:
    """What is wrong. SQLite calls it an I/O error where a full disk has no room for its journal."""
    with contextlib.suppress(OSError):
        if "I/O" in str(error) and os.statvfs(path.parent).f_bavail == 0:
            return "the disk is full"
    # Python's own errors have no code.
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _BROKEN:
        return (
            f"{error}; stop the coordinator, and put a copy of the store in its place, or move it and"
            f" {path.name}-wal and -shm away, to begin with an empty one"
        )
    return str(error)


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


def _drop_unreadable(connection: sqlite3.Connection) -> tuple[int, int]:
    """Drop the bytes of slices from before ABI 2: of how many slices, of how many traces.

    What else is known of their traces stays. Those that are still in assembly go on as if their
    nodes had lost the slice, as they did: no node takes up a report store from before ABI 2.
    """
    slices = connection.execute("SELECT trace, node FROM slices WHERE bytes > 0").fetchall()
    dropped = [key for key in slices if _is_before_abi_2(Chunks(connection, *key))]
    for key in dropped:
        connection.execute("DELETE FROM chunks WHERE trace = ? AND node = ?", key)
        connection.execute(
            "UPDATE slices SET epoch = 0, bytes = 0, restarted = 1, held = CASE WHEN EXISTS"
            " (SELECT 1 FROM traces WHERE traces.trace = slices.trace AND released = 1)"
            " THEN held END WHERE trace = ? AND node = ?",
            key,
        )
    return len(dropped), len({trace for trace, _ in dropped})


def _add_column(connection: sqlite3.Connection, table: str, column: str) -> None:
    name = column.split()[0]
    if all(row[1] != name for row in connection.execute(f"PRAGMA table_info({table})")):
        connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")


def _take_over(connection: sqlite3.Connection, version: int, path: Path, log: Log) -> None:
    """Make a store of an older schema one of ours: all of it, or nothing."""
    connection.execute("BEGIN EXCLUSIVE")
    try:
        if version == 3:
            for statement in _statements(_FOLLOWED):
                connection.execute(statement)
            connection.execute(
                "INSERT INTO to_index (trace) SELECT trace FROM traces"
                " WHERE verdict IS NOT NULL ORDER BY stored_ns"
            )
        else:
            if version < 6:
                # As of what kind is not known. What is closed again goes once more at most.
                connection.execute("DROP TABLE exported")
                connection.execute(_EXPORTED)
            connection.execute("ALTER TABLE to_index RENAME TO waited")
            connection.execute(index.WAITING)
            connection.execute(
                "INSERT INTO to_index (trace) SELECT trace FROM traces"
                " WHERE trace IN (SELECT trace FROM waited) ORDER BY stored_ns"
            )
            connection.execute("DROP TABLE waited")
        _add_column(connection, "slices", "least INTEGER")
        _add_column(connection, "nodes", "incarnation TEXT")
        slices, traces = _drop_unreadable(connection) if version < 5 else (0, 0)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    if slices:
        log.warning(
            f"{path}: taken over from schema {version}; dropped {slices} slices of {traces} traces, whose"
            " records are in the format before ABI 2, which this version cannot read."
            " Their triggers and verdicts stay"
        )


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
            connection.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} COMMIT;")
        elif application != _APPLICATION_ID:
            raise StoreError(f"{path}: is a database, but not a store of Backsight")
        elif _OLDEST_SCHEMA <= version < SCHEMA_VERSION:
            _take_over(connection, version, path, log)
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{path}: has schema {version}, this coordinator knows {SCHEMA_VERSION};"
                " give it another file, or run the version that wrote this one"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(f"{path}: cannot be used: {in_words(path, error)}") from error
    except StoreError:
        connection.close()
        raise
    return connection
