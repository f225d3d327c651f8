# SPDX-License-Identifier: Apache-2.0
"""The messages between node and coordinator, as the cores see them.

One dataclass for each message of ``backsight.proto``, which says what they
mean. ``protocol.wire`` turns bytes into these and checks every bound on the
way, so a core only ever meets valid ones.
"""

from __future__ import annotations

import enum
from dataclasses import field
from typing import NamedTuple, NewType, TypeAlias

from protocol.values import dataclass
from protocol.versions import OURS, Agreed, Versions

TraceId = NewType("TraceId", bytes)
"""16 bytes, big-endian, not all zero."""

NodeId = NewType("NodeId", int)
"""FNV-1a-64 of a node's name; what breadcrumbs carry."""

ADDRESSES_MAX = 64
"""By which peers may know a node."""

LATERALS_MAX = 32
COLLECT_TRACES_MAX = 1 + LATERALS_MAX
CRUMBS_MAX = 64
CHUNK_BYTES_MAX = 1 << 20
CHUNKS_MAX = 256
"""Chunks in one message; of all of them, CHUNK_BYTES_MAX."""
CONTROL_CHUNK_BYTES_MAX = 8 << 10
"""Of the data of all chunks in one message of a Control stream, which bulk shall not hold up."""
ACKS_MAX = 65536
"""Acks in one reply: 39 bytes each, so under 3 MiB."""

DRY_RUN_PREFIX = "dry."
"""Triggers of such names are counted where they fire, after all limits, and collect nothing."""

RECOVERED_WHY = "recovered from the report store after a restart of the node"
"""Why a firing is repeated that the coordinator may never have heard of: a node's
report store keeps that a trace was triggered, not where nor why. It counts only
where no other firing of the group is known."""

CLOCK_STEPPED = 0
"""Instead of a probe's number: what a clock showed before it was set, and after."""

CLOCK_STEP_NS = 1_000_000
"""By how much a clock may move beside the monotonic one without being told of. NTP slews it by
half a millisecond a second at most, and it may take as long to read both clocks."""

TRIGGER_NAME_BYTES_MAX = 31
WHY_BYTES_MAX = 95
NODE_NAME_BYTES_MAX = 63
NAME_OF_WHO_BYTES_MAX = 511
"""Of who ordered something, with what proves who it is."""

SERVICE_BYTES_MAX = 63
POLICY_RULES_MAX = 256
OPERATION_BYTES_MAX = 255
SOFTWARE_BYTES_MAX = 32
REPORT_BYTES_MAX = 256 << 10
SNAPSHOT_TRIGGER = "snapshot"
"""Triggers of snapshots are named so, and the number of the snapshot after a dot."""


def cut_utf8(text: str, bytes_max: int) -> str:
    """As much of a text as so many bytes of UTF-8 hold, in whole characters."""
    return text.encode(errors="replace")[:bytes_max].decode(errors="ignore")


class Source(enum.IntEnum):
    """Who fired a trigger."""

    APPLICATION = 1
    CONTEXT = 2
    KERNEL = 3
    NODE = 4
    OPERATOR = 5


class SliceFlags(enum.IntFlag):
    """Why a slice is not, or not whole, on its node (native/src/node.h)."""

    NONE = 0
    HELD = 0x01
    EVICTED = 0x02
    LOSSY = 0x04
    TRUNCATED = 0x08
    ABANDONED = 0x10
    STORE_FULL = 0x20
    MAYBE_LOSSY = 0x40
    CORRUPT = 0x80
    CRUMBS_CUT = 0x100
    BY_FINGERPRINT = 0x400
    """With EVICTED: only a fingerprint says so, which is another trace's once in millions."""


class Group(NamedTuple):
    """A fired trigger's identity; the unit that is kept or dropped.

    A tuple, since both cores look groups up all the time, and a tuple is hashed in C.
    """

    trigger: str
    primary: TraceId


@dataclass(frozen=True, slots=True)
class Unknown:
    """Of a kind that a newer peer knows; nothing to be sent."""


