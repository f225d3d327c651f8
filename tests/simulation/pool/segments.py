# SPDX-License-Identifier: Apache-2.0
"""The pool: which segments processes are granted, what is reclaimed for them, what is kept."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from formats.slices import RunFlags
from protocol.messages import SliceFlags, TraceId
from tests.simulation.pool.state import (
    RUN_BYTES,
    ClientModel,
    NodeState,
    Run,
    Segment,
    ThreadModel,
)
from tests.simulation.pool.store import ReportStore, lossy

_WHOLE = RunFlags.FIRST | RunFlags.LAST


class Gone:
    """What the node remembers of traces that are not in the pool any more, or not all of them."""

    def __init__(self, tombstones: int) -> None:
        self._tombstones = tombstones
        self._why: OrderedDict[TraceId, SliceFlags] = OrderedDict()
        self._had: set[TraceId] = set()

    def remember(self, trace: TraceId, why: SliceFlags) -> None:
        """What is told of the trace when it is asked for; NONE: that it was reported."""
        self._why[trace] = self._why.get(trace, SliceFlags.NONE) | why
        if why in (SliceFlags.NONE, SliceFlags.ABANDONED):
            self._had.add(trace)
        while len(self._why) > self._tombstones:
            forgotten, _ = self._why.popitem(last=False)
            self._had.discard(forgotten)

    def had(self, trace: TraceId) -> bool:
        """Whether it was reported, or given up."""
        return trace in self._had

    def why(self, trace: TraceId) -> SliceFlags:
        """NONE too if nothing is remembered of it."""
        return self._why.get(trace, SliceFlags.NONE)


class Segments:
    """All segments of a node, and the memory that they may have (its frames)."""

    def __init__(self, state: NodeState, store: ReportStore, gone: Gone) -> None:
        config = state.config
        self._state = state
        self._store = store
        self._gone = gone
        self.frames_max = config.pool_bytes // config.segment_bytes
        self.frames_used = 0
        self.granted_ns = 0
        self.reclaimed_to_ns = 0
        self.gone_to_ns = 0
        self._sealed_ns = 0
        self._threshold = self.frames_max * config.reclaim_percent // 100
        self._keep_max = self.frames_max // 4
        self._arena_segments = config.arena_bytes // config.segment_bytes
        self._keep_frames = 0
        self._keep_segment: Segment | None = None
        self._predecessors: Segment | None = None
        self._sealed: deque[Segment] = deque()

    def grant(self, client: ClientModel) -> None:
        while client.live and len(client.stock) < self._state.config.stock_segments:
            if not self._take_frame(client):
                return
            client.stock.append(self._new_segment(client))

    def in_order(self) -> Iterator[Segment]:
        """All segments with runs, as a search meets them."""
        kept = [segment for segment in self._sealed if segment.client is None]
        yield from kept
        if self._predecessors is not None:
            yield self._predecessors
        if self._keep_segment is not None:
            yield self._keep_segment
        yield from (segment for segment in self._sealed if segment.client is not None)
        for client in self._state.in_turn:
            for thread in client.in_order_of_taking():
                yield from thread.left
                if thread.segment is not None:
                    yield thread.segment

    def in_use(self, client: ClientModel) -> Iterator[Segment]:
        """What a process was granted and has not lost again."""
        yield from client.stock
        yield from (segment for segment in self._sealed if segment.client is client)
        for thread in client.in_turn():
            yield from thread.left
            if thread.segment is not None:
                yield thread.segment

    def has_kept(self, client: ClientModel) -> bool:
        """Whether runs of its handles are kept from segments that were reclaimed."""
        return any(
            run.client is client
            for segment in self.in_order()
            if segment.client is None
            for run in segment.runs
        )

    def seal_left(self, thread: ThreadModel) -> None:
        if not thread.left:
            return
        for run in thread.fresh:
            if run.segment in thread.left:
                self._store.serve(run)
        for segment in thread.left:
            self._seal(segment)
            assert segment.client is not None
            segment.client.sealed += 1
        thread.fresh = [run for run in thread.fresh if run.segment not in thread.left]
        thread.left.clear()

    def leave(self, client: ClientModel) -> None:
        """The process is gone: its stock comes back, and all that it wrote is sealed."""
        unused = len(client.stock) + client.backed
        self.frames_used -= unused
        client.segments -= unused
        client.stock.clear()
        client.backed = 0
        for thread in client.in_order_of_taking():
            if thread.segment is not None:
                thread.left.append(thread.segment)
            if thread.run is not None:
                thread.run.flags |= RunFlags.CLOSED
            thread.segment = thread.run = None
            self.seal_left(thread)

    def restart(self) -> None:
        """A new daemon begins a segment of its own for what it keeps, when it first looks."""
        self.take_over()
        self._predecessors = self._keep_segment
        self._keep_segment = None

    def take_over(self) -> None:
        if self._predecessors is not None:
            self._seal(self._predecessors)
            self._predecessors = None

    def _new_segment(self, client: ClientModel | None) -> Segment:
        self.granted_ns = max(self._state.now_ns, self.granted_ns + 1)
        return Segment(client, self.granted_ns)

    def _seal(self, segment: Segment) -> None:
        self._sealed_ns = segment.sealed_ns = max(self._state.now_ns, self._sealed_ns + 1)
        self._sealed.append(segment)

    def _take_frame(self, client: ClientModel) -> bool:
        """Memory for a segment, as frame_take() in pool.c."""
        chances = len(self._sealed)
        while True:
            if client.backed:
                client.backed -= 1
                return True
            full = client.segments >= self._arena_segments
            if not full and (self.frames_used < self._threshold or self._steal(client)):
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
            if self.frames_used < self.frames_max:
                return self._new_frame(client)
            return False

    def _new_frame(self, client: ClientModel) -> bool:
        self.frames_used += 1
        client.segments += 1
        return True

    def _steal(self, for_whom: ClientModel) -> bool:
        for client in self._state.in_turn:
            if client is not for_whom and client.backed:
                client.backed -= 1
                client.segments -= 1
                self.frames_used -= 1
                return True
        return False

    def _reclaim(self, *, second_chance: bool, victim: Segment | None = None) -> None:
        """Reclaim the segment that was sealed first."""
        segment = victim if victim is not None else self._sealed[0]
        self.reclaimed_to_ns = max(self.reclaimed_to_ns, segment.sealed_ns)
        if segment is self._sealed[0]:
            self.gone_to_ns = segment.sealed_ns
        for run in segment.runs:
            self._evict(run, second_chance=second_chance)
        segment.runs.clear()
        self._sealed.remove(segment)
        self._state.counters.reclaims += 1
        client_of = segment.client
        if client_of is None:
            self._keep_frames -= 1
            self.frames_used -= 1
            return
        client_of.sealed -= 1
        if client_of.live:
            client_of.backed += 1
        else:
            client_of.segments -= 1
            self.frames_used -= 1
            self._state.check_drained(client_of)

    def _evict(self, run: Run, *, second_chance: bool) -> None:
        """Runs of open handles are kept, unless they are collected and so copied."""
        if (
            second_chance
            and run.flags & _WHOLE != _WHOLE
            and not self._store.has_copied(run.trace)
            and run.client.live
            and run.handle in run.client.open
            and self._keep(run)
        ):
            self._state.counters.second_chances += 1
            return
        self._gone.remember(run.trace, SliceFlags.EVICTED | lossy(run.flags))
        self._state.counters.runs_evicted += 1

    def _keep(self, run: Run) -> bool:
        """False: there is no room, or what there is of it is not all."""
        readable = run.readable_from(0)
        whole = sum(record.size for record in readable)
        size = RUN_BYTES + whole
        into = self._keep_segment
        if into is None or self._state.config.segment_bytes - into.used_bytes < size:
            if self._keep_frames >= self._keep_max or self.frames_used >= self.frames_max:
                return False
            if into is not None:
                self._seal(into)
            into = self._keep_segment = self._new_segment(None)
            self._keep_frames += 1
            self.frames_used += 1
        into.used_bytes += size
        into.runs.append(run)
        run.flags |= RunFlags.CLOSED
        run.segment = into
        is_broken = whole < len(run.data)
        if is_broken:
            run.records = readable
            del run.data[whole:]
            # What goes on behind nothing has no place to be missed at.
            run.is_cut = whole > 0
        return not is_broken
