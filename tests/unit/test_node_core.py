# SPDX-License-Identifier: Apache-2.0
"""The node's core on the model of the data plane, one fact at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.dataplane import NO_CLIENT, LocalTrigger, Slice, SliceChanged
from appliance.core.groups import HeldGroup
from appliance.core.limits import PROCESSES_MAX, Admission, Refusal
from appliance.core.node import NodeConfig, NodeCore, TriggerLimits, TriggerPolicy
from appliance.core.reporting import Reporter
from counting.token_bucket import TokenBucket
from counting.trigger_names import OTHER_NAMES, UNUSED_NS
from formats.records import Breadcrumb, Data
from protocol.hashing import Domain, TraceHash
from protocol.messages import (
    CLOCK_STEPPED,
    CONTROL_CHUNK_BYTES_MAX,
    NO_POLICY,
    Abandoned,
    ClockProbe,
    ClockReply,
    Collect,
    Drop,
    Group,
    Hello,
    NodeMessage,
    Policy,
    Refused,
    Release,
    SliceAck,
    SliceChunk,
    SliceFlags,
    SliceReply,
    SliceStatus,
    Snapshot,
    SnapshotStatus,
    Source,
    TraceId,
    TriggerAck,
    TriggerFired,
    Unknown,
    Welcome,
)
from protocol.versions import OURS, Agreed, Feature, Versions
from protocol.wire import encode_node_batch
from tests.simulation.pool import ClientModel, Handle, PoolConfig, PoolModel

MS = 1_000_000
S = 1_000_000_000
REAL_NS = 1_700_000_000 * S
ALL = Agreed(OURS.newest, OURS.features)
AGREED = Agreed(OURS.newest, OURS.features & ~Feature.CONTROL_CHUNKS)


def trace(number: int) -> TraceId:
    return TraceId(number.to_bytes(16, "big"))


class Node:
    """A core and its data plane, driven by hand."""

    def __init__(self, config: NodeConfig | None = None, pool: PoolConfig | None = None) -> None:
        self.config = config or NodeConfig("n1")
        self.pool = PoolModel(pool or PoolConfig(), self.config.node)
        self.now_ns = S
        self.users: dict[int, int] = {}
        self.slices_number = 0
        self.core = self.new_core(1)
        self.client: ClientModel = self.pool.add_client(100, "service", self.now_ns)

    def new_core(self, incarnation: int) -> NodeCore:
        return NodeCore(
            self.config, self.pool, incarnation, self.now_ns, REAL_NS, user_of=self.users.get
        )

    def write(self, number: int, size: int = 100, *, close: bool = True) -> Handle:
        handle = self.pool.open(self.client, trace(number))
        self.pool.write(handle, 0, Data(1, bytes(size)), self.now_ns)
        if close:
            self.pool.close(handle, 0)
        return handle

    def fire(
        self,
        number: int,
        name: str = "t",
        laterals: Iterable[int] = (),
        client: ClientModel | None = None,
    ) -> None:
        others = tuple(trace(n) for n in laterals)
        self.pool.trigger(client or self.client, trace(number), name, self.now_ns, laterals=others)
        self.poll()

    def add_client(self, user: int | None) -> ClientModel:
        """A process; nobody knows whose it is where user is None."""
        client = self.pool.add_client(100, "service", self.now_ns)
        if user is not None:
            self.users[client.number] = user
        return client

    def poll(self) -> None:
        self.core.on_dataplane(self.pool.poll(self.now_ns), self.now_ns)

    def end_searches(self) -> None:
        """Let time pass until the data plane knows what there is of all traces."""
        while (due_ns := self.pool.next_search_ns()) is not None:
            self.now_ns = max(self.now_ns, due_ns)
            self.poll()

    def connect(self, agreed: Agreed = AGREED) -> list[NodeMessage]:
        """Connect, be welcomed; return what follows."""
        self.core.on_control_connected(self.now_ns, ("10.0.0.1",))
        hello = self.take()
        assert hello == [Hello("n1", hello[0].incarnation, ("10.0.0.1",))]  # type: ignore[union-attr]
        self.core.on_control(Welcome(7, agreed), self.now_ns, self.now_ns + REAL_NS)
        return self.take()

    def connect_slices(self, credit_bytes: int = 1 << 30) -> None:
        self.slices_number += 1
        self.core.on_slices_connected(self.now_ns, self.slices_number)
        self.core.on_slice_reply(SliceReply((), credit_bytes), self.now_ns)

    def take(self) -> list[NodeMessage]:
        due_ns = self.core.next_control_ns(self.now_ns)
        messages = self.core.take_control(self.now_ns, self.now_ns + REAL_NS)
        # Nobody asks for what is not due.
        assert not messages or (due_ns is not None and due_ns <= self.now_ns)
        return messages

    def hear(self, message: object) -> list[NodeMessage]:
        self.core.on_control(message, self.now_ns, self.now_ns + REAL_NS)  # type: ignore[arg-type]
        return self.take()

    def report(self) -> dict[int, int]:
        """Bytes in the chunks that may go now, by trace number, in their order."""
        sent: dict[int, int] = {}
        due_ns = self.core.next_chunks_ns(self.now_ns)
        chunks = self.core.take_chunks(self.now_ns)
        assert not chunks or (due_ns is not None and due_ns <= self.now_ns)
        for chunk in chunks:
            number = int.from_bytes(chunk.trace, "big")
            sent[number] = sent.get(number, 0) + len(chunk.data)
        return sent

    def wait_for_more(self) -> None:
        """Until what there is of traces that are open goes without the rest."""
        self.now_ns += 50 * MS
        self.core.on_tick(self.now_ns)

    def ack_all(self) -> None:
        acks = tuple(SliceAck(s.trace, s.bytes, s.epoch) for s in self.pool.slices())
        self.core.on_slice_reply(SliceReply(acks), self.now_ns)


def test_a_trigger_collects_at_once_and_is_told_until_acknowledged() -> None:
    node = Node()
    node.write(1)
    node.fire(1)
    assert node.take() == []  # not connected
    messages = node.connect()
    fired = TriggerFired(Group("t", trace(1)), (), "", Source.APPLICATION, REAL_NS + node.now_ns, 0)
    status = messages[1]
    assert messages[0] == fired
    assert isinstance(status, SliceStatus) and status.held and status.bytes > 100
    node.core.on_control_lost(node.now_ns)
    assert node.connect() == messages
    assert node.hear(TriggerAck(fired.group)) == []
    node.core.on_control_lost(node.now_ns)
    assert node.connect() == [status]


def test_a_firing_says_which_process_is_charged_for_it() -> None:
    node = Node()
    other = node.add_client(None)
    node.fire(1, client=other)
    node.fire(1, laterals=(2,))
    node.core.on_operator_trigger(Group("op", trace(3)), (), "asked", node.now_ns)
    messages = [m for m in node.connect() if isinstance(m, TriggerFired)]
    # Of several the first.
    assert {m.group.primary: m.process for m in messages} == {trace(1): other.number, trace(3): 0}


def test_nothing_is_said_before_the_welcome_and_a_refusal_is_kept() -> None:
    node = Node()
    node.fire(1)
    node.core.on_control_connected(node.now_ns, ())
    assert [type(m) for m in node.take()] == [Hello]
    assert node.hear(Refused("another n1 lives at 10.0.0.9")) == []
    assert node.core.links[0].refused == "another n1 lives at 10.0.0.9"
    assert not node.core.wants_slices_connection()


def test_a_coordinator_that_names_a_version_which_this_node_cannot_speak_is_not_heard() -> None:
    node = Node()
    node.fire(1)
    node.core = NodeCore(node.config, node.pool, 1, node.now_ns, REAL_NS, Versions(4, 5))
    for protocol, older in ((3, "coordinator"), (6, "node")):
        node.core.on_control_connected(node.now_ns, ())
        assert node.take() == [Hello("n1", 1, (), Versions(4, 5))]
        assert node.hear(Welcome(7, Agreed(protocol))) == []
        assert node.core.links[0].refused == (
            f"the coordinator speaks protocol {protocol}, this node 4 to 5: update the {older}"
        )
        assert node.core.links[0].agreed is None
        node.core.on_control_lost(node.now_ns)
    node.core.on_control_connected(node.now_ns, ())
    node.take()
    assert [type(m) for m in node.hear(Welcome(7, Agreed(5)))] == [TriggerFired, SliceStatus]
    assert node.core.links[0].refused is None
    assert node.core.links[0].agreed == Agreed(5)
    node.core.on_control_lost(node.now_ns)
    assert node.core.links[0].agreed is None


def test_a_message_of_an_unknown_kind_is_counted_and_ignored() -> None:
    node = Node()
    node.connect()
    assert node.hear(Unknown()) == []
    assert node.core.counters.unknown_messages == 1
    assert node.core.links[0].refused is None


def test_a_policy_is_an_action_once_and_again_only_when_it_is_another() -> None:
    node = Node()
    first, second = Policy(1, 5), Policy(2, None)
    node.connect()
    assert node.core.take_policy() is None
    for policy in (first, second, NO_POLICY):
        node.hear(policy)
        node.hear(policy)
        assert node.core.policy == policy
        assert node.core.take_policy() == policy
        assert node.core.take_policy() is None
        # After each Welcome it is said again.
        node.core.on_control_lost(node.now_ns)
        assert node.core.policy == policy
        node.connect()
        node.hear(policy)
        assert node.core.take_policy() is None
    # Only the last one is in force, if two came before anybody looked.
    node.hear(first)
    node.hear(second)
    assert node.core.take_policy() == second
    assert node.core.take_policy() is None


def test_a_policy_of_before_a_restart_is_in_force_and_no_news() -> None:
    node = Node()
    kept = Policy(1, 5)
    node.core = NodeCore(node.config, node.pool, 2, node.now_ns, REAL_NS, policy=kept)
    assert node.core.policy == kept
    node.connect()
    node.hear(kept)
    assert node.core.take_policy() is None
    node.hear(NO_POLICY)
    assert node.core.take_policy() == NO_POLICY


def test_who_has_not_welcomed_this_node_orders_nothing() -> None:
    node = Node()
    node.write(1)
    node.core.on_control_connected(node.now_ns, ())
    node.take()
    for message in (Policy(1, 5), Collect(Group("t", trace(1)), (trace(1),)), Unknown()):
        assert node.hear(message) == []
    assert node.core.counters.unexpected_messages == 3
    assert node.core.take_policy() is None
    assert list(node.pool.slices()) == []


def test_limits_are_per_process_first_and_the_suppressed_travel_with_the_next() -> None:
    limits = TriggerLimits(1, 2, 1, 3)
    node = Node(NodeConfig("n1", limits=limits))
    for number in range(5):
        node.fire(number + 1)
    other = node.pool.add_client(101, "other", node.now_ns)
    node.client = other
    node.fire(11)
    node.fire(12)
    counters = node.core.counters.triggers["t"]
    assert (counters.fired, counters.collected) == (7, 3)
    assert (counters.rate_limited_process, counters.rate_limited_trigger) == (3, 1)
    fired = [m for m in node.connect() if isinstance(m, TriggerFired)]
    assert {m.group.primary: m.suppressed for m in fired} == {
        trace(1): 0,
        trace(2): 0,
        trace(11): 3,
    }
    node.now_ns += S
    node.fire(13)
    assert [m.suppressed for m in node.take() if isinstance(m, TriggerFired)] == [1]


def test_a_trigger_that_fires_again_adds_its_laterals_and_loses_none() -> None:
    node = Node()
    for number in (1, 2, 3):
        node.write(number)
    node.connect()
    for lateral in (2, 3):
        node.fire(1, laterals=(lateral,))
        node.fire(1, laterals=(lateral,))
    fired = [m for m in node.take() if isinstance(m, TriggerFired)]
    assert [m.laterals for m in fired] == [(trace(2), trace(3))]
    assert {s.trace for s in node.pool.slices()} == {trace(1), trace(2), trace(3)}
    assert node.core.counters.triggers["t"].merged == 2


UNLIMITED = TriggerLimits(1e9, 1e9, 1e9, 1e9)


class Places:
    """How often groups were put into a place of a queue, by all reporters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        place = Reporter.place

        def counted(reporter: Reporter, group: HeldGroup, now_ns: int) -> None:
            self.count += 1
            place(reporter, group, now_ns)

        monkeypatch.setattr(Reporter, "place", counted)

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


