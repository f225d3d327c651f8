# SPDX-License-Identifier: Apache-2.0
"""A group is whole or gone: what that makes of the verdicts on its traces."""

from __future__ import annotations

from typing import Literal, TypeAlias

import pytest

from coordinator.core.config import CoordinatorConfig
from coordinator.core.records import PutAbandoned, PutReleased
from coordinator.core.verdict import ReasonKind
from protocol.messages import Abandoned, Drop, Group, Release, SliceFlags, TriggerFired
from protocol.verdicts import VerdictKind
from tests.unit.coordinator_harness import Harness, S, preamble, run, span, trace_id, two_nodes

PRIMARY, LATERAL = trace_id("P"), trace_id("L")
WHOLE = preamble() + run(*span(1))

Which: TypeAlias = Literal["primary", "lateral"]


def fired(harness: Harness) -> Group:
    return harness.fire("n1", PRIMARY, laterals=(LATERAL,))


@pytest.mark.parametrize("whole", ["primary", "lateral"])
@pytest.mark.parametrize("lingers_s", [1, 100])
def test_a_trace_that_is_whole_goes_with_its_group(whole: Which, lingers_s: int) -> None:
    """Also long after its own verdict: it is not closed while the rest is open."""
    harness = Harness()
    harness.cluster("n1", "n2")
    group = fired(harness)
    here, missing = (PRIMARY, LATERAL) if whole == "primary" else (LATERAL, PRIMARY)
    harness.status("n1", missing, len(WHOLE))
    harness.deliver(here, two_nodes())
    harness.wait(lingers_s * S)
    assert harness.verdicts[here][-1].kind is VerdictKind.COHERENT
    assert not harness.store.traces[here].released
    harness.say("n1", Abandoned(group))
    harness.wait(100 * S)
    for trace in (PRIMARY, LATERAL):
        (reason,) = harness.verdicts[trace][-1].reasons
        assert (reason.kind, reason.node) == (ReasonKind.ABANDONED, "n1")
        assert harness.store.traces[trace].released
    assert ("n2", Drop(group)) in harness.take_said()


def test_a_trace_that_is_whole_waits_for_what_may_heal() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = fired(harness)
    harness.deliver(PRIMARY, two_nodes())
    # Its callee is not here, and may come back.
    harness.status("n1", LATERAL, len(WHOLE), ["n3"])
    harness.send("n1", LATERAL, 0, WHOLE)
    harness.wait(100 * S)
    assert harness.verdicts[LATERAL][-1].kind is VerdictKind.PARTIAL
    assert not harness.store.traces[PRIMARY].released
    harness.say("n1", Abandoned(group))
    harness.wait(S)
    assert harness.verdicts[PRIMARY][-1].kind is VerdictKind.PARTIAL


def test_a_group_that_is_whole_stays_so() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = fired(harness)
    for trace in (PRIMARY, LATERAL):
        harness.deliver(trace, two_nodes())
    # Before it was quiet for long enough to be judged.
    harness.autosave = False
    harness.say("n1", Abandoned(group))
    records = [write.record for write in harness.written]
    # Who begins in the middle of that does not take it for given up.
    given_up = records.index(PutAbandoned(group, "n1"))
    released = [r.trace for r in records[:given_up] if isinstance(r, PutReleased)]
    assert released == [PRIMARY, LATERAL]
    harness.save()
    harness.autosave = True
    harness.wait(100 * S)
    for trace in (PRIMARY, LATERAL):
        assert harness.verdicts[trace][-1].kind is VerdictKind.COHERENT
    assert {name for name, m in harness.take_said() if m == Drop(group)} == {"n1", "n2"}


@pytest.mark.parametrize("written_since", [False, True])
def test_a_group_that_is_whole_stays_so_where_another_group_has_its_node_asked(
    written_since: bool,
) -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = fired(harness)
    harness.deliver(PRIMARY, two_nodes())
    # Another one wants the lateral too, of which the node that fired the first never saw anything.
    harness.fire("n2", LATERAL, "other")
    harness.deliver(LATERAL, {"n2": WHOLE})
    harness.status("n1", LATERAL, held=False, epoch=7)
    harness.say("n1", Abandoned(group))
    if written_since:
        harness.status("n1", LATERAL, len(WHOLE), flags=SliceFlags.ABANDONED, epoch=9)
        harness.send("n1", LATERAL, 0, WHOLE, 9)
    else:
        harness.status("n1", LATERAL, held=False, flags=SliceFlags.ABANDONED, epoch=9)
    harness.wait(100 * S)
    assert harness.verdicts[PRIMARY][-1].kind is VerdictKind.COHERENT
    reasons = {(reason.kind, reason.node) for reason in harness.verdicts[LATERAL][-1].reasons}
    assert ((ReasonKind.ABANDONED, "n1") in reasons) == written_since
    assert (harness.verdicts[LATERAL][-1].kind is VerdictKind.COHERENT) != written_since


