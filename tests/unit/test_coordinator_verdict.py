# SPDX-License-Identifier: Apache-2.0
"""Verdicts: each reason by itself, that nothing incomplete is coherent, and when they are given."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.coordinator import CoordinatorConfig
from coordinator.core.verdict import (
    REASONS_MAX,
    REASONS_PER_KIND_AND_NODE,
    Reason,
    ReasonKind,
    Verdict,
)
from formats.records import (
    Body,
    Breadcrumb,
    Data,
    HopIn,
    HopOut,
    RecordType,
    SpanEnd,
    SpanStart,
    Unanswered,
)
from formats.slices import PieceKind, Process, RunFlags
from protocol.hashing import address_id
from protocol.messages import (
    Abandoned,
    Drop,
    Group,
    Release,
    SliceAck,
    SliceFlags,
    TriggerFired,
)
from protocol.verdicts import VerdictKind
from testbed.encoding import encode_piece, encode_process, encode_record
from tests.unit.coordinator_harness import (
    MS,
    REAL_NS,
    Harness,
    S,
    crumb,
    hop_in,
    hop_out,
    preamble,
    run,
    span,
    trace_id,
    two_nodes,
)

T = trace_id("T")
F, L = RunFlags.FIRST, RunFlags.LAST


def judged(slices: dict[str, bytes], harness: Harness | None = None) -> Verdict:
    """The verdict when each node delivers its slice; the first one fires."""
    harness = harness or Harness()
    harness.cluster(*slices)
    harness.fire(next(iter(slices)), T)
    harness.deliver(T, slices)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert verdict.kind is not VerdictKind.PROVISIONAL
    return verdict


def kinds(verdict: Verdict) -> list[ReasonKind]:
    return [reason.kind for reason in verdict.reasons]


# ------------------------------------------------------------- whole traces


def test_a_whole_trace_is_coherent() -> None:
    verdict = judged(two_nodes())
    assert verdict == Verdict(
        1,
        VerdictKind.COHERENT,
        (),
        ("n1", "n2"),
        sum(map(len, two_nodes().values())),
        2,
        verdict.start_ns,
        verdict.end_ns,
    )
    assert verdict.start_ns is not None
    assert verdict.end_ns is not None
    assert verdict.end_ns - verdict.start_ns == 11


ADDRESS = "10.9.9.9"
CALL = (
    *span(1, ended=False),
    *span(2, 1),
    hop_out("n1", 2),
    Unanswered(2, ADDRESS, "ConnectionRefusedError: nobody listens", unsent=True),
    Breadcrumb(address_id(ADDRESS), f"@{ADDRESS}"),
    span(1)[1],
)


def test_a_call_that_nobody_answered_is_told_and_misses_nothing() -> None:
    harness = Harness()
    verdict = judged({"n1": preamble() + run(*CALL)}, harness)
    assert verdict.kind is VerdictKind.COHERENT
    (reason,) = verdict.reasons
    assert (reason.kind, reason.node) == (ReasonKind.UNANSWERED, "n1")
    assert ADDRESS in reason.detail
    assert "ConnectionRefusedError" in reason.detail
    # Nor is it waited for.
    harness.wait(31 * S)
    assert harness.store.traces[T].released


def said(*bodies: Body) -> bytes:
    return preamble() + run(*bodies)


@pytest.mark.parametrize(
    "slices",
    [
        # Nobody says so, or of another span.
        {"n1": said(*CALL[:4], *CALL[5:])},
        {"n1": said(*(replace(b, span_id=1) if isinstance(b, Unanswered) else b for b in CALL))},
        # Somebody else says so: another process, in another handle, on another node.
        {
            "n1": said(*CALL[:4], *CALL[5:])
            + encode_process(2, Process(9, "liar"))
            + run(CALL[4], client=2)
        },
        {"n1": said(*CALL[:4], *CALL[5:]) + run(CALL[4], handle=2)},
        {"n1": said(*CALL[:4], crumb("n2"), *CALL[5:]), "n2": said(CALL[4])},
    ],
)
def test_a_call_is_unanswered_only_by_the_word_of_who_sent_it(slices: dict[str, bytes]) -> None:
    verdict = judged(slices)
    assert verdict.kind is VerdictKind.PARTIAL
    assert [reason.kind for reason in verdict.reasons] == [ReasonKind.HOP_OUT_UNMET]


def timed_out(*addresses: str, unsent: int = 0) -> bytes:
    """What n1 says of calls that somebody may have got, but for the first so many."""
    calls: list[Body] = []
    for span_id, address in enumerate(addresses, 2):
        calls += [*span(span_id, 1), hop_out("n1", span_id)]
        is_unsent = span_id < 2 + unsent
        calls += [Unanswered(span_id, address, "TimeoutError: timed out", unsent=is_unsent)]
        calls += [Breadcrumb(address_id(address), f"@{address}")]
    return said(*span(1, ended=False), *calls, span(1)[1])


def address_of(harness: Harness, name: str) -> str:
    (address,) = next(view for view in harness.core.nodes(0) if view.node == name).addresses
    return address


def told(harness: Harness) -> tuple[VerdictKind | None, set[tuple[ReasonKind, str]]]:
    verdict = harness.verdict(T)
    assert verdict is not None
    return verdict.kind, {(reason.kind, reason.node) for reason in verdict.reasons}


def test_who_may_have_got_a_call_behind_an_address_of_nobody_is_missing() -> None:
    """As behind a ClusterIP of Kubernetes, or a load balancer."""
    verdict = judged({"n1": timed_out(ADDRESS)})
    assert verdict.kind is VerdictKind.PARTIAL
    (reason,) = verdict.reasons
    assert (reason.kind, reason.node) == (ReasonKind.HOP_OUT_UNMET, "n1")
    assert ADDRESS in reason.detail
    assert "TimeoutError: timed out" in reason.detail


def test_a_call_that_may_have_been_sent_is_missing_whoever_says_that_he_did_not_get_it() -> None:
    """He may get it yet, or have lost it with his memory."""
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": timed_out(address_of(harness, "n2"))})
    harness.wait(2 * S)
    assert told(harness) == (
        VerdictKind.PARTIAL,
        {(ReasonKind.HOP_OUT_UNMET, "n1"), (ReasonKind.NO_ANSWER, "n2")},
    )
    harness.status("n2", T, 0, held=False)
    harness.wait(2 * S)
    assert told(harness) == (VerdictKind.PARTIAL, {(ReasonKind.HOP_OUT_UNMET, "n1")})
    # Nor is it waited for.
    harness.wait(31 * S)
    assert harness.store.traces[T].released


def test_calls_that_are_only_counted_are_judged_each() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": timed_out(*[ADDRESS] * 10, unsent=9)})
    harness.wait(2 * S)
    assert told(harness) == (
        VerdictKind.PARTIAL,
        {(ReasonKind.HOP_OUT_UNMET, "n1"), (ReasonKind.UNANSWERED, "n1")},
    )


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_node_that_comes_later_is_asked_for_what_went_to_its_address(
    settled: bool, is_new: bool
) -> None:
    harness = Harness()
    harness.cluster("n1")
    if not is_new:
        # By then at another address.
        harness.connect("n2")
        harness.lose("n2")
    harness.take_said()
    harness.fire("n1", T)
    harness.deliver(T, {"n1": timed_out(f"10.0.0.{harness._numbers + 1}")})
    harness.wait(2 * S if settled else S // 10)
    harness.connect("n2")
    assert harness.asked()["n2"] == [T]
    harness.open_slices("n2")
    harness.deliver(T, {"n2": said(hop_in("n1", 2), *span(3, 2, ended=False))})
    harness.wait(2 * S)
    assert told(harness) == (VerdictKind.PARTIAL, {(ReasonKind.UNFINISHED, "n2")})


def test_an_address_that_only_a_status_names_is_that_of_a_node_that_comes_later() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    address = f"10.0.0.{harness._numbers + 1}"
    harness.status("n1", T, 0, [address_id(address)], SliceFlags.EVICTED)
    harness.wait(2 * S)
    assert (ReasonKind.UNKNOWN_NODE, f"#{address_id(address):016x}") in told(harness)[1]
    harness.connect("n2")
    assert harness.asked()["n2"] == [T]
    harness.status("n2", T, 0, held=False)
    harness.wait(2 * S)
    # No bytes are here at all, so whoever was asked is expected to have seen it.
    assert told(harness)[1] == {(ReasonKind.EVICTED, "n1"), (ReasonKind.NEVER_SEEN, "n2")}


def test_a_node_is_not_asked_for_what_is_released() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": timed_out(f"10.0.0.{harness._numbers + 1}")})
    harness.wait(40 * S)
    assert harness.store.traces[T].released
    harness.take_said()
    harness.connect("n2")
    assert "n2" not in harness.asked()


def test_who_is_at_the_address_of_a_call_that_nobody_answered_is_heard() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": timed_out(address_of(harness, "n2"))})
    assert harness.asked()["n2"] == [T]
    # It died in the middle of it.
    harness.deliver(T, {"n2": said(hop_in("n1", 2), *span(3, 2, ended=False))})
    harness.wait(S)
    assert {(r.kind, r.node) for r in harness.verdicts[T][-1].reasons} == {
        (ReasonKind.UNFINISHED, "n2")
    }


def test_other_times_and_bounds_hold_for_traces_that_are_here() -> None:
    harness = Harness(CoordinatorConfig(quiet_ns=100 * S, provisional_ns=1000 * S))
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, two_nodes())
    harness.wait(10 * S)
    assert harness.verdict(T) is None
    harness.core.reconfigure(CoordinatorConfig(quiet_ns=S))
    harness.deliver(T, two_nodes(), epoch=2)
    harness.wait(2 * S)
    verdict = harness.verdict(T)
    assert verdict is not None and verdict.kind is not VerdictKind.PROVISIONAL


def test_verdicts_are_counted_and_timed_once_a_trace() -> None:
    harness = Harness()
    judged(two_nodes(), harness)
    counters = harness.core.counters
    assert {kind: n for kind, n in counters.verdicts.items() if n} == {VerdictKind.COHERENT: 1}
    assert set(counters.reasons.values()) == {0}
    assert (sum(harness.core.traversal_s.counts), sum(harness.core.verdict_s.counts)) == (1, 1)
    # Nothing is whole before it is quiet, and nothing is judged before it is whole.
    assert harness.core.traversal_s.sum < harness.core.verdict_s.sum
    figures = harness.core.figures()
    assert (figures.nodes_connected, figures.traces_open, figures.traces_settled) == (2, 0, 1)
    harness.lose("n1")
    harness.restart()
    harness.wait(20 * S)
    assert harness.core.figures().nodes_known == 2
    # A new coordinator does not know when the trace was first reported.
    assert sum(harness.core.verdict_s.counts) == 0


def record(*bodies: Body) -> bytes:
    return preamble() + run(*bodies)


@pytest.mark.parametrize(
    "slices",
    [
        {"n1": preamble() + run(Data(1, b"no spans"))},
        {"n1": preamble() + run(*span(1)) + run(*span(2), handle=2)},  # two roots
        # A message that was delivered twice, and one hop number in two processes.
        {
            "n1": preamble() + run(*span(1), hop_out("n1", 1)),
            "n2": preamble() + run(hop_in("n1", 1)) + run(hop_in("n1", 1), handle=2),
        },
        {
            "n1": preamble() + run(*span(1), hop_out("n1", 0)) + run(hop_out("n1", 0), client=2),
            "n2": preamble() + run(hop_in("n1", 0)) + run(hop_in("n1", 0), handle=2),
        },
        # Two threads of one span, each with a handle of its own, send a request each.
        {
            "n1": record(*span(1), hop_out("n1", 1)) + run(hop_out("n1", 1, handle=2), handle=2),
            "n2": record(hop_in("n1", 1)) + run(hop_in("n1", 1, handle=2), handle=2),
        },
        # Threads finish in any order: the end comes before the start, the last run first.
        {"n1": preamble() + run(span(1)[1], seq=1, flags=L) + run(span(1)[0], flags=F)},
    ],
)
def test_other_whole_traces(slices: dict[str, bytes]) -> None:
    verdict = judged(slices)
    assert verdict.reasons == ()
    assert verdict.kind is VerdictKind.COHERENT


# ------------------------------------------------------------- each reason


@pytest.mark.parametrize(
    ("slices", "kind", "node", "words"),
    [
        (
            {"n1": record(*span(1), hop_out("n1", 1, 7))},
            ReasonKind.HOP_OUT_UNMET,
            "n1",
            "request 7 of span 0000000000000001 in handle 1 was sent",
        ),
        (
            {
                "n1": record(*span(1), hop_out("n1", 0)) + run(hop_out("n1", 0), client=2),
                "n2": record(hop_in("n1", 0)),
            },
            ReasonKind.HOP_OUT_UNMET,
            "n1",
            "was sent",
        ),
        # Two threads of one span: the request of one arrived twice, that of the other never.
        (
            {
                "n1": record(*span(1), hop_out("n1", 1))
                + run(hop_out("n1", 1, handle=2), handle=2),
                "n2": record(hop_in("n1", 1)) + run(hop_in("n1", 1), handle=2),
            },
            ReasonKind.HOP_OUT_UNMET,
            "n1",
            "request 0 of span 0000000000000001 in handle 2 was sent",
        ),
        (
            {"n1": record(*span(1)), "n2": record(hop_in("n1", 1))},
            ReasonKind.HOP_IN_UNMET,
            "n1",
            "arrived on n2",
        ),
        (
            {"n1": record(*span(2, 1))},
            ReasonKind.PARENT_MISSING,
            "n1",
            "span 0000000000000001, the parent of 0000000000000002",
        ),
        (
            {"n1": record(*span(1, ended=False))},
            ReasonKind.UNFINISHED,
            "n1",
            "span 0000000000000001 'op1' of svc[101] never ended",
        ),
        (
            # Two processes may give a span the same id; each ends its own.
            {"n1": record(*span(1, ended=False)) + run(*span(1), client=2)},
            ReasonKind.UNFINISHED,
            "n1",
            "span 0000000000000001 'op1' of svc[101] never ended",
        ),
        (
            {"n1": record(*span(1, ended=False)) + encode_piece(PieceKind.EXIT, client=1)},
            ReasonKind.UNFINISHED,
            "n1",
            "svc[101]; the process is gone",
        ),
        (
            {"n1": record(SpanEnd(1, 2, 0, "", b""))},
            ReasonKind.SPAN_UNSTARTED,
            "n1",
            "its start is not here",
        ),
        (
            {"n1": preamble() + run(*span(1), flags=F)},
            ReasonKind.RUN_MISSING,
            "n1",
            "never closed",
        ),
        (
            {"n1": preamble() + run(*span(1), flags=F) + run(seq=2, flags=L)},
            ReasonKind.RUN_MISSING,
            "n1",
            "2 of 3 runs",
        ),
        (
            {"n1": record(*span(1)) + encode_piece(PieceKind.LOSS, client=1)},
            ReasonKind.LOSSY,
            "n1",
            "svc[101]",
        ),
        (
            {"n1": preamble() + run(*span(1), flags=F | L | RunFlags.LOSSY)},
            ReasonKind.LOSSY,
            "n1",
            "svc[101]",
        ),
        ({"n1": record(*span(1)) + b"\xff" * 24}, ReasonKind.MALFORMED, "n1", "make no sense"),
        ({"n1": record(*span(1)) + b"\0"}, ReasonKind.MALFORMED, "n1", "make no sense"),
        (
            {"n1": record(*span(1), Data(RecordType.SPAN_END, b"short"))},
            ReasonKind.MALFORMED,
            "n1",
            "1 places make no sense",
        ),
        (
            {
                "n1": preamble()
                + encode_piece(
                    PieceKind.RUN,
                    encode_record(Data(1, b"cut"), 0, truncated=True),
                    flags=F | L,
                    client=1,
                )
            },
            ReasonKind.TRUNCATED,
            "n1",
            "1 records were cut",
        ),
    ],
)
def test_what_a_slice_says(
    slices: dict[str, bytes], kind: ReasonKind, node: str, words: str
) -> None:
    verdict = judged(slices)
    (reason,) = verdict.reasons
    assert (reason.kind, reason.node) == (kind, node)
    assert words in reason.detail
    assert verdict.kind is reason.verdict
    assert verdict.kind is not VerdictKind.COHERENT


@pytest.mark.parametrize(
    ("flag", "verdict"),
    [
        (SliceFlags.EVICTED, VerdictKind.PARTIAL),
        (SliceFlags.ABANDONED, VerdictKind.PARTIAL),
        (SliceFlags.LOSSY, VerdictKind.LOSSY),
        (SliceFlags.MAYBE_LOSSY, VerdictKind.LOSSY),
        (SliceFlags.STORE_FULL, VerdictKind.LOSSY),
        (SliceFlags.CORRUPT, VerdictKind.LOSSY),
        (SliceFlags.TRUNCATED, VerdictKind.TRUNCATED),
        (SliceFlags.CRUMBS_CUT, VerdictKind.COHERENT),  # the slice itself has them all
    ],
)
def test_what_a_node_says(flag: SliceFlags, verdict: VerdictKind) -> None:
    assert _verdict_where_n2_says(flag).kind is verdict


def _verdict_where_n2_says(flags: SliceFlags) -> Verdict:
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, slices)
    harness.status("n2", T, len(slices["n2"]), flags=flags)
    harness.wait(S)
    found = harness.verdict(T)
    assert found is not None
    return found


def _reason_for_n2(flags: SliceFlags) -> Reason:
    (reason,) = _verdict_where_n2_says(flags).reasons
    return reason


def test_a_change_of_what_is_recorded_is_named_as_a_cause() -> None:
    assert "`percentage`" in _reason_for_n2(SliceFlags.MAYBE_LOSSY).detail


def test_evicted_by_a_fingerprint_alone_is_said() -> None:
    by_a_gap = _reason_for_n2(SliceFlags.EVICTED)
    by_fingerprint = _reason_for_n2(SliceFlags.EVICTED | SliceFlags.BY_FINGERPRINT)
    assert by_a_gap.kind is by_fingerprint.kind is ReasonKind.EVICTED
    assert "fingerprint" not in by_a_gap.detail
    assert "another trace's once in millions" in by_fingerprint.detail


def test_the_worst_reason_names_the_verdict() -> None:
    slices = {"n1": record(*span(1, 9)) + encode_piece(PieceKind.LOSS, client=1)}
    verdict = judged(slices)
    assert kinds(verdict) == [ReasonKind.LOSSY, ReasonKind.PARENT_MISSING]
    assert verdict.kind is VerdictKind.PARTIAL


def test_crumbs_inside_a_slice_are_followed() -> None:
    """Also those over the 64 that a status can name."""
    harness = Harness()
    harness.cluster("n1", "n2", "n3")
    harness.fire("n1", T)
    data = record(*span(1), crumb("n2"), hop_in("n3", 5))
    harness.status("n1", T, len(data), flags=SliceFlags.CRUMBS_CUT)
    assert harness.asked() == {}
    harness.send("n1", T, 0, data)
    assert harness.asked() == {"n2": [T], "n3": [T]}


def test_an_unknown_node_is_called_by_the_name_on_its_crumb() -> None:
    verdict = judged({"n1": record(*span(1), crumb("ghost"))})
    # One second is the time that an unknown node has to turn up.
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": record(*span(1), crumb("ghost"))})
    harness.wait(2 * S)
    found = harness.verdict(T)
    assert found is not None
    (reason,) = found.reasons
    assert reason.kind is ReasonKind.UNKNOWN_NODE
    assert "'ghost'" in reason.detail
    assert verdict.kind is VerdictKind.PARTIAL


# ------------------------------------- nothing that is incomplete is coherent


def random_trace(rng: random.Random) -> dict[str, list[list[Body]]]:
    """A tree of calls over a few nodes: by node, the records of each handle."""
    nodes = [f"n{number}" for number in range(rng.randrange(1, 5))]
    handles: dict[str, list[list[Body]]] = {}
    spans = 0

    def visit(node: str, caller: HopOut | None, depth: int) -> None:
        nonlocal spans
        spans += 1
        mine = spans
        records: list[Body] = []
        handles.setdefault(node, []).append(records)
        if caller is not None:
            records.append(HopIn(caller.node_id, caller.span_id, caller.hop, caller.handle))
        start, end = span(mine, caller.span_id if caller is not None else 0)
        records.append(start)
        for number in range(rng.randrange(3) if depth < 3 else 0):
            callee = rng.choice(nodes)
            hop = hop_out(node, mine, number)
            records.append(hop)
            visit(callee, hop, depth + 1)
            records.append(crumb(callee))
        records.append(end)

    visit(nodes[0], None, 0)
    return handles


def encode_slice(handles: list[list[Body]], rng: random.Random) -> list[bytes]:
    """The pieces: handles cut into runs at random, runs in any order."""
    pieces: list[bytes] = []
    for number, records in enumerate(handles):
        places = range(1, len(records))
        cuts = sorted({rng.choice(places) for _ in range(rng.randrange(3)) if places})
        parts = [
            records[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(records)], strict=True)
        ]
        for seq, part in enumerate(parts):
            flags = RunFlags.NONE
            flags |= F if seq == 0 else flags
            flags |= L if seq == len(parts) - 1 else flags
            pieces.append(run(*part, handle=number, seq=seq, flags=flags))
    rng.shuffle(pieces)
    return [preamble(), *pieces]


def send_all(harness: Harness, slices: dict[str, bytes], rng: random.Random) -> None:
    """In chunks of any size, nodes interleaved."""
    sent = dict.fromkeys(slices, 0)
    while left := [name for name in slices if sent[name] < len(slices[name])]:
        name = rng.choice(left)
        size = rng.randrange(1, 400)
        harness.send(name, T, sent[name], slices[name][sent[name] : sent[name] + size])
        sent[name] += size


@settings(max_examples=100)
@given(st.randoms(use_true_random=False))
def test_whatever_is_whole_is_coherent(rng: random.Random) -> None:
    handles = random_trace(rng)
    slices = {name: b"".join(encode_slice(found, rng)) for name, found in handles.items()}
    harness = Harness()
    harness.cluster(*slices)
    harness.fire(rng.choice(list(slices)), T)
    for name, data in slices.items():
        harness.status(name, T, len(data), [*slices])
    send_all(harness, slices, rng)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert verdict.reasons == ()
    assert verdict.kind is VerdictKind.COHERENT
    assert verdict.span_count == sum(map(len, handles.values()))


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_whatever_misses_anything_is_not(rng: random.Random) -> None:
    """One hop, parent, end, run, byte or node is taken from a whole trace."""
    handles = random_trace(rng)
    loss = rng.choice(("hop", "parent", "end", "run", "byte", "node", "loss"))
    victims = [
        (records, body)
        for found in handles.values()
        for records in found
        for body in records
        if isinstance(
            body,
            {"hop": HopOut | HopIn, "parent": SpanStart, "end": SpanEnd}.get(loss, Data),
        )
    ]
    if loss == "parent":
        # A leaf's start alone is no parent's, but its end has then no start.
        loss = "start"
    if victims:
        records, body = rng.choice(victims)
        records.remove(body)
    elif loss == "hop":
        loss = "byte"
    encoded = {name: encode_slice(found, rng) for name, found in handles.items()}
    missing = 0
    where = rng.choice(list(encoded))
    if loss == "run" and sum(map(len, encoded.values())) == 2:
        # The only run there is: no slice says that it ever was.
        loss = "byte"
    if loss == "run":
        encoded[where].pop(rng.randrange(1, len(encoded[where])))
    elif loss == "loss":
        encoded[where].append(encode_piece(PieceKind.LOSS, client=1))
    slices = {name: b"".join(pieces) for name, pieces in encoded.items()}
    if loss == "byte":
        missing = rng.randrange(1, len(slices[where]))
        slices[where] = slices[where][:-missing]

    harness = Harness()
    harness.cluster(*slices)
    harness.fire(next(iter(slices)), T)
    for name, data in slices.items():
        if loss != "node" or name != where:
            promised = len(data) + (missing if name == where else 0)
            harness.status(name, T, promised, [*slices], held=True)
        elif name == where:
            del data
    if loss == "node":
        slices.pop(where)
        if not slices:
            harness.status(where, T, 1)
    send_all(harness, slices, rng)
    harness.wait(400 * S)
    for verdict in harness.verdicts[T]:
        assert verdict.kind is not VerdictKind.COHERENT
        assert verdict.reasons
        # Every reason says where, or is about the trace as a whole.
        assert all(reason.detail for reason in verdict.reasons)


# ---------------------------------------------------------------------- when


def test_open_handles_make_it_wait_and_then_provisional() -> None:
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, slices)
    harness.status("n2", T, len(slices["n2"]), open_handles=1)
    harness.wait(9 * S)
    assert harness.verdict(T) is None
    harness.wait(2 * S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert verdict.kind is VerdictKind.PROVISIONAL
    assert kinds(verdict) == [ReasonKind.OPEN]
    assert verdict.reasons[0].detail == "1 handles are open"
    # Nothing new, nothing to say.
    harness.wait(100 * S)
    assert harness.verdict(T) is verdict
    harness.status("n2", T, len(slices["n2"]))
    harness.wait(S)
    final = harness.verdict(T)
    assert final is not None
    assert (final.version, final.kind) == (2, VerdictKind.COHERENT)


def test_a_trace_that_never_ends_gets_a_verdict_each_while() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    data = preamble() + b"".join(
        run(Data(1, b"tick"), seq=seq, flags=F if seq == 0 else RunFlags.NONE)
        for seq in range(1000)
    )
    for begin in range(0, 20_000, 40):
        harness.status("n1", T, begin + 40, open_handles=1)
        harness.send("n1", T, begin, data[begin : begin + 40])
        harness.wait(S // 10)
    verdicts = harness.verdicts[T]
    assert {verdict.kind for verdict in verdicts} == {VerdictKind.PROVISIONAL}
    # Fifty seconds of it, at one version in ten seconds.
    assert 4 <= len(verdicts) <= 5
    # It falls silent, with its handle open: in the end that is called partial.
    harness.wait(400 * S)
    last = harness.verdict(T)
    assert last is not None
    assert last.kind is VerdictKind.PARTIAL
    assert ReasonKind.STILL_WRITTEN in kinds(last)
    assert [m.trace for _, m in harness.take_said() if isinstance(m, Release)] == [T]


def test_what_comes_late_raises_the_version() -> None:
    harness = Harness()
    slices = two_nodes()
    assert judged(slices, harness).version == 1
    more = run(*span(3, 2), handle=2)
    whole = slices["n2"] + more
    harness.status("n2", T, len(whole))
    harness.send("n2", T, len(slices["n2"]), more)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert (verdict.version, verdict.kind, verdict.span_count) == (2, VerdictKind.COHERENT, 3)
    # Between release and oblivion too.
    harness.wait(31 * S)
    assert any(isinstance(message, Release) for _, message in harness.take_said())
    harness.status("n1", T, len(slices["n1"]), open_handles=1)
    last = run(*span(4, 1), handle=3)
    harness.status("n1", T, len(slices["n1"] + last))
    harness.send("n1", T, len(slices["n1"]), last)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert (verdict.version, verdict.kind, verdict.span_count) == (3, VerdictKind.COHERENT, 4)


def test_a_partition_that_heals_is_made_good() -> None:
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.lose("n2")
    harness.lose_slices("n2")
    harness.fire("n1", T)
    harness.status("n1", T, len(slices["n1"]), ["n2"])
    harness.send("n1", T, 0, slices["n1"])
    harness.wait(100 * S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert kinds(verdict) == [ReasonKind.HOP_OUT_UNMET, ReasonKind.NOT_CONNECTED]
    harness.connect("n2")
    harness.open_slices("n2")
    harness.deliver(T, {"n2": slices["n2"]})
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert (verdict.version, verdict.kind) == (2, VerdictKind.COHERENT)


def test_what_was_closed_twice_is_released_when_the_second_time_is_durable() -> None:
    """The news between both are not durable either when the first time is."""
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, slices)
    harness.wait(S)
    harness.autosave = False
    harness.wait(harness.config.linger_ns)
    closings = harness.closings(T)
    assert len(closings) == 1
    harness.fire("n1", T, "again")
    for name, data in slices.items():
        harness.status(name, T, len(data))
    harness.wait(S + harness.config.linger_ns)
    closings = harness.closings(T)
    assert len(closings) == 2
    harness.take_said()
    for token, released in zip(closings, ([], ["n1", "n2"]), strict=True):
        harness.save(token)
        said = harness.take_said()
        assert [name for name, m in said if isinstance(m, Release)] == released


def closed(slices: dict[str, bytes]) -> Harness:
    """T is closed, and only its outcome is in memory."""
    harness = Harness()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, slices)
    harness.wait(S + harness.config.missing_linger_ns + harness.config.linger_ns)
    assert harness.core.figures().traces_closed == 1
    return harness


def fire_again(harness: Harness, how: str) -> None:
    if how == "primary":
        harness.fire("n1", T, "again")
    elif how == "lateral":
        harness.fire("n1", trace_id("U"), "again", laterals=(T,))
    else:
        harness.say("n1", Abandoned(Group("again", T)))
    # Whatever else there is has its verdict then.
    harness.wait(S + harness.config.missing_linger_ns + harness.config.linger_ns)


@pytest.mark.parametrize("how", ["primary", "lateral"])
def test_a_trace_that_the_store_deleted_says_so_when_it_comes_up_again(how: str) -> None:
    harness = closed(two_nodes())
    harness.store.delete(T)
    fire_again(harness, how)
    assert harness.store.traces[T].released
    said = harness.store.traces[T].verdict
    assert said is not None
    assert (said.kind, kinds(said)) == (VerdictKind.PARTIAL, [ReasonKind.DELETED])
    assert not said.bytes and not said.nodes and not said.span_count
    # So it stays for the next coordinator, which goes on from there.
    harness.restart()
    harness.connect("n1")
    fire_again(harness, "primary")
    assert harness.store.traces[T].verdict == said
    # What comes late makes the next version of it.
    harness.open_slices("n1")
    harness.deliver(T, {"n1": two_nodes()["n1"]}, epoch=2)
    harness.wait(S)
    late = harness.store.traces[T].verdict
    assert late is not None
    assert late.version == said.version + 1
    assert ReasonKind.DELETED in kinds(late)
    assert late.kind is VerdictKind.PARTIAL


@pytest.mark.parametrize("how", ["primary", "lateral", "abandoned"])
def test_a_trace_that_is_still_stored_keeps_its_verdict_when_it_comes_up_again(how: str) -> None:
    harness = closed(two_nodes())
    before = harness.store.traces[T].verdict
    fire_again(harness, how)
    assert before is not None
    assert harness.store.traces[T].verdict == before
    assert before.kind is VerdictKind.COHERENT


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("how", ["primary", "lateral"])
def test_what_only_an_abandoned_group_names_was_given_up(how: str, restarts: bool) -> None:
    harness = Harness(CoordinatorConfig(fired_per_s=1, fired_burst=1))
    harness.cluster("n1", "n2")
    if how == "primary":
        # Its node fires too much.
        harness.fire("n1", trace_id("U"))
        harness.fire("n1", T, "first")
    else:
        harness.status("n2", trace_id("U"), 1000)
        harness.say("n2", Abandoned(Group("first", trace_id("U"))))
        harness.fire("n1", trace_id("U"), "first", laterals=(T,))
    harness.wait(S + harness.config.missing_linger_ns + harness.config.linger_ns)
    stored = harness.store.traces[T]
    assert stored.released
    assert stored.verdict is not None
    assert (stored.verdict.kind, kinds(stored.verdict)) == (
        VerdictKind.PARTIAL,
        [ReasonKind.ABANDONED],
    )
    assert stored.verdict.reasons[0].node == ("" if how == "primary" else "n2")
    if restarts:
        harness.restart()
        harness.connect("n1")
        harness.connect("n2")
    # By a trigger that nobody gave up it is a trace like any other.
    slices = two_nodes()
    harness.fire("n1", T, "again")
    for name in slices:
        harness.open_slices(name)
    harness.deliver(T, slices)
    harness.wait(S)
    verdict = harness.store.traces[T].verdict
    assert verdict is not None
    assert (verdict.kind, kinds(verdict)) == (VerdictKind.COHERENT, [])


def test_a_verdict_without_bytes_holds_though_the_store_deleted_the_trace() -> None:
    """Judged again it is the same, which is nothing to write."""
    harness = Harness()
    harness.cluster("n1")
    for _ in range(2):
        harness.fire("n1", T)
        harness.status("n1", T, held=False)
        harness.wait(S + harness.config.missing_linger_ns + harness.config.linger_ns)
        verdict = harness.store.traces[T].verdict
        assert verdict is not None
        assert (verdict.version, kinds(verdict)) == (1, [ReasonKind.NEVER_SEEN])
        harness.store.delete(T)


def is_waited_for(harness: Harness) -> bool:
    """Whether nobody is told to forget T for long after a whole trace would be released."""
    harness.take_said()
    harness.wait(harness.config.missing_linger_ns - 10 * S)
    return not any(isinstance(message, Release) for _, message in harness.take_said())


def test_a_node_that_did_not_answer_may_still_do_so() -> None:
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, {"n1": slices["n1"]})
    harness.wait(2 * S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert kinds(verdict) == [ReasonKind.HOP_OUT_UNMET, ReasonKind.NO_ANSWER]
    assert is_waited_for(harness)
    harness.deliver(T, {"n2": slices["n2"]})
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert (verdict.version, verdict.kind) == (2, VerdictKind.COHERENT)


def test_who_was_never_asked_is_not_said_to_have_given_no_answer() -> None:
    """Since no trigger is known, or the trace was closed before the crumb came."""
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.deliver(T, {"n1": slices["n1"]})
    harness.wait(2 * S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert kinds(verdict) == [ReasonKind.HOP_OUT_UNMET, ReasonKind.NO_TRIGGER]
    harness.wait(1000 * S)
    more = slices["n1"] + slices["n2"]
    harness.status("n1", T, len(more), ["n2"], epoch=2)
    harness.send("n1", T, 0, more, epoch=2)
    harness.wait(1000 * S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert ReasonKind.LATE in kinds(verdict)
    assert ReasonKind.NO_ANSWER not in kinds(verdict)


def test_who_writes_to_another_slice_than_the_one_that_is_kept_may_forget_it() -> None:
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, slices)
    harness.wait(S)
    harness.deliver(T, {"n2": slices["n2"]}, epoch=2)
    harness.wait(harness.config.linger_ns + S)
    assert ("n2", Release(T)) in harness.take_said()
    harness.deliver(T, {"n2": slices["n2"] + run(*span(3), handle=2)}, epoch=2)
    assert ("n2", Release(T)) in harness.take_said()


def test_who_holds_a_trace_for_a_group_that_is_forgotten_here_may_let_go_when_the_last_is_given_up() -> (
    None
):
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, slices)
    harness.wait(1000 * S)
    more = slices["n2"] + run(*span(3), handle=2)
    harness.status("n2", T, len(more))
    other = Group("other", trace_id("O"))
    harness.say("n1", TriggerFired(other, (T,)))
    harness.say("n2", Abandoned(other))
    harness.take_said()
    harness.status("n2", T, len(more))
    harness.wait(1000 * S)
    assert ("n2", Release(T)) in harness.take_said()


def test_bytes_that_overtake_the_first_word_after_a_restart_are_no_sign_of_a_loss() -> None:
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, {"n1": slices["n1"]})
    size = len(slices["n2"])
    harness.status("n2", T, size - 20, open_handles=1)
    harness.send("n2", T, 0, slices["n2"][: size - 20])
    for lose in (harness.lose, harness.lose_slices):
        lose("n2")
    harness.connect("n2", incarnation=2)
    harness.open_slices("n2", incarnation=2)
    harness.send("n2", T, size - 20, slices["n2"][size - 20 :])
    harness.status("n2", T, size - 10, open_handles=1)
    harness.status("n2", T, size)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert verdict.kind is VerdictKind.COHERENT


def test_a_slice_that_ends_where_its_node_lost_the_rest_is_not_malformed() -> None:
    for word in ("none", "of another"):
        harness = Harness()
        slices = two_nodes()
        harness.cluster(*slices)
        harness.fire("n1", T)
        if word != "none":
            harness.status("n1", T, len(slices["n1"]))
        harness.send("n1", T, 0, slices["n1"][:-3])
        harness.lose("n1")
        if word != "none":
            harness.connect("n1", incarnation=2)
            harness.status("n1", T, 0, held=False)
        harness.wait(1000 * S)
        verdict = harness.verdict(T)
        assert verdict is not None
        why = ReasonKind.BYTES_MISSING if word == "none" else ReasonKind.RESTARTED
        assert why in kinds(verdict)
        assert ReasonKind.MALFORMED not in kinds(verdict)


def test_a_slice_of_which_more_is_here_than_its_node_told_of_is_waited_for() -> None:
    """The daemon died when bytes were sent and the word on them was not; it goes on with them."""
    harness = Harness()
    slices = two_nodes()
    size = len(slices["n1"])
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, {"n2": slices["n2"]})
    harness.status("n1", T, size - 20)
    harness.send("n1", T, 0, slices["n1"][: size - 3])
    harness.lose("n1")
    harness.lose_slices("n1")
    harness.wait(2 * S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert ReasonKind.BYTES_MISSING in kinds(verdict)
    assert ReasonKind.MALFORMED not in kinds(verdict)
    assert is_waited_for(harness)
    harness.connect("n1", incarnation=2)
    harness.open_slices("n1", incarnation=2)
    harness.status("n1", T, size)
    harness.send("n1", T, size - 3, slices["n1"][size - 3 :])
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert verdict.kind is VerdictKind.COHERENT


def test_a_node_whose_word_is_missing_may_still_say_how_much_there_is() -> None:
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, {"n1": slices["n1"]})
    harness.lose("n2")  # before its status
    harness.send("n2", T, 0, slices["n2"])
    harness.wait(2 * S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert kinds(verdict) == [ReasonKind.BYTES_MISSING]
    assert is_waited_for(harness)
    harness.connect("n2")
    harness.status("n2", T, len(slices["n2"]))
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert (verdict.version, verdict.kind) == (2, VerdictKind.COHERENT)


def test_a_node_that_is_away_may_have_been_visited_again() -> None:
    harness = Harness()
    slices = two_nodes()
    whole = slices["n1"] + run(*span(3), hop_out("n1", 3), handle=2)
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, {"n1": whole, "n2": slices["n2"]})
    harness.lose("n2")
    harness.lose_slices("n2")
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert kinds(verdict) == [ReasonKind.HOP_OUT_UNMET]
    assert is_waited_for(harness)
    harness.connect("n2")
    harness.open_slices("n2")
    second = run(hop_in("n1", 3), *span(4, 3), handle=2)
    harness.status("n2", T, len(slices["n2"] + second))
    harness.send("n2", T, len(slices["n2"]), second)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert (verdict.version, verdict.kind) == (2, VerdictKind.COHERENT)


def test_a_restart_judges_the_same() -> None:
    harness = Harness()
    slices = two_nodes()
    before = judged(slices, harness)
    harness.restart()
    harness.wait(20 * S)
    assert harness.verdict(T) == before
    assert len(harness.verdicts[T]) == 1
    # Nor does it forget how slices end in the middle of a piece.
    harness.connect("n2")
    harness.open_slices("n2")
    more = run(*span(3, 2), handle=2)
    harness.status("n2", T, len(slices["n2"] + more))
    harness.send("n2", T, len(slices["n2"]), more[:10])
    harness.restart()
    harness.connect("n2")
    harness.open_slices("n2")
    harness.send("n2", T, len(slices["n2"]) + 10, more[10:])
    harness.status("n2", T, len(slices["n2"] + more))
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert (verdict.kind, verdict.span_count) == (VerdictKind.COHERENT, 3)


def test_a_whole_trace_stays_coherent_when_its_group_is_given_up() -> None:
    harness = Harness()
    before = judged(two_nodes(), harness)
    harness.take_said()
    harness.say("n2", Abandoned(Group("lat", T)))
    harness.wait(100 * S)
    assert harness.verdict(T) == before
    assert [name for name, m in harness.take_said() if isinstance(m, Drop)] == ["n1", "n2"]


def test_a_slice_without_a_trigger_is_kept_and_says_so() -> None:
    harness = Harness()
    harness.cluster("n1")
    data = record(*span(1))
    harness.deliver(T, {"n1": data})
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert kinds(verdict) == [ReasonKind.NO_TRIGGER]
    harness.fire("n1", T)
    harness.wait(S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert verdict.kind is VerdictKind.COHERENT


# -------------------------------------------------------------------- bounds


def test_a_trace_with_more_than_is_judged_is_stored_and_says_so() -> None:
    harness = Harness(CoordinatorConfig(evidence_per_trace_max=100))
    data = preamble() + run(*(body for n in range(1, 200) for body in span(n)))
    verdict = judged({"n1": data}, harness)
    assert kinds(verdict) == [ReasonKind.TOO_LARGE]
    assert verdict.kind is VerdictKind.TRUNCATED
    assert bytes(harness.store.traces[T].slices["n1"].data) == data


@pytest.mark.parametrize("kind", [PieceKind.EXIT, PieceKind.LOSS, PieceKind.PROCESS])
def test_clients_are_evidence(kind: PieceKind) -> None:
    content = bytes(72) if kind is PieceKind.PROCESS else b""
    data = b"".join(encode_piece(kind, content, client=client) for client in range(200))
    harness = Harness(CoordinatorConfig(evidence_per_trace_max=100))
    assert kinds(judged({"n1": data}, harness)) == [ReasonKind.TOO_LARGE]


def test_a_slice_is_stored_up_to_a_bound_and_says_so() -> None:
    harness = Harness(CoordinatorConfig(slice_bytes_max=1000))
    data = preamble() + run(*(body for n in range(1, 50) for body in span(n)))
    assert len(data) > 3000
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, len(data), held=True)
    for start in (0, 400, 800, 1200):
        harness.send("n1", T, start, data[start : start + 400])
    harness.restart()
    harness.cluster("n1")
    harness.status("n1", T, len(data), held=True)
    harness.send("n1", T, 1600, data[1600:])
    harness.wait(1 * S)
    # The node gets rid of all of it.
    assert harness.replied[-1][1].acks == (SliceAck(T, len(data), 1),)
    assert bytes(harness.store.traces[T].slices["n1"].data) == data[:1000]
    verdict = harness.verdict(T)
    assert verdict is not None
    (reason,) = [reason for reason in verdict.reasons if reason.kind is ReasonKind.TRUNCATED]
    assert "slice_bytes_max of the coordinator" in reason.detail
    assert ReasonKind.MALFORMED not in kinds(verdict)
    assert ReasonKind.BYTES_MISSING not in kinds(verdict)
    assert harness.core.counters.bytes_over_slice_max == len(data) - 1600
    # Also when it is closed.
    harness.wait(1000 * S)
    harness.send("n1", T, 2000, data[2000:])
    harness.status("n1", T, len(data) + 100, held=True)
    assert harness.replied[-1][1].acks == (SliceAck(T, len(data), 1),)
    assert not harness.core._traces


def test_words_of_a_reason_are_no_longer_than_a_person_reads() -> None:
    # As no client of ours writes it: the name has 255 bytes, and each is shown as four.
    start = Data(RecordType.SPAN_START, struct.pack("<QQQBB6x", 1, 0, REAL_NS, 2, 255) + bytes(255))
    verdict = judged({"n1": preamble() + run(start)})
    assert [len(reason.detail) for reason in verdict.reasons] == [256]


def test_evidence_of_all_traces_is_bounded() -> None:
    harness = Harness(CoordinatorConfig(evidence_max=300))
    harness.cluster("n1")
    data = record(*(body for n in range(1, 11) for body in span(n)))
    for number in range(50):
        trace = trace_id(f"T{number}")
        harness.fire("n1", trace)
        harness.deliver(trace, {"n1": data})
    assert harness.core.counters.traces_finished_early >= 40
    # Early is not wrong: they were whole.
    assert {v[-1].kind for v in harness.verdicts.values()} == {VerdictKind.COHERENT}


def test_reasons_are_counted_where_there_are_many() -> None:
    runs = [run(*span(n, n + 100_000), handle=n) for n in range(1, 1000)]
    verdict = judged({"n1": preamble() + b"".join(runs)})
    assert len(verdict.reasons) <= REASONS_MAX
    assert verdict.reasons[-1].detail == "and 995 more of this kind"


def test_words_are_made_for_few_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ReasonKind] = []

    def reason(kind: ReasonKind, node: str, detail: str) -> Reason:
        made.append(kind)
        return Reason(kind, node, detail)

    monkeypatch.setattr("coordinator.core.verdict.Reason", reason)
    # Each a run that is not the last, with all that can be wrong in it.
    runs = [
        run(
            *span(n, n + 100_000, ended=False),
            SpanEnd(n + 200_000, REAL_NS, 0, "", b""),
            hop_out("n1", n),
            hop_in("n2", n),
            handle=n,
            flags=F | RunFlags.LOSSY,
        )
        for n in range(1, 1000)
    ]
    verdict = judged({"n1": preamble() + b"".join(runs)})
    wanted = {
        ReasonKind.PARENT_MISSING,
        ReasonKind.SPAN_UNSTARTED,
        ReasonKind.UNFINISHED,
        ReasonKind.HOP_OUT_UNMET,
        ReasonKind.HOP_IN_UNMET,
        ReasonKind.RUN_MISSING,
    }
    more = {reason.kind for reason in verdict.reasons if reason.detail.startswith("and 995 more")}
    assert more == wanted
    # One more, which says how many more there are.
    assert {made.count(kind) for kind in wanted} == {REASONS_PER_KIND_AND_NODE + 1}
    # All of one process.
    assert made.count(ReasonKind.LOSSY) == 1


def test_a_large_trace_is_left_alone_for_longer_before_it_is_judged() -> None:
    hops = [hop_out("n1", n) for n in range(1, 30_001)]
    runs = [run(*hops[at : at + 1000], handle=at + 1) for at in range(0, len(hops), 1000)]
    large = trace_id("large")
    harness = Harness()
    harness.cluster("n1")
    for trace, data in ((large, preamble() + b"".join(runs)), (T, preamble() + run(*span(1)))):
        harness.fire("n1", trace)
        harness.deliver(trace, {"n1": data})
    harness.wait(400 * MS)
    assert (harness.verdict(large), len(harness.verdicts[T])) == (None, 1)
    harness.wait(200 * MS)
    assert len(harness.verdicts[large]) == 1


def test_a_trace_is_counted_when_it_is_closed_by_what_it_is_then() -> None:
    harness = Harness()
    judged(two_nodes(), harness)
    assert set(harness.core.counters.closed.values()) == {0}
    harness.wait(100 * S)
    assert {kind: n for kind, n in harness.core.counters.closed.items() if n} == {
        VerdictKind.COHERENT: 1
    }
    # It comes up again, by what nobody else knows of, and has another end.
    harness.deliver(T, {"n1": two_nodes()["n1"] + two_nodes()["n2"]}, epoch=2)
    harness.wait(1000 * S)
    verdict = harness.verdict(T)
    assert verdict is not None and verdict.kind is VerdictKind.PARTIAL
    assert {kind: n for kind, n in harness.core.counters.closed.items() if n} == {
        VerdictKind.COHERENT: 1,
        VerdictKind.PARTIAL: 1,
    }


def test_versions_tell_when_only_they_differ() -> None:
    verdict = Verdict(3, VerdictKind.PARTIAL, (), (), 0, 0, None, None)
    assert replace(verdict, version=4).same_as(verdict)
    assert not replace(verdict, bytes=1).same_as(verdict)
    assert not verdict.same_as(None)


def test_bytes_repeated_after_the_end_begin_nothing() -> None:
    harness = Harness()
    slices = two_nodes()
    before = judged(slices, harness)
    harness.wait(100 * S)
    harness.replied.clear()
    harness.send("n1", T, 0, slices["n1"])
    assert [ack.offset for _, reply in harness.replied for ack in reply.acks] == [len(slices["n1"])]
    assert harness.core.counters.traces_late == 0
    harness.wait(100 * S)
    assert harness.verdict(T) == before
