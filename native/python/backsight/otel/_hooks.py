# SPDX-License-Identifier: Apache-2.0
"""What instrumentations are asked to tell beyond their spans: who answered a request.

HTTP servers name their node in a response header, by the response propagator of
opentelemetry.instrumentation; gRPC servers in the trailing metadata, by an interceptor
of ours. Clients read it in the response hooks of their instrumentations, and for gRPC
in an interceptor. Without any of this the peer's address is a hint.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
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
    except Exception:  # noqa: BLE001 - a class of others, in the middle of a request
        _log.debug("response headers of %s cannot be read", type(headers), exc_info=True)
        return
    if node:
        processor.answered(span.get_span_context(), node)


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


async def _on_async_response(span: Span, request: Any, response: Any) -> None:  # noqa: ANN401
    _on_response(span, request, response)


def instrumentor_arguments(name: str) -> dict[str, Any]:
    """What to give to the instrumentor of that entry point."""
    match name:
        case "httpx":
            return {"response_hook": _on_response, "async_response_hook": _on_async_response}
        case "requests" | "urllib3" | "urllib":
            return {"response_hook": _on_response}
    return {}


# --------------------------------------------------------------------- gRPC


def _trailing(metadata: Any) -> list[tuple[str, Any]]:  # noqa: ANN401 # of gRPC
    return [(RESPONSE_HEADER, node_ref()), *(metadata or ())]


def _tell(context: Any) -> None:  # noqa: ANN401 # of gRPC
    """Name this node in the trailing metadata, also in what the handler sets later."""
    if not node_ref():
        return
    original = context.set_trailing_metadata
    context.set_trailing_metadata = lambda metadata: original(_trailing(metadata))
    context.set_trailing_metadata(())


def grpc_server_interceptor() -> Any:  # noqa: ANN401 # grpc is imported only where it is used
    """For ``grpc.server``: innermost, so that it sees the real context."""
    import grpc

    def telling(behaviour: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(behaviour)
        def handle(request: Any, context: Any) -> Any:  # noqa: ANN401
            _tell(context)
            return behaviour(request, context)

        return handle

    class Interceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
        def intercept_service(self, continuation: Any, details: Any) -> Any:  # noqa: ANN401
            handler = continuation(details)
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
                telling(getattr(handler, name)),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )

    return Interceptor()


def grpc_client_interceptor() -> Any:  # noqa: ANN401
    """For ``grpc.intercept_channel``: inside that of the instrumentation, whose span is current."""
    import grpc

    def look(call: Any) -> Any:  # noqa: ANN401
        span = get_current_span()
        call.add_done_callback(lambda done: answered(span, done.trailing_metadata()))
        return call

    class Interceptor(
        grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
        grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
        grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
        grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
    ):
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:  # noqa: ANN401
            # The call is over here, or blocks when it is asked for its end; so it is
            # before the span ends.
            call = continuation(details, request)
            span = get_current_span()
            with contextlib.suppress(grpc.RpcError):
                answered(span, call.trailing_metadata())
            return call

        def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:  # noqa: ANN401
            return look(continuation(details, request))

        def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:  # noqa: ANN401
            return look(continuation(details, requests))

        def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:  # noqa: ANN401
            return look(continuation(details, requests))

    return Interceptor()


def patch_grpc_server() -> None:
    """Servers made from here on have our interceptor as their innermost."""
    import grpc

    original = grpc.server

    @functools.wraps(original)
    def server(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        options["interceptors"] = (*(options.get("interceptors") or ()), grpc_server_interceptor())
        return original(*arguments, **options)

    grpc.server = server


def patch_grpc_client() -> None:
    """Channels made from here on have our interceptor as their innermost."""
    import grpc

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def channel(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            return grpc.intercept_channel(
                original(*arguments, **options), grpc_client_interceptor()
            )

        return channel

    grpc.insecure_channel = wrap(grpc.insecure_channel)
    grpc.secure_channel = wrap(grpc.secure_channel)
