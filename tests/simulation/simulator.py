# SPDX-License-Identifier: Apache-2.0
"""A cluster, its traffic and its faults, all from one seed, and an oracle.

The oracle knows what was written where. It checks at every verdict that no
trace is called coherent whose requests are not all there, and at the end that
every trace that could be collected whole was.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from appliance.core.dataplane import NO_CLIENT, LocalTrigger
from appliance.core.node import NodeConfig
from coordinator.core.config import CoordinatorConfig
from coordinator.core.verdict import ReasonKind, Verdict
from formats.records import Body
from formats.slices import SliceDecoder
from protocol.messages import Group, SliceFlags, Source, TraceId
from protocol.verdicts import VerdictKind
from protocol.versions import Feature
from tests.simulation.charges import check_charges
from tests.simulation.cluster import SimCoordinator, SimNode
from tests.simulation.network import MS, Link, S, Scheduler
from tests.simulation.pool import PoolConfig
from tests.simulation.traffic import Call, Request, Traffic

QUICK = CoordinatorConfig(
    answer_timeout_ns=1 * S,
    quiet_ns=200 * MS,
    provisional_ns=5 * S,
    linger_ns=1 * S,
    missing_linger_ns=20 * S,
    clock_probe_interval_ns=10 * S,
    memory_bytes=4 << 20,
    credit_window_bytes=1 << 20,
)
"""As in production, but that it gives up sooner."""


class OracleError(AssertionError):
    """What was promised does not hold."""


@dataclass(slots=True)
class Fired:
    """The truth about a firing."""

    group: Group
    laterals: tuple[TraceId, ...]
    node: str
    time_ns: int


@dataclass(slots=True)
class Simulator:
    """See the module. Add nodes, then run; everything else is optional."""

    seed: int = 0
    coordinator_config: CoordinatorConfig = QUICK
    trace_log: bool = False
    rng: random.Random = field(init=False)
    scheduler: Scheduler = field(init=False)
    coordinator: SimCoordinator = field(init=False)
    nodes: dict[str, SimNode] = field(init=False)
    traffic: Traffic = field(init=False)
    fired: list[Fired] = field(default_factory=list)
    log_lines: list[str] = field(default_factory=list)
    verdicts: dict[TraceId, list[Verdict]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.scheduler = Scheduler()
        self.coordinator = SimCoordinator(
            self.scheduler, self.rng, self.coordinator_config, self.log, self._on_verdict
        )
        self.nodes = {}
        self.traffic = Traffic(self.scheduler, self.rng, self.nodes)
        self.coordinator.start()

    # ------------------------------------------------------------ set-up

    def log(self, who: str, what: object) -> None:
        if self.trace_log:
            self.log_lines.append(f"{self.scheduler.now_ns / 1e9:10.6f}  {who:12}  {what}")

    def add_node(
        self,
        name: str,
        config: NodeConfig | None = None,
        pool: PoolConfig | None = None,
        link: Link | None = None,
        *,
        clients: int = 1,
        clock_offset_ns: int = 0,
    ) -> SimNode:
        """A node with its processes, and its daemon started."""
        number = len(self.nodes)
        base = config or NodeConfig("", triggered_ttl_ns=10 * S)
        node = SimNode(
            self.scheduler,
            self.rng,
            name,
            replace(base, node=name),
            pool or PoolConfig(),
            link or Link(jitter_ns=MS // 2),
            self.coordinator,
            self.log,
            addresses=(f"10.0.0.{number + 1}",),
            mono_offset_ns=(number + 1) * 1000 * S,
            clock_offset_ns=clock_offset_ns,
        )
        self.nodes[name] = node
        for _ in range(clients):
            self.add_client(node)
        node.start()
        return node

    def add_nodes(self, *names: str) -> None:
        for name in names:
            self.add_node(name)

    def add_client(self, node: SimNode) -> None:
        pid = 1000 + len(node.clients)
        node.clients.append(node.pool.add_client(pid, f"{node.name}-service", node.mono_ns()))

    def kill_client(self, node: SimNode) -> None:
        """Kill -9 of a process of the node, and start another one."""
        client = node.clients.pop(self.rng.randrange(len(node.clients)))
        self.log(node.name, f"process {client.number} dies")
        node.pool.exit_client(client, node.mono_ns())
        self.add_client(node)

    # ----------------------------------------------------------- actions

    def run(self, seconds: float) -> None:
        self.scheduler.run_until(self.scheduler.now_ns + int(seconds * S))

    def request(self, root: Call, trace: TraceId | None = None) -> Request:
        return self.traffic.request(trace or self.traffic.new_trace(), root)

    def fire(
        self, node: str, trace: TraceId, name: str = "t", laterals: tuple[TraceId, ...] = ()
    ) -> Group:
        """A process of the node fires a trigger."""
        at = self.nodes[node]
        group = Group(name, trace)
        if not at.dead and at.clients:
            self.fired.append(Fired(group, laterals, node, self.scheduler.now_ns))
            client = self.traffic.pick_client(at)
            self.log(node, f"fires {name} for {trace.hex()[-8:]}")
            at.pool.trigger(client, trace, name, at.mono_ns(), why="test", laterals=laterals)
            at.look_after(MS // 2)
        return group

    def fire_by_node(self, node: str, trace: TraceId, name: str = "n") -> None:
        """The kernel of the node fires, or the node itself: no process of it."""
        at = self.nodes[node]
        if at.core is not None:
            group = Group(name, trace)
            self.fired.append(Fired(group, (), node, self.scheduler.now_ns))
            self.log(node, f"fires {name} by itself for {trace.hex()[-8:]}")
            now_ns = at.mono_ns()
            fired = LocalTrigger(NO_CLIENT, now_ns, name, trace, (), "test", Source.NODE)
            at.core.on_dataplane([fired], now_ns)
            at.look_after(0)

    # ------------------------------------------------------------- truth

    def requests_of(self, trace: TraceId) -> list[Request]:
        return [request for request in self.traffic.requests if request.trace == trace]

    def verdict(self, trace: TraceId) -> Verdict | None:
        kept = self.coordinator.store.traces.get(trace)
        return None if kept is None else kept.verdict

    def kind(self, trace: TraceId) -> str:
        verdict = self.verdict(trace)
        return "none" if verdict is None else verdict.kind.value

    def delivered(self, trace: TraceId) -> dict[str, Counter[tuple[int, int, Body]]]:
        """What the store has of a trace: by node, (client, handle, record)."""
        kept = self.coordinator.store.traces.get(trace)
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
        found = self.delivered(trace)
        fired_ns = self.first_fired_ns(trace)
        problems = []
        for request in self.requests_of(trace):
            if request.begun_ns >= begun_before_ns:
                continue
            for visit in request.visits:
                node = self.nodes[visit.node]
                if request.begun_ns > fired_ns and (node.dead or trace in node.lost_slices):
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

    def first_fired_ns(self, trace: TraceId) -> int:
        """When a trigger first named the trace; now, if none did."""
        return min(
            (f.time_ns for f in self.fired if trace in (f.group.primary, *f.laterals)),
            default=self.scheduler.now_ns,
        )

    def _on_verdict(self, trace: TraceId, verdict: Verdict) -> None:
        self.verdicts.setdefault(trace, []).append(verdict)
        reasons = "; ".join(f"{r.node} {r.kind.value}: {r.detail}" for r in verdict.reasons)
        self.log(
            "coordinator",
            f"verdict {verdict.version} of {trace.hex()[-8:]}: {verdict.kind.value} {reasons}",
        )
        if verdict.kind is VerdictKind.COHERENT:
            problems = self.missing(trace, self.first_fired_ns(trace))
            if problems:
                raise OracleError(
                    f"seed {self.seed}: trace {trace.hex()} is called coherent, but lacks "
                    f"{len(problems)} things: {problems[:5]}"
                )

    # ------------------------------------------------------------ checks

    def settle(self, seconds: float = 60.0, window: float = 10.0) -> None:
        """Run until all is said, and check that nobody says anything more."""
        for node in self.nodes.values():
            node.poll_ns = 500 * MS  # nobody writes any more
        self.run(seconds)
        before = self.messages()
        self.run(window)
        after = self.messages()
        if after != before:
            raise OracleError(
                f"seed {self.seed}: still talking after {seconds} s: {before} to {after} messages"
            )

    def messages(self) -> Mapping[str, int]:
        """What each node said and was told, but for the clock probes."""
        return {name: node.messages for name, node in self.nodes.items()}

    def check(self) -> None:
        """All promises, once all is quiet."""
        self.check_bounds()
        self.check_abandoned()
        self.check_policies()
        self.check_groups()
        if self.coordinator.core is not None:
            check_charges(self.coordinator.core)
        for trace, kept in self.coordinator.store.traces.items():
            if kept.verdict is not None and kept.verdict.kind is VerdictKind.COHERENT:
                before_ns = kept.first_released_ns
                problems = self.missing(
                    trace, self.scheduler.now_ns if before_ns is None else before_ns
                )
                if problems:
                    raise OracleError(
                        f"seed {self.seed}: trace {trace.hex()} stays coherent, but lacks "
                        f"{len(problems)} things: {problems[:5]}"
                    )
        for fired in self.fired:
            for trace in (fired.group.primary, *fired.laterals):
                why_not = self.why_not_whole(trace, fired)
                if not why_not and self.kind(trace) != "coherent":
                    verdict = self.verdict(trace)
                    raise OracleError(
                        f"seed {self.seed}: trace {trace.hex()}, triggered on {fired.node}, could "
                        f"be collected whole, but is {self.kind(trace)}: "
                        f"{verdict.reasons if verdict else ''}"
                    )

    def why_not_whole(self, trace: TraceId, fired: Fired) -> str:
        """Why nobody can expect a trace to be coherent; empty if one can."""
        requests = self.requests_of(trace)
        written = {visit.node for request in requests for visit in request.visits}
        if not written:
            return "nobody wrote anything"
        if fired.node not in written:
            return "fired where it never was"
        for request in requests:
            if request.unmet:
                return "a call reached nobody"
            for visit in request.visits:
                if visit.lost or not visit.ended:
                    return f"lost or unfinished on {visit.node}"
            kept = self.coordinator.store.traces.get(trace)
            released_ns = None if kept is None else kept.first_released_ns
            if released_ns is not None and request.begun_ns > released_ns - S:
                return "written again when it was closed"
        for name, node in self.nodes.items():
            if trace in node.pool.store_was_full_for:
                return f"{name} had no room, and cannot say whether it had anything"
        for name in written:
            node = self.nodes[name]
            if node.dead:
                return f"{name} is dead"
            if node.core is None:
                return f"{name} has no daemon"
            if trace in node.lost_slices:
                return f"{name} lost its slice"
            flags = node.pool.flags_of(trace)
            found = node.pool.slice(trace)
            if found is not None:
                flags |= found.flags
            if flags & ~SliceFlags.HELD:
                return f"{name}: {flags}"
        named = [f for f in self.fired if trace in (f.group.primary, *f.laterals)]
        for name in sorted(written | {f.node for f in named}):
            # A new daemon doubts more than the pool can tell: slices that its predecessor
            # left, and, if it has no memory of before, all that anybody names there.
            node = self.nodes[name]
            said = node.flags_said.get(trace, SliceFlags.NONE)
            if node.restarts and said & SliceFlags.MAYBE_LOSSY:
                return f"{name} has a new daemon, which said: {said}"
        reached = {fired.node}
        crumbs = {pair for request in requests for pair in request.crumbs}
        while True:
            more = {there for here, there in crumbs if here in reached} - reached
            if not more:
                break
            reached |= more
        if any(self.nodes[f.node].dead for f in named):
            return "fired on a node that is dead, and may have had some of it"
        verdict = self.verdict(trace)
        if verdict is not None and any(r.kind is ReasonKind.LATE for r in verdict.reasons):
            if self.verdicts[trace][0].kind is VerdictKind.COHERENT and len(requests) > 1:
                return "what was written again was told when it was closed"
            if any(f is not fired and f.time_ns <= fired.time_ns for f in named):
                return "it was closed on the evidence that another firing led to"
        unreached = written - reached
        if unreached:
            return f"no crumb leads to {sorted(unreached)}"
        if any(self.nodes[there].dead for here, there in crumbs if here in reached):
            return "a crumb leads to a dead node"
        if any(there not in written for _, there in crumbs):
            return "a crumb leads where it never was"
        for node in self.nodes.values():
            given_up = node.core.abandoned_groups if node.core is not None else ()
            for other in self.fired:
                if other.group in given_up and trace in (other.group.primary, *other.laterals):
                    return f"{node.name} gave up a group of it"
        return ""

    def check_bounds(self) -> None:
        config = self.coordinator_config
        if self.coordinator.undurable_max > config.memory_bytes:
            raise OracleError(
                f"seed {self.seed}: the coordinator held {self.coordinator.undurable_max} bytes"
            )
        for node in self.nodes.values():
            if node.pool.frames_used > node.pool.frames_max:
                raise OracleError(f"seed {self.seed}: {node.name} is over its pool")

    def check_policies(self) -> None:
        """All nodes that are connected, and know how, record by what the coordinator said last."""
        for node in self.nodes.values():
            agreed = node.core.agreed if node.core is not None else None
            if agreed is None or Feature.POLICY not in agreed.features:
                continue
            if node.policy != self.coordinator.policy:
                raise OracleError(
                    f"seed {self.seed}: {node.name} records by {node.policy}, and the "
                    f"coordinator has {self.coordinator.policy}"
                )

    def check_groups(self) -> None:
        """Of a group that was given up nothing is called whole, unless all of it is, or another has it."""
        store = self.coordinator.store
        members: dict[Group, set[TraceId]] = {}
        for (group, _), put in store.triggers.items():
            members.setdefault(group, set()).update((group.primary, *put.fired.laterals))
        for group in store.abandoned:
            of_group = members.get(group, {group.primary})
            kinds = {trace: self.kind(trace) for trace in of_group}
            if set(kinds.values()) == {"coherent"}:
                continue
            for trace, kind in kinds.items():
                others = [other for other, traces in members.items() if trace in traces]
                if kind == "coherent" and all(other in store.abandoned for other in others):
                    raise OracleError(
                        f"seed {self.seed}: {group} was given up, and of its traces"
                        f" {trace.hex()} is called coherent: {kinds}"
                    )

    def check_abandoned(self) -> None:
        """What one node gave up, all nodes that held it gave up."""
        abandoned: dict[Group, set[str]] = {}
        for node in self.nodes.values():
            if node.core is not None:
                for group in node.core.abandoned_groups:
                    abandoned.setdefault(group, set()).add(node.name)
        for group, nodes in abandoned.items():
            for name, node in self.nodes.items():
                if node.core is None or name in nodes:
                    continue
                for found in node.pool.slices():
                    if found.trace == group.primary and found.group == group:
                        raise OracleError(
                            f"seed {self.seed}: {group} was abandoned on {sorted(nodes)}, "
                            f"but {name} still holds it"
                        )
