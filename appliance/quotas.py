# SPDX-License-Identifier: Apache-2.0
"""Whose memory a process's is: what the data plane calls a tenant (native/src/node/tenant.c).

A user with a quota of its own; else the first group with a quota that the process is
in, whose members have it together; else just its user.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

# Groups are numbered behind all users.
_FIRST_GROUP = 1 << 32

PROBES = 1 << 33
"""Those of the kernel probes: what they write down others have caused, who may be anybody."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A part of the pool, and what it is called where it is counted."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Quotas:
    """By uid, and by gid in the order of the configuration."""

    users: Mapping[int, Quota] = field(default_factory=dict)
    groups: Mapping[int, Quota] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[int, Quota]]:
        """All of them, each with its tenant."""
        yield from self.users.items()
        yield from ((_FIRST_GROUP + gid, quota) for gid, quota in self.groups.items())

    def tenant(self, uid: int, gids: Collection[int]) -> int:
        """Of a process of that user, in these groups."""
        if uid in self.users:
            return uid
        return next((_FIRST_GROUP + gid for gid in self.groups if gid in gids), uid)
