# SPDX-License-Identifier: Apache-2.0
"""Closed traces that come up again: whatever the coordinator remembers of them, none gets better."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from coordinator.core.closed import UnreadableError
from coordinator.core.coordinator import CoordinatorConfig
from coordinator.core.records import StoredTrace
from coordinator.core.trace import TraceState
from coordinator.core.verdict import ReasonKind, Verdict
from formats.records import Data
from formats.slices import PieceKind, RunFlags
from protocol.messages import Abandoned, Group, Release, SliceAck, SliceFlags, TraceId
from protocol.verdicts import VerdictKind
from testbed.encoding import encode_piece, encode_record
from tests.unit.coordinator_harness import (
    Harness,
    S,
    preamble,
    run,
    span,
    trace_id,
    two_nodes,
)

T = trace_id("T")
CLOSED_MAX = 3


def kinds(verdict: Verdict | None) -> set[ReasonKind]:
    assert verdict is not None
    return {reason.kind for reason in verdict.reasons}


def closed(closed_max: int = 1000) -> Harness:
    """T is coherent, and closed."""
    harness = Harness(replace(CoordinatorConfig(), closed_max=closed_max))
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, slices)
    wait_for_the_end(harness)
    stored = harness.store.traces[T]
    assert stored.released
    assert stored.verdict is not None
    assert (stored.verdict.kind, stored.verdict.version) == (VerdictKind.COHERENT, 1)
    return harness


def wait_for_the_end(harness: Harness) -> None:
    harness.wait(S + harness.config.missing_linger_ns + harness.config.linger_ns)


def close_others(harness: Harness, count: int) -> None:
    for number in range(count):
        other = trace_id(f"other{number}")
        harness.fire("n1", other)
        harness.status("n1", other, held=False)
    wait_for_the_end(harness)


def test_each_move_of_a_trace_is_told_to_who_wants_it() -> None:
    harness = closed()
    assert harness.core.take_moves(wanted=True) == []
    other = trace_id("U")
    harness.fire("n1", other)
    harness.deliver(other, two_nodes())
    wait_for_the_end(harness)
    told = [(before, after) for _, before, after in harness.core.take_moves(wanted=False)]
    assert told == [
        (TraceState.OPEN, TraceState.SETTLED),
        (TraceState.SETTLED, TraceState.RELEASED),
        (TraceState.RELEASED, TraceState.CLOSED),
    ]
    # Nobody wants to know, so nothing is kept.
    harness.fire("n1", trace_id("V"))
    wait_for_the_end(harness)
    assert harness.core.take_moves(wanted=False) == []


def test_a_closed_trace_is_freed_without_a_collector_of_cycles() -> None:
    """The coordinator has Python's look seldom, since each look stops it."""
    harness = closed()  # with what is made once, and stays
    other = trace_id("U")
    gc.collect()
    gc.disable()
    try:
        harness.fire("n1", other)
        harness.deliver(other, two_nodes())
        wait_for_the_end(harness)
        assert harness.store.traces[other].released
        assert gc.collect() == 0
    finally:
        gc.enable()


def collect_what_is_left(harness: Harness) -> None:
    """The node has evicted most of T, and is asked for it again."""
    harness.fire("n1", T, "again")
    left = preamble() + run(*span(9), handle=9)
    harness.status("n1", T, len(left), flags=SliceFlags.EVICTED, epoch=7)
    harness.send("n1", T, 0, left, 7)
    wait_for_the_end(harness)


@pytest.mark.parametrize("forgets", ["not", "for-others", "at-a-restart"])
def test_a_verdict_gets_worse_though_the_trace_was_forgotten(forgets: str) -> None:
    harness = closed(1000 if forgets == "not" else CLOSED_MAX)
    before = bytes(harness.store.traces[T].slices["n1"].data)
    if forgets != "not":
        close_others(harness, 2 * CLOSED_MAX)
    assert (T in harness.core._lifecycle.closed._outcomes) == (forgets == "not")
    if forgets == "at-a-restart":
        harness.restart()
        harness.cluster("n1", "n2")
    collect_what_is_left(harness)
    kept = harness.store.traces[T]
    assert kept.verdict is not None
    assert (kept.verdict.kind, kept.verdict.version) == (VerdictKind.PARTIAL, 2)
    assert kinds(kept.verdict) == {ReasonKind.LATE, ReasonKind.RESTARTED}
    # What is there is not given up for what is left.
    assert bytes(kept.slices["n1"].data) == before


