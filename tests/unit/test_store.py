# SPDX-License-Identifier: Apache-2.0
"""What was durable is there again, and the bounds take the oldest that nobody waits for."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.clock import ClockOffset
from coordinator.core.records import (
    AppendSlice,
    DropNode,
    PutAbandoned,
    PutNode,
    PutReleased,
    PutStatus,
    PutTrigger,
    PutVerdict,
    PutVerdictAgain,
    Record,
    StoredSlice,
    StoredTrace,
    Write,
)
from coordinator.core.verdict import Reason, ReasonKind, Verdict
from coordinator.counters import Deleted
from coordinator.store.keeping import Keep
from coordinator.store.reader import StoreReader, TraceRow, Wanted
from coordinator.store.retention import StoreLimits
from coordinator.store.rows import SliceRow
from coordinator.store.schema import StoreError
from coordinator.store.tables import condensed
from coordinator.store.writer import Store
from formats.records import Data
from formats.slices import PieceKind, Process
from protocol.messages import (
    CHUNK_BYTES_MAX,
    Group,
    NodeId,
    SliceFlags,
    SliceStatus,
    Source,
    TraceId,
    TriggerFired,
)
from protocol.verdicts import VerdictKind
from runtime.log import Log
from testbed.encoding import encode_piece, encode_process, encode_record
from tests.unit.logs import SILENT, logs_to
from tests.unit.old_stores import old_store

ROOMY = StoreLimits(1 << 40, Keep(1e9))


def trace_id(number: int) -> TraceId:
    return TraceId(number.to_bytes(16, "big"))


T1, T2, T3 = trace_id(1), trace_id(2), trace_id(3)
FIRED = TriggerFired(Group("latency", T1), (T2,), "p99 is 3 ms", Source.KERNEL, 1234, 5)
STATUS = SliceStatus(
    T1, True, SliceFlags.LOSSY, 300, 2, (NodeId(1), NodeId((1 << 64) - 1), NodeId(0)), 1
)
VERDICT = Verdict(
    3,
    VerdictKind.PARTIAL,
    (Reason(ReasonKind.NO_ANSWER, "b", 'did not say "here"'),),
    ("a", "b"),
    6,
    2,
    1000,
    2000,
)


class Clock:
    """Unix time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Driver:
    """A store, the tokens that it called durable, and what it logged."""

    def __init__(
        self,
        path: Path,
        limits: StoreLimits,
        clock: Clock,
    ) -> None:
        self.durable: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.log: list[str] = []
        self.store = Store(path, limits, self.durable.put, logs_to(self.log), clock, clock)
        self.token = 0

    def write(self, *records: Record) -> None:
        """Write, and wait until it is durable."""
        writes = []
        for record in records:
            self.token += 1
            writes.append(Write(self.token, record))
        self.store.submit(writes)
        while self.durable.get() < self.token:
            pass


def passed(store: Store) -> None:
    """Wait until its thread has done something more, were it only to look."""
    for _ in range(2):
        sign = threading.Event()
        store.give_sign(sign.set)
        sign.wait()


@contextlib.contextmanager
def driver(path: Path, limits: StoreLimits = ROOMY, clock: Clock | None = None) -> Iterator[Driver]:
    here = Driver(path, limits, clock or Clock())
    with here.store:
        yield here
    assert here.log == []


def read(reader: StoreReader, trace: TraceId) -> list[bytes]:
    """The bytes of a trace's slices."""
    slices = []
    for part in reader.slices(trace):
        data = b""
        while len(data) < part.bytes:
            chunk = reader.chunk(trace, part, len(data))
            assert chunk
            data += chunk
        slices.append(data)
    return slices


def recovered(path: Path, released_max: int = 100) -> dict[TraceId, StoredTrace]:
    with driver(path), StoreReader(path) as reader:
        return {
            trace.trace: replace(
                trace,
                triggers=tuple(trace.triggers),
                slices=tuple(
                    replace(part, chunks=tuple(filter(None, [b"".join(part.chunks)])))
                    for part in trace.slices
                ),
            )
            for trace in reader.recover_traces(released_max)
        }


def test_a_copy_that_sqlite_makes_while_it_is_written_is_a_store(tmp_path: Path) -> None:
    """As docs/operating.md says to back it up: by sqlite3's .backup, which is the same call."""
    with driver(tmp_path / "t.sqlite") as here:
        here.write(PutTrigger("a", FIRED), AppendSlice(T1, "a", 1, 0, b"whole"))
        with (
            contextlib.closing(sqlite3.connect(tmp_path / "t.sqlite")) as original,
            contextlib.closing(sqlite3.connect(tmp_path / "copy.sqlite")) as copy,
        ):
            original.backup(copy)
        here.write(AppendSlice(T1, "a", 1, 5, b", and more"))
    with driver(tmp_path / "copy.sqlite") as here, StoreReader(tmp_path / "copy.sqlite") as reader:
        assert read(reader, T1) == [b"whole"]
        here.write(AppendSlice(T1, "a", 1, 5, b" again"))
        assert read(reader, T1) == [b"whole again"]