def test_the_same_neighbours_of_any_number_of_triggers_cost_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = Places(monkeypatch)
    node = Node(NodeConfig("n1", limits=UNLIMITED), PoolConfig(store_bytes=64 << 20))
    laterals = tuple(range(1, 33))
    handles = [node.write(number, close=False) for number in laterals]
    for number in range(1000, 3000):
        places.take()
        node.fire(number, laterals=laterals)
        assert max(len(held.groups) for held in node.core._holdings.traces.values()) <= 64
    # The last one has none of them, and each of the first ones told of all.
    assert places.take() <= 2
    fired = [m for m in node.connect() if isinstance(m, TriggerFired)]
    fired.sort(key=lambda message: message.group.primary)
    assert [len(m.laterals) for m in fired] == [32] * 64 + [0] * 1936
    assert node.core.counters.triggers["t"].laterals_cut == 32 * 1936
    # Nor does what is written of them, sent, and given up.
    node.connect_slices()
    for _ in range(3):
        for handle in handles:
            node.pool.write(handle, 0, Data(1, bytes(50)), node.now_ns)
        places.take()
        node.poll()
        node.wait_for_more()
        assert len(node.report()) == 32
        assert places.take() <= 4 * 64
    node.hear(Drop(fired[0].group))
    assert places.take() == 0
    assert sum(held.bytes for held in node.pool.slices()) == sum(
        depth.bytes for depth in node.core.queues.values()
    )


def test_what_has_as_many_triggers_as_there_may_be_joins_no_further_one() -> None:
    node = Node(NodeConfig("n1", groups_per_trace_max=2))
    for number in range(1, 7):
        node.write(number)
    node.connect()
    for number in (1, 2):
        node.fire(number, laterals=(5,))
    node.take()
    # As a lateral it is left out.
    node.fire(3, laterals=(5, 6))
    (fired,) = [m for m in node.take() if isinstance(m, TriggerFired)]
    assert fired.laterals == (trace(6),)
    counters = node.core.counters.triggers["t"]
    assert (counters.laterals_cut, counters.merged, counters.collected) == (1, 0, 3)
    node.fire(3, laterals=(5, 6))
    assert (counters.laterals_cut, counters.merged) == (2, 1)
    # As a primary it is collected already, and its neighbours are not for it.
    node.fire(5, "other", laterals=(4,))
    assert node.take() == []
    other = node.core.counters.triggers["other"]
    assert (other.laterals_cut, other.merged, other.collected) == (1, 1, 0)
    assert trace(4) not in {held.trace for held in node.pool.slices()}
    # Who has it fires on, and adds what has room.
    node.fire(1, laterals=(5, 4))
    (again,) = [m for m in node.take() if isinstance(m, TriggerFired)]
    assert again.laterals == (trace(5), trace(4))


def test_a_coordinator_is_answered_by_what_there_is_of_a_trace_that_can_join_no_group() -> None:
    node = Node(NodeConfig("n1", groups_per_trace_max=2))
    for number in range(1, 7):
        node.write(number)
    node.connect()
    for number in (1, 2):
        node.fire(number, laterals=(5,))
    node.take()
    (status,) = node.hear(Collect(Group("far", trace(9)), (trace(5),)))
    assert isinstance(status, SliceStatus) and status.held and status.trace == trace(5)
    # A group without traces would be held for nothing, for ever.
    assert {held.group.trigger for held in node.core._holdings.groups.values()} == {"t"}
    statuses = node.hear(Collect(Group("far", trace(9)), (trace(5), trace(6))))
    assert [s.trace for s in statuses if isinstance(s, SliceStatus)] == [trace(5), trace(6)]
    (far,) = (held for held in node.core._holdings.groups.values() if held.group.trigger == "far")
    assert set(far.traces) == {trace(6)}
    # It goes with those that have it, and the others that are asked for go on.
    node.hear(Drop(Group("far", trace(9))))
    assert {held.trace for held in node.pool.slices()} == {trace(1), trace(2), trace(5)}
    for number in (1, 2):
        node.hear(Drop(Group("t", trace(number))))
    assert list(node.pool.slices()) == []
    assert not node.core._holdings.groups or all(
        not held.acknowledged for held in node.core._holdings.groups.values()
    )


def test_an_acknowledgement_of_what_was_said_before_says_nothing_of_what_was_added() -> None:
    node = Node()
    group = Group("t", trace(1))
    node.connect()
    for lateral in (2, 3):
        node.fire(1, laterals=(lateral,))
        node.take()
    node.hear(TriggerAck(group))
    node.core.on_control_lost(node.now_ns)
    (fired,) = [m for m in node.connect() if isinstance(m, TriggerFired)]
    assert fired.laterals == (trace(2), trace(3))
    node.hear(TriggerAck(group))
    node.core.on_control_lost(node.now_ns)
    assert not [m for m in node.connect() if isinstance(m, TriggerFired)]


def test_what_no_process_fired_is_limited_by_its_name_alone_and_reported() -> None:
    node = Node(NodeConfig("n1", limits=TriggerLimits(1, 1, 1, 3)))
    node.connect()

    def fire(number: int, name: str, source: Source) -> None:
        fired = LocalTrigger(NO_CLIENT, node.now_ns, name, trace(number), (), "link down", source)
        node.core.on_dataplane([fired], node.now_ns)

    for number in range(1, 6):
        node.write(number)
        fire(number, "carrier", Source.NODE)
    fire(9, "dry.carrier", Source.NODE)
    counters = node.core.counters.triggers["carrier"]
    assert (counters.fired, counters.admitted, counters.collected) == (5, 3, 3)
    assert (counters.rate_limited_process, counters.rate_limited_trigger) == (0, 2)
    assert node.core.counters.triggers["dry.carrier"].dry_run == 1
    # Another name has tokens of its own, and takes none of a process.
    fire(1, "retransmit", Source.KERNEL)
    node.fire(2, "slow")
    said = [m for m in node.take() if isinstance(m, TriggerFired)]
    assert [(m.group.trigger, m.group.primary, m.source) for m in said] == [
        *(("carrier", trace(number), Source.NODE) for number in (1, 2, 3)),
        ("retransmit", trace(1), Source.KERNEL),
        ("slow", trace(2), Source.APPLICATION),
    ]
    assert {m.why for m in said[:4]} == {"link down"}
    # The next one says how many there were.
    node.now_ns += S
    fire(4, "carrier", Source.NODE)
    (again,) = (m for m in node.take() if isinstance(m, TriggerFired))
    assert again.suppressed == 2
    # It is repeated until it is acknowledged, as any other.
    node.core.on_control_lost(node.now_ns)
    assert len([m for m in node.connect() if isinstance(m, TriggerFired)]) == 6


def test_a_dry_run_is_limited_and_counted_and_collects_nothing() -> None:
    node = Node(NodeConfig("n1", limits=TriggerLimits(1, 3, 1, 10)))
    for number in range(5):
        node.write(number + 1)
        node.fire(number + 1, "dry.latency")
    counters = node.core.counters.triggers["dry.latency"]
    assert (counters.fired, counters.dry_run, counters.collected) == (5, 3, 0)
    assert counters.admitted == 0
    assert counters.rate_limited_process == 2
    assert node.connect() == []
    assert list(node.pool.slices()) == []


