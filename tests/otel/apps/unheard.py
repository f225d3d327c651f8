# SPDX-License-Identifier: Apache-2.0
"""Calls that nobody answers, by all clients: ``unheard.py`` prints a list of them, as JSON.

Each with its trace id, and what backsight.otel makes of the exception that came of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp  # type: ignore[import-not-found]
import grpc
import httpx
import requests
import urllib3
from opentelemetry import trace
from urllib3.util import Retry

import backsight
from backsight.otel._reach import is_unsent

# As long as it takes until nobody has answered.
TIMEOUT_S = 0.3


def by_requests(url: str) -> None:
    requests.get(url, timeout=TIMEOUT_S)


def by_requests_again(url: str) -> None:
    with requests.Session() as session:
        session.mount("http://", requests.adapters.HTTPAdapter(max_retries=Retry(1)))
        session.get(url, timeout=TIMEOUT_S)


def by_urllib(url: str) -> None:
    urllib.request.urlopen(url, timeout=TIMEOUT_S).close()


def by_urllib3(url: str) -> None:
    pool: Any = urllib3.PoolManager()
    pool.request("GET", url, timeout=TIMEOUT_S)


def by_urllib3_once(url: str) -> None:
    pool: Any = urllib3.PoolManager()
    pool.request("GET", url, timeout=TIMEOUT_S, retries=False)


def by_httpx(url: str) -> None:
    httpx.get(url, timeout=TIMEOUT_S)


def by_httpx_of_asyncio(url: str) -> None:
    async def get() -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            await client.get(url)

    asyncio.run(get())


def by_aiohttp(url: str) -> None:
    timeout = aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)

    async def get() -> None:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            await answer.read()

    asyncio.run(get())


def by_grpc(url: str) -> None:
    with grpc.insecure_channel(url.split("/")[2]) as channel:
        method: Any = channel.unary_unary
        method("/shop.Stock/Unary")(b"a", timeout=10)


@contextlib.contextmanager
def refusing() -> Iterator[int]:
    """A port where nobody listens, and nobody else will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """The kernel takes connections, and nobody reads them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextlib.contextmanager
def full() -> Iterator[int]:
    """So many wait to be accepted that the kernel takes no more."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as listener,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@contextlib.contextmanager
def resetting() -> Iterator[int]:
    """Reads what comes, and resets the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.recv(1 << 16)
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


PASSED_ON = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.9.9.9:80: "
    "Failed to connect to remote host: Connection refused"
)


@contextlib.contextmanager
def passing_on() -> Iterator[int]:
    """A gRPC server that tells of its own error, as of one that it calls in turn."""

    def fail(_: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAVAILABLE, PASSED_ON)
        raise AssertionError

    server = grpc.server(ThreadPoolExecutor(1))
    unary = grpc.unary_unary_rpc_method_handler(fail)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("shop.Stock", {"Unary": unary}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


HOW = {
    "refused": refusing,
    "times out": silent,
    "connect times out": full,
    "reset": resetting,
    "passed on": passing_on,
}
ALL = ("refused", "times out", "connect times out", "reset")
LIBRARIES: dict[str, Callable[[str], None]] = {
    "requests": by_requests,
    "requests, again": by_requests_again,
    "urllib": by_urllib,
    "urllib3": by_urllib3,
    "urllib3, once": by_urllib3_once,
    "httpx": by_httpx,
    "httpx of asyncio": by_httpx_of_asyncio,
    "aiohttp": by_aiohttp,
}


def call(library: str, how: str, by: Callable[[str], None]) -> dict[str, object]:
    with HOW[how]() as port, trace.get_tracer("unheard").start_as_current_span("caller") as span:
        identity = format(span.get_span_context().trace_id, "032x")
        try:
            # The URL is part of some messages, and may say anything.
            by(f"http://127.0.0.1:{port}/(Caused%20by%20NewConnectionError(?NewConnectionError(")
        except Exception as error:  # noqa: BLE001 - whatever it is
            module = type(error).__module__
            kind = (
                type(error).__qualname__
                if module == "builtins"
                else f"{module}.{type(error).__qualname__}"
            )
            return {
                "library": library,
                "how": how,
                "trace": identity,
                "error": f"{kind}: {error}",
                "unsent": is_unsent(kind, str(error), "127.0.0.1"),
            }
    raise AssertionError(f"{library}: somebody answered")


if __name__ == "__main__":
    assert backsight.wait_attached(20)
    calls = [call(library, how, by) for library, by in LIBRARIES.items() for how in ALL]
    calls += [call("grpc", how, by_grpc) for how in ("refused", "reset", "passed on")]
    print(json.dumps(calls))
