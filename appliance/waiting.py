# SPDX-License-Identifier: Apache-2.0
"""Places to wait, of which each user has its own."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Waiting(Generic[T]):
    """What waits, by user, in the order in which it came.

    There is always room for one more. What has waited longest goes: of the same
    user when that has as many as it may; of all when there are as many as there
    may be, so that somebody with thousands of user ids is bounded too.
    """

    def __init__(self, per_user_max: int, total_max: int) -> None:
        self._per_user_max = per_user_max
        self._total_max = total_max
        self._uids: dict[T, int] = {}
        self._by_user: dict[int, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._uids)

    def __contains__(self, item: T) -> bool:
        return item in self._uids

    def add(self, item: T, uid: int) -> T | None:
        """Let it wait. Returns what lost its place by that."""
        longest = self._that_must_go(uid)
        if longest is not None:
            self.remove(longest)
        self._uids[item] = uid
        self._by_user.setdefault(uid, {})[item] = None
        return longest

    def _that_must_go(self, uid: int) -> T | None:
        of_user = self._by_user.get(uid, {})
        if len(of_user) >= self._per_user_max:
            return next(iter(of_user))
        if len(self._uids) >= self._total_max:
            return next(iter(self._uids))
        return None

    def remove(self, item: T) -> None:
        """It does not wait any more."""
        uid = self._uids.pop(item)
        of_user = self._by_user[uid]
        del of_user[item]
        if not of_user:
            del self._by_user[uid]