def test_who_gives_up_a_group_before_he_answers_is_said_to_have_done_so() -> None:
    """Nobody can ask him by another group, since what is whole stays for one that was given up."""
    harness = Harness()
    harness.cluster("n1", "n2", "n3")
    group = fired(harness)
    for trace in (PRIMARY, LATERAL):
        harness.deliver(trace, two_nodes())
    harness.say("n1", Abandoned(group))
    own = trace_id("own")
    second = harness.fire("n3", own, laterals=(LATERAL,))
    harness.say("n3", Abandoned(second))
    harness.wait(100 * S)
    (reason,) = harness.verdicts[LATERAL][-1].reasons
    assert (reason.kind, reason.node) == (ReasonKind.NO_ANSWER, "n3")
    assert reason.detail == "named by the trigger; gave up the group before it answered"


def test_a_group_that_is_whole_stays_so_though_another_one_of_its_traces_is_not() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = fired(harness)
    for trace in (PRIMARY, LATERAL):
        harness.deliver(trace, two_nodes())
    other = Group("other", trace_id("other"))
    harness.say("n1", TriggerFired(other, (PRIMARY,)))
    harness.status("n1", PRIMARY, len(two_nodes()["n1"]))
    harness.status("n1", other.primary, 1000)
    harness.say("n1", Abandoned(group))
    harness.say("n1", Abandoned(other))
    harness.wait(100 * S)
    for trace in (PRIMARY, LATERAL):
        assert harness.verdicts[trace][-1].kind is VerdictKind.COHERENT
        assert harness.store.traces[trace].released
    (reason,) = harness.verdicts[other.primary][-1].reasons
    assert reason.kind is ReasonKind.ABANDONED


def test_a_group_that_is_given_up_before_anybody_tells_of_its_firing() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = Group("lat", PRIMARY)
    harness.status("n2", PRIMARY, 1000)
    harness.say("n2", Abandoned(group))
    harness.say("n1", TriggerFired(group))
    harness.status("n1", PRIMARY, 1000)
    assert ("n1", Drop(group)) in harness.take_said()
    harness.wait(100 * S)
    assert not harness.core._traces
    kept = harness.store.traces[PRIMARY]
    assert kept.verdict is not None
    (reason,) = kept.verdict.reasons
    assert (reason.kind, reason.node, kept.released) == (ReasonKind.ABANDONED, "n2", True)


def test_what_nodes_spoke_of_before_its_group_was_given_up_and_told_goes_with_that() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = Group("lat", PRIMARY)
    for trace in (PRIMARY, LATERAL):
        harness.status("n1", trace, 1000, open_handles=1)
    harness.status("n2", PRIMARY, 1000)
    harness.say("n2", Abandoned(group))
    harness.say("n1", TriggerFired(group, (LATERAL,)))
    harness.wait(S)
    for trace in (PRIMARY, LATERAL):
        (reason,) = harness.verdicts[trace][-1].reasons
        assert (reason.kind, reason.node) == (ReasonKind.ABANDONED, "n2")


def test_who_has_no_part_in_what_nobody_has_fired_yet_gives_up_nothing() -> None:
    harness = Harness()
    harness.cluster("n1", "n2", "stranger")
    slices = two_nodes()
    # Those of others came before their firing.
    harness.status("n2", PRIMARY, len(slices["n2"]))
    harness.send("n2", PRIMARY, 0, slices["n2"])
    group = Group("lat", PRIMARY)
    harness.say("stranger", Abandoned(group))
    harness.say("stranger", Abandoned(Group("lat", LATERAL)))
    assert ("stranger", Drop(group)) in harness.take_said()
    harness.fire("n1", PRIMARY)
    harness.status("n1", PRIMARY, len(slices["n1"]))
    harness.send("n1", PRIMARY, 0, slices["n1"])
    harness.wait(S)
    assert harness.verdicts[PRIMARY][-1].kind is VerdictKind.COHERENT
    assert harness.core.counters.abandonments_refused == 2
    assert LATERAL not in harness.store.traces
    assert not any(isinstance(message, Drop) for _, message in harness.take_said())


