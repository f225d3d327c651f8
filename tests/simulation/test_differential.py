# SPDX-License-Identifier: Apache-2.0
"""The model of the data plane and the C library: the same calls, the same answers.

What the model leaves open it is told by the library: whether a write took a segment, and
how many segments were reclaimed. What follows from that is compared, byte by byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from appliance.core.dataplane import DataPlaneEvent, LocalTrigger, Slice
from formats.records import Breadcrumb, Data
from formats.slices import PieceKind
from protocol.messages import Group, NodeId, SliceFlags, TraceId
from runtime.settings.node import Settings
from testbed.encoding import encode_piece
from tests.simulation.native import NativeClient, NativeHandle, NativePool
from tests.simulation.pool import (
    BLOCK_BYTES,
    ClientModel,
    Handle,
    PoolConfig,
    PoolModel,
    Segments,
    ThreadModel,
    Writing,
)

S = 1_000_000_000
# More than a look of the library at one that is quiet may wait.
STEP_NS = S // 10

TRACES = [TraceId(number.to_bytes(16, "big")) for number in range(1, 7)]
POOL_BYTES = 4 << 20
STORE_BYTES = 1 << 20
TRACE_BYTES_MAX = 700_000
RECORD_BYTES = 30_000
# With what stands around a record in a slice.
PUT_BYTES_MAX = RECORD_BYTES + 200
HANDLES_MAX = 8
# Then the end of a handle may be lost.
LOST = SliceFlags.LOSSY | SliceFlags.MAYBE_LOSSY
PIECE_BYTES = len(encode_piece(PieceKind.EXIT))


class FollowingWriting(Writing):
    """What has room, and whether a segment is taken, the library says."""

    fitted = True
    took = 0

    def _fits(self, writer: ThreadModel, size: int) -> bool:
        return writer.segment is not None and self.fitted and not self.took

    def _take_segment(self, writer: ThreadModel, client: ClientModel) -> bool:
        if not self.took:
            return False
        self.took -= 1
        return super()._take_segment(writer, client)


class FollowingSegments(Segments):
    """What is reclaimed and granted, the library says."""

    reclaims = 0
    stocks: Mapping[int, int] = {}

    def grant(self, client: ClientModel) -> None:
        while self._state.counters.reclaims < self.reclaims:
            self._reclaim(second_chance=True)
        if not client.live:
            return
        while len(client.stock) > self.stocks[client.number]:
            client.stock.popleft()
        while len(client.stock) < self.stocks[client.number]:
            client.stock.append(self._new_segment(client))

    def grant_all(self) -> None:
        """Stocks that others have back for a new one."""
        for client in self._state.clients.values():
            self.grant(client)


class FollowingPool(PoolModel):
    """The model, told by the library what it leaves open."""

    WRITING = FollowingWriting
    SEGMENTS = FollowingSegments
    writing: FollowingWriting
    segments: FollowingSegments


def pieces(data: bytes) -> list[bytes]:
    """Of a slice, from its beginning; processes that ended in one instant in any order."""
    found: list[bytes] = []
    exits: list[bytes] = []
    at = 0
    while at < len(data):
        content_bytes, kind = struct.unpack_from("=IH", data, at)
        piece = data[at : at + PIECE_BYTES + content_bytes]
        at += len(piece)
        if kind == PieceKind.EXIT:
            exits.append(piece)
            continue
        found += [*sorted(exits), piece]
        exits.clear()
    return [*found, *sorted(exits)]


class Both:
    """A handle of either."""

    def __init__(self, native: NativeHandle, model: Handle) -> None:
        self.native = native
        self.model = model

    def __repr__(self) -> str:
        return f"<handle {self.native.number} of client {self.native.client.number}>"


class Differential(RuleBasedStateMachine):
    """Processes write, lose, end and come; traces are collected, read and let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = S
        self.native = NativePool(
            Settings(
                node="n1",
                pool_bytes=POOL_BYTES,
                arena_bytes=POOL_BYTES,
                store_bytes=STORE_BYTES,
                trace_bytes_max=TRACE_BYTES_MAX,
            ),
            S,
        )
        self.native.__enter__()
        self.model = FollowingPool(
            # The library's first block is the store's header.
            PoolConfig(POOL_BYTES, POOL_BYTES, STORE_BYTES - BLOCK_BYTES, TRACE_BYTES_MAX),
            "n1",
        )
        self.model.clock_pair(S, S)
        self.clients: list[tuple[NativeClient, ClientModel]] = []
        self.handles: list[Both] = []
        self.begun: list[Both] = []
        """With those that a rule begins and ends."""
        self.serial = 0
        self.epochs: dict[int, int] = {}
        self.reclaims_before = 0
        # Whose segments were taken since the last poll: of two threads the library
        # could not know whose was full first.
        self.taker: tuple[int, int] | None = None
        self.collected_at_once = False
        self.has_lied = False
        # What the library may not have seen yet, at most.
        self.unseen_bytes = 0
        for _ in range(2):
            self.clients.append(self.attach())

    def teardown(self) -> None:
        self.native.__exit__()

    # ------------------------------------------------------------ helpers

    def attach(self) -> tuple[NativeClient, ClientModel]:
        native = self.native.add_client(7, "service", self.now_ns)
        self.follow()
        model = self.model.add_client(7, "service", self.now_ns)
        self.model.segments.grant_all()
        assert native.number == model.number
        return native, model

    def follow(self) -> None:
        self.model.segments.reclaims = (
            self.native.plane.metrics()["reclaims"] + self.reclaims_before
        )
        self.model.segments.stocks = {
            number: client.stock for number, client in self.native.clients.items() if client.live
        }

    def work(self) -> list[DataPlaneEvent]:
        """A poll of both."""
        self.now_ns += STEP_NS
        events = self.native.poll(self.now_ns)
        self.follow()
        expected = self.model.poll(self.now_ns)
        assert sorted(map(repr, events)) == sorted(map(repr, expected))
        assert self.model.counters.reclaims == self.model.segments.reclaims
        self.taker = None
        self.collected_at_once = False
        self.unseen_bytes = 0
        self.check_what_is_open()
        return events

    def only(self, client: NativeClient, thread: int) -> None:
        """Have the node see what others took first."""
        if self.taker is not None and self.taker != (client.number, thread):
            self.work()

    def put(self, both: Both, thread: int, body: Data | Breadcrumb) -> bool:
        client = both.native.client
        self.only(client, thread)
        before = client.taken
        self.unseen_bytes += PUT_BYTES_MAX
        fitted = self.native.write(both.native, thread, body, self.now_ns)
        self.model.writing.fitted, self.model.writing.took = fitted, client.taken - before
        if self.model.writing.took:
            self.taker = (client.number, thread)
        assert self.model.write(both.model, thread, body, self.now_ns) == fitted
        assert not self.model.writing.took
        return fitted

    def lie(self, both: Both, thread: int) -> None:
        self.native.break_last(both.native, thread)
        self.model.writing.break_last(both.model, thread)
        self.has_lied = True

    def data(self, size: int) -> Data:
        self.serial += 1
        return Data(1, self.serial.to_bytes(8, "big") + bytes(size - 8))

    def begin(self, number: int, trace: TraceId) -> Both:
        native, model = self.clients[number]
        both = Both(self.native.open(native, trace), self.model.open(model, trace))
        assert both.native.number == both.model.number
        self.begun.append(both)
        return both

    def finish(self, both: Both, thread: int) -> None:
        client = both.native.client
        self.only(client, thread)
        before = client.taken
        self.model.writing.fitted = self.native.close(both.native, thread)
        self.model.writing.took = client.taken - before
        if self.model.writing.took:
            self.taker = (client.number, thread)
        self.model.close(both.model, thread)
        assert not self.model.writing.took
        self.begun.remove(both)

    # -------------------------------------------------------------- rules

    @precondition(lambda self: len(self.handles) < HANDLES_MAX)
    @rule(client=st.integers(0, 1), trace=st.sampled_from(TRACES))
    def open(self, client: int, trace: TraceId) -> None:
        self.handles.append(self.begin(client, trace))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), thread=st.integers(0, 1), size=st.integers(8, 400))
    def write(self, data: st.DataObject, thread: int, size: int) -> None:
        self.put(data.draw(st.sampled_from(self.handles)), thread, self.data(size))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), thread=st.integers(0, 1), size=st.integers(8, 400))
    def write_nonsense(self, data: st.DataObject, thread: int, size: int) -> None:
        both = data.draw(st.sampled_from(self.handles))
        if self.put(both, thread, self.data(size)):
            self.lie(both, thread)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), thread=st.integers(0, 1), node=st.integers(1, 70))
    def name(self, data: st.DataObject, thread: int, node: int) -> None:
        both = data.draw(st.sampled_from(self.handles))
        self.put(both, thread, Breadcrumb(NodeId(node), f"node {node}"))

    @rule(
        client=st.integers(0, 1),
        thread=st.integers(0, 1),
        trace=st.sampled_from(TRACES),
        count=st.integers(1, 20),
    )
    def pass_on(self, client: int, thread: int, trace: TraceId, count: int) -> None:
        """Of each handle one thread writes the beginning, and another one the end."""
        handles = [self.begin(client, trace) for _ in range(count)]
        for both in handles:
            self.put(both, thread, self.data(8))
        for both in handles:
            self.put(both, 1 - thread, self.data(8))
            self.finish(both, 1 - thread)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), thread=st.integers(0, 1))
    def end(self, data: st.DataObject, thread: int) -> None:
        both = data.draw(st.sampled_from(self.handles))
        self.handles.remove(both)
        self.finish(both, thread)

    @rule(
        client=st.integers(0, 1),
        thread=st.integers(0, 1),
        trace=st.sampled_from(TRACES),
        records=st.integers(1, 40),
        node_is_awake=st.booleans(),
    )
    def burst(
        self, client: int, thread: int, trace: TraceId, records: int, node_is_awake: bool
    ) -> None:
        """One that fills segments, and more than there are if the node sleeps."""
        both = self.begin(client, trace)
        for _ in range(records):
            self.put(both, thread, self.data(RECORD_BYTES))
            if node_is_awake and both.native.client.stock < 2:
                self.work()
        self.finish(both, thread)

    @rule(client=st.integers(0, 1), thread=st.integers(0, 1), rounds=st.integers(1, 2))
    def go_round(self, client: int, thread: int, rounds: int) -> None:
        """The pool, by traces that nobody asks for."""
        for number in range(rounds * POOL_BYTES // RECORD_BYTES):
            both = self.begin(client, TraceId((1000 + number).to_bytes(16, "big")))
            self.put(both, thread, self.data(RECORD_BYTES))
            self.finish(both, thread)
            if both.native.client.stock < 2:
                self.work()

    @rule(client=st.integers(0, 1), thread=st.integers(0, 1), runs=st.integers(26, 40))
    def lose_many(self, client: int, thread: int, runs: int) -> None:
        """Perhaps more than are told one by one, while the node sleeps: each is told twice."""
        filler = self.begin(client, TraceId((1).to_bytes(16, "little")))
        while self.put(filler, thread, self.data(RECORD_BYTES)):
            pass
        self.finish(filler, thread)
        for number in range(runs):
            both = self.begin(client, TraceId((2000 + number).to_bytes(16, "big")))
            self.put(both, thread, self.data(RECORD_BYTES // 4))
            self.finish(both, thread)

    @rule(client=st.integers(0, 1), trace=st.sampled_from(TRACES))
    def fire(self, client: int, trace: TraceId) -> None:
        native, model = self.clients[client]
        self.native.trigger(native, trace, "t", self.now_ns)
        self.model.trigger(model, trace, "t", self.now_ns, why="because")

    @rule()
    def poll(self) -> None:
        self.work()

    def check_what_is_open(self) -> None:
        """Whatever the two agree on."""
        for trace in TRACES:
            found = self.native.plane.slice(trace)
            if found is None or found.flags & LOST:
                continue
            handles = [both.model for both in self.begun if both.model.trace == trace]
            assert found.open_handles <= len(handles)
            # Where nothing is missing, all are counted of which there is a run.
            if found.flags == SliceFlags.HELD and not self.has_lied:
                there = [one for one in handles if one.client.live and one.next_seq]
                assert found.open_handles >= len(there)

    @rule(trace=st.sampled_from(TRACES))
    def collect(self, trace: TraceId) -> None:
        # The library looks for one at once, and for those that come with it at the next poll.
        # In a store that all do not fit into, who comes first takes the room.
        if self.collected_at_once or self.may_fill(trace):
            self.work()
        self.collected_at_once = True
        if self.model.slice(trace) is None:
            self.taker = None
        native = self.native.plane.collect(trace, Group("t", trace), self.now_ns)
        self.compare(native, self.model.collect(trace, Group("t", trace), self.now_ns))

    def may_fill(self, trace: TraceId) -> bool:
        """Whether a collection, and what others wrote since the last poll, need all room."""
        if self.model.slice(trace) is not None:
            return False
        wanted_bytes = len(self.native.peek(trace).data) + self.unseen_bytes
        used_bytes = self.native.plane.store_usage().used_bytes
        return used_bytes + wanted_bytes + len(TRACES) * BLOCK_BYTES > STORE_BYTES

    @rule(trace=st.sampled_from(TRACES), share=st.floats(0, 1))
    def trim(self, trace: TraceId, share: float) -> None:
        found = self.model.slice(trace)
        if found is not None:
            offset = int(found.bytes * share)
            self.native.plane.trim(trace, offset)
            self.model.trim(trace, offset)

    @rule(trace=st.sampled_from(TRACES), abandoned=st.booleans())
    def release(self, trace: TraceId, abandoned: bool) -> None:
        for pool in (self.native.plane, self.model):
            pool.release(trace, abandoned=abandoned, now_ns=self.now_ns)

    @rule(client=st.integers(0, 1))
    def exit(self, client: int) -> None:
        self.work()
        native, model = self.clients[client]
        for handles in (self.handles, self.begun):
            handles[:] = [both for both in handles if both.native.client is not native]
        self.native.exit_client(native, self.now_ns)
        self.model.exit_client(model, self.now_ns)
        self.clients[client] = self.attach()

    @rule()
    def restart(self) -> None:
        self.work()
        self.reclaims_before = self.model.counters.reclaims
        self.native.restart()
        self.model.restart()
        self.model.clock_pair(self.now_ns, self.now_ns)
        self.work()

    # ------------------------------------------------------------ compare

    def compare(self, native: Slice | None, model: Slice | None) -> None:
        if native is None or model is None:
            assert native is model
            return
        # Numbers of collections are random to begin with.
        assert self.epochs.setdefault(native.epoch, model.epoch) == model.epoch
        assert replace(native, epoch=model.epoch) == model

    @invariant()
    def the_slices_are_the_same(self) -> None:
        for trace in TRACES:
            native, model = self.native.plane.slice(trace), self.model.slice(trace)
            self.compare(native, model)
            if native is None:
                continue
            size = native.bytes - native.trimmed_bytes
            copied = self.native.plane.read(trace, native.trimmed_bytes, size)
            expected = self.model.read(trace, native.trimmed_bytes, size)
            assert copied == expected or pieces(copied) == pieces(expected)
        assert len(list(self.native.plane.slices())) == len(list(self.model.slices()))

    @invariant()
    def what_would_be_collected_is_the_same(self) -> None:
        for trace in TRACES:
            if self.model.slice(trace) is not None:
                continue
            native = self.native.peek(trace)
            flags, open_handles, data = self.model.peek(trace)
            assert (native.flags, native.open_handles) == (flags, open_handles)
            assert native.data == data or pieces(native.data) == pieces(data)
            self.taker = None

    @invariant()
    def what_a_snapshot_would_have_is_the_same(self) -> None:
        count, traces = self.native.plane.recent(10**15, "", 1000)
        assert traces == self.model.recent(0)
        assert count == len(traces)

    @invariant()
    def the_figures_are_the_same(self) -> None:
        metrics = self.native.plane.metrics()
        assert metrics["corrupt"] == 0 or self.has_lied
        # Seals of one instant have numbers behind it.
        assert abs(metrics["horizon_ns"] - self.model.horizon_ns()) < 1000
        usage, expected = self.native.plane.store_usage(), self.model.store_usage()
        assert usage.used_bytes == expected.used_bytes + BLOCK_BYTES


TestDifferential = pytest.mark.timeout(300)(Differential.TestCase)
TestDifferential.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    # To shrink what is found takes minutes, which a test does not have.
    phases=[phase for phase in Phase if phase is not Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def checked(*steps: Callable[[Differential], object]) -> Differential:
    """Some steps, each followed by all comparisons."""
    both = Differential()
    try:
        for step in steps:
            step(both)
            both.the_slices_are_the_same()
            both.what_would_be_collected_is_the_same()
            both.what_a_snapshot_would_have_is_the_same()
            both.the_figures_are_the_same()
        return both
    finally:
        both.teardown()


def test_a_store_that_is_full_still_takes_what_is_small() -> None:
    one, two = TRACES[:2]
    small = TRACES[2]

    def write_small(both: Differential) -> None:
        handle = both.begin(0, two)
        both.put(handle, 0, both.data(16))
        both.finish(handle, 0)

    both = checked(
        lambda both: [both.collect(trace) for trace in (one, two, small)],
        lambda both: both.burst(0, 0, one, 24, True),
        lambda both: both.burst(0, 0, two, 24, True),
        lambda both: both.poll(),
        write_small,
        lambda both: both.poll(),
    )
    flags = {trace: found.flags for trace in (one, two) if (found := both.model.slice(trace))}
    assert SliceFlags.TRUNCATED in flags[one]
    assert SliceFlags.STORE_FULL in flags[two]


def test_a_collection_may_fill_the_store_while_others_have_news() -> None:
    other, held, collected = TRACES[:3]
    both = checked(
        lambda both: both.collect(other),
        lambda both: both.burst(0, 0, other, 10, True),
        lambda both: both.collect(held),
        lambda both: both.burst(0, 0, collected, 27, True),
        lambda both: both.burst(0, 1, held, 37, False),
        lambda both: both.burst(1, 0, held, 3, False),
        lambda both: both.collect(collected),
    )
    found = both.model.slice(collected)
    assert found is not None and SliceFlags.STORE_FULL in found.flags


def test_what_is_open_is_kept_and_what_is_closed_is_evicted() -> None:
    def open_and_write(both: Differential) -> None:
        both.open(0, TRACES[0])
        both.put(both.handles[0], 0, both.data(100))

    both = checked(
        open_and_write,
        lambda both: both.burst(0, 0, TRACES[1], 1, True),
        lambda both: both.go_round(0, 0, 2),
        lambda both: both.collect(TRACES[0]),
        lambda both: both.collect(TRACES[1]),
        lambda both: both.release(TRACES[0], abandoned=True),
        lambda both: both.collect(TRACES[0]),
    )
    assert both.model.counters.second_chances > 0
    kept, evicted = (both.model.slice(trace) for trace in TRACES[:2])
    assert kept is not None and kept.flags == SliceFlags.HELD | SliceFlags.ABANDONED
    assert evicted is not None
    assert evicted.flags == SliceFlags.EVICTED | SliceFlags.BY_FINGERPRINT


def test_losses_that_nobody_can_tie_to_a_trace_make_all_suspect() -> None:
    both = checked(
        lambda both: both.burst(0, 0, TRACES[0], 1, True),
        lambda both: both.collect(TRACES[0]),
        lambda both: both.lose_many(0, 0, 70),
        lambda both: both.poll(),
        lambda both: both.collect(TRACES[1]),
        lambda both: both.restart(),
        lambda both: both.exit(0),
    )
    for trace in TRACES[:2]:
        found = both.model.slice(trace)
        assert found is not None and SliceFlags.MAYBE_LOSSY in found.flags


def test_who_writes_nothing_after_a_restart_is_not_introduced_again() -> None:
    """What is open was kept elsewhere when its segment was reclaimed."""

    def open_and_write(both: Differential) -> None:
        both.open(1, TRACES[0])
        both.put(both.handles[0], 0, both.data(100))

    both = checked(
        open_and_write,
        lambda both: both.collect(TRACES[0]),
        lambda both: both.poll(),
        lambda both: both.lose_many(0, 0, 25),
        lambda both: both.restart(),
        lambda both: both.exit(0),
        lambda both: both.exit(1),
    )
    found = both.model.slice(TRACES[0])
    assert found is not None and not found.open_handles


def test_what_a_process_kept_is_not_in_doubt_once_all_its_segments_are_gone() -> None:
    """Nobody lost anything: there is no latest loss that might concern it."""

    def open_and_write(both: Differential) -> None:
        both.open(0, TRACES[0])
        both.put(both.handles[0], 0, both.data(100))

    both = checked(
        open_and_write,
        lambda both: both.go_round(0, 0, 2),
        lambda both: both.exit(0),
        lambda both: both.exit(1),
        lambda both: both.go_round(1, 0, 2),
        lambda both: both.collect(TRACES[0]),
    )
    assert len(both.model.state.clients) == 2
    found = both.model.slice(TRACES[0])
    assert found is not None and found.flags == SliceFlags.HELD


def test_of_what_is_reported_in_full_only_the_mark_is_kept() -> None:
    both = checked(
        lambda both: both.burst(0, 0, TRACES[0], 3, True),
        lambda both: both.collect(TRACES[0]),
        lambda both: both.trim(TRACES[0], 1.0),
        lambda both: both.burst(0, 0, TRACES[0], 1, True),
        lambda both: both.poll(),
        lambda both: both.trim(TRACES[0], 1.0),
        lambda both: both.restart(),
    )
    assert both.model.store_usage().used_bytes == BLOCK_BYTES


def test_what_another_percentage_leaves_out_is_in_doubt_and_nothing_else() -> None:
    """Held already, collected later, or looked for by a successor."""

    def record(both: Differential, threshold: int) -> None:
        both.native.plane.set_sampling(threshold, trust_incoming=False)
        both.model.set_sampling(threshold)
        both.work()

    both = checked(
        lambda both: [both.burst(0, 0, trace, 1, True) for trace in TRACES],
        lambda both: both.collect(TRACES[0]),
        lambda both: both.collect(TRACES[1]),
        lambda both: record(both, 1 << 63),
        lambda both: both.collect(TRACES[2]),
        lambda both: record(both, 1 << 62),
        lambda both: [both.collect(trace) for trace in TRACES],
    )
    doubted = [both.model.slice(trace) for trace in TRACES]
    flags = {found.flags for found in doubted if found is not None}
    assert flags == {SliceFlags.HELD, SliceFlags.HELD | SliceFlags.MAYBE_LOSSY}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_what_a_process_fired_before_it_was_killed_is_told(restarts: bool, writes: bool) -> None:
    """Also if the daemon was away then, and if nothing else is left of the process."""
    told: list[DataPlaneEvent] = []

    def fire_and_die(both: Differential) -> None:
        if writes:
            both.burst(0, 0, TRACES[0], 1, True)
        both.fire(0, TRACES[0])
        native, model = both.clients[0]
        both.native.exit_client(native, both.now_ns)
        both.model.exit_client(model, both.now_ns)
        if restarts:
            both.native.restart()
            both.model.restart()
            both.model.clock_pair(both.now_ns, both.now_ns)
        told.extend(both.work())
        both.clients[0] = both.attach()

    checked(fire_and_die)
    (fired,) = [event for event in told if isinstance(event, LocalTrigger)]
    assert fired.trace == TRACES[0]


def test_what_a_killed_process_lost_is_told_though_it_never_ended() -> None:
    def fill_and_lose(both: Differential) -> None:
        both.collect(TRACES[0])
        filler = both.begin(0, TRACES[1])
        while both.put(filler, 0, both.data(RECORD_BYTES)):
            pass
        both.open(0, TRACES[0])
        assert not both.put(both.handles[0], 0, both.data(RECORD_BYTES))

    both = checked(fill_and_lose, lambda both: both.exit(0))
    found = both.model.slice(TRACES[0])
    assert found is not None and SliceFlags.LOSSY in found.flags


def test_the_end_of_a_handle_is_told_though_much_was_lost() -> None:
    """The last place is kept for it."""

    def lose_by_turns(both: Differential) -> None:
        for trace in TRACES[:2]:
            both.collect(trace)
            both.handles.append(both.begin(0, trace))
            assert both.put(both.handles[-1], 0, both.data(8))
        both.poll()
        filler = both.begin(0, TRACES[2])
        while both.put(filler, 0, both.data(RECORD_BYTES)):
            pass
        for number in range(100):
            assert not both.put(both.handles[number % 2], 0, both.data(RECORD_BYTES))
        both.finish(both.handles.pop(0), 0)

    both = checked(lose_by_turns, lambda both: both.poll())
    ended, open_still = (both.model.slice(trace) for trace in TRACES[:2])
    assert ended is not None and not ended.open_handles
    assert open_still is not None and open_still.open_handles == 1


@pytest.mark.parametrize("thread", [0, 1])
def test_a_handle_that_another_thread_ends_is_closed(thread: int) -> None:
    """Whichever's segment is looked at first."""

    def begin_and_end(both: Differential) -> None:
        both.open(0, TRACES[0])
        both.put(both.handles[0], thread, both.data(100))
        # A thread writes one run at a time.
        both.burst(0, thread, TRACES[1], 1, False)
        both.put(both.handles[0], 1 - thread, both.data(100))
        both.finish(both.handles.pop(), 1 - thread)

    both = checked(
        lambda both: both.burst(0, 0, TRACES[1], 1, True),
        lambda both: both.burst(0, 1, TRACES[1], 1, True),
        lambda both: both.collect(TRACES[0]),
        begin_and_end,
        lambda both: both.poll(),
    )
    found = both.model.slice(TRACES[0])
    assert found is not None and found.flags == SliceFlags.HELD and not found.open_handles


@pytest.mark.parametrize("goes_round", [False, True])
def test_records_that_make_no_sense_hide_only_what_stands_behind_them(goes_round: bool) -> None:
    """Also in a run that was kept: what could be read of it is there, and that there was more."""
    node = NodeId(5)

    def write_and_lie(both: Differential) -> None:
        both.open(0, TRACES[0])
        handle = both.handles[0]
        both.put(handle, 0, both.data(100))
        both.put(handle, 0, both.data(200))
        both.lie(handle, 0)
        both.put(handle, 0, Breadcrumb(node, "behind it"))

    steps: list[Callable[[Differential], object]] = [write_and_lie]
    if goes_round:
        steps += [
            lambda both: both.burst(0, 0, TRACES[1], 1, True),
            lambda both: both.go_round(0, 0, 2),
        ]
    both = checked(*steps, lambda both: both.collect(TRACES[0]))
    found = both.model.slice(TRACES[0])
    assert found is not None and SliceFlags.HELD in found.flags
    assert (SliceFlags.CORRUPT in found.flags) != goes_round
    assert (SliceFlags.EVICTED in found.flags) == goes_round
    assert not found.crumbs
