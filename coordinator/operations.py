# SPDX-License-Identifier: Apache-2.0
"""What operators change by backsightctl; each is logged with who did it, and answered when it is durable.

The log comes first: a caller may be gone, or be nobody any more, before what he ordered is durable.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import backsight_pb2 as pb
import grpc
from google.protobuf.message import Message

from coordinator.core.coordinator import CoordinatorCore
from coordinator.core.nodes import Forgotten
from coordinator.rpc.admission import Who, called_by
from coordinator.store.orders import NotStored, Refused
from coordinator.store.writer import Store
from protocol import wire
from protocol.messages import TraceId
from runtime.log import Log
from runtime.printable import printable

_Request = TypeVar("_Request", bound=Message)


class Operations:
    """``last_written`` has all that the core has to say until now written, and tells the last token of it."""

    def __init__(
        self, core: CoordinatorCore, store: Store, last_written: Callable[[], int], log: Log
    ) -> None:
        self._core = core
        self._store = store
        self._last_written = last_written
        self._log = log
        self._durable = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def handlers(self, who: Who) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By the names of the calls."""
        return {
            "ForgetNode": grpc.unary_unary_rpc_method_handler(
                partial(self._forget_node, who), None, pb.ForgetNodeReply.SerializeToString
            ),
            "PinTrace": grpc.unary_unary_rpc_method_handler(
                partial(self._pin_trace, who), None, pb.PinTraceReply.SerializeToString
            ),
            "DeleteTrace": grpc.unary_unary_rpc_method_handler(
                partial(self._delete_trace, who), None, pb.DeleteTraceReply.SerializeToString
            ),
        }

    def on_durable(self, token: int) -> None:
        """All writes up to this one are in the store."""
        self._durable = token
        while self._waiting and self._waiting[0][0] <= token:
            _, waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)

    async def _is_durable(self) -> None:
        token = self._last_written()
        if token > self._durable:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append((token, waiting))
            await waiting

    # --------------------------------------------------------------- answers

    async def _question(
        self, request: _Request, data: bytes, context: grpc.aio.ServicerContext[bytes, Any]
    ) -> _Request:
        try:
            wire.parse(request, "request", data)
        except wire.WireError as error:
            await _end(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if self._core.recovering:
            await _end(
                context,
                grpc.StatusCode.UNAVAILABLE,
                "the coordinator takes up what is stored: ask again when it has",
            )
        return request

    async def _forget_node(
        self,
        who: Who,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.ForgetNodeReply],
    ) -> pb.ForgetNodeReply:
        node = (await self._question(pb.ForgetNodeRequest(), data, context)).node
        by = called_by(who(context), context)
        match self._core.forget_node(node):
            case Forgotten.UNKNOWN:
                said = f"no node {printable(node)[:64]!r} is known"
                await _end(context, grpc.StatusCode.NOT_FOUND, said)
            case Forgotten.CONNECTED:
                said = f"node {node} is connected, and would be known again at once: stop it first"
                await _end(context, grpc.StatusCode.FAILED_PRECONDITION, said)
            case Forgotten.NEEDED:
                said = (
                    f"node {node} has a part in traces that are not closed; ask again after"
                    " `missing_linger_s`, when they are"
                )
                await _end(context, grpc.StatusCode.FAILED_PRECONDITION, said)
            case Forgotten.DONE:
                pass
        self._log.info(f"node {node} is forgotten by {by}", node=node)
        await self._is_durable()
        return pb.ForgetNodeReply()

    async def _pin_trace(
        self,
        who: Who,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.PinTraceReply],
    ) -> pb.PinTraceReply:
        request = await self._question(pb.PinTraceRequest(), data, context)
        orders = self._store.orders
        act, done = (orders.unpin, "unpinned") if request.unpin else (orders.pin, "pinned")
        await self._order(who, act, done, request.trace, context)
        return pb.PinTraceReply()

    async def _delete_trace(
        self,
        who: Who,
        data: bytes,
        context: grpc.aio.ServicerContext[bytes, pb.DeleteTraceReply],
    ) -> pb.DeleteTraceReply:
        request = await self._question(pb.DeleteTraceRequest(), data, context)
        await self._order(who, self._store.orders.delete, "deleted", request.trace, context)
        return pb.DeleteTraceReply()

    async def _order(
        self,
        who: Who,
        act: Callable[[TraceId], None],
        done: str,
        asked: bytes,
        context: grpc.aio.ServicerContext[bytes, Any],
    ) -> None:
        """Have the store do something with a trace, as it is after all that was said of it until now."""
        try:
            trace = wire.parse_trace_id(asked.hex())
        except wire.WireError as error:
            await _end(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        said = f"trace {trace.hex()} is {done} by {called_by(who(context), context)}"

        def act_and_say() -> None:
            act(trace)
            self._log.info(said, trace_id=trace.hex())

        await self._is_durable()
        try:
            await asyncio.wrap_future(self._store.order(act_and_say))
        except NotStored as error:
            await _end(context, grpc.StatusCode.NOT_FOUND, str(error))
        except Refused as error:
            await _end(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except sqlite3.Error as error:
            problem = f"the store cannot be written: {error}; nothing was done"
            self._log.warning(f"trace {trace.hex()} is not {done}: {problem}", trace_id=trace.hex())
            await _end(context, grpc.StatusCode.UNAVAILABLE, problem)


async def _end(
    context: grpc.aio.ServicerContext[bytes, Any], code: grpc.StatusCode, said: str
) -> NoReturn:
    await context.abort(code, said)
    raise AssertionError("an aborted call went on")
