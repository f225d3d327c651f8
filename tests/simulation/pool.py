# SPDX-License-Identifier: Apache-2.0
"""PoolModel: an executable model of a node's pool, index and report store.

It says in a few hundred lines what native/src/node.h and abi.h promise, with
no shared memory and no rings: processes append runs to segments, the node
drains, indexes, grants and reclaims. The simulator runs the cores on it, and
property tests hold the C library to the same answers.

What is modelled to the letter: where a record goes (segments, runs, their
numbers and flags), what a segment's reclaim does to each trace in it, the
budget of the pool, tombstones, marks and blocks of the report store, the bytes
of a slice. What is not: rings that are full (the log is the truth, so they
change nothing), threads beyond the slots, malice.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from appliance.core.dataplane import (
    ClientDrained,
    DataPlaneEvent,
    LocalTrigger,
    Slice,
    SliceChanged,
    StoreFull,
    StoreUsage,
    no_room,
)
from formats.slices import (
    Body,
    Breadcrumb,
    HopIn,
    PieceKind,
    Process,
    RunFlags,
    encode_clock,
    encode_piece,
    encode_process,
    encode_record,
)
from protocol.hashing import node_id
from protocol.messages import CRUMBS_MAX, Group, NodeId, SliceFlags, Source, TraceId

SEGMENT_HEADER_BYTES = 64
RUN_HEADER_BYTES = 32
BLOCK_BYTES = 2048
BLOCK_CONTENT_BYTES = 2048 - 32
TICKS_PER_S = 1_000_000_000

_TOMBS = SliceFlags.EVICTED | SliceFlags.ABANDONED


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """As struct bsn_config, in the same units.

    ``segment_bytes`` is 65536 in the C library; small ones make small
    simulations meet eviction. ``stock_segments``: what each process is given in
    advance while it writes at no great rate. ``search_ns``: how long collect() searches
    for a trace before anything of it is known; 0: it answers at once.
    """

    pool_bytes: int = 4 << 20
    arena_bytes: int = 4 << 20
    store_bytes: int = 1 << 20
    trace_bytes_max: int = 1 << 20
    reclaim_percent: int = 98
    tombstones: int = 65536
    segment_bytes: int = 65536
    stock_segments: int = 4
    index_traces: int = 1 << 20
    index_runs: int = 1 << 22
    search_ns: int = 0


@dataclass(slots=True, eq=False)
class Segment:
    """64 KiB of a process's arena; ``client`` None: the keep arena."""

    client: ClientModel | None
    granted_ns: int
    used_bytes: int = SEGMENT_HEADER_BYTES
    runs: list[Run] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Run:
    """What one handle wrote into one segment without a break.

    ``segment`` None: lost, there is nothing in the log. ``copied_bytes`` are
    in the trace's slice, ``told`` are the flags that the slice knows.
    """

    trace: TraceId
    client: ClientModel
    handle: int
    seq: int
    flags: RunFlags
    segment: Segment | None
    data: bytearray = field(default_factory=bytearray)
    crumbs: list[NodeId] = field(default_factory=list)
    indexed: bool = False
    dead: bool = False
    copied_bytes: int = 0
    copied_once: bool = False
    told: RunFlags = RunFlags.NONE


@dataclass(slots=True, eq=False)
class ThreadModel:
    segment: Segment | None = None
    run: Run | None = None
    finished: list[Run] = field(default_factory=list)
    left: list[Segment] = field(default_factory=list)


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
    """An attached process."""

    number: int
    process: Process
    live: bool = True
    stock: deque[Segment] = field(default_factory=deque)
    backed: int = 0
    segments: int = 0
    sealed: int = 0
    next_handle: int = 1
    threads: dict[int, ThreadModel] = field(default_factory=dict)
    triggers: deque[LocalTrigger] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class TraceModel:
    """An entry of the index."""

    runs: list[Run] = field(default_factory=list)
    flags: SliceFlags = SliceFlags.NONE
    active_ns: int = 0
    slice: SliceModel | None = None
    reclaimed: bool = False  # runs left the log while it was collected


