# SPDX-License-Identifier: Apache-2.0
"""The triggered traces that are idle: which of them goes next.

An idle trace has no bytes in the report store, only its mark. It belongs to everybody who
asked for it. Where there are too many, whoever has the most loses one, so that nobody who
fires much costs another's traces their marks; a trace that nobody has any more goes. An
owner loses the oldest first; those that end by time anyway before those that wait for the
coordinator's Release.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from protocol.messages import TraceId


class Asker(Enum):
    """Who wants a trace, where it is no user of this node."""

    COORDINATOR = auto()
    NODE = auto()
    """The kernel, the node itself or its operator."""
    UNKNOWN = auto()
    """Processes whose user nobody knows any more, all together."""


Owner: TypeAlias = int | Asker
"""Whose a mark is: a user's number, or an Asker."""


@dataclass(slots=True)
class _Owned:
    """One owner's traces, oldest first."""

    expiring: OrderedDict[TraceId, None] = field(default_factory=OrderedDict)
    waiting: OrderedDict[TraceId, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.expiring) + len(self.waiting)


class IdleMarks:
    """Idle traces by owners and, where they end by time, by when."""

    def __init__(self) -> None:
        self._owned: dict[Owner, _Owned] = {}
        self._owners: dict[TraceId, frozenset[Owner]] = {}
        self._expiring: OrderedDict[TraceId, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def put(self, trace: TraceId, owners: frozenset[Owner], expires_ns: int | None) -> None:
        """A trace is idle; ``expires_ns`` None: until it is discarded.

        One that is idle already keeps its age, and its time if it had one.
        """
        if expires_ns is None:
            self._expiring.pop(trace, None)
        else:
            self._expiring.setdefault(trace, expires_ns)
        for owner in self._owners.get(trace, frozenset()) - owners:
            self._disown(trace, owner)
        self._owners[trace] = owners
        for owner in owners:
            owned = self._owned.setdefault(owner, _Owned())
            mine, other = owned.waiting, owned.expiring
            if expires_ns is not None:
                mine, other = other, mine
            other.pop(trace, None)
            mine.setdefault(trace)

    def discard(self, trace: TraceId) -> None:
        """A trace is idle no more, or was none."""
        self._expiring.pop(trace, None)
        for owner in self._owners.pop(trace, ()):
            self._disown(trace, owner)

    def next_expiry_ns(self) -> int | None:
        return next(iter(self._expiring.values()), None)

    def expired(self, now_ns: int) -> TraceId | None:
        """The one whose time was over first."""
        trace, expires_ns = next(iter(self._expiring.items()), (None, 0))
        return trace if trace is not None and expires_ns <= now_ns else None

    def dearest(self) -> tuple[TraceId, Owner] | None:
        """Who loses which trace when there are too many; both stay until they are told to go."""
        owner = max(self._owned, key=lambda owner: len(self._owned[owner]), default=None)
        if owner is None:
            return None
        owned = self._owned[owner]
        return next(iter(owned.expiring or owned.waiting)), owner

    def _disown(self, trace: TraceId, owner: Owner) -> None:
        owned = self._owned[owner]
        owned.expiring.pop(trace, None)
        owned.waiting.pop(trace, None)
        if not owned:
            del self._owned[owner]
