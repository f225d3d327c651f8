# SPDX-License-Identifier: Apache-2.0
"""One coordinator, as a node's core knows it: its two streams, what it said, what it is owed.

Where groups are sharded over several (protocol.hashing.Shards), a node has a link for each; daemons
have one so far. What is held for a coordinator stands with what the node holds, under its shard:
its groups, and its share of each of their traces (groups.py).
"""

from __future__ import annotations

from appliance.core.config import NodeConfig
from appliance.core.dataplane import DataPlane
from appliance.core.holdings import Holdings
from appliance.core.owed import Owed
from appliance.core.snapshot import SnapshotRuns
from protocol.messages import (
    CLOCK_STEP_NS,
    CONTROL_CHUNK_BYTES_MAX,
    NO_POLICY,
    ClockProbe,
    Hello,
    NodeMessage,
    NodeReport,
    Policy,
    SliceChunk,
    SliceReply,
    TraceId,
    Welcome,
)
from protocol.versions import Agreed, Feature, Incompatible, Versions, check


class Link:
    """See the module. ``owed`` is what this coordinator must hear of."""

    def __init__(
        self,
        shard: int,
        config: NodeConfig,
        dataplane: DataPlane,
        holdings: Holdings,
        incarnation: int,
        versions: Versions,
    ) -> None:
        self.shard = shard
        """Its number among all coordinators: the groups whose primaries hash to it are its."""
        self.owed = Owed(config, holdings, shard)
        self.snapshots = SnapshotRuns()
        """Those that it ordered."""
        self.policy = NO_POLICY
        """What it last said that nodes shall record."""
        self.priority_seed = config.cluster_seed
        """By what it last said that priorities are hashed."""
        self.refused: str | None = None
        """Why the coordinator refused this node, or must not be heard, for the operator."""
        self.agreed: Agreed | None = None
        """What is spoken with the coordinator, since it welcomed this node."""
        self.connected = False
        """There is a Control stream."""
        self.slices_connected = False
        self.slices_number = 0
        """Of the last Slices stream."""
        self.credit_bytes = 0
        self._config = config
        self._dataplane = dataplane
        self._holdings = holdings
        self._policy_is_new = False
        self._seed_is_new = False
        self._status_asked: int | None = None
        self._incarnation = incarnation
        self._versions = versions
        self._hello_due: Hello | None = None
        # Unix time minus CLOCK_MONOTONIC, as far as the coordinator knows.
        self._told_offset_ns: int | None = None

    def recall(self, policy: Policy, priority_seed: int) -> None:
        """What it told an earlier daemon; seed 0: none."""
        self.policy = policy
        self.priority_seed = priority_seed or self._config.cluster_seed

    # --------------------------------------------------------------- control

    def connect(self, addresses: tuple[str, ...]) -> None:
        """A Control stream is there; the coordinator hears who this is, and by which addresses."""
        self._forget()
        self.connected = True
        config = self._config
        self._hello_due = Hello(
            config.node, self._incarnation, addresses, self._versions, config.software
        )

    def disconnect(self) -> None:
        """A Control stream ended, or could not be had."""
        if not self.connected:
            self.refused = None  # who said so is not there
        self._forget()

    def _forget(self) -> None:
        self.connected = False
        self.agreed = None
        self._hello_due = None
        self._told_offset_ns = None
        self.owed.close()

    def welcome(self, welcome: Welcome) -> bool:
        """Go on as was agreed; False if nothing was that this node can speak."""
        try:
            self.agreed = check(welcome.agreed, self._versions)
        except Incompatible as error:
            self.refused = str(error)
            return False
        self.refused = None
        seed = welcome.priority_seed or self._config.cluster_seed
        self._seed_is_new = self._seed_is_new or seed != self.priority_seed
        self.priority_seed = seed
        return True

    def open(self) -> None:
        """After the welcome: repeat all that the other side may have missed."""
        self.snapshots.repeat()
        self.owed.open()

    def reconfigure(self, config: NodeConfig) -> None:
        """Go on with other limits and rates; name and seed stay the same."""
        self._config = config
        self.owed.reconfigure(config)

    def say_policy(self, policy: Policy) -> None:
        """Nodes shall record that."""
        self._policy_is_new = self._policy_is_new or policy != self.policy
        self.policy = policy

    def take_policy(self) -> Policy | None:
        """What it says now, if that has changed; once each."""
        is_new, self._policy_is_new = self._policy_is_new, False
        return self.policy if is_new else None

    def take_priority_seed(self) -> int | None:
        """What it says now, if that has changed; once each."""
        is_new, self._seed_is_new = self._seed_is_new, False
        return self.priority_seed if is_new else None

    def ask_status(self, number: int) -> None:
        """Somebody asks it how the node is."""
        self._status_asked = number

    def take_status_question(self) -> int | None:
        """The number of what it asked last, which tell_status() is to answer; once each."""
        asked, self._status_asked = self._status_asked, None
        return asked

    def tell_status(self, number: int, json: str) -> None:
        """How the node is, for who asked that question."""
        self.owed.report(NodeReport(number, json))

    def release(self, trace: TraceId, now_ns: int) -> None:
        """It needs no more of what there is of a trace."""
        held = self._holdings.traces.get(trace)
        share = held.share(self.shard) if held is not None else None
        if held is None or share is None or held.searching:
            # It is told what the search finds, and says so again if it needs none of it.
            return
        if held.is_lacked(share):
            # New bytes, of which the coordinator will hear and judge again; or it has
            # them all, and said so on the other stream: ask it again when that is here.
            share.release_early = True
            return
        # It may not know yet of a group that needs the trace: ask it again then.
        mine = (group for group in held.groups if group.shard == self.shard)
        unknown = [group for group in mine if not group.acknowledged]
        for group in unknown:
            group.release_deferred = True
        if not unknown:
            self._holdings.release(held, share, now_ns)

    def probe(self, probe: ClockProbe, now_ns: int, realtime_ns: int) -> None:
        """Tell what both clocks show."""
        self._told_offset_ns = realtime_ns - now_ns
        self.owed.clock_reply(probe.number, realtime_ns)

    def on_clock(self, now_ns: int, realtime_ns: int) -> None:
        """A coordinator that is not told of a step goes on with an offset that was."""
        told_ns, offset_ns = self._told_offset_ns, realtime_ns - now_ns
        if told_ns is not None and abs(offset_ns - told_ns) > CLOCK_STEP_NS:
            self._told_offset_ns = offset_ns
            self.owed.clock_stepped(told_ns + now_ns, realtime_ns)

    def take_control(self, now_ns: int, realtime_ns: int) -> list[NodeMessage]:
        """Messages for the Control stream, in order; none while it is down."""
        messages: list[NodeMessage] = []
        if not self.connected:
            return messages
        if self._hello_due is not None:
            messages.append(self._hello_due)
            self._hello_due = None
        if not self.owed.is_open:
            return messages
        messages += self.owed.take(now_ns, realtime_ns)
        # After the firings, so that what it counts is known.
        messages += self.snapshots.take_news()
        if messages and self._may_send_on_control:
            # A message of their own would cost more than they do.
            messages += self._take_chunks(now_ns, on_control=True)
        return messages

    def next_control_ns(self, now_ns: int) -> int | None:
        """When take_control() may have something without a new fact."""
        if self._hello_due is not None or (self.owed.is_open and self.snapshots.has_news):
            return now_ns
        return self.owed.next_due_ns(now_ns)

    # ---------------------------------------------------------------- slices

    def connect_slices(self, number: int, now_ns: int) -> None:
        """A Slices stream came, which gives credit."""
        self.slices_connected = True
        self.slices_number = number
        self.credit_bytes = 0
        self._holdings.rewind(self.shard, now_ns)

    def disconnect_slices(self, now_ns: int) -> None:
        """It went, with its credit."""
        self.slices_connected = False
        self.credit_bytes = 0
        self._holdings.rewind(self.shard, now_ns)

    def wants_slices(self) -> bool:
        """Whether there is something to report, or reported and not yet durable."""
        return self.owed.is_open and self._holdings.reporter.is_lacking(self.shard)

    def on_reply(self, reply: SliceReply, now_ns: int) -> None:
        """More credit, and what is durable."""
        self.credit_bytes += reply.credit_bytes
        for ack in reply.acks:
            held = self._holdings.traces.get(ack.trace)
            share = held.share(self.shard) if held is not None else None
            # An ack for an earlier slice of the trace says nothing about this one.
            if held is None or share is None or ack.epoch != held.slice.epoch:
                continue
            self._holdings.acked(held, share, ack.offset, now_ns)
            if ack.again and ack.offset >= share.acked:
                self._holdings.rewind_to_acked(held, share, now_ns)
            if share.release_early and not held.is_lacked(share):
                share.release_early = False
                self.owed.answer(held.trace)

    def take_chunks(self, now_ns: int) -> list[SliceChunk]:
        """Chunks for the Slices stream: what rates and credit allow now."""
        return self._take_chunks(now_ns, on_control=False)

    def next_chunks_ns(self, now_ns: int) -> int | None:
        """When take_chunks() may have something without a new fact."""
        return self._holdings.reporter.ready_ns(self.shard, now_ns) if self._may_send else None

    def _take_chunks(self, now_ns: int, *, on_control: bool) -> list[SliceChunk]:
        """What may be sent; on the Control stream only few bytes, and only ends of slices.

        What follows of a slice on the other stream might overtake it, and be sent twice.
        """
        stream = self.slices_number if on_control else 0
        left_bytes = CONTROL_CHUNK_BYTES_MAX
        chunks: list[SliceChunk] = []
        while self._may_send:
            following = self._holdings.reporter.next_trace(self.shard, now_ns)
            if following is None:
                break
            group, held = following
            share = group.share(held)
            unsent_bytes = held.unsent_bytes(share)
            count = min(self._config.chunk_bytes, unsent_bytes, self.credit_bytes)
            if on_control and (count > left_bytes or count < unsent_bytes):
                break
            left_bytes -= count
            data = self._dataplane.read(held.trace, share.sent, count)
            chunks.append(SliceChunk(held.trace, share.sent, data, held.slice.epoch, stream=stream))
            self.credit_bytes -= len(data)
            self._holdings.sent(group, held, len(data), now_ns)
            told = share.told
            if told is not None and told.bytes < held.slice.bytes and told.bytes <= share.sent:
                self.owed.status(held.trace)
        return chunks

    @property
    def _may_send_on_control(self) -> bool:
        """Whether the coordinator takes small chunks now with what it is told of them."""
        known = self.agreed is not None and Feature.CONTROL_CHUNKS in self.agreed.features
        return known and self._may_send

    @property
    def _may_send(self) -> bool:
        """Whether the coordinator takes bytes now."""
        return self.slices_connected and self.credit_bytes > 0
