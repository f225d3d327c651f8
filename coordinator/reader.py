# SPDX-License-Identifier: Apache-2.0
"""The reading side of the store, for queries and for what follows it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator import index
from coordinator.core.records import PutTrigger, StoredTrace
from coordinator.core.verdict import Verdict
from coordinator.rows import (
    FIRED,
    FOR_A_MEMBER,
    IN_ORDER,
    Chunks,
    SliceRow,
    decompressed,
    put_trigger,
    stored_slice,
    stored_slices,
    stored_verdict,
)
from coordinator.schema import connect
from protocol.messages import TraceId

# Of one trace, that a query shows. Any number may be stored: a faulty rule can
# fire for one trace without end, and a person reads the first.
_TRIGGERS_SHOWN_MAX = 256


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
        self._connection = connect(path, writable=False)

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
        """Traces that the index lacks, or has by an earlier verdict; what waits for longest first."""
        rows = self._connection.execute(
            "SELECT trace FROM to_index ORDER BY number LIMIT ?", (limit,)
        )
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
            f"SELECT {FIRED} {FOR_A_MEMBER} {IN_ORDER} LIMIT ?", (trace, _TRIGGERS_SHOWN_MAX)
        )
        triggers = tuple(map(put_trigger, fired))
        omitted = 0
        if len(triggers) == _TRIGGERS_SHOWN_MAX:
            (count,) = self._connection.execute(
                f"SELECT count(*) {FOR_A_MEMBER}", (trace,)
            ).fetchone()
            omitted = count - len(triggers)
        return TraceRow(trace, triggers, omitted, stored_verdict(self._connection, trace))

    def closed(self, trace: TraceId) -> StoredTrace | None:
        """A closed trace without its triggers and bytes; None if there is none."""
        with self.moment():
            found = self._connection.execute(
                "SELECT 1 FROM traces WHERE trace = ? AND released = 1", (trace,)
            )
            if found.fetchone() is None:
                return None
            slices = tuple(map(stored_slice, stored_slices(self._connection, trace)))
            verdict = stored_verdict(self._connection, trace)
            return StoredTrace(trace, slices=slices, verdict=verdict, released=True)

    def slices(self, trace: TraceId) -> list[SliceRow]:
        """The slices of a trace, by node name."""
        return list(stored_slices(self._connection, trace))

    def data(self, trace: TraceId, part: SliceRow, bytes_max: int) -> bytes:
        """The first bytes of a slice, within the moment() in which it was listed."""
        chunks = []
        for chunk in Chunks(self._connection, trace, part.node):
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
        return None if row is None else decompressed(row[0])