def test_a_closed_trace_can_be_recalled(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with driver(path) as here, StoreReader(path) as reader:
        here.write(
            PutTrigger("a", FIRED),
            PutStatus("a", STATUS, None),
            AppendSlice(T1, "a", 1, 0, b"abcdef"),
            PutVerdict(T1, VERDICT),
        )
        assert reader.closed(T1) is None
        assert reader.closed(T3) is None
        here.write(PutReleased(T1, least=(("a", 4),)))
        found = StoredTrace(
            T1,
            slices=(StoredSlice("a", STATUS, 1, 6, least=4),),
            verdict=VERDICT,
            released=True,
        )
        assert reader.closed(T1) == found
        # Of another slice nobody knows yet.
        here.write(PutReleased(T1, released=False), AppendSlice(T1, "a", 2, 0, b"xyz"))
        assert reader.closed(T1) is None
        here.write(PutReleased(T1))
        again = reader.closed(T1)
        assert again is not None
        assert [(part.epoch, part.length, part.least) for part in again.slices] == [(2, 3, None)]
    assert recovered(path)[T1].slices[0].least is None


def test_a_query_sees_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with driver(path) as here:
        clock = ClockOffset(-7, 3)
        here.write(
            PutTrigger("a", FIRED),
            PutStatus("a", STATUS, clock),
            AppendSlice(T1, "a", 1, 0, b"abc"),
            AppendSlice(T1, "a", 1, 3, b"def"),
            AppendSlice(T1, "b", 1, 0, b"xyz"),
            PutVerdict(T1, VERDICT),
        )
        with StoreReader(path) as reader:
            fired = (PutTrigger("a", FIRED),)
            assert reader.trace(T1) == TraceRow(T1, fired, 0, VERDICT)
            assert reader.trace(T2) == TraceRow(T2, fired, 0, None)
            assert reader.trace(T3) is None
            assert reader.slices(T1) == [
                SliceRow("a", STATUS, clock, 1, 6),
                SliceRow("b", None, None, 1, 3),
            ]
            assert read(reader, T1) == [b"abcdef", b"xyz"]
            assert reader.slices(T3) == []


def test_a_query_never_joins_the_bytes_of_two_slices(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with driver(path) as here, StoreReader(path) as reader:
        for said in (
            AppendSlice(T1, "a", 1, 0, b"abc"),
            AppendSlice(T1, "a", 1, 3, b"def"),
        ):
            here.write(said)
        (part,) = reader.slices(T1)
        assert reader.chunk(T1, part, 0) == b"abc"
        for said in (
            AppendSlice(T1, "a", 2, 0, b"xyz"),
            AppendSlice(T1, "a", 2, 3, b"uvw"),
        ):
            here.write(said)
        assert reader.chunk(T1, part, 3) is None
        assert read(reader, T1) == [b"xyzuvw"]


def test_a_query_shows_the_first_of_many_triggers(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    fired = [
        PutTrigger("a", replace(FIRED, group=Group(f"rule{number}", T1), fired_at_ns=number))
        for number in range(300)
    ]
    with driver(path) as here:
        here.write(*fired)
        with StoreReader(path) as reader:
            row = reader.trace(T1)
            assert row is not None
            assert row.triggers == tuple(fired[:256])
            assert row.triggers_omitted == 44


def test_listing_selects_and_goes_from_new_to_old(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    clock = Clock()
    first_ns = int((clock.now_s + 1) * 1e9)
    with driver(path, clock=clock) as here:
        for number, kind in enumerate((VerdictKind.COHERENT, VerdictKind.LOSSY, None), start=1):
            clock.now_s += 1
            trace = trace_id(number)
            name = "odd" if number % 2 else "even"
            here.write(PutTrigger("a", replace(FIRED, group=Group(name, trace), laterals=())))
            if kind is not None:
                here.write(PutVerdict(trace, replace(VERDICT, kind=kind, bytes=0)))
        with StoreReader(path) as reader:
            assert reader.list_traces(Wanted()) == [T3, T2, T1]
            assert reader.list_traces(Wanted(), 2) == [T3, T2]
            assert reader.list_traces(Wanted(trigger="odd")) == [T3, T1]
            assert reader.list_traces(Wanted(verdict="lossy")) == [T2]
            assert reader.list_traces(Wanted(trigger="odd", verdict="lossy")) == []
            second = reader.list_traces(
                Wanted(since_ns=first_ns + 10**9, until_ns=first_ns + 10**9)
            )
            assert second == [T2]
            assert reader.is_wanted(T2, Wanted(since_ns=first_ns + 10**9))
            assert not reader.is_wanted(T1, Wanted(since_ns=first_ns + 10**9))


def test_everything_is_recovered(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    abandoned = PutAbandoned(FIRED.group, "b")
    clock = Clock()
    with driver(path, clock=clock) as here:
        for node in (
            PutNode("a", ("10.0.0.1", "fe80::1"), 1),
            PutNode("c", ("10.0.0.3",)),
            PutNode("b", ()),
            PutNode("a", ("10.0.0.2",), (1 << 64) - 1),
            DropNode("c"),
        ):
            here.write(node)
            clock.now_s += 1
        here.write(
            PutTrigger("a", FIRED),
            PutTrigger("b", FIRED),
            abandoned,
            PutStatus("a", STATUS, None),
            AppendSlice(T1, "a", 1, 0, b"abc"),
            AppendSlice(T1, "a", 1, 3, b"def"),
            PutVerdict(T1, VERDICT),
            AppendSlice(T3, "c", 1, 0, b"released"),
            PutReleased(T3, released=True),
        )
    with driver(path) as here:
        assert here.store.recover_nodes() == [
            PutNode("b", ()),
            PutNode("a", ("10.0.0.2",), (1 << 64) - 1),
        ]
    traces = recovered(path)
    assert set(traces) == {T1, T2, T3}
    one = traces[T1]
    assert one.triggers == (PutTrigger("a", FIRED), PutTrigger("b", FIRED))
    assert one.abandoned == (abandoned,)
    assert one.verdict == VERDICT
    assert not one.released
    assert [(s.node, s.status, s.length, s.chunks) for s in one.slices] == [
        ("a", STATUS, 6, (b"abcdef",))
    ]
    # The group is its primary's; the lateral is known all the same.
    assert traces[T2] == StoredTrace(T2)
    assert traces[T3].released
    assert [(s.node, s.length, s.chunks) for s in traces[T3].slices] == [("c", 8, ())]


def test_the_bytes_of_a_slice_are_of_one_epoch(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    status = replace(STATUS, epoch=(1 << 63) - 1)
    with driver(path) as here:
        here.write(
            PutStatus("a", replace(STATUS, epoch=3), None),
            AppendSlice(T1, "a", 3, 0, b"abc"),
            AppendSlice(T1, "a", 3, 3, b"def"),
            PutStatus("b", status, None, restarted=True),
            PutStatus("b", status, None),
        )
    one, two = recovered(path)[T1].slices
    assert one == StoredSlice("a", replace(STATUS, epoch=3), 3, 6, chunks=(b"abcdef",))
    assert two == StoredSlice("b", status, 0, 0, restarted=True)
    # The next one begins at its beginning, and ends the one before with its status.
    with driver(path) as here:
        here.write(
            AppendSlice(T1, "a", 4, 0, b"xy"),
            AppendSlice(T1, "a", 4, 2, b"z"),
            AppendSlice(T1, "b", status.epoch, 0, b"first"),
        )
    one, two = recovered(path)[T1].slices
    assert one == StoredSlice("a", None, 4, 3, restarted=True, chunks=(b"xyz",))
    assert two == StoredSlice("b", status, status.epoch, 5, restarted=True, chunks=(b"first",))


def test_a_slice_is_not_continued_with_another_one(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    here = Driver(path, ROOMY, Clock())
    with here.store:
        here.write(AppendSlice(T1, "a", 1, 0, b"abc"), AppendSlice(T1, "a", 2, 3, b"def"))
    assert any("not stored" in line for line in here.log)
    (one,) = recovered(path)[T1].slices
    assert one == StoredSlice("a", None, 1, 3, chunks=(b"abc",))


def test_the_first_trace_is_recovered_as_soon_where_there_are_many(tmp_path: Path) -> None:
    """A coordinator listens when it has that, and takes up the others beside what it hears."""
    steps = []
    for count in (10, 2000):
        path = tmp_path / f"{count}.db"
        with driver(path) as here:
            here.write(*(PutReleased(trace_id(n), released=False) for n in range(1, count + 1)))
        with StoreReader(path) as reader:
            done: list[None] = []
            reader.connection.set_progress_handler(partial(done.append, None), 1)
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr("coordinator.store.rows._KEYS_AT_ONCE", 5)
                stored = reader.recover_traces(100)
                assert next(iter(stored)).trace == trace_id(1)
            steps.append(len(done))
    assert steps[1] <= steps[0]


@pytest.mark.parametrize("keys_at_once", [1, 2, 4096])
def test_only_the_last_released_are_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys_at_once: int
) -> None:
    monkeypatch.setattr("coordinator.store.rows._KEYS_AT_ONCE", keys_at_once)
    path = tmp_path / "store.db"
    clock = Clock()
    with driver(path, clock=clock) as here:
        for number in range(1, 6):
            clock.now_s += 1
            here.write(AppendSlice(trace_id(number), "a", 1, 0, b"x"))
            if number != 1:
                here.write(PutReleased(trace_id(number), released=True))
    assert set(recovered(path, released_max=2)) == {T1, trace_id(4), trace_id(5)}


def test_a_verdict_never_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with driver(path) as here:
        newer = replace(VERDICT, version=2, bytes=0)
        here.write(PutVerdict(T1, newer))
        here.write(PutVerdict(T1, replace(newer, version=1, kind=VerdictKind.COHERENT)))
        with StoreReader(path) as reader:
            row = reader.trace(T1)
            assert row is not None
            assert row.verdict == newer


def test_all_that_is_queued_is_written_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.store.writer._WRITES_AT_ONCE", 4)
    path = tmp_path / "t.sqlite"
    here = Driver(path, ROOMY, Clock())
    pieces = [b"%04d" % number for number in range(100)]
    with here.store:
        here.store.submit(
            [
                Write(number + 1, AppendSlice(T1, "a", 1, 4 * number, piece))
                for number, piece in enumerate(pieces)
            ]
        )
    with StoreReader(path) as reader:
        assert read(reader, T1) == [b"".join(pieces)]


def test_a_chunk_is_stored_as_it_came_where_all_of_it_is_new(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    compressor = zstandard.ZstdCompressor(level=19)
    data = random.Random(1).randbytes(50) * 20
    pieces = [(0, data[:600]), (500, data[500:800]), (800, data[800:])]
    frames = [compressor.compress(piece) for _, piece in pieces]
    with driver(path) as here, StoreReader(path) as reader:
        for (offset, piece), frame in zip(pieces, frames, strict=True):
            here.write(AppendSlice(T1, "a", 1, offset, piece, frame))
        rows = reader.connection.execute("SELECT data FROM chunks ORDER BY id").fetchall()
        assert [(frame,) in rows for frame in frames] == [True, False, True]
        assert read(reader, T1) == [data]


@settings(max_examples=20)
@given(
    st.binary(min_size=1, max_size=200),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 80)), max_size=10),
)
def test_repeated_and_overlapping_bytes_are_stored_once(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, steps: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("store") / "store.db"
    have = 0
    with driver(path) as here:
        for back, size in [*steps, (0, len(content))]:
            start = max(0, have - back)
            here.write(AppendSlice(T1, "a", 1, start, content[start : start + size]))
            have = max(have, min(start + size, len(content)))
        with StoreReader(path) as reader:
            assert read(reader, T1) == [content]


def test_a_slice_without_its_beginning_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    here = Driver(path, ROOMY, Clock())
    with here.store:
        here.write(AppendSlice(T1, "a", 1, 5, b"late"), AppendSlice(T2, "a", 1, 0, b"whole"))
        here.write(AppendSlice(T1, "a", 1, 9, b"later"))
        with StoreReader(path) as reader:
            assert read(reader, T1) == [b""]
            assert read(reader, T2) == [b"whole"]
    # Counted in bytes, and told once.
    assert here.store.counters.bytes_cut == len(b"late" + b"later")
    assert len(here.log) == 1
    assert "its first 5 bytes were deleted" in here.log[0]


def test_a_trace_that_comes_up_again_is_in_assembly_again(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with driver(path) as here:
        here.write(AppendSlice(T1, "a", 1, 0, b"abc"), PutReleased(T1, released=True))
        here.write(PutReleased(T1, released=False))
    assert not recovered(path)[T1].released


def test_a_verdict_on_what_was_deleted_says_so(tmp_path: Path) -> None:
    """The trace was released, and went on: only what came since is stored."""
    path = tmp_path / "store.db"
    whole = replace(VERDICT, kind=VerdictKind.COHERENT, reasons=())
    with driver(path) as here:
        here.write(AppendSlice(T1, "a", 1, 0, b"abc"), PutVerdict(T1, whole), PutReleased(T1))
        with StoreReader(path) as reader:
            row = reader.trace(T1)
            assert row is not None
            assert row.verdict is not None
            assert row.verdict.kind is VerdictKind.PARTIAL
            assert [reason.kind for reason in row.verdict.reasons] == [ReasonKind.DELETED]


def test_a_slice_that_begins_anew_keeps_what_its_node_said(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    evicted = replace(STATUS, flags=SliceFlags.EVICTED, bytes=0, open_handles=0)
    with driver(path) as here:
        here.write(PutStatus("a", evicted, None), AppendSlice(T1, "a", 9, 0, b"abc"))
    (one,) = recovered(path)[T1].slices
    assert one.restarted


def test_of_many_statuses_at_once_the_last_one_is_written() -> None:
    statuses = [PutStatus("a", replace(STATUS, bytes=size), None, size == 3) for size in range(50)]
    other = PutStatus("b", STATUS, None)
    assert list(condensed([*statuses, other, statuses[0]])) == [
        replace(statuses[0], restarted=True),
        other,
    ]
    begins = AppendSlice(T1, "a", 1, 0, b"abc")
    goes_on = AppendSlice(T1, "a", 1, 3, b"def")
    assert list(condensed([statuses[0], goes_on, statuses[1]])) == [statuses[1], goes_on]
    kept: list[Record] = [statuses[0], begins, statuses[1]]
    assert list(condensed(kept)) == kept


def test_of_many_chunks_of_a_slice_at_once_one_is_written() -> None:
    chunks = [
        AppendSlice(T1, "a", 1, 7 * index, b"%07d" % index, b"frame %d" % index)
        for index in range(50)
    ]
    other = AppendSlice(T1, "b", 1, 0, b"abc", b"frame")
    whole = replace(chunks[0], data=b"".join(chunk.data for chunk in chunks))
    written = list(condensed([chunks[0], other, *chunks[1:]]))
    assert written == [whole, other]
    # Those are of parts of it.
    assert [each.zstd for each in written if isinstance(each, AppendSlice)] == [b"", b"frame"]
    verdict = PutVerdict(T1, VERDICT)
    apart: list[list[Record]] = [
        [chunks[0], verdict, chunks[1]],  # which is on the first alone
        [chunks[0], chunks[2]],
        [chunks[0], replace(chunks[1], epoch=2)],
        [chunks[0], chunks[0]],
        [
            replace(chunks[0], data=bytes(CHUNK_BYTES_MAX)),
            replace(other, node="a", offset=CHUNK_BYTES_MAX),
        ],
    ]
    for records in apart:
        assert list(condensed(records)) == records


_SAID = st.builds(
    PutStatus,
    st.sampled_from("ab"),
    st.builds(
        SliceStatus,
        st.sampled_from([T1, T2]),
        st.booleans(),
        st.sampled_from([SliceFlags(0), SliceFlags.LOSSY, SliceFlags.EVICTED]),
        st.integers(0, 20),
        st.integers(0, 1),
        st.just(()),
        st.integers(0, 2),
    ),
    st.none(),
    st.booleans(),
)
_CAME = st.builds(
    AppendSlice,
    st.sampled_from([T1, T2]),
    st.sampled_from("ab"),
    st.integers(1, 2),
    st.integers(0, 4),
    st.binary(max_size=4),
)
_JUDGED = st.builds(
    PutVerdict,
    st.sampled_from([T1, T2]),
    st.builds(replace, st.just(VERDICT), version=st.integers(1, 3), bytes=st.integers(0, 9)),
)


@settings(max_examples=50)
@given(
    st.lists(
        _SAID | _CAME | _JUDGED | st.builds(PutReleased, st.sampled_from([T1, T2])),
        min_size=1,
        max_size=12,
    )
)
def test_what_is_written_at_once_makes_the_same_as_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    at_once, in_turn = (tmp_path_factory.mktemp("store") / "store.db" for _ in range(2))
    one, other = (Driver(path, ROOMY, Clock()) for path in (at_once, in_turn))
    with one.store, other.store:
        one.write(*records)
        for record in records:
            other.write(record)
    assert recovered(at_once) == recovered(in_turn)
    assert one.log == other.log  # of bytes without their beginning


def test_a_verdict_again_is_for_what_has_none(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    again = replace(VERDICT, reasons=(Reason(ReasonKind.DELETED, "", "too old"),), bytes=0)
    fired = replace(FIRED, group=Group("latency", T1), laterals=())
    with driver(path) as here:
        here.write(PutTrigger("a", fired), AppendSlice(T1, "a", 1, 0, b"abcdef"))
        here.write(PutVerdict(T1, VERDICT), PutReleased(T1))
        here.write(PutVerdictAgain(T1, again), PutVerdictAgain(T2, again))
        with StoreReader(path) as reader:
            row = reader.trace(T1)
            assert row is not None
            assert row.verdict == VERDICT
            assert reader.trace(T2) is None
        here.store.retention.delete_first(Deleted.BYTES)
        here.write(PutTrigger("a", fired), PutVerdictAgain(T1, again), PutReleased(T1))
        with StoreReader(path) as reader:
            row = reader.trace(T1)
            assert row is not None
            assert row.verdict == again
            assert reader.list_traces(Wanted(verdict="provisional")) == []
            assert reader.judged("latency") == (1, 1)
        # The next one of the core's is newer.
        here.write(PutVerdict(T1, replace(VERDICT, version=VERDICT.version + 1)))
    verdict = recovered(path)[T1].verdict
    assert verdict is not None
    assert verdict.version == VERDICT.version + 1


def test_a_failed_batch_is_tried_again_and_nothing_called_durable_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.store.writer._RETRY_S", 0.01)
    path = tmp_path / "store.db"
    here = Driver(path, ROOMY, Clock())
    logged: queue.SimpleQueue[str] = queue.SimpleQueue()
    here.store._log = Log(lambda entry: logged.put(entry.message))
    with here.store:
        here.store._connection.execute("PRAGMA max_page_count = 1")  # a full disk
        here.store.submit([Write(1, AppendSlice(T1, "a", 1, 0, os.urandom(100_000)))])
        assert "will try again" in logged.get()
        while here.store.counters.writes_failed < 3:
            pass
        assert here.durable.empty()
        here.store._connection.execute("PRAGMA max_page_count = 1000000")
        assert here.durable.get() == 1
        assert "can be written again" in logged.get()  # and nothing in between
    assert recovered(path)[T1].slices[0].length == 100_000


def test_what_no_store_can_take_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    """Else it would end the coordinator again and again, or nothing would be written any more."""
    path = tmp_path / "store.db"
    never = ClockOffset(1 << 63, 1)
    here = Driver(path, ROOMY, Clock())
    with here.store:
        here.write(
            AppendSlice(T1, "a", 1, 0, b"abc"),
            PutStatus("b", STATUS, never),
            AppendSlice(T1, "a", 1, 3, b"def"),
            PutTrigger("a", FIRED),
        )
        assert here.store.counters.records_left_out == 1
        assert here.store.counters.writes_failed == 0
    (line,) = here.log
    assert "a PutStatus cannot be stored" in line
    stored = recovered(path)[T1]
    assert [(each.node, each.length) for each in stored.slices] == [("a", 6)]
    assert [put.node for put in stored.triggers] == ["a"]


@pytest.mark.parametrize("at_once", [False, True])
def test_no_verdict_outlives_the_bytes_that_it_stands_on(tmp_path: Path, at_once: bool) -> None:
    path = tmp_path / "store.db"
    whole = replace(VERDICT, kind=VerdictKind.COHERENT, reasons=(), bytes=3)
    # Whoever forgot that there is a verdict begins with the first once more.
    first = replace(whole, version=1)
    records: list[Record] = [AppendSlice(T1, "a", 1, 0, b"abc"), PutVerdict(T1, whole)]
    later: list[Record] = [AppendSlice(T1, "a", 7, 0, b"left"), PutVerdict(T1, first)]
    with driver(path) as here:
        if at_once:
            here.write(*records, *later)
        else:
            here.write(*records)
            here.write(*later)
    stored = recovered(path)[T1]
    assert stored.slices[0].restarted
    verdict = stored.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.version) == (VerdictKind.PARTIAL, whole.version + 1)
    assert [(reason.kind, reason.node) for reason in verdict.reasons] == [("restarted", "a")]


def test_a_disk_without_room_for_the_journal_is_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(path: Path, *, writable: bool) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("coordinator.store.takeover.connect", connect)
    with pytest.raises(StoreError, match="disk I/O error"):
        Store(tmp_path / "store.db", ROOMY, lambda _: None, SILENT)
    monkeypatch.setattr(os, "statvfs", lambda _: Mock(f_bavail=0))
    with pytest.raises(StoreError, match="the disk is full"):
        Store(tmp_path / "store.db", ROOMY, lambda _: None, SILENT)


def test_a_disk_that_is_full_is_not_tried_with_each_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.store.writer._RETRY_S", 3600.0)
    here = Driver(tmp_path / "store.db", ROOMY, Clock())
    with here.store:
        here.store._connection.execute("PRAGMA max_page_count = 1")
        for token in range(1, 11):
            here.store.submit([Write(token, AppendSlice(T1, "a", 1, 0, os.urandom(100_000)))])
            moves = threading.Event()
            here.store.give_sign(moves.set)
            assert moves.wait(60)
        while not here.log:
            pass
        assert here.store.counters.writes_failed == 1
    assert len(here.log) == 1


def fill(here: Driver, number: int, size: int = 100_000, *, release: bool = True) -> None:
    trace = trace_id(number)
    here.write(
        PutTrigger("a", replace(FIRED, group=Group("latency", trace), laterals=())),
        AppendSlice(trace, "a", 1, 0, os.urandom(size)),
        PutVerdict(trace, VERDICT),
        *([PutReleased(trace, released=True)] if release else []),
    )


def test_what_nobody_waits_for_is_written_with_what_somebody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.store.writer._PUT_OFF_S", 1e6)
    monkeypatch.setattr("coordinator.store.writer._GATHER_S", 0.0)
    with driver(tmp_path / "store.db") as here:
        put_off, last = Write(1, PutReleased(trace_id(1))), Write(3, PutReleased(trace_id(2)))
        here.store.submit([put_off], may_wait=True)
        # Neither written, for then nothing is due, nor soon.
        assert 1e5 < here.store._due_s - time.monotonic() < 1e7
        here.store.submit([Write(2, PutNode("a", ()))])
        assert here.durable.get(timeout=30) == 2
        here.store.submit([last], may_wait=True)
        here.store.hurry()
        assert here.durable.get(timeout=30) == 3
        here.store.submit([Write(4, PutReleased(trace_id(3)))], may_wait=True)
    assert here.durable.get() == 4  # at the end


def test_who_follows_is_woken_by_changes_alone(tmp_path: Path) -> None:
    with driver(tmp_path / "store.db") as here:
        woken: list[None] = []
        here.store.follow(partial(woken.append, None))
        here.write(AppendSlice(trace_id(1), "a", 1, 0, b"x"))
        passed(here.store)
        assert not woken
        here.write(PutReleased(trace_id(1)))
        passed(here.store)
        assert len(woken) == 1


def test_bytes_are_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    clock = Clock()
    limit = 1_000_000
    with driver(path, StoreLimits(limit, Keep(1e9)), clock) as here:
        for number in range(1, 101):
            clock.now_s += 1
            fill(here, number)
        clock.now_s += 1
        fill(here, 101, size=1)  # the bounds are kept after a commit; wait for the last
    with driver(path) as here, StoreReader(path) as reader:
        assert here.store.stored_bytes <= limit
        kept = reader.list_traces(Wanted())
        assert kept == [trace_id(number) for number in range(101, 101 - len(kept), -1)]
        assert 5 <= len(kept) <= 10
    connection = sqlite3.connect(path)
    for table in ("groups", "firings", "chunks", "slices", "traces"):
        (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        assert rows == len(kept)
    connection.close()
    # What was freed is used again: the file does not grow without end.
    assert path.stat().st_size < 2 * limit


@pytest.mark.parametrize(
    "limits", [StoreLimits(100_000, Keep(1e9)), StoreLimits(1 << 40, Keep(60.0))]
)
def test_what_is_to_be_deleted_does_not_hold_up_what_is_written(
    tmp_path: Path, limits: StoreLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.store.retention._DELETE_S", 0.0)  # one at once
    clock = Clock()
    with driver(tmp_path / "store.db", clock=clock) as here:
        here.write(*(PutReleased(trace_id(number), released=True) for number in range(1, 5001)))
        passed(here.store)
        deleted: list[int] = []

        def durable(token: int) -> None:
            deleted.append(here.store.counters.traces_deleted)
            if token == here.token + 1:
                # At once, before anything is deleted after the one before.
                here.store.submit([Write(here.token + 2, PutNode("b", ()))])
            here.durable.put(token)

        here.store._on_durable = durable
        here.store.retention.limits = limits
        clock.now_s += 1000
        here.store.submit([Write(here.token + 1, PutNode("a", ()))])
        while here.durable.get() < here.token + 2:
            pass
        assert deleted[0] == 0
        assert deleted[1] < 5
        # With nobody waiting, all of it.
        while here.store.counters.traces_deleted < 2500:
            passed(here.store)


def test_to_delete_a_trace_costs_no_more_where_there_are_many(tmp_path: Path) -> None:
    steps = []
    for count in (20, 1000):
        path = tmp_path / f"{count}.db"
        records: list[Record] = []
        for trace in map(trace_id, range(1, count + 1)):
            fired = replace(FIRED, group=Group("t", trace), laterals=())
            records += [PutTrigger("a", fired), PutReleased(trace)]
        with driver(path) as here:
            here.write(*records)
        # Not entered: nobody else works on it.
        store = Driver(path, ROOMY, Clock()).store
        done: list[None] = []
        store._connection.set_progress_handler(partial(done.append, None), 10)
        assert store.retention.delete_first(Deleted.BYTES, enough_bytes=1 << 60)  # one
        steps.append(len(done))
        store._connection.close()
    assert steps[1] < 3 * steps[0]


def test_a_trace_in_assembly_is_never_deleted(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    clock = Clock()
    with driver(path, StoreLimits(500_000, Keep(10.0)), clock) as here:
        fill(here, 1, release=False)
        for number in range(2, 20):
            clock.now_s += 100
            fill(here, number)
        clock.now_s += 1
        fill(here, 20, size=1)
    with StoreReader(path) as reader:
        kept = reader.list_traces(Wanted())
        assert T1 in kept
        assert T2 not in kept
    assert recovered(path)[T1].slices[0].length == 100_000


def test_age_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    clock = Clock()
    with driver(path, StoreLimits(1 << 40, Keep(3600.0)), clock) as here:
        fill(here, 1, size=10)
        clock.now_s += 1800
        fill(here, 2, size=10)
        clock.now_s += 1801
        fill(here, 3, size=10)
        fill(here, 4, size=10)
        with StoreReader(path) as reader:
            assert set(reader.list_traces(Wanted())) == {T2, T3, trace_id(4)}


def test_who_sets_the_clock_deletes_nothing(tmp_path: Path) -> None:
    path, clock, uptime = tmp_path / "store.db", Clock(), Clock()
    limits = StoreLimits(1 << 40, Keep(3600.0))

    def kept() -> int:
        store = Store(path, limits, durable.put, SILENT, clock, uptime)
        with store:
            uptime.now_s += 60
            passed(store)
            passed(store)
            with StoreReader(path) as reader:
                return len(reader.list_traces(Wanted()))

    durable: queue.SimpleQueue[int] = queue.SimpleQueue()
    with driver(path, limits, clock) as here:
        fill(here, 1, size=10)
    uptime.now_s = clock.now_s
    with Store(path, limits, durable.put, SILENT, clock, uptime) as store:
        clock.now_s += 365 * 86400
        uptime.now_s += 60
        passed(store)
        assert store.counters.traces_deleted == 0
    # A minute passed since, whatever the clock says.
    assert kept() == 1
    # What passes while nobody looks is known by the clock alone.
    clock.now_s += 3600
    assert kept() == 0


def test_age_is_bounded_while_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    clock = Clock()
    with driver(path, StoreLimits(1 << 40, Keep(3600.0)), clock) as here:
        fill(here, 1, size=10)
        passed(here.store)
        assert here.store.counters.traces_deleted == 0
        clock.now_s += 3601
        while not here.store.counters.traces_deleted:
            passed(here.store)


def test_a_lateral_outlives_its_primary_with_its_trigger(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    clock = Clock()
    with driver(path, StoreLimits(1 << 40, Keep(3600.0)), clock) as here:
        here.write(
            PutTrigger("a", FIRED), PutReleased(T1, released=True)
        )  # T1 is the primary, T2 a lateral
        clock.now_s += 3601
        fill(here, 3, size=10)
        fill(here, 4, size=10)
        with StoreReader(path) as reader:
            row = reader.trace(T2)
            assert row is not None
            assert row.triggers == (PutTrigger("a", FIRED),)
            assert reader.trace(T1) is None


ON_A_FULL_DISK = """
import os, sys
from pathlib import Path
import coordinator.store.writer
from coordinator.core.records import AppendSlice, PutReleased, Write
from coordinator.store.reader import StoreReader, Wanted
from coordinator.store.keeping import Keep
from coordinator.store.retention import StoreLimits
from coordinator.store.writer import Store
from protocol.messages import TraceId
from runtime.log import Log
coordinator.store.writer._RETRY_S = 0.01
disk = Path(sys.argv[1])
durable = []
filler = disk / "of others"
with Store(disk / "t", StoreLimits(1 << 40, Keep(1e9)), durable.append, Log.of("store")) as store:
    def write(number):
        trace = TraceId(number.to_bytes(16, "big"))
        store.submit([
            Write(2 * number - 1, AppendSlice(trace, "a", 1, 0, os.urandom(300_000))),
            Write(2 * number, PutReleased(trace)),
        ])
        while not durable or durable[-1] < 2 * number:
            pass
    for number in range(1, 301):
        if number == 50:
            # Others take what is left, to the last byte.
            with filler.open("wb", 0) as file:
                for size in (1 << 16, 1):
                    try:
                        while file.write(bytes(size)) == size:
                            pass
                    except OSError:
                        pass
        write(number)
    with StoreReader(disk / "t") as reader:
        kept = [int.from_bytes(trace, "big") for trace in reader.list_traces(Wanted())]
    assert kept == list(range(300, 300 - len(kept), -1)), kept
    print(len(kept), store.counters.disk_full, store.counters.writes_failed, store.retention.has_reserve)
    filler.unlink()
    store.retention._age_checked_s = -1e9
    # It is looked for after the next commit.
    for number in range(301, 303):
        write(number)
    assert store.retention.has_reserve
"""


@pytest.mark.root
def test_on_a_full_disk_the_oldest_make_room() -> None:
    """Whoever filled it: nothing waits for an operator, and what is written is whole."""
    program = 'mount -t tmpfs -o size=64m none /mnt && exec "$@"'
    ran = subprocess.run(
        [
            "unshare",
            "--mount",
            "--",
            "sh",
            "-c",
            program,
            "-",
            sys.executable,
            "-c",
            ON_A_FULL_DISK,
            "/mnt",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    kept, full, failed, reserve = ran.stdout.split()
    assert int(kept) > 20
    # It may take another try where the log had begun anew just before.
    assert int(failed) < int(full)
    assert reserve == "False"
    assert "the disk is full; deleted the" in ran.stderr


WRITER = """
import os, sys
from pathlib import Path
from coordinator.core.records import AppendSlice, Write
from coordinator.store.keeping import Keep
from coordinator.store.retention import StoreLimits
from coordinator.store.writer import Store
from runtime.log import Log
from protocol.messages import TraceId
with Store(Path(sys.argv[1]), StoreLimits(1 << 40, Keep(1e9)), lambda t: print(t, flush=True), Log.of("store")) as s:
    for n in range(1, 1_000_000):
        s.submit([Write(n, AppendSlice(TraceId(b"t" * 16), "a", 1, 8 * (n - 1), n.to_bytes(8, "big")))])
"""


def test_what_was_durable_survives_a_killed_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        durable = 0
        for line in writer.stdout:
            if int(line) > 100:
                writer.send_signal(signal.SIGKILL)
                durable = int(line)
                break
        for line in writer.stdout:
            if line.endswith("\n"):
                durable = int(line)
    (part,) = recovered(path)[TraceId(b"t" * 16)].slices
    content = b"".join(part.chunks)
    assert part.length == len(content) >= 8 * durable
    assert content == b"".join(n.to_bytes(8, "big") for n in range(1, len(content) // 8 + 1))


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(StoreError) as caught:
            Store(path, ROOMY, lambda _: None, SILENT)
        return str(caught.value)

    other = tmp_path / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE songs (title)")
    connection.close()
    assert "not a store of Backsight" in refusal(other)
    text = tmp_path / "text"
    text.write_text("no database " * 100)
    assert (
        "cannot be used: file is not a database; stop the coordinator, and put a copy of the store in"
        f" its place, or move it and {text.name}-wal and -shm away" in refusal(text)
    )
    assert "absent does not exist; make it" in refusal(tmp_path / "absent" / "store.db")
    newer = tmp_path / "newer.db"
    with driver(newer):
        pass
    connection = sqlite3.connect(newer)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert "has schema 99, this coordinator knows 9" in refusal(newer)


def test_a_store_of_schema_7_is_taken_over_whole(tmp_path: Path) -> None:
    """All that a store may hold, written by the version before, reads as it did."""
    path = tmp_path / "store.db"
    abandoned = PutAbandoned(FIRED.group, "b")
    other = replace(FIRED, group=Group("error", T3), laterals=(), fired_at_ns=9)
    clock = ClockOffset(-7, 3)
    with old_store(path) as old:
        old.write(
            PutNode("a", ("10.0.0.1",)),
            PutTrigger("a", FIRED),
            PutTrigger("b", FIRED),
            PutTrigger("c", other),
            abandoned,
            PutStatus("a", STATUS, clock, restarted=True),
            AppendSlice(T1, "a", 1, 0, b"abc"),
            AppendSlice(T1, "c", 2, 0, b"between"),
            AppendSlice(T1, "a", 1, 3, b"def"),
            AppendSlice(T2, "a", 1, 0, b"lateral"),
            PutVerdict(T1, VERDICT),
            AppendSlice(T3, "c", 1, 0, b"closed"),
            PutVerdict(T3, VERDICT),
            PutReleased(T3),
        )
    here = Driver(path, ROOMY, Clock())
    with here.store, StoreReader(path) as reader:
        assert here.store.recover_nodes() == [PutNode("a", ("10.0.0.1",))]
        fired = (PutTrigger("a", FIRED), PutTrigger("b", FIRED))
        assert reader.trace(T1) == TraceRow(T1, fired, 0, VERDICT)
        assert reader.trace(T2) == TraceRow(T2, fired, 0, None)
        assert reader.trace(T3) == TraceRow(T3, (PutTrigger("c", other),), 0, VERDICT)
        assert reader.slices(T1) == [
            SliceRow("a", STATUS, clock, 1, 6, restarted=True),
            SliceRow("c", None, None, 2, 7),
        ]
        assert read(reader, T1) == [b"abcdef", b"between"]
        assert read(reader, T2) == [b"lateral"]
        assert reader.list_traces(Wanted()) == [T3, T2, T1]
        assert reader.list_traces(Wanted(trigger="latency")) == [T2, T1]
        assert reader.first_change() == 2  # what is missing makes followers look at all
        # And goes on.
        here.write(AppendSlice(T1, "a", 1, 6, b"ghi"), PutReleased(T1))
        assert read(reader, T1) == [b"abcdefghi", b"between"]
    assert [line.split(": ")[1].split(";")[0] for line in here.log] == [
        "takes over schema 7",
        "taken over from schema 7",
    ]
    stored = recovered(path)
    assert stored[T1].abandoned == (abandoned,)
    assert {trace for trace, found in stored.items() if found.released} == {T1, T3}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        tables = connection.execute("SELECT name FROM sqlite_schema WHERE name LIKE '%old%'")
        assert tables.fetchall() == []


def before_abi_2(payload: bytes) -> bytes:
    """A slice of one record as builds before ABI 2 wrote it, of a length in 32 bits."""
    record = struct.pack("<IHHQ", len(payload), 1, 0, 99) + payload + bytes(-len(payload) % 8)
    return encode_process(1, Process(7, "old")) + encode_piece(PieceKind.RUN, record, client=1)


@pytest.mark.parametrize("schema", [3, 4])
def test_an_older_store_is_taken_over_without_what_cannot_be_read(
    tmp_path: Path, schema: int
) -> None:
    path = tmp_path / "store.db"
    record = encode_record(Data(1, b"today's"), 99)
    readable = encode_process(1, Process(7, "new")) + encode_piece(PieceKind.RUN, record, client=1)
    spoilt = b"no slice at all, which a liar may have sent"
    old = before_abi_2(b"x" * 5000)
    with old_store(path, schema) as before:
        for trace in (T1, T2):
            fired = replace(FIRED, group=Group("latency", trace), laterals=())
            before.write(
                PutTrigger("a", fired),
                PutStatus("a", replace(STATUS, trace=trace, epoch=1), None),
                AppendSlice(trace, "a", 1, 0, old[:70]),
                AppendSlice(trace, "a", 1, 70, old[70:]),
                AppendSlice(trace, "b", 1, 0, readable),
                AppendSlice(trace, "c", 1, 0, spoilt),
                PutVerdict(trace, VERDICT),
            )
        before.write(PutReleased(T1, released=True))
    here = Driver(path, ROOMY, Clock())
    with here.store, StoreReader(path) as reader:
        for trace in (T1, T2):
            fired = replace(FIRED, group=Group("latency", trace), laterals=())
            assert reader.trace(trace) == TraceRow(trace, (PutTrigger("a", fired),), 0, VERDICT)
            assert read(reader, trace) == [b"", readable, spoilt]
        closed, going_on = reader.slices(T1)[0], reader.slices(T2)[0]
        assert (closed.status, closed.epoch, closed.restarted) == (
            replace(STATUS, epoch=1),
            0,
            True,
        )
        # Its node is asked again.
        assert (going_on.status, going_on.epoch, going_on.restarted) == (None, 0, True)
    assert f"taken over from schema {schema}; dropped 2 slices of 2 traces" in here.log[1]
    with driver(path):
        pass  # and nothing is said again


def test_a_store_that_cannot_be_taken_over_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    with old_store(path, 4) as before:
        before.write(AppendSlice(T1, "a", 1, 0, before_abi_2(b"old")))

    def fails(connection: sqlite3.Connection) -> tuple[int, int]:
        connection.execute("DELETE FROM chunks")
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr("coordinator.store.takeover._drop_unreadable", fails)
        with pytest.raises(StoreError, match="cannot be used"):
            Store(path, ROOMY, lambda _: None, SILENT)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (4,)
    assert connection.execute("SELECT count(*) FROM chunks").fetchone() == (1,)
    connection.close()


def test_a_store_is_one_coordinators_and_nobody_elses_to_read(tmp_path: Path) -> None:
    path = tmp_path / "traces.sqlite"
    with Store(path, ROOMY, lambda _: None, SILENT):
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
        with (
            pytest.raises(StoreError, match="another coordinator has it"),
            Store(path, ROOMY, lambda _: None, SILENT),
        ):
            pass
    with Store(path, ROOMY, lambda _: None, SILENT):
        pass
