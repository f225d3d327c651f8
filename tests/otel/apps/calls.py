# SPDX-License-Identifier: Apache-2.0
"""gRPC without generated code: ``calls.py serve`` prints its port, ``calls.py call PORT`` calls.

The four kinds of methods, each with a text; one more that fails; and three that answer
when two calls of them are there, which ``calls.py meet_all PORT`` makes. ``serve_aio`` and
``call_aio`` are the same by gRPC's asyncio.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
from opentelemetry import trace

import backsight

SERVICE = "shop.Stock"


def unary(request: bytes, _: grpc.ServicerContext) -> bytes:
    return request


def stream_out(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
    yield request
    yield request


def stream_in(requests: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
    return b"".join(requests)


def stream_both(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


def broken(_: bytes, context: grpc.ServicerContext) -> bytes:
    # Sets trailing metadata of its own, which must arrive too.
    context.set_trailing_metadata((("shelf", "7"),))
    context.abort(grpc.StatusCode.INTERNAL, "the shelf is empty")
    raise AssertionError


_meeting = threading.Barrier(2, timeout=15)


def meet(request: bytes, _: grpc.ServicerContext) -> bytes:
    _meeting.wait()
    return request


def meet_in(requests: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
    _meeting.wait()
    return b"".join(requests)


def meet_both(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    _meeting.wait()
    yield from requests


_left = threading.Event()


def endless(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    """Says one thing, and no more until the caller has left."""
    context.add_callback(_left.set)
    yield request
    _left.wait(15)


def await_left(request: bytes, context: grpc.ServicerContext) -> bytes:
    if not _left.wait(10):
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the caller of Endless has not left")
    return request


class Marking(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Sets trailing metadata before the handler, as the instrumentation's own might."""

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        if not details.method.endswith("/Unary"):
            return handler

        def marked(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.set_trailing_metadata((("x-request-id", "42"),))
            answer: bytes = handler.unary_unary(request, context)
            return answer

        return grpc.unary_unary_rpc_method_handler(marked)


def serve() -> None:
    assert backsight.wait_attached(20)
    server = grpc.server(ThreadPoolExecutor(4), None, interceptors=[Marking()])
    server.add_generic_rpc_handlers((handlers(unary, stream_out, stream_in, stream_both, broken),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None).wait()


def handlers(
    unary: Callable[..., Any],
    stream_out: Callable[..., Any],
    stream_in: Callable[..., Any],
    stream_both: Callable[..., Any],
    broken: Callable[..., Any],
) -> Any:
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Unary": grpc.unary_unary_rpc_method_handler(unary),
            "StreamOut": grpc.unary_stream_rpc_method_handler(stream_out),
            "StreamIn": grpc.stream_unary_rpc_method_handler(stream_in),
            "StreamBoth": grpc.stream_stream_rpc_method_handler(stream_both),
            "Broken": grpc.unary_unary_rpc_method_handler(broken),
            "Meet": grpc.unary_unary_rpc_method_handler(meet),
            "MeetIn": grpc.stream_unary_rpc_method_handler(meet_in),
            "MeetBoth": grpc.stream_stream_rpc_method_handler(meet_both),
            "Endless": grpc.unary_stream_rpc_method_handler(endless),
            "AwaitLeft": grpc.unary_unary_rpc_method_handler(await_left),
        },
    )


