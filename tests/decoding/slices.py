# SPDX-License-Identifier: Apache-2.0
"""The reader of slices in Python, as it was before there was one in C: what that is compared with.

It is slow, and as plain as can be. Programs use ``formats.slices``.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from dataclasses import dataclass, field

from formats.records import (
    PAYLOAD_BYTES_MAX,
    Body,
    Breadcrumb,
    Data,
    HopIn,
    HopOut,
    RecordType,
    ResourceRecord,
    ScopeRecord,
    SpanDetail,
    SpanEnd,
    SpanStart,
    Unanswered,
    text,
)
from formats.slices import PieceKind, Process, Record, RunFlags
from protocol.kernel_events import EVENT_BYTES, KernelEvent
from protocol.messages import NODE_NAME_BYTES_MAX, NodeId

SEGMENT_BYTES = 65536

ALIGN_BYTES = 4

_RECORD_FORMAT = 0
"""What stands in the piece of a process whose records are as ABI 2 has them."""

_RECORD_TRUNCATED = 1
_RECORD_FLAGS_KNOWN = _RECORD_TRUNCATED
_TIME_MAX_NS = (1 << 63) - 1


# Plain integers for the inner loop, where the arithmetic of enums is what costs.
_RUN, _CLOCK_PIECE, _PROCESS_PIECE, _LOSS = (
    kind.value for kind in (PieceKind.RUN, PieceKind.CLOCK, PieceKind.PROCESS, PieceKind.LOSS)
)
_FIRST, _LAST, _LOSSY = (flag.value for flag in (RunFlags.FIRST, RunFlags.LAST, RunFlags.LOSSY))
_RUN_FLAGS_KNOWN = sum(RunFlags)

_START, _END, _OUT, _IN, _CRUMB, _RESOURCE, _SCOPE, _DETAIL, _KERNEL, _UNANSWERED = (
    record.value
    for record in (
        RecordType.SPAN_START,
        RecordType.SPAN_END,
        RecordType.HOP_OUT,
        RecordType.HOP_IN,
        RecordType.BREADCRUMB,
        RecordType.RESOURCE,
        RecordType.SCOPE,
        RecordType.SPAN_DETAIL,
        RecordType.KERNEL,
        RecordType.UNANSWERED,
    )
)


_PIECE = struct.Struct("<IHHIIII")
_RECORD = struct.Struct("<HBBQ")
_CLOCK = struct.Struct("<QQQ")
_PROCESS = struct.Struct("<II64s")
_SPAN_START = struct.Struct("<QQQBB6x")
_SPAN_END = struct.Struct("<QQHHI")
_HOP = struct.Struct("<QQII")
_BREADCRUMB = struct.Struct("<Q")
_SCOPE_HEADER = struct.Struct("<I")
_DETAIL_HEADER = struct.Struct("<QIHH")
_UNANSWERED_HEADER = struct.Struct("<QII")

_REACH_NONE = 1
"""Of a call that nobody answered: no connection came about. Anything else says nothing."""

_CONTENT_BYTES = {
    PieceKind.CLOCK: _CLOCK.size,
    PieceKind.PROCESS: _PROCESS.size,
    PieceKind.LOSS: 0,
    PieceKind.EXIT: 0,
}


class ClockPairs:
    """What a slice says of how the ticks of its records relate to Unix time.

    The node names a pair for each run; the pair nearest to a record may be one of
    another run, before it in the slice or behind. Nearest, and not in proportion
    to those on both sides: between them somebody may have set the clock.
    """

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[int, int]] = {}
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def add(self, ticks: int, realtime_ns: int, ticks_per_s: int) -> None:
        """At ``ticks`` it was ``realtime_ns``; of two that contradict each other the later holds."""
        self._pairs[ticks] = (realtime_ns, ticks_per_s)

    def time_ns(self, ticks: int) -> int | None:
        """Unix time by the node's clock; None for 0, without a pair, or where no clock has it."""
        if not ticks or not self._pairs:
            return None
        if len(self._sorted) != len(self._pairs):
            self._sorted = sorted(self._pairs)
        after = bisect_left(self._sorted, ticks)
        around = self._sorted[max(0, after - 1) : after + 1]
        nearest = min(around, key=lambda pair: abs(pair - ticks))
        realtime_ns, ticks_per_s = self._pairs[nearest]
        time_ns = realtime_ns + (ticks - nearest) * 1_000_000_000 // ticks_per_s
        return time_ns if 0 <= time_ns <= _TIME_MAX_NS else None


