# SPDX-License-Identifier: Apache-2.0
"""What records make of the rows of the store (coordinator.store.schema): all that is written.

Rows of traces that are written to are kept in memory, changed there, and written once a batch,
however often they changed in it, table by table: so a row costs a few microseconds. When, and
in which transactions, is coordinator.store.writer's; after a transaction that failed, all is
read anew.
"""

from __future__ import annotations

import json
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import zstandard

from coordinator.core.clock import ClockOffset
from coordinator.core.records import (
    AppendSlice,
    DropNode,
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
from coordinator.core.verdict import Verdict, in_part_deleted, replaced
from coordinator.counters import StoreCounters
from coordinator.store.keeping import Keeping
from coordinator.store.rows import (
    CHUNKS_MAX,
    chunk_ids,
    stored_slices,
    stored_verdict,
    verdict_of,
    verdict_rest,
)
from coordinator.store.schema import CHUNK_NUMBER_BITS
from protocol.messages import CHUNK_BYTES_MAX, Group, SliceStatus, TraceId
from protocol.verdicts import VerdictKind
from runtime.log import Log

# Slices that end for good where they were deleted: one line of log for each,
# not for each chunk.
_CUT_REMEMBERED = 1024

# Rows of so many traces are kept in memory, some 1 to 2 kB each. One that is written to after
# that is read again.
_KEPT_TRACES = 4096

# Of nodes, and of triggers: more than there are at a time, of some 150 bytes each.
_NAMES_REMEMBERED = 65536

# What a trace that is pinned has grown to.
_PINNED = (
    "max(1, (SELECT coalesce(sum(length(data)), 0) FROM chunks WHERE id BETWEEN"
    f" traces.key << {CHUNK_NUMBER_BITS} AND traces.key << {CHUNK_NUMBER_BITS} | {CHUNKS_MAX}))"
)

# zstd's own default; higher levels save one or two per cent of chunks of this size.
_COMPRESSION_LEVEL = 3


@dataclass(slots=True, eq=False)
class _Slice:
    """A row of ``slices``. ``status`` None: none of this epoch."""

    trace_key: int
    node_key: int
    epoch: int = 0
    bytes: int = 0
    first_chunk: int = 0
    last_chunk: int = 0
    restarted: bool = False
    least: int | None = None
    status: SliceStatus | None = None
    clock: ClockOffset | None = None

    def row(self) -> tuple[object, ...]:
        status, clock = self.status, self.clock
        said: tuple[object, ...] = (None,) * 6
        if status is not None:
            crumbs = b"".join(crumb.to_bytes(8, "little") for crumb in status.crumbs)
            said = (
                int(status.held),
                status.epoch,
                int(status.flags),
                status.bytes,
                status.open_handles,
                crumbs,
            )
        return (
            self.trace_key,
            self.node_key,
            self.epoch,
            self.bytes,
            self.first_chunk,
            self.last_chunk,
            int(self.restarted),
            self.least,
            *said,
            clock.offset_ns if clock else None,
            clock.error_ns if clock else None,
        )


@dataclass(slots=True, eq=False)
class _Trace:
    """What counts of a row of ``traces``, and those of its slices by node."""

    key: int
    verdict_version: int | None = None
    is_coherent: bool = False
    chunks: int = 0  # the last number that was given to one
    slices: dict[str, _Slice] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)  # keys, by trigger; of those met so far

    @property
    def stored_bytes(self) -> int:
        return sum(known.bytes for known in self.slices.values())


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
        if len(self.data) == 1:
            return self.first
        return replace(self.first, data=b"".join(self.data), zstd=b"")


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


class _Names:
    """A table of names and their keys, some of which that were met are in memory."""

    def __init__(self, connection: sqlite3.Connection, table: str) -> None:
        self._connection = connection
        self._table = table
        self._keys: dict[str, int] = {}

    def key(self, name: str) -> int:
        """Have a row with this name."""
        known = self._keys.get(name)
        if known is None:
            self._connection.execute(
                f"INSERT OR IGNORE INTO {self._table} (name) VALUES (?)", (name,)
            )
            (known,) = self._connection.execute(
                f"SELECT key FROM {self._table} WHERE name = ?", (name,)
            ).fetchone()
            assert known is not None
            if len(self._keys) == _NAMES_REMEMBERED:
                self._keys.clear()
            self._keys[name] = known
        return known

    def forget(self) -> None:
        """Others may have changed the table."""
        self._keys.clear()


