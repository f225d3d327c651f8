# SPDX-License-Identifier: Apache-2.0
"""What the bytes of a slice say.

A slice is what one node holds of one trace, in the format of
``native/src/abi/slice.h``; its records are ``formats.records``. It comes from machines that are
not trusted, and no input raises. The reader is in C (``native/src/decode.h`` has its promises);
``SliceDecoder`` is that, typed, and ``formats.spans`` joins what it gives into spans. Only the
data plane and the library write the format, and for tests and benchmarks ``testbed.encoding``.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backsight_decode_native import ffi, lib

from formats.records import Body, body_of, text

SEGMENT_BYTES = 65536
"""A run lies in one segment, so no piece is larger."""

ALIGN_BYTES = 4
"""Of records, and so of the contents of pieces."""


class PieceKind(enum.IntEnum):
    RUN = 1
    CLOCK = 2
    PROCESS = 3
    LOSS = 4
    EXIT = 5


class RunFlags(enum.IntFlag):
    NONE = 0
    FIRST = 0x0001
    LAST = 0x0002
    LOSSY = 0x0004
    CLOSED = 0x0008


@dataclass(frozen=True, slots=True)
class Record:
    """One record. ``ticks``: when it was written, see ClockPairs; 0: unknown."""

    client: int
    handle: int
    ticks: int
    truncated: bool
    body: Body


@dataclass(frozen=True, slots=True)
class Process:
    """Who a client is on its node."""

    pid: int
    service: str

    def __str__(self) -> str:
        return f"{self.service or 'process'}[{self.pid}]"


class HandleProblem(enum.IntEnum):
    """Why the runs of a handle are not whole, from FIRST to LAST."""

    NONE = 0
    NO_FIRST = 1
    HOLE = 2
    OPEN = 3
    BEYOND = 4
    MISSING = 5


@dataclass(frozen=True, slots=True)
class Handle:
    """What was delivered of one handle: so many runs, up to number ``seq_max``.

    ``last_seq`` is the number of the one at whose end it was closed, None if that is not here.
    """

    run_count: int
    seq_max: int
    last_seq: int | None
    lossy: bool
    kind: HandleProblem

    def problem(self) -> str | None:
        """Why the handle's runs are not whole, in words; None if they are."""
        match self.kind:
            case HandleProblem.NO_FIRST:
                return "its first run is missing"
            case HandleProblem.HOLE:
                return "bytes inside a run are missing"
            case HandleProblem.OPEN:
                return "it was never closed"
            case HandleProblem.BEYOND:
                return f"run {self.seq_max} comes after the last, {self.last_seq}"
            case HandleProblem.MISSING:
                return f"{self.run_count} of {(self.last_seq or 0) + 1} runs are there"
            case _:
                return None


def check(result: int) -> int:
    """What a function of the decoder returns; MemoryError, the one way in which it fails by itself."""
    if result == -errno.ENOMEM:
        raise MemoryError("the decoder of slices has no memory")
    if result < 0:
        raise ValueError(f"the decoder of slices was called wrongly: {os.strerror(-result)}")
    return result


