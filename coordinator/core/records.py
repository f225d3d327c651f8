# SPDX-License-Identifier: Apache-2.0
"""What the coordinator's core writes to its store, and reads back at start.

Every write is idempotent and names the whole of what it puts: the store keeps
the last one of each key, and appends ``AppendSlice`` at its offset. The core's
tokens number the writes; durability is told by the highest token up to which
all is durable, so the store may batch them as it likes but not reorder them.

    write         key                 what it replaces
    PutNode       node                all of the node
    DropNode      node                all of the node, by nothing
    PutTrigger    group, node         that node's firing of the group
    PutAbandoned  group               nothing
    PutStatus     trace, node         the slice's status, not its bytes
    AppendSlice   trace, node         nothing: extends the bytes at ``offset``; but all
                                      bytes of another epoch, where ``offset`` is 0
    PutVerdict    trace               the verdict, if its version is higher
    PutVerdictAgain   trace           nothing: it is the verdict where there is none
    PutReleased   trace               whether the trace is released
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import TypeAlias

from coordinator.core.clock import ClockOffset
from coordinator.core.verdict import Verdict
from protocol.messages import Group, SliceStatus, TraceId, TriggerFired
from protocol.values import dataclass


@dataclass(frozen=True, slots=True)
class PutNode:
    """A node connected for the first time or with other addresses, has answered after a restart, or left.

    The store notes when it was put: a new coordinator gets those first that were put longest ago.
    """

    node: str
    addresses: tuple[str, ...]
    incarnation: int | None = None
    """None: the store is of a coordinator that did not write it."""
    gone_ns: int = 0
    """For how long it has not been put, as the store says at the start; nothing that is written."""


@dataclass(frozen=True, slots=True)
class DropNode:
    """A node that is gone is forgotten, for one that is new."""

    node: str


@dataclass(frozen=True, slots=True)
class PutTrigger:
    """A trigger fired on a node."""

    node: str
    fired: TriggerFired


@dataclass(frozen=True, slots=True)
class PutAbandoned:
    """A group was given up; ``node`` did it first."""

    group: Group
    node: str


@dataclass(frozen=True, slots=True)
class PutStatus:
    """What a node says of its slice, and how its clock stood then.

    ``restarted``: it had another slice before, of which something may be lost.
    Once that is stored, it stays.
    """

    node: str
    status: SliceStatus
    clock: ClockOffset | None
    restarted: bool = False


@dataclass(frozen=True, slots=True)
class AppendSlice:
    """Bytes of a slice. ``offset`` is the number of bytes appended before.

    Those that replace bytes of another epoch make the slice a restarted one, and a
    status of another epoch goes with them.
    """

    trace: TraceId
    node: str
    epoch: int
    offset: int
    data: bytes
    zstd: bytes = field(default=b"", compare=False)
    """The data as a frame of Zstandard, if it is known."""


@dataclass(frozen=True, slots=True)
class PutVerdict:
    """A new version of the verdict, judged on all writes before this one."""

    trace: TraceId
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class PutVerdictAgain:
    """What holds of a trace that nobody waits for and that came up again, if it has no verdict.

    It was closed, and the store has deleted it meanwhile, of which the core does not hear; or only
    an abandoned group names it. Without a verdict it would be provisional for ever, since
    nothing more may come of it.
    """

    trace: TraceId
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class PutReleased:
    """The trace is closed, and its nodes are told to forget it; or it is not any more.

    ``least``: by node name, how long its slice would be if the same were collected once more.
    """

    trace: TraceId
    released: bool = True
    least: tuple[tuple[str, int], ...] = ()


Record: TypeAlias = (
    PutNode
    | DropNode
    | PutTrigger
    | PutAbandoned
    | PutStatus
    | AppendSlice
    | PutVerdict
    | PutVerdictAgain
    | PutReleased
)


@dataclass(frozen=True, slots=True)
class Write:
    """One write; tokens rise by one, from 1."""

    token: int
    record: Record


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice as the store has it, ``length`` bytes of ``epoch`` (0: none).

    The status may be of a later epoch, of which no bytes came. ``restarted``:
    see PutStatus. ``chunks`` are its bytes, in order; none for a released trace, of which
    only the length is wanted. ``least``: see PutReleased.
    """

    node: str
    status: SliceStatus | None
    epoch: int
    length: int
    restarted: bool = False
    chunks: Iterable[bytes] = ()
    least: int | None = None


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """A trace as the store has it.

    ``triggers`` and ``abandoned`` are those of the groups whose primary trace
    this is; there may be any number of triggers.
    """

    trace: TraceId
    triggers: Iterable[PutTrigger] = ()
    abandoned: tuple[PutAbandoned, ...] = ()
    slices: tuple[StoredSlice, ...] = ()
    verdict: Verdict | None = None
    released: bool = False