def test_remote_triggers_are_never_limited_and_each_trace_is_answered() -> None:
    node = Node(NodeConfig("n1", limits=TriggerLimits(1, 1, 1, 1)))
    node.write(1)
    node.connect()
    for number in range(1, 50):
        group = Group("t", trace(number))
        answers = node.hear(Collect(group, (trace(number), trace(1000 + number))))
        assert [a.trace for a in answers if isinstance(a, SliceStatus)] == [
            trace(number),
            trace(1000 + number),
        ]
        assert [a.held for a in answers if isinstance(a, SliceStatus)] == [number == 1, False]
    # Asked again, it answers again.
    again = node.hear(Collect(Group("t", trace(1)), (trace(1),)))
    assert len(again) == 1


def test_what_is_written_after_the_trigger_is_told_and_reported() -> None:
    node = Node()
    handle = node.write(1, close=False)
    node.fire(1)
    node.connect()
    node.connect_slices()
    node.wait_for_more()
    first = node.report()[1]
    node.ack_all()
    node.pool.write(handle, 0, Breadcrumb(99, "n9"), node.now_ns)  # type: ignore[arg-type]
    node.poll()
    (status,) = node.take()
    assert isinstance(status, SliceStatus)
    assert status.crumbs == (99,) and status.open_handles == 1
    node.wait_for_more()
    assert node.report()[1] == status.bytes - first
    node.pool.close(handle, 0)
    node.poll()
    (status,) = node.take()
    assert isinstance(status, SliceStatus) and status.open_handles == 0


def test_growth_alone_is_told_when_the_rest_is_sent_and_not_too_often() -> None:
    node = Node(NodeConfig("n1", status_interval_ns=S))
    handle = node.write(1, close=False)
    node.fire(1)
    node.connect()
    told_ns = node.now_ns
    node.pool.write(handle, 0, Data(1, b"x"), node.now_ns)
    node.poll()
    assert node.take() == []  # the coordinator knows that more is to come
    node.connect_slices()
    node.wait_for_more()
    node.report()
    assert node.core.next_wakeup_ns(node.now_ns) == node.now_ns
    assert node.take() == []
    due_ns = node.core.next_wakeup_ns(node.now_ns)
    assert due_ns == told_ns + S
    node.now_ns = due_ns
    node.core.on_tick(node.now_ns)
    (status,) = node.take()
    assert isinstance(status, SliceStatus)
    assert node.take() == []


def test_bytes_of_a_trace_that_is_open_wait_a_moment_for_the_rest() -> None:
    node = Node()
    handle = node.write(1, close=False)
    node.write(2)
    node.fire(1)
    node.fire(2)
    node.connect()
    node.connect_slices()
    # What is whole waits for nothing.
    assert node.report().keys() == {2}
    assert node.core.wants_slices_connection()
    assert node.core.next_chunks_ns(node.now_ns) is None
    node.pool.write(handle, 0, Data(1, bytes(100)), node.now_ns)
    node.pool.close(handle, 0)
    node.now_ns += 20 * MS
    node.poll()
    (whole,) = (s for s in node.pool.slices() if s.trace == trace(1))
    assert node.report() == {1: whole.bytes}
    # It is open for longer: what there is of it goes, and all that came meanwhile.
    handle = node.write(3, close=False)
    node.fire(3)
    began_ns = node.now_ns
    node.pool.write(handle, 0, Data(1, bytes(100)), node.now_ns)
    node.now_ns += 49 * MS
    node.poll()
    assert node.report() == {}
    node.take()
    due_ns = node.core.next_wakeup_ns(node.now_ns)
    assert due_ns == began_ns + 50 * MS
    node.now_ns = due_ns
    node.core.on_tick(node.now_ns)
    (part,) = (s for s in node.pool.slices() if s.trace == trace(3))
    assert node.report() == {3: part.bytes}
    # And again, from when there was more of it.
    node.now_ns += 1000 * MS
    node.pool.write(handle, 0, Data(1, bytes(100)), node.now_ns)
    node.poll()
    assert node.report() == {}
    node.core.on_tick(node.now_ns + 50 * MS)
    node.now_ns += 50 * MS
    assert node.report().keys() == {3}


def test_a_new_stream_goes_on_from_what_is_durable() -> None:
    node = Node(NodeConfig("n1", chunk_bytes=64))
    node.write(1, 1000)
    node.fire(1)
    node.connect()
    assert node.core.wants_slices_connection()
    node.connect_slices(100)
    chunks = node.core.take_chunks(node.now_ns)
    assert [(c.offset, len(c.data)) for c in chunks] == [(0, 64), (64, 36)]
    node.core.on_slice_reply(SliceReply((SliceAck(trace(1), 40, chunks[0].epoch),)), node.now_ns)
    node.core.on_slices_lost(node.now_ns)
    assert node.core.take_chunks(node.now_ns) == []
    node.core.on_slices_connected(node.now_ns, 2)
    # What the coordinator has beyond is learned before anything is sent.
    ack = SliceAck(trace(1), 100, chunks[0].epoch)
    node.core.on_slice_reply(SliceReply((ack,), 64), node.now_ns)
    assert [c.offset for c in node.core.take_chunks(node.now_ns)] == [100]


def chunks_in(messages: Iterable[object]) -> list[SliceChunk]:
    return [message for message in messages if isinstance(message, SliceChunk)]


def test_small_slices_go_with_what_is_said_of_them() -> None:
    node = Node()
    node.connect(ALL)
    node.connect_slices()
    node.write(1, 1000)
    node.fire(1)
    _, status, chunk = node.take()
    assert isinstance(status, SliceStatus) and isinstance(chunk, SliceChunk)
    assert (chunk.offset, len(chunk.data), chunk.stream) == (0, status.bytes, 1)
    assert node.report() == {}
    node.ack_all()
    assert not node.core.wants_slices_connection()


def test_what_is_said_carries_no_more_than_it_may() -> None:
    node = Node()
    node.connect(ALL)
    node.connect_slices()
    for number in range(1, 5):
        node.write(number, 3000)
        node.fire(number)
    said = chunks_in(node.take())
    assert len(said) == 2
    assert sum(len(chunk.data) for chunk in said) <= CONTROL_CHUNK_BYTES_MAX
    assert len(node.report()) == 2


def test_what_is_said_carries_no_part_of_a_large_slice() -> None:
    node = Node()
    node.connect(ALL)
    node.connect_slices()
    node.write(1, CONTROL_CHUNK_BYTES_MAX)
    node.fire(1)
    assert chunks_in(node.take()) == []
    assert node.report()[1] > CONTROL_CHUNK_BYTES_MAX


@pytest.mark.parametrize("why", ["not agreed", "no credit", "no stream"])
def test_what_is_said_carries_nothing_unless_the_coordinator_takes_it(why: str) -> None:
    node = Node()
    node.connect(AGREED if why == "not agreed" else ALL)
    if why != "no stream":
        node.connect_slices(0 if why == "no credit" else 1 << 20)
    node.write(1)
    node.fire(1)
    said = node.take()
    assert len(said) == 2 and not chunks_in(said)


def test_what_was_said_on_a_stream_that_is_lost_is_sent_again() -> None:
    node = Node()
    node.connect(ALL)
    node.connect_slices()
    node.write(1)
    node.fire(1)
    (lost,) = chunks_in(node.take())
    node.core.on_control_lost(node.now_ns)
    # By the credit of the stream before nothing is sent any more.
    node.write(2)
    node.fire(2)
    assert chunks_in(node.connect(ALL)) == [] and node.report() == {}
    node.connect_slices()
    again, _ = node.core.take_chunks(node.now_ns)
    assert (again.trace, again.offset, again.data) == (lost.trace, lost.offset, lost.data)


def test_what_overtook_the_rest_is_sent_again() -> None:
    node = Node(NodeConfig("n1", chunk_bytes=64))
    node.connect(ALL)
    node.connect_slices()
    node.write(1, 100)
    node.fire(1)
    assert chunks_in(node.take()) == []
    chunks = node.core.take_chunks(node.now_ns)
    assert len(chunks) > 2
    length, epoch = sum(len(chunk.data) for chunk in chunks), chunks[0].epoch
    node.core.on_slice_reply(SliceReply((SliceAck(trace(1), 64, epoch),)), node.now_ns)
    assert node.report() == {}
    again = SliceAck(trace(1), 64, epoch, again=True)
    node.core.on_slice_reply(SliceReply((again,)), node.now_ns)
    assert node.report() == {1: length - 64}
    # What was trimmed cannot be sent again.
    node.core.on_slice_reply(SliceReply((SliceAck(trace(1), 0, epoch, again=True),)), node.now_ns)
    assert node.report() == {}


def test_a_new_stream_repeats_what_is_not_known_to_be_durable() -> None:
    node = Node(NodeConfig("n1", chunk_bytes=64))
    node.write(1, 1000)
    node.fire(1)
    node.connect()
    node.connect_slices(128)
    first = node.core.take_chunks(node.now_ns)
    sent = b"".join(chunk.data for chunk in first)
    assert len(sent) == 128
    counters = node.core.counters.triggers["t"]
    node.core.on_slice_reply(SliceReply((SliceAck(trace(1), 40, first[0].epoch),)), node.now_ns)
    node.core.on_slices_lost(node.now_ns)
    node.connect_slices(64)
    (again,) = node.core.take_chunks(node.now_ns)
    assert (again.offset, again.data) == (40, sent[40:104])
    assert counters.reported == 0
    node.ack_all()
    assert counters.reported == 1