def said(harness: Harness, node: str) -> list[tuple[ReasonKind, str]]:
    verdict = harness.store.traces[T].verdict
    assert verdict is not None
    return [(reason.kind, reason.detail) for reason in verdict.reasons if reason.node == node]


@pytest.mark.parametrize("forgets", ["not", "for-others", "at-a-restart"])
def test_of_a_trace_that_was_closed_empty_is_known_how_much_is_to_come(forgets: str) -> None:
    harness = Harness(replace(CoordinatorConfig(), closed_max=CLOSED_MAX))
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.status("n1", T, len(slices["n1"]))
    wait_for_the_end(harness)
    assert harness.store.traces[T].released
    if forgets != "not":
        close_others(harness, 2 * CLOSED_MAX)
    assert (T in harness.core._lifecycle.closed._outcomes) == (forgets == "not")
    if forgets == "at-a-restart":
        harness.restart()
        harness.cluster(*slices)
    # All of it comes, as was said.
    harness.send("n1", T, 0, slices["n1"])
    wait_for_the_end(harness)
    verdict = harness.store.traces[T].verdict
    assert ReasonKind.BYTES_MISSING not in kinds(verdict)
    assert bytes(harness.store.traces[T].slices["n1"].data) == slices["n1"]


def test_what_a_node_says_once_more_is_one_reason() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": two_nodes()["n1"]})
    for size in (500, 600):
        harness.fire("n1", T, f"t{size}")
        harness.status("n2", T, size, flags=SliceFlags.LOSSY)
        wait_for_the_end(harness)
    assert ReasonKind.LATE in kinds(harness.store.traces[T].verdict)
    kinds_said = [kind for kind, _ in said(harness, "n2")]
    assert ReasonKind.LOSSY in kinds_said
    assert len(kinds_said) == len(set(kinds_said))
    # As it is now, not as it was.
    assert (ReasonKind.BYTES_MISSING, "0 of 600 bytes came") in said(harness, "n2")


def test_of_one_that_comes_up_again_and_is_given_up_nothing_else_is_said() -> None:
    """What was missing when it was closed may have come since."""
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": two_nodes()["n1"]})
    wait_for_the_end(harness)
    assert ReasonKind.HOP_OUT_UNMET in kinds(harness.store.traces[T].verdict)
    harness.restart()
    harness.cluster("n1", "n2")
    harness.fire("n2", T, "again")
    harness.deliver(T, {"n2": two_nodes()["n2"]})
    harness.say("n2", Abandoned(Group("again", T)))
    wait_for_the_end(harness)
    assert kinds(harness.store.traces[T].verdict) == {ReasonKind.ABANDONED}


def test_how_many_more_reasons_there_were_is_not_forgotten() -> None:
    harness = Harness()
    data = preamble() + b"".join(run(*span(n, n + 100), handle=n) for n in range(1, 31))
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": data})
    wait_for_the_end(harness)
    before = said(harness, "n1")
    assert before[-1] == (ReasonKind.PARENT_MISSING, "and 26 more of this kind")
    harness.fire("n2", T, "again")
    harness.status("n2", T, flags=SliceFlags.LOSSY, epoch=8)
    wait_for_the_end(harness)
    assert ReasonKind.LATE in kinds(harness.store.traces[T].verdict)
    assert said(harness, "n1") == before


def test_nothing_new_of_a_forgotten_trace_is_no_news() -> None:
    harness = closed(CLOSED_MAX)
    close_others(harness, 2 * CLOSED_MAX)
    before = harness.store.traces[T].verdict
    harness.fire("n1", T, "again")
    for name, data in two_nodes().items():
        harness.status(name, T, len(data), epoch=7)
    wait_for_the_end(harness)
    assert harness.store.traces[T].verdict == before
    assert harness.store.traces[T].released


