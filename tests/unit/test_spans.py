# SPDX-License-Identifier: Apache-2.0
"""Spans of OpenTelemetry, from the records of a slice, and as OTLP."""

from __future__ import annotations

import gc
import tracemalloc

import msgpack
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from formats.otlp import UNFINISHED
from formats.records import Body, ResourceRecord, ScopeRecord, SpanDetail, SpanEnd, SpanStart
from formats.slices import PieceKind, Process, RunFlags
from formats.spans import About, Event, Link, Resource, Scope, SliceContent, read_slice
from protocol.messages import TraceId
from testbed.encoding import encode_piece, encode_process, encode_record

TRACE = TraceId(bytes(range(16)))
START = SpanStart(1, 0, 10, 2, "GET /")
START_2 = SpanStart(2, 0, 10, 2, "GET /2")
END = SpanEnd(1, 20, 2, "", b"")


def content(*bodies: Body, handle: int = 1) -> SliceContent:
    """A run for each record: all together may be more than a segment holds."""
    pieces = [encode_process(1, Process(7, "shop"))]
    for seq, body in enumerate(bodies):
        flags = RunFlags.FIRST if seq == 0 else RunFlags.NONE
        if seq == len(bodies) - 1:
            flags |= RunFlags.LAST
        run = encode_record(body, 0)
        pieces.append(
            encode_piece(PieceKind.RUN, run, flags=flags, client=1, handle=handle, seq=seq)
        )
    return read_slice(pieces)


def otlp(found: SliceContent) -> TracesData:
    return TracesData.FromString(found.otlp(TRACE, About("n1")))


def detail(*items: object, span_id: int = 1, scope: int = 0, parts: int = 1) -> list[SpanDetail]:
    return encoded_detail(msgpack.packb(list(items)), span_id=span_id, scope=scope, parts=parts)


