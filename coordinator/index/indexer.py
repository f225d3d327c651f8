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
        self._position = self._written_to = self._file.position
        self._has_gathered = False
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
        self.waiting = last - self._position
        self.waiting_s = max(0.0, time.time() - changes[0].at_ns / 1e9) if changes else 0.0
        if not changes:
            return None
        if not self._has_gathered and len(changes) < _CHANGES_AT_ONCE:
            self._has_gathered = True
            return _GATHER_S
        self._has_gathered = False
        with reader.moment():
            made, gone, upto = self._make(reader, changes)
        # Most changes are of traces that were closed as they had been judged. To look at them
        # once more after a restart costs less than a transaction for each.
        if made or gone or upto.number - self._written_to >= _CHANGES_AT_ONCE:
            self._put(made, gone, upto.number)
        self._position = upto.number
        self.waiting = last - self._position
        busy_ns = time.thread_time_ns() - begun_ns
        self.counters.busy_us += busy_ns // 1000
        return 0.0 if self.waiting else None

    def _put(self, made: dict[int, TraceIndex], gone: Sequence[int], position: int) -> None:
        with self._file.transaction():
            self._file.forget(gone)
            self._file.put(made)
            self._file.move_to(position)
        self._written_to = position
        self._store.followed(FOLLOWER, position)

    def _make(
        self, reader: StoreReader, changes: Sequence[Change]
    ) -> tuple[dict[int, TraceIndex], list[int], Change]:
        """What the first of some changes come to: what to put, what to forget; and the last of them."""
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
        return made, gone, change

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
            with reader.moment():
                made, _, last = self._make(reader, changes)
            self._put(made, (), self._written_to)
            after = last.key
            if self.follower.ending.is_set():
                return
        self._put({}, (), upto)
        self._position = upto
