# SPDX-License-Identifier: Apache-2.0
"""The decoder in C says of any bytes, in any chunks, what the plain one in Python says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.evidence import Evidence, Finding, FindingKind
from coordinator.index.making import index_of
from formats.otlp import NodeSpans
from formats.records import Attributes, SpanStart
from formats.slices import PieceKind, Record, RunFlags, SliceDecoder
from formats.spans import About, read_slice
from formats.stamped import ShownTrace, StampedSlice, StampedTrace, _stamped
from protocol.messages import NodeId, TraceId
from testbed.encoding import encode_piece, encode_record
from tests.decoding.evidence import Missing, PythonEvidence, missing
from tests.decoding.index import python_index
from tests.decoding.otlp import traces_data
from tests.decoding.slices import PythonDecoder
from tests.decoding.spans import read_slice as python_read_slice
from tests.decoding.strategies import (
    ANY_BYTES,
    MET_SLICES,
    NODES,
    SLICES,
    U64,
    cut_up,
    said_slices,
)

WHOLE = RunFlags.FIRST | RunFlags.LAST


def state(decoder: SliceDecoder | PythonDecoder, ticks: list[int]) -> tuple[object, ...]:
    return (
        {key: (handle.problem(), handle.lossy) for key, handle in decoder.handles.items()},
        [decoder.clock.time_ns(at) for at in ticks],
        len(decoder.clock),
        decoder.processes,
        decoder.exited,
        decoder.lossy,
        decoder.items,
        decoder.least_bytes,
        decoder.malformed,
        decoder.broken,
        decoder.whole,
    )


def read(decoder: SliceDecoder | PythonDecoder, chunks: list[bytes]) -> Iterator[list[Record]]:
    """What each chunk gives, so that a record comes with the same chunk from both."""
    return (decoder.feed(chunk) for chunk in chunks)


@settings(max_examples=200)
@given(ANY_BYTES.flatmap(cut_up), st.lists(U64 | st.integers(0, 2000), max_size=4))
def test_both_decoders_say_the_same(chunks: list[bytes], ticks: list[int]) -> None:
    ours, plain = SliceDecoder(), PythonDecoder()
    for got, expected in zip(read(ours, chunks), read(plain, chunks), strict=True):
        assert got == expected
        assert state(ours, ticks) == state(plain, ticks)


@given(st.lists(SLICES, min_size=20, max_size=40).map(b"".join).flatmap(cut_up))
def test_both_decoders_say_the_same_of_much(chunks: list[bytes]) -> None:
    """Of more handles and clients than are looked through one by one."""
    ours, plain = SliceDecoder(), PythonDecoder()
    assert list(read(ours, chunks)) == list(read(plain, chunks))
    assert state(ours, []) == state(plain, [])


# ------------------------------------------------------------------ evidence


def found(evidence: Evidence) -> Iterator[Missing]:
    for finding in evidence.findings(10**6):
        yield finding.kind, finding.node, what_of(evidence, finding)


def what_of(evidence: Evidence, finding: Finding) -> object:
    match finding.kind:
        case FindingKind.LOSSY:
            return finding.client
        case FindingKind.RUN_MISSING:
            said = next(each for each in evidence.slices() if each.node == finding.node)
            problem = said.handle(finding.number).problem()
            return finding.client, finding.handle, problem
        case FindingKind.UNFINISHED | FindingKind.UNSTARTED:
            return finding.client, finding.span_id
        case FindingKind.PARENT_MISSING:
            return finding.other, finding.span_id
        case FindingKind.HOP_OUT_UNMET | FindingKind.HOP_UNANSWERED:
            return finding.span_id, finding.handle, finding.number
        case FindingKind.HOP_IN_UNMET:
            return finding.span_id, finding.handle, finding.number, finding.other


def assert_same(ours: Evidence, plain: PythonEvidence) -> None:
    assert (ours.items, ours.overflow, ours.has_bytes) == (
        plain.items,
        plain.overflow,
        plain.has_bytes,
    )
    assert (ours.names, ours.addresses) == (plain.names, plain.addresses)
    assert Counter(found(ours)) == Counter(missing(plain))
    assert ours.extent() == (plain.span_count, plain.start_ns, plain.end_ns)
    for said, (node, known) in zip(ours.slices(), plain.slices.items(), strict=True):
        assert said.node == node
        assert said.truncated_records == known.truncated_records
        assert (said.malformed, said.whole) == (known.decoder.malformed, known.decoder.whole)
        assert said.least_bytes == known.decoder.least_bytes


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from(NODES), MET_SLICES.flatmap(cut_up)), max_size=5),
    st.randoms(use_true_random=False),
    st.sampled_from([10, 10**6]),
    st.booleans(),
)
def test_both_evidences_say_the_same(
    slices: list[tuple[NodeId, list[bytes]]], rng: random.Random, limit: int, restarts: bool
) -> None:
    """Of the slices of some nodes, of which each may begin again, while they come in any order."""
    ours, plain = Evidence(limit), PythonEvidence(limit)
    waiting = [(node, list(chunks)) for node, chunks in slices]
    while waiting:
        node, chunks = rng.choice(waiting)
        if not chunks:
            waiting.remove((node, chunks))
            continue
        if restarts and rng.random() < 0.1:
            for evidence in (ours, plain):
                evidence.restart(node)
        chunk = chunks.pop(0)
        assert ours.add(node, chunk) == plain.add(node, chunk)
        if rng.random() < 0.3:
            assert_same(ours, plain)
    assert_same(ours, plain)
    ours.give_up()
    plain.give_up()
    assert_same(ours, plain)


def test_of_many_findings_the_first_are_told() -> None:
    evidence = Evidence(10**6)
    starts = b"".join(encode_record(SpanStart(n, 0, 1, 1, ""), 0) for n in range(1, 101))
    evidence.add(NODES[0], encode_piece(PieceKind.RUN, starts, flags=WHOLE))
    assert [(f.kind, f.span_id, f.more) for f in evidence.findings(3)] == [
        (FindingKind.UNFINISHED, number, more) for number, more in ((1, 0), (2, 0), (3, 97))
    ]


# --------------------------------------------------------------------- spans

TRACE = TraceId(bytes(range(16)))
STAMPS: list[Attributes] = [
    {},
    {
        "backsight.trigger": "latency",
        "backsight.verdict_reasons": ["a", "b"],
        "backsight.lateral": True,
    },
]


def plainly(value: object) -> str:
    """So that -0.0 and 0.0, 1 and True differ, and NaN does not from itself."""
    return repr(value)


@settings(max_examples=40)
@given((said_slices() | ANY_BYTES).flatmap(cut_up))
def test_both_join_the_same_spans(chunks: list[bytes]) -> None:
    ours, plain = read_slice(chunks), python_read_slice(chunks)
    assert plainly(ours.spans) == plainly(plain.spans)
    assert ours.malformed == plain.malformed
    assert ours.whole == plain.whole
    assert plainly(ours.records) == plainly(plain.records)
    assert ours.hops_out == plain.hops_out
    assert ours.hops_in == plain.hops_in
    assert ours.breadcrumbs == plain.breadcrumbs
    assert ours.unanswered == plain.unanswered
    assert ours.ends_without_start == plain.ends_without_start
    for one, other in zip(ours.spans, ours.spans[1:], strict=False):
        if (one.client, one.handle) == (other.client, other.handle):
            assert one.resource is other.resource


@settings(max_examples=40)
@given(
    st.lists(said_slices(), min_size=1, max_size=3),
    st.sampled_from(STAMPS),
    st.sampled_from([0, 7, -5, 10**18, -(2**62)]),
)
def test_both_write_the_same_otlp_and_the_same_rows(
    slices: list[bytes], stamps: Attributes, offset_ns: int
) -> None:
    abouts = [About(f"node-{number}", offset_ns, stamps) for number in range(len(slices))]
    ours = StampedTrace(
        TRACE,
        tuple(
            StampedSlice(read_slice([data]), about)
            for data, about in zip(slices, abouts, strict=True)
        ),
    )
    plain = ShownTrace(
        TRACE,
        tuple(
            NodeSpans(
                about.node,
                tuple(_stamped(python_read_slice([data]).spans, stamps)),
                offset_ns,
            )
            for data, about in zip(slices, abouts, strict=True)
        ),
    )
    parts = [NodeSpans(part.node, part.spans, part.clock_offset_ns) for part in plain.parts]
    # As texts: NaN is not equal to itself.
    assert str(ours.otlp()) == str(traces_data(TRACE, parts))
    assert ours.span_count == sum(len(part.spans) for part in parts)
    got, expected = index_of(ours, 3), python_index(plain, 3)
    assert got.summary == expected.summary
    assert got.calls == expected.calls
    assert got.operations == expected.operations
    assert got.spans == expected.spans