def test_no_trace_is_forgotten_before_its_end_is_durable() -> None:
    """Else it would begin as new, and its verdict would stand on bytes that are gone."""
    harness = Harness(replace(CoordinatorConfig(), closed_max=CLOSED_MAX))
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.deliver(T, two_nodes())
    harness.wait(S)
    verdict = harness.store.traces[T].verdict
    assert verdict is not None
    assert (verdict.kind, verdict.version) == (VerdictKind.COHERENT, 1)
    harness.autosave = False
    wait_for_the_end(harness)
    others = 10 * CLOSED_MAX
    close_others(harness, others)
    assert harness.core.figures().traces_closed == others + 1
    collect_what_is_left(harness)
    harness.save()
    kept = harness.store.traces[T]
    assert kept.verdict is not None
    assert (kept.verdict.kind, kept.verdict.version) == (VerdictKind.PARTIAL, 2)
    harness.autosave = True
    close_others(harness, 1)
    assert harness.core.figures().traces_closed <= CLOSED_MAX


def test_who_was_not_told_of_a_trace_s_end_is_asked_when_he_fires_it_again() -> None:
    """He has answered, and takes that for known: by itself the firing would be without an answer."""
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", trace_id("first"), laterals=(T,))
    harness.deliver(trace_id("first"), {"n1": run(*span(1))})
    harness.status("n1", T, held=False)
    harness.autosave = False
    wait_for_the_end(harness)
    assert harness.core.figures().traces_closed == 2
    harness.take_said()
    harness.fire("n1", trace_id("second"), laterals=(T,))
    assert harness.asked() == {"n1": [T]}
    harness.status("n1", T, held=False)
    harness.status("n1", trace_id("second"), held=False)
    wait_for_the_end(harness)
    harness.save()
    verdict = harness.verdict(T)
    assert verdict is not None
    assert [reason.kind for reason in verdict.reasons] == [ReasonKind.NEVER_SEEN]
    harness.autosave = True
    wait_for_the_end(harness)
    # Whoever was told begins anew by himself.
    harness.take_said()
    harness.fire("n1", trace_id("third"), laterals=(T,))
    assert harness.asked() == {}


def test_who_answered_too_late_and_was_not_told_of_the_end_is_asked_too() -> None:
    """What it said came when the trace was closed, and said nothing new of that."""
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", trace_id("first"), laterals=(T,))
    harness.deliver(trace_id("first"), {"n1": run(*span(1))})
    harness.autosave = False
    wait_for_the_end(harness)
    assert harness.core.figures().traces_closed == 2
    harness.status("n1", T, held=False)
    harness.take_said()
    harness.fire("n1", trace_id("second"), laterals=(T,))
    assert harness.asked() == {"n1": [T]}


def closed_as_blank_of_two() -> Harness:
    """Fired as a lateral by two nodes that had nothing of it, and closed, but not durably."""
    harness = Harness()
    harness.cluster("n1", "n2")
    for name in ("n1", "n2"):
        primary = trace_id(f"of {name}")
        harness.fire(name, primary, laterals=(T,))
        harness.status(name, primary, held=False)
        harness.status(name, T, held=False)
    harness.autosave = False
    wait_for_the_end(harness)
    assert harness.core.figures().traces_closed == 3
    harness.take_said()
    return harness


def test_who_was_not_told_of_the_end_is_asked_though_another_named_him_since() -> None:
    harness = closed_as_blank_of_two()
    # n1 has something by now, but nobody wants it until n2 fires it again.
    harness.status("n1", T, 4, ["n2"])
    assert harness.asked() == {}
    harness.fire("n2", trace_id("again"), laterals=(T,))
    assert harness.asked() == {"n1": [T], "n2": [T]}


def test_who_was_not_told_of_the_end_is_told_of_the_next() -> None:
    """And is asked until then, though he has no part in it."""
    harness = closed_as_blank_of_two()
    harness.fire("n1", trace_id("second"), laterals=(T,))
    assert harness.asked() == {"n1": [T]}
    harness.status("n1", T, held=False)
    harness.status("n1", trace_id("second"), held=False)
    wait_for_the_end(harness)
    harness.fire("n2", trace_id("third"), laterals=(T,))
    assert harness.asked() == {"n2": [T]}
    harness.status("n2", T, held=False)
    harness.status("n2", trace_id("third"), held=False)
    wait_for_the_end(harness)
    harness.take_said()
    harness.save()
    assert {name for name, said in harness.take_said() if said == Release(T)} == {"n1", "n2"}


