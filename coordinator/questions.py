# SPDX-License-Identifier: Apache-2.0
"""What backsightctl asks of a coordinator over gRPC, and the answers.

Listings may take long, so they have threads and readers of their own. All else is read
through one reader, by one question at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import backsight_pb2 as pb
import grpc
from google.protobuf.message import Message

from coordinator.answers import slice_of, summary_of
from coordinator.core.coordinator import CoordinatorCore
from coordinator.core.records import PutVerdict, Write
from coordinator.counters import ServerCounters
from coordinator.index.file import index_path
from coordinator.store.reader import ReadTooLong, StoreReader, TraceRow, Wanted
from coordinator.store.rows import SliceRow
from protocol import wire
from protocol.messages import SNAPSHOT_TRIGGER, Snapshot, TraceId

_Request = TypeVar("_Request", bound=Message)
_Row = TypeVar("_Row")
_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")

# Of a listing, between which others have their turn.
_ROWS_AT_ONCE = 256

# Others wait for one of them.
_LISTINGS_AT_ONCE = 2

# Judged and not yet told to who follows; a page of them is more than anybody reads.
_TAIL_TRACES_MAX = 1024

# For people, who see no faster changes.
_PROGRESS_INTERVAL_S = 0.2

# Of what a question may ask for: what SQLite's integers hold.
_TIME_MAX_NS = (1 << 63) - 1


class Questions:
    """Answers from the store and the core, and orders snapshots.

    ``changed`` is called when the core was told something, ``last_written`` has all that it has to
    say until now written and tells the last token of it, ``counted`` all that was counted.
    """

    def __init__(
        self,
        store_path: Path,
        core: CoordinatorCore,
        counters: ServerCounters,
        changed: Callable[[], None],
        last_written: Callable[[], int],
        counted: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._store_path = store_path
        self._core = core
        self._counters = counters
        self._changed = changed
        self._last_written = last_written
        self._counted = counted
        self._reader = StoreReader(store_path)
        # Whose call was ended leaves its thread in the middle of the reader: the next one, and who
        # closes it, must come after that.
        self._readers = ThreadPoolExecutor(1, "read")
        self._listers = ThreadPoolExecutor(_LISTINGS_AT_ONCE, "list")
        self._durable = 0  # the last token
        self._ending = threading.Event()
        self._snapshot_numbers: deque[int] = deque(maxlen=64)
        self._tails: set[asyncio.Queue[TraceId]] = set()
        self._judged: deque[tuple[int, TraceId]] = deque()  # not durable yet

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By the names of the calls."""
        return {
            "ListTraces": grpc.unary_stream_rpc_method_handler(
                self._list_traces,
                None,
                pb.TraceSummary.SerializeToString,
            ),
            "TailTraces": grpc.unary_stream_rpc_method_handler(
                self._tail_traces,
                None,
                pb.TraceSummary.SerializeToString,
            ),
            "TakeSnapshot": grpc.unary_stream_rpc_method_handler(
                self._take_snapshot,
                None,
                pb.SnapshotProgress.SerializeToString,
            ),
            "GetTrace": grpc.unary_stream_rpc_method_handler(
                self._get_trace,
                None,
                pb.TraceDetail.SerializeToString,
            ),
            "ListNodes": grpc.unary_stream_rpc_method_handler(
                self._list_nodes,
                None,
                pb.NodeStatus.SerializeToString,
            ),
            "GetCounters": grpc.unary_unary_rpc_method_handler(
                self._get_counters,
                None,
                pb.GetCountersReply.SerializeToString,
            ),
        }

    async def close(self) -> None:
        """Stop what is being listed, and let go of the store. No question comes any more."""
        self._ending.set()
        await asyncio.to_thread(self._listers.shutdown)
        await asyncio.to_thread(self._readers.shutdown)
        self._reader.__exit__(None, None, None)

    # ------------------------------------------------------------- facts

    def on_written(self, writes: Iterable[Write]) -> None:
        """These are on their way into the store."""
        if self._tails:
            self._judged += [
                (write.token, write.record.trace)
                for write in writes
                if isinstance(write.record, PutVerdict)
            ]

    def on_durable(self, token: int) -> None:
        """All writes up to this one are in the store."""
        self._durable = token
        while self._judged and self._judged[0][0] <= token:
            _, trace = self._judged.popleft()
            for tail in self._tails:
                try:
                    tail.put_nowait(trace)
                except asyncio.QueueFull:
                    self._counters.tail_overflowed += 1

    # ----------------------------------------------------------- answers

    async def _question(
        self, request: _Request, data: bytes, context: grpc.aio.ServicerContext[bytes, Any]
    ) -> _Request:
        try:
            wire.parse(request, "request", data)
        except wire.WireError as error:
            self._counters.malformed += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return request

    async def _read(
        self, read: Callable[_Asked, _Answer], *args: _Asked.args, **kwargs: _Asked.kwargs
    ) -> _Answer:
        """What takes milliseconds, from the one reader: one after the other."""
        call = partial(read, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._readers, call)

    async def _list_traces(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.TraceSummary],
    ) -> AsyncIterator[pb.TraceSummary]:
        request = await self._question(pb.ListTracesRequest(), data, context)
        wanted = await _wanted(request, context)
        ids = await self._list(
            context,
            lambda reader: reader.list_traces(wanted, request.limit),
            index=index_path(self._store_path) if wanted.service else None,
        )
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            some = ids[start : start + _ROWS_AT_ONCE]
            for row in await self._list(context, partial(_rows_of, some)):
                # None: deleted since the listing began.
                if row is not None:
                    yield summary_of(row)

    async def _list(
        self,
        context: grpc.aio.ServicerContext[bytes, Any],
        read: Callable[[StoreReader], Iterable[_Row]],
        index: Path | None = None,
    ) -> Sequence[_Row]:
        """Read what may take long, where nothing else waits for it; ends the call if it is too long."""

        def listed() -> Sequence[_Row]:
            with (
                StoreReader(self._store_path, index) as reader,
                reader.time_limit(self._ending.is_set),
            ):
                return list(read(reader))

        try:
            return await asyncio.get_running_loop().run_in_executor(self._listers, listed)
        except ReadTooLong as too_long:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(too_long))

    async def _tail_traces(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.TraceSummary],
    ) -> AsyncIterator[pb.TraceSummary]:
        request = await self._question(pb.ListTracesRequest(), data, context)
        wanted = await _wanted(request, context)
        if wanted.service:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "which services a trace has is known only some time after its verdict",
            )
        judged: asyncio.Queue[TraceId] = asyncio.Queue(_TAIL_TRACES_MAX)
        self._tails.add(judged)
        try:
            # At once, so that the caller knows that nothing is missed from here on.
            await context.send_initial_metadata(())
            while True:
                trace = await judged.get()
                row = await self._read(self._read_wanted, trace, wanted)
                if row is not None:
                    yield summary_of(row)
        finally:
            self._tails.discard(judged)

    async def _take_snapshot(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.SnapshotProgress],
    ) -> AsyncIterator[pb.SnapshotProgress]:
        request = await self._question(pb.SnapshotRequest(), data, context)
        # By its time: unlike those before a restart, whose traces are in the store.
        number = int(time.time()) & 0xFFFFFFFF
        while number in self._snapshot_numbers:
            number = (number + 1) & 0xFFFFFFFF
        self._snapshot_numbers.append(number)
        order = Snapshot(number, SNAPSHOT_TRIGGER, request.age_ns, request.service)
        try:
            wire.encode_coordinator_batch([order])
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        state = self._core.snapshots.start(order, request.bytes_max)
        self._changed()
        end: int | None = None
        while True:
            # All that nodes said of it must be in the store. What comes later is of other traces,
            # and where there are many, something is always on its way.
            if not state.ended:
                end = None  # a node is back
            elif end is None:
                end = self._last_written()
            is_stored = end is not None and self._durable >= end
            traces, judged = await self._read(self._reader.judged, state.trigger)
            yield pb.SnapshotProgress(
                trigger=state.trigger,
                nodes=len(state.nodes),
                nodes_done=state.done,
                nodes_lost=sorted(state.lost.values()),
                found=state.total("found"),
                fired=state.total("fired"),
                bytes=state.bytes,
                traces=traces,
                judged=judged,
            )
            if is_stored and judged == traces:
                return
            await asyncio.sleep(_PROGRESS_INTERVAL_S)

    def _read_wanted(self, trace: TraceId, wanted: Wanted) -> TraceRow | None:
        return self._reader.trace(trace) if self._reader.is_wanted(trace, wanted) else None

    async def _get_trace(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.TraceDetail],
    ) -> AsyncIterator[pb.TraceDetail]:
        request = await self._question(pb.GetTraceRequest(), data, context)
        try:
            trace = wire.parse_trace_id(request.trace.hex())
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        found = await self._read(self._read_trace, trace)
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no trace {trace.hex()} is stored")
        row, slices = found
        yield pb.TraceDetail(summary=summary_of(row), slices=map(slice_of, slices))
        for part in slices:
            offset = 0
            while offset < part.bytes:
                chunk = await self._read(self._reader.chunk, trace, part, offset)
                if chunk is None:
                    await context.abort(
                        grpc.StatusCode.ABORTED,
                        f"trace {trace.hex()} was deleted, or begun anew, while it was read: ask again",
                    )
                offset += len(chunk)
                yield pb.TraceDetail(slices=[pb.NodeSlice(node=part.node, data=chunk)])

    def _read_trace(self, trace: TraceId) -> tuple[TraceRow, list[SliceRow]] | None:
        row = self._reader.trace(trace)
        return None if row is None else (row, self._reader.slices(trace))

    async def _list_nodes(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.NodeStatus],
    ) -> AsyncIterator[pb.NodeStatus]:
        await self._question(pb.ListNodesRequest(), data, context)
        for view in self._core.nodes(time.monotonic_ns()):
            yield pb.NodeStatus(
                node=view.node,
                node_id=view.id,
                connected=view.connected,
                addresses=view.addresses,
                clock_offset_ns=view.clock.offset_ns if view.clock else 0,
                clock_error_ns=view.clock.error_ns if view.clock else 0,
                protocol=view.agreed.protocol if view.agreed else 0,
                features=int(view.agreed.features) if view.agreed else 0,
            )

    async def _get_counters(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.GetCountersReply],
    ) -> pb.GetCountersReply:
        await self._question(pb.GetCountersRequest(), data, context)
        return pb.GetCountersReply(counters=dict(_flat("", self._counted())))


def _flat(prefix: str, counted: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The figures of a tree, under their paths with dots."""
    for name, value in counted.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _rows_of(traces: Iterable[TraceId], reader: StoreReader) -> Iterable[TraceRow | None]:
    return map(reader.trace, traces)


async def _wanted(
    request: pb.ListTracesRequest, context: grpc.aio.ServicerContext[bytes, Any]
) -> Wanted:
    for name, time_ns in ("since_ns", request.since_ns), ("until_ns", request.until_ns):
        if time_ns > _TIME_MAX_NS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{name} is {time_ns}; allowed: Unix nanoseconds up to {_TIME_MAX_NS}, 0 for any time",
            )
    return Wanted(
        request.trigger, request.verdict, request.service, request.since_ns, request.until_ns
    )
