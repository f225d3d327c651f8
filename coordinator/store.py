# SPDX-License-Identifier: Apache-2.0
"""The embedded store: SQLite, in the core's own terms (coordinator.core.records).

One thread writes. It takes all that has come in since its last transaction,
puts it into one, and commits with ``synchronous=FULL``: a token is durable
when the disk says so. Readers have connections of their own, and see whole
transactions (WAL).

What is made of traces elsewhere comes back as notes: the index of searches
(coordinator.index), and what was exported. They are written by the same thread,
and say nothing that could not be made again.

Bounded by bytes and by age: the oldest traces go first, but never one that is
still in assembly (not released), for its nodes wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import sqlite3
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, assert_never

from coordinator import index
from coordinator.core.clock import ClockOffset
from coordinator.core.records import (
    AppendSlice,
    PutAbandoned,
    PutNode,
    PutReleased,
    PutStatus,
    PutTrigger,
    PutVerdict,
    Record,
    StoredSlice,
    StoredTrace,
    Write,
)
from coordinator.core.verdict import Reason, ReasonKind, Verdict
from protocol.messages import (
    CHUNK_BYTES_MAX,
    Group,
    NodeId,
    SliceFlags,
    SliceStatus,
    Source,
    TraceId,
    TriggerFired,
)
from protocol.verdicts import VerdictKind
from runtime.log import Log, MessageId

SCHEMA_VERSION = 4

# "BSGT", so that `file` and we can tell a store from any other database.
_APPLICATION_ID = 0x42534754

_FOLLOWED = f"""
{index.SCHEMA}

-- Traces that shall be exported, in the order in which they were closed.
CREATE TABLE to_export (
    number INTEGER PRIMARY KEY,
    trace BLOB NOT NULL UNIQUE
);

-- What was exported of a trace; failed or not.
CREATE TABLE exported (
    trace BLOB PRIMARY KEY,
    bytes INTEGER NOT NULL              -- as the verdict says, of the last time
) WITHOUT ROWID;
"""

# From each version to the next.
_MIGRATIONS = {
    3: f"{_FOLLOWED} INSERT INTO to_index SELECT trace FROM traces WHERE verdict IS NOT NULL;",
}

_SCHEMA = f"""
CREATE TABLE nodes (
    node TEXT PRIMARY KEY,
    addresses TEXT NOT NULL             -- JSON list
) WITHOUT ROWID;

