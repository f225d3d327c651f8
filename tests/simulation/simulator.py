# SPDX-License-Identifier: Apache-2.0
"""A cluster, its traffic and its faults, all from one seed, and the oracle that judges it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from appliance.core.dataplane import NO_CLIENT, LocalTrigger
from appliance.core.node import NodeConfig
from coordinator.core.config import CoordinatorConfig
from coordinator.core.verdict import Verdict
from formats.records import Body
from protocol.messages import Group, Source, TraceId
from tests.simulation.coordinator import SimCoordinator
from tests.simulation.network import MS, Link, S, Scheduler
from tests.simulation.node import SimNode
from tests.simulation.oracle import Fired, Oracle, OracleError, World
from tests.simulation.pool import PoolConfig
from tests.simulation.traffic import Call, Request, Traffic

__all__ = ["OracleError", "Simulator"]

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
    world: World = field(init=False)
    oracle: Oracle = field(init=False)
    log_lines: list[str] = field(default_factory=list)
    verdicts: dict[TraceId, list[Verdict]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.scheduler = Scheduler()
        self.world = World(self.scheduler)
        self.oracle = Oracle(self)
        self.coordinator = SimCoordinator(
            self.scheduler,
            self.rng,
            self.coordinator_config,
            self.log,
            self.world,
            self._on_verdict,
            self.oracle.on_durable,
        )
        self.coordinator.after_step = self.oracle.step
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
            self.world,
            self.coordinator.snapshots,
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
        node.exit_client(client)
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
            client = self.traffic.pick_client(at)
            self.world.fire(Fired(group, laterals, node, self.scheduler.now_ns, client.number))
            self.log(node, f"fires {name} for {trace.hex()[-8:]}")
            at.pool.trigger(client, trace, name, at.mono_ns(), why="test", laterals=laterals)
            at.look_after(MS // 2)
        return group

    def fire_by_node(self, node: str, trace: TraceId, name: str = "n") -> None:
        """The kernel of the node fires, or the node itself: no process of it."""
        at = self.nodes[node]
        if at.core is not None:
            group = Group(name, trace)
            self.world.fire(Fired(group, (), node, self.scheduler.now_ns))
            self.log(node, f"fires {name} by itself for {trace.hex()[-8:]}")
            now_ns = at.mono_ns()
            fired = LocalTrigger(NO_CLIENT, now_ns, name, trace, (), "test", Source.NODE)
            at.core.on_dataplane([fired], now_ns)
            at.look_after(0)

    # ------------------------------------------------------------- truth

    @property
    def fired(self) -> list[Fired]:
        return self.world.fired

    @property
    def is_scarce(self) -> bool:
        """Whether the coordinator may close traces before their time, for want of room."""
        config, usual = self.coordinator_config, CoordinatorConfig()
        return config.traces_max < usual.traces_max or config.evidence_max < usual.evidence_max

    @property
    def earliest_close_ns(self) -> int:
        """How soon after a firing its trace may be closed."""
        return 0 if self.is_scarce else self.coordinator_config.linger_ns

    def requests_of(self, trace: TraceId) -> list[Request]:
        return self.traffic.by_trace.get(trace, [])

    def verdict(self, trace: TraceId) -> Verdict | None:
        kept = self.coordinator.store.traces.get(trace)
        return None if kept is None else kept.verdict

    def kind(self, trace: TraceId) -> str:
        verdict = self.verdict(trace)
        return "none" if verdict is None else verdict.kind.value

    def delivered(self, trace: TraceId) -> dict[str, Counter[tuple[int, int, Body]]]:
        """What the store has of a trace: by node, (client, handle, record)."""
        return self.oracle.delivered(trace)

    def missing(self, trace: TraceId, begun_before_ns: int) -> list[str]:
        """What was written for the trace and is not in the store, in words."""
        return self.oracle.missing(trace, begun_before_ns)

    def _on_verdict(self, trace: TraceId, verdict: Verdict) -> None:
        reasons = "; ".join(f"{r.node} {r.kind.value}: {r.detail}" for r in verdict.reasons)
        self.log(
            "coordinator",
            f"verdict {verdict.version} of {trace.hex()[-8:]}: {verdict.kind.value} {reasons}",
        )
        self.oracle.on_verdict(trace, verdict)
        self.verdicts.setdefault(trace, []).append(verdict)

    # ------------------------------------------------------------ checks

    def settle(self, seconds: float = 60.0, window: float = 10.0) -> None:
        """Run until all is said, and check that nobody says anything more."""
        self.run(seconds)
        before = self.messages()
        self.run(window)
        after = self.messages()
        if after != before:
            raise self.oracle.fail(f"still talking after {seconds} s: {before} to {after} messages")

    def messages(self) -> Mapping[str, int]:
        """What each node said and was told, but for the clock probes."""
        return {name: node.messages for name, node in self.nodes.items()}

    def check(self) -> None:
        """All promises, once all is quiet."""
        self.oracle.check()
