# SPDX-License-Identifier: Apache-2.0
"""The file of the store: its tables, and who has it.

Rows are of two sorts. Those of a trace are inserted at the right edge of their B-trees, since
keys of traces only rise and all else of a trace is under its key: traces that are written at
the same time share pages, which is what a commit costs. Only ``traces.id`` is in the order of
the ids, which is none. A row is deleted with its trace.

    traces ──┬── slices ── chunks (by the numbers that the slice names)
             ├── groups (of which it is the primary) ── firings
             ├── members (of which groups it is a lateral)
             └── changes (what followers are to look at)
    nodes, trigger_names: named by the others by their keys

An older file becomes one of ours when it is opened: coordinator.store.takeover.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path

SCHEMA_VERSION = 9

# "BSGT", so that `file` and we can tell a store from any other database.
APPLICATION_ID = 0x42534754

PAGE_BYTES = 1024
"""Of a new store. A transaction writes whole pages to the log, most of which it changes a row or two of: a quarter of
SQLite's default is half of the bytes. A chunk takes what it needs either way."""

LOG_BYTES = 8 << 20
"""From there on the log is taken into the file: what is written to several times is written to the file
once. With half of it 2 kB more are written a trace."""

CHUNK_NUMBER_BITS = 24
"""Of a chunk's id; the rest is its trace's key. So the chunks of a trace follow each other, without
another index; one of more than 16 million chunks is cut."""

EXPORTED_BEFORE = "exported_before"
WAITED_BEFORE = "waited_before"
"""Tables of a store that was taken over from schema 7 or before: what was exported, and what waited
for that. Who exports now takes them into a file of its own."""

TABLES = """
-- One row: which store this is, how old it was when that was looked at last, and the Unix time then.
CREATE TABLE about (
    store_id TEXT NOT NULL,             -- drawn when it is made; copies have the same
    age_s REAL NOT NULL,
    unix_s REAL NOT NULL,
    kept_by TEXT NOT NULL DEFAULT ''    -- the rules that all traces.keep_s are by, see keeping
);

CREATE TABLE nodes (
    key INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    addresses TEXT,                     -- JSON list; NULL: only traces name it
    incarnation TEXT,                   -- decimal, of the last that connected; NULL: not known
    put_ns INTEGER                      -- Unix time of the last PutNode; NULL: by an older version
);

CREATE TABLE trigger_names (
    key INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
);

-- A row for each trace of which anything is stored.
CREATE TABLE traces (
    key INTEGER PRIMARY KEY,            -- rises with each new one
    id BLOB NOT NULL UNIQUE,
    stored_ns INTEGER NOT NULL,         -- Unix time of its first write
    born_s INTEGER NOT NULL,            -- the same by the store's own clock, see retention
    released INTEGER NOT NULL DEFAULT 0,
    verdict TEXT,                       -- kind; NULL before the first
    verdict_version INTEGER,
    verdict_rest TEXT,                  -- JSON object, see verdict_rest()
    keep_s INTEGER NOT NULL DEFAULT 0,  -- once it is released: how old it may get; 0: not known
    pinned INTEGER NOT NULL DEFAULT 0   -- bytes, if an operator wants it to stay
);
CREATE INDEX traces_released ON traces (released) WHERE released = 1;
CREATE INDEX traces_that_may_go ON traces (keep_s) WHERE released = 1 AND pinned = 0;
CREATE INDEX traces_pinned ON traces (pinned) WHERE pinned > 0;

CREATE TABLE groups (
    key INTEGER PRIMARY KEY,
    trigger INTEGER NOT NULL,           -- trigger_names.key
    primary_trace INTEGER,              -- traces.key; NULL: that is deleted, a lateral is not
    primary_id BLOB,                    -- its id, then
    abandoned_by INTEGER                -- nodes.key
);
CREATE INDEX groups_by_primary ON groups (primary_trace) WHERE primary_trace IS NOT NULL;
CREATE INDEX groups_without_primary ON groups (primary_id) WHERE primary_trace IS NULL;
CREATE INDEX groups_by_trigger ON groups (trigger);

CREATE TABLE firings (
    group_key INTEGER NOT NULL,
    node INTEGER NOT NULL,              -- nodes.key
    laterals BLOB NOT NULL,             -- 16 bytes each
    why TEXT NOT NULL,
    source INTEGER NOT NULL,
    fired_at_ns INTEGER NOT NULL,
    suppressed INTEGER NOT NULL,
    PRIMARY KEY (group_key, node)
) WITHOUT ROWID;

-- The laterals of groups.
CREATE TABLE members (
    trace INTEGER NOT NULL,
    group_key INTEGER NOT NULL,
    PRIMARY KEY (trace, group_key)
) WITHOUT ROWID;
CREATE INDEX members_by_group ON members (group_key);

CREATE TABLE slices (
    trace INTEGER NOT NULL,
    node INTEGER NOT NULL,              -- nodes.key
    epoch INTEGER NOT NULL,             -- of the chunks; 0 before the first
    bytes INTEGER NOT NULL,             -- stored in chunks
    first_chunk INTEGER NOT NULL,       -- its first and its last id; between may be others'
    last_chunk INTEGER NOT NULL,
    restarted INTEGER NOT NULL,
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

CREATE TABLE chunks (
    id INTEGER PRIMARY KEY,             -- trace << 24 | number within the trace
    node INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    data BLOB NOT NULL                  -- a frame of zstd, or zlib's as older versions wrote it
);

-- Traces that were judged, released or deleted, in this order, for who follows. The last
-- row is never trimmed, so numbers only rise.
CREATE TABLE changes (
    number INTEGER PRIMARY KEY,
    trace INTEGER NOT NULL,             -- traces.key; of a deleted one without a row there
    at_ns INTEGER NOT NULL              -- Unix time
);
"""

SCHEMA = f"""
{TABLES}

PRAGMA application_id = {APPLICATION_ID};
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
        make_private(path)
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


def make_private(path: Path) -> None:
    """Make the file if there is none: what is captured is whatever applications said, not for everybody."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


# Whatever the upper bits say more of it.
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_broken(error: sqlite3.Error) -> bool:
    """Whether the file is no database, or one that makes no sense."""
    # Python's own errors have no code.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BROKEN


def is_disk_full(path: Path, error: sqlite3.Error) -> bool:
    """SQLite calls it an I/O error where a full disk has no room for its journal."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
        return True
    with contextlib.suppress(OSError):
        return "I/O" in str(error) and os.statvfs(path.parent).f_bavail == 0
    return False


def in_words(path: Path, error: sqlite3.Error) -> str:
    """What is wrong."""
    if is_disk_full(path, error):
        return "the disk is full"
    if is_broken(error):
        return (
            f"{error}; stop the coordinator, and put a copy of the store in its place, or move it and"
            f" {path.name}-wal and -shm away, to begin with an empty one"
        )
    return str(error)
