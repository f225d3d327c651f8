# SPDX-License-Identifier: Apache-2.0
"""What probes saw: in words, and as spans."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.records import Body, SpanEnd, SpanStart
from formats.slices import PieceKind, Process, RunFlags
from formats.spans import Span, read_slice
from protocol.kernel_events import EVENT_BYTES, KernelEvent, Kind
from testbed.encoding import (
    encode_clock,
    encode_kernel_event,
    encode_piece,
    encode_process,
    encode_record,
)
from tests.probes.attributes import documented

MS = 1_000_000
UNIX_NS = 1_700_000_000_000_000_000

WAITED = KernelEvent(5, 12 * MS, 1, 4, Kind.RUN_QUEUE, 3, None, 77, 10 * MS, "stress", "")


@given(st.binary(max_size=2 * EVENT_BYTES))
def test_any_bytes_make_an_event_that_can_be_printed(data: bytes) -> None:
    event = KernelEvent.parse(data)
    assert event.sentence.isprintable()
    assert event.title in event.sentence
    assert all(str(value).isprintable() for value in event.attributes.values())


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (WAITED, "waited for a CPU for 12 ms, CPU 3, stress[77] ran 10 ms"),
        (
            KernelEvent(5, 1_234_567_890, 1, 4, Kind.LOCK_WAIT, 0, 202, 9, 0, "web", "futex"),
            "waited for a lock for 1.23 s, released by web[9]",
        ),
        (
            KernelEvent(
                5,
                60_000,
                1,
                4,
                Kind.IO_WAIT,
                0,
                74,
                0,
                0,
                "",
                "fsync",
                device="sda",
                asked_bytes=4096,
            ),
            "waited for a disk for 60 us, sda, 4096 bytes, in fsync",
        ),
        (
            KernelEvent(5, 60_000, 1, 4, Kind.IO_WAIT, 0, None, 0, 0, "", ""),
            "waited for a disk for 60 us",
        ),
        (
            KernelEvent(5, 0, 1, 4, Kind.CRASH, 0, 11, 0, 0, "", ""),
            "process ended by SIGSEGV",
        ),
        (
            KernelEvent(5, 0, 1, 4, Kind.CRASH, 0, 9, 0, 0, "", "out of memory"),
            "process ended by SIGKILL: out of memory",
        ),
        (
            KernelEvent(5, 999, 1, 4, Kind.BLOCKED, 0, 0, 0, 0, "", "read"),
            "blocked in read for 999 ns",
        ),
        (
            KernelEvent(5, 2000 * 1000 * MS, 1, 4, Kind.CPU_THROTTLED, 0, None, 0, 0, "", ""),
            "waited for its CPU quota for 2000 s",
        ),
        (
            KernelEvent(5, 0, 1, 0, Kind.TCP_RETRANSMIT, 0, 80, 0, 0, "", "", 0, "10.0.0.7:80"),
            "TCP segment sent again, peer 10.0.0.7:80",
        ),
        (
            KernelEvent(
                5, 250 * MS, 1, 0, Kind.TCP_RTT, 0, 443, 0, 0, "", "", 1, "2001:db8::7:443"
            ),
            "TCP round trip is long: 250 ms, peer 2001:db8::7:443, by the last writer",
        ),
        (KernelEvent(5, 0, 1, 4, 99, 0, None, 0, 0, "", ""), "kernel event 99 for 0 ns"),
    ],
)
def test_an_event_reads_as_a_sentence(event: KernelEvent, sentence: str) -> None:
    assert event.sentence == sentence
    assert KernelEvent.parse(encode_kernel_event(event)) == event


def test_kinds_are_those_of_the_header(repository: Path) -> None:
    header = (repository / "native/src/abi/kernel_event.h").read_text()
    kinds = header[header.index("enum bs_kernel_event_kind") : header.index("enum bs_kernel_conf")]
    found = {name: int(n) for name, n in re.findall(r"BS_KERNEL_(\w+) = (\d+),", kinds)}
    assert found.pop("KINDS") == max(found.values()) + 1
    assert found == {kind.name: kind.value for kind in Kind}


# ------------------------------------------------------------------ as spans

TICKS = 1000  # at UNIX_NS; a tick is a nanosecond
APPLICATION, PROBES = 1, 9


def run(client: int, *bodies: Body, ticks: int) -> bytes:
    content = b"".join(encode_record(body, ticks) for body in bodies)
    return encode_piece(
        PieceKind.RUN, content, flags=RunFlags.FIRST | RunFlags.LAST, client=client, handle=client
    )


def span(number: int, begins_ns: int, ends_ns: int | None) -> list[Body]:
    start = SpanStart(number, 0, UNIX_NS + begins_ns, 1, f"span {number}")
    if ends_ns is None:
        return [start]
    return [start, SpanEnd(number, UNIX_NS + ends_ns, 0, "", b"")]


def kernel_span(event: KernelEvent, spans: list[Body], *, ends_ns: int) -> Span:
    content = read_slice(
        [
            encode_clock(TICKS, UNIX_NS, 1_000_000_000),
            encode_process(APPLICATION, Process(42, "shop")),
            encode_process(PROBES, Process(43, "kernel")),
            run(PROBES, event, ticks=TICKS + ends_ns),
            run(APPLICATION, *spans, ticks=TICKS),
        ]
    )
    assert content.whole
    (found,) = [one for one in content.spans if one.name == event.title]
    return found


def test_an_event_is_a_child_of_the_innermost_span_around_it() -> None:
    spans = [*span(1, 0, 50 * MS), *span(2, 5 * MS, None), *span(3, 30 * MS, 40 * MS)]
    found = kernel_span(WAITED, spans, ends_ns=20 * MS)
    assert (found.parent_id, found.start_ns, found.end_ns) == (
        2,
        UNIX_NS + 8 * MS,
        UNIX_NS + 20 * MS,
    )
    assert found.process == Process(42, "shop")
    assert found.attributes["kernel.event"] == "run_queue"
    assert found.attributes["kernel.other.command"] == "stress"


@pytest.mark.parametrize("ends_ns", [MS, 60 * MS])
def test_an_event_outside_of_all_spans_has_no_parent(ends_ns: int) -> None:
    found = kernel_span(WAITED, span(1, 20 * MS, 30 * MS), ends_ns=ends_ns)
    assert found.parent_id == 0


def test_an_event_of_another_process_has_no_parent_here() -> None:
    event = KernelEvent(5, 12 * MS, 8, 4, Kind.RUN_QUEUE, 3, None, 0, 0, "", "")
    found = kernel_span(event, span(1, 0, 50 * MS), ends_ns=20 * MS)
    assert (found.parent_id, found.process) == (0, None)


def test_an_event_is_the_same_span_each_time() -> None:
    first = kernel_span(WAITED, [], ends_ns=20 * MS)
    second = kernel_span(WAITED, span(1, 0, 50 * MS), ends_ns=20 * MS)
    assert first.span_id == second.span_id
    assert first.span_id != 0


def _full(kind: Kind) -> KernelEvent:
    """An event of that kind in which no field is empty."""
    return KernelEvent.parse(
        encode_kernel_event(
            KernelEvent(
                5, MS, 1, 4, kind, 3, 80, 77, MS, "stress", "name",
                peer="10.0.0.1:80" if kind.is_tcp else "", position=9,
                device="sda" if kind == Kind.IO_WAIT else "", asked_bytes=9,
            )
        )
    )  # fmt: skip


def test_the_table_in_the_docs_has_each_attribute_with_its_unit() -> None:
    table = documented()
    carried = {kind.name.lower(): _full(kind).attributes for kind in Kind}
    assert set(table) == set().union(*carried.values())
    for name, row in table.items():
        may = {key for key, attributes in carried.items() if name in attributes}
        assert row.probes <= may, f"{name} is not set by {sorted(row.probes - may)}"
        assert (row.unit == "ns") == name.endswith("_ns")
        if row.unit:
            assert all(type(carried[key][name]) is int for key in row.probes)


def test_the_table_in_the_docs_has_each_probe_that_always_sets_an_attribute() -> None:
    table = documented()
    for kind in Kind:
        event = _full(kind)
        # What says nothing of another process, by no name, at no position: each has the rest.
        least = replace(event, name="", other_pid=0, other_ns=0, position=0)
        for name in least.attributes:
            assert kind.name.lower() in table[name].probes, f"{name} is set by {kind.name.lower()}"


def test_the_table_in_the_docs_has_who_else_is_named_where_the_sentence_has_it() -> None:
    table = documented()
    said = {kind.name.lower(): _full(kind).sentence for kind in Kind}
    named = {key for key, sentence in said.items() if "stress[77]" in sentence}
    ran = {key for key in named if "stress[77] ran" in said[key]}
    assert table["kernel.other.pid"].probes == table["kernel.other.command"].probes == named
    assert table["kernel.other.ran_ns"].probes == ran
