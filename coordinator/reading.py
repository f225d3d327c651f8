# SPDX-License-Identifier: Apache-2.0
"""A process of the coordinator that only reads the store: the index, exports, answers to questions.

Nothing that is searched for or sent takes the coordinator's interpreter from what it hears from
nodes, nor its memory; and what is read there is what applications wrote. It is forked before
the store is open, so it asks when to begin, and it is begun again if it fails, as a program.

    it says                         the coordinator says
    {"begins": true}                the settings, once the store is open
    {"followed": {follower: n},     a Call, with the socket on which it is answered (coordinator.calls)
     "status": {...}}, on a         the settings, when they are others
    change, every few seconds       nothing any more: end

That there are changes in the store stands in a counter of the kernel's (eventfd), which takes any number.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pickle
import resource
import socket
import sqlite3
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol

from coordinator import calls
from coordinator.calls import Call, Feed
from coordinator.index.file import IndexFile
from coordinator.index.indexer import FOLLOWER as INDEX
from coordinator.index.indexer import IndexCounters, Indexer
from coordinator.otlp_export.exporter import FOLLOWER as EXPORT
from coordinator.otlp_export.exporter import ExportCounters, Exporter
from coordinator.otlp_export.transports import transport_of
from coordinator.queries import Queries
from coordinator.store.reader import StoreReader
from coordinator.store.schema import StoreError
from coordinator.store.writer import Store
from coordinator.web.serving import serving
from runtime.children import module_command, module_environment
from runtime.forked import Forked, leave_signals_to_the_parent, next_message, pass_on
from runtime.log import Format, Log, MessageId
from runtime.main import die_with_any_thread
from runtime.memory import resident_bytes
from runtime.settings.coordinator import COORDINATOR_PROGRAM, Settings

# Between two of its messages on how it is. Each wakes the coordinator.
_STATUS_INTERVAL_S = 5.0

# What does not end by then, when it is to end, is no use to anybody.
_END_S = 10.0

# So that what it computes comes after what nodes say, on a machine that is busy.
_NICE = 5

Status = dict[str, Any]


def _status(
    index: IndexCounters,
    export: ExportCounters,
    index_changes: int = 0,
    index_s: float = 0.0,
    export_traces: int = 0,
    certificate_expires_s: float = 0.0,
) -> Status:
    return {
        "index": dataclasses.asdict(index),
        "export": dataclasses.asdict(export),
        "waiting": {
            "index_changes": index_changes,
            "index_s": index_s,
            "export_traces": export_traces,
        },
        "certificate_expires_s": certificate_expires_s,
        "process": {"cpu_s": 0.0, "resident_bytes": 0},
    }


NO_STATUS = _status(IndexCounters(), ExportCounters())
"""As long as it has said nothing."""


# ---------------------------------------------------------- in the coordinator


def check_export(settings: Settings) -> None:
    """OSError if what is configured for exports names a file that cannot be read."""
    if settings.export.endpoint:
        transport_of(settings.export).close()


class Reading(Protocol):
    """What the coordinator needs of it."""

    status: Status

    def begin(self, settings: Settings, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        """The store is open."""

    def check(self, settings: Settings) -> None:
        """OSError where it could not go on with these."""

    def reconfigure(self, settings: Settings) -> None:
        """Go on with other settings, which are checked."""

    def ask(self, call: Call, feed: Feed | None = None) -> AsyncGenerator[bytes, None]:
        """The answers to a call; calls.Refused says why there are no more."""

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have it end; wait() for it then."""

    def wait(self) -> None:
        """Until it has ended, which takes seconds at most."""


