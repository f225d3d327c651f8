# SPDX-License-Identifier: Apache-2.0
"""Who answered a call by gRPC: servers name their node in trailing metadata, clients read it there.

Servers by an interceptor, clients in a channel; those of asyncio by interceptors both. Imported
only where an instrumentation of gRPC is, since it imports gRPC.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Self

import grpc
import grpc.aio
from opentelemetry.trace import get_current_span

from backsight._client import node_ref
from backsight.otel._hooks import answered
from backsight.otel._propagator import RESPONSE_HEADER

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = logging.getLogger("backsight")


def _trailing(metadata: Any) -> tuple[Any, ...]:  # noqa: ANN401 # of gRPC
    others = [item for item in metadata or () if item[0] != RESPONSE_HEADER]
    return ((RESPONSE_HEADER, node_ref()), *others)


def _is_told() -> bool:
    """Nobody is told to look here for a request of which no span is made here."""
    return bool(node_ref()) and get_current_span().get_span_context().is_valid


def _tell_now(context: Any) -> None:  # noqa: ANN401 # of gRPC
    """Name this node in the trailing metadata, beside what is set there."""
    if not _is_told():
        return
    # The context may be of a class of others. What it cannot do is left undone.
    try:
        context.set_trailing_metadata(_trailing(context.trailing_metadata()))
    except Exception:  # noqa: BLE001 - a class of others, in the middle of a request
        _log.debug("%s does not tell the caller of this node", type(context), exc_info=True)


def _tell(context: Any) -> None:  # noqa: ANN401 # of gRPC
    """The same, also in what the handler sets later."""
    if not _is_told():
        return
    _tell_now(context)
    with contextlib.suppress(AttributeError, TypeError):  # of a class with __slots__, say
        original = context.set_trailing_metadata
        # Of a method, no more than the function: a context that held itself would stay, with
        # the request, until the garbage collector comes.
        if inspect.ismethod(original) and original.__self__ is context:
            original = functools.partial(_call_method, weakref.ref(context), original.__func__)
        context.set_trailing_metadata = lambda metadata: original(_trailing(metadata))


def _call_method(owner: weakref.ref[Any], method: Callable[..., Any], metadata: Any) -> None:  # noqa: ANN401
    context = owner()
    if context is not None:
        method(context, metadata)


def _wrapped(handler: Any, wrap: Callable[[Callable[..., Any]], Any]) -> Any:  # noqa: ANN401
    """The same handler of a method, None if there is none, around its behaviour."""
    if handler is None:
        return None
    kinds = {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }
    name, make = kinds[handler.request_streaming, handler.response_streaming]
    return make(
        wrap(getattr(handler, name)),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


class _ServerInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """For ``grpc.server``: innermost, where the span of the request is the current one."""

    def intercept_service(self, continuation: Any, details: Any) -> Any:  # noqa: ANN401
        return _wrapped(continuation(details), _telling)


def _telling(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(behaviour)
    def handle(request: Any, context: Any) -> Any:  # noqa: ANN401
        _tell(context)
        return behaviour(request, context)

    return handle


def _trailed(span: Span, call: Any) -> None:  # noqa: ANN401 # of gRPC
    """The call of this client span is over."""
    try:
        metadata = call.trailing_metadata()
    except Exception:  # noqa: BLE001 - one that failed before it was sent, say
        return
    answered(span, metadata)


def _look_after(call: Any) -> Any:  # noqa: ANN401 # of gRPC
    """The same call; who answered it is read when it is over."""
    # Asked for now, trailing metadata would be waited for. gRPC cancels a stream that nobody
    # holds any more, so neither may this: no add_done_callback().
    span, reference = get_current_span(), weakref.ref(call)

    def over() -> None:
        done = reference()
        if done is not None:
            _trailed(span, done)

    try:
        if not call.add_callback(over):
            over()
    except Exception:  # noqa: BLE001 - a class of others, in the middle of a request
        _log.debug("%s does not say who answered", type(call), exc_info=True)
    return call


class _Unary(grpc.UnaryUnaryMultiCallable, grpc.StreamUnaryMultiCallable):  # type: ignore[type-arg]
    """Of one response: a method of a channel."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401
        self._inner = inner

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return self.with_call(*arguments, **options)[0]

    def with_call(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        try:
            answer = self._inner.with_call(*arguments, **options)
        except grpc.RpcError as error:
            _trailed(get_current_span(), error)
            raise
        _trailed(get_current_span(), answer[1])
        return answer

    def future(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return _look_after(self._inner.future(*arguments, **options))


class _Stream(grpc.UnaryStreamMultiCallable, grpc.StreamStreamMultiCallable):  # type: ignore[type-arg]
    """Of many responses: a method of a channel."""

    def __init__(self, inner: Any) -> None:  # noqa: ANN401
        self._inner = inner

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return _look_after(self._inner(*arguments, **options))


class _Channel(grpc.Channel):
    """A channel that reads from each answer who gave it.

    It is inside the interceptor of the instrumentation, whose span is then the current one, and no
    interceptor itself: for each call through one gRPC makes the method anew.
    """

    def __init__(self, inner: grpc.Channel) -> None:
        self._inner = inner

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return _Unary(self._inner.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return _Stream(self._inner.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return _Unary(self._inner.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return _Stream(self._inner.stream_stream(*arguments, **options))

    def subscribe(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        self._inner.subscribe(*arguments, **options)

    def unsubscribe(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        self._inner.unsubscribe(*arguments, **options)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _AioServerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """For ``grpc.aio.server``: innermost, as the other.

    Its context lets nothing be set on it, so the node is named before the handler and once
    more after it; what is sent by an ``abort()`` after trailing metadata is the handler's.
    """

    async def intercept_service(self, continuation: Any, details: Any) -> Any:  # noqa: ANN401
        return _wrapped(await continuation(details), _aio_telling)


def _aio_telling(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    # Of the same kind: gRPC and the instrumentation look. They want no other kinds.
    if inspect.isasyncgenfunction(behaviour):

        @functools.wraps(behaviour)
        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
            _tell_now(context)
            async with contextlib.aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
            _tell_now(context)

        return stream
    if inspect.iscoroutinefunction(behaviour):

        @functools.wraps(behaviour)
        async def handle(request: Any, context: Any) -> Any:  # noqa: ANN401
            _tell_now(context)
            try:
                return await behaviour(request, context)
            finally:
                _tell_now(context)

        return handle
    return behaviour


def _aio_client_interceptors() -> Sequence[Any]:
    """For channels of ``grpc.aio``, of which each interceptor is of one kind."""

    def trailed(span: Span, call: Any) -> None:  # noqa: ANN401
        # Nothing is to be waited for any more, and nobody could: this is no coroutine.
        coroutine: Coroutine[Any, Any, Any] = call.trailing_metadata()
        try:
            coroutine.send(None)
        except StopIteration as done:
            answered(span, done.value)
        finally:
            coroutine.close()

    async def look(self: Any, continuation: Any, details: Any, request: Any) -> Any:  # noqa: ANN401
        span = get_current_span()
        call = await continuation(details, request)
        try:
            call.add_done_callback(functools.partial(trailed, span))
        except Exception:  # noqa: BLE001 - a class of others, in the middle of a request
            _log.debug("%s does not say who answered", type(call), exc_info=True)
        return call

    return [
        type("Interceptor", (base,), {f"intercept_{kind}": look})()
        for kind, base in (
            ("unary_unary", grpc.aio.UnaryUnaryClientInterceptor),
            ("unary_stream", grpc.aio.UnaryStreamClientInterceptor),
            ("stream_unary", grpc.aio.StreamUnaryClientInterceptor),
            ("stream_stream", grpc.aio.StreamStreamClientInterceptor),
        )
    ]


def _with_more(
    original: Callable[..., Any], position: int, more: Callable[[], Sequence[Any]]
) -> Callable[..., Any]:
    """The same function, with more in the last places of its parameter ``interceptors``."""

    @functools.wraps(original)
    def patched(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        if len(arguments) > position:
            given = (*(arguments[position] or ()), *more())
            arguments = (*arguments[:position], given, *arguments[position + 1 :])
        else:
            options["interceptors"] = (*(options.get("interceptors") or ()), *more())
        return original(*arguments, **options)

    return patched


def _with_answers_read(original: Callable[..., grpc.Channel]) -> Callable[..., grpc.Channel]:
    """The same function, of whose channels the answers are read."""

    @functools.wraps(original)
    def channel(*arguments: Any, **options: Any) -> grpc.Channel:  # noqa: ANN401
        return _Channel(original(*arguments, **options))

    return channel


def patch(name: str) -> None:
    """Servers and channels made from here on have ours as their innermost.

    ``name`` is the entry point of an instrumentor that is to be loaded after this.
    """
    match name:
        case "grpc_server":
            grpc.server = _with_more(grpc.server, 2, lambda: [_ServerInterceptor()])
        case "grpc_client":
            for channel in ("insecure_channel", "secure_channel"):
                setattr(grpc, channel, _with_answers_read(getattr(grpc, channel)))
        case "grpc_aio_server":
            grpc.aio.server = _with_more(grpc.aio.server, 2, lambda: [_AioServerInterceptor()])
        case "grpc_aio_client":
            for channel, position in (("insecure_channel", 3), ("secure_channel", 4)):
                original = getattr(grpc.aio, channel)
                setattr(grpc.aio, channel, _with_more(original, position, _aio_client_interceptors))
