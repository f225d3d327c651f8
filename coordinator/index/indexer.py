# SPDX-License-Identifier: Apache-2.0
"""Keeps the index up to date: it follows the store's changes, in their order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from coordinator.answers import collected
from coordinator.follower import Followed, Follower
from coordinator.index.file import IndexFile
from coordinator.index.making import TraceIndex, index_of
from coordinator.store.reader import Change, StoreReader
from protocol.messages import TraceId
from runtime.log import Log

# Of one trace that is looked at for the index; one that is larger is found by its first spans.
_INDEXED_BYTES_MAX = 16 << 20

# In one transaction, which is in memory until it is written.
_CHANGES_AT_ONCE = 1024
_SPANS_AT_ONCE = 8000

# For what comes meanwhile: the pages of a batch are written by each transaction that adds to it
# (coordinator.index.file). A search is so much behind a verdict.
_GATHER_S = 2.0

# Keys that are compared at once where changes are missing.
_KEYS_AT_ONCE = 1024

FOLLOWER = "index"


@dataclass(slots=True)
class IndexCounters:
    """Of the index of searches, since its start. They only rise."""

    traces_indexed: int = 0  # once for each verdict
    traces_failed: int = 0
    busy_us: int = 0


class Indexer:
    """Works while it is entered. ``waiting`` changes are behind it, the first for ``waiting_s``, as last seen."""

    def __init__(self, store: Followed, path: Path, log: Log) -> None:
        self.counters = IndexCounters()
        self.waiting = 0
        self.waiting_s = 0.0
        self._store = store
        self._log = log
        self._file = IndexFile(path, store.id, log)
        self._position = self._file.position
        store.followed(FOLLOWER, self._position)
        self.follower = Follower("indexer", store, path, self._work)

    def __enter__(self) -> Self:
        self.follower.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.follower.__exit__(kind, error, traceback)
        self._file.close()

    def close(self) -> None:
        """Close the file of one that was never entered."""
        self._file.close()

    def _work(self, reader: StoreReader) -> float | None:
        begun_ns = time.thread_time_ns()
        last = reader.last_change()
        if not reader.first_change() - 1 <= self._position <= last:
            self._look_at_all(reader)
            return 0.0
        changes = reader.changes(self._position, _CHANGES_AT_ONCE)
        if not changes:
            self.waiting, self.waiting_s = 0, 0.0
            return None
        self.waiting = last - self._position
        self.waiting_s = max(0.0, time.time() - changes[0].at_ns / 1e9)
        with self._file.transaction():
            self._position = self._take(reader, changes).number
            self._file.move_to(self._position)
        self._store.followed(FOLLOWER, self._position)
        busy_ns = time.thread_time_ns() - begun_ns
        self.counters.busy_us += busy_ns // 1000
        return 0.0 if self._position < last else _GATHER_S

    def _take(self, reader: StoreReader, changes: Sequence[Change]) -> Change:
        """Write what the first of some changes, at least of one, come to. Which was the last of them."""
        made: dict[int, TraceIndex] = {}
        gone: list[int] = []
        spans = 0
        for change in changes:
            if change.trace is None:
                gone.append(change.key)
            elif change.key not in made:
                found = self._index(reader, change.key, change.trace, change.version)
                if found is not None:
                    made[change.key] = found
                    spans += len(found.spans)
            if self.follower.ending.is_set() or spans > _SPANS_AT_ONCE:
                break
        self._file.forget(gone)
        self._file.put(made)
        return change

    def _index(
        self, reader: StoreReader, key: int, trace: TraceId, version: int | None
    ) -> TraceIndex | None:
        """Of a trace that has a newer verdict than the index knows; None: nothing to do."""
        if version is None or self._file.version(key, trace) == version:
            return None
        found = collected(reader, trace, _INDEXED_BYTES_MAX)
        if found is None:
            return None  # deleted since
        version = found.version
        try:
            made = index_of(found.stamped(one_clock=True), version)
            self.counters.traces_indexed += 1
        except Exception as error:  # noqa: BLE001 - what applications wrote must not stop the others
            self.counters.traces_failed += 1
            self._log.warning(
                f"trace {trace.hex()}: cannot be searched for: {error!r}",
                trace_id=trace.hex(),
            )
            made = TraceIndex(trace, version)
        return made

    def _look_at_all(self, reader: StoreReader) -> None:
        """Changes are missing: the index is new, or far behind. So all is compared with what is stored."""
        upto = reader.last_change()
        after = 0
        while page := self._file.keys(after, _KEYS_AT_ONCE):
            after = page[-1][0]
            gone = [key for key, trace in page if reader.key_of(trace) != key]
            with self._file.transaction():
                self._file.forget(gone)
        after = 0
        while changes := reader.stored(after, _CHANGES_AT_ONCE):
            with self._file.transaction():
                after = self._take(reader, changes).key
            if self.follower.ending.is_set():
                return
        self._move_to(upto)

    def _move_to(self, position: int) -> None:
        with self._file.transaction():
            self._file.move_to(position)
        self._position = position
        self._store.followed(FOLLOWER, position)