def test_each_slice_of_a_trace_has_an_epoch_of_its_own() -> None:
    node = Node(NodeConfig("n1", triggered_ttl_ns=1000))
    node.write(1, 100)
    node.fire(1)
    node.connect()
    node.connect_slices(1 << 20)
    (first,) = node.core.take_chunks(node.now_ns)
    node.ack_all()
    node.hear(TriggerAck(Group("t", trace(1))))
    node.hear(Release(trace(1)))
    node.now_ns += 2000
    node.core.on_tick(node.now_ns)
    assert node.pool.slice(trace(1)) is None  # the mark has expired
    statuses = node.hear(Collect(Group("u", trace(1)), (trace(1),)))
    (status,) = (said for said in statuses if isinstance(said, SliceStatus))
    assert status.epoch not in (0, first.epoch)
    # What was said of the one before does not hold for this one.
    late = SliceAck(trace(1), first.offset + len(first.data), first.epoch)
    node.core.on_slice_reply(SliceReply((late,)), node.now_ns)
    (second,) = node.core.take_chunks(node.now_ns)
    assert (second.offset, len(second.data), second.epoch) == (0, status.bytes, status.epoch)
    node.ack_all()
    assert not node.core.wants_slices_connection()


def test_two_groups_hold_a_trace_until_both_let_go() -> None:
    node = Node()
    for number in (1, 2, 3):
        node.write(number)
    node.fire(1, "a", laterals=(2,))
    node.fire(3, "b", laterals=(2,))
    node.connect()
    node.hear(Drop(Group("a", trace(1))))
    assert {s.trace for s in node.pool.slices()} == {trace(2), trace(3)}
    assert SliceFlags.ABANDONED in node.pool.flags_of(trace(1))
    assert SliceFlags.ABANDONED not in node.pool.flags_of(trace(2))
    node.hear(Drop(Group("b", trace(3))))
    assert list(node.pool.slices()) == []


def told_of(messages: Iterable[NodeMessage]) -> list[int]:
    """The traces whose statuses are in messages, by number."""
    return [int.from_bytes(m.trace, "big") for m in messages if isinstance(m, SliceStatus)]


def test_a_neighbour_that_fires_again_and_again_is_told_of_once() -> None:
    node = Node()
    node.connect()
    for number in range(1, 40):
        node.write(number)
    node.fire(1, laterals=range(8, 40))
    assert sorted(told_of(node.take())) == [1, *range(8, 40)]
    node.fire(2, laterals=range(8, 40))
    assert told_of(node.take()) == [2]
    node.fire(8, laterals=range(9, 40))
    assert told_of(node.take()) == [8]
    node.core.on_control_lost(node.now_ns)
    assert sorted(told_of(node.connect())) == [1, 2, *range(8, 40)]


def test_a_neighbour_that_the_coordinator_may_have_forgotten_is_told_of_again() -> None:
    node = Node()
    node.connect()
    node.connect_slices()
    for number in range(1, 8):
        node.write(number)
    node.fire(1, laterals=(5,))
    assert told_of(node.take()) == [1, 5]
    node.hear(TriggerAck(Group("t", trace(1))))
    node.report()
    assert told_of(node.hear(Release(trace(5)))) == []
    node.fire(2, laterals=(5,))
    assert told_of(node.take()) == [2, 5], "it said so before it had the bytes"
    node.ack_all()
    node.hear(TriggerAck(Group("t", trace(2))))
    node.hear(Release(trace(5)))
    node.fire(3, laterals=(5,))
    assert told_of(node.take()) == [3, 5]
    node.hear(Drop(Group("t", trace(1))))
    assert told_of(node.hear(Drop(Group("t", trace(2))))) == [5], "another group has it yet"


def test_a_shared_trace_is_charged_to_its_first_group_and_then_to_the_next() -> None:
    node = Node()
    node.write(1)
    shared = node.write(2, close=False)
    node.write(3)
    node.fire(1, "a", laterals=(2,))
    node.fire(3, "b", laterals=(2,))
    node.pool.write(shared, 0, Data(1, bytes(50)), node.now_ns)
    node.poll()
    sizes = {int.from_bytes(s.trace, "big"): s.bytes for s in node.pool.slices()}
    charged = {name: depth.bytes for name, depth in node.core.queues.items()}
    assert charged == {"a": sizes[1] + sizes[2], "b": sizes[3]}
    node.connect()
    node.hear(Drop(Group("a", trace(1))))
    charged = {name: depth.bytes for name, depth in node.core.queues.items()}
    assert charged == {"a": 0, "b": sizes[2] + sizes[3]}


def test_a_group_that_was_given_up_stays_given_up() -> None:
    node = Node()
    node.write(1)
    node.connect()
    group = Group("t", trace(1))
    node.hear(Drop(group))
    (answer,) = node.hear(Collect(group, (trace(1),)))
    assert answer == SliceStatus(trace(1), held=False, flags=SliceFlags.ABANDONED)
    node.fire(1)
    assert node.take() == []
    assert list(node.pool.slices()) == []


def test_release_waits_for_news_bytes_and_unknown_groups() -> None:
    node = Node()
    node.write(1)
    node.fire(1, "a")
    messages = node.connect()
    node.connect_slices()
    node.report()
    assert isinstance(messages[0], TriggerFired)
    node.hear(TriggerAck(messages[0].group))
    node.hear(Release(trace(1)))  # nothing is durable yet: not followed
    assert node.core.wants_slices_connection()
    node.ack_all()
    assert not node.core.wants_slices_connection()
    node.fire(1, "b")
    node.take()
    node.hear(Release(trace(1)))  # cannot have known of b
    (again,) = node.hear(TriggerAck(Group("b", trace(1))))
    assert isinstance(again, SliceStatus)
    node.hear(Release(trace(1)))
    node.core.on_control_lost(node.now_ns)
    assert node.connect() == []
    node.now_ns += node.config.triggered_ttl_ns
    node.core.on_tick(node.now_ns)
    assert list(node.pool.slices()) == []


def test_a_release_that_overtakes_the_last_ack_is_asked_for_again() -> None:
    """They come on two connections; no mark may wait for a release that was said already."""
    node = Node()
    node.write(1)
    node.fire(1)
    node.connect()
    node.connect_slices()
    node.hear(TriggerAck(Group("t", trace(1))))
    node.report()
    assert node.hear(Release(trace(1))) == []
    node.ack_all()
    (status,) = node.take()
    assert isinstance(status, SliceStatus) and status.trace == trace(1)
    assert node.hear(Release(trace(1))) == []
    node.now_ns += node.config.triggered_ttl_ns
    node.core.on_tick(node.now_ns)
    assert list(node.pool.slices()) == []


def test_what_is_recovered_fits_the_wire_however_many_laterals_others_named() -> None:
    node = Node()
    numbers = range(1, 66)
    for number in numbers:
        node.write(number)
    group = Group("t", trace(1))
    node.connect()
    for start in (1, 33):
        node.hear(Collect(group, tuple(trace(n) for n in range(start, start + 33))))
    node.core.on_control_lost(node.now_ns)
    node.pool.restart()
    node.core = node.new_core(2)
    messages = node.connect()
    encode_node_batch(messages)
    assert {m.trace for m in messages if isinstance(m, SliceStatus)} == {trace(n) for n in numbers}


def test_a_trace_never_seen_is_remembered_for_a_time_and_bounded() -> None:
    config = NodeConfig("n1", triggered_max=10)
    node = Node(config)
    node.connect()
    for number in range(1, 31):
        node.hear(Collect(Group("t", trace(number)), (trace(number),)))
    assert len(list(node.pool.slices())) == 10
    assert node.core.counters.marks_dropped == 20
    node.write(30)
    node.poll()
    (status,) = node.take()
    assert isinstance(status, SliceStatus) and status.held
    assert node.core.next_wakeup_ns(node.now_ns) == node.now_ns + config.triggered_ttl_ns
    node.now_ns += config.triggered_ttl_ns
    node.core.on_tick(node.now_ns)
    assert [s.trace for s in node.pool.slices()] == [trace(30)]


@pytest.mark.parametrize("early", [False, True], ids=["shared-after", "shared-before"])
@pytest.mark.parametrize(
    "users",
    [(1000, 1001), (1000, None), (None, 1001)],
    ids=["known", "flood-unknown", "honest-unknown"],
)
def test_who_fires_much_costs_nobody_else_a_mark(
    users: tuple[int | None, int | None], early: bool
) -> None:
    node = Node(NodeConfig("n1", triggered_max=100, limits=UNLIMITED))
    node.connect()
    honest, flood = (node.add_client(user) for user in users)

    def fire_for_the_same() -> None:
        node.fire(3, "theirs", (2, 9), client=flood)
        node.fire(1, laterals=(2,), client=flood)

    if early:
        fire_for_the_same()
    node.fire(1, laterals=(2,), client=honest)
    node.hear(Collect(Group("remote", trace(3)), (trace(3),)))
    if not early:
        fire_for_the_same()
    for number in range(1000, 11000, 1000):
        node.fire(number, "theirs", range(number + 1, number + 33), client=flood)
    marked = {found.trace for found in node.pool.slices()}
    assert len(marked) == 100
    assert node.core.counters.marks_dropped > 200
    assert {trace(1), trace(2), trace(3)} <= marked
    assert trace(9) not in marked


def test_the_last_who_wanted_a_trace_gives_its_mark_up() -> None:
    node = Node(NodeConfig("n1", triggered_max=10))
    node.connect()
    one, other = node.add_client(1000), node.add_client(1001)
    node.fire(1, client=one)
    node.fire(1, "second", client=other)
    for number in range(10, 20):
        node.fire(number, client=one)
    assert trace(1) in {found.trace for found in node.pool.slices()}
    for number in range(20, 30):
        node.fire(number, client=other)
    marked = {found.trace for found in node.pool.slices()}
    assert trace(1) not in marked
    assert len(marked) == 10


