# SPDX-License-Identifier: Apache-2.0
"""The model of the data plane keeps the promises of node.h under any use."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from appliance.core.dataplane import SliceChanged
from formats.records import Body, Data
from formats.slices import SliceDecoder
from protocol.messages import Group, SliceFlags, TraceId
from testbed.encoding import encode_record
from tests.simulation.pool import ClientModel, Handle, PoolConfig, PoolModel

S = 1_000_000_000
TRACES = [TraceId(number.to_bytes(16, "big")) for number in range(1, 9)]
Written = Counter[tuple[int, int, Body]]


class PoolMachine(RuleBasedStateMachine):
    """Processes write, the node works, and nothing incomplete passes for whole."""

    def __init__(self) -> None:
        super().__init__()
        config = PoolConfig(
            pool_bytes=24 * 1024,
            arena_bytes=16 * 1024,
            store_bytes=24 * 2048,
            segment_bytes=1024,
            stock_segments=2,
            trace_bytes_max=16 << 10,
        )
        self.pool = PoolModel(config, "n1")
        self.pool.clock_pair(1, 1)
        self.now_ns = S
        self.clients: list[ClientModel] = [self.new_client(), self.new_client()]
        self.open: list[Handle] = []
        self.written: dict[TraceId, Written] = {trace: Counter() for trace in TRACES}
        self.serial = 0

    @initialize(search_ns=st.sampled_from((0, S // 2)))
    def search_for(self, search_ns: int) -> None:
        self.pool.state.config = replace(self.pool.config, search_ns=search_ns)

    def new_client(self) -> ClientModel:
        return self.pool.add_client(1, "service", S)

    @rule(client=st.integers(0, 1), trace=st.sampled_from(TRACES))
    def begin(self, client: int, trace: TraceId) -> None:
        self.open.append(self.pool.open(self.clients[client], trace))

    @rule(
        client=st.integers(0, 1),
        trace=st.sampled_from(TRACES),
        records=st.integers(1, 30),
        node_is_awake=st.booleans(),
    )
    def burst(self, client: int, trace: TraceId, records: int, node_is_awake: bool) -> None:
        handle = self.pool.open(self.clients[client], trace)
        for _ in range(records):
            self.put(handle, 0, 300)
            if node_is_awake and self.pool.stock_is_low(handle.client):
                self.pool.poll(self.now_ns)
        self.pool.close(handle, 0)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), thread=st.integers(0, 1), size=st.integers(8, 400))
    def write(self, data: st.DataObject, thread: int, size: int) -> None:
        self.put(data.draw(st.sampled_from(self.open)), thread, size)

    def put(self, handle: Handle, thread: int, size: int) -> None:
        self.serial += 1
        body = Data(1, self.serial.to_bytes(8, "big") + bytes(size - 8))
        self.pool.write(handle, thread, body, self.now_ns)
        # Lost or not: it was written.
        self.written[handle.trace][handle.client.number, handle.number, body] += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), thread=st.integers(0, 1))
    def end(self, data: st.DataObject, thread: int) -> None:
        handle = data.draw(st.sampled_from(self.open))
        self.open.remove(handle)
        self.pool.close(handle, thread)

    @rule(passed_ns=st.integers(0, S))
    def poll(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        self.pool.poll(self.now_ns)

    @rule(trace=st.sampled_from(TRACES))
    def collect(self, trace: TraceId) -> None:
        self.pool.collect(trace, Group("t", trace), self.now_ns)

    @rule(trace=st.sampled_from(TRACES), abandoned=st.booleans())
    def release(self, trace: TraceId, abandoned: bool) -> None:
        if self.pool.slice(trace) is not None:
            self.pool.release(trace, abandoned=abandoned, now_ns=self.now_ns)

    @rule(client=st.integers(0, 1))
    def exit(self, client: int) -> None:
        gone = self.clients[client]
        self.open = [handle for handle in self.open if handle.client is not gone]
        self.pool.exit_client(gone, self.now_ns)
        self.clients[client] = self.new_client()

    @rule()
    def restart(self) -> None:
        self.pool.restart()

    @invariant()
    def bounds_hold(self) -> None:
        assert self.pool.frames_used <= self.pool.frames_max
        usage = self.pool.store_usage()
        assert usage.used_bytes <= usage.capacity_bytes

    @invariant()
    def what_is_not_whole_says_so(self) -> None:
        for trace, written in self.written.items():
            found = self.pool.slice(trace)
            self.pool.poll(self.now_ns)
            if found is None:
                # What a trigger would get now.
                flags = self.pool.flags_of(trace)
                runs = self.pool.records_of(trace)
                flags |= self.pool.flags_of(trace)
                have = sum(len(data) for data in runs.values())
                whole = sum(n * len(encode_record(body, 0)) for (_, _, body), n in written.items())
                assert flags or have >= whole
                continue
            found = self.pool.slice(trace)
            assert found is not None
            if found.searching:
                with pytest.raises(ValueError, match="still searched for"):
                    self.pool.read(trace, 0, 1)
                continue
            data = self.pool.read(trace, 0, found.bytes)
            decoder = SliceDecoder()
            records = decoder.feed(data)
            assert decoder.whole and not decoder.malformed
            have_records = Counter((r.client, r.handle, r.body) for r in records)
            assert have_records <= written
            if not found.flags & ~SliceFlags.HELD:
                assert have_records == written


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_the_end_of_a_search_is_an_event_and_only_then_anything_is_known() -> None:
    pool = PoolModel(PoolConfig(search_ns=10), "n1")
    client = pool.add_client(1, "service", S)
    handle = pool.open(client, TRACES[0])
    pool.write(handle, 0, Data(1, b"x"), S)
    asked = pool.collect(TRACES[0], Group("t", TRACES[0]), S)
    assert asked.searching
    assert (asked.bytes, asked.flags, asked.open_handles) == (0, SliceFlags.NONE, 0)
    assert pool.next_search_ns() == S + 10
    pool.poll(S + 9)
    copied = pool.slice(TRACES[0])
    assert copied is not None
    assert copied.bytes > 0
    assert copied == replace(asked, bytes=copied.bytes)
    assert SliceChanged(TRACES[0]) in pool.poll(S + 10)
    found = pool.slice(TRACES[0])
    assert found is not None
    assert not found.searching
    assert (found.flags, found.open_handles) == (SliceFlags.HELD, 1)
    assert pool.next_search_ns() is None