# ------------------------------------------------------ node to coordinator


@dataclass(frozen=True, slots=True)
class Hello:
    node: str
    incarnation: int
    addresses: tuple[str, ...] = ()
    versions: Versions = OURS
    software: str = ""
    """Which Backsight it is, for operators; nothing is decided by it."""


@dataclass(frozen=True, slots=True)
class TriggerFired:
    group: Group
    laterals: tuple[TraceId, ...] = ()
    why: str = ""
    source: Source = Source.APPLICATION
    fired_at_ns: int = 0
    suppressed: int = 0
    process: int = field(default=0, compare=False)
    """By the node's own numbers, which nobody keeps: who is charged for it. 0: none."""


@dataclass(frozen=True, slots=True)
class SliceStatus:
    trace: TraceId
    held: bool
    flags: SliceFlags = SliceFlags.NONE
    bytes: int = 0
    open_handles: int = 0
    crumbs: tuple[NodeId, ...] = ()
    epoch: int = 0

    @property
    def is_blank(self) -> bool:
        """The node has nothing of the trace, nor says what became of it."""
        return not (self.held or self.bytes or self.open_handles or self.flags or self.crumbs)

    @property
    def only_gave_up(self) -> bool:
        """The node gave the trace up, and knows of nothing that came of it since."""
        has_more = self.held or self.bytes or self.open_handles or self.crumbs
        return self.flags == SliceFlags.ABANDONED and not has_more


@dataclass(frozen=True, slots=True)
class Abandoned:
    group: Group


@dataclass(frozen=True, slots=True)
class ClockReply:
    number: int
    received_ns: int
    sent_ns: int


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    number: int
    found: int
    fired: int
    done: bool


@dataclass(frozen=True, slots=True)
class NodeReport:
    number: int
    json: str


@dataclass(frozen=True, slots=True)
class SliceChunk:
    trace: TraceId
    offset: int
    data: bytes
    epoch: int
    zstd: bytes = field(default=b"", compare=False)
    """The data as a frame of Zstandard, if it came so: it can be stored as it is."""
    stream: int = field(default=0, compare=False)
    """On a Control stream: by which Slices stream's credit, by the node's own number of that."""


NodeMessage: TypeAlias = (
    Hello
    | TriggerFired
    | SliceStatus
    | Abandoned
    | ClockReply
    | SnapshotStatus
    | NodeReport
    | SliceChunk
)


# ------------------------------------------------------ coordinator to node


@dataclass(frozen=True, slots=True)
class Welcome:
    incarnation: int
    agreed: Agreed
    priority_seed: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class Collect:
    group: Group
    traces: tuple[TraceId, ...]


@dataclass(frozen=True, slots=True)
class TriggerAck:
    group: Group


@dataclass(frozen=True, slots=True)
class Drop:
    group: Group


@dataclass(frozen=True, slots=True)
class Release:
    trace: TraceId


@dataclass(frozen=True, slots=True)
class ClockProbe:
    number: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    number: int
    trigger: str
    age_ns: int
    service: str = ""
    traces: int = 0
    by: str = ""


@dataclass(frozen=True, slots=True)
class PolicyRule:
    operation: str
    threshold: int


@dataclass(frozen=True, slots=True)
class Policy:
    """What nodes shall record; None: what each one's own configuration says."""

    number: int = 0
    percentage_threshold: int | None = None
    rules: tuple[PolicyRule, ...] = ()


@dataclass(frozen=True, slots=True)
class StatusQuestion:
    number: int


NO_POLICY = Policy()
"""Nodes go by their own configuration."""

CoordinatorMessage: TypeAlias = (
    Welcome
    | Refused
    | Collect
    | TriggerAck
    | Drop
    | Release
    | ClockProbe
    | Snapshot
    | Policy
    | StatusQuestion
)


# ------------------------------------------------------------------- slices


@dataclass(frozen=True, slots=True)
class SliceAck:
    trace: TraceId
    offset: int
    epoch: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class SliceReply:
    acks: tuple[SliceAck, ...] = ()
    credit_bytes: int = 0