def test_who_gives_up_what_nobody_fired_takes_little_of_the_store() -> None:
    harness = Harness(CoordinatorConfig(fired_per_s=10, fired_burst=20))
    harness.cluster("n1")
    harness.status("n1", PRIMARY, 1000)
    for number in range(100):
        harness.say("n1", Abandoned(Group(f"t{number}", PRIMARY)))
    assert len(harness.store.abandoned) == 20


def test_who_holds_what_was_given_up_for_a_group_of_before_a_restart_may_forget_it() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    # A coordinator asked n2 for it, and died before the firing was durable.
    harness.status("n2", PRIMARY, 1000)
    group = harness.fire("n1", PRIMARY)
    harness.status("n1", PRIMARY, 1000)
    harness.say("n1", Abandoned(group))
    said = harness.take_said()
    harness.wait(100 * S)
    for node in ("n1", "n2"):
        assert (node, Drop(group)) in said
        assert (node, Release(PRIMARY)) in harness.said


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_given_up_and_nobody_told_of_its_firing_was_given_up(*, restarts: bool) -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = Group("lat", PRIMARY)
    # Who fired it has forgotten that, and a coordinator that knew of it.
    harness.status("n1", PRIMARY, 1000, open_handles=1)
    harness.status("n2", PRIMARY, 1000)
    harness.take_said()
    harness.say("n1", Abandoned(group))
    said = harness.take_said()
    assert ("n1", Drop(group)) in said
    assert ("n2", Drop(group)) in said
    if restarts:
        harness.restart()
        harness.cluster("n1", "n2")
    harness.wait(S if not restarts else 400 * S)
    (reason,) = harness.verdicts[PRIMARY][-1].reasons
    assert (reason.kind, reason.node) == (ReasonKind.ABANDONED, "n1")


def test_what_is_fired_again_is_wanted_though_it_was_given_up_before_anybody_told() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.status("n2", PRIMARY, len(two_nodes()["n2"]))
    harness.say("n1", Abandoned(Group("lat", PRIMARY)))
    harness.fire("n1", PRIMARY, "other")
    harness.deliver(PRIMARY, two_nodes())
    harness.wait(100 * S)
    assert harness.verdicts[PRIMARY][-1].kind is VerdictKind.COHERENT


def test_a_node_may_give_up_what_is_released_and_did_not_hear_of_it() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = fired(harness)
    for trace in (PRIMARY, LATERAL):
        harness.deliver(trace, two_nodes())
    while not harness.store.traces[LATERAL].released:
        harness.wait(S // 10)
    harness.say("n2", Abandoned(group))
    harness.wait(100 * S)
    for trace in (PRIMARY, LATERAL):
        assert harness.verdicts[trace][-1].kind is VerdictKind.COHERENT


def test_what_another_group_wants_stays() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = fired(harness)
    harness.fire("n2", LATERAL, "other")
    harness.status("n1", PRIMARY, len(WHOLE))
    harness.deliver(LATERAL, two_nodes())
    harness.wait(S)
    harness.say("n1", Abandoned(group))
    harness.wait(100 * S)
    assert harness.verdicts[LATERAL][-1].kind is VerdictKind.COHERENT
    assert harness.verdicts[PRIMARY][-1].kind is VerdictKind.PARTIAL
    assert harness.store.traces[LATERAL].released


def test_a_trace_waits_for_its_group_no_longer_than_that_is_open() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    fired(harness)
    harness.status("n1", PRIMARY, len(WHOLE))
    harness.deliver(LATERAL, two_nodes())
    harness.wait(290 * S)
    assert not harness.store.traces[LATERAL].released
    harness.wait(60 * S)
    assert harness.store.traces[LATERAL].released
    assert harness.store.traces[PRIMARY].released
    # What is missing of one says nothing against the other: nobody gave it up.
    assert harness.verdicts[LATERAL][-1].kind is VerdictKind.COHERENT
    assert harness.verdicts[PRIMARY][-1].kind is VerdictKind.PARTIAL


def test_a_restarted_coordinator_knows_what_was_given_up() -> None:
    harness = Harness()
    harness.cluster("n1", "n2")
    group = fired(harness)
    harness.status("n1", PRIMARY, len(WHOLE))
    harness.deliver(LATERAL, two_nodes())
    harness.wait(S)
    harness.say("n1", Abandoned(group))
    harness.restart()
    harness.cluster("n1", "n2")
    harness.wait(400 * S)
    for trace in (PRIMARY, LATERAL):
        assert [r.kind for r in harness.verdicts[trace][-1].reasons] == [ReasonKind.ABANDONED]
