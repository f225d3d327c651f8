# SPDX-License-Identifier: Apache-2.0
"""A node that comes with another slice of the same trace: never mixed, never coherent by that."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.evidence import Evidence, Finding, FindingKind
from protocol.hashing import node_id
from protocol.messages import ACKS_MAX, SliceAck, SliceChunk, SliceFlags
from tests.unit.coordinator_harness import (
    Harness,
    S,
    hop_in,
    hop_out,
    preamble,
    run,
    span,
    trace_id,
    two_nodes,
)

T = trace_id("T")
SLICES = two_nodes()
N2 = SLICES["n2"]
# The same records and more: longer than the one before.
LONGER = N2 + run(*span(3), handle=2)


def collected(*, whole: bool) -> Harness:
    """n1 is whole, and n2 as far as asked."""
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": SLICES["n1"]})
    harness.status("n2", T, len(N2))
    harness.send("n2", T, 0, N2 if whole else N2[:-20])
    return harness


def restart_node(harness: Harness) -> None:
    harness.lose("n2")
    harness.lose_slices("n2")
    harness.connect("n2", 2)
    harness.open_slices("n2", 2)
    harness.replied.clear()


def stored(harness: Harness) -> tuple[int, bytes]:
    kept = harness.store.traces[T].slices["n2"]
    return kept.epoch, bytes(kept.data)


def acked(harness: Harness) -> list[SliceAck]:
    return [ack for name, reply in harness.replied if name == "n2" for ack in reply.acks]


def judged(harness: Harness) -> tuple[str, set[tuple[str, str]]]:
    verdict = harness.verdict(T)
    assert verdict is not None
    return verdict.kind.value, {(reason.kind.value, reason.node) for reason in verdict.reasons}


RESTARTED = ("partial", {("restarted", "n2")})


@pytest.mark.parametrize("chunk_first", [False, True])
@pytest.mark.parametrize("again", [LONGER, N2, N2[:50]], ids=["longer", "same", "shorter"])
def test_a_whole_slice_is_kept(again: bytes, *, chunk_first: bool) -> None:
    harness = collected(whole=True)
    restart_node(harness)
    if chunk_first:
        harness.send("n2", T, 0, again[:30], 2)
    harness.status("n2", T, len(again), epoch=2)
    harness.send("n2", T, 0, again, 2)
    harness.wait(1 * S)
    assert stored(harness) == (1, N2)
    assert judged(harness) == RESTARTED
    # What is not wanted is acknowledged all the same, so that the node lets go of it.
    assert SliceAck(T, len(again), 2) in acked(harness)
    harness.restart()
    harness.cluster("n1")
    harness.wait(60 * S)
    assert stored(harness) == (1, N2)
    assert ("restarted", "n2") in judged(harness)[1]


@pytest.mark.parametrize("chunk_first", [False, True])
@pytest.mark.parametrize("crash", [False, True])
def test_a_slice_that_is_not_whole_is_given_up(*, chunk_first: bool, crash: bool) -> None:
    harness = collected(whole=False)
    restart_node(harness)
    if not chunk_first:
        harness.status("n2", T, len(LONGER), epoch=2)
        if crash:
            harness.restart()
            harness.cluster("n1", "n2")
    harness.send("n2", T, 0, LONGER[:100], 2)
    if chunk_first and crash:
        harness.restart()
        harness.cluster("n1", "n2")
    harness.status("n2", T, len(LONGER), epoch=2)
    if not crash:  # late, of the one before; with a coordinator its streams go
        harness.send("n2", T, len(N2) - 20, N2[-20:], 1)
        harness.send("n2", T, 0, N2[:100], 1)
    harness.send("n2", T, 100, LONGER[100:], 2)
    harness.status("n1", T, len(SLICES["n1"]))
    harness.wait(12 * S)
    assert stored(harness) == (2, LONGER)
    # Judged by the new one alone: no hop counts twice.
    assert judged(harness) == RESTARTED
    verdict = harness.verdict(T)
    assert verdict is not None and verdict.span_count == 3
    harness.restart()
    harness.cluster("n1", "n2")
    harness.wait(12 * S)
    assert judged(harness) == RESTARTED


def test_bytes_of_two_slices_are_not_put_together_where_the_lengths_would_fit() -> None:
    harness = collected(whole=False)
    restart_node(harness)
    harness.status("n2", T, len(LONGER), epoch=2)
    # As if it went on from where the coordinator was with the other one.
    harness.send("n2", T, len(N2) - 20, LONGER[len(N2) - 20 :], 2)
    harness.wait(1 * S)
    assert stored(harness) == (1, N2[:-20])
    assert harness.core.counters.chunks_with_gap == 1
    assert all(ack.offset == 0 for ack in acked(harness) if ack.epoch == 2)


@pytest.mark.parametrize("before", [N2, b""], ids=["it came", "it did not"])
def test_a_status_that_is_late_does_not_cost_the_slice_that_overtook_it(before: bytes) -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": SLICES["n1"]})
    if before:
        harness.send("n2", T, 0, before)
    harness.send("n2", T, 0, LONGER, 2)
    harness.status("n2", T, len(N2))
    assert acked(harness)[-1] == SliceAck(T, len(LONGER), 2)
    harness.status("n2", T, len(LONGER), epoch=2)
    harness.wait(1 * S)
    assert stored(harness) == (2, LONGER)
    assert judged(harness) == RESTARTED


def test_a_late_status_of_an_empty_slice_says_nothing() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": SLICES["n1"]})
    harness.send("n2", T, 0, N2, 2)
    harness.status("n2", T, 0, held=True)
    harness.status("n2", T, len(N2), epoch=2)
    harness.wait(1 * S)
    assert judged(harness) == ("coherent", set())


def test_a_lower_epoch_of_another_report_store_is_not_late() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": SLICES["n1"]})
    harness.send("n2", T, 0, N2[:-20], 1 << 40)
    restart_node(harness)
    harness.status("n2", T, len(LONGER), epoch=7)
    harness.send("n2", T, 0, LONGER, 7)
    harness.wait(1 * S)
    assert stored(harness) == (7, LONGER)
    assert judged(harness) == RESTARTED


@pytest.mark.parametrize("why", [SliceFlags.ABANDONED, SliceFlags.STORE_FULL])
def test_what_is_here_stays_where_its_node_refuses_to_collect_it_again(why: SliceFlags) -> None:
    harness = collected(whole=True)
    harness.wait(1 * S)
    assert judged(harness) == ("coherent", set())
    harness.status("n2", T, 0, flags=why, epoch=0)
    harness.wait(1 * S)
    # That it gave up what is here, of which it knew nothing, is no loss.
    is_loss = why is SliceFlags.STORE_FULL
    assert judged(harness) == (
        ("lossy", {("store_full", "n2")}) if is_loss else ("coherent", set())
    )
    # Another group wants it: it collects it anew.
    harness.status("n2", T, len(N2), flags=SliceFlags.ABANDONED, epoch=7)
    harness.send("n2", T, 0, N2[:40], 7)
    assert stored(harness) == (1, N2)
    harness.wait(1 * S)
    assert ("restarted", "n2") in judged(harness)[1]


def test_no_trace_is_called_coherent_when_bytes_of_it_are_given_up() -> None:
    harness = collected(whole=True)
    harness.wait(1 * S)
    assert judged(harness) == ("coherent", set())
    # It writes more, and loses its memory before that was sent.
    harness.status("n2", T, len(N2) + 100)
    restart_node(harness)
    harness.send("n2", T, 0, LONGER[:100], 2)
    assert stored(harness) == (2, LONGER[:100])
    verdict = harness.store.traces[T].verdict
    assert verdict is not None and verdict.kind.value == "provisional"


def test_after_an_empty_slice_another_one_is_nothing_special() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.status("n1", T, len(SLICES["n1"]), ["n2"])
    harness.send("n1", T, 0, SLICES["n1"])
    harness.status("n2", T, 0)
    harness.deliver(T, {"n2": N2})
    harness.status("n2", T, len(N2), epoch=7)
    harness.wait(1 * S)
    assert judged(harness) == RESTARTED  # there had been bytes
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": SLICES["n1"]})
    harness.status("n2", T, 0)
    harness.deliver(T, {"n2": N2}, epoch=7)
    harness.wait(1 * S)
    assert judged(harness) == ("coherent", set())
    assert stored(harness) == (7, N2)


@pytest.mark.parametrize("crash", [False, True])
def test_a_closed_trace_stays_unless_there_is_more(*, crash: bool) -> None:
    harness = collected(whole=True)
    harness.wait(100 * S)
    if crash:
        harness.restart()
        harness.cluster("n1", "n2")
    assert judged(harness) == ("coherent", set())
    harness.replied.clear()
    harness.status("n2", T, len(N2), epoch=2)
    harness.send("n2", T, 0, N2, 2)
    harness.wait(1 * S)
    assert judged(harness) == ("coherent", set())
    assert acked(harness)[-1] == SliceAck(T, len(N2), 2)
    harness.status("n2", T, len(LONGER), epoch=3)
    harness.send("n2", T, 0, LONGER, 3)
    harness.wait(1 * S)
    assert judged(harness) == ("partial", {("late", ""), ("restarted", "n2")})
    assert stored(harness) == (1, N2)
    assert acked(harness)[-1] == SliceAck(T, len(LONGER), 3)


@pytest.mark.parametrize("wait_s", [35, 100])
def test_what_was_written_after_the_end_is_not_passed_over_for_being_short(wait_s: int) -> None:
    """The node no longer has what it reported: what it has is something else."""
    harness = collected(whole=True)
    harness.wait(wait_s * S)
    assert judged(harness) == ("coherent", set())
    late = preamble() + run(*span(9), handle=9)
    assert len(late) < len(N2)
    harness.status("n2", T, len(late), flags=SliceFlags.EVICTED, epoch=2)
    harness.send("n2", T, 0, late, 2)
    harness.wait(1 * S)
    kind, reasons = judged(harness)
    assert kind == "partial"
    assert ("restarted", "n2") in reasons
    assert stored(harness) == (1, N2)
    assert acked(harness)[-1] == SliceAck(T, len(late), 2)


def test_a_closed_trace_that_is_longer_does_not_miss_whom_its_addresses_hint_at() -> None:
    """Once it is closed, nobody knows which of its crumbs carry an address where no node is."""
    harness = collected(whole=True)
    harness.wait(100 * S)
    harness.status("n2", T, len(LONGER), ["@127.0.0.1"], epoch=3)
    harness.send("n2", T, 0, LONGER, 3)
    harness.wait(1 * S)
    assert judged(harness) == ("partial", {("late", ""), ("restarted", "n2")})


def test_a_late_chunk_is_not_acknowledged_for_an_empty_slice() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": SLICES["n1"]})
    harness.status("n2", T, len(N2))
    harness.status("n2", T, len(LONGER), epoch=2)
    harness.status("n2", T, 0, epoch=2)
    harness.send("n2", T, 0, N2[:8], 1)
    assert acked(harness) == []
    harness.wait(1 * S)
    kind, reasons = judged(harness)
    assert kind == "partial"
    assert ("restarted", "n2") in reasons


@settings(max_examples=150, deadline=None)
@given(rng=st.randoms(use_true_random=False), steps=st.integers(5, 60))
def test_whatever_comes_in_whatever_order_is_of_one_slice(rng: random.Random, steps: int) -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": SLICES["n1"]})
    epochs = {1: N2, 2: LONGER, 3: preamble() + run(hop_in("n1", 1), *span(2, 1)) * 3}
    earliest = now = 1
    seen: set[int] = set()
    harness.autosave = False
    for _ in range(steps):
        # A late chunk may be of the slice before, while its stream lasts.
        epoch = rng.randint(earliest, now)
        data = epochs[epoch]
        match rng.randrange(9):
            case 0:
                size = rng.choice((len(epochs[now]), rng.randrange(len(epochs[now]))))
                harness.status("n2", T, size, held=True, epoch=now)
            case 1:
                harness.save()
            case 2:
                harness.restart()
                harness.cluster("n1", "n2")
                earliest = now
            case 3:
                harness.wait(rng.choice((S // 10, S, 20 * S)))
            case 4 if now < len(epochs):
                earliest, now = now, now + 1
            case _:
                offset = rng.choice((0, 0, rng.randrange(len(data))))
                size = rng.randrange(1, 300)
                harness.send("n2", T, offset, data[offset : offset + size], epoch)
                harness.save()
        kept = harness.store.traces.get(T)
        found = kept.slices.get("n2") if kept is not None else None
        if found is not None and found.data:
            seen.add(found.epoch)
            assert epochs[found.epoch].startswith(bytes(found.data))
    harness.save()
    harness.status("n2", T, len(epochs[now]), held=True, epoch=now)
    harness.send("n2", T, 0, epochs[now], now)
    harness.save()
    harness.wait(20 * S)
    harness.save()
    if len(seen | {stored(harness)[0]}) > 1:
        # Where a slice went, something may have gone with it.
        assert judged(harness)[0] != "coherent"


def test_a_slice_that_is_begun_again_and_again_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged_at: list[int] = []
    findings = Evidence.findings

    def counted(self: Evidence, few: int) -> Iterator[Finding]:
        judged_at.append(few)
        return findings(self, few)

    monkeypatch.setattr(Evidence, "findings", counted)
    hops = [hop_out("n1", number) for number in range(1, 101)]
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": preamble() + run(*hops)})
    for epoch in range(1, 51):
        harness.send("n2", T, 0, N2, epoch)
    harness.wait(2 * S)
    assert {"bytes_missing", "restarted"} <= {kind for kind, _ in judged(harness)[1]}
    # Nothing was looked for before it was judged, and each judgement is a verdict.
    assert 0 < len(judged_at) <= len(harness.verdicts[T])


def test_evidence_without_a_slice_is_as_if_it_had_never_come() -> None:
    n1, n2 = node_id("n1"), node_id("n2")
    with_both, alone = Evidence(1000), Evidence(1000)
    with_both.add(n1, SLICES["n1"])
    with_both.add(n2, LONGER + run(*span(9, 1234), handle=3))
    with_both.restart(n2)
    alone.add(n1, SLICES["n1"])
    (missing,) = alone.findings(4)
    assert (missing.kind, missing.node, missing.span_id) == (FindingKind.HOP_OUT_UNMET, n1, 1)
    assert list(with_both.findings(4)) == [missing]
    assert with_both.items == alone.items
    assert with_both.extent() == alone.extent()
    with_both.add(n2, N2)
    alone.add(n2, N2)
    assert list(with_both.findings(4)) == list(alone.findings(4)) == []
    assert with_both.items == alone.items


def test_more_acks_than_fit_into_a_reply_go_in_several() -> None:
    # A node that makes up slices, while the disk takes nothing: each is declined, and says so.
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": SLICES["n1"]})
    harness.autosave = False
    harness.fire("n1", T, "another")
    harness.replied.clear()
    epochs = range(2, ACKS_MAX + 3)
    for epoch in epochs:
        harness.core.on_chunk(harness.streams["n1"], SliceChunk(T, 0, b"x", epoch), harness.now_ns)
    harness.fetch()
    assert [reply for _, reply in harness.replied if reply.acks] == []
    harness.save()  # encodes each reply
    assert [ack.epoch for _, reply in harness.replied for ack in reply.acks] == list(epochs)
    assert len([reply for _, reply in harness.replied if reply.acks]) == 2


def test_a_late_chunk_does_not_cost_the_slice_whose_status_overtook_it() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 8, epoch=2)
    harness.send("n1", T, 0, b"late", 1)
    harness.send("n1", T, 4, b"late", 1)
    harness.replied.clear()
    harness.send("n1", T, 0, b"abcd", 2)
    harness.send("n1", T, 4, b"efgh", 2)
    acks = [ack for _, reply in harness.replied for ack in reply.acks]
    assert not any(ack.again for ack in acks), "it is sent again and again"
    assert bytes(harness.store.traces[T].slices["n1"].data) == b"abcdefgh"


@pytest.mark.parametrize("handles", [0, 1])
def test_a_late_chunk_does_not_take_the_place_of_a_slice_without_bytes(handles: int) -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": SLICES["n1"]})
    harness.status("n2", T, 0, held=True, open_handles=handles, epoch=2)
    harness.send("n2", T, 0, N2, 1)
    assert acked(harness) == []
    harness.wait(5 * S)
    assert harness.core._traces[T].is_awaited == bool(handles)
    if not handles:
        assert judged(harness) == ("partial", {("restarted", "n2"), ("hop_out_unmet", "n1")})
    harness.status("n2", T, len(LONGER), held=True, epoch=2)
    harness.send("n2", T, 0, LONGER, 2)
    harness.wait(5 * S)
    assert stored(harness) == (2, LONGER)
    assert judged(harness) == RESTARTED