-- A row for each trace of which anything is stored.
CREATE TABLE traces (
    trace BLOB PRIMARY KEY,
    stored_ns INTEGER NOT NULL,         -- Unix time of its first write
    released INTEGER NOT NULL DEFAULT 0,
    verdict TEXT,                       -- kind; NULL before the first
    verdict_version INTEGER,
    verdict_rest TEXT                   -- JSON object, see _verdict_rest()
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

# After a failed write (a full disk) the same batch is tried again: nothing is
# lost, since nothing of it was acknowledged.
_RETRY_S = 1.0

# Over its bound the store frees this part of it when nobody waits, so that it does not
# delete a trace at each commit.
_HEADROOM = 0.05

# Deleted in one transaction, which delays the durability of what waits.
_DELETE_AT_ONCE = 64

# Slices that end for good where they were deleted: one line of log for each,
# not for each chunk.
_CUT_REMEMBERED = 1024

# Of one trace, that a query shows. Any number may be stored: a faulty rule can
# fire for one trace without end, and a person reads the first.
_TRIGGERS_SHOWN_MAX = 256

# Age is checked at most so often.
_AGE_CHECK_S = 60.0


class StoreError(Exception):
    """The store cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much is kept, for how long."""

    bytes_max: int
    age_max_s: float


@dataclass(frozen=True, slots=True)
class TraceRow:
    """What is stored of a trace, but for its slices.

    ``triggers`` are those of all groups that it belongs to, as primary or as
    lateral: the first of them, and how many were omitted. ``verdict`` is None
    before the first.
    """

    trace: TraceId
    triggers: tuple[PutTrigger, ...]
    triggers_omitted: int
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class SliceRow:
    """What is stored of a slice, but for its ``bytes`` bytes, and how its node's clock stood.

    They are of ``epoch`` (0: none came yet), the status may be of a later one.
    """

    node: str
    status: SliceStatus | None
    clock: ClockOffset | None
    epoch: int
    bytes: int
    restarted: bool = False


@dataclass(slots=True)
class StoreCounters:
    """What the store could not do, or not keep, since its start. They only rise."""

    traces_deleted: int = 0  # for the bounds
    bytes_cut: int = 0  # not stored, since what comes before them was deleted
    writes_failed: int = 0  # and tried again


def _connect(path: Path, *, writable: bool) -> sqlite3.Connection:
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


def _lock(path: Path) -> int:
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


def _in_words(path: Path, error: sqlite3.Error) -> str:
    """What is wrong. SQLite calls it an I/O error where a full disk has no room for its journal."""
    with contextlib.suppress(OSError):
        if "I/O" in str(error) and os.statvfs(path.parent).f_bavail == 0:
            return "the disk is full"
    return str(error)


def _open(path: Path) -> sqlite3.Connection:
    try:
        connection = _connect(path, writable=True)
    except sqlite3.Error as error:
        raise StoreError(f"{path}: cannot be opened: {_in_words(path, error)}") from error
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables == 0:
            connection.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} COMMIT;")
        elif application != _APPLICATION_ID:
            raise StoreError(f"{path}: is a database, but not a store of Backsight")
        elif version in _MIGRATIONS:
            while version in _MIGRATIONS:
                connection.executescript(
                    f"BEGIN EXCLUSIVE; {_MIGRATIONS[version]}"
                    f" PRAGMA user_version = {version + 1}; COMMIT;"
                )
                version += 1
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{path}: has schema {version}, this coordinator knows {SCHEMA_VERSION};"
                " give it another file, or run the version that wrote this one"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(f"{path}: cannot be used: {_in_words(path, error)}") from error
    except StoreError:
        connection.close()
        raise
    return connection


@dataclass(frozen=True, slots=True)
class PutExported:
    """A trace was exported, or given up: when its verdict spoke of so many bytes."""

    trace: TraceId
    bytes: int


Note: TypeAlias = index.TraceIndex | PutExported
"""What is made of a trace that is stored. One of a trace that was deleted is nothing."""


@dataclass(slots=True, eq=False)
class _Noted:
    """Notes on their way to the disk; ``written`` is set once they are there, or never will be."""

    notes: Sequence[Note]
    written: threading.Event


def _release(items: Iterable[Write | _Noted]) -> None:
    """Let who waits for notes go on."""
    for item in items:
        if isinstance(item, _Noted):
            item.written.set()


