# SPDX-License-Identifier: Apache-2.0
"""A node in virtual time: what its shell does, without one.

Its daemon may crash and come back (its pool, log and report store remain, as in the fd store), its
machine may die for good, its clock may be off or step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from appliance.core.node import NodeConfig, NodeCore
from appliance.core.snapshot import TRACES_MAX
from formats.records import Body
from protocol.hashing import RECORD_ALL
from protocol.messages import (
    NO_POLICY,
    ClockProbe,
    ClockReply,
    CoordinatorMessage,
    NodeMessage,
    Policy,
    Refused,
    SliceChunk,
    SliceReply,
    Snapshot,
    Welcome,
)
from protocol.versions import OURS, Feature, Versions
from tests.simulation.network import EPOCH_NS, MS, Link, Log, S, Scheduler
from tests.simulation.oracle.choices import watch_node
from tests.simulation.oracle.limits import watch_limits
from tests.simulation.oracle.record import WatchedPool, World
from tests.simulation.oracle.snapshots import SnapshotRecord, watch_snapshots
from tests.simulation.pool import ClientModel, Handle, PoolConfig, PoolModel
from tests.simulation.stream import Stream

if TYPE_CHECKING:
    from tests.simulation.coordinator import SimCoordinator

REDIAL_NS = 250 * MS
SLICES_IDLE_NS = S
"""How long a Slices stream stays open without a use: its credit is others' then."""


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
    world: World
    snapshots: SnapshotRecord = field(default_factory=SnapshotRecord)
    addresses: tuple[str, ...] = ()
    mono_offset_ns: int = 0
    drift_ppm: int = 0
    """By how much its monotonic clock, and its ticks, are too fast."""
    clock_offset_ns: int = 0
    incarnations: int = 0
    incarnation: int = 0
    dead: bool = False
    died_ns: int | None = None
    duplicate: bool = False
    percentage_threshold: int = RECORD_ALL
    """What its processes record by its own configuration."""
    obeys: bool = False
    """Whether they go by that, and by what the coordinator says; else they record all."""
    notices_ns: int = 50 * MS
    """How soon it looks after what is written to a trace that it has collected."""
    versions: Versions = OURS
    pool: PoolModel = field(init=False)
    core: NodeCore | None = None
    clients: list[ClientModel] = field(default_factory=list)
    control: Stream | None = None
    slices: Stream | None = None
    slices_connects: int = 0
    refusals: list[str] = field(default_factory=list)
    messages: int = 0
    report_bytes: int = 0
    store_used_max: int = 0
    priority_seed: int = 0
    """By what it ranks groups: as it was told, or as its configuration says."""
    kept_seed: int = 0
    """What it was told, kept like the policy; 0: nothing yet."""
    policy: Policy = NO_POLICY
    """What it records by, kept over restarts of the daemon like the report store."""
    _slices_used_ns: int = 0
    _looks_at_ns: int | None = None
    _looks: int = 0
    _redialing: bool = False
    _paused_to_ns: int = 0
    _waiting: deque[Callable[[], None]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.pool = PoolModel(self.pool_config, self.name)
        self.set_clock()

    # ------------------------------------------------------------- clocks

    def mono_ns(self) -> int:
        drift_ns = self.scheduler.now_ns * self.drift_ppm // 1_000_000
        return self.scheduler.now_ns + drift_ns + self.mono_offset_ns

    def real_ns(self) -> int:
        return EPOCH_NS + self.scheduler.now_ns + self.clock_offset_ns

    def set_clock(self) -> None:
        self.pool.clock_pair(self.mono_ns(), self.real_ns())

    def step_clock(self, by_ns: int) -> None:
        self.log(self.name, f"clock steps by {by_ns / 1e9:+.3f} s")
        self.clock_offset_ns += by_ns
        self.set_clock()
        self.look_after(self.notices_ns)

    # ------------------------------------------------------------- life

    def start(self) -> None:
        """Start the daemon; it finds what an earlier one left."""
        if self.dead or self.core is not None:
            return
        self.incarnations += 1
        if self.incarnations > 1:
            self.pool.restart()
        self._set_sampling()
        incarnation = self.incarnations << 32 | self.rng.getrandbits(32)
        self.priority_seed = self.kept_seed or self.config.cluster_seed
        self.core = NodeCore(
            self.config,
            WatchedPool(self.world, self.name, self.pool),
            incarnation,
            self.mono_ns(),
            self.real_ns() - self.mono_ns(),
            self.versions,
            self.policy,
            priority_seed=self.kept_seed,
        )
        watch_node(self.world, self, self.core)
        watch_limits(self.world, self.name, self.core)
        watch_snapshots(self.world, self, self.core, self.snapshots)
        self.incarnation = incarnation
        self.log(self.name, "daemon starts")
        self._dial()
        self.look_after(0)

    def _set_sampling(self) -> None:
        if self.obeys:
            said = self.policy.percentage_threshold
            self.pool.set_sampling(self.percentage_threshold if said is None else said)

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
        self.world.daemon_killed(self.name)
        self.snapshots.lost(self.name)
        self._break_all(coordinator_notices_ns=self.rng.choice((0, MS, 200 * MS)))
        self.core = self.control = self.slices = None

    def lose_store(self) -> None:
        """Kill -9 of backsight-node, and nobody kept its report store."""
        if self.core is None:
            return
        self.kill_daemon()
        self.log(self.name, "report store is lost")
        self.world.store_lost(self.name, [found.trace for found in self.pool.slices()])
        self.pool.lose_store()
        self.policy = NO_POLICY
        self.kept_seed = 0

    def die(self) -> None:
        """The machine is gone for good."""
        self.kill_daemon()
        self.dead = True
        self.died_ns = self.scheduler.now_ns
        self.log(self.name, "machine dies")

    def pause(self, for_ns: int) -> None:
        """Its daemon is stopped, or its machine stands still; processes go on."""
        self.log(self.name, f"stands still for {for_ns / 1e9} s")
        self.world.trouble(self.name)
        self._paused_to_ns = max(self._paused_to_ns, self.scheduler.now_ns + for_ns)

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
        self.slices_connects += 1
        self.core.on_slices_connected(self.mono_ns(), self.slices_connects)
        self.slices.send_up((self.name, self.incarnation, self.slices_connects))

    def _wait(self, action: Callable[[], None]) -> None:
        """While it stands still, what reaches it waits, in order."""
        self._waiting.append(action)
        self.scheduler.at(self._paused_to_ns, self._go_on)

    def _go_on(self) -> None:
        if self._paused_to_ns > self.scheduler.now_ns:
            self.scheduler.at(self._paused_to_ns, self._go_on)  # it stands still for longer
            return
        self._waiting.popleft()()

    def on_broken(self, stream: Stream, core: NodeCore | None) -> None:
        """It notices that a stream is gone, if it is still the one that had it."""
        if self._paused_to_ns > self.scheduler.now_ns or self._waiting:
            self._wait(lambda: self._broken(stream, core))
        else:
            self._broken(stream, core)

    def _broken(self, stream: Stream, core: NodeCore | None) -> None:
        if self.core is None or self.core is not core:
            return
        if stream is self.control:
            self.control = None
            self.core.on_control_lost(self.mono_ns())
            if self.slices is not None:
                self.slices.break_off(coordinator_notices_ns=self.slices.delay_ns())
            self._redial()
        elif stream is self.slices:
            self.slices = None
            self.core.on_slices_lost(self.mono_ns())
            self.scheduler.after(REDIAL_NS, self.pump)

    def cut(self, *, node_notices_ns: int = 0, coordinator_notices_ns: int = 0) -> None:
        """Both connections break; the node may dial again once it notices."""
        self.log(self.name, "connections break")
        self.world.trouble(self.name)
        self._break_all(
            node_notices_ns=node_notices_ns, coordinator_notices_ns=coordinator_notices_ns
        )

    def partition(self, *, coordinator_notices_ns: int = 0) -> None:
        self.log(self.name, "link goes down")
        self.world.trouble(self.name)
        self.link.up = False
        self._break_all(coordinator_notices_ns=coordinator_notices_ns)

    def heal(self) -> None:
        self.log(self.name, "link heals")
        self.link.up = True

    def slow_down(self, by_ns: int) -> None:
        """Each thing that reaches it takes so long from now on."""
        self.log(self.name, f"becomes slow by {by_ns / 1e9} s")
        self.world.trouble(self.name)
        self.link.slow_ns = by_ns

    def on_message(self, stream: Stream, core: NodeCore | None, message: object) -> None:
        """Something was said to the node as it was when the stream began."""
        if self._paused_to_ns > self.scheduler.now_ns or self._waiting:
            self._wait(lambda: self._hear(stream, core, message))
        else:
            self._hear(stream, core, message)

    def _hear(self, stream: Stream, core: NodeCore | None, message: object) -> None:
        if self.core is None or self.core is not core:
            return
        if isinstance(message, SliceReply):
            self.core.on_slice_reply(message, self.mono_ns())
        else:
            if not isinstance(message, ClockProbe):
                self.messages += 1
            self.log(self.name, f"<- {message}")
            if isinstance(message, Policy) and Feature.POLICY not in self.versions.features:
                raise AssertionError(f"{self.name} does not know what a policy is")
            if isinstance(message, Snapshot):
                self.snapshots.ordered(self.name, message)
            if isinstance(message, Welcome):
                self.priority_seed = message.priority_seed or self.config.cluster_seed
            self.core.on_control(cast(CoordinatorMessage, message), self.mono_ns(), self.real_ns())
            if isinstance(message, Refused):
                self.refusals.append(message.reason)
            if self.core.links[0].refused is not None:
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

    def write(self, handle: Handle, thread: int, body: Body) -> bool:
        """A process of it writes a record; False when it was lost."""
        written = self.pool.write(handle, thread, body, self.mono_ns())
        if self.pool.stock_is_low(handle.client):
            self.look_after(MS // 2)
        self._notice()
        return written

    def close(self, handle: Handle, thread: int) -> None:
        """A process of it closes a handle."""
        self.pool.close(handle, thread)
        self._notice()

    def exit_client(self, client: ClientModel) -> None:
        """A process of it dies."""
        self.pool.exit_client(client, self.mono_ns())
        self._notice()

    def _notice(self) -> None:
        """Nobody rings for what is written: who holds slices looks now and then, and else sleeps."""
        if self.pool.holds_slices:
            self.look_after(self.notices_ns)

    def look(self) -> None:
        if self.core is None:
            return
        if self._paused_to_ns > self.scheduler.now_ns:
            self.look_after(self._paused_to_ns - self.scheduler.now_ns)
            return
        now_ns = self.mono_ns()
        self.core.on_clock(now_ns, self.real_ns())
        events = self.pool.poll(now_ns)
        if events:
            self.core.on_dataplane(events, now_ns)
        self.core.on_tick(now_ns)
        self.pump()

    def _look_for_recent(self, core: NodeCore) -> None:
        """For a snapshot; that takes a while, as it is a look at the whole pool."""
        order = core.take_recent_question()
        if order is None:
            return

        def answer() -> None:
            if self.core is core:
                traces = self.pool.recent(self.priority_seed)
                self.snapshots.found(self, order, traces)
                core.on_recent(order, len(traces), traces[:TRACES_MAX], self.mono_ns())
                self.pump()

        self.scheduler.after(self.rng.choice((MS, 20 * MS)), answer)

    def _say(self, control: Stream, message: NodeMessage) -> None:
        if isinstance(message, SliceChunk):
            self.report_bytes += len(message.data)
            control.send_up(message, len(message.data))
        else:
            self.log(self.name, f"-> {message}")
            control.send_up(message)

    def _control_messages(self, core: NodeCore) -> list[NodeMessage]:
        now_ns = self.mono_ns()
        due_ns = core.next_control_ns(now_ns)
        messages = core.take_control(now_ns, self.real_ns())
        # A daemon asks for what is due, and for nothing else.
        assert not messages or (due_ns is not None and due_ns <= now_ns)
        return messages

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
            self._set_sampling()
        self.kept_seed = core.take_priority_seed() or self.kept_seed
        self._look_for_recent(core)
        if self.control is not None:
            for message in self._control_messages(core):
                if not isinstance(message, ClockReply):
                    self.messages += 1
                self._say(self.control, message)
        self._dial_slices()
        if core.wants_slices_connection():
            self._slices_used_ns = now_ns
        elif self.slices is not None and now_ns > self._slices_used_ns + SLICES_IDLE_NS:
            self.slices.break_off(coordinator_notices_ns=self.slices.delay_ns())
        if self.slices is not None:
            due_ns = core.next_chunks_ns(now_ns)
            chunks = core.take_chunks(now_ns)
            assert not chunks or (due_ns is not None and due_ns <= now_ns)
            for chunk in chunks:
                self.report_bytes += len(chunk.data)
                self.messages += 1
                self.slices.send_up(chunk, len(chunk.data))
            # A length that chunks have passed is news for the other stream.
            if self.control is not None:
                for message in self._control_messages(core):
                    self.messages += 1
                    self._say(self.control, message)
        usage = self.pool.store_usage()
        self.store_used_max = max(self.store_used_max, usage.used_bytes)
        assert usage.used_bytes <= usage.capacity_bytes
        times = (core.next_wakeup_ns(now_ns), self.pool.next_search_ns())
        for wakeup_ns in (time for time in times if time is not None):
            # A core that wants to be woken at once, for ever, would never let time pass.
            self.look_after(max(wakeup_ns - now_ns, MS // 10))
