# SPDX-License-Identifier: Apache-2.0
"""What happened in a simulated world, as no daemon tells it.

Faults are noted by who makes them. What a pool had of a trace is noted where it is asked: it is the
model of the data plane that answers, and that is held to the C library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from appliance.core.dataplane import LocalTrigger, Slice, StoreUsage
from protocol.messages import Group, SliceFlags, TraceId
from tests.simulation.network import Scheduler
from tests.simulation.pool import PoolModel

NOT_BLAMED = SliceFlags.HELD | SliceFlags.CRUMBS_CUT | SliceFlags.BY_FINGERPRINT


@dataclass(slots=True)
class Fired:
    """A firing. ``by``: the process; 0: the node itself."""

    group: Group
    laterals: tuple[TraceId, ...]
    node: str
    time_ns: int
    by: int = 0

    @property
    def traces(self) -> tuple[TraceId, ...]:
        return (self.group.primary, *self.laterals)


@dataclass(slots=True)
class Collected:
    """What a pool said of a trace that its node collected: each epoch with its flags."""

    epochs: dict[int, SliceFlags] = field(default_factory=dict)
    flagged_ns: dict[SliceFlags, int] = field(default_factory=dict)
    let_go: bool = False

    @property
    def first(self) -> SliceFlags:
        """What was said against it when it was collected for the first time, or since."""
        return next(iter(self.epochs.values()), SliceFlags.NONE) & ~NOT_BLAMED

    @property
    def ever(self) -> SliceFlags:
        flags = SliceFlags.NONE
        for said in self.epochs.values():
            flags |= said
        return flags & ~NOT_BLAMED


@dataclass(slots=True)
class World:
    """The record of a run."""

    scheduler: Scheduler
    fired: list[Fired] = field(default_factory=list)
    by_trace: dict[TraceId, list[Fired]] = field(default_factory=dict)
    fired_in_vain: list[Fired] = field(default_factory=list)
    """What nodes refused, by their limits."""
    collected: dict[tuple[str, TraceId], Collected] = field(default_factory=dict)
    restarts_ns: dict[str, list[int]] = field(default_factory=dict)
    """When daemons were killed."""
    stores_lost_ns: dict[str, list[int]] = field(default_factory=dict)
    lost_slices: dict[tuple[str, TraceId], int] = field(default_factory=dict)
    """What was in a report store when it was lost, and when that was."""
    asked: set[tuple[str, TraceId]] = field(default_factory=set)
    """Which nodes the coordinator ever asked for which trace."""
    no_room: set[tuple[str, TraceId]] = field(default_factory=set)
    """Of what there was no room even for a mark."""
    troubles: dict[str, int] = field(default_factory=dict)
    """Since when a node, or with no name the coordinator, may be late with what it says."""
    connected: dict[str, int] = field(default_factory=dict)
    """Which nodes the coordinator hears, on which stream."""
    came_and_went: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    began_ns: int = 0
    """When the coordinator began that is there now."""
    known_nodes: frozenset[str] = frozenset()
    """Which nodes were in its store then."""
    judged_ns: dict[tuple[TraceId, int], int] = field(default_factory=dict)
    """When a verdict was made, by trace and version."""
    closed_alone: set[TraceId] = field(default_factory=set)
    """What the coordinator had no room for before it knew of any trigger of it."""
    given_up: dict[Group, list[str]] = field(default_factory=dict)
    """Who chose to give up a group, the first first; empty: the coordinator."""
    given_up_ns: dict[Group, int] = field(default_factory=dict)
    """When the first did."""
    given_up_known_ns: dict[Group, int] = field(default_factory=dict)
    """When the coordinator heard of it first, or did it."""
    fired_known_ns: dict[Group, int] = field(default_factory=dict)
    """When the coordinator that is there heard first that it was fired."""

    def fire(self, fired: Fired) -> None:
        self.fired.append(fired)
        for trace in fired.traces:
            self.by_trace.setdefault(trace, []).append(fired)

    def give_up(self, group: Group, by: str) -> None:
        self.given_up.setdefault(group, []).append(by)
        self.given_up_ns.setdefault(group, self.scheduler.now_ns)
        if not by:
            self.heard_given_up(group)

    def heard_given_up(self, group: Group) -> None:
        """The coordinator knows it now."""
        self.given_up_known_ns.setdefault(group, self.scheduler.now_ns)

    def heard_fired(self, group: Group) -> None:
        """The coordinator knows it now."""
        self.fired_known_ns.setdefault(group, self.scheduler.now_ns)

    def groups_of(self, trace: TraceId) -> list[Group]:
        return list(dict.fromkeys(fired.group for fired in self.by_trace.get(trace, ())))

    def refused(self, node: str, event: LocalTrigger) -> None:
        """A firing met a limit: as if there had been none."""
        group = Group(event.trigger, event.trace)
        fired = next(
            fired
            for fired in self.fired
            if (fired.node, fired.group, fired.by) == (node, group, event.client)
            and fired.laterals == event.laterals
        )
        self.fired.remove(fired)
        self.fired_in_vain.append(fired)
        for trace in dict.fromkeys(fired.traces):
            self.by_trace[trace] = [other for other in self.by_trace[trace] if other is not fired]
            if not self.by_trace[trace]:
                del self.by_trace[trace]

    def trouble(self, node: str = "") -> None:
        self.troubles.setdefault(node, self.scheduler.now_ns)

    def may_be_late(self, node: str, until_ns: int) -> bool:
        """Whether what a node says by then may reach the coordinator late."""
        return any(self.troubles.get(name, until_ns) < until_ns for name in (node, ""))

    def daemon_killed(self, node: str) -> None:
        self.restarts_ns.setdefault(node, []).append(self.scheduler.now_ns)
        self.trouble(node)

    def store_lost(self, node: str, traces: Iterable[TraceId]) -> None:
        self.stores_lost_ns.setdefault(node, []).append(self.scheduler.now_ns)
        for trace in traces:
            self.lost_slices[node, trace] = self.scheduler.now_ns

    def coordinator_began(self, nodes: Iterable[str]) -> None:
        self.began_ns = self.scheduler.now_ns
        self.fired_known_ns.clear()
        self.known_nodes = frozenset(nodes)

    def is_known(self, node: str, at_ns: int) -> bool:
        """Whether the coordinator that is there had heard of the node by then, or its predecessor."""
        return node in self.known_nodes or any(
            comes and self.began_ns <= time_ns < at_ns
            for time_ns, comes in self.came_and_went.get(node, ())
        )

    def node_connected(self, node: str, stream: int) -> None:
        if node not in self.connected:
            self.came_and_went.setdefault(node, []).append((self.scheduler.now_ns, True))
        self.connected[node] = stream

    def node_lost(self, node: str, stream: int) -> None:
        if self.connected.get(node) == stream:
            del self.connected[node]
            self.came_and_went[node].append((self.scheduler.now_ns, False))

    def all_lost(self) -> None:
        for node, stream in list(self.connected.items()):
            self.node_lost(node, stream)

    def was_away(self, node: str, at_ns: int) -> bool:
        """Whether the coordinator did not hear it then, or not all of that moment."""
        there = False
        for time_ns, comes in self.came_and_went.get(node, ()):
            if time_ns == at_ns:
                return True
            if time_ns < at_ns:
                there = comes
        return not there

    def away_since_ns(self, node: str, at_ns: int) -> int | None:
        """Since when the coordinator did not hear it then; None: it heard it."""
        if not self.was_away(node, at_ns):
            return None
        went = (ns for ns, comes in self.came_and_went.get(node, ()) if ns <= at_ns and not comes)
        return max(went, default=0)

    def of(self, node: str, trace: TraceId) -> Collected:
        return self.collected.get((node, trace), Collected())


class WatchedPool:
    """A node's data plane, as its core has it, while somebody takes notes."""

    def __init__(self, world: World, node: str, pool: PoolModel) -> None:
        self._world = world
        self._node = node
        self._pool = pool

    def collect(self, trace: TraceId, group: Group, now_ns: int) -> Slice:
        assert trace in self._world.by_trace, (
            f"{self._node} collects {trace.hex()}, which nobody fired"
        )
        found = self._pool.collect(trace, group, now_ns)
        if not found.epoch:
            self._world.no_room.add((self._node, trace))
        return self._note(found)

    def slice(self, trace: TraceId) -> Slice | None:
        found = self._pool.slice(trace)
        return None if found is None else self._note(found)

    def read(self, trace: TraceId, offset: int, size: int) -> bytes:
        return self._pool.read(trace, offset, size)

    def trim(self, trace: TraceId, offset: int) -> None:
        self._pool.trim(trace, offset)

    def release(self, trace: TraceId, *, abandoned: bool, now_ns: int) -> None:
        known = self._world.collected.get((self._node, trace))
        if known is not None:
            known.let_go = True
        self._pool.release(trace, abandoned=abandoned, now_ns=now_ns)

    def slices(self) -> Iterable[Slice]:
        return [self._note(found) for found in self._pool.slices()]

    def store_usage(self) -> StoreUsage:
        return self._pool.store_usage()

    def _note(self, found: Slice) -> Slice:
        known = self._world.collected.setdefault((self._node, found.trace), Collected())
        before = known.epochs.get(found.epoch, SliceFlags.NONE)
        known.epochs[found.epoch] = before | (SliceFlags.NONE if found.searching else found.flags)
        for flag in found.flags:
            known.flagged_ns.setdefault(flag, self._world.scheduler.now_ns)
        return found
