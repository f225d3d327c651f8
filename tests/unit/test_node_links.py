# SPDX-License-Identifier: Apache-2.0
"""A node's core between two coordinators: each has its groups, and neither costs the other."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import count

import pytest

from appliance.core.config import NodeConfig, TriggerLimits
from appliance.core.dataplane import LocalTrigger
from appliance.core.groups import HeldTrace
from appliance.core.node import NodeCore
from formats.records import Data
from protocol.hashing import Domain, Shards, TraceHash
from protocol.messages import (
    Abandoned,
    Collect,
    Drop,
    Group,
    NodeMessage,
    NodeReport,
    Policy,
    Release,
    SliceAck,
    SliceChunk,
    SliceFlags,
    SliceReply,
    SliceStatus,
    Snapshot,
    SnapshotStatus,
    Source,
    StatusQuestion,
    TraceId,
    TriggerAck,
    TriggerFired,
    Welcome,
)
from protocol.versions import OURS, Agreed, Feature
from tests.simulation.oracle.bounds import check_node
from tests.simulation.pool import Handle, PoolConfig, PoolModel

S = 1_000_000_000
REAL_NS = 1_700_000_000 * S
AGREED = Agreed(OURS.newest, OURS.features & ~Feature.CONTROL_CHUNKS)
SHARD_OF = Shards(0, 2)
UNLIMITED = TriggerLimits(1e9, 1e9, 1e9, 1e9)


def trace(number: int) -> TraceId:
    return TraceId(number.to_bytes(16, "big"))


def of_shard(shard: int) -> Iterator[TraceId]:
    """All traces whose groups are of one coordinator."""
    return (trace(n) for n in count(1) if SHARD_OF(trace(n)) == shard)


ZERO, ZERO_TOO, *MORE_ZERO = (next(each) for each in [of_shard(0)] * 40)
ONE, ONE_TOO, *MORE_ONE = (next(each) for each in [of_shard(1)] * 40)


class Coordinator:
    """One of the two, by hand."""

    def __init__(self, node: Node, shard: int) -> None:
        self._node = node
        self.shard = shard
        self._streams = count(1)

    def connect(self, priority_seed: int = 0) -> list[NodeMessage]:
        """Be connected to, and welcome the node; what it says then."""
        core, now_ns = self._node.core, self._node.now_ns
        core.on_control_connected(now_ns, (), self.shard)
        self.take()
        core.on_control(Welcome(7, AGREED, priority_seed), now_ns, now_ns + REAL_NS, self.shard)
        said = self.take()
        core.on_slices_connected(now_ns, next(self._streams), self.shard)
        core.on_slice_reply(SliceReply((), 1 << 30), now_ns, self.shard)
        return said

    def lose(self) -> None:
        self._node.core.on_control_lost(self._node.now_ns, self.shard)

    def take(self) -> list[NodeMessage]:
        core, now_ns = self._node.core, self._node.now_ns
        due_ns = core.next_control_ns(now_ns, self.shard)
        said = core.take_control(now_ns, now_ns + REAL_NS, self.shard)
        assert not said or (due_ns is not None and due_ns <= now_ns)
        return said

    def say(self, message: object) -> list[NodeMessage]:
        core, now_ns = self._node.core, self._node.now_ns
        core.on_control(message, now_ns, now_ns + REAL_NS, self.shard)  # type: ignore[arg-type]
        return self.take()

    def acknowledge(self, group: Group) -> None:
        """Hear of a firing, and say so."""
        assert group in [m.group for m in self.take() if isinstance(m, TriggerFired)]
        self.say(TriggerAck(group))

    def chunks(self) -> list[SliceChunk]:
        return self._node.core.take_chunks(self._node.now_ns, self.shard)

    def ack(self, chunks: Iterable[SliceChunk]) -> None:
        acks = tuple(SliceAck(c.trace, c.offset + len(c.data), c.epoch) for c in chunks)
        self._node.core.on_slice_reply(SliceReply(acks), self._node.now_ns, self.shard)


class Node:
    """A core with two links, and its data plane."""

    def __init__(self, config: NodeConfig | None = None, pool: PoolConfig | None = None) -> None:
        self.config = config or NodeConfig("n1")
        self.pool = PoolModel(pool or PoolConfig(), "n1")
        self.now_ns = S
        self.core = NodeCore(self.config, self.pool, 1, self.now_ns, REAL_NS, shards=2)
        self.client = self.pool.add_client(100, "service", self.now_ns)
        self.coordinators = (Coordinator(self, 0), Coordinator(self, 1))

    def write(self, *traces: TraceId, size: int = 100) -> None:
        for each in traces:
            handle = self.pool.open(self.client, each)
            self.pool.write(handle, 0, Data(1, bytes(size)), self.now_ns)
            self.pool.close(handle, 0)

    def fire(self, primary: TraceId, *laterals: TraceId, name: str = "t") -> Group:
        event = LocalTrigger(
            self.client.number, self.now_ns, name, primary, laterals, "", Source.APPLICATION
        )
        self.core.on_dataplane([event], self.now_ns)
        return Group(name, primary)

    def held(self, of: TraceId) -> HeldTrace:
        return self.core._holdings.traces[of]


def named(said: Iterable[object]) -> set[TraceId]:
    """The traces that are spoken of."""
    found: set[TraceId] = set()
    for message in said:
        match message:
            case TriggerFired():
                found |= {message.group.primary, *message.laterals}
            case SliceStatus() | SliceChunk():
                found.add(message.trace)
            case Abandoned():
                found.add(message.group.primary)
    return found


def test_each_coordinator_hears_of_the_groups_of_its_shard_and_of_all_their_traces() -> None:
    node = Node()
    zero, one = node.coordinators
    node.write(ZERO, ZERO_TOO, ONE, ONE_TOO)
    # The lateral is of the other shard, but goes where its group goes.
    node.fire(ZERO, ONE_TOO)
    node.fire(ONE)
    assert named(zero.connect()) == {ZERO, ONE_TOO}
    assert named(one.connect()) == {ONE}
    node.fire(ZERO_TOO)
    assert named(zero.take()) == {ZERO_TOO}
    assert one.take() == []
    assert named(zero.chunks()) == {ZERO, ONE_TOO, ZERO_TOO}
    assert named(one.chunks()) == {ONE}


def test_one_that_is_away_holds_up_nothing_of_the_other() -> None:
    node = Node()
    zero, one = node.coordinators
    zero.connect()
    node.write(ZERO, ONE)
    zero.acknowledge(node.fire(ZERO))
    node.fire(ONE)
    assert zero.take() == []
    chunks = zero.chunks()
    assert named(chunks) == {ZERO}
    zero.ack(chunks)
    zero.say(Release(ZERO))
    assert not node.core.wants_slices_connection(0)
    assert not node.core.wants_slices_connection(1)
    # Its part waits for it.
    assert node.core.unreported_groups == 1
    assert node.held(ONE).held_bytes > 0
    assert named(one.connect()) == {ONE}
    assert node.core.wants_slices_connection(1)
    assert named(one.chunks()) == {ONE}


def test_one_that_begins_again_makes_nothing_due_for_the_other() -> None:
    node = Node()
    zero, one = node.coordinators
    node.write(ZERO, ONE)
    for primary in (ZERO, ONE):
        node.fire(primary)
    zero.connect()
    one.connect()
    zero.chunks()
    one.chunks()
    one.lose()
    assert zero.take() == []
    assert zero.chunks() == []
    assert named(one.connect()) == {ONE}
    assert named(one.chunks()) == {ONE}
    assert zero.take() == []
    assert zero.chunks() == []


def shared(node: Node) -> tuple[Group, Group]:
    """Groups of both coordinators, which share a trace; both are connected."""
    zero, one = node.coordinators
    node.write(ZERO, ONE, ZERO_TOO)
    groups = (node.fire(ZERO, ZERO_TOO), node.fire(ONE, ZERO_TOO))
    assert named(zero.connect()) == {ZERO, ZERO_TOO}
    assert named(one.connect()) == {ONE, ZERO_TOO}
    for coordinator, group in zip(node.coordinators, groups, strict=True):
        coordinator.say(TriggerAck(group))
    return groups


def test_a_trace_of_groups_of_both_goes_to_both_and_stays_until_both_have_it() -> None:
    node = Node()
    zero, one = node.coordinators
    shared(node)
    length = node.held(ZERO_TOO).bytes
    to_zero = zero.chunks()
    assert named(to_zero) == {ZERO, ZERO_TOO}
    zero.ack(to_zero)
    assert not node.core.wants_slices_connection(0)
    assert node.held(ZERO_TOO).held_bytes == length
    assert node.core.counters.triggers["t"].reported == 1
    to_one = one.chunks()
    assert named(to_one) == {ONE, ZERO_TOO}
    assert {c.data for c in to_one if c.trace == ZERO_TOO} == {
        c.data for c in to_zero if c.trace == ZERO_TOO
    }
    one.ack(to_one)
    assert node.held(ZERO_TOO).held_bytes == 0
    assert node.core.counters.triggers["t"].reported == 3
    # And it goes when both let go of it.
    zero.say(Release(ZERO_TOO))
    node.now_ns += 2 * node.config.triggered_ttl_ns
    node.core.on_tick(node.now_ns)
    assert ZERO_TOO in node.core._holdings.traces
    one.say(Release(ZERO_TOO))
    node.now_ns += 2 * node.config.triggered_ttl_ns
    node.core.on_tick(node.now_ns)
    assert ZERO_TOO not in node.core._holdings.traces


def test_a_release_that_comes_early_waits_for_what_its_sender_lacks_alone() -> None:
    node = Node()
    zero, one = node.coordinators
    shared(node)
    one.say(Release(ZERO_TOO))
    zero.ack(zero.chunks())
    assert zero.take() == []
    assert one.take() == []
    one.ack(one.chunks())
    assert zero.take() == []
    assert named(one.take()) == {ZERO_TOO}


@pytest.mark.parametrize("gives_up", [0, 1])
def test_what_one_gives_up_stays_for_the_other(gives_up: int) -> None:
    node = Node()
    groups = shared(node)
    other = node.coordinators[1 - gives_up]
    node.coordinators[gives_up].say(Drop(groups[gives_up]))
    assert node.coordinators[gives_up].chunks() == []
    assert other.take() == []
    chunks = other.chunks()
    assert named(chunks) == {groups[1 - gives_up].primary, ZERO_TOO}
    other.ack(chunks)
    # Nothing waits for who gave it up.
    assert node.held(ZERO_TOO).held_bytes == 0


def test_what_one_waits_for_is_freed_when_the_other_gives_up() -> None:
    node = Node()
    zero, one = node.coordinators
    groups = shared(node)
    zero.ack(zero.chunks())
    assert node.held(ZERO_TOO).held_bytes > 0
    one.say(Drop(groups[1]))
    assert node.held(ZERO_TOO).held_bytes == 0
    assert node.core.queues["t"].bytes == 0


def test_a_trace_that_concerns_one_late_is_told_in_full_and_sent_from_what_is_left() -> None:
    node = Node()
    zero, one = node.coordinators
    zero.connect()
    one.connect()
    node.write(ZERO, ONE)
    zero.acknowledge(node.fire(ZERO))
    zero.ack(zero.chunks())
    length = node.held(ZERO).bytes
    node.fire(ONE, ZERO)
    (status,) = (m for m in one.take() if isinstance(m, SliceStatus) and m.trace == ZERO)
    # So what it lacks it knows.
    assert (status.held, status.bytes) == (True, length)
    assert named(one.chunks()) == {ONE}
    node.write(ZERO)
    node.core.on_dataplane(node.pool.poll(node.now_ns), node.now_ns)
    assert {chunk.offset for chunk in one.chunks()} == {length}
    assert {chunk.offset for chunk in zero.chunks()} == {length}


def test_a_full_store_gives_up_what_waits_for_who_is_away() -> None:
    store = 100 * 4096
    node = Node(NodeConfig("n1", limits=UNLIMITED), PoolConfig(store_bytes=store))
    zero, one = node.coordinators
    zero.connect()
    common = MORE_ZERO[0]
    node.write(common, size=2000)
    for number in range(60):
        # Their bytes are charged to a trigger of the other as long as that lacks some.
        primary, far = MORE_ZERO[1 + number % 30], trace(10_000 + number)
        node.write(far, size=4000)
        zero.acknowledge(node.fire(primary, far, name="near"))
        if SHARD_OF(far) == 1:
            node.fire(far, common, name="far")
        zero.ack(zero.chunks())
    assert node.pool.store_usage().used_bytes <= 0.875 * store
    given_up = [m.group for m in one.connect() if isinstance(m, Abandoned)]
    assert given_up and {group.trigger for group in given_up} == {"far"}
    assert not node.core.links[0].owed.abandoned_groups
    assert node.core.counters.triggers["near"].abandoned == 0


def test_who_asks_for_a_group_of_the_other_is_not_heard() -> None:
    node = Node()
    zero, one = node.coordinators
    group = node.fire(ZERO)
    zero.connect()
    one.connect()
    for message in (Collect(group, (ZERO,)), TriggerAck(group), Drop(group)):
        assert one.say(message) == []
    assert node.core.counters.unexpected_messages == 3
    # Its firing is not known to whom it went.
    zero.lose()
    assert any(isinstance(message, TriggerFired) for message in zero.connect())


def test_what_one_asks_for_is_answered_to_it() -> None:
    node = Node(NodeConfig("n1", groups_per_trace_max=1))
    zero, one = node.coordinators
    zero.connect()
    one.connect()
    node.write(ZERO, ONE_TOO)
    assert named(one.say(Collect(Group("far", ONE), (ONE_TOO,)))) == {ONE_TOO}
    assert zero.take() == []
    # The other cannot have it, since it has as many triggers as there may be.
    (status,) = zero.say(Collect(Group("far", ZERO), (ONE_TOO,)))
    assert status == SliceStatus(ONE_TOO, held=False, flags=SliceFlags.STORE_FULL)
    assert one.take() == []


def test_each_has_its_snapshots_and_its_questions() -> None:
    node = Node()
    zero, one = node.coordinators
    zero.connect()
    one.connect()
    node.write(ZERO, ONE, ONE_TOO)
    order = Snapshot(5, "snapshot.5", S)
    zero.say(order)
    one.say(order)
    for coordinator in node.coordinators:
        shard = coordinator.shard
        assert node.core.take_recent_question(shard) == order
        assert node.core.take_recent_question(shard) is None
        node.core.on_recent(order, 3, (ZERO, ONE, ONE_TOO), node.now_ns, shard)
    assert zero.take() == [SnapshotStatus(5, 1, 0, False)]
    assert one.take() == [SnapshotStatus(5, 2, 0, False)]
    one.say(StatusQuestion(7))
    assert node.core.take_status_question(0) is None
    assert node.core.take_status_question(1) == 7
    node.core.on_status(7, "{}", 1)
    assert zero.take() == []
    assert one.take() == [NodeReport(7, "{}")]


def test_a_new_daemon_tells_each_of_what_its_predecessor_held() -> None:
    node = Node()
    zero, one = node.coordinators
    node.write(ZERO, ONE, ONE_TOO)
    node.fire(ZERO, ONE_TOO)
    node.fire(ONE)
    node.core = NodeCore(node.config, node.pool, 2, node.now_ns, REAL_NS, shards=2)
    assert named(zero.connect()) == {ZERO, ONE_TOO}
    assert named(one.connect()) == {ONE}
    assert named(zero.chunks()) == {ZERO, ONE_TOO}
    assert named(one.chunks()) == {ONE}


def test_the_first_says_what_is_recorded_and_how_priorities_are_hashed() -> None:
    node = Node()
    zero, one = node.coordinators
    node.write(*MORE_ZERO)
    for primary in MORE_ZERO:
        node.fire(primary)
    one.connect(priority_seed=5)
    one.say(Policy(3, 1000))
    assert node.core.take_priority_seed() is None
    assert node.core.take_policy() is None
    zero.connect(priority_seed=6)
    zero.say(Policy(4, 2000))
    assert node.core.take_priority_seed() == 6
    assert node.core.take_policy() == node.core.policy == Policy(4, 2000)
    one.lose()
    one.connect(priority_seed=5)
    assert node.core.take_priority_seed() is None
    rank = TraceHash(Domain.PRIORITY, 6)
    ranks = [rank(chunk.trace) for chunk in zero.chunks()]
    assert ranks == sorted(ranks, reverse=True)
    # What the other said is noted where it belongs.
    assert node.core.links[1].policy == Policy(3, 1000)
    assert node.core.links[1].priority_seed == 5


TRACES = [trace(number) for number in range(1, 9)]
OFTEN = {
    "write": 4,
    "open": 2,
    "fire": 4,
    "join": 4,
    "connect": 4,
    "lose": 1,
    "hear": 4,
    "send": 4,
    "acknowledge": 4,
    "release": 4,
    "drop": 1,
    "collect": 4,
    "tick": 1,
}
"""What happens between a node and its coordinators, and how often beside the rest."""


class Both(Node):
    """Coordinators that do anything that each may; what they hear of is theirs."""

    def __init__(self) -> None:
        super().__init__(
            NodeConfig("n1", limits=UNLIMITED, groups_per_trace_max=3, triggered_max=12),
            PoolConfig(store_bytes=40 * 2048),
        )
        self.open: dict[TraceId, Handle] = {}
        self.sent: tuple[list[SliceChunk], ...] = ([], [])

    def step(self, what: str, shard: int, traces: list[TraceId]) -> None:
        self.now_ns += S // 100
        first, *others = traces
        coordinator = self.coordinators[shard]
        link = self.core.links[shard]
        primary = next((each for each in traces if SHARD_OF(each) == shard), None)
        match what:
            case "write":
                self.write(*traces, size=3000)
            case "open":
                handle = self.open.pop(first, None)
                if handle is not None:
                    self.pool.close(handle, 0)
                else:
                    self.open[first] = self.pool.open(self.client, first)
                    self.pool.write(self.open[first], 0, Data(1, bytes(500)), self.now_ns)
            case "fire":
                self.fire(first, *others)
            case "join":
                self.fire(first, *others, name="other")
            case "connect" if not link.connected:
                self.sent[shard].clear()
                self.heard(coordinator.connect(), shard)
            case "lose":
                coordinator.lose()
            case "hear":
                self.heard(coordinator.take(), shard)
            case "send":
                chunks = coordinator.chunks()
                self.sent[shard].extend(chunks)
            case "acknowledge" if link.slices_connected:
                coordinator.ack(self.sent[shard])
                self.sent[shard].clear()
            case "release":
                self.heard(coordinator.say(Release(first)), shard)
            case "drop" if primary is not None:
                self.heard(coordinator.say(Drop(Group("t", primary))), shard)
            case "collect" if primary is not None:
                self.heard(coordinator.say(Collect(Group("t", primary), tuple(traces))), shard)
            case "tick":
                self.now_ns += 10 * S
                self.core.on_tick(self.now_ns)
        self.core.on_dataplane(self.pool.poll(self.now_ns), self.now_ns)

    def heard(self, said: list[NodeMessage], shard: int) -> None:
        for message in said:
            if isinstance(message, TriggerFired | Abandoned):
                assert SHARD_OF(message.group.primary) == shard
            if isinstance(message, TriggerFired):
                self.coordinators[shard].say(TriggerAck(message.group))

    def check(self) -> None:
        check_node(self.core)
        holdings = self.core._holdings
        for held in holdings.traces.values():
            assert held.trimmed == min(share.acked for share in held.shares)
            found = self.pool.slice(held.trace)
            # There is none where the store had no room for its mark.
            assert found is None or found.trimmed_bytes == held.trimmed
        for group in holdings.groups.values():
            shares = [(held, group.share(held)) for held in group.traces.values()]
            assert group.held == sum(held.is_lacked(share) for held, share in shares)
            assert group.unsent == sum(share.unsent for _, share in shares)
        for shard in (0, 1):
            assert holdings.reporter.is_lacking(shard) == any(
                group.held for group in holdings.groups.values() if group.shard == shard
            )
        # Each byte is charged to one trigger, and one that can give it up.
        charged = {name: depth.bytes for name, depth in self.core.queues.items()}
        assert sum(charged.values()) == sum(h.held_bytes for h in holdings.traces.values())
        for name, size in charged.items():
            assert not size or any(
                group.held for group in holdings.groups.values() if group.queue == name
            )

    def settle(self) -> None:
        """Both are there, have all that there is, and let go of it."""
        for handle in self.open.values():
            self.pool.close(handle, 0)
        for _ in range(3):
            for shard, coordinator in enumerate(self.coordinators):
                if not self.core.links[shard].connected:
                    self.step("connect", shard, TRACES)
                for what in ("hear", "tick", "send", "acknowledge", "hear"):
                    self.step(what, shard, TRACES)
                for each in TRACES:
                    self.heard(coordinator.say(Release(each)), shard)
        self.now_ns += 2 * self.config.triggered_ttl_ns
        self.core.on_tick(self.now_ns)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_both_do_each_has_its_own_and_nothing_stays(seed: int) -> None:
    node = Both()
    rng = random.Random(seed)
    for what in rng.choices(list(OFTEN), list(OFTEN.values()), k=300):
        node.step(what, rng.randrange(2), rng.sample(TRACES, rng.randint(1, 4)))
        node.check()
    node.settle()
    node.check()
    assert not node.core._holdings.traces
    assert not node.core._holdings.groups
    assert not list(node.pool.slices())
