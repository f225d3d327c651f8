# SPDX-License-Identifier: Apache-2.0
"""How much is kept, for how long, and what goes when the disk is full.

Never a trace that is still in assembly (not released), for its nodes wait for it; of the others
coordinator.store.keeping says which goes first. They are deleted in transactions of their own,
short ones, so that what is to be written waits for none of them long.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.counters import Deleted, StoreCounters
from coordinator.store.keeping import Keep, Keeping
from coordinator.store.tables import Tables
from runtime.log import Log

# Over its bound the store frees this part of it when nobody waits, so that it does not
# delete a trace at each commit.
_HEADROOM = 0.05

# In one transaction, which delays the durability of what waits.
_DELETE_S = 0.02

# Age is checked at most so often.
AGE_CHECK_S = 60.0

RESERVE_BYTES = 16 << 20
"""Of a file that is given up when the disk is full: so that the log can be taken into the store's
file, which grows by it then. The log has 8 MiB (schema.LOG_BYTES) and what one transaction writes."""

# SQLite's own bound of how many pages a file may have.
_PAGES_MAX = 0xFFFFFFFE

# Free room within the file that is made when the disk is full: what nodes send in some seconds.
_ROOM_WHEN_FULL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much is kept, for how long."""

    bytes_max: int
    keep: Keep
    pinned_bytes_max: int = 0


class StoreAge:
    """The store's own clock: how many seconds it has been there.

    It goes on with the machine's uptime, and while the coordinator does not run, by the time of
    day. So whoever sets the clock while it runs deletes nothing and keeps nothing for longer.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        unix_s: Callable[[], float],
        uptime_s: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._unix_s = unix_s
        self._uptime_s = uptime_s
        age_s, looked_at_s = connection.execute("SELECT age_s, unix_s FROM about").fetchone()
        self._begun_s = float(age_s) + max(0.0, unix_s() - float(looked_at_s))
        self._begun_uptime_s = uptime_s()

    def now_s(self) -> float:
        """How old it is."""
        return self._begun_s + self._uptime_s() - self._begun_uptime_s

    def put(self) -> None:
        """Write how old it is, for who opens it next; within the caller's transaction."""
        self._connection.execute(
            "UPDATE about SET age_s = ?, unix_s = ?", (self.now_s(), self._unix_s())
        )


class Reserve:
    """A file beside the store, to be given up when the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = Path(f"{path}.reserve")

    def hold(self) -> bool:
        """Have it, if there is room; whether it is there."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_size == RESERVE_BYTES:
                return True
        try:
            held = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            os.posix_fallocate(held, 0, RESERVE_BYTES)
        except OSError:
            self.give_up()  # a part of it would take room, and give none
            return False
        finally:
            os.close(held)
        return True

    def give_up(self) -> bool:
        """Whether it was there."""
        with contextlib.suppress(OSError):
            self._path.unlink()
            return True
        return False


