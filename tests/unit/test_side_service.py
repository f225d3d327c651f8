# SPDX-License-Identifier: Apache-2.0
"""A port that somebody else has ends no daemon."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

from runtime.side_service import side_service
from testbed.ports import free_port
from tests.unit.logs import SILENT, logs_to


def test_it_is_served_while_entered() -> None:
    port = free_port()

    async def run() -> None:
        async with side_service(lambda: socket.create_server(("127.0.0.1", port)), SILENT):
            socket.create_connection(("127.0.0.1", port)).close()

    asyncio.run(run())
    socket.create_server(("127.0.0.1", port)).close()


def test_it_is_served_once_that_can_be() -> None:
    log: list[str] = []
    served = asyncio.Event()

    @contextlib.contextmanager
    def serving(port: int) -> Iterator[None]:
        with socket.create_server(("127.0.0.1", port)):
            served.set()
            yield

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            async with side_service(lambda: serving(port), logs_to(log), again_s=0.01):
                assert log[0].endswith("; does without, and tries again every 0.01 s")
                taken.close()
                await served.wait()
                assert "serves now what it could not: " in log[-1]
                socket.create_connection(("127.0.0.1", port)).close()
        socket.create_server(("127.0.0.1", port)).close()

    asyncio.run(run())


def test_who_ends_before_that_waits_for_nothing() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            async with side_service(
                lambda: socket.create_server(("127.0.0.1", port)), SILENT, again_s=86400.0
            ):
                pass

    asyncio.run(run())
