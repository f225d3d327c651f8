# SPDX-License-Identifier: Apache-2.0
"""What operators do to stored traces: have one stay, or go."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.counters import Deleted, StoreCounters
from coordinator.store.retention import StoreLimits
from coordinator.store.rows import chunk_ids
from coordinator.store.tables import Tables
from protocol.messages import TraceId


class NotStored(LookupError):
    """Nothing is stored of that trace."""


class Refused(ValueError):
    """It cannot be, and why; for the operator."""


@dataclass(slots=True)
class Pinned:
    """What is pinned, as it was last looked at."""

    traces: int = 0
    bytes: int = 0


class Orders:
    """By the store's writing connection, each call within a transaction.

    NotStored and Refused leave all as it was. What is so already is done at once.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        tables: Tables,
        counters: StoreCounters,
        limits: Callable[[], StoreLimits],
    ) -> None:
        self._connection = connection
        self._tables = tables
        self._counters = counters
        self._limits = limits
        self.pinned = Pinned()
        """For any thread."""
        self.look()

    def look(self) -> None:
        """See what is pinned: that may have grown."""
        traces, size = self._connection.execute(
            "SELECT count(*), coalesce(sum(pinned), 0) FROM traces WHERE pinned > 0"
        ).fetchone()
        self.pinned = Pinned(traces, size)

    def pin(self, trace: TraceId) -> None:
        """Keep a trace, however old it gets and however little room there is."""
        key, _, pinned = self._row(trace)
        if pinned:
            return
        size, limit = self._bytes(key), self._limits().pinned_bytes_max
        self.look()
        if self.pinned.bytes + size > limit:
            raise Refused(
                f"trace {trace.hex()} has {size} bytes here, and {self.pinned.traces} traces with"
                f" {self.pinned.bytes} are pinned already; allowed: {limit} in all"
                " (`store.pinned_bytes_max`). Unpin others (`backsightctl traces --pinned`), or allow more"
            )
        self._connection.execute("UPDATE traces SET pinned = ? WHERE key = ?", (size, key))
        self.look()

    def unpin(self, trace: TraceId) -> None:
        """Let a trace go when its time is over."""
        key, _, _ = self._row(trace)
        self._connection.execute("UPDATE traces SET pinned = 0 WHERE key = ?", (key,))
        self.look()

    def delete(self, trace: TraceId) -> None:
        """Delete all that is stored of a trace; who follows the store deletes what he made of it."""
        key, released, pinned = self._row(trace)
        if pinned:
            raise Refused(f"trace {trace.hex()} is pinned: unpin it first")
        if not released:
            raise Refused(
                f"trace {trace.hex()} is still being collected, so its nodes would send it again; delete it"
                " when it is closed: `linger_s` after its last news, `missing_linger_s` where something is"
                " missing"
            )
        self._tables.delete(key)
        self._counters.deleted[Deleted.OPERATOR] += 1

    def _row(self, trace: TraceId) -> tuple[int, bool, int]:
        row = self._connection.execute(
            "SELECT key, released, pinned FROM traces WHERE id = ?", (trace,)
        ).fetchone()
        if row is None:
            raise NotStored(f"no trace {trace.hex()} is stored")
        key, released, pinned = row
        return key, bool(released), pinned

    def _bytes(self, key: int) -> int:
        """Of its chunks; 1 for none, since it is pinned all the same."""
        (size,) = self._connection.execute(
            "SELECT coalesce(sum(length(data)), 0) FROM chunks WHERE id BETWEEN ? AND ?",
            chunk_ids(key),
        ).fetchone()
        return max(1, int(size))