@dataclass(slots=True)
class Handle:
    """What was delivered of one handle: its runs, each up to some byte."""

    run_bytes: dict[int, int] = field(default_factory=dict)
    first: bool = False
    last_seq: int | None = None
    lossy: bool = False
    holes: int = 0

    def problem(self) -> str | None:
        """Why the handle's runs are not whole, from FIRST to LAST; None if they are."""
        if not self.first:
            return "its first run is missing"
        if self.holes:
            return "bytes inside a run are missing"
        if self.last_seq is None:
            return "it was never closed"
        if max(self.run_bytes) > self.last_seq:
            return f"run {max(self.run_bytes)} comes after the last, {self.last_seq}"
        if len(self.run_bytes) != self.last_seq + 1:
            return f"{len(self.run_bytes)} of {self.last_seq + 1} runs are there"
        return None

    def add(self, seq: int, flags: int, start: int, size: int) -> None:
        """Take note of one whole piece of a run."""
        end = self.run_bytes.get(seq, 0)
        if start > end:
            self.holes += 1
        self.run_bytes[seq] = max(end, start + size)
        if flags & _FIRST and seq == 0:
            self.first = True
        if flags & _LAST:
            self.last_seq = seq
        if flags & _LOSSY:
            self.lossy = True


# ------------------------------------------------------------------ decoder


