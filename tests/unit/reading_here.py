# SPDX-License-Identifier: Apache-2.0
"""The reading process's answers in the test's own process, where a test can hold them up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator

from coordinator import calls
from coordinator.calls import Call, Feed
from coordinator.queries import Queries
from coordinator.reading import NO_STATUS, Status
from coordinator.store.writer import Store
from runtime.settings.coordinator import Settings


class ReadingHere:
    """For a coordinator that is asked for what is stored. Calls come by sockets, as in earnest."""

    def __init__(self) -> None:
        self.status: Status = NO_STATUS
        self._serving: set[asyncio.Task[None]] = set()
        self._queries: Queries | None = None

    def begin(self, settings: Settings, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._queries = Queries(settings.store_path)

    def check(self, settings: Settings) -> None:
        pass

    def reconfigure(self, settings: Settings) -> None:
        pass

    def ask(self, call: Call, feed: Feed | None = None) -> AsyncGenerator[bytes, None]:
        return calls.ask(self._pass_on, call, feed)

    def _pass_on(self, call: Call, theirs: socket.socket) -> None:
        assert self._queries is not None
        task = asyncio.ensure_future(calls.serve(theirs.dup(), call, self._queries.answers))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def wait(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    async def _close(self) -> None:
        assert self._queries is not None
        for task in self._serving:
            task.cancel()
        await self._queries.__aexit__(None, None, None)
