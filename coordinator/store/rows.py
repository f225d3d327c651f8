# SPDX-License-Identifier: Apache-2.0
"""What was written to the store, from its rows (coordinator.store.schema).

The writing side takes up by it what was stored before; the reading side answers by it.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import field

import zstandard

from coordinator.core.clock import ClockOffset
from coordinator.core.records import (
    PutAbandoned,
    PutNode,
    PutTrigger,
    StoredSlice,
    StoredTrace,
)
from coordinator.core.verdict import Reason, ReasonKind, Verdict
from coordinator.store.schema import CHUNK_NUMBER_BITS
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
from protocol.values import dataclass
from protocol.verdicts import VerdictKind

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
"""RFC 8878, 3.1.1: how a frame begins. Older versions wrote zlib's, which begin with 0x78."""


# That are looked at in one query, some milliseconds: who recovers has other things to do, too.
_KEYS_AT_ONCE = 4096


CHUNKS_MAX = (1 << CHUNK_NUMBER_BITS) - 1
"""Of a trace."""


def chunk_ids(key: int) -> tuple[int, int]:
    """The least and the greatest that a chunk of that trace may have."""
    return key << CHUNK_NUMBER_BITS, key << CHUNK_NUMBER_BITS | CHUNKS_MAX


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
    node_key: int = field(default=0, compare=False)
    first_chunk: int = field(default=0, compare=False)
    last_chunk: int = field(default=0, compare=False)
    """Where its bytes are."""


class Decompressor:
    """Of chunks, for one thread. To make one costs more than to decompress a chunk."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def plain(self, data: bytes) -> bytes:
        """A chunk, as it was appended."""
        if data[:4] == _ZSTD_MAGIC:
            return self._zstd.decompress(data, CHUNK_BYTES_MAX)
        return zlib.decompress(data, bufsize=CHUNK_BYTES_MAX)


class Chunks(Iterable[bytes]):
    """A slice's bytes, one stored chunk after the other."""

    def __init__(
        self, connection: sqlite3.Connection, row: SliceRow, decompressor: Decompressor
    ) -> None:
        self._connection = connection
        self._row = row
        self._decompressor = decompressor

    def __iter__(self) -> Iterator[bytes]:
        rows = self._connection.execute(
            "SELECT data FROM chunks WHERE id BETWEEN ? AND ? AND node = ? ORDER BY id",
            (self._row.first_chunk, self._row.last_chunk, self._row.node_key),
        )
        for (data,) in rows:
            yield self._decompressor.plain(data)


FIRED = (
    "trigger_names.name, coalesce(g.primary_id, t.id), nodes.name, laterals, why, source,"
    " fired_at_ns, suppressed"
)
_OF_GROUPS = (
    "JOIN firings ON group_key = g.key JOIN nodes ON nodes.key = node"
    " JOIN trigger_names ON trigger_names.key = g.trigger LEFT JOIN traces AS t ON t.key = g.primary_trace"
)
# By a list of keys, and not a table of them to join with: that takes twice as long.
FOR_A_MEMBER = (
    f"FROM groups AS g {_OF_GROUPS} WHERE g.key IN"
    " (SELECT key FROM groups WHERE primary_trace = :trace"
    " UNION ALL SELECT group_key FROM members WHERE trace = :trace)"
)
IN_ORDER = "ORDER BY fired_at_ns, nodes.name, trigger_names.name"


