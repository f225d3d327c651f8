# SPDX-License-Identifier: Apache-2.0
"""What the verdict on a trace that was fired must be, by the record alone.

Facts are gathered of each trace: whatever befell it. With none, it must be coherent. With one that
is *sure* it cannot be, and the verdict must have a reason that fits the fact. What only may have come
too early or too late for it is a *race*: then either is right, if the reasons are true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.core.verdict import ReasonKind, Verdict
from protocol.messages import SliceFlags, TraceId
from tests.simulation.network import S
from tests.simulation.oracle.record import Fired, World

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator
    from tests.simulation.traffic import Request

ANY_LOSS = frozenset(
    {
        ReasonKind.LOSSY,
        ReasonKind.MAYBE_LOSSY,
        ReasonKind.RUN_MISSING,
        ReasonKind.EVICTED,
        ReasonKind.STORE_FULL,
        ReasonKind.RESTARTED,
        ReasonKind.BYTES_MISSING,
        ReasonKind.NOT_CONNECTED,
        ReasonKind.NO_ANSWER,
        ReasonKind.NEVER_SEEN,
        ReasonKind.NO_TRIGGER,
        ReasonKind.LATE,
    }
)
"""Of a node that lost anything; by what else it suffered it may be told."""

NOT_THERE = frozenset(
    {
        ReasonKind.HOP_OUT_UNMET,
        ReasonKind.HOP_IN_UNMET,
        ReasonKind.PARENT_MISSING,
        ReasonKind.LATE,
    }
)
"""Of nodes whose neighbour nobody asked, or that has nothing."""

UNENDED = frozenset(
    {
        ReasonKind.UNFINISHED,
        ReasonKind.STILL_WRITTEN,
        ReasonKind.RUN_MISSING,
        ReasonKind.OPEN,
    }
)

OF_FLAG = {
    SliceFlags.EVICTED: frozenset({ReasonKind.EVICTED}),
    SliceFlags.LOSSY: frozenset({ReasonKind.LOSSY}),
    SliceFlags.MAYBE_LOSSY: frozenset({ReasonKind.MAYBE_LOSSY}),
    SliceFlags.STORE_FULL: frozenset({ReasonKind.STORE_FULL}),
}


LATE_NS = 5 * S
"""What a request writes is told sooner, unless the node is in trouble."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that befell a trace.

    ``fits``: reasons by which it may be told; empty: any. ``settles``: told by one of these, the
    trace has had the outcome that this explains, though it might have had another.
    """

    why: str
    sure: bool = False
    fits: frozenset[ReasonKind] = frozenset()
    settles: bool = False


def facts(sim: Simulator, trace: TraceId) -> Iterator[Fact]:
    """All that keeps a trace that was fired from being whole, or may."""
    world = sim.world
    fired = world.by_trace[trace]
    first_ns = min(f.time_ns for f in fired)
    requests = [r for r in sim.requests_of(trace) if any(v.bodies or v.lost for v in r.visits)]
    if not any(visit.bodies for request in requests for visit in request.visits):
        yield Fact("nobody wrote anything", True, frozenset({ReasonKind.NEVER_SEEN}) | ANY_LOSS)
        return
    closes_ns = first_ns + sim.earliest_close_ns
    for request in requests:
        if request.begun_ns > first_ns:
            until_ns = request.begun_ns + LATE_NS
            late = any(world.may_be_late(v.node, until_ns) for v in request.visits)
            if late or request.begun_ns > closes_ns:
                yield Fact("written again when it may have been closed")
                continue
        yield from _of_request(sim, request)
    yield from _of_nodes(sim, trace, requests, first_ns, closes_ns)
    yield from _of_groups(sim, trace, fired)
    yield from _of_crumbs(world, fired, requests, closes_ns)
    if trace in world.closed_alone:
        yield Fact("closed for want of room before any trigger of it was known")
    if sim.is_scarce:
        yield Fact("may have been closed for want of room, before all was said")
    if trace in world.closed_alone:
        yield Fact("closed for want of room before any trigger of it was known")
    concerned = {v.node for r in requests for v in r.visits} | {f.node for f in fired}
    if sim.is_scarce and any(world.may_be_late(name, first_ns + LATE_NS) for name in concerned):
        yield Fact("may have been closed for want of room, before all was said")


def _of_request(sim: Simulator, request: Request) -> Iterator[Fact]:
    if request.unmet:
        yield Fact("a call reached nobody", True, NOT_THERE | ANY_LOSS)
    for visit in request.visits:
        if visit.lost:
            yield Fact(f"records were lost on {visit.node}", True, ANY_LOSS | NOT_THERE)
        if not visit.ended:
            yield Fact(f"never ended on {visit.node}", True, UNENDED | ANY_LOSS | NOT_THERE)


def _of_nodes(
    sim: Simulator, trace: TraceId, requests: list[Request], first_ns: int, closes_ns: int
) -> Iterator[Fact]:
    world = sim.world
    written = {visit.node for request in requests for visit in request.visits}
    called = {there for request in requests for _, there in request.refused}
    asked = (
        written
        | (called & set(sim.nodes))
        | {name for name in sim.nodes if (name, trace) in world.collected}
    )
    for name in sorted(asked):
        node, collected = sim.nodes[name], world.of(name, trace)
        if node.dead:
            died_first = node.died_ns is not None and node.died_ns < first_ns
            yield Fact(f"{name} is dead", died_first and name in written, NOT_THERE | ANY_LOSS)
        if (name, trace) in world.no_room:
            yield Fact(f"{name} had no room for its mark")
        if (name, trace) in world.lost_slices:
            yield Fact(f"{name} lost its slice")
        if SliceFlags.ABANDONED in collected.ever:
            yield Fact(f"{name} had given it up before")
        for flag, kinds in OF_FLAG.items():
            flagged_ns = collected.flagged_ns.get(flag, 0)
            in_time = flagged_ns <= closes_ns
            if flag is SliceFlags.STORE_FULL and any(
                ns >= flagged_ns for ns in world.stores_lost_ns.get(name, ())
            ):
                in_time = False  # another store may have room for all of it
            if flag in collected.first and in_time and not node.dead:
                yield Fact(f"{name}: {flag!r}", True, kinds | ANY_LOSS)
            elif flag in collected.ever:
                yield Fact(f"{name} said {flag!r} later")


def _of_groups(sim: Simulator, trace: TraceId, fired: list[Fired]) -> Iterator[Fact]:
    gone = [group for group in sim.world.groups_of(trace) if group in sim.world.given_up]
    if gone:
        why = f"{len(gone)} of its groups were given up, first by {sim.world.given_up[gone[0]][0]}"
        # Whether the right one was chosen is checked where it was.
        yield Fact(why, fits=frozenset({ReasonKind.ABANDONED}), settles=True)
    if all(may_be_forgotten(sim, f) for f in fired):
        yield Fact("who fired it has forgotten that, or is gone")


def is_excused(sim: Simulator, trace: TraceId, verdict: Verdict) -> bool:
    """Whether a trace may be less than coherent though nothing befell it that shows in it.

    Two ways, so seldom that what is coherent nevertheless is judged. A coordinator that begins anew
    may hear of a trace by others, and close it, before who fired it is back. And a node that was cut
    off while it still wrote may be back when the trace is closed.
    """
    world, fired = sim.world, sim.world.by_trace[trace]
    told = {reason.kind for reason in verdict.reasons}
    closed_ns = sim.coordinator.store.traces[trace].first_closed_ns
    if closed_ns is None or ReasonKind.LATE not in told:
        return False
    heard_ns = [world.fired_known_ns.get(f.group, math.inf) for f in fired]
    visited = {visit.node for request in sim.requests_of(trace) for visit in request.visits}
    return closed_ns <= min(heard_ns) or any(world.may_be_late(name, closed_ns) for name in visited)


def may_be_forgotten(sim: Simulator, fired: Fired) -> bool:
    """Whether the node may have lost the firing before it was told."""
    world = sim.world
    forgets = world.stores_lost_ns
    if fired.node in world.given_up.get(fired.group, ()):
        forgets = world.restarts_ns  # that it gave it up, only a report store would keep
    losses = [ns for ns in forgets.get(fired.node, ()) if ns >= fired.time_ns]
    return bool(losses) or sim.nodes[fired.node].dead


def _of_crumbs(
    world: World, fired: list[Fired], requests: list[Request], closes_ns: int
) -> Iterator[Fact]:
    early = [request for request in requests if request.begun_ns <= closes_ns]
    written = {visit.node for request in early for visit in request.visits if visit.bodies}
    crumbs = {pair for request in requests for pair in request.crumbs}
    # Whoever is at an address is asked, and is not expected to have anything.
    leads = crumbs | {pair for request in requests for pair in request.refused if pair[1]}
    ever = {f.node for f in fired}
    unreached = written - reach(leads, ever)
    if unreached:
        yield Fact(f"no crumb leads to {sorted(unreached)}", True, NOT_THERE | ANY_LOSS)
    elif any(
        written - reach(leads, {f.node})
        and any(
            other.time_ns > closes_ns or world.may_be_late(other.node, other.time_ns + LATE_NS)
            for other in fired
        )
        for f in fired
    ):
        yield Fact("some nodes are only found by several firings, and it may be closed between")
    reached = reach(crumbs, ever)
    strangers = {there for here, there in crumbs if here in reached} | ever
    strangers -= {visit.node for request in requests for visit in request.visits if visit.bodies}
    if strangers & {there for here, there in crumbs if here in reached}:
        yield Fact("a crumb leads where it never was", True, NOT_THERE | ANY_LOSS)
    elif strangers and not written & reached:
        yield Fact("fired where it never was", True, frozenset({ReasonKind.NEVER_SEEN}) | ANY_LOSS)


def reach(crumbs: set[tuple[str, str]], nodes: set[str]) -> set[str]:
    """Where crumbs lead from there."""
    reached = set(nodes)
    while more := {there for here, there in crumbs if here in reached} - reached:
        reached |= more
    return reached
