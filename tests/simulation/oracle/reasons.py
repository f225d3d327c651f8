# SPDX-License-Identifier: Apache-2.0
"""Whether each reason of a verdict is true, and names the node that it is about.

What slices say is found again, by the reader of slices in Python, in the bytes that were durable
when the verdict was. What a node says is compared with what its pool said to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from coordinator.core.evidence import FindingKind
from coordinator.core.verdict import Reason, ReasonKind, Verdict
from protocol.hashing import address_id, node_id
from protocol.messages import SliceFlags, TraceId
from protocol.verdicts import VerdictKind
from tests.decoding.evidence import PythonEvidence, missing
from tests.decoding.slices import PythonDecoder
from tests.simulation.network import NOBODYS
from tests.simulation.oracle.expected import LATE_NS, may_be_forgotten

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator
    from tests.simulation.store import KeptSlice

OF_FINDINGS = {
    FindingKind.LOSSY: ReasonKind.LOSSY,
    FindingKind.RUN_MISSING: ReasonKind.RUN_MISSING,
    FindingKind.UNFINISHED: ReasonKind.UNFINISHED,
    FindingKind.UNSTARTED: ReasonKind.SPAN_UNSTARTED,
    FindingKind.PARENT_MISSING: ReasonKind.PARENT_MISSING,
    FindingKind.HOP_OUT_UNMET: ReasonKind.HOP_OUT_UNMET,
    FindingKind.HOP_IN_UNMET: ReasonKind.HOP_IN_UNMET,
    FindingKind.HOP_UNANSWERED: ReasonKind.UNANSWERED,
}

OF_FLAGS = {
    ReasonKind.EVICTED: SliceFlags.EVICTED,
    ReasonKind.LOSSY: SliceFlags.LOSSY,
    ReasonKind.MAYBE_LOSSY: SliceFlags.MAYBE_LOSSY,
    ReasonKind.STORE_FULL: SliceFlags.STORE_FULL,
    ReasonKind.CORRUPT: SliceFlags.CORRUPT,
    ReasonKind.TRUNCATED: SliceFlags.TRUNCATED,
}

NEVER = {
    ReasonKind.MALFORMED,
    ReasonKind.CORRUPT,
    ReasonKind.TOO_LARGE,
    ReasonKind.TRUNCATED,
    ReasonKind.TOO_MANY_NODES,
    ReasonKind.DELETED,
}
"""Nothing in a simulated world makes any of these true."""


NOT_ALL_HERE = {
    ReasonKind.BYTES_MISSING,
    ReasonKind.RESTARTED,
    ReasonKind.LATE,
    ReasonKind.STORE_FULL,
}
"""With one of these, bytes of a slice may not be here, or were not read."""


def untrue(sim: Simulator, trace: TraceId, verdict: Verdict) -> Iterator[str]:
    """What a verdict says that is not so, in words. It is the one that was just made durable."""
    verdict = _by_name(sim, verdict)
    said = {(reason.kind, reason.node) for reason in verdict.reasons}
    late = any(reason.kind is ReasonKind.LATE for reason in verdict.reasons)
    if late:
        yield from _untrue_late(sim, trace, verdict)
        return
    if {kind for kind, _ in said} == {ReasonKind.ABANDONED}:
        for _, node in said:
            yield from _untrue_abandoned(sim, trace, node)
        return
    found = _findings(sim, trace)
    for kind, nodes in found.items():
        told = {node for said_kind, node in said if said_kind is kind}
        if kind is ReasonKind.PARENT_MISSING:
            wrong = told - nodes or (not told and nodes)
        elif kind is ReasonKind.LOSSY:
            wrong = nodes - told
        else:
            wrong = told ^ nodes
        if wrong:
            yield f"{kind.value} holds of {sorted(nodes)}, and is said of {sorted(told)}"
    for reason in verdict.reasons:
        if reason.kind in found and reason.kind is not ReasonKind.LOSSY:
            continue
        if reason.kind is ReasonKind.LOSSY and reason.node in found[reason.kind]:
            continue
        problem = _untrue(sim, trace, reason, verdict)
        if problem:
            yield f"{reason.kind.value} of {reason.node!r}: {problem}"


def _by_name(sim: Simulator, verdict: Verdict) -> Verdict:
    """Nodes that a coordinator has forgotten it calls by their ids; but says that it knows none."""
    names = {f"#{node_id(name):016x}": name for name in sim.nodes}
    reasons = tuple(
        reason
        if reason.kind is ReasonKind.UNKNOWN_NODE
        else replace(reason, node=names.get(reason.node, reason.node))
        for reason in verdict.reasons
    )
    return replace(verdict, reasons=reasons)


def _untrue_late(sim: Simulator, trace: TraceId, verdict: Verdict) -> Iterator[str]:
    """What was said before it was closed may be said again; the rest is of nodes."""
    kept = sim.coordinator.store.traces[trace]
    if kept.first_released_ns is None:
        yield "it was never closed"
    before = {
        (reason.kind, reason.node)
        for other in sim.verdicts.get(trace, ())
        for reason in other.reasons
    }
    for reason in verdict.reasons:
        if reason.kind is ReasonKind.LATE or (reason.kind, reason.node) in before:
            continue
        problem = _untrue(sim, trace, reason, verdict)
        if problem:
            yield f"{reason.kind.value} of {reason.node!r}: {problem}"


def _untrue_abandoned(sim: Simulator, trace: TraceId, node: str) -> Iterator[str]:
    groups = sim.world.groups_of(trace)
    by = {name for group in groups for name in sim.world.given_up.get(group, ())}
    flags = sim.world.of(node, trace).ever if node else SliceFlags.NONE
    if node not in by and SliceFlags.ABANDONED not in flags:
        yield f"{node!r} gave up none of its groups; {by} did"


def _findings(sim: Simulator, trace: TraceId) -> dict[ReasonKind, set[str]]:
    """What slices say that is wrong, by the nodes that it is about."""
    evidence = PythonEvidence(10**9)
    kept = sim.coordinator.store.traces[trace]
    names = {node_id(name): name for name in sim.nodes}
    found: dict[ReasonKind, set[str]] = {kind: set() for kind in OF_FINDINGS.values()}
    for node, stored in kept.slices.items():
        said = stored.status
        if said is None or not said.bytes or said.epoch == stored.epoch:
            evidence.add(node_id(node), bytes(stored.data))
        # Else the node has begun another, of which nothing is here yet: nobody speaks of this one.
    for kind, identity, _ in missing(evidence):
        found[OF_FINDINGS[kind]].add(names[identity])
    # Of several children without their parent one is told: each of them may be.
    spans = set(evidence.spans)
    for identity, read in evidence.slices.items():
        for parent in read.spans[1::2]:
            if parent and parent not in spans:
                found[ReasonKind.PARENT_MISSING].add(names[identity])
    return found


def _is_cut(stored: KeptSlice | None) -> bool:
    """Whether a slice ends within a piece."""
    if stored is None or not stored.data:
        return False
    decoder = PythonDecoder()
    decoder.feed(bytes(stored.data))
    return not decoder.whole


def _untrue(sim: Simulator, trace: TraceId, reason: Reason, verdict: Verdict) -> str:
    """Why a reason is not true; empty if it is."""
    kind, node = reason.kind, reason.node
    if kind in NEVER:
        return f"nothing can make that so: {reason.detail}"
    if kind in (ReasonKind.NO_TRIGGER, ReasonKind.OPEN) and not node:
        is_open = kind is ReasonKind.OPEN or verdict.kind is VerdictKind.PROVISIONAL
        return "" if is_open else _untrue_no_trigger(sim, trace)
    if kind is ReasonKind.ABANDONED and not node:
        gave = any("" in by for by in sim.world.given_up.values())
        return "" if gave else "the coordinator gave up nothing"
    if node not in sim.nodes:
        # It is waited for, as if it could still answer, while that is not sure.
        if kind not in (ReasonKind.UNKNOWN_NODE, ReasonKind.OPEN):
            return "there is no such node"
        return _untrue_unknown(sim, trace, node, verdict)
    at = sim.nodes[node]
    stored = sim.coordinator.store.traces[trace].slices.get(node)
    status = stored.status if stored is not None else None
    length = len(stored.data) if stored is not None else 0
    collected = sim.world.of(node, trace)
    match kind:
        case ReasonKind.EVICTED | ReasonKind.LOSSY | ReasonKind.MAYBE_LOSSY:
            if OF_FLAGS[kind] not in collected.ever:
                return f"its pool only said {collected.ever!r}"
        case ReasonKind.STORE_FULL:
            if (
                SliceFlags.STORE_FULL not in collected.ever
                and (node, trace) not in sim.world.no_room
            ):
                return f"its pool only said {collected.ever!r}"
        case ReasonKind.ABANDONED:
            gave = any(group in sim.world.given_up for group in sim.world.groups_of(trace))
            if SliceFlags.ABANDONED not in collected.ever and not gave:
                return "none of its groups was given up"
        case ReasonKind.OPEN:
            if verdict.kind is not VerdictKind.PROVISIONAL:
                return "the verdict is not provisional"
        case ReasonKind.BYTES_MISSING:
            # What it said last may not have come, though the bytes did, but for the end.
            if status is not None and status.bytes <= length and not _is_cut(stored):
                return f"{length} bytes are here, and it said {status.bytes}"
        case ReasonKind.STILL_WRITTEN:
            if status is None or not status.open_handles:
                return "it said of no open handle"
        case ReasonKind.NO_ANSWER:
            if status is not None:
                return f"it answered: {status}"
            fired = any(f.node == node for f in sim.world.by_trace.get(trace, ()))
            if not fired and (node, trace) not in sim.world.asked:
                return "it was never asked"
        case ReasonKind.NOT_CONNECTED:
            if status is not None:
                return f"it answered: {status}"
            if not sim.world.was_away(node, sim.world.judged_ns[trace, verdict.version]):
                return "it was connected when this was said"
        case ReasonKind.UNKNOWN_NODE:
            return "it was connected"
        case ReasonKind.NEVER_SEEN:
            if status is not None and not status.is_blank:
                return f"it said {status}"
            said = collected.ever & ~SliceFlags.ABANDONED
            # Another percentage puts in doubt what a node has said already, and says again.
            doubted_ns = collected.flagged_ns.get(SliceFlags.MAYBE_LOSSY, 0)
            judged_ns = sim.world.judged_ns[trace, verdict.version]
            if doubted_ns + LATE_NS > judged_ns or sim.world.may_be_late(node, judged_ns):
                said &= ~SliceFlags.MAYBE_LOSSY
            full_ns = collected.flagged_ns.get(SliceFlags.STORE_FULL, 0)
            restarts_ns = sim.world.restarts_ns.get(node, [])
            if (node, trace) in sim.world.no_room and any(at > full_ns for at in restarts_ns):
                # There was no room for a mark either, so nobody knows of it any more.
                said &= ~SliceFlags.STORE_FULL
            away_ns = sim.world.away_since_ns(node, judged_ns)
            for flag in said:
                # What came up when it had gone, or was under way then, nobody was told.
                if away_ns is not None and collected.flagged_ns[flag] + LATE_NS > away_ns:
                    said &= ~flag
            if said:
                return f"its pool said {said!r}"
        case ReasonKind.RESTARTED:
            began_anew = len([epoch for epoch in collected.epochs if epoch]) > 1
            restarted = bool(sim.world.restarts_ns.get(node)) or at.dead
            if not (began_anew or restarted or collected.let_go):
                return "it was never restarted, and let go of nothing"
        case _:
            return "no reason that is known here"
    return ""


def _untrue_unknown(sim: Simulator, trace: TraceId, called: str, verdict: Verdict) -> str:
    """A node that a crumb named, and that the coordinator does not know; by its id."""
    for name in sim.nodes:
        if called == f"#{node_id(name):016x}":
            # One that begins anew knows nobody whom it has not heard since, nor stored.
            known = sim.world.is_known(name, sim.world.judged_ns[trace, verdict.version])
            return f"{name} had been there" if known else ""
    addresses = {NOBODYS, *(address for at in sim.nodes.values() for address in at.addresses)}
    if called not in {f"#{address_id(address):016x}" for address in addresses}:
        return "there is no such node"
    # Of a crumb in a status only the bytes tell that it is an address.
    kinds = {reason.kind for reason in verdict.reasons}
    if verdict.kind is VerdictKind.PROVISIONAL or kinds & NOT_ALL_HERE:
        return ""
    return "it is an address, as bytes say that are here"


def _untrue_no_trigger(sim: Simulator, trace: TraceId) -> str:
    """What was closed has lost its triggers, and was not fired since."""
    store = sim.coordinator.store
    closed_ns = store.traces[trace].released_ns
    for (group, node), put in store.triggers.items():
        named = trace in (group.primary, *put.fired.laterals)
        if named and group not in store.abandoned and store.fired_ns[group, node] > closed_ns:
            return f"{node} told of {group.trigger}"
    return ""


def outdated(sim: Simulator, trace: TraceId, verdict: Verdict) -> Iterator[str]:
    """What a verdict says that may have been so, and is not when all are back and have said all."""
    kinds = {reason.kind for reason in verdict.reasons}
    if ReasonKind.LATE in kinds:
        return  # what was wrong when it was closed stays
    can_ask = ReasonKind.NO_TRIGGER not in kinds
    if sim.is_scarce:
        return  # and it may have been closed at any time
    for reason in verdict.reasons:
        node = sim.nodes.get(reason.node)
        words = f"{reason.kind.value} of {reason.node!r}"
        match reason.kind:
            case ReasonKind.NO_TRIGGER:
                fired = sim.world.by_trace[trace]
                closed_ns = sim.coordinator.store.traces[trace].first_closed_ns
                judged_ns = sim.world.judged_ns[trace, verdict.version]
                if closed_ns is not None and closed_ns < judged_ns:
                    continue  # it came up again, and has lost its triggers
                # Who was asked for it before he fired does not tell of that.
                first = {f.group: f for f in sorted(fired, key=lambda f: -f.time_ns)}
                if not all(may_be_forgotten(sim, f) for f in first.values()):
                    yield f"{words}: who fired it is there, and never forgot it"
            case ReasonKind.NO_ANSWER | ReasonKind.NOT_CONNECTED:
                groups = sim.world.groups_of(trace)
                if all(sim.world.given_up.get(group) for group in groups) and any(
                    reason.node in sim.world.given_up[group] for group in groups
                ):
                    continue  # it let go of it, and nobody can ask it for another one
                if node is not None and not node.dead and can_ask:
                    yield f"{words}: it is there, and answers"
            case ReasonKind.BYTES_MISSING | ReasonKind.RESTARTED:
                collected = sim.world.of(reason.node, trace)
                lost = bool(sim.world.stores_lost_ns.get(reason.node)) or len(collected.epochs) > 1
                # One that was restarted does not know any more what it gave up.
                lost = lost or (collected.let_go and bool(sim.world.restarts_ns.get(reason.node)))
                groups = sim.world.groups_of(trace)
                lost = lost or any(group in sim.world.given_up for group in groups)
                if node is not None and not node.dead and not lost:
                    yield f"{words}: it is there, and never lost anything"
            case ReasonKind.STILL_WRITTEN | ReasonKind.OPEN:
                visits = [v for r in sim.requests_of(trace) for v in r.visits]
                open_there = any(v.node == reason.node and not v.ended for v in visits)
                # The end of one may be lost, untold.
                doubts = SliceFlags.LOSSY | SliceFlags.MAYBE_LOSSY
                open_there = open_there or bool(sim.world.of(reason.node, trace).ever & doubts)
                if node is not None and not node.dead and not open_there:
                    yield f"{words}: all that was begun there ended"
            case ReasonKind.NEVER_SEEN:
                visits = [v for r in sim.requests_of(trace) for v in r.visits]
                saw = any(v.node == reason.node and v.bodies for v in visits)
                # Of one that is gone, what it said last stands.
                if node is not None and not node.dead and saw:
                    yield f"{words}: it did"
            case _:
                pass
