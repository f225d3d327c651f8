# SPDX-License-Identifier: Apache-2.0
"""What backsightctl asks about stored traces, answered from the store: in the reading process.

Listings may take long, so they have threads and readers of their own. All else is read
through one reader, by one question at a time.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import backsight_pb2 as pb
from google.protobuf.message import Message

from coordinator.answers import slice_of, summary_of
from coordinator.calls import Call, Feed, Refused
from coordinator.index.file import index_path
from coordinator.store.reader import ReadTooLong, StoreReader, TraceRow, Wanted
from coordinator.store.rows import SliceRow
from protocol import wire
from protocol.messages import TraceId

_Request = TypeVar("_Request", bound=Message)
_Row = TypeVar("_Row")
_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")

# Of a listing, between which others have their turn.
_ROWS_AT_ONCE = 256

# Others wait for one of them.
_LISTINGS_AT_ONCE = 2

# Of what a question may ask for: what SQLite's integers hold.
_TIME_MAX_NS = (1 << 63) - 1

JUDGED = "Judged"
"""The coordinator's own question: how many traces a trigger has, and how many of them are judged."""


class Queries:
    """Answers while it is entered; on one event loop."""

    def __init__(self, store_path: Path) -> None:
        self._store_path = store_path
        self._reader = StoreReader(store_path)
        # Whose call was ended leaves its thread in the middle of the reader: the next one, and who
        # closes it, must come after that.
        self._readers = ThreadPoolExecutor(1, "read")
        self._listers = ThreadPoolExecutor(_LISTINGS_AT_ONCE, "list")
        self._ending = threading.Event()
        self._answers: dict[str, Callable[[bytes, Feed], AsyncGenerator[bytes, None]]] = {
            "ListTraces": self._list_traces,
            "TailTraces": self._tail_traces,
            "GetTrace": self._get_trace,
            JUDGED: self._judged,
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop what is being listed, and let go of the store. No question comes any more."""
        self._ending.set()
        await asyncio.to_thread(self._listers.shutdown)
        await asyncio.to_thread(self._readers.shutdown)
        self._reader.__exit__(None, None, None)

    def answers(self, call: Call, feed: Feed) -> AsyncGenerator[bytes, None]:
        """To one call, as on the wire. A tail is fed with the traces on which there are verdicts."""
        return self._answers[call.method](call.question, feed)

    async def _read(
        self, read: Callable[_Asked, _Answer], *args: _Asked.args, **kwargs: _Asked.kwargs
    ) -> _Answer:
        """What takes milliseconds, from the one reader: one after the other."""
        call = partial(read, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._readers, call)

    async def _list(
        self, read: Callable[[StoreReader], Iterable[_Row]], index: Path | None = None
    ) -> Sequence[_Row]:
        """Read what may take long, where nothing else waits for it."""

        def listed() -> Sequence[_Row]:
            with (
                StoreReader(self._store_path, index) as reader,
                reader.time_limit(self._ending.is_set),
            ):
                return list(read(reader))

        try:
            return await asyncio.get_running_loop().run_in_executor(self._listers, listed)
        except ReadTooLong as too_long:
            raise Refused("DEADLINE_EXCEEDED", str(too_long)) from too_long

    async def _list_traces(self, question: bytes, _: Feed) -> AsyncGenerator[bytes, None]:
        request = _parsed(pb.ListTracesRequest(), question)
        wanted = _wanted(request)
        ids = await self._list(
            lambda reader: reader.list_traces(wanted, request.limit),
            index=index_path(self._store_path) if wanted.service else None,
        )
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            some = ids[start : start + _ROWS_AT_ONCE]
            for row in await self._list(partial(_rows_of, some)):
                # None: deleted since the listing began.
                if row is not None:
                    yield summary_of(row).SerializeToString()

    async def _tail_traces(self, question: bytes, feed: Feed) -> AsyncGenerator[bytes, None]:
        wanted = _wanted(_parsed(pb.ListTracesRequest(), question))
        if wanted.service:
            raise Refused(
                "INVALID_ARGUMENT",
                "which services a trace has is known only some time after its verdict",
            )
        while True:
            row = await self._read(self._read_wanted, await feed.get(), wanted)
            if row is not None:
                yield summary_of(row).SerializeToString()

    def _read_wanted(self, trace: TraceId, wanted: Wanted) -> TraceRow | None:
        return self._reader.trace(trace) if self._reader.is_wanted(trace, wanted) else None

    async def _get_trace(self, question: bytes, _: Feed) -> AsyncGenerator[bytes, None]:
        request = _parsed(pb.GetTraceRequest(), question)
        try:
            trace = wire.parse_trace_id(request.trace.hex())
        except wire.WireError as error:
            raise Refused("INVALID_ARGUMENT", str(error)) from error
        found = await self._read(self._read_trace, trace)
        if found is None:
            raise Refused("NOT_FOUND", f"no trace {trace.hex()} is stored")
        row, slices = found
        head = pb.TraceDetail(summary=summary_of(row), slices=map(slice_of, slices))
        yield head.SerializeToString()
        for part in slices:
            offset = 0
            while offset < part.bytes:
                chunk = await self._read(self._reader.chunk, trace, part, offset)
                if chunk is None:
                    raise Refused(
                        "ABORTED",
                        f"trace {trace.hex()} was deleted, or begun anew, while it was read: ask again",
                    )
                offset += len(chunk)
                piece = pb.TraceDetail(slices=[pb.NodeSlice(node=part.node, data=chunk)])
                yield piece.SerializeToString()

    def _read_trace(self, trace: TraceId) -> tuple[TraceRow, list[SliceRow]] | None:
        row = self._reader.trace(trace)
        return None if row is None else (row, self._reader.slices(trace))

    async def _judged(self, question: bytes, _: Feed) -> AsyncGenerator[bytes, None]:
        yield json.dumps(await self._read(self._reader.judged, question.decode())).encode()


def _rows_of(traces: Iterable[TraceId], reader: StoreReader) -> Iterable[TraceRow | None]:
    return map(reader.trace, traces)


def _parsed(request: _Request, question: bytes) -> _Request:
    try:
        wire.parse(request, "request", question)
    except wire.WireError as error:
        raise Refused("INVALID_ARGUMENT", str(error)) from error
    return request


def _wanted(request: pb.ListTracesRequest) -> Wanted:
    for name, time_ns in ("since_ns", request.since_ns), ("until_ns", request.until_ns):
        if time_ns > _TIME_MAX_NS:
            raise Refused(
                "INVALID_ARGUMENT",
                f"{name} is {time_ns}; allowed: Unix nanoseconds up to {_TIME_MAX_NS}, 0 for any time",
            )
    return Wanted(
        request.trigger,
        request.verdict,
        request.service,
        request.since_ns,
        request.until_ns,
        request.pinned,
    )
