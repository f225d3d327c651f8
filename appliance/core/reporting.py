# SPDX-License-Identifier: Apache-2.0
"""What is reported next, and what is given up first.

One queue for each trigger name. Between queues: weighted fair queueing by
bytes (start-time fair queueing: a queue's clock advances by the bytes it sent
over its weight, the slowest clock goes first, and a queue that was empty starts
at the clock of the one served last, so it can neither hoard nor be punished).
Inside a queue: groups that were begun before those that were not, so that new
bytes of a reported slice do not wait behind a backlog; then the priority of the
primary trace, highest first, which is the same on every node.

Each coordinator takes bytes when it can, so what is next is asked for each by itself, and each
has clocks of its own: one that is away neither holds up another nor has a claim to catch up.
Rates and the report store are the node's: what it sends counts to whomever it goes, and what is
given up is chosen of all that there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from appliance.core.abandonment import by_excess
from appliance.core.config import NodeConfig
from appliance.core.groups import HeldGroup, HeldTrace, Share
from counting.by_priority import ByPriority
from counting.token_bucket import TokenBucket


@dataclass(slots=True)
class _Lane:
    """One coordinator's part of a queue."""

    clock: float = 0.0
    begun: ByPriority[HeldGroup] = field(default_factory=ByPriority)
    waiting: ByPriority[HeldGroup] = field(default_factory=ByPriority)
    held: ByPriority[HeldGroup] = field(default_factory=ByPriority)
    backlogged: bool = False

    def put(self, group: HeldGroup, *, unsent: bool, held: bool) -> None:
        """Have a group where it belongs by what there is of it."""
        order = group.order
        self.begun.put(order, group, unsent and group.begun)
        self.waiting.put(order, group, unsent and not group.begun)
        self.held.put(order, group, held)
        # Asked far more often than changed.
        self.backlogged = len(self.begun) > 0 or len(self.waiting) > 0

    def next_group(self) -> HeldGroup:
        return self.begun.first() if len(self.begun) else self.waiting.first()