def test_what_is_said_of_a_trace_is_not_heard_while_the_store_cannot_be_read() -> None:
    harness = closed(CLOSED_MAX)
    close_others(harness, 2 * CLOSED_MAX)
    reads = harness.core._lifecycle.closed._stored
    before = bytes(harness.store.traces[T].slices["n1"].data)
    memory, stored = harness.core.memory_bytes, harness.core.figures().undurable_bytes

    def fails(_: TraceId) -> StoredTrace | None:
        raise UnreadableError

    harness.core._lifecycle.closed._stored = fails
    for say in (
        lambda: harness.fire("n1", T, "again"),
        lambda: harness.fire("n1", trace_id("U"), "again", (T,)),
        lambda: harness.status("n1", T, 100, flags=SliceFlags.EVICTED, epoch=7),
        lambda: harness.send("n1", T, 0, preamble(), 7),
    ):
        with pytest.raises(UnreadableError):
            say()
        assert harness.core.take_writes() == []
        harness.fetch()
        assert harness.core.figures().undurable_bytes == stored
        # As much as before, or less: credit that was used is given again when it is asked for.
        assert harness.core.memory_bytes <= memory
    # What is not heard takes no credit.
    for _ in range(1000):
        with pytest.raises(UnreadableError):
            harness.send("n1", T, 0, bytes(8192), 7)
        harness.fetch()
    harness.core._lifecycle.closed._stored = reads
    collect_what_is_left(harness)
    kept = harness.store.traces[T]
    assert kept.verdict is not None
    assert (kept.verdict.kind, kept.verdict.version) == (VerdictKind.PARTIAL, 2)
    assert bytes(kept.slices["n1"].data) == before


def test_what_was_known_before_the_store_failed_is_taken_up() -> None:
    """To read of a lateral pushes out what is remembered of the primary, which cannot be read then."""
    harness = Harness(CoordinatorConfig(closed_max=1))
    harness.cluster("n1")
    other = trace_id("O")
    for trace in (other, T):
        # Nobody had anything, so a firing begins them anew.
        harness.fire("n1", trace)
        harness.status("n1", trace, held=False)
        wait_for_the_end(harness)
    assert list(harness.core._lifecycle.closed._outcomes) == [T]
    reads = harness.core._lifecycle.closed._stored

    def fails(trace: TraceId) -> StoredTrace | None:
        if trace == T:
            raise UnreadableError
        return reads(trace)

    harness.core._lifecycle.closed._stored = fails
    group = harness.fire("n1", T, "again", laterals=(other,))
    assert (group, "n1") in harness.store.triggers
    for trace in (other, T):
        assert list(harness.core._traces[trace].groups) == [group]
        harness.deliver(trace, {"n1": preamble() + run(*span(1))})
    wait_for_the_end(harness)
    for trace in (other, T):
        verdict = harness.store.traces[trace].verdict
        assert verdict is not None
        assert (verdict.kind, verdict.version) == (VerdictKind.COHERENT, 2)
        assert harness.store.traces[trace].released


def test_a_trace_that_comes_up_again_is_not_counted_as_closed() -> None:
    harness = closed()
    assert harness.core.figures().traces_closed == 1
    harness.status("n1", T, 1000, flags=SliceFlags.LOSSY)
    assert harness.core.figures().traces_closed == 0
    wait_for_the_end(harness)
    assert harness.core.figures().traces_closed == 1


# ------------------------------------------------------- collected once more

DATA = [encode_record(Data(1, bytes([number]) * 12), 0) for number in range(8)]


def bit_by_bit() -> bytes:
    """A run that was copied record by record, and the process told twice."""
    pieces, start = [preamble()], 0
    for number, data in enumerate(DATA):
        flags = RunFlags.FIRST | RunFlags.LAST * (number == len(DATA) - 1)
        pieces.append(
            encode_piece(PieceKind.RUN, data, flags=flags, client=1, handle=1, seq=0, start=start)
        )
        start += len(data)
    return b"".join([*pieces, preamble()])


