# SPDX-License-Identifier: Apache-2.0
"""Threads that make something of traces once these are judged: the index, exports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator.answers import trace_detail
from coordinator.index import TraceIndex, index_of
from coordinator.reader import StoreReader
from coordinator.store import Store
from formats.stamped import stamped
from protocol.messages import TraceId
from runtime.log import Log

# Of one trace that is looked at for the index; one that is larger is found by its first spans.
_INDEXED_BYTES_MAX = 16 << 20

# In one transaction, which delays the durability of what waits: some 10 us a span.
_TRACES_AT_ONCE = 32
_SPANS_AT_ONCE = 5000

# Of one core for the index, at most. What reads traces holds the lock of the interpreter, for
# which what takes them in must wait: under load, searches come later, and no footage is lost.
_CORE_SHARE = 0.2


class Follower:
    """A thread that works as long as there is work, and sleeps until the store has news.

    ``work`` is called with a reader of its own. It returns in how many seconds it
    shall be called again: 0 at once, None when there are news. Runs while entered;
    ``ending`` is set when it shall end, and whoever works waits for nothing else then.
    """

    def __init__(
        self, name: str, store: Store, path: Path, work: Callable[[StoreReader], float | None]
    ) -> None:
        self.ending = threading.Event()
        self._news = threading.Event()
        self._woken = threading.Event()
        self._path = path
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name)
        store.follow(self._news.set)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ending.set()
        self.wake()
        self._thread.join()

    def wake(self) -> None:
        """Call ``work`` now, whatever it waits for."""
        self._woken.set()
        self._news.set()

    def _run(self) -> None:
        with StoreReader(self._path) as reader:
            while True:
                # Before all that is looked at: what changes after that wakes again.
                self._news.clear()
                self._woken.clear()
                if self.ending.is_set():
                    return
                again_s = self._work(reader)
                if again_s is None:
                    self._news.wait()
                elif again_s > 0:
                    self._woken.wait(again_s)


@dataclass(slots=True)
class IndexCounters:
    """Of the index of searches, since its start. They only rise."""

    traces_indexed: int = 0  # once for each verdict
    traces_failed: int = 0
    busy_us: int = 0


class Indexer:
    """Keeps the index up to date."""

    def __init__(self, store: Store, path: Path, log: Log) -> None:
        self.counters = IndexCounters()
        self._store = store
        self._log = log
        self.follower = Follower("indexer", store, path, self._work)

    def _work(self, reader: StoreReader) -> float | None:
        begun_ns = time.thread_time_ns()
        traces = reader.to_index(_TRACES_AT_ONCE)
        notes: list[TraceIndex] = []
        for trace in traces:
            made = self._index(reader, trace)
            if made is not None:
                notes.append(made)
            if self.follower.ending.is_set() or sum(len(n.spans) for n in notes) > _SPANS_AT_ONCE:
                break
        if not traces:
            return None
        self._store.note(notes)
        busy_ns = time.thread_time_ns() - begun_ns
        self.counters.busy_us += busy_ns // 1000
        return busy_ns / 1e9 * (1 / _CORE_SHARE - 1)

    def _index(self, reader: StoreReader, trace: TraceId) -> TraceIndex | None:
        detail = trace_detail(reader, trace, _INDEXED_BYTES_MAX)
        if detail is None:
            return None  # deleted since
        version = detail.summary.verdict.version
        try:
            made = index_of(stamped(detail, one_clock=True), version)
            self.counters.traces_indexed += 1
        except Exception as error:  # noqa: BLE001 - what applications wrote must not stop the others
            self.counters.traces_failed += 1
            self._log.warning(
                f"trace {trace.hex()}: cannot be searched for: {error!r}", trace_id=trace.hex()
            )
            made = TraceIndex(trace, version, (), None, {})
        return made
