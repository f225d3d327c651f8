# SPDX-License-Identifier: Apache-2.0
"""Traversal: by scripts that read like a log, and for any graph and any order of messages.

A script's lines are commands; the lines below one, indented, are all that the
coordinator says and judges because of it (but for Welcomes and clock probes).

    connect n1 [incarnation]     lost n1
    trigger n1 T [ta] [+L ...]   the trigger ta, "lat" if not said, with laterals
    status n1 T 100 [-> n2 ...] [open] [EVICTED ...]    it holds 100 bytes, with crumbs
    abandon n1 T [ta]
    slices n1                    opens its Slices stream
    chunk n1 T 0 100             bytes from 0 on, 100 of them
    hold, save                   from now on nothing is durable; until now all is
    wait 1s                      restart
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.coordinator import CoordinatorConfig
from coordinator.core.memory import FIRING_BYTES
from counting.trigger_names import OTHER_NAMES, UNUSED_NS
from protocol.hashing import address_id, node_id
from protocol.messages import (
    Abandoned,
    ClockProbe,
    Collect,
    CoordinatorMessage,
    Drop,
    Group,
    NodeId,
    Policy,
    Refused,
    Release,
    SliceFlags,
    SliceReply,
    SliceStatus,
    Snapshot,
    StatusQuestion,
    TriggerAck,
    TriggerFired,
    Welcome,
)
from protocol.verdicts import VerdictKind
from tests.unit.coordinator_harness import (
    MS,
    Harness,
    S,
    preamble,
    run,
    span,
    trace_id,
    trace_name,
    two_nodes,
)

SCRIPTS = {
    "backwards, forwards, and round in circles": """
        connect n1
        connect n2
        connect n3
        connect n4
        trigger n2 T
          n2 < ack lat/T
        status n2 T 10 -> n1 n3
          n1 < collect lat/T: T
          n3 < collect lat/T: T
        status n3 T 10 -> n2 n1 n3
        status n1 T 10 -> n2 n4
          n4 < collect lat/T: T
        status n4 T 10 -> n2 n3
        status n4 T 10 -> n2 n3
    """,
    "answers that come before the trigger": """
        connect n1
        connect n2
        status n1 T 10 -> n2
        trigger n1 T
          n2 < collect lat/T: T
          n1 < ack lat/T
    """,
    "an acknowledgement waits for the store": """
        connect n1
        connect n2
        hold
        trigger n1 T
        status n1 T 10 -> n2
          n2 < collect lat/T: T
        trigger n1 T
        save
          n1 < ack lat/T
          n1 < ack lat/T
        trigger n1 T
          n1 < ack lat/T
    """,
    "laterals are followed by their own crumbs, in the same group": """
        connect n1
        connect n2
        connect n3
        trigger n1 T +L +M
          n1 < ack lat/T
        status n1 T 10 -> n2
          n2 < collect lat/T: T
        status n1 L 10 -> n2 n3
          n2 < collect lat/T: L
          n3 < collect lat/T: L
        status n1 M 10
        status n3 L 10
    """,
    "a second trigger on the same trace is told to all that have a part in it": """
        connect n1
        connect n2
        trigger n1 T ta
          n1 < ack ta/T
        status n1 T 10 -> n2
          n2 < collect ta/T: T
        status n2 T 10
        trigger n2 T tb
          n1 < collect tb/T: T
          n2 < ack tb/T
        trigger n1 T tb
          n1 < ack tb/T
    """,
    "a node that nobody knows": """
        connect n1
        trigger n1 T
          n1 < ack lat/T
        status n1 T 0 -> n9
        slices n1
          n1 < credit
        wait 2s
          verdict T 1: partial: never_seen n1, unknown_node #08b38307b558e258
        connect n9
          n9 < collect lat/T: T
        status n9 T 0
        wait 1s
          verdict T 2: partial: never_seen n1, never_seen n9
    """,
    "a node that is away, and comes back in time": """
        connect n1
        connect n2
        lost n2
        trigger n1 T
          n1 < ack lat/T
        status n1 T 0 EVICTED -> n2
        wait 2s
          verdict T 1: partial: evicted n1, not_connected n2
        connect n2
          n2 < collect lat/T: T
        status n2 T 0 LOSSY
        wait 1s
          verdict T 2: partial: evicted n1, lossy n2
    """,
    "a node that does not answer in time, and then does": """
        connect n1
        connect n2
        trigger n1 T
          n1 < ack lat/T
        status n1 T 0 EVICTED -> n2
          n2 < collect lat/T: T
        wait 900ms
        wait 600ms
          verdict T 1: partial: evicted n1, no_answer n2
        status n2 T 0 LOSSY
        wait 1s
          verdict T 2: partial: evicted n1, lossy n2
    """,
    "an answer lost with its connection is asked for again": """
        connect n1
        connect n2
        trigger n1 T
          n1 < ack lat/T
        status n1 T 10 -> n2
          n2 < collect lat/T: T
        lost n2
        connect n2
          n2 < collect lat/T: T
        status n2 T 10
        lost n2
        connect n2
    """,
    "a node that was restarted repeats what it kept; what it does not repeat is lost": """
        connect n1
        connect n2
        trigger n1 T
          n1 < ack lat/T
        status n1 T 0 EVICTED -> n2
          n2 < collect lat/T: T
        status n2 T 100
        lost n2
        connect n2 2
        wait 2s
          verdict T 1: partial: evicted n1, restarted n2
        status n2 T 100
          n2 < collect lat/T: T
        wait 11s
          verdict T 2: provisional: evicted n1, open n2
        slices n2 2
          n2 < credit
        chunk n2 T 0 100
          n2 < durable T 100
        wait 1s
          verdict T 3: partial: evicted n1, malformed n2
    """,
    "what one node gives up, all give up": """
        connect n1
        connect n2
        connect n3
        trigger n1 T +L
          n1 < ack lat/T
        status n1 T 10 -> n2
          n2 < collect lat/T: T
        status n1 L 10 -> n3
          n3 < collect lat/T: L
        lost n3
        hold
        abandon n2 T
        save
          n1 < drop lat/T
          n2 < drop lat/T
        status n2 T 0 ABANDONED -> n1
        wait 1s
          verdict T 1: partial: abandoned n2
          verdict L 1: partial: abandoned n2
        connect n3
          n3 < drop lat/T
        trigger n3 T
          n3 < drop lat/T
          n3 < ack lat/T
    """,
    "what another trigger needs is not given up": """
        connect n1
        connect n2
        trigger n1 T ta
          n1 < ack ta/T
        trigger n1 T tf
          n1 < ack tf/T
        status n1 T 0 LOSSY -> n2
          n2 < collect ta/T: T
          n2 < collect tf/T: T
        abandon n1 T tf
          n2 < drop tf/T
          n1 < drop tf/T
        status n2 T 0 LOSSY
        wait 1s
          verdict T 1: lossy: lossy n1, lossy n2
    """,
    "a second node of the same name": """
        connect n1 1
        connect n1 2
          n1 < refused: node 'n1' at peer2 is refused: a node of that name is connected from \