def at_once() -> bytes:
    """The same, copied when it was whole."""
    flags = RunFlags.FIRST | RunFlags.LAST
    whole = encode_piece(PieceKind.RUN, b"".join(DATA), flags=flags, client=1, handle=1, seq=0)
    return preamble() + whole


LATER = run(Data(1, b"later"), handle=2)


@pytest.mark.parametrize("remembered", ["in-memory", "closed", "by-the-store"])
@pytest.mark.parametrize("is_later", [False, True], ids=["the-same", "and-more"])
def test_what_was_written_later_is_seen_though_the_slice_is_shorter(
    remembered: str, is_later: bool
) -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": bit_by_bit()})
    harness.wait(S + harness.config.linger_ns)
    assert harness.store.traces[T].released
    if remembered != "in-memory":
        wait_for_the_end(harness)
    if remembered == "by-the-store":
        harness.restart()
        harness.cluster("n1")
    again = at_once() + LATER * is_later
    assert len(again) < len(bit_by_bit())
    harness.deliver(T, {"n1": again}, epoch=2)
    wait_for_the_end(harness)
    verdict = harness.store.traces[T].verdict
    assert verdict is not None
    if is_later:
        assert (verdict.kind, verdict.version) == (VerdictKind.PARTIAL, 2)
        assert ReasonKind.RESTARTED in kinds(verdict)
    else:
        assert (verdict.kind, verdict.version) == (VerdictKind.COHERENT, 1)


@pytest.mark.parametrize("wait_s", [35, 400], ids=["released", "closed"])
@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        (SliceFlags.LOSSY, ReasonKind.LOSSY),
        (SliceFlags.MAYBE_LOSSY, ReasonKind.MAYBE_LOSSY),
        (SliceFlags.CORRUPT, ReasonKind.CORRUPT),
    ],
)
def test_a_doubt_that_comes_after_the_end_counts(
    wait_s: int, epoch: int, flag: SliceFlags, reason: ReasonKind
) -> None:
    harness = Harness()
    slices = two_nodes()
    harness.cluster(*slices)
    harness.fire("n1", T)
    harness.deliver(T, slices)
    harness.wait(wait_s * S)
    size = len(slices["n1"])
    harness.status("n1", T, size, flags=flag, held=True, epoch=epoch)
    wait_for_the_end(harness)
    verdict = harness.store.traces[T].verdict
    assert verdict is not None
    assert verdict.version == 2
    assert verdict.kind is not VerdictKind.COHERENT
    assert reason in kinds(verdict)
    # Said once more it is no news.
    harness.status("n1", T, size, flags=flag, held=True, epoch=epoch)
    wait_for_the_end(harness)
    assert harness.store.traces[T].verdict == verdict


