# SPDX-License-Identifier: Apache-2.0
"""Where Jaeger's API is served: at an endpoint, in clear text or by TLS, and at a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from coordinator.web.application import application
from coordinator.web.gate import Gate
from runtime.http import HttpServer, UnixHttpServer
from runtime.log import Log
from runtime.settings.coordinator import Settings
from runtime.side_service import side_service
from runtime.tls import LOOK_EVERY_S, ServerContext


@contextlib.asynccontextmanager
async def serving(settings: Callable[[], Settings], log: Log) -> AsyncIterator[None]:
    """Serve the store while entered; what cannot be served is tried again, and said."""
    begun = settings()
    served = Gate(settings, log).before(application(begun.store_path, log))
    endpoint, socket_path = begun.query.listen, begun.query.socket

    @contextlib.asynccontextmanager
    async def at_endpoint() -> AsyncIterator[None]:
        assert endpoint is not None
        async with _secured(begun, log) as context:
            try:
                server = HttpServer(endpoint, served, log, context)
            except OSError as error:
                raise OSError(
                    f"query.listen: {error}; give it another endpoint, or null to have none"
                ) from error
            with server:
                yield

    def at_socket() -> UnixHttpServer:
        try:
            return UnixHttpServer(Path(socket_path or ""), served, log)
        except OSError as error:
            raise OSError(
                f"query.socket: {error}; give it another path, or null to have none"
            ) from error

    async with contextlib.AsyncExitStack() as entered:
        if endpoint is not None:
            await entered.enter_async_context(side_service(at_endpoint, log))
        if socket_path is not None:
            await entered.enter_async_context(side_service(at_socket, log))
        yield


@contextlib.asynccontextmanager
async def _secured(
    settings: Settings, log: Log
) -> AsyncIterator[Callable[[], ssl.SSLContext] | None]:
    """By which context connections are met at the moment; None: in clear text."""
    if not settings.query.tls:
        yield None
        return
    assert settings.tls is not None
    context = ServerContext(settings.tls, "tls", log)

    async def look() -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)  # nothing tells
            context.look()

    looking = asyncio.ensure_future(look())
    try:
        yield context.current
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
