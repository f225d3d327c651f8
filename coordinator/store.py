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
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator.core.records import PutNode, Record, StoredTrace, Write
from coordinator.counters import StoreCounters
from coordinator.rows import stored_nodes, stored_traces
from coordinator.schema import in_words, lock_store, open_store
from coordinator.tables import Note, Tables
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

# Age is checked at most so often.
_AGE_CHECK_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much is kept, for how long."""

    bytes_max: int
    age_max_s: float


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
        self._failed = ""  # why the last write did
        self.counters = StoreCounters()
        self._tables = Tables(self._connection, exports, self.counters, log, clock)
        self.stored_bytes = self._tables.used_bytes()
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

    @property
    def exports(self) -> frozenset[VerdictKind]:
        """In force from the next commit on; for any thread to change."""
        return self._tables.exports

    @exports.setter
    def exports(self, exports: frozenset[VerdictKind]) -> None:
        self._tables.exports = exports

    def recover_nodes(self) -> list[PutNode]:
        """All nodes that were ever connected. Before the first submit() only."""
        return stored_nodes(self._connection)

    def recover_traces(self, released_max: int) -> Iterator[StoredTrace]:
        """All traces in assembly, and the last released ones, oldest first. Before the first submit() only.

        Triggers and chunks of a trace are read when they are asked for.
        """
        return stored_traces(self._connection, released_max)

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
                records: list[Record] = []
                for item in batch:
                    if isinstance(item, Write):
                        records.append(item.record)
                    else:
                        # In order, since notes are on what is stored.
                        self._tables.apply(records)
                        records = []
                        self._tables.apply_notes(item.notes)
                self._tables.apply(records)
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
                reason=why,
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

    # ----------------------------------------------------------------- bounds

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
        grown_bytes = max(0, self._tables.used_bytes() - self.stored_bytes)
        self.stored_bytes = self._tables.used_bytes()
        if self.stored_bytes <= self.limits.bytes_max:
            return
        target = int(self.limits.bytes_max * (1 - _HEADROOM))
        # Twice what came at least, so that it gets less, however much comes.
        must = max(self.limits.bytes_max, self.stored_bytes - 2 * grown_bytes)
        while self.stored_bytes > (must if self._others_wait else target):
            if not self._delete_oldest(None, _DELETE_AT_ONCE, target):
                break
            self.stored_bytes = self._tables.used_bytes()

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
                self._tables.delete(trace)
                deleted += 1
                if self._tables.used_bytes() <= enough_bytes:
                    break
        self.counters.traces_deleted += deleted
        return bool(deleted)
