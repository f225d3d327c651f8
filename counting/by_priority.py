# SPDX-License-Identifier: Apache-2.0
"""Groups in the order of their priority: the same on every node, and at the coordinator.

Whoever has too much gives up the last of them, so all give up the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

from protocol.messages import Group

Order: TypeAlias = tuple[int, bytes, str]

T = TypeVar("T")


def order_of(group: Group, priority: int) -> Order:
    """Sorts groups, the highest priority first.

    ``priority`` is the hash of the primary. The rest only makes the order total.
    """
    return (-priority, group.primary, group.trigger)


class ByPriority(Generic[T]):
    """Items by the order of their group."""

    __slots__ = ("_items", "_orders")

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._items: dict[Order, T] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def put(self, order: Order, item: T, present: bool) -> None:
        """Have the item, or not."""
        if present == (order in self._items):
            return
        if present:
            insort(self._orders, order)
            self._items[order] = item
        else:
            del self._orders[bisect_left(self._orders, order)]
            del self._items[order]

    def first(self) -> T:
        """The one of the highest priority."""
        return self._items[self._orders[0]]

    def backwards(self) -> Iterator[T]:
        """From the lowest priority on."""
        return (self._items[order] for order in reversed(self._orders))
