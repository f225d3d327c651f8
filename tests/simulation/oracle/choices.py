# SPDX-License-Identifier: Apache-2.0
"""Whether who gives way is the one that must, by weights and by the hash of priorities.

Each choice is looked at before it is carried out, and made again by other means: shares by filling
up step by step, the lowest priority by the hash of every group that there is.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from appliance.core.groups import HeldGroup, HeldTrace
from appliance.core.node import NodeCore
from coordinator.core.coordinator import CoordinatorCore
from coordinator.core.groups import NO_TRIGGER, GroupState
from coordinator.core.memory import Measure
from protocol.hashing import Domain, TraceHash
from protocol.messages import Group
from tests.simulation.oracle.bounds import ReportRates

if TYPE_CHECKING:
    from tests.simulation.node import SimNode
    from tests.simulation.oracle.record import World


def filled_up(
    demands: Mapping[str, int], weights: Mapping[str, float], room: float
) -> dict[str, float]:
    """Max-min fair shares: all rise together, by their weights, until they have what they want."""
    shares = dict.fromkeys(demands, 0.0)
    wanting = {name for name, demand in demands.items() if demand > 0}
    while wanting and room > 1e-6:
        step = min((demands[name] - shares[name]) / weights[name] for name in wanting)
        step = min(step, room / sum(weights[name] for name in wanting))
        for name in wanting:
            shares[name] += step * weights[name]
            room -= step * weights[name]
        wanting = {name for name in wanting if demands[name] - shares[name] > 1e-6}
    return shares


def check_node_choice(node: SimNode, core: NodeCore, chosen: Group, now_ns: int) -> None:
    """A node is about to give up a group, since its store is full."""
    config, usage = core._config, node.pool.store_usage()
    threshold = int(config.abandon_threshold * usage.capacity_bytes)
    assert usage.used_bytes > threshold, f"{node.name} gives up {chosen} though it has room"
    spare = usage.used_bytes <= int((1 + config.abandon_threshold) / 2 * usage.capacity_bytes)
    old_ns = now_ns - config.abandon_grace_ns if spare else now_ns
    held = core._holdings.groups
    demands: dict[str, int] = defaultdict(int)
    for trace in core._holdings.traces.values():
        demands[trace.groups[0].queue] += trace.held_bytes
    weights = {name: config.policy(name).weight for name in demands}
    room = sum(demands.values()) - (usage.used_bytes - threshold)
    shares = filled_up(demands, weights, max(0, room))
    rank = TraceHash(Domain.PRIORITY, node.priority_seed)
    lowest: dict[str, Group] = {}
    for group in held.values():
        if group.since_ns > old_ns or not any(t.held_bytes for t in group.traces.values()):
            continue
        if demands.get(group.queue, 0) <= 0:
            continue  # others pay for its traces
        known = lowest.get(group.queue)
        if known is None or rank(group.group.primary) < rank(known.primary):
            lowest[group.queue] = group.group
    queue = held[chosen].queue
    excess = {name: demands[name] - shares[name] for name in lowest}
    most = max(excess.values())
    assert excess[queue] >= most - 1, (
        f"{node.name} takes from {queue}, which is {excess[queue]} bytes above its share, not from "
        f"who is most: {excess}"
    )
    assert rank(chosen.primary) == rank(lowest[queue].primary), (
        f"{node.name} gives up {chosen}, and of its queue {lowest[queue]} has the lowest priority"
    )


def check_next(node: SimNode, core: NodeCore, chosen: HeldGroup) -> None:
    """A node is about to send bytes of a group.

    What is open may wait for more of it, and what is not must not.
    """
    hash_of = TraceHash(Domain.PRIORITY, node.priority_seed)

    def rank(group: HeldGroup) -> tuple[bool, int]:
        return group.begun, hash_of(group.group.primary)

    assert any(t.unsent_bytes(chosen.share(t)) > 0 for t in chosen.traces.values())
    for group in core._holdings.groups.values():
        if group.queue == chosen.queue and rank(group) > rank(chosen):
            assert not any(
                t.unsent_bytes(group.share(t)) > 0 and not t.slice.open_handles
                for t in group.traces.values()
            ), f"{node.name} sends of {chosen.group}, while {group.group} has a higher priority"


def watch_node(world: World, node: SimNode, core: NodeCore) -> None:
    """Look at each choice of a node."""
    reporter, give_up = core._holdings.reporter, core._abandon
    choose, choose_next, send = reporter.lowest_group, reporter.next_trace, reporter.sent
    looks = itertools.count()
    rates = ReportRates(node.config)

    def sent(group: HeldGroup, count: int, now_ns: int) -> None:
        rates.add(group.group.trigger, count, now_ns)
        send(group, count, now_ns)

    def next_trace(shard: int, now_ns: int) -> tuple[HeldGroup, HeldTrace] | None:
        chosen = choose_next(shard, now_ns)
        # To look at all groups takes long where there are many, so that is done the more seldom.
        if chosen is not None and next(looks) % (1 + len(core._holdings.groups) // 16) == 0:
            check_next(node, core, chosen[0])
        return chosen

    def lowest_group(surplus_bytes: int, before_ns: int) -> HeldGroup | None:
        chosen = choose(surplus_bytes, before_ns)
        if chosen is not None:
            check_node_choice(node, core, chosen.group, core._now_ns)
        return chosen

    def abandon(group: Group, *, unanswered: bool, now_ns: int) -> None:
        if unanswered:
            world.give_up(group, node.name)
        give_up(group, unanswered=unanswered, now_ns=now_ns)

    reporter.next_trace = next_trace  # type: ignore[method-assign]
    reporter.sent = sent  # type: ignore[method-assign]
    reporter.lowest_group = lowest_group  # type: ignore[method-assign]
    core._abandon = abandon  # type: ignore[method-assign]


def check_coordinator_choice(core: CoordinatorCore, measure: Measure, chosen: GroupState) -> None:
    """The coordinator is short of something, and about to let go of a group."""
    bounds = (core._config.traces_max, core._config.evidence_max, core._config.assembly_bytes_max)
    costs: dict[int, int] = defaultdict(int)
    by_process: dict[tuple[int, int], int] = defaultdict(int)
    states: dict[int, GroupState] = {}
    for trace in core._traces.values():
        state = trace.charged_to
        assert state is not None
        cost = (1, trace.items, trace.stored_bytes)[measure]
        costs[state.owner.node] += cost
        by_process[state.owner.node, state.owner.process] += cost
        states[id(state)] = state
    assert sum(costs.values()) > bounds[measure], "it has room"
    node, process = chosen.owner
    assert costs[node] == max(costs.values()), "of another node than the one that takes most"
    most = max(cost for (at, _), cost in by_process.items() if at == node)
    assert by_process[node, process] == most, "of another process than the one that takes most"
    rank = TraceHash(Domain.PRIORITY, core._config.priority_seed)
    peers = [state for state in states.values() if state.owner == chosen.owner]
    settled = [s for s in peers if all(t.is_settled for t in s.traces.values())]
    first = min(settled or peers, key=lambda state: rank(state.group.primary))
    assert rank(chosen.group.primary) == rank(first.group.primary), (
        f"{chosen.group} gives way, and {first.group} has the lowest priority"
    )


def watch_coordinator(world: World, core: CoordinatorCore) -> None:
    """Look at each choice of a coordinator."""
    choose, give_up = core._memory.costliest, core._lifecycle._abandon

    def costliest(measure: Measure) -> GroupState | None:
        chosen = choose(measure)
        if chosen is not None:
            check_coordinator_choice(core, measure, chosen)
            if chosen.group.trigger == NO_TRIGGER:
                world.closed_alone |= set(chosen.traces)
        return chosen

    def abandon(group: Group, by: str) -> object:
        if not by and group.trigger != NO_TRIGGER:
            world.give_up(group, by)
        return give_up(group, by)

    core._memory.costliest = costliest  # type: ignore[method-assign]
    core._lifecycle._abandon = abandon  # type: ignore[method-assign,assignment]