@dataclass(slots=True, eq=False)
class SliceModel:
    """A collected trace in the report store."""

    trace: TraceId
    group: Group
    epoch: int
    collected_ns: int
    changed_ns: int
    data: bytearray = field(default_factory=bytearray)
    trimmed_bytes: int = 0
    base_bytes: int = 0
    blocks: int = 1
    flags: SliceFlags = SliceFlags.NONE
    crumbs: dict[NodeId, None] = field(default_factory=dict)
    opened: dict[int, int] = field(default_factory=dict)
    introduced: set[int] = field(default_factory=set)
    clock: tuple[int, int] | None = None
    searched_at_ns: int | None = None  # when the search will be over; None: it is

    @property
    def bytes(self) -> int:
        return self.base_bytes + len(self.data)


@dataclass(slots=True)
class PoolCounters:
    reclaims: int = 0
    traces_evicted: int = 0
    second_chances: int = 0
    records_lost: int = 0
    payload_bytes: int = 0


class PoolModel:
    """A node's data plane and the processes that write into it.

    Implements appliance.core.dataplane.DataPlane; see there and node.h.
    """

    def __init__(self, config: PoolConfig, node: str) -> None:
        self.config = config
        self.counters = PoolCounters()
        self._node_id = node_id(node)
        self._frames_max = config.pool_bytes // config.segment_bytes
        self._threshold = self._frames_max * config.reclaim_percent // 100
        self._keep_max = self._frames_max // 4
        self._arena_segments = config.arena_bytes // config.segment_bytes
        self._frames_used = 0
        self._keep_frames = 0
        self._keep_segment: Segment | None = None
        self._sealed: deque[Segment] = deque()
        self._clients: dict[int, ClientModel] = {}
        self._next_client = 1
        self._index: dict[TraceId, TraceModel] = {}
        self._runs_indexed = 0
        self._tombs: OrderedDict[TraceId, SliceFlags] = OrderedDict()
        self._slices: dict[TraceId, SliceModel] = {}
        # In the C library the first of a store is random; here no two are the same.
        self._next_epoch = 1
        self._store_blocks = 0
        self._changed: dict[TraceId, None] = {}
        self._events: list[DataPlaneEvent] = []
        self._clock = (0, 0)
        self._now_ns = 0
        self.store_was_full_for: set[TraceId] = set()
        self.ever_collected: set[TraceId] = set()
        """Two for the simulator's oracle, which wants to know for ever."""

    # ------------------------------------------------------------ writers

    def add_client(self, pid: int, service: str, now_ns: int) -> ClientModel:
        """A process attaches."""
        self._now_ns = now_ns
        client = ClientModel(self._next_client, Process(pid, service))
        self._next_client += 1
        self._clients[client.number] = client
        self._grant(client)
        return client

    def exit_client(self, client: ClientModel, now_ns: int) -> None:
        """A process dies; what it had open stays unfinished."""
        self._now_ns = now_ns
        self._drain(open_too=True)
        client.live = False
        self._frames_used -= len(client.stock) + client.backed
        client.segments -= len(client.stock) + client.backed
        client.stock.clear()
        client.backed = 0
        for thread in client.threads.values():
            if thread.segment is not None:
                thread.left.append(thread.segment)
            self._seal_left(thread)
            thread.segment = thread.run = None
        for found in self._slices.values():
            if found.opened.pop(client.number, 0) > 0:
                self._append(found, encode_piece(PieceKind.EXIT, client=client.number))
                self._touch(found)
        self._check_drained(client)

    def open(self, client: ClientModel, trace: TraceId) -> Handle:
        handle = Handle(trace, client, client.next_handle)
        client.next_handle += 1
        return handle

    def write(self, handle: Handle, thread: int, body: Body, ticks: int) -> bool:
        """Write one record; False when it was lost."""
        encoded = encode_record(body, ticks)
        self.counters.payload_bytes += len(encoded)
        writer = handle.client.threads.setdefault(thread, ThreadModel())
        run = self._run_with_room(writer, handle, len(encoded))
        if run is None:
            self.counters.records_lost += 1
            handle.lossy = True
            if writer.run is not None:
                writer.run.flags |= RunFlags.LOSSY
            return False
        run.data += encoded
        assert run.segment is not None
        run.segment.used_bytes += len(encoded)
        if isinstance(body, Breadcrumb | HopIn) and body.node_id != self._node_id:
            run.crumbs.append(body.node_id)
        return True

    def close(self, handle: Handle, thread: int) -> None:
        """Close the handle: its last run says so."""
        handle.closed = True
        writer = handle.client.threads.setdefault(thread, ThreadModel())
        if not self._is_of(writer.run, handle):
            if handle.next_seq == 0 and not handle.lossy:
                return
            self._end_run(writer)
            self._begin_run(writer, handle, 0)
        self._end_run(writer, RunFlags.LAST)

    def trigger(
        self,
        client: ClientModel,
        trace: TraceId,
        name: str,
        now_ns: int,
        *,
        why: str = "",
        laterals: tuple[TraceId, ...] = (),
        source: Source = Source.APPLICATION,
    ) -> None:
        """A process fires a trigger; the next poll tells."""
        client.triggers.append(
            LocalTrigger(client.number, now_ns, name, trace, laterals, why, source)
        )

    def stock_is_low(self, client: ClientModel) -> bool:
        """Whether the client rings the doorbell for segments."""
        return len(client.stock) * 2 <= self.config.stock_segments

    # -------------------------------------------------------------- node

    def clock_pair(self, ticks: int, realtime_ns: int) -> None:
        """The relation of record ticks to Unix time, from now on."""
        self._clock = (ticks, realtime_ns)

    def poll(self, now_ns: int) -> list[DataPlaneEvent]:
        """Drain, index, copy, grant, reclaim; return what happened."""
        self._now_ns = now_ns
        self._drain(open_too=False)
        for client in list(self._clients.values()):
            while client.triggers:
                self._events.append(client.triggers.popleft())
            self._grant(client)
        self._end_searches()
        events, self._events = self._events, []
        changed = [SliceChanged(trace) for trace in self._changed if trace in self._slices]
        self._changed.clear()
        return [*events, *changed]

    def restart(self) -> None:
        """A new daemon finds what the memfds hold: logs, store, tombstones.

        It does not know which runs an evicted trace has left, but it knows
        that the trace was evicted.
        """
        self._drain(open_too=True)
        self._events.clear()
        self._changed.clear()
        for entry in self._index.values():
            for run in entry.runs:
                run.dead = False
        for found in self._slices.values():
            if found.searched_at_ns is not None:
                found.searched_at_ns = self._now_ns + self.config.search_ns

    def lose_store(self) -> None:
        """The report store is gone, as after a restart without the fd store.

        Its collected traces are so no more; what of them was reclaimed cannot be
        copied again.
        """
        for found in list(self._slices.values()):
            self.release(found.trace, abandoned=False, now_ns=self._now_ns)
        self._changed.clear()

    def horizon_ns(self) -> int:
        """How far back the pool reaches; 0 before the first reclaim."""
        if not self.counters.reclaims or not self._sealed:
            return 0
        return max(0, self._now_ns - self._sealed[0].granted_ns)

    @property
    def frames_used(self) -> int:
        return self._frames_used

    @property
    def frames_max(self) -> int:
        return self._frames_max

    def flags_of(self, trace: TraceId) -> SliceFlags:
        """What is remembered against a trace, collected or not."""
        entry = self._index.get(trace)
        return self._tombs.get(trace, SliceFlags.NONE) if entry is None else entry.flags

    def records_of(self, trace: TraceId) -> dict[tuple[int, int, int], bytes]:
        """What the log still holds of a trace: (client, handle, seq) to its bytes."""
        self._drain(open_too=True)
        entry = self._index.get(trace)
        return {
            (run.client.number, run.handle, run.seq): bytes(run.data)
            for run in (entry.runs if entry is not None else ())
            if not run.dead and run.segment is not None
        }

    # ----------------------------------------------------------- slices

    def collect(self, trace: TraceId, group: Group, now_ns: int) -> Slice:
        found = self._slices.get(trace)
        if found is not None:
            return self._view(found)
        self._now_ns = now_ns
        self._drain(open_too=True)
        if self._store_blocks >= self._blocks_max:
            self.store_was_full_for.add(trace)
            return no_room(trace, group, now_ns)
        entry = self._entry(trace)
        found = SliceModel(trace, group, self._next_epoch, now_ns, now_ns, flags=entry.flags)
        self._next_epoch += 1
        if self.config.search_ns:
            found.searched_at_ns = now_ns + self.config.search_ns
        entry.slice = found
        self._slices[trace] = found
        self.ever_collected.add(trace)
        self._store_blocks += 1
        for run in entry.runs:
            if not run.dead:
                self._copy(found, run)
        return self._view(found)

    def slice(self, trace: TraceId) -> Slice | None:
        found = self._slices.get(trace)
        return None if found is None else self._view(found)

    def read(self, trace: TraceId, offset: int, size: int) -> bytes:
        found = self._searched(trace)
        if offset < found.trimmed_bytes:
            raise ValueError(f"offset {offset} was trimmed at {found.trimmed_bytes}")
        begin = offset - found.base_bytes
        return bytes(found.data[begin : begin + size])

    def trim(self, trace: TraceId, offset: int) -> None:
        found = self._searched(trace)
        found.trimmed_bytes = max(found.trimmed_bytes, min(offset, found.bytes))
        whole = (found.trimmed_bytes - found.base_bytes) // BLOCK_CONTENT_BYTES
        del found.data[: whole * BLOCK_CONTENT_BYTES]
        found.base_bytes += whole * BLOCK_CONTENT_BYTES
        self._count_blocks(found)

    def release(self, trace: TraceId, *, abandoned: bool, now_ns: int) -> None:
        self._now_ns = now_ns
        self._drain(open_too=False)
        found = self._slices.pop(trace, None)
        if found is None:
            return
        self._store_blocks -= found.blocks
        entry = self._entry(trace)
        entry.slice = None
        entry.active_ns = now_ns
        if abandoned:
            self._evict(entry, SliceFlags.ABANDONED)
        elif entry.reclaimed:
            # What is left may not pass for the whole, should it be triggered again.
            self._evict(entry, SliceFlags.EVICTED)
        for run in entry.runs:
            run.copied_bytes = 0
            run.copied_once = False
            run.told = RunFlags.NONE
        self._drop_entry_if_empty(trace, entry)

    def slices(self) -> Iterable[Slice]:
        return [self._view(found) for found in self._slices.values()]

    def next_search_ns(self) -> int | None:
        """When the next search will be over, which poll() tells."""
        ends = [s.searched_at_ns for s in self._slices.values() if s.searched_at_ns is not None]
        return min(ends, default=None)

    def store_usage(self) -> StoreUsage:
        return StoreUsage(self._store_blocks * BLOCK_BYTES, self._blocks_max * BLOCK_BYTES)

    # ------------------------------------------------- inside: writers

    @staticmethod
    def _is_of(run: Run | None, handle: Handle) -> bool:
        return run is not None and run.client is handle.client and run.handle == handle.number

    def _room(self, writer: ThreadModel) -> int:
        if writer.segment is None:
            return 0
        return self.config.segment_bytes - writer.segment.used_bytes

    def _take_segment(self, writer: ThreadModel, client: ClientModel) -> bool:
        if not client.stock:
            return False
        if writer.segment is not None:
            writer.left.append(writer.segment)
        writer.segment = client.stock.popleft()
        return True

    def _begin_run(self, writer: ThreadModel, handle: Handle, size: int) -> None:
        flags = RunFlags.LOSSY if handle.lossy else RunFlags.NONE
        if handle.next_seq == 0:
            flags |= RunFlags.FIRST
        segment = None
        if self._room(writer) >= RUN_HEADER_BYTES + size or self._take_segment(
            writer, handle.client
        ):
            segment = writer.segment
        run = Run(handle.trace, handle.client, handle.number, handle.next_seq, flags, segment)
        handle.next_seq += 1
        writer.run = run
        if segment is None:
            handle.lossy = True
            run.flags |= RunFlags.LOSSY
        else:
            segment.used_bytes += RUN_HEADER_BYTES
            segment.runs.append(run)

    def _end_run(self, writer: ThreadModel, flags: RunFlags = RunFlags.NONE) -> None:
        if writer.run is not None:
            writer.run.flags |= flags | RunFlags.CLOSED
            writer.finished.append(writer.run)
            writer.run = None

    def _run_with_room(self, writer: ThreadModel, handle: Handle, size: int) -> Run | None:
        while True:
            if not self._is_of(writer.run, handle):
                self._end_run(writer)
                self._begin_run(writer, handle, size)
            run = writer.run
            assert run is not None
            if run.segment is None:
                room = self._room(writer) >= RUN_HEADER_BYTES + size
                if not room and not self._take_segment(writer, handle.client):
                    return None
            elif self._room(writer) >= size:
                return run
            self._end_run(writer)

    # ------------------------------------------------ inside: draining

    def _drain(self, *, open_too: bool) -> None:
        for client in list(self._clients.values()):
            for thread in client.threads.values():
                for run in thread.finished:
                    self._take_in(run)
                thread.finished.clear()
                self._seal_left(thread)
                run_open = thread.run
                if run_open is not None and (open_too or run_open.trace in self._slices):
                    self._take_in(run_open)

    def _seal_left(self, thread: ThreadModel) -> None:
        for segment in thread.left:
            self._sealed.append(segment)
            if segment.client is not None:
                segment.client.sealed += 1
        thread.left.clear()

    def _take_in(self, run: Run) -> None:
        """Index a run, or see how it grew."""
        while self._index_is_full(run.trace) and self._sealed:
            self._reclaim(second_chance=True)
        entry = self._entry(run.trace)
        entry.active_ns = self._now_ns
        if RunFlags.LOSSY in run.flags:
            entry.flags |= SliceFlags.LOSSY
        if not run.indexed:
            run.indexed = True
            entry.runs.append(run)
            self._runs_indexed += 1
        if entry.slice is not None:
            self._copy(entry.slice, run)

    def _index_is_full(self, trace: TraceId) -> bool:
        if self._runs_indexed >= self.config.index_runs:
            return True
        return trace not in self._index and len(self._index) >= self.config.index_traces

    def _entry(self, trace: TraceId) -> TraceModel:
        entry = self._index.get(trace)
        if entry is None:
            entry = self._index[trace] = TraceModel(
                flags=self._tombs.pop(trace, SliceFlags.NONE), active_ns=self._now_ns
            )
        return entry

    def _drop_entry_if_empty(self, trace: TraceId, entry: TraceModel) -> None:
        if entry.runs or entry.slice is not None:
            return
        del self._index[trace]
        if entry.flags:
            self._tombs[trace] = entry.flags
            while len(self._tombs) > self.config.tombstones:
                self._tombs.popitem(last=False)

    # ----------------------------------------------- inside: reclaiming

    def _grant(self, client: ClientModel) -> None:
        while client.live and len(client.stock) < self.config.stock_segments:
            if not self._take_frame(client):
                return
            client.stock.append(Segment(client, self._now_ns))

    def _take_frame(self, client: ClientModel | None) -> bool:
        """Memory for a segment, as frame_take() in pool.c."""
        chances = len(self._sealed)
        while True:
            if client is not None and client.backed:
                client.backed -= 1
                return True
            full = client is not None and client.segments >= self._arena_segments
            if not full and (self._frames_used < self._threshold or self._steal(client)):
                return self._new_frame(client)
            victim = None
            if full:
                victim = next((s for s in self._sealed if s.client is client), None)
                if victim is None:
                    return False
            if self._sealed:
                self._reclaim(second_chance=chances > 0, victim=victim)
                chances -= 1
                continue
            if self._frames_used < self._frames_max:
                return self._new_frame(client)
            return False

    def _new_frame(self, client: ClientModel | None) -> bool:
        self._frames_used += 1
        if client is not None:
            client.segments += 1
        return True

    def _steal(self, for_whom: ClientModel | None) -> bool:
        for client in self._clients.values():
            if client is not for_whom and client.backed:
                client.backed -= 1
                client.segments -= 1
                self._frames_used -= 1
                return True
        return False

    def _reclaim(self, *, second_chance: bool, victim: Segment | None = None) -> None:
        """Reclaim the segment that was sealed first."""
        if second_chance:
            for client in self._clients.values():
                for thread in client.threads.values():
                    if thread.run is not None and not thread.run.indexed:
                        self._index_open(thread.run)
        segment = victim if victim is not None else self._sealed[0]
        for trace in dict.fromkeys(run.trace for run in segment.runs if run.indexed):
            entry = self._index.get(trace)
            if entry is not None:
                self._evict_from(trace, entry, segment, second_chance=second_chance)
        segment.runs.clear()
        self._sealed.remove(segment)
        self.counters.reclaims += 1
        client_of = segment.client
        if client_of is None:
            self._keep_frames -= 1
            self._frames_used -= 1
            return
        client_of.sealed -= 1
        if client_of.live:
            client_of.backed += 1
        else:
            client_of.segments -= 1
            self._frames_used -= 1
            self._check_drained(client_of)

    def _index_open(self, run: Run) -> None:
        entry = self._entry(run.trace)
        entry.active_ns = self._now_ns
        run.indexed = True
        entry.runs.append(run)
        self._runs_indexed += 1

    def _evict_from(
        self, trace: TraceId, entry: TraceModel, segment: Segment, *, second_chance: bool
    ) -> None:
        here = [run for run in entry.runs if run.segment is segment]
        if entry.slice is None and any(not run.dead for run in here):
            may_stay = second_chance and not entry.flags & _TOMBS
            if may_stay and self._deserves(entry) and self._keep(entry, segment):
                self.counters.second_chances += 1
                return
            self.counters.traces_evicted += 1
            self._evict(entry, SliceFlags.EVICTED)
        entry.reclaimed = entry.reclaimed or (entry.slice is not None and bool(here))
        self._unlink(entry, here)
        self._drop_entry_if_empty(trace, entry)

    def _unlink(self, entry: TraceModel, runs: list[Run]) -> None:
        gone = set(map(id, runs))
        # A loss has no place in the log; it goes with the runs around it.
        left = [run for run in entry.runs if id(run) not in gone]
        if not any(run.segment is not None for run in left):
            left = []
        self._runs_indexed -= len(entry.runs) - len(left)
        entry.runs = left

    def _evict(self, entry: TraceModel, why: SliceFlags) -> None:
        for run in entry.runs:
            run.dead = True
        entry.flags |= why

    def _deserves(self, entry: TraceModel) -> bool:
        """Active in the youngest quarter of the horizon, or open."""
        if self._now_ns - entry.active_ns <= self.horizon_ns() // 4:
            return True
        opened = 0
        for run in entry.runs:
            if not run.dead and run.client.live:
                opened += RunFlags.FIRST in run.flags
                opened -= RunFlags.LAST in run.flags
        return opened > 0

    def _keep(self, entry: TraceModel, segment: Segment) -> bool:
        """Copy the trace's runs of a segment into the keep arena."""
        for run in entry.runs:
            if run.segment is not segment:
                continue
            size = RUN_HEADER_BYTES + len(run.data)
            into = self._keep_segment
            if into is None or self.config.segment_bytes - into.used_bytes < size:
                if self._keep_frames >= self._keep_max or self._frames_used >= self._frames_max:
                    return False
                if into is not None:
                    self._sealed.append(into)
                into = self._keep_segment = Segment(None, self._now_ns)
                self._keep_frames += 1
                self._frames_used += 1
            into.used_bytes += size
            into.runs.append(run)
            run.segment = into
        return True

    def _check_drained(self, client: ClientModel) -> None:
        if not client.live and client.sealed == 0 and client.number in self._clients:
            del self._clients[client.number]
            self._events.append(ClientDrained(client.number))

    # ------------------------------------------------- inside: copying

    @property
    def _blocks_max(self) -> int:
        return self.config.store_bytes // BLOCK_BYTES

    def _searched(self, trace: TraceId) -> SliceModel:
        found = self._slices[trace]
        if found.searched_at_ns is not None:
            raise ValueError(f"{trace.hex()} is still searched for: nothing of it is known yet")
        return found

    def _end_searches(self) -> None:
        for found in self._slices.values():
            if found.searched_at_ns is not None and found.searched_at_ns <= self._now_ns:
                found.searched_at_ns = None
                self._changed[found.trace] = None

    def _view(self, found: SliceModel) -> Slice:
        live = {number for number, client in self._clients.items() if client.live}
        opened = sum(max(0, n) for client, n in found.opened.items() if client in live)
        # Meanwhile there is what was copied so far, which says nothing: here nothing, then all.
        searching = found.searched_at_ns is not None
        left_ns = max(0, (found.searched_at_ns or 0) - self._now_ns)
        return Slice(
            found.trace,
            found.group,
            found.epoch,
            0 if left_ns > self.config.search_ns // 2 else found.bytes,
            found.trimmed_bytes,
            found.collected_ns,
            found.changed_ns,
            0 if searching else opened,
            SliceFlags.NONE if searching else found.flags,
            () if searching else tuple(found.crumbs),
            searching,
        )

    def _touch(self, found: SliceModel) -> None:
        found.changed_ns = self._now_ns
        self._changed[found.trace] = None

    def _copy(self, found: SliceModel, run: Run) -> None:
        """Append what is new of a run to its trace's slice."""
        number = run.client.number
        news = run.flags & ~run.told
        if run.told or run.copied_bytes:
            news &= ~RunFlags.CLOSED
        fresh = bytes(run.data[run.copied_bytes :])
        if not fresh and not news and run.copied_once:
            return
        if RunFlags.FIRST in news:
            found.opened[number] = found.opened.get(number, 0) + 1
        if RunFlags.LAST in news:
            found.opened[number] = found.opened.get(number, 0) - 1
        if RunFlags.LOSSY in run.flags:
            found.flags |= SliceFlags.LOSSY
        run.told = run.flags
        run.copied_once = True
        self._touch(found)
        if run.segment is None:
            self._append(found, encode_piece(PieceKind.LOSS, client=number))
            return
        pieces = b""
        if number not in found.introduced:
            pieces += encode_process(number, run.client.process)
        if found.clock != self._clock:
            pieces += encode_clock(*self._clock, TICKS_PER_S)
        pieces += encode_piece(
            PieceKind.RUN,
            fresh,
            flags=run.flags,
            client=number,
            handle=run.handle,
            seq=run.seq,
            start=run.copied_bytes,
        )
        if self._append(found, pieces):
            found.introduced.add(number)
            found.clock = self._clock
            found.flags |= SliceFlags.HELD
        run.copied_bytes = len(run.data)
        for crumb in run.crumbs:
            if crumb in found.crumbs:
                continue
            if len(found.crumbs) < CRUMBS_MAX:
                found.crumbs[crumb] = None
            else:
                found.flags |= SliceFlags.CRUMBS_CUT

    def _append(self, found: SliceModel, pieces: bytes) -> bool:
        if found.flags & (SliceFlags.TRUNCATED | SliceFlags.STORE_FULL):
            return False
        if found.bytes + len(pieces) > self.config.trace_bytes_max:
            found.flags |= SliceFlags.TRUNCATED
            return False
        blocks = 1 + -(-(len(found.data) + len(pieces)) // BLOCK_CONTENT_BYTES)
        if self._store_blocks + blocks - found.blocks > self._blocks_max:
            found.flags |= SliceFlags.STORE_FULL
            self.store_was_full_for.add(found.trace)
            self._events.append(StoreFull(found.trace))
            return False
        found.data += pieces
        self._count_blocks(found)
        return True

    def _count_blocks(self, found: SliceModel) -> None:
        blocks = 1 + -(-len(found.data) // BLOCK_CONTENT_BYTES)
        self._store_blocks += blocks - found.blocks
        found.blocks = blocks