def test_marks_alone_never_fill_the_report_store() -> None:
    node = Node(pool=PoolConfig(store_bytes=64 * 2048))
    node.connect()
    for number in range(1, 100):
        node.hear(Collect(Group("t", trace(number)), (trace(number),)))
    # Half of it, as long as nothing else needs that.
    assert len(list(node.pool.slices())) == 32
    assert node.pool.store_usage().used_bytes == 32 * 2048
    for _ in range(28):
        node.write(1000, 2000)
    node.fire(1000)
    usage = node.pool.store_usage()
    assert node.core.counters.triggers["t"].abandoned == 0
    assert usage.used_bytes <= 48 * 2048
    # A quarter is theirs.
    idle = [found for found in node.pool.slices() if not found.bytes]
    assert len(idle) == 16


def test_a_new_daemon_reports_what_the_store_held() -> None:
    node = Node()
    for number in (1, 2):
        node.write(number)
    node.fire(1, laterals=(2,))
    node.pool.restart()
    node.core = node.new_core(2)
    messages = node.connect()
    assert isinstance(messages[0], TriggerFired)
    assert messages[0].group == Group("t", trace(1))
    assert messages[0].laterals == (trace(2),)
    assert {m.trace for m in messages[1:] if isinstance(m, SliceStatus)} == {trace(1), trace(2)}
    node.connect_slices()
    assert set(node.report()) == {1, 2}


def test_overload_gives_up_the_lowest_priority_of_the_greediest_trigger() -> None:
    limits = TriggerLimits(1, 1000, 1, 1000)
    config = NodeConfig("n1", cluster_seed=0x0123456789ABCDEF, limits=limits)
    node = Node(config, PoolConfig(store_bytes=1 << 20))
    node.connect()
    for number in range(1, 6):
        node.write(number, 4000)
        node.fire(number, "rare")
    for number in range(100, 400):
        node.write(number, 4000)
        node.fire(number, "faulty")
        node.poll()
    held = {int.from_bytes(s.trace, "big") for s in node.pool.slices()}
    assert set(range(1, 6)) <= held
    gone = [m.group for m in node.take() if isinstance(m, Abandoned)]
    assert len(gone) == node.core.counters.triggers["faulty"].abandoned > 100
    # In the order of priority: whatever was given up ranks below whatever is left.
    node.connect_slices()
    order = [n for n in node.report() if n >= 100]
    assert set(order) == {n for n in held if n >= 100}
    assert len(gone) + len(order) == 300
    rank = TraceHash(Domain.PRIORITY, config.cluster_seed)
    ranks = [rank(trace(n)) for n in order]
    assert ranks == sorted(ranks, reverse=True)
    assert max(rank(group.primary) for group in gone) < min(ranks)


def test_the_coordinators_seed_ranks_what_comes_and_what_is_held() -> None:
    limits = TriggerLimits(1, 1000, 1, 1000)
    config = NodeConfig("n1", cluster_seed=1, limits=limits)
    node = Node(config, PoolConfig(store_bytes=1 << 20))
    for number in range(100):
        node.write(number + 1, 1000)
        node.fire(number + 1)
    assert node.core.take_priority_seed() is None
    seed = 0xFEDCBA9876543210
    node.core.on_control_connected(node.now_ns, ())
    node.core.on_control(Welcome(7, AGREED, seed), node.now_ns, node.now_ns + REAL_NS)
    assert node.core.take_priority_seed() == seed
    assert node.core.take_priority_seed() is None
    for number in range(100, 200):
        node.write(number + 1, 1000)
        node.fire(number + 1)
    node.connect_slices()
    rank = TraceHash(Domain.PRIORITY, seed)
    ranks = [rank(trace(number)) for number in node.report()]
    assert len(ranks) == 200
    assert ranks == sorted(ranks, reverse=True)
    # One that says none: as configured.
    node.core.on_control_connected(node.now_ns, ())
    node.core.on_control(Welcome(8, AGREED), node.now_ns, node.now_ns + REAL_NS)
    assert node.core.take_priority_seed() == 1


def test_a_young_group_is_spared_for_other_triggers_unless_the_store_is_nearly_full() -> None:
    limits = TriggerLimits(1, 1000, 1, 1000)
    config = NodeConfig("n1", limits=limits, abandon_grace_ns=S)
    node = Node(config, PoolConfig(store_bytes=200 * 2048))
    fired = 0
    while node.pool.store_usage().used_bytes <= 0.76 * 200 * 2048:
        fired += 1
        node.write(fired)
        node.fire(fired)
    assert not node.core.links[0].owed.abandoned_groups
    due_ns = node.core.next_wakeup_ns(node.now_ns)
    assert due_ns is not None and due_ns < node.now_ns + S
    while node.pool.store_usage().used_bytes <= 0.875 * 200 * 2048 - 4096:
        fired += 1
        node.write(fired)
        node.fire(fired)
    assert not node.core.links[0].owed.abandoned_groups
    for _ in range(3):
        fired += 1
        node.write(fired)
        node.fire(fired)
    assert node.core.links[0].owed.abandoned_groups
    node.now_ns += S
    node.core.on_tick(node.now_ns)
    assert node.pool.store_usage().used_bytes <= 0.75 * 200 * 2048


def test_abandonment_is_told_until_the_coordinator_shows_that_it_knows() -> None:
    config = NodeConfig("n1", limits=TriggerLimits(1, 1000, 1, 1000))
    node = Node(config, PoolConfig(store_bytes=1 << 20))
    for number in range(1, 300):
        node.write(number, 4000)
        node.fire(number)
    gone = [m.group for m in node.connect() if isinstance(m, Abandoned)]
    assert gone
    node.hear(Drop(gone[0]))
    node.core.on_control_lost(node.now_ns)
    assert [m.group for m in node.connect() if isinstance(m, Abandoned)] == gone[1:]


def test_what_is_given_up_is_told_in_full_before() -> None:
    config = NodeConfig("n1", limits=TriggerLimits(1, 1000, 1, 1000))
    node = Node(config, PoolConfig(store_bytes=1 << 20))
    for number in range(1, 300):
        node.write(number, 4000)
        node.fire(number)
    messages = node.connect()
    for index, message in enumerate(messages):
        if isinstance(message, Abandoned):
            last = messages[index - 1]
            assert isinstance(last, SliceStatus)
            assert last.trace == message.group.primary and last.bytes > 4000


SEARCH_NS = 20 * MS
SEARCHES = PoolConfig(search_ns=SEARCH_NS)


def test_while_a_trace_is_searched_for_nothing_of_it_is_said_or_sent() -> None:
    node = Node(pool=SEARCHES)
    handle = node.write(1, close=False)
    node.connect()
    node.connect_slices()
    asked = Collect(Group("t", trace(1)), (trace(1), trace(2)))
    assert node.hear(asked) == []
    assert node.hear(asked) == []  # asked again
    node.now_ns += SEARCH_NS // 2
    node.pool.write(handle, 0, Breadcrumb(99, "n9"), node.now_ns)  # type: ignore[arg-type]
    node.poll()
    copied = node.pool.slice(trace(1))
    assert copied is not None
    assert copied.searching and copied.bytes > 0
    # A data plane may tell of that; it is looked at in any case.
    node.core.on_dataplane([SliceChanged(trace(1))], node.now_ns)
    assert node.take() == []
    assert node.report() == {}
    assert not node.core.wants_slices_connection()
    assert node.core.unreported_groups == 1
    # On another stream, too.
    node.core.on_control_lost(node.now_ns)
    assert node.connect() == []
    node.connect_slices()
    node.end_searches()
    answers = {m.trace: m for m in node.take() if isinstance(m, SliceStatus)}
    assert list(answers) == [trace(1), trace(2)]
    assert (answers[trace(1)].held, answers[trace(2)].held) == (True, False)
    assert answers[trace(1)].crumbs == (99,)
    node.wait_for_more()
    assert node.report() == {1: answers[trace(1)].bytes}
    node.ack_all()
    assert node.core.unreported_groups == 0


def test_a_firing_is_told_at_once_and_its_slice_when_it_is_found() -> None:
    node = Node(pool=SEARCHES)
    node.write(1)
    node.connect()
    node.fire(1)
    assert [type(message) for message in node.take()] == [TriggerFired]
    node.hear(TriggerAck(Group("t", trace(1))))
    node.end_searches()
    (status,) = node.take()
    assert isinstance(status, SliceStatus) and status.held


def test_what_was_lost_before_the_trigger_is_counted_once_the_search_is_over() -> None:
    pool = PoolConfig(pool_bytes=8 << 10, segment_bytes=1024, stock_segments=2, search_ns=SEARCH_NS)
    node = Node(pool=pool)
    for number in range(1, 30):
        node.write(number, 500)
        node.now_ns += S
        node.poll()
    assert SliceFlags.EVICTED in node.pool.flags_of(trace(1))
    for _ in range(20):
        node.write(40, 500)  # and nobody grants segments in between
    assert node.pool.counters.records_lost > 0
    node.fire(1)
    node.fire(40)
    counters = node.core.counters.triggers["t"]
    assert (counters.collected, counters.evicted_before, counters.lossy) == (2, 0, 0)
    node.end_searches()
    assert (counters.evicted_before, counters.lossy) == (1, 1)
    node.pool.write(node.pool.open(node.client, trace(1)), 0, Data(1, b"late"), node.now_ns)
    node.poll()
    assert (counters.evicted_before, counters.lossy) == (1, 1)