class Store:
    """The writing side. ``on_durable`` is called in the writer's thread.

    ``exports``: which verdicts a trace must have, when it is closed, to be exported.

    A with block starts the thread; its end writes what is queued and stops it.
    """

    def __init__(
        self,
        path: Path,
        limits: StoreLimits,
        on_durable: Callable[[int], None],
        log: Log,
        clock: Callable[[], float] = time.time,
        exports: frozenset[VerdictKind] = frozenset(),
    ) -> None:
        self.exports = exports
        """In force from the next commit on; for any thread to change."""
        self._followers: list[Callable[[], None]] = []
        self._path = path
        self.limits = limits
        """In force from the next commit on; for any thread to change."""
        self._on_durable = on_durable
        self._log = log
        self._clock = clock
        self._held = _lock(path)
        try:
            self._connection = _open(path)
        except BaseException:
            os.close(self._held)
            raise
        self._changed = threading.Condition()
        self._asked: deque[Callable[[], None]] = deque()
        self._queue: list[Write | _Noted] = []
        self._closing = False
        self._tries_again = True
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="store")
        self._age_checked_s = 0.0
        self._cut: set[tuple[TraceId, str]] = set()
        self._failed = ""  # why the last write did
        self.counters = StoreCounters()
        self.stored_bytes = self.used_bytes()
        """Of the database file that hold something, at the last commit; for any thread."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closing = True
        self.stop_trying_again()
        if self._thread.ident is not None:
            self._thread.join()
        self._connection.close()
        os.close(self._held)

    def stop_trying_again(self) -> None:
        """What cannot be written from now on is given up, and the thread with it.

        For the end, before who waits in note() is joined: a full disk must not hold it up.
        """
        with self._changed:
            self._tries_again = False
            self._changed.notify()

    def submit(self, writes: Sequence[Write]) -> None:
        """Queue writes; on_durable tells when they are."""
        with self._changed:
            self._queue.extend(writes)
            self._changed.notify()

    def note(self, notes: Sequence[Note]) -> None:
        """Write notes, and wait until that is done, or the store ends. For threads of their own."""
        noted = _Noted(notes, threading.Event())
        with self._changed:
            if self._closing or self._ended:
                return
            self._queue.append(noted)
            self._changed.notify()
        noted.written.wait()

    def follow(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` in the writer's thread when there may be news of a trace that is judged, or closed."""
        self._followers.append(wake)

    def give_sign(self, sign: Callable[[], None]) -> None:
        """Have the thread call ``sign`` when it next is between two transactions."""
        with self._changed:
            self._asked.append(sign)
            self._changed.notify()

    # -------------------------------------------------------- writer's thread

    def _give_signs(self) -> None:
        while self._asked:
            self._asked.popleft()()

    def _run(self) -> None:
        try:
            self._write_until_closed()
        finally:
            with self._changed:
                self._ended = True
            _release(self._queue)

    def _write_until_closed(self) -> None:
        while True:
            with self._changed:
                if not self._queue and not self._closing and not self._asked:
                    # Traces grow too old while nothing is written, too.
                    self._changed.wait(_AGE_CHECK_S)
                if not self._queue and self._closing:
                    return
                batch, self._queue = self._queue, []
            self._give_signs()
            try:
                if batch and not self._commit_at_last(batch):
                    return
            finally:
                _release(batch)
            tokens = [item.token for item in batch if isinstance(item, Write)]
            if tokens:
                self._on_durable(tokens[-1])
                for wake in self._followers:
                    wake()
            try:
                self._enforce_limits()
            except sqlite3.Error as error:
                self._log.error(
                    f"{self._path}: cannot delete old traces: {error}",
                    message_id=MessageId.STORE_FAILED,
                )

    def _commit_at_last(self, batch: Sequence[Write | _Noted]) -> bool:
        """Try until it is done. False: it was not, and the store ends."""
        while not self._commit(batch):
            if not self._wait_to_try_again():
                return False
        return True

    def _wait_to_try_again(self) -> bool:
        """Whatever is submitted meanwhile, which is much where nodes are busy. False: the store ends."""
        again_s = time.monotonic() + _RETRY_S
        while (left_s := again_s - time.monotonic()) > 0:
            with self._changed:
                if not self._tries_again:
                    return False
                if not self._asked:
                    self._changed.wait(left_s)
            self._give_signs()
        return True

    def _commit(self, batch: Sequence[Write | _Noted]) -> bool:
        try:
            with self._transaction():
                for item in batch:
                    if isinstance(item, Write):
                        self._apply(item.record)
                    else:
                        self._apply_notes(item.notes)
        except sqlite3.Error as error:
            self.counters.writes_failed += 1
            self._say_failed(_in_words(self._path, error))
            return False
        self._say_failed("")
        return True

    def _say_failed(self, why: str) -> None:
        """Once, not with each attempt; empty: it works."""
        if why == self._failed:
            return
        self._failed = why
        if why:
            self._log.error(
                f"{self._path}: cannot write, will try again: {why}."
                " Nodes keep what is not durable here.",
                message_id=MessageId.STORE_FAILED,
            )
        else:
            self._log.info(f"{self._path}: can be written again")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _apply(self, record: Record) -> None:
        execute = self._connection.execute
        match record:
            case PutNode():
                execute(
                    "INSERT OR REPLACE INTO nodes VALUES (?, ?)",
                    (record.node, json.dumps(record.addresses)),
                )
            case PutTrigger():
                self._put_trigger(record)
            case PutAbandoned():
                self._touch(record.group.primary)
                execute(
                    "INSERT OR IGNORE INTO abandoned VALUES (?, ?, ?)",
                    (record.group.trigger, record.group.primary, record.node),
                )
            case PutStatus():
                self._put_status(record)
            case AppendSlice():
                self._append(record)
            case PutVerdict():
                self._touch(record.trace)
                verdict = record.verdict
                execute(
                    "UPDATE traces SET verdict = ?, verdict_version = ?, verdict_rest = ?"
                    " WHERE trace = ? AND coalesce(verdict_version, -1) < ?",
                    (
                        str(verdict.kind),
                        verdict.version,
                        _verdict_rest(verdict),
                        record.trace,
                        verdict.version,
                    ),
                )
                execute("INSERT OR IGNORE INTO to_index VALUES (?)", (record.trace,))
            case PutReleased():
                self._touch(record.trace)
                execute(
                    "UPDATE traces SET released = ? WHERE trace = ?",
                    (int(record.released), record.trace),
                )
                if record.released:
                    self._queue_export(record.trace)
            case _:
                assert_never(record)

    def _apply_notes(self, notes: Sequence[Note]) -> None:
        for note in notes:
            match note:
                case index.TraceIndex():
                    index.put(self._connection, note)
                case PutExported():
                    self._connection.execute("DELETE FROM to_export WHERE trace = ?", (note.trace,))
                    self._connection.execute(
                        "INSERT OR REPLACE INTO exported SELECT trace, ? FROM traces WHERE trace = ?",
                        (note.bytes, note.trace),
                    )
                    # It may have grown, and been closed again, while it was exported.
                    if self._connection.execute(
                        "SELECT 1 FROM traces WHERE trace = ? AND released = 1", (note.trace,)
                    ).fetchone():
                        self._queue_export(note.trace)
                case _:
                    assert_never(note)

    def _touch(self, trace: TraceId) -> None:
        self._connection.execute(
            "INSERT OR IGNORE INTO traces (trace, stored_ns) VALUES (?, ?)",
            (trace, int(self._clock() * 1e9)),
        )

    def _queue_export(self, trace: TraceId) -> None:
        """Have a closed trace exported, unless it was, and has not grown since."""
        verdict = _verdict(self._connection, trace)
        if verdict is None or verdict.kind not in self.exports or not verdict.bytes:
            return
        row = self._connection.execute(
            "SELECT bytes FROM exported WHERE trace = ?", (trace,)
        ).fetchone()
        if row is None or row[0] < verdict.bytes:
            self._connection.execute("INSERT OR IGNORE INTO to_export (trace) VALUES (?)", (trace,))

    def _put_trigger(self, record: PutTrigger) -> None:
        fired = record.fired
        group = fired.group
        self._connection.execute(
            "INSERT OR REPLACE INTO triggers VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
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
        for trace in (group.primary, *fired.laterals):
            self._touch(trace)
            self._connection.execute(
                "INSERT OR IGNORE INTO members VALUES (?, ?, ?)",
                (trace, group.trigger, group.primary),
            )

    def _slice(self, trace: TraceId, node: str) -> None:
        self._touch(trace)
        self._connection.execute(
            "INSERT OR IGNORE INTO slices (trace, node) VALUES (?, ?)", (trace, node)
        )

    def _put_status(self, record: PutStatus) -> None:
        status, clock = record.status, record.clock
        self._slice(status.trace, record.node)
        self._connection.execute(
            "UPDATE slices SET restarted = max(restarted, ?), held = ?, status_epoch = ?,"
            " flags = ?, status_bytes = ?, open_handles = ?, crumbs = ?, clock_offset_ns = ?,"
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

    def _append(self, record: AppendSlice) -> None:
        self._slice(record.trace, record.node)
        key = (record.trace, record.node)
        stored, epoch = self._connection.execute(
            "SELECT bytes, epoch FROM slices WHERE trace = ? AND node = ?", key
        ).fetchone()
        if record.epoch != epoch:
            if record.offset == 0:
                self._connection.execute("DELETE FROM chunks WHERE trace = ? AND node = ?", key)
                self._connection.execute(
                    "UPDATE slices SET restarted = max(restarted, bytes > 0), epoch = ?, bytes = 0,"
                    " held = CASE WHEN status_epoch = ? THEN held END"
                    " WHERE trace = ? AND node = ?",
                    (record.epoch, record.epoch, *key),
                )
            stored = 0
        if record.offset > stored:
            # The trace was deleted for the bounds, and came up again: what is
            # left of the slice cannot be read without its beginning.
            self.counters.bytes_cut += len(record.data)
            if key not in self._cut:
                self._log.warning(
                    f"slice {record.trace.hex()} of {record.node}: not stored from here on, since"
                    f" its first {record.offset} bytes were deleted",
                    trace_id=record.trace.hex(),
                    node=record.node,
                )
                if len(self._cut) == _CUT_REMEMBERED:
                    self._cut.clear()
                self._cut.add(key)
            return
        data = record.data[stored - record.offset :]
        if not data:
            return
        self._connection.execute(
            "INSERT INTO chunks (trace, node, offset, data) VALUES (?, ?, ?, ?)",
            (*key, stored, zlib.compress(data)),
        )
        self._connection.execute(
            "UPDATE slices SET bytes = ? WHERE trace = ? AND node = ?", (stored + len(data), *key)
        )

    # ----------------------------------------------------------------- bounds

    def used_bytes(self) -> int:
        """Bytes of the database file that hold something."""
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        (page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        return int((pages - free) * page_bytes)

    @property
    def _others_wait(self) -> bool:
        """For a write, or for the end."""
        return bool(self._queue) or self._closing

    def _enforce_limits(self) -> None:
        """Delete what is too old or too much: all of it only as long as nobody waits."""
        now_s = self._clock()
        if now_s - self._age_checked_s >= _AGE_CHECK_S or now_s < self._age_checked_s:
            self._age_checked_s = now_s
            before_ns = int((now_s - self.limits.age_max_s) * 1e9)
            while self._delete_oldest(before_ns, _DELETE_AT_ONCE):
                if self._others_wait:
                    self._age_checked_s = 0.0  # the rest after them
                    break
        grown_bytes = max(0, self.used_bytes() - self.stored_bytes)
        self.stored_bytes = self.used_bytes()
        if self.stored_bytes <= self.limits.bytes_max:
            return
        target = int(self.limits.bytes_max * (1 - _HEADROOM))
        # Twice what came at least, so that it gets less, however much comes.
        must = max(self.limits.bytes_max, self.stored_bytes - 2 * grown_bytes)
        while self.stored_bytes > (must if self._others_wait else target):
            if not self._delete_oldest(None, _DELETE_AT_ONCE, target):
                break
            self.stored_bytes = self.used_bytes()

    def _delete_oldest(self, before_ns: int | None, count: int, enough_bytes: int = 0) -> bool:
        """Delete the oldest released traces; whether there were any.

        So many, or fewer if no more than ``enough_bytes`` are left then.
        """
        self._give_signs()
        with self._transaction():
            traces = self._connection.execute(
                "SELECT trace FROM traces WHERE released = 1 AND stored_ns < ?"
                " ORDER BY stored_ns, trace LIMIT ?",
                ((1 << 63) - 1 if before_ns is None else before_ns, count),
            ).fetchall()
            deleted = 0
            for (trace,) in traces:
                self._delete(trace)
                deleted += 1
                if self.used_bytes() <= enough_bytes:
                    break
        self.counters.traces_deleted += deleted
        return bool(deleted)

    def _delete(self, trace: bytes) -> None:
        groups = self._connection.execute(
            "SELECT name, primary_trace FROM members WHERE trace = ?", (trace,)
        ).fetchall()
        for statement in (
            "DELETE FROM chunks WHERE trace = ?",
            "DELETE FROM slices WHERE trace = ?",
            "DELETE FROM members WHERE trace = ?",
            "DELETE FROM abandoned WHERE primary_trace = ?",
            "DELETE FROM to_export WHERE trace = ?",
            "DELETE FROM exported WHERE trace = ?",
            "DELETE FROM traces WHERE trace = ?",
        ):
            self._connection.execute(statement, (trace,))
        index.forget(self._connection, trace)
        # A firing goes with the last trace of its group.
        self._connection.executemany(
            "DELETE FROM triggers WHERE name = ? AND primary_trace = ? AND NOT EXISTS"
            " (SELECT 1 FROM members WHERE members.name = triggers.name"
            " AND members.primary_trace = triggers.primary_trace)",
            groups,
        )

    # --------------------------------------------------------------- recovery

    def recover_nodes(self) -> list[PutNode]:
        """All nodes that were ever connected. Before the first submit() only."""
        rows = self._connection.execute("SELECT node, addresses FROM nodes ORDER BY node")
        return [PutNode(node, tuple(json.loads(addresses))) for node, addresses in rows]

    def recover_traces(self, released_max: int) -> Iterator[StoredTrace]:
        """All traces in assembly, and the last released ones, oldest first. Before the first submit() only.

        Triggers and chunks of a trace are read when they are asked for.
        """
        rows = self._connection.execute(
            "SELECT trace, released FROM traces WHERE released = 0 OR trace IN"
            " (SELECT trace FROM traces WHERE released = 1 ORDER BY stored_ns DESC LIMIT ?)"
            " ORDER BY stored_ns, trace",
            (released_max,),
        ).fetchall()
        for trace, released in rows:
            abandoned = self._connection.execute(
                "SELECT name, node FROM abandoned WHERE primary_trace = ? ORDER BY name", (trace,)
            )
            yield StoredTrace(
                TraceId(trace),
                _Triggers(self._connection, trace),
                tuple(PutAbandoned(Group(name, TraceId(trace)), node) for name, node in abandoned),
                tuple(self._recover_slices(trace, bool(released))),
                _verdict(self._connection, trace),
                bool(released),
            )

    def _recover_slices(self, trace: bytes, released: bool) -> Iterator[StoredSlice]:
        for row in _slices(self._connection, trace):
            chunks = () if released else _Chunks(self._connection, trace, row.node)
            yield StoredSlice(row.node, row.status, row.epoch, row.bytes, row.restarted, chunks)


class _Chunks(Iterable[bytes]):
    """A slice's bytes, one stored chunk after the other."""

    def __init__(self, connection: sqlite3.Connection, trace: bytes, node: str) -> None:
        self._connection = connection
        self._key = (trace, node)

    def __iter__(self) -> Iterator[bytes]:
        rows = self._connection.execute(
            "SELECT data FROM chunks WHERE trace = ? AND node = ? ORDER BY offset", self._key
        )
        for (data,) in rows:
            yield _decompressed(data)


def _decompressed(data: bytes) -> bytes:
    return zlib.decompress(data, bufsize=CHUNK_BYTES_MAX)


_FIRED = "t.name, t.primary_trace, t.node, laterals, why, source, fired_at_ns, suppressed"
_FOR_A_MEMBER = (
    "FROM members AS m JOIN triggers AS t ON t.name = m.name"
    " AND t.primary_trace = m.primary_trace WHERE m.trace = ?"
)
_IN_ORDER = "ORDER BY fired_at_ns, t.node, t.name"


class _Triggers(Iterable[PutTrigger]):
    """The firings of the groups whose primary a trace is, in the order in which they fired."""

    def __init__(self, connection: sqlite3.Connection, trace: bytes) -> None:
        self._connection = connection
        self._trace = trace

    def __iter__(self) -> Iterator[PutTrigger]:
        return map(
            _put_trigger,
            self._connection.execute(
                f"SELECT {_FIRED} FROM triggers AS t WHERE t.primary_trace = ? {_IN_ORDER}",
                (self._trace,),
            ),
        )


def _put_trigger(row: tuple[str, bytes, str, bytes, str, int, int, int]) -> PutTrigger:
    name, primary, node, laterals, why, source, fired_at_ns, suppressed = row
    return PutTrigger(
        node,
        TriggerFired(
            Group(name, TraceId(primary)),
            tuple(TraceId(laterals[i : i + 16]) for i in range(0, len(laterals), 16)),
            why,
            Source(source),
            fired_at_ns,
            suppressed,
        ),
    )


def _verdict_rest(verdict: Verdict) -> str:
    """All of a verdict but for what has a column of its own."""
    return json.dumps(
        {
            "reasons": [(reason.kind, reason.node, reason.detail) for reason in verdict.reasons],
            "nodes": verdict.nodes,
            "bytes": verdict.bytes,
            "span_count": verdict.span_count,
            "start_ns": verdict.start_ns,
            "end_ns": verdict.end_ns,
        }
    )


def _verdict(connection: sqlite3.Connection, trace: bytes) -> Verdict | None:
    row = connection.execute(
        "SELECT verdict, verdict_version, verdict_rest FROM traces WHERE trace = ?", (trace,)
    ).fetchone()
    if row is None or row[0] is None:
        return None
    kind, version, rest = row
    said = json.loads(rest)
    return Verdict(
        version,
        VerdictKind(kind),
        tuple(Reason(ReasonKind(k), node, detail) for k, node, detail in said["reasons"]),
        tuple(said["nodes"]),
        said["bytes"],
        said["span_count"],
        said["start_ns"],
        said["end_ns"],
    )


def _slices(connection: sqlite3.Connection, trace: bytes) -> Iterator[SliceRow]:
    rows = connection.execute(
        "SELECT node, epoch, bytes, restarted, clock_offset_ns, clock_error_ns,"
        " held, flags, status_bytes, open_handles, crumbs, status_epoch"
        " FROM slices WHERE trace = ? ORDER BY node",
        (trace,),
    ).fetchall()
    for node, epoch, stored, restarted, offset, error, held, *said in rows:
        status = None
        if held is not None:
            flags, status_bytes, open_handles, crumbs, status_epoch = said
            status = SliceStatus(
                TraceId(trace),
                bool(held),
                SliceFlags(flags),
                status_bytes,
                open_handles,
                tuple(
                    NodeId(int.from_bytes(crumbs[i : i + 8], "little"))
                    for i in range(0, len(crumbs), 8)
                ),
                status_epoch,
            )
        clock = None if offset is None else ClockOffset(offset, error)
        yield SliceRow(node, status, clock, epoch, stored, bool(restarted))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which traces to list: all that are given must hold. Times are Unix nanoseconds, as stored.

    ``service`` is that of a span, found once the trace is in the index.
    """

    trigger: str = ""
    verdict: str = ""
    service: str = ""
    since_ns: int = 0
    until_ns: int = 0


_WANTED = """(:verdict = '' OR verdict = :verdict)
    AND (:since_ns = 0 OR stored_ns >= :since_ns)
    AND (:until_ns = 0 OR stored_ns <= :until_ns)
    AND (:trigger = '' OR EXISTS (SELECT 1 FROM members
        WHERE members.trace = traces.trace AND members.name = :trigger))
    AND (:service = '' OR EXISTS (SELECT 1 FROM spans JOIN operations ON spans.operation = operations.id
        WHERE spans.trace = traces.trace AND operations.service = :service))"""


class StoreReader:
    """The reading side, for queries; one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._connection = _connect(path, writable=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()

    @property
    def searches(self) -> index.IndexReader:
        """What can be asked of the index."""
        return index.IndexReader(self._connection)

    def time_limit(self, is_over: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
        """What is read within is given up after a time, or once ``is_over``: index.SearchTooLong."""
        return index.time_limit(self._connection, is_over)

    @contextlib.contextmanager
    def moment(self) -> Iterator[None]:
        """All that is read within is as of one moment, whatever is written meanwhile."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("COMMIT")

    def to_index(self, limit: int) -> list[TraceId]:
        """Traces that the index lacks, or has by an earlier verdict."""
        rows = self._connection.execute("SELECT trace FROM to_index LIMIT ?", (limit,))
        return [TraceId(trace) for (trace,) in rows]

    def to_export(self, limit: int) -> list[TraceId]:
        """Traces that shall be exported, those closed first at first."""
        rows = self._connection.execute(
            "SELECT trace FROM to_export ORDER BY number LIMIT ?", (limit,)
        )
        return [TraceId(trace) for (trace,) in rows]

    def waits_for_export(self, trace: TraceId) -> bool:
        """Whether it shall still be exported: not if it was deleted."""
        found = self._connection.execute("SELECT 1 FROM to_export WHERE trace = ?", (trace,))
        return found.fetchone() is not None

    def waiting_for_export(self) -> int:
        """How many traces wait."""
        (count,) = self._connection.execute("SELECT count(*) FROM to_export").fetchone()
        return int(count)

    def list_traces(self, wanted: Wanted, limit: int = 0) -> list[TraceId]:
        """Ids, newest first; limit 0: all."""
        rows = self._connection.execute(
            f"SELECT trace FROM traces WHERE {_WANTED} ORDER BY stored_ns DESC, trace LIMIT :limit",
            {**dataclasses.asdict(wanted), "limit": limit or -1},
        )
        return [TraceId(trace) for (trace,) in rows]

    def is_wanted(self, trace: TraceId, wanted: Wanted) -> bool:
        """Whether a listing would have it."""
        rows = self._connection.execute(
            f"SELECT 1 FROM traces WHERE trace = :trace AND {_WANTED}",
            {**dataclasses.asdict(wanted), "trace": trace},
        )
        return rows.fetchone() is not None

    def judged(self, trigger: str) -> tuple[int, int]:
        """How many traces belong to groups of that trigger, and how many have a verdict."""
        traces, judged = self._connection.execute(
            "SELECT count(*), count(verdict) FROM traces WHERE trace IN"
            " (SELECT trace FROM members WHERE name = ?)",
            (trigger,),
        ).fetchone()
        return traces, judged

    def trace(self, trace: TraceId) -> TraceRow | None:
        """One trace, None if nothing is stored of it."""
        row = self._connection.execute("SELECT 1 FROM traces WHERE trace = ?", (trace,)).fetchone()
        if row is None:
            return None
        fired = self._connection.execute(
            f"SELECT {_FIRED} {_FOR_A_MEMBER} {_IN_ORDER} LIMIT ?", (trace, _TRIGGERS_SHOWN_MAX)
        )
        triggers = tuple(map(_put_trigger, fired))
        omitted = 0
        if len(triggers) == _TRIGGERS_SHOWN_MAX:
            (count,) = self._connection.execute(
                f"SELECT count(*) {_FOR_A_MEMBER}", (trace,)
            ).fetchone()
            omitted = count - len(triggers)
        return TraceRow(trace, triggers, omitted, _verdict(self._connection, trace))

    def slices(self, trace: TraceId) -> list[SliceRow]:
        """The slices of a trace, by node name."""
        return list(_slices(self._connection, trace))

    def data(self, trace: TraceId, part: SliceRow, bytes_max: int) -> bytes:
        """The first bytes of a slice, within the moment() in which it was listed."""
        chunks = []
        for chunk in _Chunks(self._connection, trace, part.node):
            chunks.append(chunk[:bytes_max])
            bytes_max -= len(chunk)
            if bytes_max <= 0:
                break
        return b"".join(chunks)

    def chunk(self, trace: TraceId, part: SliceRow, offset: int) -> bytes | None:
        """The bytes of a slice from an offset on, at most CHUNK_BYTES_MAX.

        ``offset`` is 0, or where the last ones ended. None: the slice is not stored
        any more, or is another one.
        """
        row = self._connection.execute(
            "SELECT data FROM slices JOIN chunks USING (trace, node)"
            " WHERE trace = ? AND node = ? AND epoch = ? AND offset = ?",
            (trace, part.node, part.epoch, offset),
        ).fetchone()
        return None if row is None else _decompressed(row[0])
