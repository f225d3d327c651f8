# SPDX-License-Identifier: Apache-2.0
"""The embedded store: SQLite, in the core's own terms (coordinator.core.records).

One thread writes. It takes all that has come in since its last transaction, waits a moment
for more, puts it into one, and commits with ``synchronous=FULL``: a token is durable
when the disk says so. What nobody waits for waits for longer, for a transaction that is made
anyway. Readers (coordinator.store.reader) have connections of their own, and see whole
transactions (WAL).

Who makes something of traces once they are judged (the index of searches, exports) follows the
store by the numbers of its changes, and keeps what it made in files of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from coordinator.core.records import AppendSlice, PutNode, Write
from coordinator.counters import StoreCounters
from coordinator.store.keeping import Keeping
from coordinator.store.orders import Orders
from coordinator.store.retention import AGE_CHECK_S, Retention, StoreAge, StoreLimits
from coordinator.store.rows import stored_nodes
from coordinator.store.schema import in_words, is_disk_full, lock_store
from coordinator.store.tables import Tables
from coordinator.store.takeover import open_store
from counting.histogram import Histogram
from runtime.log import Log, MessageId

T = TypeVar("T")

# After a failed write (a full disk) the same batch is tried again: nothing is
# lost, since nothing of it was acknowledged.
_RETRY_S = 1.0

# What comes within this time is one transaction. A commit costs a page of each table that it
# writes to, and a wait for the disk; who waits for it waits for this, too. Nodes do not, and a trace
# is judged when it was silent for four times as long.
_GATHER_S = 0.05

# The same for what nobody waits for. Where a trace comes every few seconds, as many transactions
# are saved as there are traces.
_PUT_OFF_S = 5.0

# From a page of a fast disk to what makes nodes keep what they have to say.
_COMMIT_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

# In one transaction: what comes meanwhile waits for it, and the log grows by it
# (coordinator.store.retention.RESERVE_BYTES).
_WRITES_AT_ONCE = 8192
_BYTES_AT_ONCE = 4 << 20

# Nothing is wrong with the file, and to try again would fail again.
_OF_A_RECORD = (sqlite3.DataError, OverflowError, ValueError)

# In one transaction where the disk is full.
_WRITES_WHEN_FULL = 64

# Of changes that all followers have seen, before they are deleted.
_TRIM_AT_ONCE = 1024

# Changes that wait for a follower, of some 30 bytes each. One that falls further behind finds that
# numbers are missing, and looks at all traces.
_CHANGES_MAX = 1 << 20


def _uptime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Store:
    """The writing side. ``on_durable`` is called in the writer's thread.

    A with block starts the thread; its end writes what is queued and stops it.
    """

    def __init__(
        self,
        path: Path,
        limits: StoreLimits,
        on_durable: Callable[[int], None],
        log: Log,
        clock: Callable[[], float] = time.time,
        uptime_s: Callable[[], float] = _uptime_s,
    ) -> None:
        self._path = path
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
        self._ordered: deque[Callable[[], None]] = deque()
        self._queue: list[Write] = []
        self._due_s = math.inf  # when the queue is to be written
        self._ending = threading.Event()
        self._tries_again = True
        self._thread = threading.Thread(target=self._run, name="store")
        self.failed = ""
        """Why the last write did; for any thread."""
        self._wakes: list[Callable[[], None]] = []
        self._followed: dict[str, int] = {}
        self._trimmed = 0
        (self.id,) = self._connection.execute("SELECT store_id FROM about").fetchone()
        """Of this store and its copies."""
        self.counters = StoreCounters()
        self.commit_s = Histogram(_COMMIT_BOUNDS_S)
        """How long transactions of what came took, with the wait for the disk; for any thread."""
        age = StoreAge(self._connection, clock, uptime_s)
        keeping = Keeping(self._connection, limits.keep)
        self._tables = Tables(self._connection, self.counters, log, clock, age.now_s, keeping)
        self.retention = Retention(
            self._connection,
            path,
            limits,
            self._tables,
            keeping,
            age,
            self.counters,
            log,
            lambda: bool(self._queue or self._ordered) or self._ending.is_set(),
            self._transaction,
        )
        self._told = self._tables.change_number
        self.orders = Orders(
            self._connection, self._tables, self.counters, lambda: self.retention.limits
        )
        """For order()."""

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
            self._ending.set()
            # What cannot be written is given up: a full disk must not hold up the end.
            self._tries_again = False
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._connection.close()
        os.close(self._held)

    @property
    def stored_bytes(self) -> int:
        """Of the database file that hold something, at the last commit; for any thread."""
        return self.retention.stored_bytes

    def recover_nodes(self) -> list[PutNode]:
        """All nodes, those first that were put longest ago. Before the first submit() only."""
        return stored_nodes(self._connection, int(self._clock() * 1e9))

    def submit(self, writes: Sequence[Write], *, may_wait: bool = False) -> None:
        """Queue writes; on_durable tells when they are. ``may_wait``: nobody waits for them."""
        with self._changed:
            self._queue.extend(writes)
            self._write_within(_PUT_OFF_S if may_wait else _GATHER_S)

    def hurry(self) -> None:
        """Somebody waits for all that is queued."""
        with self._changed:
            if self._queue:
                self._write_within(_GATHER_S)

    def _write_within(self, seconds: float) -> None:
        due_s = time.monotonic() + (seconds if len(self._queue) < _WRITES_AT_ONCE else 0.0)
        # A thread that is awake before costs a switch to it, so not for what changes nothing.
        if due_s < self._due_s:
            self._due_s = due_s
            self._changed.notify()

    def order(self, act: Callable[[], T]) -> Future[T]:
        """Call ``act`` in the writer's thread, in a transaction of its own; then that is durable.

        What it raises, or that it cannot be written, is the future's; at the store's end it is cancelled.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                with self._transaction():
                    done = act()
            except Exception as error:  # noqa: BLE001 - whoever asked is told
                future.set_exception(error)
            else:
                future.set_result(done)

        with self._changed:
            if self._ending.is_set():
                future.cancel()
            else:
                self._ordered.append(run)
                self._changed.notify()
        return future

    def follow(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` in the writer's thread when there may be news of a trace that is judged, or closed."""
        self._wakes.append(wake)

    def followed(self, who: str, number: int) -> None:
        """A follower needs no changes up to this number any more; for any thread."""
        self._followed[who] = number

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
        while True:
            # Traces grow too old while nothing is written, too.
            look_s = time.monotonic() + AGE_CHECK_S
            with self._changed:
                while (left_s := self._left_s(look_s)) > 0:
                    self._changed.wait(left_s)
                if self._ending.is_set() and not (self._queue or self._ordered):
                    return
                batch = self._take()
            self._give_signs()
            if batch:
                if not self._commit_at_last(batch):
                    return
                self._on_durable(batch[-1].token)
            self._obey()
            try:
                self.retention.enforce()
            except sqlite3.Error as error:
                self._tables.undone()
                self._log.error(
                    f"{self._path}: cannot delete old traces: {error}",
                    message_id=MessageId.STORE_FAILED,
                )
            self._tell_changes()

    def _left_s(self, look_s: float) -> float:
        """For how long there is nothing to do, until that time at most."""
        if self._ending.is_set() or self._asked or self._ordered:
            return 0.0
        return min(self._due_s, look_s) - time.monotonic()

    def _obey(self) -> None:
        """Do what was ordered."""
        while self._ordered:
            self._ordered.popleft()()

    def _tell_changes(self) -> None:
        """Wake who follows, if there is something for them."""
        if self._told != self._tables.change_number:
            self._told = self._tables.change_number
            for wake in self._wakes:
                wake()

    def _take(self) -> list[Write]:
        """What goes into the next transaction."""
        left_bytes = _BYTES_AT_ONCE
        self._due_s = 0.0
        for count, write in enumerate(self._queue):
            if count == _WRITES_AT_ONCE or left_bytes <= 0:
                batch, self._queue = self._queue[:count], self._queue[count:]
                return batch
            if isinstance(write.record, AppendSlice):
                left_bytes -= len(write.record.data)
        self._due_s = math.inf
        batch, self._queue = self._queue, []
        return batch

    def _commit_at_last(self, batch: Sequence[Write]) -> bool:
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

    def _commit(self, batch: Sequence[Write]) -> bool:
        try:
            try:
                self._write(batch)
            except sqlite3.Error as error:
                if not is_disk_full(self._path, error) or not self.retention.make_room():
                    raise
                # In pieces, which need less of the log. Who reads it sees no more than before.
                for at in range(0, len(batch), _WRITES_WHEN_FULL):
                    self._write(batch[at : at + _WRITES_WHEN_FULL])
        except sqlite3.Error as error:
            self.counters.writes_failed += 1
            self._say_failed(in_words(self._path, error))
            return False
        self._say_failed("")
        return True

    def _write(self, batch: Sequence[Write]) -> None:
        try:
            self._write_at_once(batch)
        except _OF_A_RECORD as error:
            # Whoever caused it would else end the coordinator again and again, or stop all others.
            if len(batch) == 1:
                self._leave_out(batch[0], error)
                return
            half = len(batch) // 2
            self._write(batch[:half])
            self._write(batch[half:])

    def _leave_out(self, write: Write, error: Exception) -> None:
        self.counters.records_left_out += 1
        if self.counters.records_left_out == 1:
            self._log.error(
                f"{self._path}: a {type(write.record).__name__} cannot be stored, and is left out:"
                f" {error}. This is a defect: please report it. Others are counted only",
                message_id=MessageId.STORE_FAILED,
            )

    def _write_at_once(self, batch: Sequence[Write]) -> None:
        began_s = time.monotonic()
        with self._transaction():
            self._tables.apply(write.record for write in batch)
            self._trim()
        self.commit_s.observe(time.monotonic() - began_s)

    def _trim(self) -> None:
        last = self._tables.change_number
        number = max(min((last, *self._followed.values())), last - _CHANGES_MAX)
        if number - self._trimmed >= _TRIM_AT_ONCE:
            self._tables.trim_changes(number)
            self._trimmed = number

    def _say_failed(self, why: str) -> None:
        """Once, not with each attempt; empty: it works."""
        if why == self.failed:
            return
        self.failed = why
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
        self._give_signs()
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._tables.undone()
            raise
