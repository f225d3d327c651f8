# SPDX-License-Identifier: Apache-2.0
"""The coordinator in virtual time: what its shell does, without one.

It may crash and come back with what its store made durable.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

from coordinator.core.config import CoordinatorConfig
from coordinator.core.coordinator import CoordinatorCore
from coordinator.core.records import PutVerdict
from coordinator.core.verdict import Verdict
from protocol.messages import (
    NO_POLICY,
    SNAPSHOT_TRIGGER,
    Abandoned,
    Collect,
    Hello,
    NodeMessage,
    Policy,
    SliceChunk,
    Snapshot,
    TraceId,
    TriggerFired,
)
from protocol.versions import OURS, Versions
from tests.simulation.network import EPOCH_NS, MS, Log, S, Scheduler
from tests.simulation.oracle.choices import watch_coordinator
from tests.simulation.oracle.record import World
from tests.simulation.oracle.snapshots import SnapshotRecord
from tests.simulation.store import MemoryStore
from tests.simulation.stream import Stream

ANY_AGE_NS = 3600 * S
"""Longer than anything runs: a snapshot has all that is in the pools."""


class SimCoordinator:
    """The coordinator, its store, and the coordinator's end of the streams."""

    def __init__(
        self,
        scheduler: Scheduler,
        rng: random.Random,
        config: CoordinatorConfig,
        log: Log,
        world: World,
        on_verdict: Callable[[TraceId, Verdict], None],
        on_durable: Callable[[set[TraceId]], None],
    ) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self.config = config
        self.log = log
        self.world = world
        self.store = MemoryStore(on_verdict, on_durable)
        self.store_latency_ns = 2 * MS
        self.message_ns = 0
        self.kib_ns = 0
        """What it takes of its time for each message, and each KiB of a slice."""
        self.core: CoordinatorCore | None = None
        self.incarnation = 0
        self.streams: dict[int, Stream] = {}
        self.undurable_max = 0
        self.policy = NO_POLICY
        self.versions = OURS
        self.mono_offset_ns = 77 * S
        self.after_step: Callable[[], None] = lambda: None
        self.snapshots = SnapshotRecord()
        self._numbers = 0
        self._wakes_at_ns: int | None = None
        self._waiting: list[tuple[Stream, object]] = []
        self._inbox: deque[tuple[Stream, object]] = deque()
        self._free_ns = 0
        self._disk_free_ns = 0
        self._token = self._told_token = 0
        """Up to which record all is durable, and up to which the core knows."""
        self._says_at_ns: int | None = None

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
        watch_coordinator(self.world, self.core)
        self.world.coordinator_began(put.node for put in nodes)
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
                self._handle(stream, message)
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

    def take_snapshot(self, number: int, bytes_max: int) -> None:
        """An operator has all nodes collect what they have."""
        if self.core is None or self.core.recovering:
            return
        order = Snapshot(number, SNAPSHOT_TRIGGER, ANY_AGE_NS, by="operator")
        state = self.core.snapshots.start(order, bytes_max, self.mono_ns())
        self.log("coordinator", f"takes {state.trigger} of {bytes_max} bytes")
        self.snapshots.bytes_max[state.trigger] = bytes_max
        self.pump()

    def kill(self) -> None:
        """Kill -9: what was not durable is gone, and all connections."""
        if self.core is None:
            return
        self.log("coordinator", "dies")
        self.world.trouble()
        self.snapshots.lost()
        self.core = None
        self.store.crash()
        self.world.all_lost()
        self._inbox.clear()
        self._token = self._told_token = 0
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.break_off()

    def pause(self, for_ns: int) -> None:
        """Its machine stands still."""
        self.log("coordinator", f"stands still for {for_ns / 1e9} s")
        self.world.trouble()
        self._free_ns = max(self._free_ns, self.scheduler.now_ns + for_ns)

    def stop_disk(self, for_ns: int) -> None:
        """The disk is full, or fails: nothing becomes durable, and all is tried again."""
        self.log("coordinator", f"writes nothing for {for_ns / 1e9} s")
        self.world.trouble()
        self._disk_free_ns = max(self._disk_free_ns, self.scheduler.now_ns + for_ns)

    def on_message(self, stream: Stream, message: object) -> None:
        """It has one event loop: what comes while that is busy waits in order."""
        self._inbox.append((stream, message))
        if len(self._inbox) == 1:
            self._serve(self.core)

    def _serve_when_free(self, core: CoordinatorCore | None) -> None:
        self.scheduler.at(self._free_ns, lambda: self._serve(core))

    def _serve(self, core: CoordinatorCore | None) -> None:
        while self.core is core and core is not None and self._inbox:
            if self._free_ns > self.scheduler.now_ns:
                self._serve_when_free(core)
                return
            self._say_durable(core)
            stream, message = self._inbox[0]
            if stream.number in self.streams:
                kib = len(message.data) // 1024 if isinstance(message, SliceChunk) else 0
                self._free_ns = self.scheduler.now_ns + self.message_ns + kib * self.kib_ns
                self._handle(stream, message)
            if self._inbox:
                self._inbox.popleft()

    def _handle(self, stream: Stream, message: object) -> None:
        assert self.core is not None
        if self.core.recovering:
            self._waiting.append((stream, message))
            return
        now_ns = self.mono_ns()
        if stream.kind == "control":
            if not stream.accepted:
                stream.accepted = True
                assert isinstance(message, Hello)
                name = stream.node.name
                refused = self.core.on_node_connected(stream.number, message, name, now_ns)
                if refused is None:
                    self.world.node_connected(name, stream.number)
            else:
                if isinstance(message, Abandoned):
                    self.world.heard_given_up(message.group)
                elif isinstance(message, TriggerFired):
                    self.world.heard_fired(message.group)
                self.core.on_node_message(
                    stream.number, cast(NodeMessage, message), now_ns, self.real_ns()
                )
        elif not stream.accepted:
            stream.accepted = True
            assert isinstance(message, tuple)
            node, incarnation, number = message
            self.core.on_slices_connected(stream.number, node, incarnation, now_ns, number)
        else:
            assert isinstance(message, SliceChunk)
            self.core.on_chunk(stream.number, message, now_ns)
        self.pump()

    def on_broken(self, stream: Stream, core: CoordinatorCore | None) -> None:
        self.streams.pop(stream.number, None)
        self.world.node_lost(stream.node.name, stream.number)
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
            self.store.write(write, self.scheduler.now_ns)
            if isinstance(write.record, PutVerdict):
                judged = (write.record.trace, write.record.verdict.version)
                self.world.judged_ns[judged] = self.scheduler.now_ns
            durable_ns = max(self._disk_free_ns, self.scheduler.now_ns + self.store_latency_ns)
            self.scheduler.at(durable_ns, partial(self._durable, core, write.token))
        self.undurable_max = max(self.undurable_max, self.store.undurable_bytes)
        self.after_step()
        for number, messages in core.take_control(self.mono_ns()):
            stream = self.streams.get(number)
            if stream is None:
                continue
            for message in messages:
                if isinstance(message, Collect):
                    self.world.asked |= {(stream.node.name, trace) for trace in message.traces}
                stream.send_down(message)
        for number, reply in core.take_slice_replies(self.mono_ns()):
            stream = self.streams.get(number)
            if stream is not None:
                stream.send_down(reply)
        wakeup_ns = core.next_wakeup_ns(self.mono_ns())
        if wakeup_ns is not None:
            due_ns = self.scheduler.now_ns + max(wakeup_ns - self.mono_ns(), MS // 10)
            self._wake_at(due_ns)

    def _durable(self, core: CoordinatorCore, token: int) -> None:
        if self.core is core:
            self._token = token
            self._say_durable(core)

    def _say_durable(self, core: CoordinatorCore) -> None:
        """In its turn: a coordinator that is busy hears of it before the next message."""
        if self.core is not core or self._token == self._told_token:
            return
        now_ns = self.scheduler.now_ns
        when_ns = max(self._disk_free_ns, self._free_ns)
        if when_ns > now_ns:
            if self._says_at_ns is None:
                self._says_at_ns = when_ns
                self.scheduler.at(when_ns, lambda: self._say_again(core))
            return
        self._told_token = self._token
        self.store.make_durable(self._token, now_ns)
        core.on_durable(self._token, self.mono_ns())
        self.pump()

    def _say_again(self, core: CoordinatorCore) -> None:
        self._says_at_ns = None
        self._say_durable(core)

    def _wake(self, due_ns: int) -> None:
        if self._wakes_at_ns != due_ns:
            return  # an earlier one has seen to it
        self._wakes_at_ns = None
        if self.core is None:
            return
        if self._free_ns > self.scheduler.now_ns:
            self._wake_at(self._free_ns)
            return
        self.core.on_tick(self.mono_ns())
        self.pump()

    def _wake_at(self, due_ns: int) -> None:
        if self._wakes_at_ns is None or due_ns < self._wakes_at_ns:
            self._wakes_at_ns = due_ns
            self.scheduler.at(due_ns, lambda: self._wake(due_ns))
