# SPDX-License-Identifier: Apache-2.0
"""The embedded store: SQLite, in the core's own terms (coordinator.core.records).

One thread writes. It takes all that has come in since its last transaction,
puts it into one, and commits with ``synchronous=FULL``: a token is durable
when the disk says so. Readers (coordinator.reader) have connections of their own,
and see whole transactions (WAL). The file is coordinator.schema's.

What is made of traces elsewhere comes back as notes: the index of searches
(coordinator.index), and what was exported. They are written by the same thread,
and say nothing that could not be made again.

Bounded by bytes and by age: the oldest traces go first, but never one that is
still in assembly (not released), for its nodes wait for it.
"""

from __future__ import annotations

import contextlib
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
from coordinator.core.records import (
    AppendSlice,
    PutAbandoned,
    PutNode,
    PutReleased,
    PutStatus,
    PutTrigger,
    PutVerdict,
    PutVerdictAgain,
    Record,
    StoredSlice,
    StoredTrace,
    Write,
)
from coordinator.rows import (
    Chunks,
    Triggers,
    stored_slice,
    stored_slices,
    stored_verdict,
    verdict_rest,
)
from coordinator.schema import in_words, lock_store, open_store
from protocol.messages import Group, TraceId
from protocol.verdicts import VerdictKind
from runtime.log import Log, MessageId

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

# Age is checked at most so often.
_AGE_CHECK_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much is kept, for how long."""

    bytes_max: int
    age_max_s: float


@dataclass(slots=True)
class StoreCounters:
    """What the store could not do, or not keep, since its start. They only rise."""

    traces_deleted: int = 0  # for the bounds
    bytes_cut: int = 0  # not stored, since what comes before them was deleted
    writes_failed: int = 0  # and tried again


@dataclass(frozen=True, slots=True)
class PutExported:
    """A trace was exported, or given up: with a verdict of this kind, on so many bytes."""

    trace: TraceId
    bytes: int
    verdict: VerdictKind


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
        self._held = lock_store(path)
        try:
            self._connection = open_store(path, log)
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
            self._say_failed(in_words(self._path, error))
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
                        verdict_rest(verdict),
                        record.trace,
                        verdict.version,
                    ),
                )
                execute("INSERT OR IGNORE INTO to_index VALUES (?)", (record.trace,))
            case PutVerdictAgain():
                # Nothing is there to be found or exported.
                execute(
                    "UPDATE traces SET verdict = ?, verdict_version = ?, verdict_rest = ?"
                    " WHERE trace = ? AND verdict IS NULL",
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
                self._connection.executemany(
                    "UPDATE slices SET least = ? WHERE trace = ? AND node = ?",
                    ((least, record.trace, node) for node, least in record.least),
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
                        "INSERT OR REPLACE INTO exported"
                        " SELECT trace, ?, ? FROM traces WHERE trace = ?",
                        (note.bytes, str(note.verdict), note.trace),
                    )
                    # It may have changed, and been closed again, while it was exported.
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
        """Have a closed trace exported, unless it was, has not grown since, and is judged alike.

        Who was told that it is of another kind is told what it turned out to be, wanted or not.
        """
        verdict = stored_verdict(self._connection, trace)
        if verdict is None or not self.exports or not verdict.bytes:
            return
        row = self._connection.execute(
            "SELECT bytes, verdict FROM exported WHERE trace = ?", (trace,)
        ).fetchone()
        is_due = verdict.kind in self.exports and (row is None or row[0] < verdict.bytes)
        if is_due or (row is not None and row[1] != verdict.kind):
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
                    " least = NULL, held = CASE WHEN status_epoch = ? THEN held END"
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
                Triggers(self._connection, trace),
                tuple(PutAbandoned(Group(name, TraceId(trace)), node) for name, node in abandoned),
                tuple(self._recover_slices(trace, bool(released))),
                stored_verdict(self._connection, trace),
                bool(released),
            )

    def _recover_slices(self, trace: bytes, released: bool) -> Iterator[StoredSlice]:
        for row in stored_slices(self._connection, trace):
            chunks = () if released else Chunks(self._connection, trace, row.node)
            yield stored_slice(row, chunks)