class _Batch:
    """Rows that are changed in memory, and not in their tables yet."""

    def __init__(self) -> None:
        self.new_traces: list[tuple[int, TraceId, int, int]] = []
        self.verdicts: dict[int, tuple[str, int, str, int]] = {}
        self.released: dict[int, bool] = {}
        self.slices: dict[tuple[int, int], _Slice] = {}
        self.chunks: list[tuple[int, int, int, bytes]] = []
        self.firings: list[tuple[object, ...]] = []
        self.members: list[tuple[int, int]] = []
        self.changed: dict[int, None] = {}


class Tables:
    """The rows of one store, by its writing connection. Whoever calls has a transaction open."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        counters: StoreCounters,
        log: Log,
        clock: Callable[[], float],
        age_s: Callable[[], float],
        keeping: Keeping,
    ) -> None:
        self.age_s = age_s
        self._keeping = keeping
        self._connection = connection
        self._counters = counters
        self._log = log
        self._clock = clock
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        self._page_bytes = int(page_bytes)
        self._compressor = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL)
        self._cut: set[tuple[TraceId, str]] = set()
        self._traces: OrderedDict[TraceId, _Trace] = OrderedDict()
        self._nodes = _Names(connection, "nodes")
        self._trigger_names = _Names(connection, "trigger_names")
        self._batch = _Batch()
        self._last_key = self.change_number = 0
        self._find_ends()

    def _find_ends(self) -> None:
        """The last key of a trace, and the last number of a change, that were given."""
        self._last_key, self.change_number = self._connection.execute(
            "SELECT max(coalesce((SELECT max(key) FROM traces), 0),"
            " coalesce((SELECT trace FROM changes ORDER BY number DESC LIMIT 1), 0)),"
            " coalesce((SELECT max(number) FROM changes), 0)"
        ).fetchone()

    def apply(self, records: Iterable[Record]) -> None:
        """Write what the core has to say, in as few rows as it comes to."""
        for record in condensed(records):
            self._apply(record)
        self._flush()
        while len(self._traces) > _KEPT_TRACES:
            self._traces.popitem(last=False)

    def undone(self) -> None:
        """The transaction was rolled back: what is in memory is not what is in the tables."""
        self._batch = _Batch()
        self._traces.clear()
        self._nodes.forget()
        self._trigger_names.forget()
        self._find_ends()

    def _apply(self, record: Record) -> None:
        match record:
            case PutNode():
                incarnation = None if record.incarnation is None else str(record.incarnation)
                self._connection.execute(
                    "UPDATE nodes SET addresses = ?, incarnation = ?, put_ns = ? WHERE key = ?",
                    (
                        json.dumps(record.addresses),
                        incarnation,
                        int(self._clock() * 1e9),
                        self._nodes.key(record.node),
                    ),
                )
            case DropNode():
                # Traces may still name it.
                self._connection.execute(
                    "UPDATE nodes SET addresses = NULL, incarnation = NULL WHERE name = ?",
                    (record.node,),
                )
            case PutTrigger():
                self._put_trigger(record)
            case PutAbandoned():
                self._connection.execute(
                    "UPDATE groups SET abandoned_by = ? WHERE key = ? AND abandoned_by IS NULL",
                    (self._nodes.key(record.node), self._group(record.group)),
                )
            case PutStatus():
                known = self._slice(record.status.trace, record.node)
                known.restarted = known.restarted or record.restarted
                known.status, known.clock = record.status, record.clock
            case AppendSlice():
                self._append(record)
            case PutVerdict():
                trace = self._trace(record.trace)
                verdict = record.verdict
                if trace.stored_bytes < verdict.bytes:
                    verdict = in_part_deleted(verdict)
                if trace.verdict_version is None or trace.verdict_version < verdict.version:
                    self._judge(trace, verdict)
                    self._batch.changed[trace.key] = None
            case PutVerdictAgain():
                known_trace = self._known(record.trace)
                # Nothing is there to be found or exported.
                if known_trace is not None and known_trace.verdict_version is None:
                    self._judge(known_trace, record.verdict)
            case PutReleased():
                trace = self._trace(record.trace)
                self._batch.released[trace.key] = record.released
                for node, least in record.least:
                    if node in trace.slices:
                        self._slice(record.trace, node).least = least
                self._batch.changed[trace.key] = None
            case _:
                assert_never(record)

    def _judge(self, trace: _Trace, verdict: Verdict) -> None:
        trace.verdict_version = verdict.version
        trace.is_coherent = verdict.kind is VerdictKind.COHERENT
        row = (str(verdict.kind), verdict.version, verdict_rest(verdict), trace.key)
        self._batch.verdicts[trace.key] = row

    # -------------------------------------------------------- rows in memory

    def _known(self, trace_id: TraceId) -> _Trace | None:
        """The rows of a trace, if any are there."""
        trace = self._traces.get(trace_id)
        if trace is not None:
            self._traces.move_to_end(trace_id)
            return trace
        row = self._connection.execute(
            "SELECT key, verdict_version, verdict FROM traces WHERE id = ?", (trace_id,)
        ).fetchone()
        if row is None:
            return None
        key, version, verdict = row
        (last,) = self._connection.execute(
            "SELECT max(id) FROM chunks WHERE id BETWEEN ? AND ?", chunk_ids(key)
        ).fetchone()
        is_coherent = verdict == VerdictKind.COHERENT
        trace = _Trace(key, version, is_coherent, (last or 0) & CHUNKS_MAX)
        for part in stored_slices(self._connection, trace_id, key):
            trace.slices[part.node] = _Slice(
                key,
                part.node_key,
                part.epoch,
                part.bytes,
                part.first_chunk,
                part.last_chunk,
                part.restarted,
                part.least,
                part.status,
                part.clock,
            )
        self._traces[trace_id] = trace
        return trace

    def _trace(self, trace_id: TraceId) -> _Trace:
        """Have rows for this trace."""
        trace = self._known(trace_id)
        if trace is not None:
            return trace
        self._last_key += 1
        trace = self._traces[trace_id] = _Trace(self._last_key)
        self._batch.new_traces.append(
            (trace.key, trace_id, int(self._clock() * 1e9), int(self.age_s()))
        )
        self._adopt_groups(trace_id, trace)
        return trace

    def _adopt_groups(self, trace_id: TraceId, trace: _Trace) -> None:
        """A primary that was deleted comes up again, while laterals of its are there."""
        self._connection.execute(
            "UPDATE groups SET primary_trace = ?, primary_id = NULL"
            " WHERE primary_trace IS NULL AND primary_id = ?",
            (trace.key, trace_id),
        )

    def _slice(self, trace_id: TraceId, node: str) -> _Slice:
        """Have a row for this slice, which is about to change."""
        trace = self._trace(trace_id)
        known = trace.slices.get(node)
        if known is None:
            known = trace.slices[node] = _Slice(trace.key, self._nodes.key(node))
        self._batch.slices[known.trace_key, known.node_key] = known
        return known

    def _group(self, group: Group) -> int:
        """Have a row for this group; its key."""
        primary = self._trace(group.primary)
        known = primary.groups.get(group.trigger)
        if known is not None:
            return known
        trigger = self._trigger_names.key(group.trigger)
        row = self._connection.execute(
            "SELECT key FROM groups WHERE primary_trace = ? AND +trigger = ?",
            (primary.key, trigger),
        ).fetchone()
        if row is None:
            row = self._connection.execute(
                "INSERT INTO groups (trigger, primary_trace) VALUES (?, ?) RETURNING key",
                (trigger, primary.key),
            ).fetchone()
        key = primary.groups[group.trigger] = int(row[0])
        return key

    # -------------------------------------------------------------- records

    def _put_trigger(self, record: PutTrigger) -> None:
        fired = record.fired
        key = self._group(fired.group)
        self._batch.firings.append(
            (
                key,
                self._nodes.key(record.node),
                b"".join(fired.laterals),
                fired.why,
                int(fired.source),
                fired.fired_at_ns,
                fired.suppressed,
            )
        )
        for lateral in fired.laterals:
            if lateral != fired.group.primary:
                self._batch.members.append((self._trace(lateral).key, key))

    def _append(self, record: AppendSlice) -> None:
        known = self._slice(record.trace, record.node)
        trace = self._trace(record.trace)
        stored = known.bytes
        if record.epoch != known.epoch:
            if record.offset == 0:
                if known.bytes and trace.is_coherent:
                    self._replace_verdict(trace, record.node)
                self._begin_anew(known, record.epoch)
            stored = 0
        if record.offset > stored:
            # The trace was deleted for the bounds, and came up again: what is
            # left of the slice cannot be read without its beginning.
            self._count_cut(
                record, len(record.data), f"its first {record.offset} bytes were deleted"
            )
            return
        data = record.data[stored - record.offset :]
        if not data:
            return
        if trace.chunks == CHUNKS_MAX:
            self._count_cut(record, len(data), f"its trace came in {CHUNKS_MAX} pieces already")
            return
        trace.chunks += 1
        number = trace.key << CHUNK_NUMBER_BITS | trace.chunks
        is_whole = len(data) == len(record.data)
        compressed = (record.zstd if is_whole else b"") or self._compressor.compress(data)
        self._batch.chunks.append((number, known.node_key, stored, compressed))
        known.first_chunk = known.first_chunk or number
        known.last_chunk = number
        known.bytes = stored + len(data)

    def _replace_verdict(self, trace: _Trace, node: str) -> None:
        """Bytes that it stands on are replaced. The core never does that before it says otherwise."""
        row = self._batch.verdicts.get(trace.key)
        if row is None:
            verdict = stored_verdict(self._connection, trace.key)
        else:
            verdict = verdict_of(*row[:3])
        assert verdict is not None
        self._judge(trace, replaced(verdict, node))
        self._batch.changed[trace.key] = None

    def _begin_anew(self, known: _Slice, epoch: int) -> None:
        """Bytes of another epoch replace those that are here."""
        status = known.status
        if known.bytes:
            known.restarted = True
            self._put_chunks()
            self._connection.execute(
                "DELETE FROM chunks WHERE id BETWEEN ? AND ? AND node = ?",
                (known.first_chunk, known.last_chunk, known.node_key),
            )
        if status is not None and status.epoch != epoch:
            stays = bool(status.flags & STAYING or status.open_handles)
            known.restarted = known.restarted or (status.epoch != 0 and stays)
            known.status = None
        known.epoch, known.bytes, known.least = epoch, 0, None
        known.first_chunk = known.last_chunk = 0

    def _count_cut(self, record: AppendSlice, count: int, why: str) -> None:
        self._counters.bytes_cut += count
        key = (record.trace, record.node)
        if key in self._cut:
            return
        self._log.warning(
            f"slice {record.trace.hex()} of {record.node}: not stored from here on, since {why}",
            trace_id=record.trace.hex(),
            node=record.node,
        )
        if len(self._cut) == _CUT_REMEMBERED:
            self._cut.clear()
        self._cut.add(key)

    # ---------------------------------------------------------------- tables

    def _put_chunks(self) -> None:
        self._connection.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?)", self._batch.chunks)
        self._batch.chunks.clear()

    def _flush(self) -> None:
        """Bring the tables up to what is in memory."""
        batch, self._batch = self._batch, _Batch()

        def many(statement: str, rows: Collection[Sequence[object]]) -> None:
            # Where traces come one by one, most tables have no news.
            if rows:
                self._connection.executemany(statement, rows)

        many(
            "INSERT INTO traces (key, id, stored_ns, born_s) VALUES (?, ?, ?, ?)", batch.new_traces
        )
        many(
            "UPDATE traces SET verdict = ?, verdict_version = ?, verdict_rest = ? WHERE key = ?",
            batch.verdicts.values(),
        )
        many(
            f"INSERT OR REPLACE INTO slices VALUES ({', '.join('?' * 16)})",
            [known.row() for known in batch.slices.values()],
        )
        many("INSERT INTO chunks VALUES (?, ?, ?, ?)", batch.chunks)
        many("INSERT OR REPLACE INTO firings VALUES (?, ?, ?, ?, ?, ?, ?)", batch.firings)
        many("INSERT OR IGNORE INTO members VALUES (?, ?)", batch.members)
        # By its verdict and its groups, which are in their tables now.
        many(
            f"UPDATE traces SET released = 1, keep_s = {self._keeping.expression},"
            f" pinned = iif(pinned, {_PINNED}, 0) WHERE key = ?",
            [(key,) for key, released in batch.released.items() if released],
        )
        many(
            "UPDATE traces SET released = 0 WHERE key = ?",
            [(key,) for key, released in batch.released.items() if not released],
        )
        self._put_changes(batch.changed)

    def _put_changes(self, keys: Iterable[int]) -> None:
        now_ns = int(self._clock() * 1e9)
        rows = [
            (number, key, now_ns) for number, key in enumerate(keys, start=self.change_number + 1)
        ]
        if rows:
            self._connection.executemany("INSERT INTO changes VALUES (?, ?, ?)", rows)
            self.change_number += len(rows)

    def trim_changes(self, upto: int) -> None:
        """All who follow have seen the changes up to this number."""
        self._connection.execute(
            "DELETE FROM changes WHERE number <= ?", (min(upto, self.change_number - 1),)
        )

    def used_bytes(self) -> int:
        """Bytes of the database file that hold something."""
        # Each statement takes and lets go of SQLite's locks.
        (pages,) = self._connection.execute(
            "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"
        ).fetchone()
        return int(pages) * self._page_bytes

    def free_bytes(self) -> int:
        """Bytes of the database file that hold nothing any more, and are used again."""
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        return int(free) * self._page_bytes

    def delete(self, key: int) -> None:
        """Delete all that is stored of a trace."""
        execute = self._connection.execute
        (trace_id,) = execute("SELECT id FROM traces WHERE key = ?", (key,)).fetchone()
        self._traces.pop(TraceId(trace_id), None)
        execute("DELETE FROM chunks WHERE id BETWEEN ? AND ?", chunk_ids(key))
        execute("DELETE FROM slices WHERE trace = ?", (key,))
        groups = execute(
            "SELECT key FROM groups WHERE primary_trace = ?1"
            " UNION SELECT group_key FROM members WHERE trace = ?1",
            (key,),
        ).fetchall()
        execute("DELETE FROM members WHERE trace = ?", (key,))
        execute(
            "UPDATE groups SET primary_trace = NULL, primary_id = ?, abandoned_by = NULL"
            " WHERE primary_trace = ?",
            (trace_id, key),
        )
        for (group,) in groups:
            self._delete_group_if_empty(group)
        execute("DELETE FROM traces WHERE key = ?", (key,))
        self._put_changes((key,))

    def _delete_group_if_empty(self, key: int) -> None:
        """A firing goes with the last trace of its group, and a name with the last group of that name."""
        execute = self._connection.execute
        row = execute(
            "DELETE FROM groups WHERE key = ?1 AND primary_trace IS NULL"
            " AND NOT EXISTS (SELECT 1 FROM members WHERE group_key = ?1) RETURNING trigger",
            (key,),
        ).fetchone()
        if row is None:
            return
        execute("DELETE FROM firings WHERE group_key = ?", (key,))
        gone = execute(
            "DELETE FROM trigger_names WHERE key = ?1"
            " AND NOT EXISTS (SELECT 1 FROM groups WHERE trigger = ?1) RETURNING key",
            row,
        ).fetchone()
        if gone is not None:
            self._trigger_names.forget()
