# SPDX-License-Identifier: Apache-2.0
"""gRPC without generated code: ``calls.py serve`` prints its port, ``calls.py call PORT`` calls.

The four kinds of methods, each with a text; one more that fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
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


def serve() -> None:
    assert backsight.wait_attached(20)
    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "StreamOut": grpc.unary_stream_rpc_method_handler(stream_out),
        "StreamIn": grpc.stream_unary_rpc_method_handler(stream_in),
        "StreamBoth": grpc.stream_stream_rpc_method_handler(stream_both),
        "Broken": grpc.unary_unary_rpc_method_handler(broken),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None).wait()


def call(port: str) -> None:
    assert backsight.wait_attached(20)
    with trace.get_tracer("calls").start_as_current_span("calls") as span:
        print(format(span.get_span_context().trace_id, "032x"))
        call_all(port)


def call_all(port: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:

        def method(kind: str, name: str) -> Any:  # gRPC has a type for each kind
            return getattr(channel, kind)(f"/{SERVICE}/{name}")

        assert method("unary_unary", "Unary")(b"a") == b"a"
        assert method("unary_unary", "Unary").future(b"a").result() == b"a"
        assert list(method("unary_stream", "StreamOut")(b"a")) == [b"a", b"a"]
        assert method("stream_unary", "StreamIn")(iter([b"a", b"b"])) == b"ab"
        assert list(method("stream_stream", "StreamBoth")(iter([b"a", b"b"]))) == [b"a", b"b"]
        try:
            method("unary_unary", "Broken")(b"a")
        except grpc.RpcError as error:
            trailing = error.trailing_metadata()
            assert {m.key: m.value for m in trailing}["shelf"] in ("7", b"7")
            assert error.code() is grpc.StatusCode.INTERNAL
        else:
            raise AssertionError("it did not fail")


if __name__ == "__main__":
    {f.__name__: f for f in (serve, call)}[sys.argv[1]](*sys.argv[2:])