def test_a_trace_that_is_searched_for_is_not_idle() -> None:
    config = NodeConfig("n1", triggered_max=10, triggered_ttl_ns=MS)
    node = Node(config, SEARCHES)
    node.connect()
    for number in range(1, 6):
        node.hear(Collect(Group("t", trace(number)), (trace(number),)))
    node.now_ns += 10 * MS
    node.core.on_tick(node.now_ns)
    assert node.core.triggered_traces == 5
    assert node.core.next_wakeup_ns(node.now_ns) is None
    # Never seen, it now ends by time.
    node.now_ns += 10 * MS
    node.end_searches()
    assert len(node.take()) == 5
    assert node.core.next_wakeup_ns(node.now_ns) == node.now_ns + config.triggered_ttl_ns
    node.now_ns += config.triggered_ttl_ns
    node.core.on_tick(node.now_ns)
    assert node.core.triggered_traces == 0


def test_what_is_searched_for_displaces_what_is_idle() -> None:
    node = Node(pool=PoolConfig(store_bytes=64 * 2048, search_ns=SEARCH_NS))
    node.connect()
    for number in range(1, 33):
        node.hear(Collect(Group("t", trace(number)), (trace(number),)))
    node.end_searches()
    assert len(node.take()) == 32
    node.write(50)
    for number in range(41, 81):
        node.hear(Collect(Group("t", trace(number)), (trace(number),)))
    # Half of the store has room for 32 marks, but no search is cut short for that.
    assert {found.trace for found in node.pool.slices()} == {trace(n) for n in range(41, 81)}
    assert node.core.counters.marks_dropped == 32
    node.end_searches()
    told = {m.trace: m.held for m in node.take() if isinstance(m, SliceStatus)}
    assert told == {trace(number): number == 50 for number in range(41, 81)}
    # One has bytes, which take of that.
    assert node.pool.store_usage().used_bytes == 32 * 2048


def test_what_is_searched_for_can_be_given_up() -> None:
    node = Node(pool=SEARCHES)
    node.write(1)
    node.write(2)
    node.fire(1)
    node.fire(2, "other")
    node.fire(2)
    node.connect()
    for number in (1, 2):
        node.hear(Drop(Group("t", trace(number))))
    assert SliceFlags.ABANDONED in node.pool.flags_of(trace(1))
    node.end_searches()
    # Of the second trace another group holds on.
    assert [m.trace for m in node.take() if isinstance(m, SliceStatus)] == [trace(2)]
    assert [found.trace for found in node.pool.slices()] == [trace(2)]


def test_a_release_in_the_middle_of_a_search_waits_for_what_is_found() -> None:
    node = Node(pool=SEARCHES)
    handle = node.write(1, close=False)
    node.connect()
    node.connect_slices()
    node.hear(Collect(Group("t", trace(1)), (trace(1), trace(2))))
    node.now_ns += SEARCH_NS // 2
    node.pool.close(handle, 0)
    node.poll()  # all is copied, and nothing said
    node.hear(Release(trace(1)))
    node.hear(Release(trace(2)))
    node.end_searches()
    assert [m.trace for m in node.take() if isinstance(m, SliceStatus)] == [trace(1), trace(2)]
    assert list(node.report()) == [1]
    node.ack_all()
    node.now_ns += node.config.triggered_ttl_ns
    node.core.on_tick(node.now_ns)
    # The one never seen has ended by time; the other waits for the word on what was found.
    assert [found.trace for found in node.pool.slices()] == [trace(1)]
    node.hear(Release(trace(1)))
    node.now_ns += node.config.triggered_ttl_ns
    node.core.on_tick(node.now_ns)
    assert node.core.triggered_traces == 0


def test_a_release_when_all_is_copied_and_nothing_said_releases_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = Node()
    searched.write(1)
    searched.fire(1)
    whole = searched.pool.slice(trace(1))
    assert whole is not None and whole.bytes > 0
    node = Node(pool=SEARCHES)
    node.write(1)
    node.connect()
    node.connect_slices()
    collect = PoolModel.collect

    def collect_in_the_middle_of_a_pass(*asked: Any) -> Slice:
        """Of the data plane's other thread, which has copied all."""
        found = collect(*asked)
        assert found.searching
        return replace(found, bytes=whole.bytes)

    monkeypatch.setattr(PoolModel, "collect", collect_in_the_middle_of_a_pass)
    node.hear(Collect(Group("t", trace(1)), (trace(1),)))
    node.hear(Release(trace(1)))
    node.end_searches()
    assert [m.trace for m in node.take() if isinstance(m, SliceStatus)] == [trace(1)]
    assert list(node.report()) == [1]
    node.ack_all()
    node.now_ns += node.config.triggered_ttl_ns
    node.core.on_tick(node.now_ns)
    # It waits for the word on what was found.
    assert [found.trace for found in node.pool.slices()] == [trace(1)]


def test_a_new_daemon_waits_for_the_search_that_it_begins_anew() -> None:
    node = Node(pool=SEARCHES)
    node.write(1)
    node.fire(1)
    node.now_ns += SEARCH_NS // 2
    node.poll()
    node.pool.restart()
    node.core = node.new_core(2)
    assert [type(message) for message in node.connect()] == [TriggerFired]
    node.now_ns += SEARCH_NS // 2  # when the first one would have ended
    node.poll()
    assert node.take() == []
    node.end_searches()
    assert [m.trace for m in node.take() if isinstance(m, SliceStatus)] == [trace(1)]


def test_a_store_that_fills_up_in_a_search_is_told_at_its_end() -> None:
    node = Node(pool=PoolConfig(store_bytes=8 * 2048, search_ns=SEARCH_NS))
    node.write(1, 20_000)
    node.connect()
    node.fire(1)
    node.poll()
    assert [type(message) for message in node.take()] == [TriggerFired]
    node.end_searches()
    assert node.core.counters.triggers["t"].store_full == 1
    (status,) = node.take()
    assert isinstance(status, SliceStatus) and SliceFlags.STORE_FULL in status.flags


def test_a_clock_probe_is_answered_with_both_times() -> None:
    node = Node()
    node.connect()
    (reply,) = node.hear(ClockProbe(5))
    assert reply == ClockReply(5, node.now_ns + REAL_NS, node.now_ns + REAL_NS)


