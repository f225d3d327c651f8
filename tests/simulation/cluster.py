# SPDX-License-Identifier: Apache-2.0
"""Nodes and a coordinator in virtual time: what the shells do, without them.

A node's daemon may crash and come back (its pool, log and report store remain,
as in the fd store), its machine may die for good, its clock may be off or step.
The coordinator may crash and come back with what its store made durable.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from appliance.core.node import NodeConfig, NodeCore
from coordinator.core.config import CoordinatorConfig
from coordinator.core.coordinator import CoordinatorCore
from coordinator.core.verdict import Verdict
from protocol.messages import (
    NO_POLICY,
    ClockProbe,
    ClockReply,
    CoordinatorMessage,
    Hello,
    NodeMessage,
    Policy,
    Refused,
    SliceChunk,
    SliceFlags,
    SliceReply,
    SliceStatus,
    TraceId,
)
from protocol.versions import OURS, Feature, Versions
from tests.simulation.network import MS, Direction, Link, S, Scheduler
from tests.simulation.pool import ClientModel, PoolConfig, PoolModel
from tests.simulation.store import MemoryStore

EPOCH_NS = 1_700_000_000 * S
REDIAL_NS = 250 * MS
SLICES_IDLE_NS = S
"""How long a Slices stream stays open without a use: its credit is others' then."""

Log = Callable[[str, str], None]


class Stream:
    """One bidirectional stream between a node and the coordinator."""

    def __init__(self, node: SimNode, coordinator: SimCoordinator, kind: str) -> None:
        scheduler = node.scheduler
        self.node = node
        self.coordinator = coordinator
        self.kind = kind
        self.number = 0
        self.accepted = False
        self._core = node.core
        self._peer = coordinator.core
        self.up = Direction(scheduler, self._arrive_up)
        self.down = Direction(scheduler, self._arrive_down)
        coordinator.add_stream(self)

    def delay_ns(self) -> int:
        link = self.node.link
        jitter = self.node.rng.randrange(link.jitter_ns + 1) if link.jitter_ns else 0
        return link.latency_ns + jitter + link.stream_delay_ns.get(self.kind, 0)

    def send_up(self, message: object, size: int = 0) -> None:
        rate = self.node.link.bytes_per_s if self.kind == "slices" else None
        # What opens a stream is said once, by definition.
        if self.node.duplicate and not isinstance(message, Hello | tuple):
            self.up.send(message, self.delay_ns(), size, rate)
        self.up.send(message, self.delay_ns(), size, rate)

    def send_down(self, message: object) -> None:
        if self.node.duplicate and isinstance(message, SliceReply):
            # Credit adds up: it is no fact that may be repeated.
            self.down.send(replace(message, credit_bytes=0), self.delay_ns())
        elif self.node.duplicate:
            self.down.send(message, self.delay_ns())
        self.down.send(message, self.delay_ns() + self.node.link.slow_ns)

    def _arrive_up(self, message: object) -> None:
        if self.coordinator.core is self._peer and self._peer is not None:
            self.coordinator.on_message(self, message)

    def _arrive_down(self, message: object) -> None:
        if self.node.core is self._core and self._core is not None:
            self.node.on_message(self, message)

    def break_off(self, *, node_notices_ns: int = 0, coordinator_notices_ns: int = 0) -> None:
        """The connection is gone: all that is in flight is lost.

        Until a side notices, the stream is half-open to it: what it sends is
        lost too.
        """
        if not self.up.open:
            return
        self.up.open = self.down.open = False
        scheduler = self.node.scheduler
        scheduler.after(node_notices_ns, lambda: self.node.on_broken(self, self._core))
        scheduler.after(
            coordinator_notices_ns, lambda: self.coordinator.on_broken(self, self._peer)
        )


