# SPDX-License-Identifier: Apache-2.0
"""Who is reported next, who is given up first: shares, orders, limits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from appliance.core.abandonment import by_excess, fair_shares
from appliance.core.config import NodeConfig, TriggerPolicy
from appliance.core.dataplane import Slice
from appliance.core.groups import HeldGroup, HeldTrace
from appliance.core.marks import Asker
from appliance.core.reporting import Reporter
from protocol.hashing import Domain, TraceHash
from protocol.messages import Group, SliceFlags, TraceId

S = 1_000_000_000
PRIORITY = TraceHash(Domain.PRIORITY, 0)
NAMES = st.sampled_from(["a", "b", "c", "d"])


def trace(number: int) -> TraceId:
    return TraceId(number.to_bytes(16, "big"))


class Queues:
    """A reporter and what waits in it."""

    def __init__(self, config: NodeConfig, shards: int = 1) -> None:
        self.reporter = Reporter(config, shards, 0)
        self.traces: dict[int, HeldTrace] = {}
        self.groups: dict[int, HeldGroup] = {}

    def add(self, number: int, queue: str, size: int, now_ns: int = 0, shard: int = 0) -> None:
        group = Group(queue, trace(number))
        found = Slice(trace(number), group, 1, size, 0, 0, 0, 0, SliceFlags.HELD, ())
        held = HeldTrace(found, frozenset({Asker.NODE}), trimmed=0)
        owner = HeldGroup(group, queue, PRIORITY(trace(number)), now_ns, shard)
        owner.add(held)
        self.traces[number] = held
        self.groups[number] = owner
        self.reporter.refresh(held, now_ns)

    def grow(self, number: int, size: int) -> None:
        held = self.traces[number]
        held.slice = replace(held.slice, bytes=held.slice.bytes + size)
        self.reporter.refresh(held, 0)

    def send(
        self, chunk_bytes: int, now_ns: int = 0, shard: int = 0
    ) -> tuple[str, int, int] | None:
        """(queue, trace, bytes) of the next chunk."""
        following = self.reporter.next_trace(shard, now_ns)
        if following is None:
            return None
        group, held = following
        share = group.share(held)
        count = min(chunk_bytes, held.unsent_bytes(share))
        share.sent += count
        self.reporter.sent(group, count, now_ns)
        self.reporter.refresh(held, now_ns)
        self.reporter.begin(group, now_ns)
        return group.queue, int.from_bytes(held.trace, "big"), count


demands_and_weights = st.dictionaries(
    NAMES, st.tuples(st.integers(1, 10_000), st.floats(0.1, 10)), min_size=1
)


@given(demands_and_weights, st.integers(0, 20_000))
def test_fair_shares_are_weighted_max_min(
    wanted: dict[str, tuple[int, float]], capacity: int
) -> None:
    demands = {name: demand for name, (demand, _) in wanted.items()}
    weights = {name: weight for name, (_, weight) in wanted.items()}
    shares = fair_shares(demands, weights, capacity)
    assert sum(shares.values()) == pytest.approx(min(capacity, sum(demands.values())))
    for name, share in shares.items():
        assert share <= demands[name]
        if share < demands[name] - 1e-6:
            # Who gets less than it wants gets no less for its weight than anybody else.
            for other, others in shares.items():
                assert share / weights[name] >= others / weights[other] - 1e-6


@given(demands_and_weights, st.integers(0, 20_000))
@example(dict.fromkeys("abcd", (10, 1.0)), 39)  # a quarter of a byte each
def test_somebody_is_above_its_share_iff_there_is_too_little(
    wanted: dict[str, tuple[int, float]], capacity: int
) -> None:
    demands = {name: demand for name, (demand, _) in wanted.items()}
    weights = {name: weight for name, (_, weight) in wanted.items()}
    over = by_excess(demands, weights, capacity)
    assert bool(over) == (sum(demands.values()) > capacity)
    shares = fair_shares(demands, weights, capacity)
    excess = [demands[name] - shares[name] for name in over]
    assert excess == sorted(excess, reverse=True)


@given(
    weights=st.dictionaries(NAMES, st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2),
    chunk_bytes=st.integers(1, 100),
)
def test_backlogged_queues_share_bytes_by_weight(
    weights: dict[str, float], chunk_bytes: int
) -> None:
    policies = {name: TriggerPolicy(weight) for name, weight in weights.items()}
    queues = Queues(NodeConfig("n", policies=policies))
    for index, name in enumerate(sorted(weights)):
        for number in range(20):
            queues.add(100 * index + number + 1, name, 100_000)
    sent = dict.fromkeys(weights, 0)
    for _ in range(2000):
        chunk = queues.send(chunk_bytes)
        assert chunk is not None
        sent[chunk[0]] += chunk[2]
    total = sum(sent.values())
    for name, count in sent.items():
        # Fair queueing is off by at most a chunk for each queue.
        fair = total * weights[name] / sum(weights.values())
        assert abs(count - fair) <= chunk_bytes * (1 + weights[name] * len(weights) / 0.5)


def test_a_coordinator_that_was_away_has_no_claim_to_what_another_was_sent() -> None:
    queues = Queues(NodeConfig("n"), shards=2)
    queues.add(1, "a", 10_000)
    queues.add(2, "b", 10_000, shard=1)
    for _ in range(50):
        assert queues.send(100, shard=1) == ("b", 2, 100)
    queues.add(3, "b", 10_000)
    # Nor has a trigger of its, for what it was sent under another one.
    sent = Counter(chunk[0] for chunk in (queues.send(100) for _ in range(20)) if chunk)
    assert sent == {"a": 10, "b": 10}


def test_a_rate_holds_for_all_coordinators_together() -> None:
    queues = Queues(NodeConfig("n", report_bytes_per_s=1000, report_burst_bytes=100), shards=2)
    queues.add(1, "a", 1000)
    queues.add(2, "a", 1000, shard=1)
    assert queues.send(600, shard=1) is not None
    assert queues.send(600) is None
    (ready_ns,) = {queues.reporter.ready_ns(shard, 0) for shard in (0, 1)}
    assert ready_ns is not None and S // 2 <= ready_ns <= S // 2 + 1


def test_an_empty_queue_neither_hoards_nor_is_punished() -> None:
    queues = Queues(NodeConfig("n"))
    queues.add(1, "a", 1000)
    for _ in range(10):
        queues.send(100)
    assert queues.send(100) is None
    queues.add(2, "b", 1000)
    for _ in range(5):
        queues.send(100)
    queues.add(3, "a", 1000)
    # Neither has a claim from before: they alternate, but for the chunk at the start.
    names = "".join(chunk[0] for chunk in [queues.send(100) for _ in range(8)] if chunk)
    assert names.lstrip("a") in ("baba" + "bab", "baba" + "ba")
    assert len(names) == 8


@pytest.mark.parametrize("limited", [False, True])
def test_after_a_change_of_weights_nobody_waits_for_what_was_before(limited: bool) -> None:
    # By its weight it is far ahead of the other, by its limit far behind.
    policy = TriggerPolicy(1, report_bytes_per_s=1) if limited else TriggerPolicy(0.001)
    before = NodeConfig("n", policies={"a": policy}, report_burst_bytes=1)
    queues = Queues(before)
    for number in range(1, 50):
        queues.add(number, "a", 10_000)
        queues.add(100 + number, "b", 10_000)
    for _ in range(200):
        assert queues.send(1000) is not None
    queues.reporter.reconfigure(NodeConfig("n"), 0)
    names = [chunk[0] for chunk in (queues.send(1000) for _ in range(20)) if chunk is not None]
    assert names.count("a") == pytest.approx(10, abs=1)


@given(st.sets(st.integers(1, 1 << 64), min_size=1, max_size=30), st.integers(1, 500))
def test_a_queue_reports_by_priority_and_gives_up_from_the_other_end(
    numbers: set[int], chunk_bytes: int
) -> None:
    queues = Queues(NodeConfig("n"))
    for number in sorted(numbers):
        queues.add(number, "a", 300)
    ranked = sorted(numbers, key=lambda number: PRIORITY(trace(number)), reverse=True)
    lowest = queues.reporter.lowest_group(1, 0)
    assert lowest is not None and lowest.group.primary == trace(ranked[-1])
    order: list[int] = []
    while (chunk := queues.send(chunk_bytes)) is not None:
        if not order or order[-1] != chunk[1]:
            order.append(chunk[1])
    assert order == ranked


def test_a_queue_within_its_share_gives_up_nothing_however_much_it_holds() -> None:
    queues = Queues(NodeConfig("n", policies={"important": TriggerPolicy(weight=9)}))
    for number in range(1, 9):
        queues.add(number, "important", 100)
    for number in range(11, 14):
        queues.add(number, "other", 100)
    # Of 1000 bytes it may have 900, and has 800.
    lowest = queues.reporter.lowest_group(100, 0)
    assert lowest is not None and lowest.queue == "other"


def test_other_rates_hold_from_what_was_sent_already() -> None:
    """A reload, however often, lets nobody send more."""
    own = TriggerPolicy(report_bytes_per_s=100)
    config = NodeConfig("n", policies={"a": own}, report_bytes_per_s=1000, report_burst_bytes=2000)
    queues = Queues(config)
    queues.add(1, "a", 100_000)
    queues.add(2, "b", 100_000)
    while queues.send(2500) is not None:
        pass
    ready_ns = queues.reporter.ready_ns(0, 0)
    assert ready_ns is not None and ready_ns > 0
    queues.reporter.reconfigure(config, 0)
    assert queues.reporter.ready_ns(0, 0) == ready_ns
    # Twice the rate pays the debt in half the time.
    queues.reporter.reconfigure(replace(config, report_bytes_per_s=2000), 0)
    halved_ns = queues.reporter.ready_ns(0, 0)
    assert halved_ns is not None and abs(halved_ns - ready_ns / 2) <= 1
    # The trigger's own debt stays too, when the node's limit is gone.
    unlimited = replace(config, report_bytes_per_s=None)
    queues.reporter.reconfigure(unlimited, 0)
    assert queues.send(100) == ("b", 2, 100)
    # A limit that is new gives no burst, since more was sent just now.
    queues.reporter.reconfigure(config, 0)
    assert queues.send(100) is None
    assert queues.send(100, 1) == ("b", 2, 100)
    assert queues.send(100, 2) is None
    queues.reporter.reconfigure(replace(unlimited, policies={}), 2)
    assert queues.send(100, 2) is not None


def test_new_bytes_of_a_reported_slice_go_ahead_of_unreported_groups() -> None:
    queues = Queues(NodeConfig("n"))
    ranked = sorted(range(1, 6), key=lambda number: PRIORITY(trace(number)), reverse=True)
    for number in reversed(ranked[2:]):
        queues.add(number, "a", 100)
    assert queues.send(1000) == ("a", ranked[2], 100)
    queues.add(ranked[0], "a", 100)
    queues.grow(ranked[2], 50)
    assert queues.send(1000) == ("a", ranked[2], 50)
    assert queues.send(1000) == ("a", ranked[0], 100)


@given(
    st.lists(
        st.tuples(NAMES, st.integers(1, 2000), st.integers(0, S // 10)), min_size=5, max_size=60
    ),
    st.integers(1_000, 20_000),
    st.integers(1_000, 20_000),
)
def test_rates_hold_for_the_node_and_for_each_trigger(
    arrivals: list[tuple[str, int, int]], node_rate: int, own_rate: int
) -> None:
    burst, chunk_bytes = 1000, 100
    config = NodeConfig(
        "n",
        policies={"a": TriggerPolicy(report_bytes_per_s=own_rate)},
        report_bytes_per_s=node_rate,
        report_burst_bytes=burst,
    )
    queues = Queues(config)
    now_ns = 0
    sent: list[tuple[int, str, int]] = []
    for number, (name, size, gap_ns) in enumerate(arrivals):
        now_ns += gap_ns
        queues.add(number + 1, name, size, now_ns)
        while (chunk := queues.send(chunk_bytes, now_ns)) is not None:
            sent.append((now_ns, chunk[0], chunk[2]))
    while (ready_ns := queues.reporter.ready_ns(0, now_ns)) is not None:
        assert ready_ns > now_ns  # all that might go had gone
        now_ns = ready_ns
        while (chunk := queues.send(chunk_bytes, now_ns)) is not None:
            sent.append((now_ns, chunk[0], chunk[2]))
    assert sum(count for _, _, count in sent) == sum(size for _, size, _ in arrivals)
    for rate, wanted in ((node_rate, {"a", "b", "c", "d"}), (own_rate, {"a"})):
        for i, (begin_ns, _, _) in enumerate(sent):
            count = 0
            for end_ns, name, size in sent[i:]:
                count += size if name in wanted else 0
                assert count <= burst + chunk_bytes + rate * (end_ns - begin_ns) / S + 1