class Retention:
    """Keeps a store within its limits, by its writing connection, between two transactions.

    ``others_wait`` says whether somebody waits for a write, ``between`` is called before each transaction.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        limits: StoreLimits,
        tables: Tables,
        keeping: Keeping,
        age: StoreAge,
        counters: StoreCounters,
        log: Log,
        others_wait: Callable[[], bool],
        transaction: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.limits = limits
        """In force from the next commit on; for any thread to change."""
        self._connection = connection
        self._path = path
        self._tables = tables
        self._keeping = keeping
        self._age = age
        self._counters = counters
        self._log = log
        self._others_wait = others_wait
        self._transaction = transaction
        self._age_checked_s = -AGE_CHECK_S
        self._reserve = Reserve(path)
        self.has_reserve = self._reserve.hold()
        """Whether the disk had room for it, when it was last looked at."""
        self._is_bounded = False
        self.stored_bytes = tables.used_bytes()
        """Of the database file that hold something, at the last commit; for any thread."""

    def enforce(self) -> None:
        """Delete what is too old or too much: all of it only as long as nobody waits."""
        self._keep_by_rules()
        now_s = self._age.now_s()
        if now_s - self._age_checked_s >= AGE_CHECK_S:
            self._age_checked_s = now_s
            self._look_after_age(now_s)
        used_bytes = self._tables.used_bytes()
        grown_bytes, self.stored_bytes = max(0, used_bytes - self.stored_bytes), used_bytes
        limit = self.limits.bytes_max
        if self.stored_bytes <= limit:
            return
        target = int(limit * (1 - _HEADROOM))
        # Twice what came at least, so that it gets less, however much comes.
        must = max(limit, self.stored_bytes - 2 * grown_bytes)
        while self.stored_bytes > (must if self._others_wait() else target):
            if not self.delete_first(Deleted.BYTES, enough_bytes=target):
                break

    def _keep_by_rules(self) -> None:
        """Take up rules that have changed: at least a piece of it, whoever waits."""
        keeping = self._keeping
        if self.limits.keep != keeping.keep:
            keeping.take_up(self.limits.keep)
            self._age_checked_s = -AGE_CHECK_S
        while keeping.is_behind:
            try:
                with self._transaction():
                    keeping.go_over()
            except sqlite3.Error:
                keeping.take_up(keeping.keep)
                raise
            if self._others_wait():
                break

    def _look_after_age(self, now_s: float) -> None:
        self.has_reserve = self._reserve.hold()
        if self.has_reserve and self._is_bounded:
            self._bound_pages(_PAGES_MAX)
        with self._transaction():
            self._age.put()
        while self._delete(Deleted.AGE, lambda: self._keeping.too_old(now_s)):
            if self._others_wait():
                self._age_checked_s = -AGE_CHECK_S  # the rest after them
                break

    def make_room(self) -> bool:
        """The disk is full: free room within the file, which needs none of the disk. Whether there is some.

        The file keeps the size that it has until there is room for the reserve again: else it would
        take that, and nothing could be taken into it any more.
        """
        self._reserve.give_up()
        self._counters.disk_full += 1
        before = self._counters.deleted[Deleted.DISK_FULL]
        self._checkpoint()
        self._bound_pages(1)  # at least as many as there are, so as many
        self.has_reserve = self._reserve.hold()
        target = self._tables.used_bytes() + self._tables.free_bytes() - _ROOM_WHEN_FULL_BYTES
        while self._tables.free_bytes() < _ROOM_WHEN_FULL_BYTES:
            if not self.delete_first(Deleted.DISK_FULL, enough_bytes=target):
                break
            self._checkpoint()
        deleted = self._counters.deleted[Deleted.DISK_FULL] - before
        if deleted:
            self._log.warning(
                f"{self._path}: the disk is full; deleted the {deleted} oldest traces for those that"
                " come. Give it more room, or lower `store.bytes_max` to what there is"
            )
        return self._tables.free_bytes() > 0

    def _bound_pages(self, count: int) -> None:
        self._connection.execute(f"PRAGMA max_page_count = {count}").fetchone()
        self._is_bounded = count < _PAGES_MAX

    def _checkpoint(self) -> None:
        """Take the log into the file, so that it begins anew where it has room already."""
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def delete_first(self, why: Deleted, *, enough_bytes: int = 0) -> bool:
        """Delete the released traces that go first, for a moment; whether there were any.

        Fewer if no more than ``enough_bytes`` are left then.
        """
        now_s = self._age.now_s()
        return self._delete(why, lambda: self._keeping.first(now_s), enough_bytes)

    def _delete(
        self, why: Deleted, chosen: Callable[[], int | None], enough_bytes: int = 0
    ) -> bool:
        until_s = time.monotonic() + _DELETE_S
        deleted = 0
        with self._transaction():
            while (key := chosen()) is not None:
                self._tables.delete(key)
                deleted += 1
                if self._tables.used_bytes() <= enough_bytes or time.monotonic() >= until_s:
                    break
        self._counters.deleted[why] += deleted
        self.stored_bytes = self._tables.used_bytes()
        return bool(deleted)