class PythonDecoder:
    """Reads a slice in order, in chunks of any size.

    ``feed`` returns the records that became whole. What concerns the slice as
    a whole accumulates in the attributes, which the caller only reads.

    handles    (client, handle) -> its runs
    clock      what the ticks of records mean
    processes  client -> who it is
    exited     clients that are gone: what they had open stays open
    lossy      clients that lost records of this trace
    malformed  how often something made no sense
    broken     the sizes themselves make no sense: nothing more is read
    """

    def __init__(self) -> None:
        self.handles: dict[tuple[int, int], Handle] = {}
        self.clock = ClockPairs()
        self.processes: dict[int, Process] = {}
        self.exited: set[int] = set()
        self.lossy: set[int] = set()
        self._runs = 0
        self.malformed = 0
        self.broken = False
        self._foreign: set[int] = set()  # clients whose records are in another format

        self._pending = bytearray()
        self._needed = _PIECE.size  # bytes from where it is worth looking again
        # The run piece being read: its header, and how much of it is left.
        self._run: tuple[int, int, int, int, int, int] | None = None
        self._left = 0
        self._skip = 0  # of that, content to pass over without a look

    @property
    def whole(self) -> bool:
        """The bytes so far end where a piece ends."""
        return not self.broken and self._run is None and not self._skip and not self._pending

    @property
    def items(self) -> int:
        """What it remembers, in pieces of some 150 bytes: runs, clients, clock pairs, loose ends."""
        clients = len(self.processes) + len(self.exited) + len(self.lossy) + len(self._foreign)
        return self._runs + clients + len(self.clock) + len(self._pending) // 150

    @property
    def least_bytes(self) -> int:
        """How long a slice of all this is at least: each run in one piece, what is repeated once."""
        runs = sum(sum(handle.run_bytes.values()) for handle in self.handles.values())
        runs += _PIECE.size * sum(len(handle.run_bytes) for handle in self.handles.values())
        processes = (_PIECE.size + _PROCESS.size) * len(self.processes)
        clocks = (_PIECE.size + _CLOCK.size) * bool(len(self.clock))
        return runs + processes + clocks + _PIECE.size * len(self.exited)

    def feed(self, data: bytes) -> list[Record]:
        """Take the next bytes; return the records that became whole."""
        records: list[Record] = []
        if self.broken:
            return records
        if self._pending or len(data) < self._needed:
            self._pending += data
            if len(self._pending) < self._needed:
                return records
            data = bytes(self._pending)
            self._pending.clear()
        position = self._read(data, records)
        if not self.broken:
            self._pending += data[position:]
        return records

    def _read(self, data: bytes, records: list[Record]) -> int:
        """Read all that is whole; return where the rest begins."""
        position, size = 0, len(data)
        while not self.broken:
            if self._skip:
                step = min(self._skip, size - position)
                self._skip -= step
                self._left -= step
                position += step
                if self._skip:
                    self._needed = 1
                    return position
            if self._run is not None:
                if self._left:
                    step = self._read_record(data, position, self._run, records)
                    if not step:
                        return position
                    position += step
                    continue
                self._end_run(self._run)
                self._run = None
            step = self._read_piece(data, position)
            if not step:
                return position
            position += step
        return position

    def _read_piece(self, data: bytes, position: int) -> int:
        """Begin a piece, or read a small one; 0 if more bytes are needed."""
        self._needed = _PIECE.size
        if len(data) - position < _PIECE.size:
            return 0
        size, kind, flags, client, handle, seq, start = _PIECE.unpack_from(data, position)
        if size > SEGMENT_BYTES or size % ALIGN_BYTES:
            self.malformed += 1
            self.broken = True
            return _PIECE.size
        if kind == _RUN:
            self._count_unknown(flags, _RUN_FLAGS_KNOWN)
            self._run = (client, handle, seq, flags, start, size)
            self._left = size
            if client in self._foreign:
                self._skip = size
                return _PIECE.size
            known = self.handles.get((client, handle))
            if known is not None:
                # Copied twice, as by a node that was restarted in between.
                self._skip = max(0, min(size, known.run_bytes.get(seq, 0) - start))
            return _PIECE.size
        if _CONTENT_BYTES.get(kind) != size:
            self.malformed += 1
            self._left = self._skip = size
            return _PIECE.size
        self._needed = _PIECE.size + size
        if len(data) - position < self._needed:
            return 0
        content = position + _PIECE.size
        self._count_unknown(flags, _RUN_FLAGS_KNOWN)
        if kind == _CLOCK_PIECE:
            ticks, realtime_ns, ticks_per_s = _CLOCK.unpack_from(data, content)
            if ticks_per_s:
                self.clock.add(ticks, realtime_ns, ticks_per_s)
            else:
                self.malformed += 1
        elif kind == _PROCESS_PIECE:
            pid, record_format, service = _PROCESS.unpack_from(data, content)
            if record_format != _RECORD_FORMAT:
                self.malformed += 1
                self._foreign.add(client)
            self.processes[client] = Process(pid, text(service.split(b"\0", 1)[0]))
        elif kind == _LOSS:
            self.lossy.add(client)
        else:
            self.exited.add(client)
        return self._needed

    def _count_unknown(self, flags: int, known: int) -> None:
        """A flag of a newer writer may say what a reader must know."""
        self.malformed += bool(flags & ~known)

    def _end_run(self, run: tuple[int, int, int, int, int, int]) -> None:
        client, handle, seq, flags, start, size = run
        known = self.handles.get((client, handle))
        if known is None:
            known = self.handles[client, handle] = Handle()
        self._runs += seq not in known.run_bytes
        known.add(seq, flags, start, size)

    def _read_record(
        self,
        data: bytes,
        position: int,
        run: tuple[int, int, int, int, int, int],
        records: list[Record],
    ) -> int:
        """Read one record of the run; 0 if more bytes are needed."""
        self._needed = _RECORD.size
        if self._left < _RECORD.size:
            self.malformed += 1
            self._skip = self._left
            return self._skip_within(len(data) - position)
        if len(data) - position < _RECORD.size:
            return 0
        payload_bytes, kind, flags, ticks = _RECORD.unpack_from(data, position)
        size: int = _RECORD.size + payload_bytes + -payload_bytes % ALIGN_BYTES
        if payload_bytes > PAYLOAD_BYTES_MAX or size > self._left:
            self.malformed += 1
            self._skip = self._left
            return self._skip_within(len(data) - position)
        if len(data) - position < size:
            self._needed = size
            return 0
        self._left -= size
        begin = position + _RECORD.size
        body = decode_body(kind, data, begin, payload_bytes)
        if body is None:
            self.malformed += 1
        else:
            self._count_unknown(flags, _RECORD_FLAGS_KNOWN)
            truncated = bool(flags & _RECORD_TRUNCATED)
            records.append(Record(run[0], run[1], ticks, truncated, body))
        return size

    def _skip_within(self, available: int) -> int:
        """Pass over what is there of the content to skip; 0 if more bytes are needed."""
        step: int = min(self._skip, available)
        self._skip -= step
        self._left -= step
        if not step:
            self._needed = 1
        return step


