# SPDX-License-Identifier: Apache-2.0
"""PoolModel: the parts of the model, as one data plane."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from appliance.core.dataplane import DataPlaneEvent, LocalTrigger, Slice, StoreUsage, no_room
from formats.records import Body
from formats.slices import Process
from protocol.hashing import Domain, TraceHash, node_id
from protocol.messages import Group, SliceFlags, Source, TraceId
from tests.simulation.pool.losses import Losses
from tests.simulation.pool.search import Search
from tests.simulation.pool.segments import Gone, Segments
from tests.simulation.pool.state import ClientModel, Handle, NodeState, PoolConfig, PoolCounters
from tests.simulation.pool.store import ReportStore, SliceModel
from tests.simulation.pool.writing import Writing


class PoolModel:
    """A node's data plane and the processes that write into it.

    Implements appliance.core.dataplane.DataPlane; see there and node.h.
    """

    WRITING: ClassVar[type[Writing]] = Writing
    SEGMENTS: ClassVar[type[Segments]] = Segments
    """What a subclass may decide in another way."""

    def __init__(self, config: PoolConfig, node: str) -> None:
        self.state = NodeState(config, node_id(node))
        self._next_client = 1
        self.gone = Gone(config.tombstones)
        self.writing = self.WRITING(self.state)
        self.store = ReportStore(self.state)
        self.segments = self.SEGMENTS(self.state, self.store, self.gone)
        self.losses = Losses(self.state, self.store, self.gone, self.segments)
        self.search = Search(self.state, self.store, self.gone, self.segments, self.losses)

    # ------------------------------------------------------------ writers

    def add_client(self, pid: int, service: str, now_ns: int) -> ClientModel:
        """A process attaches."""
        self.state.now_ns = now_ns
        client = ClientModel(self._next_client, Process(pid, service), losses_read_ns=now_ns)
        self._next_client += 1
        self.state.clients[client.number] = client
        # The latest first, as the C library goes through them.
        self.state.in_turn.insert(0, client)
        self.segments.grant(client)
        return client

    def exit_client(self, client: ClientModel, now_ns: int) -> None:
        """A process dies; what it had open stays unfinished."""
        self.state.now_ns = now_ns
        self._observe(client)
        self.segments.leave(client)
        client.live = False
        self.losses.suspect()
        self.store.close_gone()
        self.state.take_triggers(client)
        self.state.check_drained(client)

    def open(self, client: ClientModel, trace: TraceId) -> Handle:
        return self.writing.open(client, trace)

    def write(self, handle: Handle, thread: int, body: Body, ticks: int) -> bool:
        """Write one record; False when it was lost."""
        return self.writing.write(handle, thread, body, ticks)

    def close(self, handle: Handle, thread: int) -> None:
        """Close the handle: its last run says so."""
        self.writing.close(handle, thread)

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
        return len(client.stock) * 2 <= self.state.config.stock_segments

    # -------------------------------------------------------------- node

    def set_sampling(self, percentage_threshold: int) -> None:
        """Processes record these traces from now on; what is between is in doubt."""
        state, before = self.state, self.state.percentage_threshold
        state.percentage_threshold = percentage_threshold
        if percentage_threshold == before:
            return
        state.left_out.append(
            (min(before, percentage_threshold), max(before, percentage_threshold))
        )
        self.store.doubt(state.is_left_out)

    def clock_pair(self, ticks: int, realtime_ns: int) -> None:
        """The relation of record ticks to Unix time, from now on."""
        self.store.clock = (ticks, realtime_ns)

    def poll(self, now_ns: int) -> list[DataPlaneEvent]:
        """Observe, copy, search, grant, reclaim; return what happened."""
        state = self.state
        state.now_ns = now_ns
        self.segments.take_over()
        for client in list(state.in_turn):
            self._observe(client)
            state.take_triggers(client)
        self.store.watch()
        self.search.end_all()
        self.losses.suspect()
        self.losses.told_ns = now_ns
        for client in list(state.in_turn):
            self.segments.grant(client)
        events, state.events = state.events, []
        return [*events, *self.store.changes()]

    def restart(self) -> None:
        """A new daemon finds what the memfds hold: segments, store, what is gone.

        What processes fired stays in their memory until it was seen to, also when they end.
        What it does not know: who was introduced in a slice, when losses were that nobody can
        tell the trace of (but the latest); so each process that ever had such a loss may just
        have had it, since the last poll, which told slices of all that was before.
        """
        state = self.state
        state.in_turn.sort(key=lambda client: -client.number)
        self.segments.restart()
        self.losses.restart()
        self.store.restart()
        for client in state.in_turn:
            if not client.live:
                self.losses.read(client)
        self.losses.suspect()

    def lose_store(self) -> None:
        """The report store is gone, as after a restart without the fd store.

        Its collected traces are so no more; what of them was reclaimed cannot be
        copied again.
        """
        for trace in self.store.lose_all():
            self.gone.remember(trace, SliceFlags.NONE)

    def horizon_ns(self) -> int:
        """How far back the pool reaches; 0 before the first reclaim."""
        return (
            max(0, self.state.now_ns - self.segments.reclaimed_to_ns)
            if self.segments.reclaimed_to_ns
            else 0
        )

    @property
    def holds_slices(self) -> bool:
        return bool(self.store.slices)

    @property
    def config(self) -> PoolConfig:
        return self.state.config

    @property
    def counters(self) -> PoolCounters:
        return self.state.counters

    @property
    def frames_used(self) -> int:
        return self.segments.frames_used

    @property
    def frames_max(self) -> int:
        return self.segments.frames_max

    @property
    def store_was_full_for(self) -> set[TraceId]:
        return self.store.was_full_for

    @property
    def ever_collected(self) -> set[TraceId]:
        return self.store.ever_collected

    def peek(self, trace: TraceId) -> tuple[SliceFlags, int, bytes]:
        """Flags, open handles and bytes of its slice, as it is or as it would be."""
        found = self.store.slices.get(trace)
        if found is None:
            self._observe_all()
            found = SliceModel(trace, Group("", trace), 0, 0, 0, searched_at_ns=0, is_peek=True)
            self.search.run(found)
        return found.flags, found.open_handles, bytes(found.data)

    def records_of(self, trace: TraceId) -> dict[tuple[int, int, int], bytes]:
        """What the log still holds of a trace: (client, handle, seq) to its bytes."""
        return {
            (run.client.number, run.handle, run.seq): bytes(run.data)
            for segment in self.segments.in_order()
            for run in segment.runs
            if run.trace == trace
        }

    def flags_of(self, trace: TraceId) -> SliceFlags:
        """What would be said against a trace, collected or not."""
        return self.peek(trace)[0] & ~SliceFlags.HELD | self.gone.why(trace)

    # ----------------------------------------------------------- slices

    def collect(self, trace: TraceId, group: Group, now_ns: int) -> Slice:
        self.state.now_ns = max(now_ns, self.state.now_ns)
        found = self.store.slices.get(trace)
        if found is None:
            self._observe_all()
            found = self.store.new(trace, group)
            if found is None:
                return no_room(trace, group, now_ns)
            if not self.state.config.search_ns:
                self.search.run(found)
        self.store.told(trace)
        return self._view(found)

    def slice(self, trace: TraceId) -> Slice | None:
        found = self.store.slices.get(trace)
        return None if found is None else self._view(found)

    def read(self, trace: TraceId, offset: int, size: int) -> bytes:
        return self.store.read(trace, offset, size)

    def trim(self, trace: TraceId, offset: int) -> None:
        self.store.trim(trace, offset)

    def release(self, trace: TraceId, *, abandoned: bool, now_ns: int) -> None:
        self.state.now_ns = max(now_ns, self.state.now_ns)
        if self.store.drop(trace):
            self.gone.remember(trace, SliceFlags.ABANDONED if abandoned else SliceFlags.NONE)

    def slices(self) -> Iterable[Slice]:
        return [self._view(found) for found in self.store.slices.values()]

    def recent(self, priority_seed: int) -> list[TraceId]:
        """What was never collected, whatever its age, the highest priority first."""
        self._observe_all()
        there = {run.trace for segment in self.segments.in_order() for run in segment.runs}
        fresh = [t for t in there if t not in self.store.slices and not self.gone.had(t)]
        return sorted(fresh, key=TraceHash(Domain.PRIORITY, priority_seed), reverse=True)

    def next_search_ns(self) -> int | None:
        """When the next search will be over, which poll() tells."""
        slices = self.store.slices.values()
        return min(
            (found.searched_at_ns for found in slices if found.searched_at_ns is not None),
            default=None,
        )

    def store_usage(self) -> StoreUsage:
        return self.store.usage()

    # ------------------------------------------------------------ inside

    def _observe(self, client: ClientModel) -> None:
        """See what is full, and what was lost."""
        if not client.live:
            return
        for thread in client.in_turn():
            self.segments.seal_left(thread)
        self.losses.read(client)

    def _observe_all(self) -> None:
        self.segments.take_over()
        for client in self.state.in_turn:
            self._observe(client)

    def _view(self, found: SliceModel) -> Slice:
        searching = found.searched_at_ns is not None
        return self.store.view(
            found, self.search.copied_so_far(found) if searching else found.bytes
        )
