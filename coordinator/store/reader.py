# SPDX-License-Identifier: Apache-2.0
"""The reading side of the store, for queries and for what follows it."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator.core.records import PutTrigger, StoredTrace
from coordinator.core.verdict import Verdict
from coordinator.store.rows import (
    FIRED,
    FOR_A_MEMBER,
    IN_ORDER,
    Chunks,
    Decompressor,
    SliceRow,
    StoredTraces,
    chunk_ids,
    put_trigger,
    stored_slice,
    stored_slices,
    stored_verdict,
    trace_key_of,
    verdict_of,
)
from coordinator.store.schema import EXPORTED_BEFORE, WAITED_BEFORE, connect
from protocol.messages import TraceId
from protocol.values import dataclass

# Of one trace, that a query shows. Any number may be stored: a faulty rule can
# fire for one trace without end, and a person reads the first.
_TRIGGERS_SHOWN_MAX = 256

# What reads so long is of no use to who waits for it; ten seconds is when Jaeger UI gives up.
_READ_TIMEOUT_S = 10.0

# Steps of SQLite's machine between two looks at the clock: a millisecond or so.
_STEPS = 20_000


class ReadTooLong(Exception):
    """What was asked for was given up; who asks must narrow it."""


@contextlib.contextmanager
def time_limit(
    connection: sqlite3.Connection, is_over: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """What is read within is given up after a time, or once ``is_over``: ReadTooLong."""
    deadline_s = time.monotonic() + _READ_TIMEOUT_S
    connection.set_progress_handler(lambda: is_over() or time.monotonic() > deadline_s, _STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            raise ReadTooLong(
                f"given up after {_READ_TIMEOUT_S:g} s; narrow it, as by service or time"
            ) from error
        raise
    finally:
        connection.set_progress_handler(None, 0)


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
    key: int = field(default=0, compare=False)
    pinned: bool = False


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
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A trace was judged, released or deleted; ``trace`` None: it is not stored any more.

    ``version``: of the verdict that it has now, None without one.
    """

    number: int
    key: int
    at_ns: int
    trace: TraceId | None
    version: int | None


_OF_TRIGGER = """SELECT primary_trace FROM groups JOIN trigger_names AS n ON n.key = trigger
        WHERE n.name = :trigger AND primary_trace IS NOT NULL
    UNION SELECT trace FROM groups JOIN trigger_names AS n ON n.key = trigger
        JOIN members ON group_key = groups.key WHERE n.name = :trigger"""

_WANTED = {
    "verdict": "verdict = :verdict",
    "since_ns": "stored_ns >= :since_ns",
    "until_ns": "stored_ns <= :until_ns",
    "pinned": "pinned > 0",
    "trigger": f"key IN ({_OF_TRIGGER})",
    "service": (
        "EXISTS (SELECT 1 FROM found.summaries AS of JOIN found.spans AS s"
        " ON s.batch = of.batch AND s.trace = of.trace WHERE of.trace = key AND s.operation IN"
        " (SELECT id FROM found.operations WHERE service = :service))"
    ),
}


def _conditions(wanted: Wanted) -> tuple[str, dict[str, str | int]]:
    """In SQL, and what stands in it."""
    given = {name: value for name, value in dataclasses.asdict(wanted).items() if value}
    return " AND ".join(["true", *(_WANTED[name] for name in given)]), given


