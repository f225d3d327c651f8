# SPDX-License-Identifier: Apache-2.0
"""Random clusters, traffic and faults, each from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from appliance.core.node import NodeConfig
from coordinator.core.policy import policy_of
from protocol.messages import NO_POLICY, TraceId
from protocol.versions import OURS, Versions
from tests.simulation.conditions import WEIGHTS, drawn
from tests.simulation.network import MS, Link, S
from tests.simulation.node import SimNode
from tests.simulation.pool import PoolConfig
from tests.simulation.simulator import QUICK, Simulator
from tests.simulation.traffic import Call, Request

BUSY_S = 4.0
"""Seconds of traffic and faults."""

DROPPED_S = 5.0
"""So long after everybody is back, all have heard what was given up."""

NEVER_NS = 10**15

WORK_TOGETHER = (
    Versions(OURS.oldest - 1, OURS.oldest),
    Versions(OURS.oldest, OURS.oldest, OURS.features),
    OURS,
    Versions(OURS.oldest, OURS.newest + 1, OURS.features),
)
"""What daemons speak that are upgraded one by one: older ones, ours, newer ones."""

ABANDONS = PoolConfig(store_bytes=4 * 32 * 2048)


class Schedule:
    """One random run: build it, run it, check it."""

    def __init__(self, seed: int, *, trace_log: bool = False) -> None:
        # Its own dice: what is planned must not depend on how the run goes.
        self.rng = random.Random(f"schedule {seed}")
        self.conditions, config = drawn(seed, QUICK)
        self.sim = Simulator(seed, config, trace_log=trace_log)
        self.names = [f"n{i}" for i in range(self.rng.randint(2, 6))]
        self._recent: list[TraceId] = []
        self._payloads: tuple[int, ...] = (0, 50, 300, 900)

    def run(self) -> None:
        rng, sim = self.rng, self.sim
        self._add_nodes()
        self.conditions.apply(sim, BUSY_S)
        if rng.random() < 0.2:
            sim.coordinator.upgrade(rng.choice(WORK_TOGETHER))
            for node in sim.nodes.values():
                node.upgrade(rng.choice(WORK_TOGETHER))
        sim.coordinator.store_latency_ns = rng.choice((0, MS, 5 * MS, 100 * MS))
        sim.run(0.5)
        for _ in range(rng.randint(5, 25)):
            self._at(self._request)
        for _ in range(rng.choice((0, 1, 2, 4, 8))):
            self._at(rng.choice(self._faults()))
        sim.run(BUSY_S + 0.5)
        self._heal()
        sim.run(DROPPED_S)
        sim.oracle.check_dropped()
        sim.settle(45)
        sim.check()
        sim.oracle.check_rest()

    # -------------------------------------------------------------- plan

    def _at(self, action: Callable[[], None]) -> None:
        self.sim.scheduler.after(int(self.rng.uniform(0, BUSY_S) * S), action)

    def _add_nodes(self) -> None:
        rng = self.rng
        pool = rng.choice(
            (
                PoolConfig(),
                # Evicts after some dozen requests.
                PoolConfig(
                    pool_bytes=rng.randint(12, 40) * 2048,
                    segment_bytes=2048,
                    stock_segments=2,
                ),
                # Abandons. A quarter of the store has room for the marks of all traces.
                ABANDONS,
                # Runs out of segments.
                PoolConfig(pool_bytes=4 << 10, segment_bytes=1024, stock_segments=1),
            )
        )
        if pool is ABANDONS:
            self._payloads = (300, 5000, 20_000)
        config = NodeConfig(
            "",
            limits=self.conditions.limits,
            report_bytes_per_s=rng.choice((None, None, 20_000, 100_000)),
            abandon_grace_ns=rng.choice((1, 100 * MS, 500 * MS)),
            report_burst_bytes=1000,
            chunk_bytes=rng.choice((100, 1000, 64 << 10)),
            triggered_ttl_ns=10 * S,
            policies=WEIGHTS if "weights" in self.conditions else {},
        )
        # Each node on its own: large pools are searched for long, small ones at once.
        searches_ns = rng.choice(((0,), (0, MS, 20 * MS), (20 * MS, 300 * MS, 3 * S)))
        for name in self.names:
            link = Link(
                latency_ns=rng.choice((MS // 10, MS, 20 * MS)),
                jitter_ns=rng.choice((1, MS, 20 * MS)),
                bytes_per_s=rng.choice((None, None, 50_000)),
            )
            offset_ns = rng.choice((0, 0, rng.randint(-S, S), rng.randint(-3600 * S, 3600 * S)))
            self.sim.add_node(
                name,
                config,
                replace(pool, search_ns=rng.choice(searches_ns)),
                link,
                clients=rng.randint(1, 2),
                clock_offset_ns=offset_ns,
            )

    def _tree(self, depth: int) -> Call:
        rng = self.rng
        calls = []
        if depth < 4:
            calls = [self._tree(depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        refused_at = self.conditions.refused_at(self.sim) if depth else ""
        unheard_at, arrives = self.conditions.unheard_at(self.sim) if depth else ("", False)
        return Call(
            rng.choice(self.names),
            calls,
            refused_at=refused_at,
            unheard_at=unheard_at,
            arrives=arrives,
            concurrent=rng.random() < 0.5,
            answers=rng.random() < 0.9,
            work_ns=rng.choice((MS // 10, MS, 50 * MS)),
            payload_bytes=rng.choice(self._payloads),
        )

    def _request(self) -> None:
        rng, sim = self.rng, self.sim
        root = self._tree(0)
        if rng.random() < 0.03:
            root.work_ns = NEVER_NS  # a stream that never ends
        request = sim.request(root)
        self._recent.append(request.trace)
        if rng.random() < 0.6:
            sim.scheduler.after(
                rng.choice((0, 2 * MS, 20 * MS, 300 * MS, 2 * S)), lambda: self._fire(request)
            )
        if rng.random() < 0.1:
            again = Call(root.node, [], payload_bytes=100)
            delay_ns = rng.choice((100 * MS, S, 3 * S))
            sim.scheduler.after(delay_ns, lambda: self._again(request, again))

    def _again(self, request: Request, root: Call) -> None:
        self.sim.request(root, request.trace)

    def _fire(self, request: Request) -> None:
        if not request.visits:
            return
        rng = self.rng
        node = rng.choice(request.visits).node
        laterals: tuple[TraceId, ...] = ()
        if rng.random() < 0.2:
            laterals = tuple(rng.sample(self._recent, min(len(self._recent), rng.randint(1, 3))))
            laterals = tuple(t for t in laterals if t != request.trace)
        self.sim.fire(node, request.trace, rng.choice(("ta", "tb")), laterals)
        if rng.random() < 0.15:
            other = rng.choice(request.visits).node
            self.sim.fire(other, request.trace, "tc")
        if rng.random() < 0.1:
            self.sim.fire_by_node(rng.choice(request.visits).node, request.trace)

    # ------------------------------------------------------------ faults

    def _node(self) -> SimNode:
        return self.sim.nodes[self.rng.choice(self.names)]

    def _faults(self) -> list[Callable[[], None]]:
        return [
            self._cut,
            self._partition,
            self._slow,
            self._kill_daemon,
            self._lose_store,
            self._kill_client,
            self._kill_coordinator,
            self._step_clock,
            self._die,
            self._change_policy,
            self._upgrade,
        ]

    def _cut(self) -> None:
        notices = (0, 0, 300 * MS, 2 * S)
        self._node().cut(
            node_notices_ns=self.rng.choice(notices),
            coordinator_notices_ns=self.rng.choice(notices),
        )

    def _partition(self) -> None:
        node = self._node()
        node.partition(coordinator_notices_ns=self.rng.choice((0, 500 * MS)))
        self.sim.scheduler.after(self.rng.choice((100 * MS, 3 * S, 10 * S)), node.heal)

    def _slow(self) -> None:
        self._node().slow_down(self.rng.choice((100 * MS, 700 * MS, 3 * S)))

    def _kill_daemon(self) -> None:
        node = self._node()
        node.kill_daemon()
        self.sim.scheduler.after(self.rng.choice((50 * MS, 500 * MS, 3 * S)), node.start)

    def _lose_store(self) -> None:
        node = self._node()
        node.lose_store()
        self.sim.scheduler.after(self.rng.choice((50 * MS, 500 * MS, 3 * S)), node.start)

    def _kill_client(self) -> None:
        node = self._node()
        if not node.dead:
            self.sim.kill_client(node)

    def _kill_coordinator(self) -> None:
        self.sim.coordinator.kill()
        delay_ns = self.rng.choice((50 * MS, 500 * MS, 3 * S))
        self.sim.scheduler.after(delay_ns, self.sim.coordinator.start)

    def _step_clock(self) -> None:
        limit_ns = self.rng.choice((10 * MS, S, 3600 * S))
        self._node().step_clock(self.rng.randint(-limit_ns, limit_ns))

    def _change_policy(self) -> None:
        threshold = self.rng.choice((None, 0, 1 << 60))
        self.sim.coordinator.set_policy(NO_POLICY if threshold is None else policy_of(threshold))

    def _upgrade(self) -> None:
        """Of the coordinator or a node: to a newer one, or back."""
        versions = self.rng.choice(WORK_TOGETHER)
        if self.rng.random() < 0.5:
            self.sim.coordinator.upgrade(versions)
        else:
            self._node().upgrade(versions)

    def _die(self) -> None:
        if self.rng.random() < 0.3:
            self._node().die()

    def _heal(self) -> None:
        self.sim.coordinator.start()
        for node in self.sim.nodes.values():
            node.link.slow_ns = 0
            node.heal()
            node.start()


def run_at(sim: Simulator, seconds: float, action: Callable[[], None]) -> None:
    """Do something so long from now."""
    sim.scheduler.after(int(seconds * S), action)


def run_schedule(seed: int, *, trace_log: bool = False) -> Simulator:
    """Run one; OracleError, or whatever a core raised, if a promise is broken."""
    schedule = Schedule(seed, trace_log=trace_log)
    schedule.run()
    return schedule.sim
