# SPDX-License-Identifier: Apache-2.0
"""Users and groups of this machine, in the configurations of both daemons."""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from runtime.schema import InvalidValue


def trusted_uids() -> frozenset[int]:
    """Root and the daemon's own user, who can do to the daemon what they like in any case."""
    return frozenset((0, os.geteuid()))


@dataclass(frozen=True, slots=True)
class AllowSettings:
    """Who is let in, beside root and the daemon's own user: names, numbers or ranges of these.

    A range (``1000000-1065535``) is for the users of a user namespace, whom nobody here has named.
    """

    users: tuple[str | int, ...] = ()
    groups: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        self.resolve()

    def resolve(
        self,
    ) -> tuple[frozenset[int], frozenset[int], tuple[range, ...], tuple[range, ...]]:
        """Look the names up: uids and gids, and ranges of both. InvalidValue names what is wrong."""
        users, uid_ranges = _parted("users", self.users)
        groups, gid_ranges = _parted("groups", self.groups)
        uids = trusted_uids() | {uid_of(user) for user in users}
        return uids, frozenset(map(gid_of, groups)), uid_ranges, gid_ranges


# uid_t and gid_t, but for -1, which stands for none (credentials(7)).
ID_MAX = (1 << 32) - 2

_RANGE = re.compile("([0-9]{1,10})-([0-9]{1,10})")


def _parted(key: str, given: Iterable[str | int]) -> tuple[list[str | int], tuple[range, ...]]:
    """Those that are one each, and ranges."""
    single: list[str | int] = []
    ranges: list[range] = []
    for item in given:
        found = _RANGE.fullmatch(item) if isinstance(item, str) else None
        if found is None:
            single.append(item)
            continue
        first, last = map(int, found.groups())
        if not first <= last <= ID_MAX:
            raise InvalidValue(key, f"{item}; allowed: FIRST-LAST, with numbers from 0 to {ID_MAX}")
        ranges.append(range(first, last + 1))
    return single, tuple(ranges)


def uid_of(user: str | int) -> int:
    """The number of a user; InvalidValue if there is none."""
    return _id_of("users", user, lambda name: pwd.getpwnam(name).pw_uid)


def gid_of(group: str | int) -> int:
    """The number of a group; InvalidValue if there is none."""
    return _id_of("groups", group, lambda name: grp.getgrnam(name).gr_gid)


def _id_of(key: str, given: str | int, look_up: Callable[[str], int]) -> int:
    if isinstance(given, str):
        try:
            return look_up(given)
        except (KeyError, ValueError):  # ValueError: it has a NUL
            raise InvalidValue(key, f"there is no {key.removesuffix('s')} {given!r}") from None
    if not 0 <= given <= ID_MAX:
        raise InvalidValue(key, f"{given}; allowed: a name, or a number from 0 to {ID_MAX}")
    return given
