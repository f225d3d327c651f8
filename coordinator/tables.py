# SPDX-License-Identifier: Apache-2.0
"""What records and notes make of the rows of the store (coordinator.schema): all that is written.

When, and in which transactions, is coordinator.store's.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

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
)
from coordinator.core.trace import STAYING
from coordinator.core.verdict import in_part_deleted
from coordinator.counters import StoreCounters
from coordinator.rows import stored_verdict, verdict_rest
from protocol.messages import CHUNK_BYTES_MAX, TraceId
from protocol.verdicts import VerdictKind
from runtime.log import Log

# Slices that end for good where they were deleted: one line of log for each,
# not for each chunk.
_CUT_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class PutExported:
    """A trace was exported, or given up: with a verdict of this kind, on so many bytes."""

    trace: TraceId
    bytes: int
    verdict: VerdictKind


Note: TypeAlias = index.TraceIndex | PutExported
"""What is made of a trace that is stored. One of a trace that was deleted is nothing."""


@dataclass(slots=True)
class _Run:
    """Chunks of a slice that follow each other."""

    first: AppendSlice
    data: list[bytes]
    end: int

    def take(self, record: AppendSlice) -> bool:
        """Whether it goes on where this ends, and is part of it now."""
        end = record.offset + len(record.data)
        follows = record.epoch == self.first.epoch and record.offset == self.end
        # As its readers expect of a chunk.
        if not follows or end - self.first.offset > CHUNK_BYTES_MAX:
            return False
        self.data.append(record.data)
        self.end = end
        return True

    def whole(self) -> AppendSlice:
        return replace(self.first, data=b"".join(self.data))


def condensed(records: Iterable[Record]) -> Iterator[Record]:
    """What records that are written at once come to: fewer records.

    A store that falls behind has dozens of each slice in a batch, and each costs the lock
    of the interpreter several times. Of statuses only the last is written; but one counts
    for the slice that begins after it, so none is left out there. Chunks that follow each
    other become one; but a verdict is compared with what was stored before it.
    """
    kept: list[Record | _Run] = []
    statuses: dict[tuple[TraceId, str], int] = {}
    growing: dict[TraceId, dict[str, _Run]] = {}
    for record in records:
        match record:
            case PutStatus():
                key = (record.status.trace, record.node)
                at = statuses.setdefault(key, len(kept))
                if at < len(kept):
                    before = kept[at]
                    assert isinstance(before, PutStatus)
                    kept[at] = replace(record, restarted=record.restarted or before.restarted)
                    continue
            case AppendSlice():
                if record.offset == 0:
                    statuses.pop((record.trace, record.node), None)
                slices = growing.setdefault(record.trace, {})
                if record.node in slices and slices[record.node].take(record):
                    continue
                end = record.offset + len(record.data)
                slices[record.node] = _Run(record, [record.data], end)
                kept.append(slices[record.node])
                continue
            case PutVerdict():
                growing.pop(record.trace, None)
        kept.append(record)
    for item in kept:
        # One after the other: all at once would double the memory of a batch.
        yield item.whole() if isinstance(item, _Run) else item


def _rows(row: str, items: Sequence[object]) -> str:
    """The rows of an INSERT of all items at once: a statement for each costs far more."""
    return ", ".join([row] * len(items))


class Tables:
    """The rows of one store, by its writing connection. Whoever calls has a transaction open."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        exports: frozenset[VerdictKind],
        counters: StoreCounters,
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self.exports = exports
        """Which verdicts a trace must have, when it is closed, to be exported; for any thread to change."""
        self._connection = connection
        self._counters = counters
        self._log = log
        self._clock = clock
        self._cut: set[tuple[TraceId, str]] = set()
        self._touched: set[TraceId] = set()
        self._touched_slices: set[tuple[TraceId, str]] = set()

    def apply(self, records: Iterable[Record]) -> None:
        """Write what the core has to say, in as few records as it comes to."""
        # Only as long as nobody else can have deleted them.
        self._touched.clear()
        self._touched_slices.clear()
        for record in condensed(records):
            self._apply(record)

    def _apply(self, record: Record) -> None:
        execute = self._connection.execute
        match record:
            case PutNode():
                execute(
                    "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?)",
                    (
                        record.node,
                        json.dumps(record.addresses),
                        None if record.incarnation is None else str(record.incarnation),
                    ),
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
                (stored,) = execute(
                    "SELECT coalesce(sum(bytes), 0) FROM slices WHERE trace = ?", (record.trace,)
                ).fetchone()
                if stored < verdict.bytes:
                    verdict = in_part_deleted(verdict)
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
                execute("INSERT OR IGNORE INTO to_index (trace) VALUES (?)", (record.trace,))
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

    def apply_notes(self, notes: Sequence[Note]) -> None:
        """Write what was made of traces elsewhere."""
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

    def _touch(self, *traces: TraceId) -> None:
        """Have rows for these traces."""
        new = [trace for trace in dict.fromkeys(traces) if trace not in self._touched]
        if not new:
            return
        now_ns = int(self._clock() * 1e9)
        self._connection.execute(
            f"INSERT OR IGNORE INTO traces (trace, stored_ns) VALUES {_rows('(?, ?)', new)}",
            [value for trace in new for value in (trace, now_ns)],
        )
        self._touched.update(new)

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
        traces = (group.primary, *fired.laterals)
        self._touch(*traces)
        self._connection.execute(
            f"INSERT OR IGNORE INTO members VALUES {_rows('(?, ?, ?)', traces)}",
            [value for trace in traces for value in (trace, group.trigger, group.primary)],
        )

    def _slice(self, trace: TraceId, node: str) -> None:
        """Have a row for this slice."""
        if (trace, node) in self._touched_slices:
            return
        self._touch(trace)
        self._connection.execute(
            "INSERT OR IGNORE INTO slices (trace, node) VALUES (?, ?)", (trace, node)
        )
        self._touched_slices.add((trace, node))

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
                    "UPDATE slices SET restarted = max(restarted, bytes > 0,"
                    " coalesce(status_epoch NOT IN (0, ?) AND (flags & ? OR open_handles), 0)),"
                    " epoch = ?, bytes = 0,"
                    " least = NULL, held = CASE WHEN status_epoch = ? THEN held END"
                    " WHERE trace = ? AND node = ?",
                    (record.epoch, int(STAYING), record.epoch, record.epoch, *key),
                )
            stored = 0
        if record.offset > stored:
            # The trace was deleted for the bounds, and came up again: what is
            # left of the slice cannot be read without its beginning.
            self._counters.bytes_cut += len(record.data)
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

    def used_bytes(self) -> int:
        """Bytes of the database file that hold something."""
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        (page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        return int((pages - free) * page_bytes)

    def delete(self, trace: bytes) -> None:
        """Delete all that is stored of a trace."""
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