class SliceInfo:
    """What a slice says as a whole, of a ``struct bsd_slice`` that somebody else owns.

    handles    (client, handle) -> its runs
    processes  client -> who it is
    exited     clients that are gone: what they had open stays open
    lossy      clients that lost records of this trace
    malformed  how often something made no sense
    broken     the sizes themselves make no sense: nothing more is read
    whole      the bytes so far end where a piece ends
    items      what it remembers, in pieces of some 150 bytes: runs, clients, clock pairs, loose ends
    least_bytes  how long a slice of all this is at least: each run in one piece, what is repeated once
    """

    __slots__ = ("_slice",)

    def __init__(self, native: Any) -> None:  # noqa: ANN401 - of cffi
        self._slice = native

    @property
    def _info(self) -> Any:  # noqa: ANN401 - of cffi
        return lib.bsd_slice_info(self._slice)

    @property
    def malformed(self) -> int:
        return int(self._info.malformed)

    @property
    def broken(self) -> bool:
        return bool(self._info.broken)

    @property
    def whole(self) -> bool:
        return bool(self._info.whole)

    @property
    def items(self) -> int:
        return int(self._info.items)

    @property
    def least_bytes(self) -> int:
        return int(self._info.least_bytes)

    @property
    def handles(self) -> dict[tuple[int, int], Handle]:
        first = lib.bsd_slice_handles(self._slice)
        raws = (first[i] for i in range(self._info.handles))
        return {(raw.client, raw.handle): _handle(raw) for raw in raws}

    def handle(self, number: int) -> Handle:
        """One of the handles, by its place among them."""
        return _handle(lib.bsd_slice_handles(self._slice)[number])

    @property
    def processes(self) -> dict[int, Process]:
        return {raw.client: _process(raw) for raw in self._clients() if raw.named}

    @property
    def exited(self) -> set[int]:
        return {raw.client for raw in self._clients() if raw.exited}

    @property
    def lossy(self) -> set[int]:
        return {raw.client for raw in self._clients() if raw.lossy}

    def words(self, client: int) -> str:
        """Who a client is, for a person."""
        raw = lib.bsd_slice_client(self._slice, client)
        process = _process(raw) if raw and raw.named else f"client {client}"
        gone = "; the process is gone" if raw and raw.exited else ""
        return f"{process}{gone}"

    def _clients(self) -> Iterator[Any]:
        first = lib.bsd_slice_clients(self._slice)
        return (first[i] for i in range(self._info.clients))


class ClockPairs:
    """What a slice says of how the ticks of its records relate to Unix time.

    The node names a pair for each run; the pair nearest to a record may be one of
    another run, before it in the slice or behind.
    """

    def __init__(self, native: Any) -> None:  # noqa: ANN401 - of cffi
        self._slice = native
        self._time_ns = ffi.new("uint64_t *")

    def __len__(self) -> int:
        return int(lib.bsd_slice_info(self._slice).clock_pairs)

    def time_ns(self, ticks: int) -> int | None:
        """Unix time by the node's clock; None for 0, without a pair, or where no clock has it."""
        result = lib.bsd_slice_time(self._slice, ticks, self._time_ns)
        if result == -errno.ENODATA:
            return None
        check(result)
        return int(self._time_ns[0])


class SliceDecoder(SliceInfo):
    """Reads a slice in order, in chunks of any size: ``feed`` returns the records that became whole.

    ``clock``: what the ticks of records mean.
    """

    __slots__ = ("_records", "clock")

    def __init__(self) -> None:
        slot = ffi.new("struct bsd_slice **")
        check(lib.bsd_slice_new(slot))
        super().__init__(ffi.gc(slot[0], lib.bsd_slice_free))
        kept = ffi.new("struct bsd_records **")
        check(lib.bsd_records_new(kept))
        self._records = ffi.gc(kept[0], lib.bsd_records_free)
        self.clock = ClockPairs(self._slice)

    def feed(self, data: bytes) -> list[Record]:
        """Take the next bytes; return the records that became whole."""
        check(lib.bsd_slice_feed(self._slice, data, len(data), self._records))
        first = lib.bsd_records_at(self._records)
        return [record_of(first[i]) for i in range(lib.bsd_records_count(self._records))]


def record_of(raw: Any) -> Record:  # noqa: ANN401 - of cffi
    """A ``struct bsd_record``."""
    return Record(raw.client, raw.handle, raw.ticks, bool(raw.truncated), body_of(raw))


def _handle(raw: Any) -> Handle:  # noqa: ANN401 - of cffi
    return Handle(
        raw.runs,
        raw.seq_max,
        raw.last_seq if raw.closed else None,
        bool(raw.lossy),
        HandleProblem(lib.bsd_handle_problem(ffi.addressof(raw))),
    )


def _process(raw: Any) -> Process:  # noqa: ANN401 - of cffi
    return Process(raw.pid, text(ffi.string(raw.service)))
