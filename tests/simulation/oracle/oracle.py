# SPDX-License-Identifier: Apache-2.0
"""The oracle: what it looks at while a world runs, and when all is quiet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.core.verdict import Verdict
from formats.records import Body
from formats.slices import SliceDecoder
from protocol.messages import Group, TraceId
from protocol.verdicts import VerdictKind
from protocol.versions import Feature
from tests.simulation.charges import check_charges
from tests.simulation.network import S
from tests.simulation.oracle.bounds import check_coordinator, check_node, held_at_rest
from tests.simulation.oracle.expected import Fact, facts, is_excused, may_be_forgotten
from tests.simulation.oracle.reasons import outdated, untrue

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator

CHARGES_EVERY = 64
"""Steps of the coordinator between two looks at all charges, which take a while."""


TOLD_NS = 2 * S
"""So long after a group was given up all have heard of it, unless there is trouble."""


class OracleError(AssertionError):
    """What was promised does not hold."""


@dataclass(slots=True)
class Tally:
    """How many traces of firings there were, how many of them had one right outcome, and why others had not."""

    traces: int = 0
    judged: int = 0
    coherent: int = 0
    races: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.traces += other.traces
        self.judged += other.judged
        self.coherent += other.coherent
        self.races += other.races


class Oracle:
    """Of one simulated world."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._steps = self._look_at = 0
        self.tally = Tally()

    def fail(self, problem: str) -> OracleError:
        return OracleError(
            f"seed {self._sim.seed}, {self._sim.scheduler.now_ns / 1e9:.3f} s: {problem}"
        )

    # --------------------------------------------------------- each step

    def step(self) -> None:
        """After each step of the coordinator."""
        core = self._sim.coordinator.core
        if core is None or core.recovering:
            return
        self._steps += 1
        check_coordinator(core)
        if self._steps >= self._look_at:
            # All of it takes as long as there is much: so the more seldom.
            self._look_at = self._steps + CHARGES_EVERY + len(core._traces) + len(self._sim.nodes)
            check_charges(core)
            for node in self._sim.nodes.values():
                if node.core is not None:
                    check_node(node.core)

    def on_verdict(self, trace: TraceId, verdict: Verdict) -> None:
        """A verdict is durable: it must be true by what else is."""
        if verdict.kind is VerdictKind.COHERENT:
            self._check_coherent(trace, self.first_fired_ns(trace), "is called coherent")
        problems = list(untrue(self._sim, trace, verdict))
        if problems:
            raise self.fail(f"trace {trace.hex()} is called {verdict.kind.value}: {problems}")

    def on_durable(self, traces: set[TraceId]) -> None:
        """A transaction is over: what is coherent still is, and is what was written."""
        for trace in traces:
            verdict = self._sim.verdict(trace)
            if verdict is not None and verdict.kind is VerdictKind.COHERENT:
                self._check_coherent(trace, self.first_fired_ns(trace), "stays coherent")

    def _check_coherent(self, trace: TraceId, begun_before_ns: int, what: str) -> None:
        problems = self.missing(trace, begun_before_ns)
        if problems:
            raise self.fail(
                f"trace {trace.hex()} {what}, but lacks {len(problems)} things: {problems[:5]}"
            )

    # ------------------------------------------------------------- truth

    def first_fired_ns(self, trace: TraceId) -> int:
        """When a trigger first named the trace; now, if none did."""
        fired = self._sim.world.by_trace.get(trace, ())
        return min((f.time_ns for f in fired), default=self._sim.scheduler.now_ns)

    def delivered(self, trace: TraceId) -> dict[str, Counter[tuple[int, int, Body]]]:
        """What the store has of a trace: by node, (client, handle, record)."""
        kept = self._sim.coordinator.store.traces.get(trace)
        found: dict[str, Counter[tuple[int, int, Body]]] = {}
        for node, stored in kept.slices.items() if kept is not None else ():
            records = SliceDecoder().feed(bytes(stored.data))
            found[node] = Counter((r.client, r.handle, r.body) for r in records)
        return found

    def missing(self, trace: TraceId, begun_before_ns: int) -> list[str]:
        """What was written for the trace and is not in the store, in words.

        What is written again after the trigger, on a node that dies with it or
        loses its report store, nobody can know of.
        """
        sim = self._sim
        found = self.delivered(trace)
        fired_ns = self.first_fired_ns(trace)
        problems = []
        for request in sim.requests_of(trace):
            if request.begun_ns >= begun_before_ns:
                continue
            for visit in request.visits:
                node = sim.nodes[visit.node]
                lost = (visit.node, trace) in sim.world.lost_slices
                if request.begun_ns > fired_ns and (node.dead or lost):
                    continue
                have = found.get(visit.node, Counter())
                for body in visit.bodies:
                    key = (visit.client, visit.handle, body)
                    if have[key] <= 0:
                        problems.append(f"{visit.node}: {body} of client {visit.client}")
                    have[key] -= 1
                if visit.lost:
                    problems.append(f"{visit.node}: {visit.lost} records were lost when written")
                if not visit.ended:
                    problems.append(f"{visit.node}: a visit never ended")
            if request.unmet:
                problems.append(f"{request.unmet} calls reached nobody")
        return problems

    # ------------------------------------------------------------ the end

    def check(self) -> None:
        """All promises, once all is quiet."""
        self._check_delivered()
        self._check_policies()
        self._check_groups()
        self._check_verdicts()
        if left := list(self._sim.coordinator.snapshots.left()):
            raise self.fail("; ".join(left))
        if self._sim.coordinator.core is not None:
            check_charges(self._sim.coordinator.core)

    def _check_delivered(self) -> None:
        """What is stored was triggered, and what is delivered was written, and no more often."""
        sim = self._sim
        for trace in sim.coordinator.store.traces:
            if trace not in sim.world.by_trace:
                raise self.fail(f"trace {trace.hex()} is stored, and nobody fired it")
            written: dict[str, Counter[tuple[int, int, Body]]] = {}
            for request in sim.requests_of(trace):
                for visit in request.visits:
                    of_node = written.setdefault(visit.node, Counter())
                    of_node.update((visit.client, visit.handle, body) for body in visit.bodies)
            for node, records in self.delivered(trace).items():
                more = records - written.get(node, Counter())
                if more:
                    raise self.fail(f"{node} delivered of {trace.hex()} what nobody wrote: {more}")

    def _check_verdicts(self) -> None:
        sim = self._sim
        self.tally = Tally()
        for trace, fired in sim.world.by_trace.items():
            befell = list(facts(sim, trace))
            sure = [fact for fact in befell if fact.sure]
            kind, verdict = sim.kind(trace), sim.verdict(trace)
            problems = list(outdated(sim, trace, verdict)) if verdict is not None else []
            if problems:
                raise self.fail(f"trace {trace.hex()} stays {kind}: {problems}")
            told = {reason.kind for reason in verdict.reasons} if verdict is not None else set()
            is_judged = bool(sure) or not befell or any(f.settles and f.fits & told for f in befell)
            self.tally.traces += len(fired)
            self.tally.judged += is_judged * len(fired)
            self.tally.coherent += (not befell) * len(fired)
            if not is_judged:
                self.tally.races[befell[0].why] += len(fired)
            elif not befell:
                if kind != "coherent" and not (
                    verdict is not None and is_excused(sim, trace, verdict)
                ):
                    raise self.fail(
                        f"trace {trace.hex()}, triggered on {[f.node for f in fired]}, could be "
                        f"collected whole, but is {kind}: {verdict.reasons if verdict else ''}"
                    )
            elif verdict is not None:
                self._check_told(trace, verdict, sure or befell)
            elif not all(may_be_forgotten(sim, f) for f in fired):
                raise self.fail(f"of {trace.hex()} nothing is said: {[f.why for f in sure]}")

    def _check_told(self, trace: TraceId, verdict: Verdict, sure: list[Fact]) -> None:
        """What surely befell a trace, its verdict says by some reason."""
        told = {reason.kind for reason in verdict.reasons}
        abandoned = any(
            group in self._sim.world.given_up for group in self._sim.world.groups_of(trace)
        )
        fits = {kind for fact in sure for kind in fact.fits}
        if not abandoned and not told & fits:
            raise self.fail(
                f"trace {trace.hex()} is {verdict.kind.value} for {sorted(told)}; but "
                f"{[fact.why for fact in sure]}"
            )

    def _check_policies(self) -> None:
        """All nodes that are connected, and know how, record by what the coordinator said last."""
        for node in self._sim.nodes.values():
            agreed = node.core.links[0].agreed if node.core is not None else None
            if agreed is None or Feature.POLICY not in agreed.features:
                continue
            if node.policy != self._sim.coordinator.policy:
                raise self.fail(
                    f"{node.name} records by {node.policy}, and the coordinator has "
                    f"{self._sim.coordinator.policy}"
                )

    def _check_groups(self) -> None:
        """Of a group that was given up nothing is whole, unless all of it is, or another has it.

        What was closed before the coordinator heard of it stays as it is: its group's fate was sealed then.
        """
        store = self._sim.coordinator.store
        known_ns = self._sim.world.given_up_known_ns
        members: dict[Group, set[TraceId]] = {}
        for (group, _), put in store.triggers.items():
            members.setdefault(group, set()).update((group.primary, *put.fired.laterals))

        def is_whole(group: Group) -> bool:
            """Now, or when it was given up: what is said of one of them later takes no other away."""
            whole_now = all(self._sim.kind(trace) == "coherent" for trace in members[group])
            return whole_now or all(
                self._was_coherent(trace, known_ns.get(group, 0)) for trace in members[group]
            )

        for group in store.abandoned:
            for trace in members.get(group, {group.primary}):
                if self._sim.kind(trace) != "coherent":
                    continue
                having = [other for other, traces in members.items() if trace in traces]
                closed_ns = store.traces[trace].first_closed_ns
                last_ns = max((known_ns.get(other, 0) for other in having), default=0)
                if closed_ns is not None and closed_ns <= last_ns:
                    continue
                if not any(other not in store.abandoned or is_whole(other) for other in having):
                    raise self.fail(
                        f"{group} was given up, as were all others of {trace.hex()}; it is called "
                        f"coherent, and none of them is whole"
                    )

    def _was_coherent(self, trace: TraceId, at_ns: int) -> bool:
        judged_ns = self._sim.world.judged_ns
        kinds = [
            verdict.kind
            for verdict in self._sim.verdicts.get(trace, ())
            if judged_ns[trace, verdict.version] <= at_ns
        ]
        return bool(kinds) and kinds[-1] is VerdictKind.COHERENT

    def check_dropped(self) -> None:
        """Every node is there and has heard all: of what was given up nobody holds anything."""
        sim = self._sim
        # A node may give up something at any time, also in the last moment.
        heard_ns = sim.scheduler.now_ns - TOLD_NS
        given_up = {
            group
            for group in sim.coordinator.store.abandoned
            if sim.world.given_up_ns.get(group, 0) <= heard_ns
        }
        for node in sim.nodes.values():
            if node.core is None:
                continue
            late = sim.world.may_be_late(node.name, sim.scheduler.now_ns)
            for found in node.pool.slices():
                kept = sim.coordinator.store.traces.get(found.trace)
                if late and kept is not None and kept.first_released_ns is not None:
                    # Who was away then is told to forget the trace, and sends it off at its rate.
                    continue
                groups = sim.world.groups_of(found.trace)
                left = found.bytes - found.trimmed_bytes
                if left and groups and all(group in given_up for group in groups):
                    raise self.fail(
                        f"{node.name} still holds {left} bytes of {found.trace.hex()}, of which all "
                        f"groups were given up: {groups}"
                    )

    def check_rest(self) -> None:
        """All is over, and every mark has expired: nobody holds anything, but for what is remembered."""
        sim = self._sim
        for name, node in sim.nodes.items():
            if node.pool.frames_used > node.pool.frames_max:
                raise self.fail(f"{name} is over its pool")
            held = held_at_rest(node.core) if node.core is not None else Counter[str]()
            slices = [found.trace.hex() for found in node.pool.slices() if node.core is not None]
            if held or slices:
                raise self.fail(f"{name} has nothing to do, and holds {slices} {dict(held)}")
        core = sim.coordinator.core
        if core is not None and (held := held_at_rest(core)):
            raise self.fail(f"the coordinator has nothing to do, and holds {dict(held)}")