peer1. Give one of them another name, or stop it
        connect n1 1
          n1 < refused: replaced by a new connection from peer3
        trigger n1 T
          n1 < ack lat/T
    """,
    "released when all is quiet, and again if a node asks": """
        connect n1
        connect n2
        trigger n1 T
          n1 < ack lat/T
        status n1 T 0 LOSSY -> n2
          n2 < collect lat/T: T
        status n2 T 0 LOSSY
        wait 1s
          verdict T 1: lossy: lossy n1, lossy n2
        wait 28s
        hold
        wait 2s
        save
          n1 < release T
          n2 < release T
        status n2 T 0 LOSSY
          n2 < release T
        wait 60s
        status n2 T 0 LOSSY
          n2 < release T
        trigger n1 T tb
          n1 < ack tb/T
        status n1 T 0 LOSSY
          n1 < release T
    """,
    "a status of what nobody knows, and nobody holds": """
        connect n1
        status n1 T 0
          n1 < release T
    """,
    "a coordinator that was restarted": """
        connect n1
        connect n2
        connect n3
        trigger n1 T
          n1 < ack lat/T
        status n1 T 0 LOSSY -> n2 n3
          n2 < collect lat/T: T
          n3 < collect lat/T: T
        status n2 T 0 LOSSY
        restart
        connect n1
        connect n2
        connect n3
          n3 < collect lat/T: T
        trigger n2 T
          n2 < ack lat/T
        status n3 T 0 LOSSY
        wait 1s
          verdict T 1: lossy: lossy n1, lossy n2, lossy n3
        restart
        connect n1
        wait 29s
        wait 1s
          n1 < release T
    """,
    "a coordinator that was restarted before anything was durable": """
        connect n1
        connect n2
        hold
        trigger n1 T
        status n1 T 0 LOSSY -> n2
          n2 < collect lat/T: T
        restart
        connect n2
        status n2 T 10
        save
        connect n1
        trigger n1 T
          n2 < collect lat/T: T
          n1 < ack lat/T
        status n1 T 0 LOSSY -> n2
    """,
    "bytes that come when it was closed are kept, and not judged": """
        connect n1
        slices n1
          n1 < credit
        trigger n1 T
          n1 < ack lat/T
        status n1 T 100 LOSSY
        chunk n1 T 0 100
          n1 < durable T 100
        wait 1s
          verdict T 1: lossy: lossy n1, malformed n1
        wait 30s
          n1 < release T
        wait 60s
        chunk n1 T 0 100
          n1 < durable T 100
        chunk n1 T 100 20
          n1 < durable T 120
        status n1 T 120
        wait 1s
          verdict T 2: partial: late, lossy n1, malformed n1
        wait 30s
          n1 < release T
        wait 60s
        trigger n1 T tb
          n1 < ack tb/T
        status n1 T 120
          n1 < release T
    """,
}


def say(message: CoordinatorMessage) -> str | None:
    match message:
        case Welcome() | ClockProbe() | Snapshot() | Policy() | StatusQuestion():
            return None
        case Refused(reason):
            return f"refused: {reason}"
        case Collect(group, traces):
            return f"collect {group_name(group)}: {' '.join(trace_name(t) for t in traces)}"
        case TriggerAck(group):
            return f"ack {group_name(group)}"
        case Drop(group):
            return f"drop {group_name(group)}"
        case Release(trace):
            return f"release {trace_name(trace)}"


def group_name(group: Group) -> str:
    return f"{group.trigger}/{trace_name(group.primary)}"


def reply(message: SliceReply) -> list[str]:
    said = [f"durable {trace_name(ack.trace)} {ack.offset}" for ack in message.acks]
    # How much credit there is, is no matter here; that it is topped up neither.
    return said or ["credit"]


def duration_ns(text: str) -> int:
    return int(text[:-2]) * MS if text.endswith("ms") else int(text[:-1]) * S


def perform(harness: Harness, command: str) -> None:
    verb, *words = command.split()
    match verb:
        case "connect":
            harness.connect(words[0], int(words[1]) if len(words) > 1 else 1)
        case "lost":
            harness.lose(words[0])
        case "trigger":
            names = [word for word in words[2:] if not word.startswith("+")]
            laterals = tuple(trace_id(word[1:]) for word in words[2:] if word.startswith("+"))
            harness.fire(words[0], trace_id(words[1]), names[0] if names else "lat", laterals)
        case "status":
            head, _, crumbs = command.partition("->")
            node, trace, size, *rest = head.split()[1:]
            flags = SliceFlags.NONE
            for word in rest:
                flags |= SliceFlags[word] if word != "open" else SliceFlags.NONE
            harness.status(
                node, trace_id(trace), int(size), crumbs.split(), flags, int("open" in rest)
            )
        case "abandon":
            trigger = words[2] if len(words) > 2 else "lat"
            harness.say(words[0], Abandoned(Group(trigger, trace_id(words[1]))))
        case "slices":
            harness.open_slices(words[0], int(words[1]) if len(words) > 1 else 1)
        case "chunk":
            data = b"\xff" * int(words[3])
            harness.send(words[0], trace_id(words[1]), int(words[2]), data)
        case "hold":
            harness.autosave = False
        case "save":
            harness.autosave = True
            harness.save()
        case "wait":
            harness.wait(duration_ns(words[0]))
        case "restart":
            harness.restart()
        case _:
            raise AssertionError(f"no such command: {command}")


def outcome(harness: Harness, known: dict[bytes, int]) -> list[str]:
    said = [(name, say(message)) for name, message in harness.take_said()]
    lines = [f"{name} < {words}" for name, words in said if words is not None]
    for name, message in harness.replied:
        lines += [f"{name} < {words}" for words in reply(message)]
    harness.replied.clear()
    for trace, verdicts in harness.verdicts.items():
        for verdict in verdicts:
            if verdict.version > known.get(trace, 0):
                known[trace] = verdict.version
                reasons = ", ".join(f"{r.kind} {r.node}".strip() for r in verdict.reasons)
                lines.append(
                    f"verdict {trace_name(trace)} {verdict.version}: {verdict.kind}: {reasons}"
                )
    return lines


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str) -> None:
    harness = Harness()
    known: dict[bytes, int] = {}
    happened: list[str] = []
    script = [line[8:] for line in SCRIPTS[name].splitlines() if line.strip()]
    for line in script:
        if not line.startswith(" "):
            happened.append(line)
            perform(harness, line)
            happened += [f"  {said}" for said in outcome(harness, known)]
    assert happened == script


# ----------------------------------------------------- any graph, any order

NODES = [f"n{i}" for i in range(8)]
STRANGERS = [f"x{i}" for i in range(3)]  # never connect


@settings(max_examples=200)
@given(
    crumbs=st.fixed_dictionaries(
        {name: st.lists(st.sampled_from(NODES + STRANGERS), max_size=4) for name in NODES}
    ),
    away=st.sets(st.sampled_from(NODES[1:]), max_size=2),
    rng=st.randoms(use_true_random=False),
)
def test_it_asks_exactly_the_nodes_that_crumbs_lead_to(
    crumbs: dict[str, list[str]], away: set[str], rng: random.Random
) -> None:
    trace = trace_id("T")
    harness = Harness()
    for name in NODES:
        if name not in away:
            harness.connect(name)
    # Each node's messages to the coordinator, in order; nodes interleave at random.
    queues: dict[str, deque[TriggerFired | SliceStatus]] = {name: deque() for name in NODES}
    asked: dict[str, int] = {}

    def answer(name: str) -> None:
        ids = tuple(NodeId(node_id(crumb)) for crumb in crumbs[name])
        held = SliceStatus(trace, True, SliceFlags.HELD, 10, 0, ids)
        # What a node says may come bit by bit, and more than once.
        for known in sorted({rng.randrange(len(ids) + 1) for _ in range(2)}):
            queues[name].append(SliceStatus(trace, True, SliceFlags.HELD, 10, 0, ids[:known]))
        queues[name] += [held] * rng.choice((1, 2))

    queues["n0"].append(TriggerFired(Group("lat", trace)))
    if rng.random() < 0.5:
        queues["n0"].append(TriggerFired(Group("lat", trace)))
    answer("n0")
    steps = 0
    while any(queues.values()):
        steps += 1
        assert steps < 1000, "it does not end"
        name = rng.choice([name for name in NODES if queues[name]])
        harness.say(name, queues[name].popleft())
        for asked_name, message in harness.take_said():
            if isinstance(message, Collect):
                asked[asked_name] = asked.get(asked_name, 0) + 1
                answer(asked_name)

    reachable: set[str] = set()
    frontier = ["n0"]
    while frontier:
        here = frontier.pop()
        if here not in reachable and here in NODES and here not in away:
            reachable.add(here)
            frontier += crumbs[here]
    assert set(asked) == reachable - {"n0"}
    assert set(asked.values()) <= {1}
    for name in sorted(away):
        harness.connect(name)
    named = {crumb for here in reachable for crumb in crumbs[here]}
    assert set(harness.asked()) == away & named


# ------------------------------------------------------------------ bounds


def test_ten_thousand_crumbs() -> None:
    """Forged crumbs cost a bounded number of parts, and are told in bounded words."""
    config = CoordinatorConfig(nodes_per_trace_max=100)
    harness = Harness(config)
    harness.cluster("n1", "n2")
    trace = trace_id("T")
    harness.fire("n1", trace)
    for begin in range(0, 10_000, 50):
        harness.status("n1", trace, 10, [*range(begin + 1, begin + 51), "n2"], held=True)
    assert harness.asked() == {"n2": [trace]}
    harness.status("n2", trace, 0, flags=SliceFlags.LOSSY)
    harness.wait(20 * S)
    verdict = harness.verdict(trace)
    assert verdict is not None
    assert len(verdict.reasons) <= 256
    kinds = {reason.kind.value for reason in verdict.reasons}
    assert {"unknown_node", "too_many_nodes"} <= kinds


def test_real_nodes_are_found_among_unknown_ones() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    trace = trace_id("T")
    harness.fire("n1", trace)
    harness.status("n1", trace, 10, [*range(1, 64), "n2"])
    assert harness.asked() == {"n2": [trace]}


def test_nodes_that_fire_one_trigger_may_each_name_other_laterals() -> None:
    harness = Harness()
    harness.cluster("n1", "n2", "n3")
    primary = trace_id("T")
    laterals: list[bytes] = []
    for name in ("n1", "n2"):
        named = tuple(trace_id(f"{name}-{n}") for n in range(32))
        harness.fire(name, primary, laterals=named)
        for lateral in named:
            harness.status(name, lateral, 10, ["n3"])
        laterals += named
    assert set(harness.asked()["n3"]) == set(laterals)
    # All at once, when it comes back.
    harness.lose("n3")
    harness.connect("n3")
    assert set(harness.asked()["n3"]) == set(laterals)


def test_firings_on_one_trace_are_bounded_in_the_store() -> None:
    bound = 100 * FIRING_BYTES
    harness = Harness(CoordinatorConfig(assembly_bytes_max=bound, groups_per_trace_max=8))
    harness.cluster("n1")
    trace = trace_id("T")
    for number in range(1, 300):
        if number == 50:
            harness.restart()
            harness.cluster("n1")
        harness.fire("n1", trace, f"t{number}")
        # From then on the store may delete it, whatever comes.
        assert harness.store.traces[trace].released == (number > 100)
    assert harness.core.counters.traces_finished_early > 0


def test_firings_that_change_nothing_do_not_keep_a_trace_open() -> None:
    harness = Harness(CoordinatorConfig(groups_per_trace_max=8))
    harness.cluster("n1")
    trace = trace_id("T")
    harness.fire("n1", trace)
    harness.deliver(trace, {"n1": two_nodes()["n2"]})
    for number in range(100):
        harness.fire("n1", trace, f"t{number}")
        harness.wait(S)
    assert harness.store.traces[trace].released


def test_named_nodes_are_bounded_over_all_traces() -> None:
    harness = Harness(CoordinatorConfig(evidence_max=5000))
    harness.cluster("n1")
    for number in range(100):
        trace = trace_id(f"T{number}")
        harness.fire("n1", trace)
        for crumbs in range(4):
            harness.status("n1", trace, 10, [1 << 32 | crumbs << 16 | n for n in range(64)])
        # Four entries a node, and one of it in the group.
        assert len(harness.core._traces) <= 5000 // (256 * 5)
    assert harness.core.counters.traces_finished_early >= 90
    # What is left of them is bounded too.
    assert (
        sum(len(outcome.slices) for outcome in harness.core._lifecycle.closed._outcomes.values())
        <= 5000
    )


def test_bytes_out_of_nowhere_are_forgotten_again() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.send("n1", trace_id("T"), 100, bytes(10))
    harness.wait(1000 * S)
    assert not harness.core._traces


def test_what_is_said_of_a_trace_that_nobody_waits_for_keeps_nothing_in_the_store() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    trace, other = trace_id("T"), trace_id("U")
    harness.fire("n1", trace)
    harness.deliver(trace, {"n1": two_nodes()["n1"]})
    harness.wait(1000 * S)
    assert harness.store.traces[trace].released
    # The store deletes it for its bounds.
    del harness.store.traces[trace]
    harness.fire("n2", trace, "again")
    harness.say("n1", Abandoned(Group("lat", other)))
    harness.fire("n2", other)
    harness.wait(1000 * S)
    assert all(kept.released for kept in harness.store.traces.values())


def test_a_node_gives_up_only_what_it_has_a_part_in() -> None:
    harness = Harness()
    harness.cluster("n1", "n2", "stranger")
    trace = trace_id("T")
    group = harness.fire("n1", trace)
    slices = two_nodes()
    harness.say("stranger", Abandoned(group))
    assert ("stranger", Drop(group)) in harness.take_said()
    harness.deliver(trace, slices)
    harness.wait(S)
    assert harness.verdicts[trace][-1].kind is VerdictKind.COHERENT
    assert harness.core.counters.abandonments_refused == 1
    assert harness.core.counters.groups_abandoned == 0


def test_ten_thousand_triggers_on_one_trace() -> None:
    """All are stored and acknowledged; the trace is traversed under the first."""
    harness = Harness(CoordinatorConfig(groups_per_trace_max=8))
    harness.cluster("n1", "n2")
    trace = trace_id("T")
    harness.status("n1", trace, 10, ["n2"])
    for number in range(10_000):
        harness.fire("n1", trace, f"t{number}")
    said = [message for _, message in harness.take_said()]
    assert sum(isinstance(message, TriggerAck) for message in said) == 10_000
    asked = [m.group.trigger for m in said if isinstance(m, Collect)]
    assert asked == [f"t{number}" for number in range(8)]


def test_more_nodes_than_are_remembered_are_refused() -> None:
    harness = Harness(CoordinatorConfig(nodes_max=2))
    harness.cluster("n1", "n2")
    harness.connect("n3")
    (refused,) = [m for _, m in harness.take_said() if isinstance(m, Refused)]
    assert "nodes_max" in refused.reason
    assert "n3" in refused.reason


def test_who_is_gone_for_longest_is_forgotten_for_one_that_is_new() -> None:
    harness = Harness(CoordinatorConfig(nodes_max=4))
    names = ("n1", "n2", "n3", "n4")
    for name in names:
        harness.connect(name)
    trace = trace_id("T")
    harness.fire("n1", trace)
    for name in ("n3", "n1", "n2"):
        harness.lose(name)
    # In the order in which they left, also for a new coordinator; n4 is here again.
    harness.restart()
    harness.connect("n4")
    harness.connect("n5")
    assert set(harness.store.nodes) == {"n1", "n2", "n4", "n5"}
    # The first one left a part of a trace, for as long as that is in memory.
    harness.connect("n6")
    assert set(harness.store.nodes) == {"n1", "n4", "n5", "n6"}
    harness.connect("n7")
    (refused,) = [m for _, m in harness.take_said() if isinstance(m, Refused)]
    assert "nodes_max" in refused.reason
    harness.wait(1000 * S)
    harness.connect("n7")
    assert set(harness.store.nodes) == {"n4", "n5", "n6", "n7"}
    assert {view.node for view in harness.core.nodes(harness.now_ns)} == set(harness.store.nodes)
    # Its address is nobody's, or the next one's.
    assert not harness.core._nodes.at_address(address_id("10.0.0.1"))


def test_a_node_that_still_sends_is_not_forgotten() -> None:
    harness = Harness(CoordinatorConfig(nodes_max=1))
    harness.cluster("n1")
    harness.lose("n1")
    harness.connect("n2")
    assert [m for _, m in harness.take_said() if isinstance(m, Refused)]
    harness.lose_slices("n1")
    harness.connect("n2")
    assert set(harness.store.nodes) == {"n2"}


def test_messages_without_a_hello_are_counted() -> None:
    harness = Harness()
    harness.core.on_node_message(99, TriggerFired(Group("lat", trace_id("T"))), 0, 0)
    assert harness.core.counters.messages_unexpected == 1
    assert harness.core.take_control(harness.now_ns) == []


def test_triggers_count_by_a_bounded_number_of_names() -> None:
    harness = Harness(CoordinatorConfig(trigger_names_max=3))
    harness.connect("n1")
    harness.connect("n2")

    def fire(node: str, name: str, primary: str, *laterals: str) -> None:
        group = Group(name, trace_id(primary))
        harness.say(node, TriggerFired(group, tuple(map(trace_id, laterals))))

    fire("n1", "slow", "a", "b")
    fire("n1", "slow", "a", "b")  # repeated
    fire("n2", "slow", "a", "c")  # with another neighbour there
    fire("n1", "slow", "b", "a")  # both are collected under that name already
    fire("n1", "error", "a")
    for number in (7, 8):
        fire("n1", f"snapshot.{number}", f"s{number}")
    for name in ("more", "and-more"):
        fire("n1", name, "a")
    fire("n1", "more", "d")
    assert {
        name: (counted.reports, counted.traces)
        for name, counted in harness.core.counters.by_trigger.items()
    } == {"slow": (4, 3), "error": (1, 1), "snapshot": (2, 2), OTHER_NAMES: (3, 2)}
    assert harness.core.counters.triggers == 10
    # They are those of one coordinator: what the next one finds was counted by this one.
    harness.restart()
    assert harness.core.counters.by_trigger == {}
    harness.connect("n1")
    fire("n1", "slow", "a", "b")
    (counted,) = harness.core.counters.by_trigger.values()
    assert (counted.reports, counted.traces) == (1, 0)


def test_trigger_names_that_are_not_used_count_for_others() -> None:
    harness = Harness(CoordinatorConfig(trigger_names_max=1))
    harness.connect("n1")
    harness.fire("n1", trace_id("a"), "old")
    harness.fire("n1", trace_id("b"), "new")
    harness.wait(3 * UNUSED_NS)
    harness.fire("n1", trace_id("c"), "new")
    reports = {name: counted.reports for name, counted in harness.core.counters.by_trigger.items()}
    assert reports == {OTHER_NAMES: 2, "new": 1}


def test_a_node_that_fires_a_full_trace_has_seen_it() -> None:
    harness = Harness(CoordinatorConfig(groups_per_trace_max=1))
    harness.cluster("n1", "n2")
    trace = trace_id("T")
    harness.fire("n1", trace)
    harness.deliver(trace, {"n1": preamble() + run(*span(1))})
    harness.fire("n2", trace, "other")
    harness.lose("n2")
    harness.lose_slices("n2")
    harness.wait(2 * S)
    verdict = harness.verdict(trace)
    assert verdict is not None
    assert verdict.kind is VerdictKind.PARTIAL
    assert {reason.node for reason in verdict.reasons} == {"n2"}


def test_who_fires_what_others_fired_before_is_asked_for_their_groups_too() -> None:
    harness, trace = Harness(), trace_id("T")
    harness.cluster("n1", "n2", "n3")
    harness.fire("n1", trace)
    second = harness.fire("n2", trace, "second")
    harness.take_said()
    # Of both groups, the second one is known by now.
    harness.fire("n3", trace, "second")
    assert harness.asked()["n3"] == [trace]
    # So it answers, though it drops what it collected by itself.
    harness.say("n2", Abandoned(second))
    assert ("n3", Drop(second)) in harness.take_said()
