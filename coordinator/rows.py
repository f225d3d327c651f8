# SPDX-License-Identifier: Apache-2.0
"""What was written to the store, from its rows (coordinator.schema).

The writing side takes up by it what was stored before; the reading side answers by it.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coordinator.core.clock import ClockOffset
from coordinator.core.records import (
    PutAbandoned,
    PutNode,
    PutTrigger,
    StoredSlice,
    StoredTrace,
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


@dataclass(frozen=True, slots=True)
class SliceRow:
    """What is stored of a slice, but for its ``bytes`` bytes, and how its node's clock stood.

    They are of ``epoch`` (0: none came yet), the status may be of a later one. ``least``: see
    PutReleased.
    """

    node: str
    status: SliceStatus | None
    clock: ClockOffset | None
    epoch: int
    bytes: int
    restarted: bool = False
    least: int | None = None


class Chunks(Iterable[bytes]):
    """A slice's bytes, one stored chunk after the other."""

    def __init__(self, connection: sqlite3.Connection, trace: bytes, node: str) -> None:
        self._connection = connection
        self._key = (trace, node)

    def __iter__(self) -> Iterator[bytes]:
        rows = self._connection.execute(
            "SELECT data FROM chunks WHERE trace = ? AND node = ? ORDER BY offset", self._key
        )
        for (data,) in rows:
            yield decompressed(data)


def decompressed(data: bytes) -> bytes:
    """A chunk, as it was appended."""
    return zlib.decompress(data, bufsize=CHUNK_BYTES_MAX)


FIRED = "t.name, t.primary_trace, t.node, laterals, why, source, fired_at_ns, suppressed"
FOR_A_MEMBER = (
    "FROM members AS m JOIN triggers AS t ON t.name = m.name"
    " AND t.primary_trace = m.primary_trace WHERE m.trace = ?"
)
IN_ORDER = "ORDER BY fired_at_ns, t.node, t.name"


class Triggers(Iterable[PutTrigger]):
    """The firings of the groups whose primary a trace is, in the order in which they fired."""

    def __init__(self, connection: sqlite3.Connection, trace: bytes) -> None:
        self._connection = connection
        self._trace = trace

    def __iter__(self) -> Iterator[PutTrigger]:
        return map(
            put_trigger,
            self._connection.execute(
                f"SELECT {FIRED} FROM triggers AS t WHERE t.primary_trace = ? {IN_ORDER}",
                (self._trace,),
            ),
        )


def put_trigger(row: tuple[str, bytes, str, bytes, str, int, int, int]) -> PutTrigger:
    """A firing, of a row of FIRED."""
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


def verdict_rest(verdict: Verdict) -> str:
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


def stored_verdict(connection: sqlite3.Connection, trace: bytes) -> Verdict | None:
    """Return the verdict of a trace; None: there is none yet."""
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


def stored_slices(connection: sqlite3.Connection, trace: bytes) -> Iterator[SliceRow]:
    """Give out the slices of a trace, by node name."""
    rows = connection.execute(
        "SELECT node, epoch, bytes, restarted, clock_offset_ns, clock_error_ns,"
        " least, held, flags, status_bytes, open_handles, crumbs, status_epoch"
        " FROM slices WHERE trace = ? ORDER BY node",
        (trace,),
    ).fetchall()
    for node, epoch, stored, restarted, offset, error, least, held, *said in rows:
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
        yield SliceRow(node, status, clock, epoch, stored, bool(restarted), least)


def stored_slice(row: SliceRow, chunks: Iterable[bytes] = ()) -> StoredSlice:
    """A slice in the core's terms."""
    return StoredSlice(row.node, row.status, row.epoch, row.bytes, row.restarted, chunks, row.least)


def stored_nodes(connection: sqlite3.Connection) -> list[PutNode]:
    """All nodes that were ever connected, by name."""
    rows = connection.execute("SELECT node, addresses, incarnation FROM nodes ORDER BY node")
    return [
        PutNode(
            node,
            tuple(json.loads(addresses)),
            None if incarnation is None else int(incarnation),
        )
        for node, addresses, incarnation in rows
    ]


def stored_traces(connection: sqlite3.Connection, released_max: int) -> Iterator[StoredTrace]:
    """Give out all traces in assembly, and the last so many released ones, oldest first.

    Triggers and chunks of a trace are read when they are asked for; of a released one no chunks.
    """
    rows = connection.execute(
        "SELECT trace, released FROM traces WHERE released = 0 OR trace IN"
        " (SELECT trace FROM traces WHERE released = 1 ORDER BY stored_ns DESC LIMIT ?)"
        " ORDER BY stored_ns, trace",
        (released_max,),
    ).fetchall()
    for trace, released in rows:
        abandoned = connection.execute(
            "SELECT name, node FROM abandoned WHERE primary_trace = ? ORDER BY name", (trace,)
        )
        yield StoredTrace(
            TraceId(trace),
            Triggers(connection, trace),
            tuple(PutAbandoned(Group(name, TraceId(trace)), node) for name, node in abandoned),
            tuple(
                stored_slice(row, () if released else Chunks(connection, trace, row.node))
                for row in stored_slices(connection, trace)
            ),
            stored_verdict(connection, trace),
            bool(released),
        )