def encoded_detail(
    encoded: bytes, *, span_id: int = 1, scope: int = 0, parts: int = 1
) -> list[SpanDetail]:
    size = -(-len(encoded) // parts)
    return [
        SpanDetail(span_id, scope, part, parts, encoded[part * size : (part + 1) * size])
        for part in range(parts)
    ]


def test_a_name_that_start_and_end_cut_is_whole_in_the_detail() -> None:
    name = "ä" * 3000
    said = detail({}, [], [], "", "", 0, 0, 0, 0, name)
    found = content(START, *said, SpanEnd(1, 20, 2, name[:512], b""))
    assert found.whole
    (span,) = found.spans
    assert (span.name, span.end_ns) == (name, 20)


def test_all_that_a_detail_may_say() -> None:
    link = [bytes(16), 5, {"l": 1}, "a=b", 0x300, 2]
    said = detail(
        {"n": None, "list": [1, "x", {"deep": b"\0"}]},
        [["exception", 15, {"type": "E"}, 1], ["short"]],
        [link],
        "why",
        "vendor=x",
        0x100,
        3,
        4,
        5,
        scope=2,
        parts=3,
    )
    found = content(
        ResourceRecord(msgpack.packb([{"service.name": "shop"}, "https://r"])),
        START,
        ScopeRecord(2, msgpack.packb(["lib", "1", "https://s", {"s": True}])),
        *said,
        END,
    )
    assert found.whole
    (span,) = found.spans
    assert span.resource == Resource({"service.name": "shop"}, "https://r")
    assert span.scope == Scope("lib", "1", "https://s", {"s": True})
    assert span.attributes == {"n": None, "list": [1, "x", {"deep": b"\0"}]}
    assert span.events == (Event("exception", 15, {"type": "E"}, 1), Event("short", 0))
    assert span.links == (Link(bytes(16), 5, {"l": 1}, "a=b", 0x300, 2),)
    assert (span.status, span.status_message, span.trace_state) == (2, "why", "vendor=x")
    assert (span.flags, span.dropped_attributes) == (0x100, 3)
    assert (span.dropped_events, span.dropped_links) == (4, 5)


def test_what_is_said_of_an_id_is_copied_for_no_other_span_that_has_it() -> None:
    # A few hundred KiB would become gigabytes.
    found = content(*[START] * 3, *detail({"a": 1}, [["event", 15]]), *[END] * 3)
    assert [(span.attributes, len(span.events)) for span in found.spans] == [
        ({"a": 1}, 1),
        ({}, 0),
        ({}, 0),
    ]
    assert [span.end_ns for span in found.spans] == [20, 20, 20]


def test_what_makes_no_sense_is_counted_and_the_rest_is_read() -> None:
    for broken in (
        detail({"a": 1}, parts=2)[:1],  # a part is missing
        [SpanDetail(1, 0, 0, 1, b"\xc1")],  # no MessagePack
        detail("attributes"),
        detail({}, [["event", -1]]),
        detail({1: "a key that is no text"}),
        detail({}, [], [[b"short", 1]]),
    ):
        found = content(START, *broken, END)
        assert found.malformed
        assert not found.whole
        (span,) = found.spans
        assert (span.name, span.end_ns) == ("GET /", 20)


def test_a_detail_that_is_nothing_but_containers_is_not_read_and_others_are() -> None:
    # Each is one byte, and would be more than a hundred bytes in memory.
    for item in (b"\x80", b"\x90", b"\x00"):
        encoded = b"\x92\x80\xdd" + (1_000_000).to_bytes(4, "big") + item * 1_000_000
        said = encoded_detail(encoded, parts=40)
        tracemalloc.start()
        found = content(START, *said, START_2, *detail({"a": 1}, span_id=2))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found.malformed == 1
        assert [span.attributes for span in found.spans] == [{}, {"a": 1}]
        assert peak_bytes < 10 * len(encoded)


def test_a_slice_holds_so_many_items_however_many_records_they_are_in() -> None:
    # A container counts as four: with the three outer ones a detail takes 64,012 of 1,048,576.
    most: list[object] = [{}, [[]] * 16_000]
    spans = [SpanStart(number, 0, 10, 2, "") for number in range(1, 21)]
    said = [part for span in spans for part in detail(*most, span_id=span.span_id)]
    read = [bool(span.events) for span in content(*spans, *said).spans]
    assert read == [True] * 16 + [False] * 4


def test_broken_messagepack_leaves_nothing_in_memory() -> None:
    # Arrays of 255 items each, as their heads say.
    starts = [SpanStart(number, 0, 10, 2, "") for number in range(40)]
    for end in (b"", b"\xc1", b"\xd6\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x81\x80\x00"):
        encoded = b"\xdc\x00\xff" * 60 + b"\x00" * 200 + end
        said = [part for span in starts for part in encoded_detail(encoded, span_id=span.span_id)]
        tracemalloc.start()
        assert content(*starts, *said).malformed == 40
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept_bytes < 1 << 20


@settings(max_examples=300, deadline=None)
@example(encoded=b"\x91\x81\x80\x00", scope=b"\x91\x81\x90\x00", resource=b"\x81\x80\x00")
@given(
    encoded=st.binary(max_size=200), scope=st.binary(max_size=50), resource=st.binary(max_size=50)
)
def test_no_bytes_raise(encoded: bytes, scope: bytes, resource: bytes) -> None:
    found = content(
        ResourceRecord(resource),
        ScopeRecord(1, scope),
        START,
        SpanDetail(1, 1, 0, 1, encoded),
        END,
    )
    data = otlp(found)
    assert len(data.resource_spans[0].scope_spans[0].spans) == 1


def test_a_process_that_says_nothing_is_described_by_its_node() -> None:
    found = content(START)
    data = otlp(found)
    (resource,) = data.resource_spans
    said = {item.key: item.value for item in resource.resource.attributes}
    assert said["service.name"].string_value == "shop"
    assert said["process.pid"].int_value == 7
    assert said["host.name"].string_value == "n1"
    (span,) = resource.scope_spans[0].spans
    assert (span.trace_id, span.span_id) == (TRACE, (1).to_bytes(8, "big"))
    assert span.parent_span_id == b""
    assert [item.key for item in span.attributes] == [UNFINISHED]


def test_what_processes_say_of_themselves_stands_once_for_all_spans() -> None:
    said = msgpack.packb([{"service.name": "shop"}, "https://r"])
    other = msgpack.packb([{"service.name": "cart"}])
    scope = ScopeRecord(1, msgpack.packb(["lib", "1"]))
    pieces = []
    for handle, resource in enumerate((said, other, said), start=1):
        bodies: list[Body] = [ResourceRecord(resource), scope]
        for number in (1, 2):
            span_id = 10 * handle + number
            bodies += [SpanStart(span_id, 0, 10, 2, ""), *detail({}, span_id=span_id, scope=1)]
        records = b"".join(encode_record(body, 0) for body in bodies)
        pieces.append(encode_piece(PieceKind.RUN, records, client=1, handle=handle))
    data = otlp(read_slice(pieces))
    assert [r.resource.attributes[0].value.string_value for r in data.resource_spans] == [
        "shop",
        "cart",
    ]
    assert data.resource_spans[0].schema_url == "https://r"
    ids = [
        [int.from_bytes(span.span_id, "big") for span in r.scope_spans[0].spans]
        for r in data.resource_spans
    ]
    assert ids == [[11, 12, 31, 32], [21, 22]]


def test_integers_that_are_too_large_become_text() -> None:
    said = {"most": (1 << 63) - 1, "more": 1 << 63, "list": [], "map": {}, "nil": None}
    (resource,) = otlp(content(START, *detail(said), END)).resource_spans
    values = {item.key: item.value for item in resource.scope_spans[0].spans[0].attributes}
    assert values["most"].int_value == (1 << 63) - 1
    assert values["more"].string_value == str(1 << 63)
    assert values["list"].HasField("array_value")
    assert values["map"].HasField("kvlist_value")
    assert values["nil"].WhichOneof("value") is None