class Methods:
    """gRPC has a type for each kind."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __call__(self, kind: str, name: str) -> Any:
        return getattr(self._channel, kind)(f"/{SERVICE}/{name}")


def call(port: str) -> None:
    assert backsight.wait_attached(20)
    with trace.get_tracer("calls").start_as_current_span("calls") as span:
        print(format(span.get_span_context().trace_id, "032x"))
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call_all(Methods(channel))


def call_all(method: Methods) -> None:
    answer, unary = method("unary_unary", "Unary").with_call(b"a")
    assert answer == b"a"
    # Both that of an interceptor of the application and ours.
    assert {m.key for m in unary.trailing_metadata()} == {"x-request-id", "backsight-node"}
    assert method("unary_unary", "Unary").future(b"a").result() == b"a"
    assert list(method("unary_stream", "StreamOut")(b"a")) == [b"a", b"a"]
    assert method("stream_unary", "StreamIn")(iter([b"a", b"b"])) == b"ab"
    assert list(method("stream_stream", "StreamBoth")(iter([b"a", b"b"]))) == [b"a", b"b"]
    try:
        method("unary_unary", "Broken")(b"a")
    except grpc.RpcError as error:
        failed_as_wanted(error, error.trailing_metadata())
    else:
        raise AssertionError("it did not fail")


def failed_as_wanted(error: grpc.RpcError, trailing: Any) -> None:
    assert dict(trailing)["shelf"] in ("7", b"7")
    assert error.code() is grpc.StatusCode.INTERNAL


def meet_all(port: str) -> None:
    """Each pair is answered if the second call is made while the first one is under way."""
    assert backsight.wait_attached(20)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = Methods(channel)
        futures = [method("unary_unary", "Meet").future(b"a") for _ in range(2)]
        assert [future.result() for future in futures] == [b"a", b"a"]
        futures = [method("stream_unary", "MeetIn").future(iter([b"a"])) for _ in range(2)]
        assert [future.result() for future in futures] == [b"a", b"a"]
        streams = [method("stream_stream", "MeetBoth")(iter([b"a"])) for _ in range(2)]
        assert [list(stream) for stream in streams] == [[b"a"], [b"a"]]


def drop(port: str) -> None:
    """Takes one message of a stream, and holds it no longer."""
    assert backsight.wait_attached(20)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = Methods(channel)
        assert next(iter(method("unary_stream", "Endless")(b"a"))) == b"a"
        assert method("unary_unary", "AwaitLeft")(b"a") == b"a"


# ------------------------------------------------------------------- asyncio


async def unary_aio(request: bytes, context: Any) -> bytes:
    context.set_trailing_metadata((("x-request-id", "42"),))
    return request


async def stream_out_aio(request: bytes, _: Any) -> AsyncIterator[bytes]:
    yield request
    yield request


async def stream_in_aio(requests: AsyncIterator[bytes], _: Any) -> bytes:
    return b"".join([request async for request in requests])


async def stream_both_aio(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def broken_aio(_: bytes, context: Any) -> bytes:
    before = context.trailing_metadata()
    await context.abort(grpc.StatusCode.INTERNAL, "the shelf is empty", (*before, ("shelf", "7")))
    raise AssertionError


async def _serve_aio() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (handlers(unary_aio, stream_out_aio, stream_in_aio, stream_both_aio, broken_aio),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def serve_aio() -> None:
    assert backsight.wait_attached(20)
    asyncio.run(_serve_aio())


async def _call_aio(port: str) -> None:
    with trace.get_tracer("calls").start_as_current_span("calls") as span:
        print(format(span.get_span_context().trace_id, "032x"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method = Methods(channel)
            unary = method("unary_unary", "Unary")(b"a")
            assert await unary == b"a"
            assert {key for key, _ in await unary.trailing_metadata()} >= {
                "x-request-id",
                "backsight-node",
            }
            stream = method("unary_stream", "StreamOut")(b"a")
            assert [answer async for answer in stream] == [b"a", b"a"]
            assert await method("stream_unary", "StreamIn")(iter([b"a", b"b"])) == b"ab"
            stream = method("stream_stream", "StreamBoth")(iter([b"a", b"b"]))
            assert [answer async for answer in stream] == [b"a", b"b"]
            try:
                await method("unary_unary", "Broken")(b"a")
            except grpc.aio.AioRpcError as error:
                failed_as_wanted(error, error.trailing_metadata())
            else:
                raise AssertionError("it did not fail")


def call_aio(port: str) -> None:
    assert backsight.wait_attached(20)
    asyncio.run(_call_aio(port))


if __name__ == "__main__":
    {f.__name__: f for f in (serve, call, meet_all, drop, serve_aio, call_aio)}[sys.argv[1]](
        *sys.argv[2:]
    )
