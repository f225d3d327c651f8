# SPDX-License-Identifier: Apache-2.0
"""A node comes back with its memory, or without: what it is asked again, and what the verdict says."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from coordinator.core.config import CoordinatorConfig
from coordinator.core.coordinator import CoordinatorCore
from coordinator.core.records import PutAbandoned, PutReleased, PutStatus, PutVerdict, Write
from protocol.messages import (
    RECOVERED_WHY,
    Collect,
    Group,
    NodeMessage,
    SliceFlags,
    SliceStatus,
    Source,
    TraceId,
    TriggerFired,
)
from tests.unit.coordinator_harness import (
    MS,
    Harness,
    S,
    preamble,
    run,
    span,
    trace_id,
    two_nodes,
)

T = trace_id("T")
SLICES = two_nodes()
N2 = SLICES["n2"]


def restart_node(harness: Harness, name: str, incarnation: int = 2) -> None:
    harness.lose(name)
    harness.lose_slices(name)
    harness.connect(name, incarnation)
    harness.open_slices(name, incarnation)


def judged(harness: Harness) -> tuple[str, int, set[tuple[str, str]]]:
    verdict = harness.verdict(T)
    assert verdict is not None
    reasons = {(reason.kind.value, reason.node) for reason in verdict.reasons}
    return verdict.kind.value, verdict.version, reasons


def coherent() -> Harness:
    """T is whole on n1 and n2, n3 never saw it, and it lingers."""
    harness = Harness()
    harness.cluster("n1", "n2", "n3")
    harness.fire("n1", T)
    harness.fire("n3", trace_id("other"), "else", (T,))
    harness.deliver(T, SLICES)
    harness.status("n3", T)
    harness.deliver(trace_id("other"), {"n3": preamble() + run(*span(1))})
    harness.wait(1 * S)
    assert judged(harness) == ("coherent", 1, set())
    harness.take_said()
    return harness


def news_of(harness: Harness) -> list[object]:
    """What is written of T from now on, of what would be with news."""
    written: list[object] = []
    put = harness.store.write

    def kept(write: Write, now_ns: int) -> None:
        record = write.record
        if isinstance(record, PutStatus | PutVerdict | PutReleased):
            of = record.status.trace if isinstance(record, PutStatus) else record.trace
            if of == T:
                written.append(record)
        put(write, now_ns)

    harness.store.write = kept  # type: ignore[method-assign]
    return written


@pytest.mark.parametrize("name", ["n1", "n2", "n3"])
def test_a_node_that_kept_its_memory_is_asked_again_and_changes_nothing(name: str) -> None:
    harness = coherent()
    news = news_of(harness)
    restart_node(harness, name)
    groups = {Group("lat", T), Group("else", trace_id("other"))}
    asked = {(to, m.group) for to, m in harness.take_said() if isinstance(m, Collect)}
    assert asked == {(name, group) for group in groups}
    if name == "n3":
        harness.status(name, T, epoch=7)  # a mark has no bytes that an epoch could be of
    else:
        harness.status(name, T, len(SLICES[name]))
    harness.wait(20 * S)
    assert news == []
    harness.wait(20 * S)
    assert news == [PutReleased(T, least=tuple((n, len(d)) for n, d in SLICES.items()))]
    assert judged(harness) == ("coherent", 1, set())


def late_bytes_are_collected_or_said(harness: Harness, name: str) -> None:
    """Of a node that lost its memory, and is sending what was written since."""
    late = preamble() + run(*span(9), handle=9)
    harness.status(name, T, len(late), epoch=9)
    harness.send(name, T, 0, late, 9)
    harness.wait(1 * S)
    if name == "n3":
        # It had nothing before.
        assert judged(harness) == ("coherent", 2, set())
        assert bytes(harness.store.traces[T].slices[name].data) == late
    else:
        assert judged(harness) == ("partial", 2, {("restarted", name)})


@pytest.mark.parametrize("name", ["n1", "n2", "n3"])
def test_what_is_written_where_the_memory_was_lost_is_collected_or_said(name: str) -> None:
    harness = coherent()
    news = news_of(harness)
    restart_node(harness, name)
    assert T in harness.asked()[name]
    harness.status(name, T, epoch=9)  # it knows nothing of the trace, and waits for it now
    harness.wait(10 * S)
    assert news == []
    late_bytes_are_collected_or_said(harness, name)


@pytest.mark.parametrize("name", ["n1", "n2", "n3"])
def test_what_is_written_where_the_memory_was_lost_is_said_also_if_the_coordinator_was_restarted(
    name: str,
) -> None:
    harness = coherent()
    harness.restart()
    harness.connect(name, 9)
    harness.open_slices(name, 9)
    # It would not collect what it was not asked for.
    assert T in harness.asked()[name]
    late_bytes_are_collected_or_said(harness, name)


@pytest.mark.parametrize("name", ["n1", "n2", "n3"])
def test_a_coordinator_that_ended_before_it_asked_a_restarted_node_leaves_it_to_the_next(
    name: str,
) -> None:
    harness = coherent()
    restart_node(harness, name)
    harness.restart()
    harness.take_said()
    harness.connect(name, 2)
    assert T in harness.asked()[name]
    # What it answers is what it had: from then on, nobody need ask it again.
    size = len(SLICES.get(name, b""))
    harness.status(name, T, size, epoch=1 if size else 0)
    harness.status(name, trace_id("other"), epoch=0)
    harness.wait(harness.config.clock_probe_interval_ns + 1 * S)
    assert harness.store.nodes[name].incarnation == 2


def test_a_restarted_coordinator_asks_nobody_who_kept_his_memory_for_what_is_whole() -> None:
    harness = coherent()
    harness.restart()
    news = news_of(harness)
    for name in ("n1", "n2", "n3"):
        harness.connect(name)
        harness.open_slices(name)
    assert harness.asked() == {}
    for name, data in SLICES.items():
        harness.status(name, T, len(data))
    harness.wait(20 * S)
    assert [said for said in news if not isinstance(said, PutVerdict) or said.trace == T] == []
    assert judged(harness) == ("coherent", 1, set())


def test_what_came_is_kept_where_a_node_lost_its_memory_while_the_coordinator_was_restarted() -> (
    None
):
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    data = SLICES["n1"]
    harness.status("n1", T, len(data), open_handles=1)
    harness.send("n1", T, 0, data, 1)
    harness.restart()
    harness.connect("n1", 9)
    harness.open_slices("n1", 9)
    # It would begin another slice under the same name.
    assert harness.asked() == {}
    harness.wait(harness.config.provisional_ns + 1 * S)
    assert judged(harness)[0] == "partial"
    assert bytes(harness.store.traces[T].slices["n1"].data) == data


def test_what_came_is_kept_where_the_coordinator_is_restarted_long_after_a_node_lost_its_memory() -> (
    None
):
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n2", T)
    harness.status("n2", T, crumbs=["n1"])
    data = SLICES["n1"]
    harness.status("n1", T, len(data), open_handles=1)
    harness.send("n1", T, 0, data, 1)
    restart_node(harness, "n1", 9)
    harness.wait(60 * S)
    assert judged(harness)[0] == "partial"
    harness.restart()
    harness.take_said()
    harness.connect("n1", 9)
    assert harness.asked() == {}
    assert bytes(harness.store.traces[T].slices["n1"].data) == data


def test_what_nodes_repeat_to_a_restarted_coordinator_changes_nothing() -> None:
    def say() -> None:
        harness.status("n1", T, crumbs=["n2"], flags=SliceFlags.LOSSY)
        harness.status("n2", T, flags=SliceFlags.EVICTED | SliceFlags.LOSSY)
        harness.wait(1 * S)

    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    say()
    before = judged(harness)
    assert {name for name, _ in before[2]} == {"lossy", "evicted"}
    harness.restart()
    harness.cluster("n1", "n2")
    say()
    assert judged(harness) == before


def test_a_node_that_has_more_to_say_than_nothing_began_another_slice() -> None:
    doubt = {("maybe_lossy", "n2")}
    for flags, handles, more in ((SliceFlags.MAYBE_LOSSY, 0, doubt), (SliceFlags.NONE, 1, set())):
        harness = coherent()
        restart_node(harness, "n2")
        harness.status("n2", T, flags=flags, open_handles=handles, epoch=9)
        harness.wait(1 * S)
        assert judged(harness) == ("partial", 2, {("restarted", "n2")} | more)


def test_a_restarted_node_is_asked_once_for_each_group_and_costs_the_store_nothing() -> None:
    harness = Harness()
    harness.cluster("n1")
    groups = [[trace_id(f"{n}.{k}") for k in range(33)] for n in range(304)]
    statuses = [SliceStatus(t, True, SliceFlags.HELD, epoch=1) for group in groups for t in group]
    assert len(statuses) > 10_000

    def say(messages: Iterable[NodeMessage]) -> None:
        # At once: the harness looks at all that the core has after each step.
        for message in messages:
            session = harness.sessions["n1"]
            harness.core.on_node_message(session, message, harness.now_ns, harness.now_ns)
        harness.fetch()

    say(TriggerFired(Group("lat", first), tuple(rest), "slow") for first, *rest in groups)
    say(statuses)
    harness.wait(1 * S)
    assert {harness.verdicts[one.trace][-1].kind.value for one in statuses} == {"coherent"}
    harness.take_said()
    news = news_of(harness)
    restart_node(harness, "n1")
    collects = [message for _, message in harness.take_said() if isinstance(message, Collect)]
    assert len(collects) == len(groups)
    assert {t for collect in collects for t in collect.traces} == {one.trace for one in statuses}
    say(statuses)
    harness.wait(5 * S)
    assert news == []


# ------------------------------------------------------------ fired, and gone


def fired_then_away(source: Source = Source.APPLICATION, primary: TraceId = T) -> Harness:
    """n1 fires, and its streams end before its status; n2 has bytes of T, and nobody names n1."""
    harness = Harness()
    harness.cluster("n1", "n2")
    laterals = () if primary == T else (T,)
    harness.say("n1", TriggerFired(Group("a", primary), laterals, "slow", source))
    harness.lose("n1")
    harness.lose_slices("n1")
    harness.fire("n2", T, "b")
    harness.deliver(T, {"n2": preamble() + run(*span(1))})
    return harness


@pytest.mark.parametrize("source", [Source.APPLICATION, Source.CONTEXT, Source.KERNEL])
@pytest.mark.parametrize("rebooted", [True, False])
def test_a_node_that_fired_and_lost_its_memory_had_something(
    source: Source, *, rebooted: bool
) -> None:
    harness = fired_then_away(source)
    incarnation = 2 if rebooted else 1
    harness.connect("n1", incarnation)
    harness.open_slices("n1", incarnation)
    assert T in harness.asked()["n1"]
    harness.status("n1", T, epoch=9)
    harness.wait(1 * S)
    after = ("partial", 1, {("restarted", "n1")}) if rebooted else ("coherent", 1, set())
    assert judged(harness) == after
    # The store knows it.
    harness.restart()
    harness.cluster("n1", "n2")
    harness.wait(60 * S)
    assert judged(harness) == after


def test_a_node_that_fired_and_kept_its_memory_is_whole() -> None:
    harness = fired_then_away()
    harness.connect("n1", 2)
    harness.open_slices("n1", 2)
    harness.say("n1", TriggerFired(Group("a", T), (), RECOVERED_WHY, Source.NODE))
    harness.deliver(T, {"n1": preamble() + run(*span(2))})
    harness.wait(1 * S)
    assert judged(harness) == ("coherent", 1, set())


def test_a_node_that_answered_under_its_firing_needs_no_more_to_have_had_anything() -> None:
    harness = fired_then_away()
    harness.connect("n1")
    harness.status("n1", T)
    harness.wait(1 * S)
    harness.lose("n1")
    harness.connect("n1", 2)
    harness.status("n1", T, epoch=9)
    harness.wait(1 * S)
    assert judged(harness) == ("coherent", 1, set())


@pytest.mark.parametrize(
    ("source", "primary"),
    [
        (Source.APPLICATION, trace_id("other")),  # T is a lateral
        (Source.OPERATOR, T),
        (Source.NODE, T),
    ],
)
def test_who_names_a_trace_may_never_have_seen_it(source: Source, primary: TraceId) -> None:
    harness = fired_then_away(source, primary)
    harness.connect("n1", 2)
    harness.status("n1", T, epoch=9)
    harness.wait(1 * S)
    assert judged(harness) == ("coherent", 1, set())


def alone() -> Harness:
    """T is whole on n1, and was fired on n2 too."""
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.fire("n2", T, "other")
    harness.deliver(T, {"n1": preamble() + run(*span(1))})
    return harness


@pytest.mark.parametrize(
    "flag",
    [SliceFlags.EVICTED, SliceFlags.LOSSY, SliceFlags.MAYBE_LOSSY, SliceFlags.STORE_FULL],
)
@pytest.mark.parametrize("writes", [False, True])
def test_what_a_node_without_bytes_said_stays_true(flag: SliceFlags, writes: bool) -> None:
    harness = alone()
    harness.status("n2", T, flags=flag, epoch=5)
    harness.wait(2 * S)
    assert judged(harness)[0] != "coherent"
    restart_node(harness, "n2")
    if writes:
        harness.deliver(T, {"n2": preamble() + run(*span(2, 1))}, epoch=9)
    else:
        harness.status("n2", T, epoch=9)
    harness.wait(2 * S)
    assert judged(harness)[0] != "coherent"


def test_handles_without_bytes_stay_open_where_the_node_lost_its_memory() -> None:
    harness = alone()
    harness.status("n2", T, open_handles=1, held=True, epoch=5)
    harness.wait(2 * S)
    restart_node(harness, "n2")
    harness.status("n2", T, epoch=9)
    harness.wait(2 * S)
    assert judged(harness)[0] != "coherent"


def test_a_node_that_fired_has_seen_it_though_the_coordinator_was_restarted_too() -> None:
    harness = alone()
    harness.restart()
    harness.connect("n1")
    harness.open_slices("n1")
    harness.connect("n2", 2)
    harness.open_slices("n2", 2)
    harness.status("n2", T, epoch=9)
    harness.wait(20 * S)
    assert judged(harness)[0] != "coherent"


def test_what_is_stored_is_taken_up_in_pieces_and_judged_when_all_is_here() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    traces = [trace_id(f"T{number}") for number in range(20)]
    for trace in traces:
        harness.fire("n1", trace)
        harness.deliver(trace, {"n1": two_nodes()["n1"]})
        # The other half is on its way.
        harness.status("n2", trace, len(two_nodes()["n2"]))
    harness.store.crash()
    stored, nodes = harness.store.recovered()
    core = CoordinatorCore(harness.config, 9, stored, nodes, harness.now_ns)
    pieces = 0
    while core.recovering:
        # It takes longer than any node is waited for, and nothing is due meanwhile.
        assert core.next_wakeup_ns(harness.now_ns) is None
        core.on_tick(harness.now_ns)
        # But for the last pieces, which are short and say from when on nodes are waited for.
        harness.now_ns += 10 * S if pieces < 3 * len(traces) else MS
        core.recover(harness.now_ns)
        pieces += 1
    assert pieces > 4 * len(traces)
    assert core.take_writes() == []
    assert core.figures().traces_open == len(traces)
    core.on_tick(harness.now_ns + S)
    assert core.take_writes() == []
    harness.core = core
    harness.written.clear()
    harness.cluster("n1", "n2")
    for trace in traces:
        harness.deliver(trace, two_nodes())
    harness.wait(S)
    assert {harness.verdicts[trace][-1].kind.value for trace in traces} == {"coherent"}


def test_what_does_not_fit_gives_way_when_it_is_known_whose_it_is() -> None:
    harness = Harness()
    harness.cluster("n1")
    traces = [trace_id(f"T{number}") for number in range(20)]
    for trace in traces:
        harness.fire("n1", trace)
        harness.status("n1", trace, len(N2))
    stored, nodes = harness.store.recovered()
    core = CoordinatorCore(CoordinatorConfig(traces_max=5), 9, stored, nodes, harness.now_ns)
    while core.recovering:
        core.on_tick(harness.now_ns)
        assert core.take_writes() == []
        core.recover(harness.now_ns)
    records = [write.record for write in core.take_writes()]
    given_up = [record.group.primary for record in records if isinstance(record, PutAbandoned)]
    assert len(given_up) == 15
    assert core.figures().traces_open == 5