@dataclass(slots=True, eq=False)
class SimNode:
    """A node: a data plane, processes that write into it, and a daemon."""

    scheduler: Scheduler
    rng: random.Random
    name: str
    config: NodeConfig
    pool_config: PoolConfig
    link: Link
    coordinator: SimCoordinator
    log: Log
    addresses: tuple[str, ...] = ()
    mono_offset_ns: int = 0
    clock_offset_ns: int = 0
    incarnations: int = 0
    incarnation: int = 0
    dead: bool = False
    duplicate: bool = False
    poll_ns: int = 50 * MS
    versions: Versions = OURS
    pool: PoolModel = field(init=False)
    core: NodeCore | None = None
    clients: list[ClientModel] = field(default_factory=list)
    control: Stream | None = None
    slices: Stream | None = None
    refusals: list[str] = field(default_factory=list)
    messages: int = 0
    report_bytes: int = 0
    store_used_max: int = 0
    restarts: int = 0
    lost_slices: set[TraceId] = field(default_factory=set)
    flags_said: dict[TraceId, SliceFlags] = field(default_factory=dict)
    """All that it ever said of a trace: its slice may be gone since."""
    policy: Policy = NO_POLICY
    """What it records by, kept over restarts of the daemon like the report store."""
    _slices_used_ns: int = 0
    _looks_at_ns: int | None = None
    _looks: int = 0
    _redialing: bool = False

    def __post_init__(self) -> None:
        self.pool = PoolModel(self.pool_config, self.name)
        self.set_clock()

    # ------------------------------------------------------------- clocks

    def mono_ns(self) -> int:
        return self.scheduler.now_ns + self.mono_offset_ns

    def real_ns(self) -> int:
        return EPOCH_NS + self.scheduler.now_ns + self.clock_offset_ns

    def set_clock(self) -> None:
        self.pool.clock_pair(self.mono_ns(), self.real_ns())

    def step_clock(self, by_ns: int) -> None:
        self.log(self.name, f"clock steps by {by_ns / 1e9:+.3f} s")
        self.clock_offset_ns += by_ns
        self.set_clock()

    # ------------------------------------------------------------- life

    def start(self) -> None:
        """Start the daemon; it finds what an earlier one left."""
        if self.dead or self.core is not None:
            return
        self.incarnations += 1
        if self.incarnations > 1:
            self.pool.restart()
        incarnation = self.incarnations << 32 | self.rng.getrandbits(32)
        self.core = NodeCore(
            self.config,
            self.pool,
            incarnation,
            self.mono_ns(),
            self.real_ns() - self.mono_ns(),
            self.versions,
            self.policy,
        )
        self.incarnation = incarnation
        self.log(self.name, "daemon starts")
        self._dial()
        self.look_after(0)
        self._poll_loop(self.core)

    def upgrade(self, versions: Versions) -> None:
        """Another backsight-node, newer or older, goes on where this one was killed."""
        self.log(self.name, f"speaks {versions} from now on")
        self.kill_daemon()
        self.versions = versions
        self.start()

    def kill_daemon(self) -> None:
        """Kill -9 of backsight-node."""
        if self.core is None:
            return
        self.log(self.name, "daemon dies")
        self.restarts += 1
        self._break_all(coordinator_notices_ns=self.rng.choice((0, MS, 200 * MS)))
        self.core = self.control = self.slices = None

    def lose_store(self) -> None:
        """Kill -9 of backsight-node, and nobody kept its report store."""
        if self.core is None:
            return
        self.kill_daemon()
        self.log(self.name, "report store is lost")
        self.lost_slices |= {found.trace for found in self.pool.slices()}
        self.pool.lose_store()
        self.policy = NO_POLICY

    def die(self) -> None:
        """The machine is gone for good."""
        self.kill_daemon()
        self.dead = True
        self.log(self.name, "machine dies")

    def _break_all(self, *, node_notices_ns: int = 0, coordinator_notices_ns: int = 0) -> None:
        for stream in (self.control, self.slices):
            if stream is not None:
                stream.break_off(
                    node_notices_ns=node_notices_ns, coordinator_notices_ns=coordinator_notices_ns
                )

    # ---------------------------------------------------------- network

    def _dial(self) -> None:
        """Try to open the Control stream until it is there."""
        if self.core is None or self.control is not None:
            return
        if not self.link.up or self.coordinator.core is None:
            self._redial()
            return
        core = self.core
        self.control = Stream(self, self.coordinator, "control")
        core.on_control_connected(self.mono_ns(), self.addresses)
        self.pump()

    def _redial(self) -> None:
        if self._redialing:
            return
        self._redialing = True

        def dial() -> None:
            self._redialing = False
            self._dial()

        self.scheduler.after(REDIAL_NS, dial)

    def _dial_slices(self) -> None:
        if self.core is None or self.slices is not None or not self.link.up:
            return
        if self.coordinator.core is None or not self.core.wants_slices_connection():
            return
        self.slices = Stream(self, self.coordinator, "slices")
        self.core.on_slices_connected(self.mono_ns())
        self.slices.send_up((self.name, self.incarnation))

    def on_broken(self, stream: Stream, core: NodeCore | None) -> None:
        if self.core is None or self.core is not core:
            return
        if stream is self.control:
            self.control = None
            self.core.on_control_lost(self.mono_ns())
            self._redial()
        elif stream is self.slices:
            self.slices = None
            self.core.on_slices_lost(self.mono_ns())
            self.scheduler.after(REDIAL_NS, self.pump)

    def cut(self, *, node_notices_ns: int = 0, coordinator_notices_ns: int = 0) -> None:
        """Both connections break; the node may dial again once it notices."""
        self.log(self.name, "connections break")
        self._break_all(
            node_notices_ns=node_notices_ns, coordinator_notices_ns=coordinator_notices_ns
        )

    def partition(self, *, coordinator_notices_ns: int = 0) -> None:
        self.log(self.name, "link goes down")
        self.link.up = False
        self._break_all(coordinator_notices_ns=coordinator_notices_ns)

    def heal(self) -> None:
        self.log(self.name, "link heals")
        self.link.up = True

    def on_message(self, stream: Stream, message: object) -> None:
        assert self.core is not None
        if isinstance(message, SliceReply):
            self.core.on_slice_reply(message, self.mono_ns())
        else:
            if not isinstance(message, ClockProbe):
                self.messages += 1
            self.log(self.name, f"<- {message}")
            if isinstance(message, Policy) and Feature.POLICY not in self.versions.features:
                raise AssertionError(f"{self.name} does not know what a policy is")
            self.core.on_control(cast(CoordinatorMessage, message), self.mono_ns(), self.real_ns())
            if isinstance(message, Refused):
                self.refusals.append(message.reason)
            if self.core.refused is not None:
                stream.break_off()
        self.look_after(0)

    # ------------------------------------------------------------- work

    def look_after(self, delay_ns: int) -> None:
        """Have the daemon look at its data plane and its core, once."""
        due_ns = self.scheduler.now_ns + delay_ns
        if self._looks_at_ns is not None and self._looks_at_ns <= due_ns:
            return
        self._looks_at_ns = due_ns
        self._looks += 1
        number = self._looks

        def look() -> None:
            if number == self._looks:
                self._looks_at_ns = None
                self.look()

        self.scheduler.at(due_ns, look)

    def _poll_loop(self, core: NodeCore) -> None:
        if self.core is core:
            self.look()
            self.scheduler.after(self.poll_ns, lambda: self._poll_loop(core))

    def look(self) -> None:
        if self.core is None:
            return
        now_ns = self.mono_ns()
        self.core.on_clock(now_ns, self.real_ns())
        events = self.pool.poll(now_ns)
        if events:
            self.core.on_dataplane(events, now_ns)
        self.core.on_tick(now_ns)
        self.pump()

    def _say(self, control: Stream, message: NodeMessage) -> None:
        self.log(self.name, f"-> {message}")
        if isinstance(message, SliceStatus):
            before = self.flags_said.get(message.trace, SliceFlags.NONE)
            self.flags_said[message.trace] = before | message.flags
        control.send_up(message)

    def pump(self) -> None:
        """Carry out what the core wants."""
        core = self.core
        if core is None:
            return
        now_ns = self.mono_ns()
        policy = core.take_policy()
        if policy is not None:
            self.log(self.name, f"records by policy {policy.number:x}")
            self.policy = policy
        if self.control is not None:
            for message in core.take_control(self.real_ns()):
                if not isinstance(message, ClockReply):
                    self.messages += 1
                self._say(self.control, message)
        self._dial_slices()
        if core.wants_slices_connection():
            self._slices_used_ns = now_ns
        elif self.slices is not None and now_ns > self._slices_used_ns + SLICES_IDLE_NS:
            self.slices.break_off(coordinator_notices_ns=self.slices.delay_ns())
        if self.slices is not None:
            for chunk in core.take_chunks(now_ns):
                self.report_bytes += len(chunk.data)
                self.messages += 1
                self.slices.send_up(chunk, len(chunk.data))
            # A length that chunks have passed is news for the other stream.
            if self.control is not None:
                for message in core.take_control(self.real_ns()):
                    self.messages += 1
                    self._say(self.control, message)
        usage = self.pool.store_usage()
        self.store_used_max = max(self.store_used_max, usage.used_bytes)
        assert usage.used_bytes <= usage.capacity_bytes
        times = (core.next_wakeup_ns(now_ns), self.pool.next_search_ns())
        for wakeup_ns in (time for time in times if time is not None):
            # A core that wants to be woken at once, for ever, would never let time pass.
            self.look_after(max(wakeup_ns - now_ns, MS // 10))


class SimCoordinator:
    """The coordinator, its store, and the coordinator's end of the streams."""

    def __init__(
        self,
        scheduler: Scheduler,
        rng: random.Random,
        config: CoordinatorConfig,
        log: Log,
        on_verdict: Callable[[TraceId, Verdict], None],
    ) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self.config = config
        self.log = log
        self.store = MemoryStore(on_verdict)
        self.store_latency_ns = 2 * MS
        self.core: CoordinatorCore | None = None
        self.incarnation = 0
        self.streams: dict[int, Stream] = {}
        self.undurable_max = 0
        self.policy = NO_POLICY
        self.versions = OURS
        self.mono_offset_ns = 77 * S
        self._numbers = 0
        self._wakes_at_ns: int | None = None
        self._waiting: list[tuple[Stream, object]] = []

    def mono_ns(self) -> int:
        return self.scheduler.now_ns + self.mono_offset_ns

    def real_ns(self) -> int:
        return EPOCH_NS + self.scheduler.now_ns

    def add_stream(self, stream: Stream) -> None:
        self._numbers += 1
        stream.number = self._numbers
        self.streams[stream.number] = stream

    def start(self) -> None:
        if self.core is not None:
            return
        self.incarnation += 1
        traces, nodes = self.store.recovered()
        self.core = CoordinatorCore(
            self.config,
            self.incarnation,
            traces,
            nodes,
            self.mono_ns(),
            self.versions,
            self.policy,
            self.store.recalled,
        )
        self.log("coordinator", f"starts with {len(traces)} traces")
        self._waiting.clear()
        self._recover(self.core)

    def _recover(self, core: CoordinatorCore) -> None:
        """In pieces, while nodes may come."""
        if self.core is not core:
            return
        for _ in range(self.rng.randint(1, 20)):
            core.recover(self.mono_ns())
        if core.recovering:
            self.scheduler.after(MS, lambda: self._recover(core))
            return
        self.log("coordinator", "has taken up all")
        waiting, self._waiting = self._waiting, []
        for stream, message in waiting:
            if stream.number in self.streams:
                self.on_message(stream, message)
        self.pump()

    def upgrade(self, versions: Versions) -> None:
        """Another backsight-coordinator, newer or older, on the same store."""
        self.log("coordinator", f"speaks {versions} from now on")
        self.kill()
        self.versions = versions
        self.start()

    def set_policy(self, policy: Policy) -> None:
        """The operator changes the file, and has it read again."""
        self.log("coordinator", f"policy {policy.number:x}")
        self.policy = policy
        if self.core is not None:
            self.core.set_policy(policy)
            self.pump()

    def kill(self) -> None:
        """Kill -9: what was not durable is gone, and all connections."""
        if self.core is None:
            return
        self.log("coordinator", "dies")
        self.core = None
        self.store.crash()
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.break_off()

    def on_message(self, stream: Stream, message: object) -> None:
        assert self.core is not None
        if self.core.recovering:
            self._waiting.append((stream, message))
            return
        now_ns = self.mono_ns()
        if stream.kind == "control":
            if not stream.accepted:
                stream.accepted = True
                assert isinstance(message, Hello)
                self.core.on_node_connected(stream.number, message, stream.node.name, now_ns)
            else:
                self.core.on_node_message(
                    stream.number, cast(NodeMessage, message), now_ns, self.real_ns()
                )
        elif not stream.accepted:
            stream.accepted = True
            assert isinstance(message, tuple)
            node, incarnation = message
            self.core.on_slices_connected(stream.number, node, incarnation, now_ns)
        else:
            assert isinstance(message, SliceChunk)
            self.core.on_chunk(stream.number, message, now_ns)
        self.pump()

    def on_broken(self, stream: Stream, core: CoordinatorCore | None) -> None:
        self.streams.pop(stream.number, None)
        if self.core is None or self.core is not core or not stream.accepted:
            return
        if stream.kind == "control":
            self.core.on_node_lost(stream.number, self.mono_ns())
        else:
            self.core.on_slices_lost(stream.number, self.mono_ns())
        self.pump()

    def pump(self) -> None:
        core = self.core
        if core is None:
            return
        for write in core.take_writes():
            self.store.write(write)
            self.scheduler.after(self.store_latency_ns, partial(self._durable, core, write.token))
        self.undurable_max = max(self.undurable_max, self.store.undurable_bytes)
        for number, message in core.take_control():
            stream = self.streams.get(number)
            if stream is not None:
                stream.send_down(message)
        for number, reply in core.take_slice_replies():
            stream = self.streams.get(number)
            if stream is not None:
                stream.send_down(reply)
        wakeup_ns = core.next_wakeup_ns(self.mono_ns())
        if wakeup_ns is not None:
            due_ns = self.scheduler.now_ns + max(wakeup_ns - self.mono_ns(), MS // 10)
            if self._wakes_at_ns is None or due_ns < self._wakes_at_ns:
                self._wakes_at_ns = due_ns
                self.scheduler.at(due_ns, lambda: self._wake(due_ns))

    def _durable(self, core: CoordinatorCore, token: int) -> None:
        if self.core is not core:
            return
        self.store.make_durable(token, self.scheduler.now_ns)
        core.on_durable(token, self.mono_ns())
        self.pump()

    def _wake(self, due_ns: int) -> None:
        if self._wakes_at_ns == due_ns:
            self._wakes_at_ns = None
        if self.core is not None:
            self.core.on_tick(self.mono_ns())
            self.pump()
