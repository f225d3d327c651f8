# SPDX-License-Identifier: Apache-2.0
"""The data plane as the node's core sees it.

In production this is the C library (native/src/node.h, which documents each
call) behind ``appliance.native``; in the simulator, and as the reference that
property tests hold the C library against, it is ``tests.simulation.pool``.
Both are deterministic, take the time from outside and do no IO, so the core
may call them directly and stays sans-IO.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from protocol.messages import Group, NodeId, SliceFlags, Source, TraceId


@dataclass(frozen=True, slots=True)
class Slice:
    """What the node holds of one trace.

    ``epoch`` is another one each time that a trace is collected, also after the
    report store was lost; 0: not collected, there was no room even for a mark.
    ``bytes`` counts all that was ever appended, ``trimmed_bytes`` what of it
    was freed after the coordinator made it durable. ``open_handles`` counts
    handles of live processes: while it is not zero, more may come.

    ``searching``: the data plane still looks for the trace. What there is of it, and
    whether that is all, is known when the search is over, which a SliceChanged tells;
    until then the other figures mean nothing, and nothing may be read.
    """

    trace: TraceId
    group: Group
    epoch: int
    bytes: int
    trimmed_bytes: int
    collected_ns: int
    changed_ns: int
    open_handles: int
    flags: SliceFlags
    crumbs: tuple[NodeId, ...]
    searching: bool = False


def no_room(trace: TraceId, group: Group, now_ns: int) -> Slice:
    """What is said of a trace that could not even be marked: held or not, it cannot be copied."""
    return Slice(trace, group, 0, 0, 0, now_ns, now_ns, 0, SliceFlags.STORE_FULL, ())


NO_CLIENT = 0
"""Instead of a process's number: the kernel, or the node itself."""


@dataclass(frozen=True, slots=True)
class LocalTrigger:
    """A trigger fired on this node: by a process, or with NO_CLIENT by the kernel or the node."""

    client: int
    fired_ns: int
    trigger: str
    trace: TraceId
    laterals: tuple[TraceId, ...]
    why: str
    source: Source


@dataclass(frozen=True, slots=True)
class SliceChanged:
    """Bytes, crumbs, open handles or flags of a collected slice changed, or its search is over.

    Since it was collected: what there was then ``DataPlane.collect`` told.
    """

    trace: TraceId


@dataclass(frozen=True, slots=True)
class ClientDrained:
    """The last segment of a process that had exited was reclaimed."""

    client: int


@dataclass(frozen=True, slots=True)
class StoreFull:
    """A copy into the report store stopped for want of room."""

    trace: TraceId


DataPlaneEvent: TypeAlias = LocalTrigger | SliceChanged | ClientDrained | StoreFull


@dataclass(frozen=True, slots=True)
class StoreUsage:
    used_bytes: int
    capacity_bytes: int


class DataPlane(Protocol):
    """See native/src/node.h. Times are CLOCK_MONOTONIC nanoseconds."""

    def collect(self, trace: TraceId, group: Group, now_ns: int) -> Slice:
        """Copy out what is held of a trace and all that comes later; maybe after a search."""

    def slice(self, trace: TraceId) -> Slice | None:
        """The slice of a collected trace, None if it is not collected."""

    def read(self, trace: TraceId, offset: int, size: int) -> bytes:
        """Bytes of a slice; fewer than size only at its end."""

    def trim(self, trace: TraceId, offset: int) -> None:
        """Free what lies before offset; it is durable elsewhere."""

    def release(self, trace: TraceId, *, abandoned: bool, now_ns: int) -> None:
        """Forget a slice and its mark; abandoned leaves a tombstone."""

    def slices(self) -> Iterable[Slice]:
        """All collected slices: after a restart, what the store still held."""

    def store_usage(self) -> StoreUsage:
        """How full the report store is."""