class StoreReader:
    """The reading side, for queries; one thread at a time.

    ``index``: where the index of searches is, if it is asked for traces of a service. That is
    attached as ``found``.
    """

    def __init__(self, path: Path, index: Path | None = None) -> None:
        self.connection = connect(path, writable=False)
        self._decompressor = Decompressor()
        if index is not None:
            self.connection.execute(f"ATTACH '{index.absolute().as_uri()}?mode=ro' AS found")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.connection.close()

    def time_limit(self, is_over: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
        """What is read within is given up after a time, or once ``is_over``: ReadTooLong."""
        return time_limit(self.connection, is_over)

    @contextlib.contextmanager
    def moment(self) -> Iterator[None]:
        """All that is read within is as of one moment, whatever is written meanwhile."""
        self.connection.execute("BEGIN")
        try:
            yield
        finally:
            self.connection.execute("COMMIT")

    def store_id(self) -> str:
        """Of the store and its copies."""
        (store_id,) = self.connection.execute("SELECT store_id FROM about").fetchone()
        return str(store_id)

    def changes(self, after: int, limit: int) -> list[Change]:
        """What changed after that change, in order; each as its trace stands now."""
        rows = self.connection.execute(
            "SELECT number, trace, at_ns, id, verdict_version"
            " FROM changes LEFT JOIN traces ON traces.key = trace"
            " WHERE number > ? ORDER BY number LIMIT ?",
            (after, limit),
        )
        return [
            Change(number, key, at_ns, None if trace is None else TraceId(trace), version)
            for number, key, at_ns, trace, version in rows
        ]

    def first_change(self) -> int:
        """The number of the first change that is still listed; 0 where none ever was."""
        (number,) = self.connection.execute("SELECT min(number) FROM changes").fetchone()
        return number or 0

    def last_change(self) -> int:
        """The number of the last one."""
        (number,) = self.connection.execute("SELECT max(number) FROM changes").fetchone()
        return number or 0

    def exported_before(self) -> list[tuple[TraceId, int, str]]:
        """What a store that was taken over from schema 7 says was exported: trace, bytes, verdict."""
        if not self._has_table(EXPORTED_BEFORE):
            return []
        return self.connection.execute(
            f"SELECT trace, bytes, verdict FROM {EXPORTED_BEFORE}"
        ).fetchall()

    def waited_for_export(self) -> list[TraceId]:
        """And what waited, in order."""
        if not self._has_table(WAITED_BEFORE):
            return []
        rows = self.connection.execute(f"SELECT trace FROM {WAITED_BEFORE} ORDER BY number")
        return [TraceId(trace) for (trace,) in rows]

    def _has_table(self, name: str) -> bool:
        found = self.connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (name,))
        return found.fetchone() is not None

    def stored(self, after: int, limit: int) -> list[Change]:
        """All traces after that key, in the order in which they were first stored, as if each had changed."""
        rows = self.connection.execute(
            "SELECT key, id, verdict_version FROM traces WHERE key > ? ORDER BY key LIMIT ?",
            (after, limit),
        )
        return [Change(0, key, 0, TraceId(trace), version) for key, trace, version in rows]

    def key_of(self, trace: TraceId) -> int | None:
        """Under which key a trace is stored; None: it is not."""
        return trace_key_of(self.connection, trace)

    def is_released(self, trace: TraceId) -> bool:
        """Whether it is closed."""
        row = self.connection.execute("SELECT released FROM traces WHERE id = ?", (trace,))
        return bool(row.fetchone() == (1,))

    def list_traces(self, wanted: Wanted, limit: int = 0) -> list[TraceId]:
        """Ids, newest first; limit 0: all."""
        conditions, given = _conditions(wanted)
        rows = self.connection.execute(
            f"SELECT id FROM traces WHERE {conditions} ORDER BY key DESC LIMIT :limit",
            {**given, "limit": limit or -1},
        )
        return [TraceId(trace) for (trace,) in rows]

    def is_wanted(self, trace: TraceId, wanted: Wanted) -> bool:
        """Whether a listing would have it."""
        conditions, given = _conditions(wanted)
        rows = self.connection.execute(
            f"SELECT 1 FROM traces WHERE id = :trace AND {conditions}", {**given, "trace": trace}
        )
        return rows.fetchone() is not None

    def judged(self, trigger: str) -> tuple[int, int]:
        """How many traces belong to groups of that trigger, and how many have a verdict."""
        traces, judged = self.connection.execute(
            f"SELECT count(*), count(verdict) FROM traces WHERE key IN ({_OF_TRIGGER})",
            {"trigger": trigger},
        ).fetchone()
        return traces, judged

    def trace(self, trace: TraceId) -> TraceRow | None:
        """One trace, None if nothing is stored of it."""
        row = self.connection.execute(
            "SELECT key, pinned, verdict, verdict_version, verdict_rest FROM traces WHERE id = ?",
            (trace,),
        ).fetchone()
        if row is None:
            return None
        key, pinned, *verdict = row
        fired = self.connection.execute(
            f"SELECT {FIRED} {FOR_A_MEMBER} {IN_ORDER} LIMIT :limit",
            {"trace": key, "limit": _TRIGGERS_SHOWN_MAX},
        )
        triggers = tuple(map(put_trigger, fired))
        omitted = 0
        if len(triggers) == _TRIGGERS_SHOWN_MAX:
            (count,) = self.connection.execute(
                f"SELECT count(*) {FOR_A_MEMBER}", {"trace": key}
            ).fetchone()
            omitted = count - len(triggers)
        return TraceRow(trace, triggers, omitted, verdict_of(*verdict), key, pinned > 0)

    def verdict(self, trace: TraceId) -> Verdict | None:
        """Of a trace; None if there is none yet, or the trace is not stored."""
        key = trace_key_of(self.connection, trace)
        return None if key is None else stored_verdict(self.connection, key)

    def recover_traces(self, released_max: int) -> StoredTraces:
        """All traces in assembly, and the last released ones, oldest first."""
        return StoredTraces(self.connection, released_max)

    def closed(self, trace: TraceId) -> StoredTrace | None:
        """A closed trace without its triggers and bytes; None if there is none."""
        with self.moment():
            key = trace_key_of(self.connection, trace)
            if key is None or not self.is_released(trace):
                return None
            slices = tuple(map(stored_slice, stored_slices(self.connection, trace, key)))
            verdict = stored_verdict(self.connection, key)
            return StoredTrace(trace, slices=slices, verdict=verdict, released=True)

    def slices(self, trace: TraceId) -> list[SliceRow]:
        """The slices of a trace, by node name."""
        key = trace_key_of(self.connection, trace)
        return [] if key is None else list(stored_slices(self.connection, trace, key))

    def slices_of(self, row: TraceRow) -> list[SliceRow]:
        """The same of a trace that was just read."""
        return list(stored_slices(self.connection, row.trace, row.key))

    def data(self, part: SliceRow, bytes_max: int) -> bytes:
        """The first bytes of a slice, within the moment() in which it was listed."""
        chunks = []
        for chunk in Chunks(self.connection, part, self._decompressor):
            chunks.append(chunk[:bytes_max])
            bytes_max -= len(chunk)
            if bytes_max <= 0:
                break
        return b"".join(chunks)

    def all_data(self, key: int, parts: Sequence[SliceRow]) -> list[bytes]:
        """All bytes of the slices of a trace, within the moment() in which they were listed."""
        chunks: dict[int, list[bytes]] = {part.node_key: [] for part in parts}
        for node_key, data in self.connection.execute(
            "SELECT node, data FROM chunks WHERE id BETWEEN ? AND ? ORDER BY id", chunk_ids(key)
        ):
            chunks[node_key].append(self._decompressor.plain(data))
        return [b"".join(chunks[part.node_key]) for part in parts]

    def chunk(self, trace: TraceId, part: SliceRow, offset: int) -> bytes | None:
        """The bytes of a slice from an offset on, at most CHUNK_BYTES_MAX.

        ``offset`` is 0, or where the last ones ended. None: the slice is not stored
        any more, or is another one.
        """
        row = self.connection.execute(
            "SELECT data FROM traces JOIN slices ON trace = traces.key JOIN chunks USING (node)"
            " WHERE traces.id = ? AND slices.node = ? AND epoch = ?"
            " AND chunks.id BETWEEN first_chunk AND last_chunk AND offset = ?",
            (trace, part.node_key, part.epoch, offset),
        ).fetchone()
        return None if row is None else self._decompressor.plain(row[0])