class ReadingProcess:
    """The coordinator's end. ``status`` is what it said last of itself.

    To be made as a ``Forked`` is; StoreError and OSError from ``begin``.
    """

    def __init__(self, form: Format, log: Log) -> None:
        self.status = NO_STATUS
        self._log = log
        self._settings: Settings | None = None
        self._store: Store | None = None
        self._news = news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._forked = Forked(
            lambda theirs: _read(theirs, news, log),
            [*module_command("coordinator.reading"), form.value, str(news)],
            module_environment(),
            "the reading process",
            log,
            again_with=[news],
        )

    def begin(self, settings: Settings, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        """The store is open. Until ``end``, the process follows it. On the loop's thread, as all others."""
        check_export(settings)
        # Else who comes first finds none.
        IndexFile(settings.store_path, store.id, self._log).close()
        for follower in (INDEX, EXPORT):
            store.followed(follower, 0)  # nothing is trimmed before it has said more
        self._settings = settings
        self._store = store
        store.follow(self._tell)
        loop.add_reader(self._forked.socket, self._hear)

    def check(self, settings: Settings) -> None:
        """OSError where it could not go on with these."""
        check_export(settings)

    def reconfigure(self, settings: Settings) -> None:
        """Go on with other settings, which are checked."""
        self._settings = settings
        self._say(pickle.dumps(settings))

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have it end; wait() for it then."""
        loop.remove_reader(self._forked.socket)
        self._settings = None

    def wait(self) -> None:
        """Until it has ended, which takes seconds at most."""
        self._forked.end()

    def ask(self, call: Call, feed: Feed | None = None) -> AsyncGenerator[bytes, None]:
        """The answers to a call; calls.Refused says why there are no more."""
        return calls.ask(self._pass_on, call, feed)

    def _pass_on(self, call: Call, theirs: socket.socket) -> None:
        # Full while that process is only beginning, or stuck; it is not for us to wait.
        pass_on(self._forked.socket, pickle.dumps(call), theirs)

    def _tell(self) -> None:
        """In the store's thread: there are news."""
        # Full where nobody has listened for centuries.
        os.eventfd_write(self._news, 1)

    def _say(self, message: bytes) -> None:
        # Few are under way at a time, so there is room.
        with contextlib.suppress(OSError):
            self._forked.socket.send(message, socket.MSG_DONTWAIT)

    def _hear(self) -> None:
        while (message := next_message(self._forked.socket)) is not None and message.data:
            said = json.loads(message.data)
            if "begins" in said and self._settings is not None:
                self._say(pickle.dumps(self._settings))
            self.status = said.get("status", self.status)
            for follower, number in said.get("followed", {}).items():
                if self._store is not None:
                    self._store.followed(follower, number)


# -------------------------------------------------------------- in the process


class _Source:
    """The store, as its followers see it there."""

    def __init__(self, store_id: str, changed: Callable[[], None]) -> None:
        self.id = store_id
        self.numbers: dict[str, int] = {}
        self._changed = changed
        self._wakes: list[Callable[[], None]] = []

    def follow(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def followed(self, who: str, number: int) -> None:
        self.numbers[who] = number
        self._changed()

    def wake(self) -> None:
        for wake in self._wakes:
            wake()


def _read(ours: socket.socket, news: int, log: Log) -> None:
    """Run in the process, until the coordinator is gone."""
    with contextlib.suppress(PermissionError):  # a sandbox may forbid it; the rest is as important
        os.nice(_NICE)

    async def run() -> None:
        await _Reading(ours, news, log).run()

    try:
        asyncio.run(run())
    except (StoreError, OSError) as error:
        log.error(str(error))
        raise SystemExit(1) from error


class _Reading:
    def __init__(self, ours: socket.socket, news: int, log: Log) -> None:
        self._ours = ours
        self._news = news
        self._log = log
        self._ended = asyncio.Event()
        self._settings: asyncio.Future[Settings | None] = asyncio.get_running_loop().create_future()
        self._source: _Source | None = None
        self._indexer: Indexer | None = None
        self._exporter: Exporter | None = None
        self._queries: asyncio.Future[Queries] = asyncio.get_running_loop().create_future()
        self._calls: set[asyncio.Task[None]] = set()
        self._reconfigured = asyncio.Event()
        self._certificate_expires_s = 0.0
        self._said: object = None
        self._due: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        self._loop.add_reader(self._ours, self._hear)
        self._say({"begins": True})
        settings = await self._settings
        if settings is not None:
            await self._serve(settings)

    async def _serve(self, settings: Settings) -> None:
        path, log = settings.store_path, self._log
        log.level = settings.level
        self._current = settings
        with StoreReader(path) as reader:
            store_id = reader.store_id()
        self._source = _Source(store_id, self._say_soon_from_any_thread)
        self._indexer = Indexer(self._source, path, log)
        self._exporter = Exporter(settings.export, self._source, path, log)
        with self._indexer, self._exporter:
            async with (
                Queries(path) as queries,
                serving(
                    lambda: self._current, self._reconfigured, self._note_certificate_expiry, log
                ),
            ):
                self._loop.add_reader(self._news, self._hear_news)
                self._queries.set_result(queries)
                await self._ended.wait()
                end_anyway = threading.Timer(_END_S, os._exit, (0,))
                end_anyway.daemon = True
                end_anyway.start()
                for call in self._calls:
                    call.cancel()

    def _hear_news(self) -> None:
        os.eventfd_read(self._news)
        assert self._source is not None
        self._source.wake()

    def _hear(self) -> None:
        while (message := next_message(self._ours)) is not None:
            if not message.data:
                self._loop.remove_reader(self._ours)
                self._ended.set()
                if not self._settings.done():
                    self._settings.set_result(None)
                return
            if message.passed is not None:
                self._begin_call(pickle.loads(message.data), message.passed)
            elif not self._settings.done():
                self._settings.set_result(pickle.loads(message.data))
            else:
                self._reconfigure(pickle.loads(message.data))

    def _begin_call(self, call: Call, theirs: socket.socket) -> None:
        task = asyncio.ensure_future(self._serve_call(call, theirs))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _serve_call(self, call: Call, theirs: socket.socket) -> None:
        queries = await self._queries
        try:
            await calls.serve(theirs, call, queries.answers)
        except sqlite3.Error as error:
            self._log.error(f"{call.method} failed: {error}", message_id=MessageId.STORE_FAILED)

    def _reconfigure(self, settings: Settings) -> None:
        self._log.level = settings.level
        self._current = settings
        self._reconfigured.set()
        if self._exporter is not None:
            try:
                self._exporter.reconfigure(settings.export)
            except OSError as error:
                self._log.error(f"{error}; exports go on as before")

    def _note_certificate_expiry(self, at_s: float) -> None:
        if at_s != self._certificate_expires_s:
            self._certificate_expires_s = at_s
            self._say_soon()

    def _say_soon_from_any_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._say_soon)

    def _say_soon(self) -> None:
        if self._due is None:
            self._due = self._loop.call_later(_STATUS_INTERVAL_S, self._say_status)

    def _say_status(self) -> None:
        self._due = None
        assert self._source is not None
        assert self._indexer is not None
        assert self._exporter is not None
        followed = dict(self._source.numbers)
        status = _status(
            self._indexer.counters,
            self._exporter.counters,
            self._indexer.waiting,
            self._indexer.waiting_s,
            self._exporter.waiting,
            self._certificate_expires_s,
        )
        if (followed, status) == self._said:
            return
        self._said = followed, status
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = used.ru_utime + used.ru_stime
        process = {"cpu_s": cpu_s, "resident_bytes": resident_bytes()}
        self._say({"followed": followed, "status": {**status, "process": process}})
        # As long as something changes, of which nobody else may tell.
        self._say_soon()

    def _say(self, said: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._ours.send(json.dumps(said).encode(), socket.MSG_DONTWAIT)


def main(form: str, news: str, ours: str) -> None:
    """As a program, where the one that was forked has ended."""
    leave_signals_to_the_parent()
    die_with_any_thread()
    _read(
        socket.socket(fileno=int(ours)), int(news), Log.of(COORDINATOR_PROGRAM, form=Format(form))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
