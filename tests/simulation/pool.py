# SPDX-License-Identifier: Apache-2.0
"""PoolModel: an executable model of a node's data plane.

It says in a few hundred lines what native/src/node.h and abi.h promise, with no shared
memory and no rings: processes append runs to segments, the node observes, copies, grants
and reclaims. The simulator runs the cores on it; tests/simulation/test_differential.py
gives it and the C library the same calls and compares all answers, so neither can change
alone.

Modelled to the letter: what a run is and what it says, what a segment's reclaim does to
each run in it, what is remembered, what a slice is made of byte by byte, its flags, open
handles and crumbs, marks and blocks of the report store. Not modelled: how many segments
a process is given in advance (the C library looks at its rate), how kept runs share their
arena, fingerprints that two traces have in common, malice.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
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
RUN_BYTES = 28  # its header at most, and its entry in the directory
BLOCK_BYTES = 2048
BLOCK_CONTENT_BYTES = 2048 - 32
LOSSES_MAX = 64  # of a thread, that the node was not told yet
TICKS_PER_S = 1_000_000_000

_PIECE_BYTES = len(encode_piece(PieceKind.RUN))
_WHOLE = RunFlags.FIRST | RunFlags.LAST


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


@dataclass(slots=True, eq=False)
class Run:
    """What one handle wrote into one segment without a break.

    ``segment`` None: it was lost, there is nothing in the log. ``records``: of each in
    ``data`` its size, and whom it names.
    """

    trace: TraceId
    client: ClientModel
    handle: int
    seq: int
    flags: RunFlags
    segment: Segment | None
    granted_ns: int = 0
    data: bytearray = field(default_factory=bytearray)
    records: list[tuple[int, NodeId | None]] = field(default_factory=list)
    last_ticks: int = 0


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


@dataclass(slots=True)
class Met:
    """What a search met of one handle."""

    client: ClientModel
    live: bool
    first: bool = False
    last: bool = False
    lossy: bool = False
    runs: int = 0
    seq_max: int = 0


@dataclass(slots=True, eq=False)
class SliceModel:
    """A collected trace in the report store.

    ``copied``: bytes of each run that are in it. ``open`` counts handles by client: those
    in ``opened``, and ``unlisted`` ones, of which a predecessor knew which they are.
    ``searched_at_ns``: when the search is over; None: it is. ``losses``: those that were
    told while it was searched for.
    """

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
    open: dict[int, int] = field(default_factory=dict)
    opened: set[tuple[int, int]] = field(default_factory=set)
    unlisted: dict[int, int] = field(default_factory=dict)
    copied: dict[Run, int] = field(default_factory=dict)
    introduced: set[int] = field(default_factory=set)
    clock: tuple[int, int] | None = None
    searched_at_ns: int | None = None
    losses: list[tuple[ClientModel, Loss]] = field(default_factory=list)
    adopted: bool = False
    is_peek: bool = False

    @property
    def bytes(self) -> int:
        return self.base_bytes + len(self.data)

    @property
    def open_handles(self) -> int:
        return sum(self.open.values())

    def open_handle(self, client: int, handle: int) -> None:
        if (client, handle) not in self.opened:
            self.opened.add((client, handle))
            self.open[client] += 1

    def close_handle(self, client: int, handle: int) -> None:
        """Nothing, if it began before all that the slice has of it."""
        if (client, handle) in self.opened:
            self.opened.remove((client, handle))
        elif self.unlisted.get(client):
            self.unlisted[client] -= 1
        else:
            return
        self.open[client] -= 1

    def close_all(self, client: int) -> None:
        self.opened = {one for one in self.opened if one[0] != client}
        self.open[client] = self.unlisted[client] = 0

    def forget_handles(self) -> None:
        """A successor knows how many are open, and not which."""
        self.opened.clear()
        self.open = {number: count for number, count in self.open.items() if count}
        self.unlisted = dict(self.open)

    def state(self) -> tuple[int, SliceFlags, int, int]:
        """What a change of is told."""
        return self.bytes, self.flags, len(self.crumbs), self.open_handles


@dataclass(slots=True)
class PoolCounters:
    reclaims: int = 0
    runs_evicted: int = 0
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
        self._in_turn: list[ClientModel] = []
        self._next_client = 1
        self._gone: OrderedDict[TraceId, SliceFlags] = OrderedDict()
        self._slices: dict[TraceId, SliceModel] = {}
        # In the C library the first of a store is random; here no two are the same.
        self._next_epoch = 1
        self._store_blocks = 0
        self._changed: dict[TraceId, None] = {}
        self._events: list[DataPlaneEvent] = []
        self._clock = (0, 0)
        self._now_ns = 0
        self._granted_ns = 0
        self._untied_to_ns = 0
        self._told_ns = 0
        self._sealed_ns = 0
        self._reclaimed_to_ns = 0
        self.store_was_full_for: set[TraceId] = set()
        self.ever_collected: set[TraceId] = set()
        """Two for the simulator's oracle, which wants to know for ever."""

    # ------------------------------------------------------------ writers

    def add_client(self, pid: int, service: str, now_ns: int) -> ClientModel:
        """A process attaches."""
        self._now_ns = now_ns
        client = ClientModel(self._next_client, Process(pid, service), losses_read_ns=now_ns)
        self._next_client += 1
        self._clients[client.number] = client
        # The latest first, as the C library goes through them.
        self._in_turn.insert(0, client)
        self._grant(client)
        return client

    def exit_client(self, client: ClientModel, now_ns: int) -> None:
        """A process dies; what it had open stays unfinished."""
        self._now_ns = now_ns
        self._observe(client)
        self._frames_used -= len(client.stock) + client.backed
        client.segments -= len(client.stock) + client.backed
        client.stock.clear()
        client.backed = 0
        for thread in client.in_order_of_taking():
            if thread.segment is not None:
                thread.left.append(thread.segment)
            thread.segment = thread.run = None
            self._seal_left(thread)
        client.live = False
        self._suspect()
        self._close_gone()
        self._check_drained(client)

    def open(self, client: ClientModel, trace: TraceId) -> Handle:
        handle = Handle(trace, client, client.next_handle)
        client.next_handle += 1
        client.open.add(handle.number)
        return handle

    def write(self, handle: Handle, thread: int, body: Body, ticks: int) -> bool:
        """Write one record; False when it was lost."""
        encoded = encode_record(body, ticks)
        self.counters.payload_bytes += len(encoded)
        writer = handle.client.threads.setdefault(thread, ThreadModel())
        run = self._run_with_room(writer, handle, len(encoded))
        if run is None:
            self.counters.records_lost += 1
            return False
        run.data += encoded
        run.last_ticks = ticks or run.last_ticks
        assert run.segment is not None
        run.segment.used_bytes += len(encoded)
        is_crumb = isinstance(body, Breadcrumb | HopIn) and body.node_id != self._node_id
        run.records.append((len(encoded), body.node_id if is_crumb else None))  # type: ignore[union-attr]
        return True

    def close(self, handle: Handle, thread: int) -> None:
        """Close the handle: its last run says so."""
        handle.closed = True
        handle.client.open.discard(handle.number)
        writer = handle.client.threads.setdefault(thread, ThreadModel())
        run = writer.run if self._is_of(writer.run, handle) else None
        # The last must be the one with the highest number.
        if run is not None and run.segment is not None and run.seq + 1 != handle.next_seq:
            self._end_run(writer)
        if not self._is_of(writer.run, handle) and handle.next_seq:
            self._end_run(writer)
            self._begin_run(writer, handle, 0)
        if self._is_of(writer.run, handle):
            self._end_run(writer, RunFlags.LAST)
        for other in handle.client.threads.values():
            if self._is_of(other.run, handle):
                self._end_run(other)

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
        """Observe, copy, search, grant, reclaim; return what happened."""
        self._now_ns = now_ns
        for client in list(self._in_turn):
            self._observe(client)
            while client.triggers:
                self._events.append(client.triggers.popleft())
        self._watch()
        self._end_searches()
        self._suspect()
        self._told_ns = now_ns
        for client in list(self._in_turn):
            self._grant(client)
        events, self._events = self._events, []
        changed = [SliceChanged(trace) for trace in self._changed if trace in self._slices]
        self._changed.clear()
        return [*events, *changed]

    def restart(self) -> None:
        """A new daemon finds what the memfds hold: segments, store, what is gone.

        What it does not know: events that nobody took, who was introduced in a slice, when
        losses were that nobody can tell the trace of (but the latest); so each process that
        ever had such a loss may just have had it, since the last poll, which told slices of
        all that was before.
        """
        self._events.clear()
        self._changed.clear()
        self._in_turn.sort(key=lambda client: -client.number)
        # It begins one of its own.
        if self._keep_segment is not None:
            self._seal(self._keep_segment)
            self._keep_segment = None
        for client in self._in_turn:
            client.untied_ns = None
            client.losses_read_ns = 0
            for thread in client.in_turn():
                thread.untold_seen = 0
        for found in self._slices.values():
            found.introduced.clear()
            found.clock = None
            found.adopted = True
            found.forget_handles()
            self._changed[found.trace] = None
            if found.searched_at_ns is not None:
                self._empty(found)
                found.searched_at_ns = self._now_ns + self.config.search_ns
        for client in self._in_turn:
            if not client.live:
                self._read_losses(client)
        self._suspect()

    def lose_store(self) -> None:
        """The report store is gone, as after a restart without the fd store.

        Its collected traces are so no more; what of them was reclaimed cannot be
        copied again.
        """
        for found in list(self._slices.values()):
            self._remember(found.trace, SliceFlags.NONE)
            self._drop(found)
        self._changed.clear()

    def horizon_ns(self) -> int:
        """How far back the pool reaches; 0 before the first reclaim."""
        return max(0, self._now_ns - self._reclaimed_to_ns) if self._reclaimed_to_ns else 0

    @property
    def frames_used(self) -> int:
        return self._frames_used

    @property
    def frames_max(self) -> int:
        return self._frames_max

    def peek(self, trace: TraceId) -> tuple[SliceFlags, int, bytes]:
        """Flags, open handles and bytes of its slice, as it is or as it would be."""
        found = self._slices.get(trace)
        if found is None:
            for client in self._in_turn:
                self._observe(client)
            found = SliceModel(trace, Group("", trace), 0, 0, 0, searched_at_ns=0, is_peek=True)
            self._search(found)
        return found.flags, found.open_handles, bytes(found.data)

    def records_of(self, trace: TraceId) -> dict[tuple[int, int, int], bytes]:
        """What the log still holds of a trace: (client, handle, seq) to its bytes."""
        return {
            (run.client.number, run.handle, run.seq): bytes(run.data)
            for segment in self._in_order()
            for run in segment.runs
            if run.trace == trace
        }

    def flags_of(self, trace: TraceId) -> SliceFlags:
        """What would be said against a trace, collected or not."""
        flags = self.peek(trace)[0] & ~SliceFlags.HELD
        return flags | self._gone.get(trace, SliceFlags.NONE)

    # ----------------------------------------------------------- slices

    def collect(self, trace: TraceId, group: Group, now_ns: int) -> Slice:
        self._now_ns = max(now_ns, self._now_ns)
        for client in self._in_turn:
            self._observe(client)
        found = self._slices.get(trace)
        if found is not None:
            return self._view(found)
        if self._store_blocks >= self._blocks_max:
            self.store_was_full_for.add(trace)
            return no_room(trace, group, now_ns)
        found = SliceModel(trace, group, self._next_epoch, now_ns, now_ns)
        self._next_epoch += 1
        found.searched_at_ns = now_ns + self.config.search_ns
        self._slices[trace] = found
        self.ever_collected.add(trace)
        self._store_blocks += 1
        self._touch(found)
        if not self.config.search_ns:
            self._search(found)
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
        self._now_ns = max(now_ns, self._now_ns)
        found = self._slices.get(trace)
        if found is None:
            return
        self._remember(trace, SliceFlags.ABANDONED if abandoned else SliceFlags.NONE)
        self._drop(found)

    def slices(self) -> Iterable[Slice]:
        return [self._view(found) for found in self._slices.values()]

    def next_search_ns(self) -> int | None:
        """When the next search will be over, which poll() tells."""
        ends = [s.searched_at_ns for s in self._slices.values() if s.searched_at_ns is not None]
        return min(ends, default=None)

    def store_usage(self) -> StoreUsage:
        # The C library's first block is the header, which counts.
        return StoreUsage(self._store_blocks * BLOCK_BYTES, self._blocks_max * BLOCK_BYTES)

    # ------------------------------------------------- inside: writers

    @staticmethod
    def _is_of(run: Run | None, handle: Handle) -> bool:
        return run is not None and run.client is handle.client and run.handle == handle.number

    def _fits(self, writer: ThreadModel, size: int) -> bool:
        """Whether so much has room in the thread's segment."""
        if writer.segment is None:
            return False
        return self.config.segment_bytes - writer.segment.used_bytes >= size

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
        if self._fits(writer, RUN_BYTES + size) or self._take_segment(writer, handle.client):
            segment = writer.segment
        run = Run(handle.trace, handle.client, handle.number, handle.next_seq, flags, segment)
        handle.next_seq += 1
        writer.run = run
        if segment is None:
            handle.lossy = True
            run.flags |= RunFlags.LOSSY
        else:
            segment.used_bytes += RUN_BYTES
            segment.runs.append(run)
            run.granted_ns = segment.granted_ns
            writer.fresh.append(run)

    def _end_run(self, writer: ThreadModel, flags: RunFlags = RunFlags.NONE) -> None:
        run = writer.run
        if run is None:
            return
        writer.run = None
        if run.segment is not None:
            run.flags |= flags | RunFlags.CLOSED
        elif len(writer.losses) < LOSSES_MAX:
            writer.losses.append(Loss(run.trace, run.handle, run.flags & RunFlags.FIRST | flags))
        else:
            writer.untold += 1

    def _run_with_room(self, writer: ThreadModel, handle: Handle, size: int) -> Run | None:
        while True:
            if not self._is_of(writer.run, handle):
                self._end_run(writer)
                self._begin_run(writer, handle, size)
            run = writer.run
            assert run is not None
            if run.segment is None:
                if not self._fits(writer, RUN_BYTES + size) and not self._take_segment(
                    writer, handle.client
                ):
                    return None
            elif self._fits(writer, size):
                return run
            self._end_run(writer)

    # ------------------------------------------------ inside: observing

    def _observe(self, client: ClientModel) -> None:
        """See what is full, and what was lost."""
        if not client.live:
            return
        for thread in client.in_turn():
            self._seal_left(thread)
        self._read_losses(client)

    def _read_losses(self, client: ClientModel) -> None:
        untied = False
        for thread in client.in_turn():
            for loss in thread.losses:
                self._remember(loss.trace, SliceFlags.LOSSY)
                found = self._slices.get(loss.trace)
                if found is not None:
                    self._tell_loss(found, client, loss)
            thread.losses.clear()
            untied |= thread.untold != thread.untold_seen
            thread.untold_seen = thread.untold
        if untied:
            self._lose_untied(client)
        client.losses_read_ns = self._now_ns

    def _tell_loss(self, found: SliceModel, client: ClientModel, loss: Loss) -> None:
        self._count(found, client, loss.handle, loss.flags, is_new=True)
        found.flags |= SliceFlags.LOSSY
        if found.searched_at_ns is not None:
            found.losses.append((client, loss))
        self._introduce(found, client)
        piece = encode_piece(PieceKind.LOSS, flags=loss.flags, client=client.number)
        self._append(found, piece)
        self._touch(found)

    def _lose_untied(self, client: ClientModel) -> None:
        """It lost something of nobody knows which traces, since the last look."""
        before, since_ns = client.untied_ns, client.losses_read_ns
        begin_ns = since_ns
        is_left = any(s.granted_ns <= client.untied_granted_ns for s in self._in_use(client))
        if before is not None and since_ns >= before[0] and is_left:
            begin_ns = before[0]
        client.untied_granted_ns = self._granted_ns
        client.untied_ns = (begin_ns, max(self._granted_ns, self._now_ns))
        self._untied_to_ns = client.untied_ns[1]
        news_ns = max(since_ns, self._told_ns)
        if client.untied_news_ns is None or news_ns < client.untied_news_ns:
            client.untied_news_ns = news_ns

    def _suspect(self) -> None:
        """Slices of which something may have been lost so, as far as nobody has looked yet."""
        for client in self._in_turn:
            since_ns, client.untied_news_ns = client.untied_news_ns, None
            if since_ns is not None:
                self._suspect_since(client, since_ns)

    def _suspect_since(self, client: ClientModel, since_ns: int) -> None:
        for found in self._slices.values():
            if SliceFlags.MAYBE_LOSSY in found.flags:
                continue
            is_since = found.changed_ns >= since_ns
            has_part = client.number in found.open
            if (found.adopted and is_since) or (
                has_part and (found.open[client.number] > 0 or is_since)
            ):
                found.flags |= SliceFlags.MAYBE_LOSSY
                self._touch(found)

    def _seal_left(self, thread: ThreadModel) -> None:
        if not thread.left:
            return
        for run in thread.fresh:
            if run.segment in thread.left:
                self._serve(run)
        for segment in thread.left:
            self._seal(segment)
            assert segment.client is not None
            segment.client.sealed += 1
        thread.fresh = [run for run in thread.fresh if run.segment not in thread.left]
        thread.left.clear()

    def _watch(self) -> None:
        """Copy what collected traces wrote since."""
        for client in self._in_turn:
            for thread in client.in_order_of_taking():
                for run in thread.fresh:
                    self._serve(run)
                thread.fresh = [run for run in thread.fresh if RunFlags.CLOSED not in run.flags]

    def _serve(self, run: Run) -> None:
        found = self._slices.get(run.trace)
        if found is None or found.searched_at_ns is not None:
            return
        before = found.state()
        self._copy(found, run)
        if found.state() != before:
            self._touch(found)

    # ----------------------------------------------- inside: reclaiming

    def _seal(self, segment: Segment) -> None:
        self._sealed_ns = segment.sealed_ns = max(self._now_ns, self._sealed_ns + 1)
        self._sealed.append(segment)

    def _in_use(self, client: ClientModel) -> Iterator[Segment]:
        """What a process was granted and has not lost again."""
        yield from client.stock
        yield from (segment for segment in self._sealed if segment.client is client)
        for thread in client.in_turn():
            yield from thread.left
            if thread.segment is not None:
                yield thread.segment

    def _new_segment(self, client: ClientModel | None) -> Segment:
        self._granted_ns = max(self._now_ns, self._granted_ns + 1)
        return Segment(client, self._granted_ns)

    def _grant(self, client: ClientModel) -> None:
        while client.live and len(client.stock) < self.config.stock_segments:
            if not self._take_frame(client):
                return
            client.stock.append(self._new_segment(client))

    def _take_frame(self, client: ClientModel) -> bool:
        """Memory for a segment, as frame_take() in pool.c."""
        chances = len(self._sealed)
        while True:
            if client.backed:
                client.backed -= 1
                return True
            full = client.segments >= self._arena_segments
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

    def _new_frame(self, client: ClientModel) -> bool:
        self._frames_used += 1
        client.segments += 1
        return True

    def _steal(self, for_whom: ClientModel) -> bool:
        for client in self._in_turn:
            if client is not for_whom and client.backed:
                client.backed -= 1
                client.segments -= 1
                self._frames_used -= 1
                return True
        return False

    def _reclaim(self, *, second_chance: bool, victim: Segment | None = None) -> None:
        """Reclaim the segment that was sealed first."""
        segment = victim if victim is not None else self._sealed[0]
        self._reclaimed_to_ns = max(self._reclaimed_to_ns, segment.sealed_ns)
        for run in segment.runs:
            self._evict(run, second_chance=second_chance)
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

    def _evict(self, run: Run, *, second_chance: bool) -> None:
        """Runs of open handles are kept, unless they are collected and so copied."""
        found = self._slices.get(run.trace)
        is_copied = found is not None and found.searched_at_ns is None
        if (
            second_chance
            and run.flags & _WHOLE != _WHOLE
            and not is_copied
            and run.client.live
            and run.handle in run.client.open
            and self._keep(run)
        ):
            self.counters.second_chances += 1
            return
        self._remember(run.trace, SliceFlags.EVICTED | _lossy(run.flags))
        self.counters.runs_evicted += 1

    def _keep(self, run: Run) -> bool:
        size = RUN_BYTES + len(run.data)
        into = self._keep_segment
        if into is None or self.config.segment_bytes - into.used_bytes < size:
            if self._keep_frames >= self._keep_max or self._frames_used >= self._frames_max:
                return False
            if into is not None:
                self._seal(into)
            into = self._keep_segment = self._new_segment(None)
            self._keep_frames += 1
            self._frames_used += 1
        into.used_bytes += size
        into.runs.append(run)
        run.flags |= RunFlags.CLOSED
        run.segment = into
        return True

    def _remember(self, trace: TraceId, why: SliceFlags) -> None:
        """What is told of the trace when it is asked for; NONE: that it was reported."""
        self._gone[trace] = self._gone.get(trace, SliceFlags.NONE) | why
        while len(self._gone) > self.config.tombstones:
            self._gone.popitem(last=False)

    def _check_drained(self, client: ClientModel) -> None:
        if not client.live and client.sealed == 0 and client.number in self._clients:
            del self._clients[client.number]
            # The last takes its place.
            self._in_turn[self._in_turn.index(client)] = self._in_turn[0]
            del self._in_turn[0]
            self._events.append(ClientDrained(client.number))

    # ------------------------------------------------ inside: searching

    def _end_searches(self) -> None:
        for found in self._slices.values():
            if found.searched_at_ns is not None and found.searched_at_ns <= self._now_ns:
                self._search(found)

    def _in_order(self) -> Iterator[Segment]:
        """All segments with runs, as a search meets them."""
        kept = [segment for segment in self._sealed if segment.client is None]
        yield from kept
        if self._keep_segment is not None:
            yield self._keep_segment
        yield from (segment for segment in self._sealed if segment.client is not None)
        for client in self._in_turn:
            for thread in client.in_order_of_taking():
                yield from thread.left
                if thread.segment is not None:
                    yield thread.segment

    def _search(self, found: SliceModel) -> None:
        """Copy all that is there, and judge whether it is all that was."""
        if not found.is_peek:
            self._watch()
        why = self._gone.get(found.trace, SliceFlags.NONE)
        met: dict[tuple[int, int], Met] = {}
        untied_from_ns: int | None = None
        active_ns = 0
        for segment in self._in_order():
            for run in segment.runs:
                if run.trace != found.trace:
                    continue
                self._copy(found, run)
                active_ns = max(active_ns, run.last_ticks)
                untied_from_ns = self._untied_from(run, untied_from_ns)
                self._meet(met, run)
        for client, loss in found.losses:
            one = met.setdefault((client.number, loss.handle), Met(client, False))
            one.lossy = True
            one.last |= RunFlags.LAST in loss.flags
        found.losses.clear()
        found.searched_at_ns = None
        found.flags |= why & (SliceFlags.EVICTED | SliceFlags.ABANDONED | SliceFlags.LOSSY)
        if any(not m.lossy and (not m.first or m.runs < m.seq_max + 1) for m in met.values()):
            found.flags |= SliceFlags.EVICTED
        if self._is_maybe_lossy(met, untied_from_ns, active_ns):
            found.flags |= SliceFlags.MAYBE_LOSSY
        self._end_lost(found, met)
        if not found.is_peek:
            self._touch(found)

    def _meet(self, met: dict[tuple[int, int], Met], run: Run) -> None:
        one = met.setdefault((run.client.number, run.handle), Met(run.client, run.client.live))
        one.live = run.client.live
        one.first |= RunFlags.FIRST in run.flags
        one.last |= RunFlags.LAST in run.flags
        one.lossy |= RunFlags.LOSSY in run.flags
        one.runs += 1
        one.seq_max = max(one.seq_max, run.seq)

    def _untied_from(self, run: Run, so_far_ns: int | None) -> int | None:
        client = self._clients.get(run.client.number)
        if client is None:
            return 0 if self._untied_to_ns >= run.granted_ns else so_far_ns
        if client.untied_ns is None or client.untied_ns[1] < run.granted_ns:
            return so_far_ns
        return min(client.untied_ns[0], client.untied_ns[0] if so_far_ns is None else so_far_ns)

    def _is_maybe_lossy(
        self, met: dict[tuple[int, int], Met], untied_from_ns: int | None, active_ns: int
    ) -> bool:
        """Whether a loss that could not be blamed on a trace was close to this one."""
        if not self._untied_to_ns:
            return False
        if not met:
            return self._untied_to_ns >= self._reclaimed_to_ns
        if any(not one.last for one in met.values()):
            active_ns = self._now_ns
        return untied_from_ns is not None and untied_from_ns <= active_ns

    def _end_lost(self, found: SliceModel, met: dict[tuple[int, int], Met]) -> None:
        """What ended without a last run: with its process, or because that run was lost."""
        gone: dict[int, None] = {}
        for one in met.values():
            number = one.client.number
            if not one.first or one.last:
                continue
            if not one.live:
                gone[number] = None
        for number in gone:
            self._append(found, encode_piece(PieceKind.EXIT, client=number))
        if SliceFlags.LOSSY not in found.flags:
            return
        for (number, handle), one in met.items():
            if one.first and not one.last and one.live and handle not in one.client.open:
                found.close_handle(number, handle)

    def _close_gone(self) -> None:
        """What processes that are gone had open stays unfinished."""
        for found in self._slices.values():
            for number, count in found.open.items():
                client = self._clients.get(number)
                if count <= 0 or (client is not None and client.live):
                    continue
                found.close_all(number)
                self._append(found, encode_piece(PieceKind.EXIT, client=number))
                self._touch(found)

    # ------------------------------------------------- inside: copying

    @property
    def _blocks_max(self) -> int:
        return self.config.store_bytes // BLOCK_BYTES

    def _searched(self, trace: TraceId) -> SliceModel:
        found = self._slices[trace]
        if found.searched_at_ns is not None:
            raise ValueError(f"{trace.hex()} is still searched for: nothing of it is known yet")
        return found

    def _view(self, found: SliceModel) -> Slice:
        searching = found.searched_at_ns is not None
        return Slice(
            found.trace,
            found.group,
            found.epoch,
            self._copied_so_far(found) if searching else found.bytes,
            found.trimmed_bytes,
            found.collected_ns,
            found.changed_ns,
            0 if searching else found.open_handles,
            SliceFlags.NONE if searching else found.flags,
            () if searching else tuple(found.crumbs),
            searching,
        )

    def _copied_so_far(self, found: SliceModel) -> int:
        """While it is searched for, which says nothing: first nothing, then all."""
        assert found.searched_at_ns is not None
        if found.searched_at_ns - self._now_ns > self.config.search_ns // 2:
            return 0
        runs = (run for segment in self._in_order() for run in segment.runs)
        return sum(len(run.data) for run in runs if run.trace == found.trace)

    def _touch(self, found: SliceModel) -> None:
        found.changed_ns = self._now_ns
        self._changed[found.trace] = None

    def _drop(self, found: SliceModel) -> None:
        del self._slices[found.trace]
        self._store_blocks -= found.blocks

    def _empty(self, found: SliceModel) -> None:
        """Of a search that a predecessor did not end nothing is known."""
        found.data.clear()
        found.copied.clear()
        found.flags = SliceFlags.NONE
        found.crumbs.clear()
        found.open.clear()
        found.opened.clear()
        found.unlisted.clear()
        found.losses.clear()
        self._count_blocks(found)

    def _count(
        self,
        found: SliceModel,
        client: ClientModel,
        handle: int,
        flags: RunFlags,
        *,
        is_new: bool,
    ) -> None:
        found.open.setdefault(client.number, 0)
        if client.live and is_new and RunFlags.FIRST in flags:
            found.open_handle(client.number, handle)
        if client.live and RunFlags.LAST in flags:
            found.close_handle(client.number, handle)

    def _introduce(self, found: SliceModel, client: ClientModel) -> None:
        if client.number not in found.introduced and self._append(
            found, encode_process(client.number, client.process)
        ):
            found.introduced.add(client.number)

    def _copy(self, found: SliceModel, run: Run) -> None:
        """Append a run to its trace's slice, or what it grew by."""
        flags = run.flags & ~RunFlags.CLOSED
        copied = found.copied.get(run)
        is_new, begin = copied is None, copied or 0
        is_open = RunFlags.CLOSED not in run.flags and run.client.live
        if is_open and copied == len(run.data):
            return
        self._count(found, run.client, run.handle, flags, is_new=is_new)
        found.flags |= _lossy(run.flags)
        self._introduce(found, run.client)
        fresh = bytes(run.data[begin:])
        found.copied[run] = len(run.data)
        if not fresh and not is_new and not flags & (RunFlags.LAST | RunFlags.LOSSY):
            return
        records, at = [], 0
        for size, crumb in run.records:
            if at >= begin:
                records.append(size)
                self._add_crumb(found, crumb)
            at += size
        if (
            fresh
            and found.clock != self._clock
            and self._append(found, encode_clock(*self._clock, TICKS_PER_S))
        ):
            found.clock = self._clock
        fits, room = len(fresh), self.config.trace_bytes_max - found.bytes - _PIECE_BYTES
        if fits > room:
            found.flags |= SliceFlags.TRUNCATED
            fits = 0
            for size in records:
                if fits + size > room:
                    break
                fits += size
        if fits or not fresh:
            piece = encode_piece(
                PieceKind.RUN,
                fresh[:fits],
                flags=flags,
                client=run.client.number,
                handle=run.handle,
                seq=run.seq,
                start=begin,
            )
            self._append(found, piece)

    @staticmethod
    def _add_crumb(found: SliceModel, crumb: NodeId | None) -> None:
        if crumb is None or crumb in found.crumbs:
            return
        if len(found.crumbs) < CRUMBS_MAX:
            found.crumbs[crumb] = None
        else:
            found.flags |= SliceFlags.CRUMBS_CUT

    def _append(self, found: SliceModel, piece: bytes) -> bool:
        """Append a piece, or say why not; one that comes later may be smaller, or find more room."""
        if found.bytes + len(piece) > self.config.trace_bytes_max:
            found.flags |= SliceFlags.TRUNCATED
            return False
        if not found.is_peek:
            blocks = 1 + -(-(len(found.data) + len(piece)) // BLOCK_CONTENT_BYTES)
            if self._store_blocks + blocks - found.blocks > self._blocks_max:
                if SliceFlags.STORE_FULL not in found.flags:
                    self._events.append(StoreFull(found.trace))
                found.flags |= SliceFlags.STORE_FULL
                self.store_was_full_for.add(found.trace)
                return False
        found.data += piece
        found.flags |= SliceFlags.HELD
        if not found.is_peek:
            self._count_blocks(found)
        return True

    def _count_blocks(self, found: SliceModel) -> None:
        blocks = 1 + -(-len(found.data) // BLOCK_CONTENT_BYTES)
        self._store_blocks += blocks - found.blocks
        found.blocks = blocks


def _lossy(flags: RunFlags) -> SliceFlags:
    return SliceFlags.LOSSY if RunFlags.LOSSY in flags else SliceFlags.NONE


def _granted_ns(thread: ThreadModel) -> int:
    return thread.segment.granted_ns if thread.segment is not None else 0
