# SPDX-License-Identifier: Apache-2.0
"""Stands before each call: who calls, whether it may, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc

from coordinator.counters import ServerCounters
from coordinator.rpc import streams
from coordinator.rpc.budget import Budget
from coordinator.rpc.identity import ANYBODY, Caller, Role, Unidentified, why_not
from coordinator.rpc.peers import address_of
from runtime.log import PeerLog

# In quotes: generic for mypy only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


Who: TypeAlias = "Callable[[Context], Caller | None]"
"""Who calls: None if nobody is asked; Unidentified if it is nobody to us."""


def called_by(caller: Caller | None, context: Context) -> str:
    """Who called, for a log."""
    return f"an unnamed caller at {context.peer()}" if caller is None else str(caller.identity)


class Admission:
    """Lets calls in, or ends them.

    ``anonymous`` says what callers are of whom nobody asks who they are.
    """

    def __init__(
        self,
        who: Who,
        anonymous: Callable[[], Role | None],
        budget: Budget,
        counters: ServerCounters,
        peer_log: PeerLog,
    ) -> None:
        self._who = who
        self._callers: dict[Context, Caller | None] = {}  # of the calls that were let in
        self._anonymous = anonymous
        self._budget = budget
        self._counters = counters
        self._peer_log = peer_log

    def caller(self, context: Context) -> Caller | None:
        """Who made a call that was let in; for its handler. He may be gone, and nobody knows him any more."""
        return self._callers[context]

    def handlers(self, handlers: Mapping[str, _Handler]) -> dict[str, _Handler]:
        """The same ones, for who may call them."""
        return {method: self._guarded(method, handler) for method, handler in handlers.items()}

    def _guarded(self, method: str, handler: _Handler) -> _Handler:
        # gRPC gathers a question before it calls us, if it knows that there is one. So it is told
        # of a stream, and who may not ask, or asks too much at once, is refused before.
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                self._single(method, handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._listing(method, handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        assert handler.stream_stream is not None
        return grpc.stream_stream_rpc_method_handler(
            self._conversation(method, handler.stream_stream),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _conversation(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def converse(requests: AsyncIterator[object], context: Context) -> None:
            async with self._admitted(method, context):
                await behaviour(requests, context)

        return converse

    def _single(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(requests: AsyncIterator[Any], context: Context) -> object:
            async with self._admitted(method, context):
                question = await self._question(requests, context)
                with self._budget.unread(context.peer()):
                    return await behaviour(question, context)

        return answer

    def _listing(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def answers(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[object]:
            async with self._admitted(method, context):
                question = await self._question(requests, context)
                with self._budget.unread(context.peer()):
                    async with contextlib.aclosing(behaviour(question, context)) as replies:
                        async for reply in replies:
                            yield reply

        return answers

    async def _question(self, requests: AsyncIterator[Any], context: Context) -> object:
        """What is asked, when it is there whole."""
        try:
            question = await streams.first(requests)
        except TimeoutError:
            self._counters.no_question += 1
            reason = f"no question came whole within {streams.GREETING_TIMEOUT_S:g} s"
            self._warn(context, f"{context.peer()}: refused: {reason}")
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
        if question is None:
            self._counters.no_question += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no question came")
        return question

    @contextlib.asynccontextmanager
    async def _admitted(self, method: str, context: Context) -> AsyncIterator[None]:
        """Let a call in, or end it; and end it when the certificate is over."""
        if context.peer() in self._budget.barred:
            # Nobody is there to be told anything, and others wait behind it.
            raise asyncio.CancelledError
        caller: Caller | None = None
        try:
            caller = self._who(context)
        except Unidentified as error:
            if method not in ANYBODY:
                await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
        if caller is not None and _is_over(caller):
            # Or all of the call ran that comes before its first wait.
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, _over(caller))
        identity = caller.identity if caller is not None else None
        reason = why_not(identity, method, self._anonymous())
        if reason is not None:
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, reason)
        reason = self._budget.why_not(identity)
        if reason is not None:
            self._counters.too_many_calls += 1
            self._warn(context, f"{context.peer()}: refused: {reason}")
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        with self._budget.call(context.peer(), identity), self._known(caller, context):
            if caller is None or caller.expires_at_s is None:
                yield
            else:
                async with self._until_it_is_over(caller, caller.expires_at_s, context):
                    yield

    @contextlib.contextmanager
    def _known(self, caller: Caller | None, context: Context) -> Iterator[None]:
        self._callers[context] = caller
        try:
            yield
        finally:
            del self._callers[context]

    @staticmethod
    @contextlib.asynccontextmanager
    async def _until_it_is_over(
        caller: Caller, expires_at_s: float, context: Context
    ) -> AsyncIterator[None]:
        limit = asyncio.timeout(expires_at_s - time.time())
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, _over(caller))

    def _warn(self, context: Context, message: str) -> None:
        self._peer_log.warning(address_of(context.peer()), message)

    async def _refuse(self, context: Context, code: grpc.StatusCode, reason: str) -> NoReturn:
        self._counters.not_permitted += 1
        self._warn(context, f"{context.peer()}: refused: {reason}")
        await context.abort(code, reason)
        raise AssertionError("an aborted call went on")


def _is_over(caller: Caller) -> bool:
    return caller.expires_at_s is not None and caller.expires_at_s <= time.time()


def _over(caller: Caller) -> str:
    return f"the certificate of {caller.identity} is over since it was shown; connect again with a new one"