@dataclass(slots=True)
class _Queue:
    """``lanes``: by shards."""

    name: str
    weight: float
    bucket: TokenBucket | None
    lanes: tuple[_Lane, ...]
    held_bytes: int = 0

    def backwards(self) -> Iterator[HeldGroup]:
        """The groups whose coordinators lack bytes, from the lowest priority on."""
        held = (lane.held.backwards() for lane in self.lanes)
        return heapq.merge(*held, key=lambda group: group.order, reverse=True)


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Groups of one trigger with bytes in the report store, and those bytes, not durable elsewhere."""

    groups: int
    bytes: int


class Reporter:
    """The queues. Whoever changes a trace tells it by refresh(), or a group by place()."""

    def __init__(self, config: NodeConfig, shards: int, now_ns: int) -> None:
        self._config = config
        self._shards = shards
        self._bucket = self._new_bucket(config.report_bytes_per_s, now_ns)
        self._queues: dict[str, _Queue] = {}
        self._clocks = [0.0] * shards

    def reconfigure(self, config: NodeConfig, now_ns: int) -> None:
        """Go on with other weights and rates; nobody may send more at once by it."""
        self._config = config
        self._bucket = self._changed_bucket(self._bucket, config.report_bytes_per_s, now_ns)
        for queue in self._queues.values():
            policy = config.policy(queue.name)
            # Its lead is bytes, which count by its new weight. One that is behind, for a limit
            # that it had, is as one that was empty.
            for clock, lane in zip(self._clocks, queue.lanes, strict=True):
                lead_bytes = max(0.0, lane.clock - clock) * queue.weight
                lane.clock = clock + lead_bytes / policy.weight
            queue.weight = policy.weight
            queue.bucket = self._changed_bucket(queue.bucket, policy.report_bytes_per_s, now_ns)

    def refresh(self, trace: HeldTrace, now_ns: int) -> None:
        """Charge the trace's bytes, and place its groups for which it matters anew."""
        self.charge(trace, now_ns)
        for share in trace.shares:
            self._refresh(trace, share, now_ns)

    def _refresh(self, trace: HeldTrace, share: Share, now_ns: int) -> None:
        unsent, held = trace.is_sendable(share, now_ns), trace.is_lacked(share)
        more_unsent, more_held = unsent - share.unsent, held - share.held
        if not more_unsent and not more_held:
            return
        share.unsent, share.held = unsent, held
        for group in trace.groups:
            if group.shard != share.shard:
                continue
            before = (group.unsent > 0, group.held > 0)
            group.unsent += more_unsent
            group.held += more_held
            if (group.unsent > 0, group.held > 0) != before:
                self.place(group, now_ns)

    def charge(self, trace: HeldTrace, now_ns: int) -> None:
        """Charge a trace's bytes to the first of its groups whose coordinator lacks some.

        To another they would be charged in vain: no bytes go by giving that up.
        """
        if trace.held_bytes <= 0:
            self.uncharge(trace)
            return
        group = next(g for g in trace.groups if trace.is_lacked(g.share(trace)))
        if group.queue != trace.charged_to:
            self.uncharge(trace)
            trace.charged_to = group.queue
        queue = self._queue(group.queue, now_ns)
        queue.held_bytes += trace.held_bytes - trace.charged_bytes
        trace.charged_bytes = trace.held_bytes

    def place(self, group: HeldGroup, now_ns: int) -> None:
        """Put a group where its bytes say that it belongs."""
        lane = self._queue(group.queue, now_ns).lanes[group.shard]
        was_backlogged = lane.backlogged
        lane.put(group, unsent=group.unsent > 0, held=group.held > 0)
        if lane.backlogged and not was_backlogged:
            lane.clock = max(lane.clock, self._clocks[group.shard])

    def rank(self, group: HeldGroup, priority: int, now_ns: int) -> None:
        """Give a group another priority."""
        lane = self._queue(group.queue, now_ns).lanes[group.shard]
        clock = lane.clock
        lane.put(group, unsent=False, held=False)
        group.priority = priority
        self.place(group, now_ns)
        # It was backlogged all the time.
        lane.clock = clock

    def begin(self, group: HeldGroup, now_ns: int) -> None:
        """Bytes of the group were sent: what more there is of it goes first."""
        if not group.begun:
            group.begun = True
            self.place(group, now_ns)

    def uncharge(self, trace: HeldTrace) -> None:
        """Stop charging the trace's bytes: its groups are about to change, or it has none."""
        if trace.charged_bytes:
            self._queues[trace.charged_to].held_bytes -= trace.charged_bytes
            trace.charged_bytes = 0

    def forget(self, group: HeldGroup) -> None:
        """Take a group out of its queue."""
        queue = self._queues.get(group.queue)
        if queue is not None:
            queue.lanes[group.shard].put(group, unsent=False, held=False)

    def forget_queue(self, name: str) -> None:
        """Nothing is of this trigger any more."""
        self._queues.pop(name, None)

    def is_lacking(self, shard: int) -> bool:
        """Whether a coordinator is yet to have bytes that are in the report store."""
        return any(len(queue.lanes[shard].held) for queue in self._queues.values())

    def depths(self) -> dict[str, QueueDepth]:
        """How much each queue holds."""
        return {
            name: QueueDepth(sum(len(lane.held) for lane in queue.lanes), queue.held_bytes)
            for name, queue in self._queues.items()
        }

    def next_trace(self, shard: int, now_ns: int) -> tuple[HeldGroup, HeldTrace] | None:
        """What a coordinator may be sent now, None when nothing waits or no rate allows it."""
        if self._bucket is not None and self._bucket.ready_ns(now_ns) > now_ns:
            return None
        ready = [
            queue
            for queue in self._queues.values()
            if queue.lanes[shard].backlogged
            and (queue.bucket is None or queue.bucket.ready_ns(now_ns) <= now_ns)
        ]
        if not ready:
            return None
        queue = min(ready, key=lambda queue: (queue.lanes[shard].clock, queue.name))
        group = queue.lanes[shard].next_group()
        trace = next(trace for trace in group.traces.values() if group.share(trace).unsent)
        return group, trace

    def sent(self, group: HeldGroup, count: int, now_ns: int) -> None:
        """Charge bytes that were sent for a group."""
        queue = self._queues[group.queue]
        lane = queue.lanes[group.shard]
        self._clocks[group.shard] = max(self._clocks[group.shard], lane.clock)
        lane.clock += count / queue.weight
        if queue.bucket is not None:
            queue.bucket.charge(count, now_ns)
        if self._bucket is not None:
            self._bucket.charge(count, now_ns)

    def ready_ns(self, shard: int, now_ns: int) -> int | None:
        """When the rates allow a coordinator's next chunk; None when nothing waits."""
        times = [
            now_ns if queue.bucket is None else queue.bucket.ready_ns(now_ns)
            for queue in self._queues.values()
            if queue.lanes[shard].backlogged
        ]
        if not times:
            return None
        if self._bucket is None:
            return min(times)
        return max(min(times), self._bucket.ready_ns(now_ns))

    def lowest_group(self, surplus_bytes: int, before_ns: int) -> HeldGroup | None:
        """Whom to abandon so that the store shrinks by surplus_bytes.

        Only a group that came no later than ``before_ns``.
        """
        demands = {name: q.held_bytes for name, q in self._queues.items() if q.held_bytes > 0}
        weights = {name: self._queues[name].weight for name in demands}
        capacity = max(0, sum(demands.values()) - surplus_bytes)
        for name in by_excess(demands, weights, capacity):
            for group in self._queues[name].backwards():
                if group.since_ns <= before_ns:
                    return group
        return None

    def _queue(self, name: str, now_ns: int) -> _Queue:
        queue = self._queues.get(name)
        if queue is None:
            policy = self._config.policy(name)
            bucket = self._new_bucket(policy.report_bytes_per_s, now_ns)
            lanes = tuple(_Lane() for _ in range(self._shards))
            queue = self._queues[name] = _Queue(name, policy.weight, bucket, lanes)
        return queue

    def _new_bucket(self, rate: int | None, now_ns: int) -> TokenBucket | None:
        if rate is None:
            return None
        return TokenBucket(rate, self._config.report_burst_bytes, now_ns)

    def _changed_bucket(
        self, bucket: TokenBucket | None, rate: int | None, now_ns: int
    ) -> TokenBucket | None:
        """The bucket as it is, at another rate; where the limit is new, an empty one."""
        burst = self._config.report_burst_bytes
        if bucket is not None and rate is not None:
            bucket.change(rate, burst, now_ns)
            return bucket
        changed = self._new_bucket(rate, now_ns)
        if changed is not None:
            # Without a limit, more than a burst may just have been sent.
            changed.charge(burst, now_ns)
        return changed
