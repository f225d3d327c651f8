# SPDX-License-Identifier: Apache-2.0
"""The file of what waits to be exported, and of what was: for one thread."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from coordinator.beside import Beside, path_beside
from coordinator.core.verdict import Verdict
from coordinator.store.reader import StoreReader
from protocol.messages import TraceId
from protocol.verdicts import VerdictKind
from runtime.log import Log

_VERSION = 2

_SCHEMA = """
-- New ones go together, in their order; what was put off goes alone, when it is due.
CREATE TABLE waiting (
    number INTEGER PRIMARY KEY,
    trace BLOB NOT NULL UNIQUE,
    key INTEGER NOT NULL,               -- traces.key of the store
    attempts INTEGER NOT NULL DEFAULT 0,    -- that ended with others going first
    next_try_s REAL NOT NULL DEFAULT 0,     -- Unix time
    pardoned INTEGER NOT NULL DEFAULT 0     -- 1: it was as new again, once
);
CREATE INDEX waiting_by_key ON waiting (key);
CREATE INDEX waiting_new ON waiting (number) WHERE attempts = 0;
CREATE INDEX waiting_again ON waiting (next_try_s) WHERE attempts > 0;

-- What was exported of a trace that is stored; failed or not.
CREATE TABLE exported (
    trace BLOB PRIMARY KEY,
    key INTEGER NOT NULL,
    bytes INTEGER NOT NULL,             -- as the verdict says, of the last time
    verdict TEXT NOT NULL               -- its kind
) WITHOUT ROWID;
CREATE INDEX exported_by_key ON exported (key);
"""

# A position.
_PAUSED = -1

# Looked at in one transaction.
_CHANGES_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Exported:
    """A trace was exported, or given up: with a verdict of this kind, on so many bytes."""

    trace: TraceId
    bytes: int
    verdict: VerdictKind


class ExportQueue(Beside):
    """What waits. It follows the store's changes while there is a receiver."""

    def __init__(self, store: Path, store_id: str, log: Log) -> None:
        super().__init__(path_beside(store, "exports"), store_id, _SCHEMA, _VERSION, log)
        if self.is_new:
            self._take_over(store)

    def _take_over(self, store: Path) -> None:
        """What stood in the store until its schema 7."""
        with StoreReader(store) as reader, self.transaction():
            for trace, size, verdict in reader.exported_before():
                key = reader.key_of(trace)
                if key is not None:
                    self.connection.execute(
                        "INSERT INTO exported VALUES (?, ?, ?, ?)", (trace, key, size, verdict)
                    )
            for trace in reader.waited_for_export():
                key = reader.key_of(trace)
                if key is not None:
                    self._wait(trace, key)

    def pause(self) -> None:
        """There is no receiver: nothing of what changes until there is one shall be exported."""
        if self.position != _PAUSED:
            with self.transaction():
                self.move_to(_PAUSED)

    def follow(self, reader: StoreReader, verdicts: Collection[VerdictKind]) -> int:
        """Queue what is due since; its position then. ``verdicts``: of which kinds traces are exported.

        Of changes that are not listed any more nothing is queued: the store keeps them for a
        long time, and who falls behind as far as that has enough to send.
        """
        last = reader.last_change()
        if not 0 <= self.position <= last:
            # It was paused; or the store is an older copy of itself.
            with self.transaction():
                self.move_to(last)
        while changes := reader.changes(self.position, _CHANGES_AT_ONCE):
            with self.transaction():
                for change in changes:
                    if change.trace is None:
                        self._forget(change.key)
                    else:
                        self._look_at(reader, change.trace, change.key, verdicts)
                self.move_to(changes[-1].number)
        return self.position

    def _look_at(
        self, reader: StoreReader, trace: TraceId, key: int, verdicts: Collection[VerdictKind]
    ) -> None:
        verdict = reader.verdict(trace)
        if verdict is not None and verdict.bytes:
            released = reader.is_released(trace)
            if self._is_due(trace, verdict, verdicts, released=released):
                self._wait(trace, key)

    def _wait(self, trace: TraceId, key: int) -> None:
        self.connection.execute(
            "INSERT OR IGNORE INTO waiting (trace, key) VALUES (?, ?)", (trace, key)
        )

    def _is_due(
        self,
        trace: TraceId,
        verdict: Verdict,
        verdicts: Collection[VerdictKind],
        *,
        released: bool,
    ) -> bool:
        """At its first coherent verdict, and when it is closed.

        Not if it was exported, has not grown since, and is judged alike. Who was told that it is of
        another kind is told what it turned out to be, wanted or not.
        """
        row = self.connection.execute(
            "SELECT bytes, verdict FROM exported WHERE trace = ?", (trace,)
        ).fetchone()
        is_wanted = verdict.kind in verdicts
        if not released:
            return is_wanted and row is None and verdict.kind is VerdictKind.COHERENT
        if row is None:
            return is_wanted
        return bool((is_wanted and row[0] < verdict.bytes) or row[1] != verdict.kind)

    def _forget(self, key: int) -> None:
        """The store deleted a trace."""
        for table in ("waiting", "exported"):
            self.connection.execute(f"DELETE FROM {table} WHERE key = ?", (key,))

    def new(self, limit: int) -> list[TraceId]:
        """Those that were never put off, the first of them."""
        rows = self.connection.execute(
            "SELECT trace FROM waiting WHERE attempts = 0 ORDER BY number LIMIT ?", (limit,)
        )
        return [TraceId(trace) for (trace,) in rows]

    def again(self) -> tuple[TraceId, float] | None:
        """The one of those that were put off which is due first, and when; None: none was."""
        row = self.connection.execute(
            "SELECT trace, next_try_s FROM waiting WHERE attempts > 0 ORDER BY next_try_s, number LIMIT 1"
        ).fetchone()
        return None if row is None else (TraceId(row[0]), row[1])

    def attempts(self, trace: TraceId) -> int:
        """How often others went first; 0 of what does not wait."""
        row = self.connection.execute("SELECT attempts FROM waiting WHERE trace = ?", (trace,))
        return int((row.fetchone() or (0,))[0])

    def put_off(self, traces: Iterable[TraceId], until_s: float) -> None:
        """Others go first, and these alone, not before that time."""
        with self.transaction():
            self.connection.executemany(
                "UPDATE waiting SET attempts = attempts + 1, next_try_s = ? WHERE trace = ?",
                ((until_s, trace) for trace in traces),
            )

    def pardon(self) -> None:
        """What was put off once is as new, and not a second time: it may not have been its fault."""
        with self.transaction():
            self.connection.execute(
                "UPDATE waiting SET attempts = 0, pardoned = 1 WHERE attempts = 1 AND NOT pardoned"
            )

    def hurry(self) -> None:
        """What was put off is due now: it goes to another receiver."""
        with self.transaction():
            self.connection.execute("UPDATE waiting SET attempts = 0, pardoned = 0")

    def waits(self, trace: TraceId) -> bool:
        """Whether it shall still be exported."""
        found = self.connection.execute("SELECT 1 FROM waiting WHERE trace = ?", (trace,))
        return found.fetchone() is not None

    def count(self) -> int:
        """How many wait."""
        (count,) = self.connection.execute("SELECT count(*) FROM waiting").fetchone()
        return int(count)

    def drop(self, traces: Iterable[TraceId]) -> None:
        """They are not stored any more."""
        with self.transaction():
            self.connection.executemany(
                "DELETE FROM waiting WHERE trace = ?", ((trace,) for trace in traces)
            )

    def done(
        self, reader: StoreReader, notes: Iterable[Exported], verdicts: Collection[VerdictKind]
    ) -> None:
        """These were exported. One that grew, or was judged otherwise, meanwhile waits again."""
        with self.transaction():
            for note in notes:
                self.connection.execute("DELETE FROM waiting WHERE trace = ?", (note.trace,))
                key = reader.key_of(note.trace)
                if key is None:
                    continue
                self.connection.execute(
                    "INSERT OR REPLACE INTO exported VALUES (?, ?, ?, ?)",
                    (note.trace, key, note.bytes, str(note.verdict)),
                )
                self._look_at(reader, note.trace, key, verdicts)
