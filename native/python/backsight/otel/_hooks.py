# SPDX-License-Identifier: Apache-2.0
"""What instrumentations are asked to tell beyond their spans: who answered a request.

HTTP servers name their node in a response header, by the response propagator of
opentelemetry.instrumentation; gRPC servers in the trailing metadata, by an interceptor
of ours. Clients read it in the response hooks of their instrumentations, and for gRPC
in an interceptor; gRPC's asyncio has its own of both. Without any of this the peer's
address is a hint.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import get_current_span

from backsight._client import node_ref
from backsight.otel._propagator import RESPONSE_HEADER, Current

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = logging.getLogger("backsight")


def answered(span: Span, headers: Any) -> None:  # noqa: ANN401 # see _answering_node
    """The request of this client span was answered with these headers."""
    processor = Current.processor
    if processor is None or headers is None:
        return
    try:
        node = _answering_node(headers)
        if node:
            processor.answered(span.get_span_context(), node)
    except Exception:  # noqa: BLE001 - a class of others, in the middle of a request
        _log.debug("response headers of %s cannot be read", type(headers), exc_info=True)


def _answering_node(headers: Any) -> str:  # noqa: ANN401 # anything with .get(), or pairs
    """The node that they name; "" for none."""
    if hasattr(headers, "get"):
        node = headers.get(RESPONSE_HEADER)
    else:
        named = (value for key, value in headers if _text(key).lower() == RESPONSE_HEADER)
        node = next(named, None)
    return "" if node is None else _text(node)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


# ------------------------------------------------------------ response hooks


def _on_response(span: Span, request: Any, response: Any) -> None:  # noqa: ANN401
    """requests, urllib3 and urllib give their own response, httpx a named tuple of parts."""
    answered(span, getattr(response, "headers", None))


def _on_aiohttp_response(span: Span, parameters: Any) -> None:  # noqa: ANN401
    """Of a request that ended, or of an exception, which has no response."""
    answered(span, getattr(getattr(parameters, "response", None), "headers", None))


async def _on_async_response(span: Span, request: Any, response: Any) -> None:  # noqa: ANN401
    _on_response(span, request, response)


def instrumentor_arguments(name: str) -> dict[str, Any]:
    """What to give to the instrumentor of that entry point."""
    match name:
        case "httpx":
            return {"response_hook": _on_response, "async_response_hook": _on_async_response}
        case "requests" | "urllib3" | "urllib":
            return {"response_hook": _on_response}
        case "aiohttp-client":
            return {"response_hook": _on_aiohttp_response}
    return {}


# --------------------------------------------------------------------- gRPC


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
    import grpc

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


def grpc_server_interceptor() -> Any:  # noqa: ANN401 # grpc is imported only where it is used
    """For ``grpc.server``: innermost, where the span of the request is the current one."""
    import grpc

    def telling(behaviour: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(behaviour)
        def handle(request: Any, context: Any) -> Any:  # noqa: ANN401
            _tell(context)
            return behaviour(request, context)

        return handle

    class Interceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
        def intercept_service(self, continuation: Any, details: Any) -> Any:  # noqa: ANN401
            return _wrapped(continuation(details), telling)

    return Interceptor()


def _trailed(span: Span, call: Any) -> None:  # noqa: ANN401 # of gRPC
    """The call of this client span is over."""
    try:
        metadata = call.trailing_metadata()
    except Exception:  # noqa: BLE001 - one that failed before it was sent, say
        return
    answered(span, metadata)


def grpc_client_interceptor() -> Any:  # noqa: ANN401
    """For ``grpc.intercept_channel``: inside that of the instrumentation, whose span is current."""
    import grpc

    def look(call: Any) -> Any:  # noqa: ANN401
        # At once for a call that is over. No other is asked, since that would wait for its end.
        # Callbacks are called in turn, so this is before the one that ends the span.
        span = get_current_span()
        try:
            call.add_done_callback(lambda done: _trailed(span, done))
        except Exception:  # noqa: BLE001 - a class of others, in the middle of a request
            _log.debug("%s does not say who answered", type(call), exc_info=True)
        return call

    class Interceptor(
        grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
        grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
        grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
        grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
    ):
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:  # noqa: ANN401
            return look(continuation(details, request))

        def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:  # noqa: ANN401
            return look(continuation(details, request))

        def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:  # noqa: ANN401
            return look(continuation(details, requests))

        def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:  # noqa: ANN401
            return look(continuation(details, requests))

    return Interceptor()


def grpc_aio_server_interceptor() -> Any:  # noqa: ANN401
    """For ``grpc.aio.server``: innermost, as the other.

    Its context lets nothing be set on it, so the node is named before the handler and once
    more after it; what is sent by an ``abort()`` after trailing metadata is the handler's.
    """
    import grpc.aio

    def telling(behaviour: Callable[..., Any]) -> Callable[..., Any]:
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

    class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
        async def intercept_service(self, continuation: Any, details: Any) -> Any:  # noqa: ANN401
            return _wrapped(await continuation(details), telling)

    return Interceptor()


def grpc_aio_client_interceptors() -> Sequence[Any]:
    """For channels of ``grpc.aio``, of which each interceptor is of one kind."""
    import grpc.aio

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


def patch(name: str) -> None:
    """Servers and channels made from here on have our interceptor as their innermost.

    ``name`` is the entry point of an instrumentor that is to be loaded after this.
    """
    match name:
        case "grpc_server":
            import grpc

            grpc.server = _with_more(grpc.server, 2, lambda: [grpc_server_interceptor()])
        case "grpc_client":
            import grpc

            for channel in ("insecure_channel", "secure_channel"):
                setattr(grpc, channel, _intercepted(getattr(grpc, channel)))
        case "grpc_aio_server":
            import grpc.aio

            grpc.aio.server = _with_more(
                grpc.aio.server, 2, lambda: [grpc_aio_server_interceptor()]
            )
        case "grpc_aio_client":
            import grpc.aio

            for channel, position in (("insecure_channel", 3), ("secure_channel", 4)):
                original = getattr(grpc.aio, channel)
                more = _with_more(original, position, grpc_aio_client_interceptors)
                setattr(grpc.aio, channel, more)


def _intercepted(original: Callable[..., Any]) -> Callable[..., Any]:
    import grpc

    @functools.wraps(original)
    def channel(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return grpc.intercept_channel(original(*arguments, **options), grpc_client_interceptor())

    return channel