def test_who_owed_bytes_when_it_was_closed_owes_them_still() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.status("n1", T, 100)
    harness.lose("n1")
    harness.lose_slices("n1")
    wait_for_the_end(harness)
    assert harness.store.traces[T].released
    harness.fire("n2", T, "other")
    harness.deliver(T, {"n2": preamble() + run(*span(1))})
    harness.wait(2 * S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert verdict.kind is not VerdictKind.COHERENT
    assert "n1" in {reason.node for reason in verdict.reasons}


def test_a_node_that_lost_its_memory_has_news_though_it_has_less() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": preamble() + run(*span(1), *span(2, 1), *span(3, 1))}, epoch=5)
    wait_for_the_end(harness)
    harness.lose("n1")
    harness.lose_slices("n1")
    harness.connect("n1", 2)
    harness.open_slices("n1", 2)
    harness.fire("n1", T)
    harness.status("n1", T, len(preamble() + run(*span(4, 1))), epoch=9)
    harness.wait(60 * S)
    verdict = harness.verdict(T)
    assert verdict is not None
    assert verdict.kind is not VerdictKind.COHERENT


def test_a_lateral_that_was_deleted_is_not_collected_again_at_a_restart() -> None:
    """Its primary is kept for longer, and with that the firing that names it."""
    harness = Harness()
    harness.cluster("n1", "n2")
    other = trace_id("L")
    harness.fire("n1", T, laterals=(other,))
    for trace in (T, other):
        harness.deliver(trace, two_nodes())
    wait_for_the_end(harness)
    harness.store.delete(other)
    harness.restart()
    harness.cluster("n1", "n2")
    harness.wait(S)
    assert not harness.core._traces
    assert harness.asked() == {}
    assert other not in harness.store.traces


def test_what_is_released_and_comes_up_again_has_a_verdict_where_the_store_deleted_it() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.deliver(T, {"n1": preamble() + run(*span(1))})
    # It is in memory for a while after this.
    while not harness.store.traces[T].released:
        harness.wait(S)
    # As the store does it with what it wrote first.
    del harness.store.traces[T]
    harness.fire("n1", T, "other")
    wait_for_the_end(harness)
    assert kinds(harness.store.traces[T].verdict) == {ReasonKind.DELETED}


def told(harness: Harness, node: str = "n1") -> list[SliceAck | Release]:
    """What a node was told by which it lets go of something."""
    acks = [ack for name, reply in harness.replied if name == node for ack in reply.acks]
    harness.replied.clear()
    said = [message for name, message in harness.take_said() if name == node]
    return [*acks, *(message for message in said if isinstance(message, Release))]


@pytest.mark.parametrize("epoch", [1, 2], ids=["behind a gap", "of another slice"])
def test_a_node_lets_go_of_what_fits_nowhere_when_the_trace_is_closed(epoch: int) -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 20)
    harness.send("n1", T, 0, b"abcd")
    told(harness)
    harness.send("n1", T, 8, b"ijkl", epoch)
    harness.send("n1", T, 12, b"mnopqrst", epoch)
    # Whether it comes back with what is missing, nobody knows as long as it is awaited.
    again = SliceAck(T, 4 if epoch == 1 else 0, epoch, again=True)
    assert told(harness) == [again, again]
    wait_for_the_end(harness)
    assert harness.store.traces[T].released
    assert ReasonKind.BYTES_MISSING in kinds(harness.verdict(T))
    assert told(harness) == [SliceAck(T, 20, epoch), Release(T)]


@pytest.mark.parametrize("known", [3, 1], ids=["its slice was told", "it was not"])
def test_a_node_lets_go_of_what_fits_nowhere_though_an_earlier_slice_comes_late(known: int) -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 8, epoch=known)
    harness.send("n1", T, 4, b"efgh", 3)
    harness.send("n1", T, 4, b"late", 2)
    told(harness)
    wait_for_the_end(harness)
    assert told(harness) == [SliceAck(T, 8, 3), Release(T)]


def test_a_node_lets_go_of_all_that_fits_nowhere_though_it_begins_again() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 12)
    harness.send("n1", T, 4, b"efgh")
    harness.send("n1", T, 8, b"ijkl")
    harness.lose_slices("n1")
    harness.open_slices("n1")
    harness.send("n1", T, 4, b"efgh")
    told(harness)
    wait_for_the_end(harness)
    assert told(harness) == [SliceAck(T, 12, 1), Release(T)]


def test_what_fitted_nowhere_is_not_missed_again() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 12)
    harness.send("n1", T, 0, b"abcd")
    harness.send("n1", T, 8, b"ijkl")
    wait_for_the_end(harness)
    told(harness)
    # The Release came before the ack, so it asks again; and on another stream it says all again.
    harness.status("n1", T, 12)
    harness.send("n1", T, 8, b"ijkl")
    assert set(told(harness)) == {SliceAck(T, 12, 1), Release(T)}
    assert harness.core.counters.traces_late == 0


def test_what_fitted_nowhere_is_let_go_of_though_it_is_closed_twice_at_once() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.autosave = False
    harness.fire("n1", T)
    harness.send("n1", T, 8, b"ijkl")
    wait_for_the_end(harness)
    # Nothing of that is durable. The same comes once more, and, fired again, what is before it.
    harness.send("n1", T, 8, b"ijkl")
    harness.fire("n1", T, "again")
    harness.send("n1", T, 4, b"efgh")
    told(harness)
    wait_for_the_end(harness)
    harness.save()
    assert told(harness) == [SliceAck(T, 12, 1), Release(T)]