def test_a_clock_that_is_set_is_told_before_anything_else() -> None:
    node = Node()
    node.connect()
    node.hear(ClockProbe(1))
    node.now_ns += S
    # As far as it is slewed, or both clocks are not read at once, it is no news.
    node.core.on_clock(node.now_ns, node.now_ns + REAL_NS + MS // 2)
    node.fire(1)
    assert not any(isinstance(message, ClockReply) for message in node.take())
    node.core.on_clock(node.now_ns, node.now_ns + REAL_NS - 3600 * S)
    node.fire(2)
    stepped, *others = node.take()
    before_ns, after_ns = node.now_ns + REAL_NS, node.now_ns + REAL_NS - 3600 * S
    assert stepped == ClockReply(CLOCK_STEPPED, before_ns, after_ns)
    assert others and not any(isinstance(message, ClockReply) for message in others)
    # Once. And who begins anew asks by himself.
    node.core.on_clock(node.now_ns, node.now_ns + REAL_NS - 3600 * S)
    assert node.take() == []
    node.core.on_control_lost(node.now_ns)
    node.core.on_clock(node.now_ns, node.now_ns + REAL_NS)
    assert not any(isinstance(message, ClockReply) for message in node.connect())


def test_names_that_nobody_fires_by_give_their_places_to_others() -> None:
    config = NodeConfig("n1", trigger_names_max=2, policies={"own": TriggerPolicy()})
    node = Node(config)
    node.write(1)
    node.fire(1, "held")
    node.fire(2, "unused")
    node.fire(3, "own")
    node.fire(4, "new")
    triggers = node.core.counters.triggers
    assert set(triggers) == {"held", "unused", "own", OTHER_NAMES}
    node.connect()
    node.hear(TriggerAck(Group("unused", trace(2))))

    def pass_time() -> None:
        node.now_ns += UNUSED_NS
        node.core.on_tick(node.now_ns)

    pass_time()
    node.fire(5, "new")
    assert set(triggers) == {"held", "unused", "own", OTHER_NAMES}
    pass_time()
    node.fire(6, "new")
    node.fire(7, "newer")
    # The one with traces in the store stays; what was counted for the other is not lost.
    assert set(triggers) == {"held", "new", "own", OTHER_NAMES}
    assert triggers[OTHER_NAMES].fired == 4
    assert set(node.core.queues) == {"held", "new", "own", OTHER_NAMES}


def test_more_trigger_names_than_allowed_share_one_entry() -> None:
    config = NodeConfig("n1", trigger_names_max=3, policies={"own": TriggerPolicy()})
    node = Node(config)
    for number in range(1, 20):
        node.fire(number, f"name{number}")
    node.fire(30, "own")
    assert set(node.core.counters.triggers) == {"name1", "name2", "name3", OTHER_NAMES, "own"}
    assert node.core.counters.triggers[OTHER_NAMES].fired == 16


def due(node: Node) -> dict[str, int]:
    """How much waits to be said, by its kind."""
    owed = node.core.links[0].owed
    return {
        name: len(getattr(owed, name))
        for name in (
            "_firings_due",
            "_abandonments_due",
            "_statuses_due",
            "_statuses_later",
            "_answers",
            "_abandoned",
        )
    }


def held_traces(node: Node) -> set[TraceId]:
    return set(node.core._holdings.traces)


def firings(node: Node, numbers: Iterable[int]) -> None:
    """Of each third trace there is nothing; what there is of the others the store cannot hold."""
    for number in numbers:
        if number % 3:
            node.write(number, 4000)
        node.fire(number)


def test_nothing_is_due_while_there_is_no_coordinator_and_then_all_that_holds() -> None:
    node = Node(
        NodeConfig("n1", triggered_max=50, limits=UNLIMITED), PoolConfig(store_bytes=256 << 10)
    )
    firings(node, range(1, 151))
    assert {name: count for name, count in due(node).items() if count} == {"_abandoned": 50}
    messages = node.connect()
    groups = node.core._holdings.groups
    by_priority = sorted(groups, key=lambda group: groups[group].order)
    assert [m.group for m in messages if isinstance(m, TriggerFired)] == by_priority
    assert {m.trace for m in messages if isinstance(m, SliceStatus)} >= held_traces(node)
    given_up = [m.group for m in messages if isinstance(m, Abandoned)]
    assert given_up == list(node.core.links[0].owed.abandoned_groups)
    # What it hears first are the bytes that it will never see.
    for index, message in enumerate(messages):
        if isinstance(message, Abandoned):
            assert isinstance(messages[index - 1], SliceStatus)


def test_what_is_due_to_a_coordinator_that_does_not_read_goes_with_what_is_held() -> None:
    bound = 50
    node = Node(
        NodeConfig("n1", triggered_max=bound, limits=UNLIMITED), PoolConfig(store_bytes=256 << 10)
    )
    node.connect()
    firings(node, range(1, 3 * bound + 1))
    assert max(due(node).values()) <= bound
    assert node.core.counters.abandonments_forgotten > 0
    # Another node had the youngest given up, of which this one has not even told.
    (youngest, before) = list(node.core.links[0].owed.abandoned_groups)[:-3:-1]
    node.core.on_control(Drop(youngest), node.now_ns, node.now_ns + REAL_NS)
    messages = node.take()
    groups = node.core._holdings.groups
    fired = [m.group for m in messages if isinstance(m, TriggerFired)]
    assert fired and len(fired) == len(groups) and set(fired) == set(groups)
    assert {m.trace for m in messages if isinstance(m, SliceStatus)} >= held_traces(node)
    given_up = [m.group for m in messages if isinstance(m, Abandoned)]
    assert len(given_up) == bound - 1 and given_up[-1] == before


def test_lengths_that_were_to_be_told_later_go_with_their_traces() -> None:
    node = Node(NodeConfig("n1", status_interval_ns=S))
    handle = node.write(1, close=False)
    node.fire(1)
    node.connect()
    node.connect_slices()
    for _ in range(3):
        node.wait_for_more()
        node.report()
        node.pool.write(handle, 0, Data(1, bytes(50)), node.now_ns)
        node.poll()
        node.take()
    assert due(node)["_statuses_later"] == 1
    node.core.on_control(Drop(Group("t", trace(1))), node.now_ns, node.now_ns + REAL_NS)
    assert due(node)["_statuses_later"] == due(node)["_statuses_due"] == 0


def test_firings_that_lost_their_traces_are_bounded() -> None:
    node = Node(NodeConfig("n1", triggered_max=5))
    for number in range(1, 50):
        node.write(number)
        node.fire(number)
        node.core.on_control_connected(node.now_ns, ())
        node.hear(Welcome(1, AGREED))
        node.hear(Drop(Group("t", trace(number))))
        node.core.on_control_lost(node.now_ns)
    fired = [m.group.primary for m in node.connect() if isinstance(m, TriggerFired)]
    assert sorted(fired) == [trace(n) for n in range(45, 50)]
    assert node.core.counters.firings_dropped == 44


@given(
    rate=st.integers(1, 1000),
    burst=st.integers(1, 50),
    gaps_ns=st.lists(st.integers(0, S), min_size=1, max_size=200),
)
def test_a_bucket_admits_no_more_than_rate_and_burst(
    rate: int, burst: int, gaps_ns: list[int]
) -> None:
    bucket = TokenBucket(rate, burst, 0)
    now_ns = 0
    taken: list[int] = []
    for gap_ns in gaps_ns:
        now_ns += gap_ns
        if bucket.take(now_ns):
            taken.append(now_ns)
        else:
            # A refusal is due to earlier firings, not to the bucket being unfair.
            assert taken
    for i, begin_ns in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= burst + rate * (taken[j] - begin_ns) / S + 1e-6


def test_who_asks_too_often_still_gets_its_rate() -> None:
    bucket = TokenBucket(10, 1, 0)
    assert sum(bucket.take(ms * MS) for ms in range(10_000)) == 100


def test_who_is_refused_gets_no_tokens_by_others_that_come() -> None:
    admission = Admission(TriggerLimits(1, 2, 1e6, 1e6))
    assert [admission.admit(1, "t", 0) for _ in range(3)] == [None, None, Refusal.PROCESS]
    for client in range(2, PROCESSES_MAX + 1):
        assert admission.admit(client, "t", 0) is None
    # By now all are full again but the first: it is the one to remember when one more comes.
    now_ns = 3 * S // 2
    assert admission.admit(PROCESSES_MAX + 1, "t", now_ns) is None
    assert [admission.admit(1, "t", now_ns) for _ in range(2)] == [None, Refusal.PROCESS]


def admitted(
    limits: TriggerLimits, per_s: dict[int, int], users: dict[int, int], seconds: int = 30
) -> dict[int, float]:
    """The shares that processes get of what they fire by one name, each at its rate."""
    admission = Admission(limits, users.get)
    firings = sorted(
        (index * S // rate, client)
        for client, rate in per_s.items()
        for index in range(seconds * rate)
    )
    got = Counter(
        client for now_ns, client in firings if admission.admit(client, "t", now_ns) is None
    )
    return {client: got[client] / (seconds * rate) for client, rate in per_s.items()}


@pytest.mark.parametrize(
    ("processes", "users"),
    [
        (1, {}),
        (10, {}),
        (2, {1: 7, 2: 7}),
        # All one user's: what it has, its processes share too.
        (1, {1: 7, 101: 7, 102: 7}),
        (3, {1: 7, 2: 7, 3: 7, 101: 7, 102: 8}),
    ],
)
def test_who_floods_a_name_leaves_half_of_it_to_others(
    processes: int, users: dict[int, int]
) -> None:
    """Users that are not known have one process each."""
    flood = range(1, processes + 1)
    modest, rare = 101, 102
    shares = admitted(
        TriggerLimits(100, 100, 100, 100),
        {**dict.fromkeys(flood, 1000), modest: 30, rare: 1},
        users,
    )
    assert shares[modest] >= 0.95
    assert shares[rare] >= 0.95
    # And gets what they do not want.
    assert sum(shares[client] * 1000 for client in flood) == pytest.approx(69, abs=8)


def test_a_user_of_many_modest_processes_leaves_half_of_a_name_to_others() -> None:
    crowd = range(1, 11)
    rates = {**dict.fromkeys(crowd, 45), 101: 30}
    shares = admitted(TriggerLimits(100, 100, 100, 100), rates, dict.fromkeys(crowd, 7))
    assert shares[101] >= 0.95


@pytest.mark.parametrize(
    ("limits", "refusal"),
    [
        (TriggerLimits(33, 33, 1e6, 1e6), Refusal.PROCESS),
        (TriggerLimits(1e6, 1e6, 33, 33), Refusal.TRIGGER),
    ],
)
def test_each_trace_that_is_collected_costs_a_token(
    limits: TriggerLimits, refusal: Refusal
) -> None:
    admission = Admission(limits)
    answers = [admission.admit(1, "t", ms * MS, laterals=32) for ms in range(10_000)]
    # A group a second, and one of the burst.
    assert answers.count(None) == pytest.approx(10, abs=1)
    assert answers.count(refusal) == len(answers) - answers.count(None)


def test_a_group_that_is_refused_costs_its_process_one_token() -> None:
    admission = Admission(TriggerLimits(1, 100, 1, 10))
    assert admission.admit(1, "t", 0, laterals=32) is None
    # The name is in debt. Its process has the rest of its burst for others.
    refused = [admission.admit(1, "t", 0, laterals=32) for _ in range(10)]
    assert refused == [Refusal.TRIGGER] * 10
    rest = [admission.admit(1, f"t{number}", 0) for number in range(100)]
    assert rest.count(None) == 100 - 33 - 10


def test_a_node_counts_what_a_firing_collects() -> None:
    node = Node(NodeConfig("n1", limits=TriggerLimits(10, 10, 10, 10, laterals_max=4)))
    # Five others, of which four may come with it; itself is none.
    node.fire(1, laterals=(1, 2, 3, 4, 5, 6))
    node.fire(10, laterals=(11, 12, 13, 14, 11))
    node.fire(20)
    assert node.core.counters.triggers["t"].admitted == 2
    node.now_ns += S // 10
    node.fire(21)
    node.fire(22)
    assert node.core.counters.triggers["t"].admitted == 3


def test_the_oldest_of_what_comes_says_how_long_the_daemon_was_away() -> None:
    node = Node(NodeConfig("n1", limits=TriggerLimits(10, 10, 10, 10)))
    admitted = []
    for now_ns in (3 * S, 5 * S):
        for fired_ns in (*range(now_ns - 29, now_ns), now_ns - 2 * S):
            node.pool.trigger(node.client, trace(fired_ns), "t", fired_ns)
        node.core.on_dataplane(node.pool.poll(now_ns), now_ns)
        admitted.append(node.core.counters.triggers["t"].admitted)
    # The second time the burst is used up.
    assert admitted == [30, 30 + 20]


def test_what_fired_while_the_daemon_was_away_is_no_burst() -> None:
    admission = Admission(TriggerLimits(10, 10, 100, 100))
    # Ten processes that all fire as often as they may come one after the other.
    waiting = [client for client in range(1, 11) for _ in range(3 * 10)]
    assert [admission.admit(c, "t", 5 * S, 3 * S) for c in waiting] == [None] * 300
    # The burst is left, and no more.
    assert [admission.admit(1, "t", 5 * S) for _ in range(11)] == [None] * 10 + [Refusal.PROCESS]
    burst = [admission.admit(client, "t", 5 * S) for client in range(2, 12) for _ in range(9)]
    assert burst == [None] * 90
    assert admission.admit(12, "t", 5 * S) is Refusal.TRIGGER


def test_nobody_was_away_for_more_than_ten_seconds() -> None:
    admission = Admission(TriggerLimits(10, 5, 1e6, 1e6))
    flood = [admission.admit(1, "t", 100 * S, 100 * S) for _ in range(500)]
    assert flood.count(None) == 5 + 10 * 10


@given(st.lists(st.tuples(st.integers(0, S), st.integers(0, 100 * S)), min_size=1, max_size=300))
def test_who_lies_about_when_it_fired_gets_no_higher_rate(
    firings: list[tuple[int, int]],
) -> None:
    admission = Admission(TriggerLimits(10, 5, 1e6, 1e6))
    now_ns = 100 * S
    taken = 0
    for gap_ns, waited_ns in firings:
        now_ns += gap_ns
        taken += admission.admit(1, "t", now_ns, waited_ns) is None
    # Ten seconds' worth at most come before their time.
    assert taken <= 5 + 10 * 10 + 10 * (now_ns - 100 * S) / S + 1e-6


def test_who_is_alone_has_all_of_a_name() -> None:
    limits = TriggerLimits(1e6, 1e6, 100, 100)
    assert admitted(limits, {1: 1000}, {}, 60)[1] == pytest.approx(0.1, rel=0.02)
    assert admitted(limits, {1: 99}, {})[1] == 1


def test_who_stopped_flooding_is_as_others_are() -> None:
    admission = Admission(TriggerLimits(1e6, 1e6, 10, 10))
    flood = [admission.admit(1, "t", number * MS) for number in range(5000)]
    assert flood.count(None) == pytest.approx(60, abs=6)
    assert [admission.admit(1, "t", 10 * S) for _ in range(10)] == [None] * 10


@given(
    rate=st.integers(1, 10_000),
    charges=st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, S)), max_size=50),
)
def test_a_bucket_in_debt_says_when_it_is_out_of_it(
    rate: int, charges: list[tuple[int, int]]
) -> None:
    bucket = TokenBucket(rate, 1000, 0)
    now_ns = 0
    for tokens, gap_ns in charges:
        now_ns += gap_ns
        bucket.charge(tokens, now_ns)
        ready_ns = bucket.ready_ns(now_ns)
        if ready_ns > now_ns:
            probe = replace_bucket(bucket)
            assert probe.ready_ns(ready_ns - 2 * S // rate) > ready_ns - 2 * S // rate
            now_ns = ready_ns
            assert bucket.ready_ns(now_ns) == now_ns


def replace_bucket(bucket: TokenBucket) -> TokenBucket:
    """A copy: asking moves a bucket's clock."""
    copy = TokenBucket(1, 1, 0)
    for slot in TokenBucket.__slots__:
        setattr(copy, slot, getattr(bucket, slot))
    return copy


def test_configuration_errors_name_the_value_and_what_is_allowed() -> None:
    config = NodeConfig("n1")
    for change, text in (
        ({"chunk_bytes": 0}, "chunk_bytes is 0; allowed: 1 to 1048576"),
        ({"abandon_threshold": 1.5}, "abandon_threshold is 1.5; allowed: above 0, up to 1"),
    ):
        try:
            replace(config, **change)
        except ValueError as error:
            assert str(error) == text
        else:
            raise AssertionError(f"{change} was accepted")


def test_other_limits_hold_at_once_and_give_nobody_tokens() -> None:
    node = Node(NodeConfig("n1", limits=TriggerLimits(1, 2, 1, 100)))
    for number in range(4):
        node.fire(number + 1)
    counters = node.core.counters.triggers["t"]
    assert (counters.admitted, counters.rate_limited_process) == (2, 2)
    wide = replace(node.config, limits=TriggerLimits(10, 10, 1000, 100))
    node.core.reconfigure(wide, node.now_ns)
    node.fire(5)
    assert (counters.admitted, counters.rate_limited_process) == (2, 3)
    node.now_ns += S // 2
    for number in range(10, 17):
        node.fire(number)
    assert (counters.admitted, counters.rate_limited_process) == (7, 5)
    node.core.reconfigure(
        replace(node.config, limits=TriggerLimits(10, 10, 1, 1, laterals_max=0)), node.now_ns
    )
    node.now_ns += 2 * S
    node.write(22)
    node.fire(21, laterals=(22,))
    node.fire(23)
    assert (counters.admitted, counters.rate_limited_trigger, counters.laterals_cut) == (8, 1, 1)


def test_other_policies_hold_for_what_waits_already() -> None:
    config = NodeConfig("n1", chunk_bytes=1000)
    node = Node(config)
    for number in (1, 2, 3, 4):
        node.write(number, 10_000)
        node.fire(number, "a" if number % 2 else "b")
    node.connect()
    slow = replace(
        config,
        policies={"a": TriggerPolicy(report_bytes_per_s=1), "later": TriggerPolicy()},
        report_burst_bytes=1,
        trigger_names_max=2,
    )
    node.core.reconfigure(slow, node.now_ns)
    node.connect_slices()
    sent = node.report()
    # The burst is one byte, and a chunk the least that goes.
    assert sum(sent.get(number, 0) for number in (1, 3)) <= 1000
    assert all(sent[number] > 10_000 for number in (2, 4))
    node.core.reconfigure(config, node.now_ns)
    assert sum(node.report().values()) > 19_000
    node.fire(5, "later")
    assert "later" in node.core.counters.triggers


def test_a_snapshot_triggers_as_many_as_it_is_told_in_the_order_of_priority() -> None:
    node = Node()
    node.connect()
    traces = [trace(number) for number in range(1, 101)]
    for number in range(1, 101):
        node.write(number)
    order = Snapshot(3, "snapshot.00000003", 30 * S, "shop")
    assert node.hear(order) == [SnapshotStatus(3, 0, 0, done=False)]
    assert node.core.take_recent_question() is order
    assert node.core.take_recent_question() is None
    node.core.on_recent(order, 1000, traces, node.now_ns)
    assert node.take() == [SnapshotStatus(3, 1000, 0, done=False)]
    fired: list[TriggerFired] = []
    for count in (1, 64, 100):
        messages = node.hear(replace(order, traces=count))
        fired += [message for message in messages if isinstance(message, TriggerFired)]
        # What it counts was said before it.
        assert messages[-1] == SnapshotStatus(3, 1000, len(fired), done=len(fired) == 100)
    assert [message.group.primary for message in fired] == traces
    assert {(m.source, m.why) for m in fired} == {(Source.OPERATOR, "of the last 30 s of shop")}
    assert list(node.core.counters.triggers) == ["snapshot"]
    # Told again on another stream.
    node.core.on_control_lost(node.now_ns)
    assert SnapshotStatus(3, 1000, 100, done=True) in node.connect()


def test_a_snapshot_ends_when_told() -> None:
    node = Node()
    node.connect()
    traces = [trace(number) for number in range(1, 11)]
    for number in range(1, 11):
        node.write(number)
    order = Snapshot(3, "snapshot.00000003", 30 * S)
    node.hear(order)
    node.core.on_recent(order, 10, traces, node.now_ns)
    node.hear(replace(order, traces=4))
    assert node.hear(order) == [SnapshotStatus(3, 10, 4, done=True)]
    assert not node.hear(replace(order, traces=4))
    # Before anything was found, too; and what is found for another one is nobody's.
    early = Snapshot(4, "snapshot.00000004", 30 * S)
    node.hear(early)
    node.hear(early)
    node.core.on_recent(order, 10, traces, node.now_ns)
    assert not node.take()
    node.core.on_recent(early, 10, traces, node.now_ns)
    assert node.take() == [SnapshotStatus(4, 10, 0, done=True)]


def test_two_snapshots_at_a_time_cost_each_other_nothing() -> None:
    node = Node()
    node.connect()
    for number in range(1, 5):
        node.write(number)
    orders = [Snapshot(number, f"snapshot.0000000{number}", 30 * S) for number in (3, 4)]
    for order, first in zip(orders, (1, 3), strict=True):
        node.hear(order)
        assert node.core.take_recent_question() is order
        node.core.on_recent(order, 2, [trace(first), trace(first + 1)], node.now_ns)
    node.take()
    fired = []
    for _ in range(2):
        for order in orders:
            fired += node.hear(replace(order, traces=1))
            # It has looked already.
            assert node.core.take_recent_question() is None
    primaries = [m.group.primary for m in fired if isinstance(m, TriggerFired)]
    assert primaries == [trace(number) for number in (1, 3, 2, 4)]
    assert {m.number: m.fired for m in fired if isinstance(m, SnapshotStatus)} == {3: 2, 4: 2}


def test_a_snapshot_goes_on_no_more_where_it_was_forgotten() -> None:
    node = Node()
    node.connect()
    order = Snapshot(3, "snapshot.00000003", 30 * S)
    assert not node.hear(replace(order, traces=4))
    assert node.core.take_recent_question() is None
    for number in range(100):
        node.hear(replace(order, number=number))
    assert len(list(iter(node.core.take_recent_question, None))) == 16


def test_a_snapshot_of_nothing_is_done_at_once() -> None:
    node = Node()
    node.connect()
    order = Snapshot(3, "snapshot.00000003", S)
    node.core.on_control(order, node.now_ns, node.now_ns + REAL_NS)
    node.core.on_recent(order, 0, (), node.now_ns)
    assert node.take() == [SnapshotStatus(3, 0, 0, done=True)]
