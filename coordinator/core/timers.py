# SPDX-License-Identifier: Apache-2.0
"""Which keys are due when: one time a key, in order."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

K = TypeVar("K")


class Timers(Generic[K]):
    """A heap in which superseded entries stay until they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, K]] = []
        self._due: dict[K, tuple[int, int]] = {}
        self._count = 0  # orders equal times, so that runs repeat exactly

    def set(self, key: K, due_ns: int) -> None:
        """Make the key due then, instead of whenever it was."""
        self._count += 1
        self._due[key] = (due_ns, self._count)
        heapq.heappush(self._heap, (due_ns, self._count, key))
        # Superseded entries must not outgrow the live ones.
        if len(self._heap) > 64 + 2 * len(self._due):
            self._heap = [(due, n, k) for k, (due, n) in self._due.items()]
            heapq.heapify(self._heap)

    def set_earlier(self, key: K, due_ns: int) -> None:
        """Make the key due then, unless it is due before."""
        known = self._due.get(key)
        if known is None or due_ns < known[0]:
            self.set(key, due_ns)

    def cancel(self, key: K) -> None:
        self._due.pop(key, None)

    def next_ns(self) -> int | None:
        """When the first key is due."""
        while self._heap:
            due_ns, count, key = self._heap[0]
            if self._due.get(key) == (due_ns, count):
                return due_ns
            heapq.heappop(self._heap)
        return None

    def pop(self, now_ns: int) -> K | None:
        """Take the first key that is due, None if none is."""
        due_ns = self.next_ns()
        if due_ns is None or due_ns > now_ns:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        return key