def test_what_was_let_go_while_it_was_given_up_is_missing_when_it_is_fired_again() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = harness.fire("n1", T)
    harness.status("n1", T, 16)
    harness.send("n1", T, 0, b"abcd")
    harness.status("n2", T, 4)
    harness.say("n2", Abandoned(group))
    wait_for_the_end(harness)
    # Under way when it was given up, so the node keeps no more of that.
    told(harness)
    harness.send("n1", T, 4, b"efgh")
    assert told(harness) == [SliceAck(T, 8, 1)]
    harness.fire("n1", T, "again")
    harness.status("n1", T, 16)
    harness.send("n1", T, 8, b"ijklmnop")
    wait_for_the_end(harness)
    assert told(harness)[-2:] == [SliceAck(T, 16, 1), Release(T)]
    assert bytes(harness.store.traces[T].slices["n1"].data) == b"abcd"


def test_what_nobody_wanted_is_sent_again_when_it_is_fired_again_at_once() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = harness.fire("n1", T)
    harness.status("n1", T, 16)
    harness.send("n1", T, 0, b"abcd")
    harness.status("n2", T, 4)
    harness.say("n2", Abandoned(group))
    wait_for_the_end(harness)
    told(harness)
    harness.autosave = False
    harness.fire("n1", trace_id("another"))
    harness.send("n1", T, 4, b"efgh")
    # n1 might let go of these when that firing is durable. Until then the trace is there again.
    harness.fire("n1", T, "again")
    harness.status("n1", T, 16)
    harness.save()
    assert told(harness)[-1] == SliceAck(T, 4, 1, again=True)
    harness.send("n1", T, 4, b"efghijklmnop")
    harness.save()
    assert bytes(harness.store.traces[T].slices["n1"].data) == b"abcdefghijklmnop"


def test_what_nobody_wanted_does_not_make_durable_what_came_since() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = harness.fire("n1", T)
    harness.status("n1", T, 16)
    harness.send("n1", T, 0, b"abcd")
    harness.status("n2", T, 4)
    harness.say("n2", Abandoned(group))
    wait_for_the_end(harness)
    harness.autosave = False
    # Each chunk waits for a firing of its own.
    behind = []
    for offset, data in ((4, b"efgh"), (8, b"ijklmnop")):
        harness.fire("n1", trace_id(f"before {offset}"))
        behind.append(harness.written[-1].token)
        harness.send("n1", T, offset, data)
    harness.fire("n1", T, "again")
    harness.status("n1", T, 16)
    told(harness)
    harness.save(behind[0])
    assert told(harness) == [SliceAck(T, 4, 1, again=True)]
    harness.send("n1", T, 4, b"efgh")
    harness.save(behind[1])
    # And it forgets nothing of what the coordinator has, but not in its store.
    assert told(harness) == [SliceAck(T, 4, 1, again=True)]
    harness.save()
    assert told(harness) == [SliceAck(T, 8, 1)]


@pytest.mark.parametrize("first", ["n1", "n2"])
@pytest.mark.parametrize("is_blank", [False, True], ids=["not heard of", "had nothing"])
def test_what_nobody_wanted_is_sent_again_of_who_had_no_bytes_before(
    is_blank: bool, first: str
) -> None:
    harness = Harness()
    harness.cluster("n1", "n2", "n3")
    group = harness.fire("n1", T)
    harness.status("n1", T, 4, ["n2"] * is_blank)
    harness.send("n1", T, 0, b"abcd")
    harness.status("n3", T, 4)
    if is_blank:
        harness.status("n2", T, held=False)
    harness.say("n3", Abandoned(group))
    wait_for_the_end(harness)
    told(harness)
    harness.autosave = False
    harness.fire("n1", trace_id("another"))
    # By another stream than its firing, which it overtakes.
    harness.send("n2", T, 0, b"efgh", epoch=2)
    harness.fire(first, T, "again")
    harness.save()
    assert told(harness, "n2") == [SliceAck(T, 0, 2, again=True)]
    harness.status("n2", T, 4, epoch=2)
    harness.send("n2", T, 0, b"efgh", epoch=2)
    harness.save()
    assert bytes(harness.store.traces[T].slices["n2"].data) == b"efgh"