def decode_body(kind: int, data: bytes, begin: int, size: int) -> Body | None:
    """The payload of a record; None if it is too short for its type."""
    end = begin + size
    if kind == _START:
        if size < _SPAN_START.size:
            return None
        span_id, parent_id, start_ns, span_kind, name_bytes = _SPAN_START.unpack_from(data, begin)
        begin += _SPAN_START.size
        if begin + name_bytes > end:
            return None
        return SpanStart(
            span_id, parent_id, start_ns, span_kind, text(data[begin : begin + name_bytes])
        )
    if kind == _END:
        if size < _SPAN_END.size:
            return None
        span_id, end_ns, name_bytes, status, attributes_bytes = _SPAN_END.unpack_from(data, begin)
        begin += _SPAN_END.size
        middle = begin + name_bytes
        if middle + attributes_bytes > end:
            return None
        return SpanEnd(
            span_id,
            end_ns,
            status,
            text(data[begin:middle]),
            data[middle : middle + attributes_bytes],
        )
    if kind in (_OUT, _IN):
        if size < _HOP.size:
            return None
        node, span_id, hop, handle = _HOP.unpack_from(data, begin)
        hop_type = HopOut if kind == _OUT else HopIn
        return hop_type(NodeId(node), span_id, hop, handle)
    if kind == _CRUMB:
        if not _BREADCRUMB.size <= size <= _BREADCRUMB.size + NODE_NAME_BYTES_MAX:
            return None
        (node,) = _BREADCRUMB.unpack_from(data, begin)
        return Breadcrumb(NodeId(node), text(data[begin + _BREADCRUMB.size : end]))
    if kind == _DETAIL:
        if size < _DETAIL_HEADER.size:
            return None
        span_id, scope, part, parts = _DETAIL_HEADER.unpack_from(data, begin)
        if part >= parts:
            return None
        return SpanDetail(span_id, scope, part, parts, data[begin + _DETAIL_HEADER.size : end])
    if kind == _RESOURCE:
        return ResourceRecord(data[begin:end])
    if kind == _SCOPE:
        if size < _SCOPE_HEADER.size:
            return None
        (number,) = _SCOPE_HEADER.unpack_from(data, begin)
        return ScopeRecord(number, data[begin + _SCOPE_HEADER.size : end])
    if kind == _KERNEL:
        return KernelEvent.parse(data[begin:end]) if size >= EVENT_BYTES else None
    if kind == _UNANSWERED:
        if size < _UNANSWERED_HEADER.size:
            return None
        span_id, address_bytes, reach = _UNANSWERED_HEADER.unpack_from(data, begin)
        begin += _UNANSWERED_HEADER.size
        if address_bytes > end - begin:
            return None
        middle = begin + address_bytes
        address, error = text(data[begin:middle]), text(data[middle:end])
        return Unanswered(span_id, address, error, reach == _REACH_NONE)
    return Data(kind, data[begin:end])
