# SPDX-License-Identifier: Apache-2.0
"""What backsightctl asks of a coordinator over gRPC.

About stored traces the reading process answers; about nodes, counters and snapshots the core.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from functools import partial
from typing import Any, Protocol, TypeVar

import backsight_pb2 as pb
import grpc
from google.protobuf.message import Message

from coordinator.calls import Call, Feed, Refused
from coordinator.core.coordinator import CoordinatorCore
from coordinator.core.nodes import Reach
from coordinator.core.records import PutVerdict, Write
from coordinator.counters import ServerCounters
from coordinator.queries import JUDGED
from coordinator.rpc.admission import Who, called_by
from protocol import wire
from protocol.messages import SNAPSHOT_TRIGGER, NodeReport, Snapshot, TraceId
from runtime.log import Log
from runtime.printable import printable

_Request = TypeVar("_Request", bound=Message)

# Judged and not yet told to who follows; a page of them is more than anybody reads.
_TAIL_TRACES_MAX = 1024

# It is some milliseconds; a node that is stopped never does.
_NODE_ANSWERS_S = 5.0

# For people, who see no faster changes.
_PROGRESS_INTERVAL_S = 0.2


class Asked(Protocol):
    """Who knows what is stored (coordinator.reading)."""

    def ask(self, call: Call, feed: Feed | None = None) -> AsyncGenerator[bytes, None]:
        """The answers to a call, as on the wire; Refused says why there are no more."""


class Questions:
    """Answers from the store and the core, and orders snapshots.

    ``changed`` is called when the core was told something, ``last_written`` has all that it has to
    say until now written and tells the last token of it, ``counted`` all that was counted, and
    ``described`` how the coordinator is, ready for JSON.
    """

    def __init__(
        self,
        reading: Asked | None,
        core: CoordinatorCore,
        counters: ServerCounters,
        changed: Callable[[], None],
        last_written: Callable[[], int],
        counted: Callable[[], Mapping[str, Any]],
        described: Callable[[], Awaitable[Mapping[str, Any]]],
        log: Log,
    ) -> None:
        """``reading`` None: only the core is asked."""
        self._reading = reading
        self._core = core
        self._counters = counters
        self._changed = changed
        self._last_written = last_written
        self._counted = counted
        self._described = described
        self._log = log
        self._durable = 0  # the last token
        self._snapshot_numbers: deque[int] = deque(maxlen=64)
        self._tails: set[Feed] = set()
        self._reports: dict[int, asyncio.Future[str]] = {}  # that are waited for, by question
        self._last_asked = 0
        self._judged: deque[tuple[int, TraceId]] = deque()  # not durable yet

    def handlers(self, who: Who) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By the names of the calls. ``who`` says who calls."""
        return {
            "ListTraces": self._passed_on("ListTraces"),
            "GetTrace": self._passed_on("GetTrace"),
            "TailTraces": grpc.unary_stream_rpc_method_handler(self._tail_traces),
            "TakeSnapshot": grpc.unary_stream_rpc_method_handler(
                partial(self._take_snapshot, who),
                None,
                pb.SnapshotProgress.SerializeToString,
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
            "GetStatus": grpc.unary_unary_rpc_method_handler(
                self._get_status,
                None,
                pb.GetStatusReply.SerializeToString,
            ),
        }

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

    # ----------------------------------------------------- of stored traces

    def _passed_on(self, method: str) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def passed_on(
            question: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            async with self._asked(Call(method, question), context) as answers:
                async for answer in answers:
                    yield answer

        return grpc.unary_stream_rpc_method_handler(passed_on)

    async def _tail_traces(
        self, question: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        feed = Feed(_TAIL_TRACES_MAX)
        self._tails.add(feed)
        try:
            # At once, so that the caller knows that nothing is missed from here on.
            await context.send_initial_metadata(())
            async with self._asked(Call("TailTraces", question), context, feed) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self._tails.discard(feed)

    @contextlib.asynccontextmanager
    async def _asked(
        self,
        call: Call,
        context: grpc.aio.ServicerContext[bytes, Any],
        feed: Feed | None = None,
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """The answers of the reading process; if there are no more, the caller's call ends as that says."""
        if self._reading is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "nobody reads the store here")
        try:
            async with contextlib.aclosing(self._reading.ask(call, feed)) as answers:
                yield answers
        except Refused as refused:
            code = grpc.StatusCode[refused.code]
            if code is grpc.StatusCode.INVALID_ARGUMENT:
                self._counters.malformed += 1
            await context.abort(code, str(refused))

    # ---------------------------------------------------------- of the core

    async def _question(
        self, request: _Request, data: bytes, context: grpc.aio.ServicerContext[bytes, Any]
    ) -> _Request:
        try:
            wire.parse(request, "request", data)
        except wire.WireError as error:
            self._counters.malformed += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return request

    async def _take_snapshot(
        self,
        who: Who,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.SnapshotProgress],
    ) -> AsyncIterator[pb.SnapshotProgress]:
        request = await self._question(pb.SnapshotRequest(), data, context)
        # By its time: unlike those before a restart, whose traces are in the store.
        number = int(time.time()) & 0xFFFFFFFF
        while number in self._snapshot_numbers:
            number = (number + 1) & 0xFFFFFFFF
        self._snapshot_numbers.append(number)
        by = called_by(who(context), context)
        order = Snapshot(number, SNAPSHOT_TRIGGER, request.age_ns, request.service, by=by)
        try:
            wire.encode_coordinator_batch([order])
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        state = self._core.snapshots.start(order, request.bytes_max, time.monotonic_ns())
        self._log.info(
            f"{state.trigger}: the last {order.age_ns / 1e9:g} s are collected, as ordered by {by}",
            trigger=state.trigger,
        )
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
            traces, judged = await self._judged_of(state.trigger, context)
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

    async def _judged_of(
        self, trigger: str, context: grpc.aio.ServicerContext[bytes, Any]
    ) -> tuple[int, int]:
        """How many stored traces a trigger has, and how many of them have a verdict."""
        async with self._asked(Call(JUDGED, trigger.encode()), context) as answers:
            traces, judged = json.loads(await anext(answers))
        return traces, judged

    async def _list_nodes(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.NodeStatus],
    ) -> AsyncIterator[pb.NodeStatus]:
        await self._question(pb.ListNodesRequest(), data, context)
        now_ns = time.time_ns()
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
                peer=view.peer,
                seen_ns=now_ns - view.gone_ns,
                software=view.software,
                identity=view.identity,
            )

    async def _get_counters(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.GetCountersReply],
    ) -> pb.GetCountersReply:
        await self._question(pb.GetCountersRequest(), data, context)
        return pb.GetCountersReply(counters=dict(_flat("", self._counted())))

    async def _get_status(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.GetStatusReply],
    ) -> pb.GetStatusReply:
        node = (await self._question(pb.GetStatusRequest(), data, context)).node
        if node:
            return pb.GetStatusReply(json=await self._status_of(node, context))
        return pb.GetStatusReply(json=json.dumps(await self._described()))

    async def _status_of(
        self, node: str, context: grpc.aio.ServicerContext[bytes, pb.GetStatusReply]
    ) -> str:
        """What a node says of itself; ends the call if it does not."""
        self._last_asked = number = (self._last_asked + 1) & 0xFFFFFFFF
        named = printable(node)[:64]
        match self._core.ask_status(node, number):
            case Reach.UNKNOWN:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"no node {named!r} is known")
            case Reach.AWAY:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION, f"node {named} is not connected"
                )
            case Reach.TOO_OLD:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"node {named} is of a version that cannot be asked from here; ask on its own machine",
                )
            case Reach.ASKED:
                pass
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reports[number] = answer
        self._changed()
        try:
            async with asyncio.timeout(_NODE_ANSWERS_S):
                return await answer
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"node {named} did not answer within {_NODE_ANSWERS_S:g} s",
            )
        finally:
            del self._reports[number]
            self._core.forget_question(number)

    def on_reports(self, reports: Iterable[NodeReport]) -> None:
        """Nodes say how they are."""
        for report in reports:
            answer = self._reports.get(report.number)
            if answer is not None and not answer.done():
                answer.set_result(report.json)


def _flat(prefix: str, counted: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The figures of a tree, under their paths with dots."""
    for name, value in counted.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
