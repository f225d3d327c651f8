# SPDX-License-Identifier: Apache-2.0
"""A pool that is gone round, in one process and virtual time: what is missing was evicted."""

from __future__ import annotations

from dataclasses import dataclass

from formats.records import Data
from formats.slices import SliceDecoder
from protocol.messages import Group, SliceFlags, TraceId
from runtime.settings.node import Settings
from tests.recall.horizon import Horizon, Reading
from tests.simulation.native import NativeClient, NativePool

S = 1_000_000_000
POOL_BYTES = 4 << 20
RECORDS, RECORD_BYTES = 3, 2000
TRACES = 3 * POOL_BYTES // (RECORDS * RECORD_BYTES)
STEP_NS = S // 100


@dataclass(frozen=True, slots=True)
class Written:
    """What the writer knows of a trace."""

    trace: TraceId
    at_ns: int
    serials: tuple[int, ...]


def write(pool: NativePool, client: NativeClient, number: int, now_ns: int) -> Written:
    trace = TraceId((number + 1).to_bytes(16, "big"))
    handle = pool.open(client, trace)
    serials = tuple(number * RECORDS + i for i in range(RECORDS))
    for serial in serials:
        body = Data(1, serial.to_bytes(8, "big") + bytes(RECORD_BYTES))
        assert pool.write(handle, 0, body, now_ns), "lost, and not evicted"
    pool.close(handle, 0)
    return Written(trace, now_ns, serials)


def test_what_a_late_trigger_does_not_find_was_evicted_and_is_said_to_be() -> None:
    settings = Settings(
        node="n", pool_bytes=POOL_BYTES, arena_bytes=POOL_BYTES, store_bytes=16 << 20
    )
    horizon = Horizon()
    written = []
    now_ns = S
    with NativePool(settings, now_ns) as pool:
        client = pool.add_client(1, "writer", now_ns)
        for number in range(TRACES):
            now_ns += STEP_NS
            written.append(write(pool, client, number, now_ns))
            pool.poll(now_ns)
            horizon.readings.append(Reading.of(now_ns, now_ns, pool.plane.metrics()))
        horizon_ns = horizon.sure_ns(now_ns)
        assert horizon_ns
        fates = []
        for one in written:
            found = pool.plane.collect(one.trace, Group("late", one.trace), now_ns)
            pool.poll(now_ns)
            found = pool.plane.slice(one.trace) or found
            records = SliceDecoder().feed(pool.plane.read(one.trace, 0, found.bytes))
            bodies = [record.body for record in records]
            serials = [
                int.from_bytes(body.payload[:8], "big") for body in bodies if isinstance(body, Data)
            ]
            is_whole = tuple(serials) == one.serials
            assert is_whole == (found.flags == SliceFlags.HELD)
            assert is_whole != (SliceFlags.EVICTED in found.flags)
            assert is_whole or now_ns - one.at_ns >= horizon_ns
            fates.append(is_whole)
    # What is whole is younger than all that is not; and the pool holds what it should.
    assert fates == sorted(fates)
    kept = sum(fates) * RECORDS * RECORD_BYTES
    assert 0.5 * POOL_BYTES < kept < POOL_BYTES
    assert 0.9 * sum(fates) * STEP_NS < horizon_ns <= (sum(fates) + 1) * STEP_NS
