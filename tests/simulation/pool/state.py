# SPDX-License-Identifier: Apache-2.0
"""What all parts of the model know: the node's processes, and what they have written."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from appliance.core.dataplane import ClientDrained, DataPlaneEvent, LocalTrigger
from formats.slices import Process, RunFlags
from protocol.hashing import RECORD_ALL, Domain, TraceHash
from protocol.messages import NodeId, TraceId

SEGMENT_HEADER_BYTES = 64
RUN_BYTES = 28  # its header at most, and its entry in the directory


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """As struct bsn_config, in the same units.

    ``segment_bytes`` is 65536 in the C library; small ones make small simulations meet
    eviction. ``stock_segments``: what each process is given in advance while it writes at
    no great rate. ``search_ns``: how long collect() searches for a trace before anything
    of it is known; 0: it answers at once.
    """

    pool_bytes: int = 4 << 20
    arena_bytes: int = 4 << 20
    store_bytes: int = 1 << 20
    trace_bytes_max: int = 1 << 20
    reclaim_percent: int = 98
    tombstones: int = 65536
    segment_bytes: int = 65536
    stock_segments: int = 4
    search_ns: int = 0


@dataclass(slots=True, eq=False)
class Segment:
    """64 KiB of a process's arena; ``client`` None: of the keep arena."""

    client: ClientModel | None
    granted_ns: int
    sealed_ns: int = 0
    used_bytes: int = SEGMENT_HEADER_BYTES
    runs: list[Run] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Record:
    """``size`` bytes; ``crumb``: whom it names."""

    size: int
    ticks: int
    crumb: NodeId | None = None
    is_broken: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """What one handle wrote into one segment without a break.

    ``segment`` None: it was lost, there is nothing in the log. ``records``: what stands in
    ``data``. ``is_cut``: it was kept as far as it can be read, and there was more.
    """

    trace: TraceId
    client: ClientModel
    handle: int
    seq: int
    flags: RunFlags
    segment: Segment | None
    granted_ns: int = 0
    data: bytearray = field(default_factory=bytearray)
    records: list[Record] = field(default_factory=list)
    is_cut: bool = False

    def readable_from(self, begin: int) -> list[Record]:
        """From that offset on, up to one that makes no sense."""
        found, at = [], 0
        for record in self.records:
            if at >= begin:
                if record.is_broken:
                    break
                found.append(record)
            at += record.size
        return found


@dataclass(frozen=True, slots=True)
class Loss:
    """A run that was lost as a whole, or a part of one."""

    trace: TraceId
    handle: int
    flags: RunFlags


@dataclass(slots=True, eq=False)
class ThreadModel:
    """``fresh``: runs that the node has not seen closed yet.

    ``untold``: losses beside those in ``losses``, of which the node has seen so many.
    """

    segment: Segment | None = None
    run: Run | None = None
    left: list[Segment] = field(default_factory=list)
    fresh: list[Run] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    untold: int = 0
    untold_seen: int = 0


@dataclass(slots=True, eq=False)
class Handle:
    """One open trace of a process (struct bs_trace)."""

    trace: TraceId
    client: ClientModel
    number: int
    next_seq: int = 0
    next_hop: int = 0
    lossy: bool = False
    closed: bool = False


@dataclass(slots=True, eq=False)
class ClientModel:
    """An attached process. ``untied_ns``: between these two it lost something, of nobody knows what."""

    number: int
    process: Process
    live: bool = True
    stock: deque[Segment] = field(default_factory=deque)
    backed: int = 0
    segments: int = 0
    sealed: int = 0
    next_handle: int = 1
    open: set[int] = field(default_factory=set)
    threads: dict[int, ThreadModel] = field(default_factory=dict)
    triggers: deque[LocalTrigger] = field(default_factory=deque)
    losses_read_ns: int = 0
    untied_ns: tuple[int, int] | None = None
    untied_granted_ns: int = 0
    untied_news_ns: int | None = None

    def in_turn(self) -> list[ThreadModel]:
        """Its threads, by their slots."""
        return [thread for _, thread in sorted(self.threads.items())]

    def in_order_of_taking(self) -> list[ThreadModel]:
        """Its threads, by the segments that they are in."""
        return sorted(self.in_turn(), key=_granted_ns)


_PERCENTAGE = TraceHash(Domain.PERCENTAGE, 0)


def _granted_ns(thread: ThreadModel) -> int:
    return thread.segment.granted_ns if thread.segment is not None else 0


@dataclass(slots=True)
class PoolCounters:
    reclaims: int = 0
    runs_evicted: int = 0
    second_chances: int = 0
    records_lost: int = 0
    payload_bytes: int = 0


@dataclass(slots=True, eq=False)
class NodeState:
    """Of the node itself. ``in_turn``: its processes, as the C library goes through them."""

    config: PoolConfig
    node_id: NodeId
    counters: PoolCounters = field(default_factory=PoolCounters)
    clients: dict[int, ClientModel] = field(default_factory=dict)
    in_turn: list[ClientModel] = field(default_factory=list)
    events: list[DataPlaneEvent] = field(default_factory=list)
    now_ns: int = 0
    percentage_threshold: int = RECORD_ALL
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """Of which traces, by their hashes, some handles may not have been recorded (policy.c)."""

    def is_recorded(self, trace: TraceId) -> bool:
        threshold = self.percentage_threshold
        return threshold == RECORD_ALL or _PERCENTAGE(trace) < threshold

    def is_left_out(self, trace: TraceId) -> bool:
        place = _PERCENTAGE(trace)
        return any(
            low <= place and (place < high or high == RECORD_ALL) for low, high in self.left_out
        )

    def take_triggers(self, client: ClientModel) -> None:
        while client.triggers:
            self.events.append(client.triggers.popleft())

    def check_drained(self, client: ClientModel) -> None:
        if not client.live and client.sealed == 0 and client.number in self.clients:
            del self.clients[client.number]
            # The last takes its place.
            self.in_turn[self.in_turn.index(client)] = self.in_turn[0]
            del self.in_turn[0]
            self.events.append(ClientDrained(client.number))
