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
from runtime.events import is_set_within
from runtime.http import HttpServer, UnixHttpServer
from runtime.log import Log
from runtime.settings.coordinator import Settings
from runtime.settings.tls import TlsFiles
from runtime.side_service import side_service
from runtime.tls import LOOK_EVERY_S, ServerContext


@contextlib.asynccontextmanager
async def serving(
    settings: Callable[[], Settings],
    changed: asyncio.Event,
    tell_expiry: Callable[[float], None],
    log: Log,
) -> AsyncIterator[None]:
    """Serve the store while entered; what cannot be served is tried again, and said.

    ``changed`` is set when the settings are others. ``tell_expiry`` hears when the certificate that is
    shown is over, in seconds since 1970.
    """
    begun = settings()
    served = Gate(settings, log).before(application(begun.store_path, log))
    endpoint, socket_path = begun.query.listen, begun.query.socket

    @contextlib.asynccontextmanager
    async def at_endpoint() -> AsyncIterator[None]:
        assert endpoint is not None
        async with _secured(settings, changed, tell_expiry, log) as context:
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
    settings: Callable[[], Settings],
    changed: asyncio.Event,
    tell_expiry: Callable[[float], None],
    log: Log,
) -> AsyncIterator[Callable[[], ssl.SSLContext] | None]:
    """By which context connections are met at the moment; None: in clear text."""
    if not settings().query.tls:
        yield None
        return
    context = ServerContext(_files(settings()), "tls", log)
    tell_expiry(context.expires_at_s)

    async def look() -> None:
        while True:
            await is_set_within(changed, LOOK_EVERY_S)  # nothing tells of files
            changed.clear()
            context.look(_files(settings()))
            tell_expiry(context.expires_at_s)

    looking = asyncio.ensure_future(look())
    try:
        yield context.current
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def _files(settings: Settings) -> TlsFiles:
    # Settings without this section have no query.tls, and its coming or going waits for a restart.
    assert settings.tls is not None
    return settings.tls