class Triggers(Iterable[PutTrigger]):
    """The firings of the groups whose primary a trace is, in the order in which they fired."""

    def __init__(self, connection: sqlite3.Connection, trace_key: int) -> None:
        self._connection = connection
        self._trace_key = trace_key

    def __iter__(self) -> Iterator[PutTrigger]:
        return map(
            put_trigger,
            self._connection.execute(
                f"SELECT {FIRED} FROM groups AS g {_OF_GROUPS} WHERE g.primary_trace = ? {IN_ORDER}",
                (self._trace_key,),
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


def stored_verdict(connection: sqlite3.Connection, trace_key: int) -> Verdict | None:
    """Return the verdict of a trace; None: there is none yet."""
    row = connection.execute(
        "SELECT verdict, verdict_version, verdict_rest FROM traces WHERE key = ?", (trace_key,)
    ).fetchone()
    return None if row is None else verdict_of(*row)


def verdict_of(kind: str | None, version: int, rest: str) -> Verdict | None:
    """A verdict, of its columns."""
    if kind is None:
        return None
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


def trace_key_of(connection: sqlite3.Connection, trace: bytes) -> int | None:
    """Under which key a trace is stored; None: it is not."""
    row = connection.execute("SELECT key FROM traces WHERE id = ?", (trace,)).fetchone()
    return None if row is None else int(row[0])


def stored_slices(
    connection: sqlite3.Connection, trace: TraceId, trace_key: int
) -> Iterator[SliceRow]:
    """Give out the slices of a trace, by node name."""
    rows = connection.execute(
        "SELECT name, node, epoch, bytes, first_chunk, last_chunk, restarted,"
        " clock_offset_ns, clock_error_ns,"
        " least, held, flags, status_bytes, open_handles, crumbs, status_epoch"
        " FROM slices JOIN nodes ON nodes.key = node WHERE trace = ? ORDER BY name",
        (trace_key,),
    ).fetchall()
    for (
        name,
        node,
        epoch,
        stored,
        first,
        last,
        restarted,
        offset,
        error,
        least,
        held,
        *said,
    ) in rows:
        status = None
        if held is not None:
            flags, status_bytes, open_handles, crumbs, status_epoch = said
            status = SliceStatus(
                trace,
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
        yield SliceRow(
            name, status, clock, epoch, stored, bool(restarted), least, node, first, last
        )


def stored_slice(row: SliceRow, chunks: Iterable[bytes] = ()) -> StoredSlice:
    """A slice in the core's terms."""
    return StoredSlice(row.node, row.status, row.epoch, row.bytes, row.restarted, chunks, row.least)


def stored_nodes(connection: sqlite3.Connection, now_ns: int) -> list[PutNode]:
    """All nodes that were ever connected and are not forgotten; those first that were put longest ago."""
    rows = connection.execute(
        "SELECT name, addresses, incarnation, put_ns FROM nodes WHERE addresses IS NOT NULL"
        " ORDER BY put_ns, name"
    )
    return [
        PutNode(
            node,
            tuple(json.loads(addresses)),
            None if incarnation is None else int(incarnation),
            0 if put_ns is None else max(0, now_ns - put_ns),
        )
        for node, addresses, incarnation, put_ns in rows
    ]


class StoredTraces:
    """All traces in assembly, and the last so many released ones, oldest first; to be read once.

    Triggers and chunks of a trace are read when they are asked for; of a released one no chunks.
    """

    def __init__(self, connection: sqlite3.Connection, released_max: int) -> None:
        self._connection = connection
        self._released_max = released_max
        self._decompressor = Decompressor()
        self.taken = 0
        self.share = 0.0
        """Of what is stored, that was looked at so far."""

    def __iter__(self) -> Iterator[StoredTrace]:
        (released_from,) = self._connection.execute(
            "SELECT coalesce(min(key), ~(1 << 63)) FROM"
            " (SELECT key FROM traces WHERE released = 1 ORDER BY key DESC LIMIT ?)",
            (self._released_max,),
        ).fetchone()
        first, last = self._connection.execute(
            "SELECT coalesce((SELECT min(key) FROM traces), 0), coalesce((SELECT max(key) FROM traces), -1)"
        ).fetchone()
        for start in range(first, last + 1, _KEYS_AT_ONCE):
            # By keys: how many of them are in assembly, nobody knows.
            rows = self._connection.execute(
                "SELECT key, id, released, verdict, verdict_version, verdict_rest FROM traces"
                " WHERE key BETWEEN ? AND ? AND (released = 0 OR key >= ?) ORDER BY key",
                (start, start + _KEYS_AT_ONCE - 1, released_from),
            ).fetchall()
            for key, trace, released, *verdict in rows:
                yield self._stored(key, TraceId(trace), verdict_of(*verdict), bool(released))
                self.taken += 1
            self.share = min(1.0, (start + _KEYS_AT_ONCE - first) / (last + 1 - first))

    def _stored(
        self, key: int, trace: TraceId, verdict: Verdict | None, released: bool
    ) -> StoredTrace:
        connection = self._connection
        abandoned = connection.execute(
            "SELECT trigger_names.name, nodes.name FROM groups"
            " JOIN trigger_names ON trigger_names.key = trigger JOIN nodes ON nodes.key = abandoned_by"
            " WHERE primary_trace = ? ORDER BY 1",
            (key,),
        )
        return StoredTrace(
            trace,
            Triggers(connection, key),
            tuple(PutAbandoned(Group(name, trace), node) for name, node in abandoned),
            tuple(
                stored_slice(row, () if released else Chunks(connection, row, self._decompressor))
                for row in stored_slices(connection, trace, key)
            ),
            verdict,
            released,
        )
