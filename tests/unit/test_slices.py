# SPDX-License-Identifier: Apache-2.0
"""Slices: what is written reads back, from any cut and any split, and nothing raises."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats import slices
from formats.records import (
    PAYLOAD_BYTES_MAX,
    SPAN_START_NAME_BYTES_MAX,
    Attributes,
    AttributeType,
    AttributeValue,
    Body,
    Data,
    HopOut,
    RecordType,
    SpanEnd,
    SpanStart,
)
from formats.slices import PieceKind, Process, Record, RunFlags, SliceDecoder
from formats.spans import read_slice
from protocol.messages import NodeId
from testbed.encoding import (
    encode_attributes,
    encode_clock,
    encode_piece,
    encode_process,
    encode_record,
)
from tests.decoding.strategies import (
    ALL_RUN,
    ATTRIBUTES,
    BODIES,
    SLICES,
)


def run(*bodies: Body, seq: int = 0, flags: RunFlags = ALL_RUN, start: int = 0) -> bytes:
    content = b"".join(encode_record(body, 0) for body in bodies)
    return encode_piece(
        PieceKind.RUN, content, flags=flags, client=1, handle=1, seq=seq, start=start
    )


def feed(data: bytes) -> tuple[list[Record], SliceDecoder]:
    decoder = SliceDecoder()
    return decoder.feed(data), decoder


def read_attributes(encoded: bytes) -> tuple[Attributes, int]:
    """Of a span whose end has these, and how many make no sense."""
    content = read_slice([run(SpanStart(1, 0, 1, 0, ""), SpanEnd(1, 2, 0, "", encoded))])
    (span,) = content.spans
    return span.attributes, content.malformed


def state(decoder: SliceDecoder) -> tuple[object, ...]:
    return (
        decoder.handles,
        len(decoder.clock),
        decoder.processes,
        decoder.exited,
        decoder.lossy,
        decoder.items,
        decoder.malformed,
        decoder.broken,
        decoder.whole,
    )


# ------------------------------------------------------------- round trips


@given(BODIES, st.booleans())
def test_a_record_reads_back(body: Body, truncated: bool) -> None:
    content = encode_record(body, 7, truncated=truncated)
    records, decoder = feed(encode_piece(PieceKind.RUN, content, client=4, handle=5))
    if isinstance(body, SpanStart):
        name = body.name.encode()[:SPAN_START_NAME_BYTES_MAX].decode("utf-8", "replace")
        body = SpanStart(body.span_id, body.parent_id, body.start_ns, body.kind, name)
    assert records == [Record(4, 5, 7, truncated, body)]
    assert decoder.whole
    assert decoder.malformed == 0


@given(ATTRIBUTES)
def test_attributes_read_back(attributes: dict[str, AttributeValue]) -> None:
    decoded, malformed = read_attributes(encode_attributes(attributes))
    assert decoded == attributes
    assert [type(value) for value in decoded.values()] == [type(v) for v in attributes.values()]
    assert malformed == 0


@pytest.mark.parametrize("attributes", [{"k" * 256: 1}, {"k": "v" * 65536}])
def test_an_attribute_that_does_not_fit_is_named(attributes: dict[str, AttributeValue]) -> None:
    with pytest.raises(ValueError, match="attribute 'k"):
        encode_attributes(attributes)


def test_a_span_is_joined_from_its_two_records_in_either_order() -> None:
    attributes: dict[str, AttributeValue] = {"pod": "cart-1", "duration_us": 42}
    start = SpanStart(1, 0, 1000, 2, "GET")
    end = SpanEnd(1, 2000, 2, "GET /cart/with/a/long/path", encode_attributes(attributes))
    for bodies in ((start, end), (end, start)):
        content = read_slice([encode_process(1, Process(9, "cart")), run(*bodies)])
        (span,) = content.spans
        assert (span.start_ns, span.end_ns, span.status, span.kind) == (1000, 2000, 2, 2)
        assert span.name == "GET /cart/with/a/long/path"
        assert span.attributes == attributes
        assert span.process == Process(9, "cart")
        assert not span.unfinished
        assert content.whole


def test_what_is_not_paired_is_told() -> None:
    content = read_slice([run(SpanStart(1, 0, 5, 1, "open"), SpanEnd(2, 6, 0, "", b""))])
    assert [span.span_id for span in content.spans if span.unfinished] == [1]
    assert [end.span_id for end in content.ends_without_start] == [2]


# ------------------------------------------------- cuts, splits, any bytes


@given(st.lists(st.one_of(st.binary(max_size=60), SLICES), max_size=4).map(b"".join))
def test_no_bytes_raise(data: bytes) -> None:
    content = read_slice([data])
    # What is remembered is bounded by what was fed: no count is believed.
    records = len(content.spans) + len(content.records) + len(content.breadcrumbs)
    records += len(content.unanswered)
    assert records * 16 <= len(data)
    assert len(content.handles) * 24 <= len(data)


@given(SLICES, st.data())
def test_a_flipped_byte_does_not_raise(data: bytes, draw: st.DataObject) -> None:
    if data:
        at = draw.draw(st.integers(0, len(data) - 1))
        read_slice([data[:at] + bytes([draw.draw(st.integers(0, 255))]) + data[at + 1 :]])


@given(SLICES, st.data())
def test_a_cut_slice_reads_as_a_prefix(data: bytes, draw: st.DataObject) -> None:
    whole, _ = feed(data)
    cut = data[: draw.draw(st.integers(0, len(data)))]
    records, decoder = feed(cut)
    assert records == whole[: len(records)]
    assert decoder.malformed <= feed(data)[1].malformed


@given(SLICES)
def test_every_whole_record_of_a_cut_slice_is_there(data: bytes) -> None:
    """Byte by byte, records appear when their last byte does, and not later."""
    decoder = SliceDecoder()
    seen: list[Record] = []
    for at in range(len(data)):
        seen += decoder.feed(data[at : at + 1])
        assert seen == feed(data[: at + 1])[0]


@given(st.one_of(SLICES, st.binary(max_size=200)), st.lists(st.integers(0, 400), max_size=8))
def test_any_split_reads_the_same(data: bytes, cuts: list[int]) -> None:
    records, whole = feed(data)
    decoder = SliceDecoder()
    seen: list[Record] = []
    at = 0
    for cut in sorted(min(cut, len(data)) for cut in cuts):
        seen += decoder.feed(data[at:cut])
        at = cut
    seen += decoder.feed(data[at:])
    assert seen == records
    assert state(decoder) == state(whole)


# -------------------------------------------------------------- bad sizes


def test_a_piece_larger_than_a_segment_ends_the_reading() -> None:
    header = bytearray(encode_piece(PieceKind.RUN))
    header[0:4] = (slices.SEGMENT_BYTES + 8).to_bytes(4, "little")
    records, decoder = feed(bytes(header) + run(Data(1, b"after")))
    assert records == []
    assert decoder.broken
    assert not decoder.whole
    assert decoder.malformed == 1
    assert decoder.feed(run(Data(1, b"later"))) == []


@pytest.mark.parametrize("payload_bytes", [PAYLOAD_BYTES_MAX + 1, 2**16 - 1, 64])
def test_a_record_larger_than_its_piece_costs_that_piece(payload_bytes: int) -> None:
    content = bytearray(encode_record(Data(1, b"x" * 8), 0))
    content[0:2] = payload_bytes.to_bytes(2, "little")
    good = run(Data(1, b"good"))
    records, decoder = feed(encode_piece(PieceKind.RUN, bytes(content), handle=2) + good)
    assert [record.body for record in records] == [Data(1, b"good")]
    assert decoder.malformed == 1


def test_a_record_is_no_larger_than_a_client_writes_them() -> None:
    # Both fit into their runs.
    most, more = (Data(1, bytes(PAYLOAD_BYTES_MAX + extra)) for extra in (0, 1))
    records, decoder = feed(run(most))
    assert ([record.body for record in records], decoder.malformed) == ([most], 0)
    records, decoder = feed(run(more))
    assert (records, decoder.malformed) == ([], 1)


def test_a_kind_of_piece_that_is_not_known_is_passed_over() -> None:
    unknown = bytearray(encode_piece(PieceKind.RUN, bytes(24)))
    unknown[4:6] = (77).to_bytes(2, "little")
    records, decoder = feed(bytes(unknown) + run(Data(1, b"good")))
    assert [record.body for record in records] == [Data(1, b"good")]
    assert decoder.malformed == 1
    assert decoder.whole


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (RecordType.SPAN_START, bytes(31)),
        (RecordType.SPAN_START, bytes(25) + b"\x09" + bytes(6)),  # a name of 9 bytes, not there
        (RecordType.SPAN_END, bytes(23)),
        (RecordType.HOP_IN, bytes(16)),
        (RecordType.BREADCRUMB, bytes(7)),
        (RecordType.KERNEL, bytes(95)),
        (RecordType.BREADCRUMB, bytes(8 + 64)),
    ],
)
def test_a_record_too_short_for_its_type_is_counted(kind: RecordType, payload: bytes) -> None:
    records, decoder = feed(run(Data(kind, payload), Data(1, b"good")))
    assert [record.body for record in records] == [Data(1, b"good")]
    assert decoder.malformed == 1


def test_malformed_attributes_are_counted_and_the_others_kept() -> None:
    good = encode_attributes({"a": 1})
    short = bytes([AttributeType.INT, 1, 4, 0]) + b"b" + bytes(4)
    assert read_attributes(good + short) == ({"a": 1}, 1)
    assert read_attributes(good + b"\x01\xff") == ({"a": 1}, 1)
    assert read_attributes(good + b"\x01\xff\xff\xff") == ({"a": 1}, 1)


# ----------------------------------------------------------------- clocks


def written(*ticks: int, client: int = 1) -> bytes:
    """A run with a record of each time."""
    content = b"".join(encode_record(Data(1, b""), at) for at in ticks)
    return encode_piece(PieceKind.RUN, content, client=client)


def times(*parts: bytes) -> list[int | None]:
    content = read_slice(parts)
    return [content.clock.time_ns(record.ticks) for record in content.records]


def test_a_record_has_the_time_of_the_nearest_pair_wherever_that_stands() -> None:
    assert times(
        written(900, client=1),
        encode_clock(1000, 10**18, 2 * 10**9),
        written(3000, 400, 0, client=2),  # 0: unknown
        encode_clock(5000, 10**18 + 7, 10**9),
        written(2999, 4999, 6000, 1001, client=3),
    ) == [
        10**18 - 50,
        10**18 + 1000,  # as far from both: the earlier one
        10**18 - 300,
        None,
        10**18 + 999,
        10**18 + 6,
        10**18 + 1007,
        10**18,
    ]


@given(
    st.integers(-200, 200),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=20, unique=True),
    st.lists(st.integers(1, 10**6), max_size=20),
    st.randoms(use_true_random=False),
)
def test_a_time_is_no_worse_than_the_drift_since_the_nearest_pair(
    ppm: int, paired_ms: list[int], written_ms: list[int], rng: random.Random
) -> None:
    """A tick is taken for a nanosecond, and is off by so many millionths."""

    def real_ns(ms: int) -> int:
        return 10**18 + ms * (10**6 + ppm)

    parts = [encode_clock(ms * 10**6, real_ns(ms), 10**9) for ms in paired_ms]
    parts += [written(ms * 10**6, client=number) for number, ms in enumerate(written_ms)]
    rng.shuffle(parts)
    content = read_slice(parts)
    assert len(content.records) == len(written_ms)
    for record in content.records:
        ms = written_ms[record.client]
        time_ns = content.clock.time_ns(record.ticks)
        assert time_ns is not None
        nearest_ms = min(abs(ms - paired) for paired in paired_ms)
        assert abs(time_ns - real_ns(ms)) <= nearest_ms * abs(ppm)


def test_times_that_no_clock_has_are_unknown() -> None:
    assert times(encode_clock(1, 1, 1), written(2**64 - 1)) == [None]
    assert times(written(1)) == [None]
    assert feed(encode_clock(1, 1, 0))[1].malformed == 1


# ------------------------------------------------------------------- runs


def problem(*parts: bytes) -> str | None:
    return feed(b"".join(parts))[1].handles[1, 1].problem()


PROCESS_FORMAT_AT = len(encode_piece(PieceKind.EXIT)) + 4
F, L, N = RunFlags.FIRST, RunFlags.LAST, RunFlags.NONE
X = Data(1, b"12345678")  # 20 bytes as a record


def test_runs_that_are_whole() -> None:
    assert problem(run(X)) is None
    assert problem(run(X, seq=0, flags=F), run(X, seq=1, flags=L)) is None
    # Threads finish in any order, and a run is copied as it grows.
    assert problem(run(X, seq=1, flags=L), run(X, seq=0, flags=F)) is None
    assert problem(run(X, flags=F), run(X, flags=F, start=20), run(flags=F | L, start=40)) is None


def test_runs_that_are_not() -> None:
    assert problem(run(X, flags=F)) == "it was never closed"
    assert problem(run(X, flags=L)) == "its first run is missing"
    assert problem(run(X, flags=F), run(X, seq=2, flags=L)) == "2 of 3 runs are there"
    assert problem(run(X, flags=F), run(X, flags=F | L, start=40)) == (
        "bytes inside a run are missing"
    )
    # What should not be there does not stand in for what should.
    assert problem(run(X, flags=F), run(X, seq=2, flags=L), run(X, seq=3, flags=N)) == (
        "run 3 comes after the last, 2"
    )
    assert problem(run(X, flags=N), run(X, seq=1, flags=F | L)) == "its first run is missing"


@given(st.permutations(range(5)), st.integers(0, 4))
def test_runs_are_whole_if_and_only_if_none_is_missing(order: list[int], lost: int) -> None:
    flags = {0: F, 4: L}
    parts = [run(X, seq=seq, flags=flags.get(seq, N)) for seq in order]
    assert problem(*parts) is None
    without = [part for seq, part in zip(order, parts, strict=True) if seq != lost]
    assert problem(*without) is not None


def test_what_was_copied_twice_is_read_once() -> None:
    one, two = Data(1, b"one"), Data(1, b"two")
    first = run(one, flags=F)
    again = run(one, two, flags=F | L)
    records, decoder = feed(first + again)
    assert [record.body for record in records] == [one, two]
    assert decoder.handles[1, 1].problem() is None
    # However often it begins again, and whatever it had by then.
    shorter = run(one, flags=F)
    rest = run(two, Data(1, b"three"), flags=F | L, start=16)
    records, decoder = feed(run(one, two, flags=F) + shorter + rest)
    assert [record.body for record in records] == [one, two, Data(1, b"three")]
    assert decoder.handles[1, 1].problem() is None


def test_flags_that_are_not_known_are_counted_and_the_records_kept() -> None:
    one, two = Data(1, b"one"), Data(1, b"two")
    records, decoder = feed(run(one, flags=RunFlags(0x8000 | ALL_RUN)) + run(two, seq=1))
    assert [record.body for record in records] == [one, two]
    assert decoder.malformed == 1
    loss = bytearray(encode_piece(PieceKind.LOSS, client=1))
    loss[6:8] = (16).to_bytes(2, "little")
    assert feed(bytes(loss))[1].malformed == 1
    content = bytearray(encode_record(one, 0))
    content[3] = 3  # the one that is known, and one more
    records, decoder = feed(encode_piece(PieceKind.RUN, bytes(content)))
    assert [(record.body, record.truncated) for record in records] == [(one, True)]
    assert decoder.malformed == 1


def test_records_in_a_format_that_is_not_known_are_passed_over() -> None:
    other = bytearray(encode_process(1, Process(7, "newer")))
    other[PROCESS_FORMAT_AT] = 3
    ours = encode_piece(PieceKind.RUN, encode_record(X, 0), client=2, handle=1)
    records, decoder = feed(bytes(other) + run(X) + encode_process(2, Process(8, "ours")) + ours)
    assert [(record.client, record.body) for record in records] == [(2, X)]
    assert decoder.malformed == 1
    assert decoder.whole
    assert decoder.processes == {1: Process(7, "newer"), 2: Process(8, "ours")}
    assert decoder.handles[1, 1].problem() is None


def test_losses_and_exits() -> None:
    parts = [
        encode_process(3, Process(7, "cart")),
        encode_piece(PieceKind.LOSS, client=3),
        encode_piece(PieceKind.EXIT, client=3),
        run(X, flags=ALL_RUN | RunFlags.LOSSY),
    ]
    _, decoder = feed(b"".join(parts))
    assert decoder.lossy == {3}
    assert decoder.exited == {3}
    assert str(decoder.processes[3]) == "cart[7]"
    assert decoder.handles[1, 1].lossy


# ---------------------------------------------------------------- the ABI


def abi(repository: Path) -> str:
    headers = [repository / "native/src/abi.h", *(repository / "native/src/abi").glob("*.h")]
    return "".join(header.read_text() for header in headers)


def test_the_numbers_are_those_of_the_headers(repository: Path) -> None:
    text = abi(repository) + (repository / "native/include/backsight.h").read_text()
    named = {
        name: int(value, 0)
        for name, value in re.findall(r"\b(BS_[A-Z_]+)\s*=?[\s\\]+(0x[0-9a-fA-F]+|\d+)u?\b", text)
    }
    expected = {
        "BS_SEGMENT_BYTES": slices.SEGMENT_BYTES,
        "BS_PAYLOAD_MAX": PAYLOAD_BYTES_MAX,
        **{f"BS_PIECE_{kind.name}": kind.value for kind in PieceKind},
        **{f"BS_RUN_{flag.name}": flag.value for flag in RunFlags if flag.name != "NONE"},
        **{f"BS_RECORD_{kind.name}": kind.value for kind in RecordType},
        **{f"BS_ATTRIBUTE_{kind.name}": kind.value for kind in AttributeType},
    }
    assert {name: named.get(name) for name in expected} == expected


def test_the_sizes_are_those_that_the_header_asserts(repository: Path) -> None:
    text = abi(repository)
    sizes = {
        name: int(size) for name, size in re.findall(r"sizeof\(struct (bs_\w+)\) == (\d+)", text)
    }
    assert sizes["bs_piece_header"] == len(encode_piece(PieceKind.EXIT))
    assert sizes["bs_clock_pair"] == len(encode_clock(1, 2, 3)) - sizes["bs_piece_header"]
    header = sizes["bs_record_header"]
    assert header == len(encode_record(Data(1, b""), 0))
    assert sizes["bs_span_start"] == len(encode_record(SpanStart(1, 2, 3, 4, ""), 0)) - header
    assert sizes["bs_span_end"] == len(encode_record(SpanEnd(1, 2, 3, "", b""), 0)) - header
    assert sizes["bs_hop"] == len(encode_record(HopOut(NodeId(1), 2, 3, 4), 0)) - header
    assert sizes["bs_attribute_header"] == len(encode_attributes({"": b""}))
