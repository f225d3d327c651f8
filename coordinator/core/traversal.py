# SPDX-License-Identifier: Apache-2.0
"""Follows breadcrumbs: who is asked for which trace, and who is told to drop it.

From a fired trigger on, every node that a crumb names is asked, once for each
trace and group, all branches at the same time; what it answers names further
nodes. It ends because nobody is asked twice, so cycles are no matter. Each
trace of a group is followed by its own crumbs.

A node is asked again under a second group: it holds a trace as long as any
group does, and ranks it by the group that matters most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from coordinator.core.config import CoordinatorConfig
from coordinator.core.evidence import Crumbs
from coordinator.core.groups import GroupState, Owner
from coordinator.core.memory import Memory
from coordinator.core.nodes import Node, Nodes
from coordinator.core.outbox import Outbox, Say
from coordinator.core.trace import DOUBTS, Part, PartState, Trace
from coordinator.core.verdict import FIRED, ITSELF, NOT_A_CRUMB, PEER, STORED
from protocol.messages import Drop, Group, NodeId, SliceFlags, SliceStatus, TraceId


class Traversal:
    """The groups, and the parts of all traces in memory."""

    def __init__(
        self, config: CoordinatorConfig, nodes: Nodes, outbox: Outbox, memory: Memory
    ) -> None:
        self.groups: dict[Group, GroupState] = {}
        self.abandoned: OrderedDict[Group, str] = OrderedDict()
        self._config = config
        self._nodes = nodes
        self._outbox = outbox
        self._memory = memory
        self._by_node: dict[NodeId, dict[TraceId, Trace]] = {}

    def reconfigure(self, config: CoordinatorConfig) -> None:
        """Go on with other times and bounds."""
        self._config = config

    # ------------------------------------------------------------ groups

    def join(self, trace: Trace, group: Group, owner: Owner) -> None:
        """The trace belongs to the group, which ``owner`` fired: ask everyone who has a part in it."""
        state = self.groups.get(group)
        if state is not None:
            self._memory.own(state, owner)
        if group in trace.groups or self._is_full(trace):
            return
        if state is None:
            state = self.groups[group] = self._memory.new_group(group, owner)
            state.given_up_by = self.abandoned.get(group)
        state.traces[trace.id] = trace
        if not trace.groups:
            self._memory.charge(trace, state)
        trace.groups[group] = state
        self._memory.count(state, trace.counted)
        if state.given_up:
            self._reckon_abandoned(trace)
        else:
            trace.abandoned_by = None
        for part in trace.parts.values():
            self._ask(trace, part)

    def fired(
        self,
        trace: Trace,
        group: Group,
        node: Node,
        now_ns: int,
        *,
        process: int,
        by_process: bool,
    ) -> bool:
        """The group fired on a node, which collects by itself and will say so.

        If it was not told that the trace was closed, it does not say again what it said, so it is asked.
        ``process``: who fired there, if anyone did. ``by_process``: one that works on this very
        trace. False if the trace has so many groups that one more is no news.
        """
        part = trace.parts.get(node.id)
        is_asked = part is not None and part.state is not PartState.UNASKED
        will_say = is_asked or node.id not in trace.unreleased
        is_one_too_many = group not in trace.groups and self._is_full(trace)
        if is_one_too_many and part is not None:
            return False
        if part is None:
            part = self._add(trace, node.id, PartState.ASKED, FIRED, now_ns)
        if is_one_too_many:
            self._ask(trace, part)
            return True
        if part.state is PartState.UNASKED:
            part.state = PartState.ASKED
        if will_say:
            part.told[group] = True
        if by_process:
            part.fired_under = node.incarnation
        self.join(trace, group, Owner(node.id, process))
        # For the trace's other groups, too: it lets go of what it collected when this one is given up.
        self._ask(trace, part)
        return True

    def abandon(self, group: Group, by: str) -> list[Trace]:
        """Give up a group everywhere; the traces that nobody wants any more."""
        self.remember_abandoned(group, by)
        unwanted: list[Trace] = []
        state = self.groups.get(group)
        if state is None:
            return unwanted
        dropped: dict[NodeId, None] = {}
        for trace in state.traces.values():
            self._reckon_abandoned(trace)
            if trace.abandoned_by is not None:
                unwanted.append(trace)
            elif trace.charged_to is state and (others := wanted_by(trace)):
                self._memory.charge(trace, others[0])
            for part in trace.parts.values():
                # Who spoke up by itself may know the group from an earlier coordinator.
                if group in part.told or not part.told:
                    dropped[part.node] = None
        for identity in dropped:
            node = self._nodes.by_id.get(identity)
            if node is not None and node.session is not None and node.name != by:
                # A coordinator that knows nothing of it would collect it from those that are left.
                self._outbox.after_writes(Say(node.session, Drop(group)))
        return unwanted

    def join_given_up(self, trace: Trace, group: Group, by: str) -> None:
        """No group of the trace is known but this one, which was given up: so nobody wants it."""
        self.remember_abandoned(group, by)
        assert trace.charged_to is not None
        self.join(trace, group, trace.charged_to.owner)

    def leave(self, trace: Trace, state: GroupState) -> None:
        """A group goes on without a trace that others of its groups want."""
        del trace.groups[state.group]
        for part in trace.parts.values():
            part.told.pop(state.group, None)
        if trace.charged_to is state:
            self._memory.charge(trace, wanted_by(trace)[0])
        self._memory.grown(trace)
        self._remove_from(state, trace)

    def is_of_others(self, group: Group, primary: Trace | None, node: Node) -> bool:
        """Whether that node has no part in any trace of a group, as far as its traces are here.

        ``primary`` is the one by which a group is known before anybody told of its firing.
        """
        state = self.groups.get(group)
        traces = [] if primary is None else [primary]
        if state is not None:
            traces += state.traces.values()
        return not any(node.id in trace.parts for trace in traces)

    def remember_abandoned(self, group: Group, by: str) -> None:
        """So that whoever still mentions the group is told."""
        self.abandoned.setdefault(group, by)
        state = self.groups.get(group)
        if state is not None:
            state.given_up_by = self.abandoned[group]
        while len(self.abandoned) > self._config.closed_max:
            self.abandoned.popitem(last=False)

    # ------------------------------------------------------------- parts

    def named(self, trace: Trace, crumbs: Crumbs, identity: NodeId, name: str, now_ns: int) -> bool:
        """Records in a node's slice name these. True if any leads to a node that has no part yet."""
        news = False
        for crumb in crumbs.addresses:
            news |= self._ask_at(trace, crumb, now_ns)
            if self._nodes.is_known(crumb):
                # A node's own, whoever says that an address has the same hash.
                news |= self._named(trace, crumb, name, now_ns)
            else:
                self._is_address(trace, crumb, identity)
        for crumb in crumbs.nodes:
            news |= self._ask_at(trace, crumb, now_ns)
            news |= self._named(trace, crumb, name, now_ns)
        return news

    def told(
        self, trace: Trace, crumbs: Iterable[NodeId], identity: NodeId, name: str, now_ns: int
    ) -> bool:
        """The same of a node's status, which has only ids, of nodes and of addresses alike."""
        news = False
        for crumb in crumbs:
            news |= self._ask_at(trace, crumb, now_ns)
            if self._nodes.is_known(crumb):
                news |= self._named(trace, crumb, name, now_ns)
            elif self._nodes.at_address(crumb):
                pass
            elif identity in trace.evidence.addresses.get(crumb, ()):
                pass  # no node is there
            elif trace.evidence.overflow:
                pass  # which of its crumbs are addresses, nobody knows any more
            else:
                news |= self._named(trace, crumb, name, now_ns, status_of=identity)
        return news

    def _ask_at(self, trace: Trace, crumb: NodeId, now_ns: int) -> bool:
        """A crumb was found: the nodes at the address that it may be of."""
        news = False
        for identity in self._nodes.at_address(crumb):
            news |= self._named(trace, identity, PEER, now_ns)
        return news

    def _is_address(self, trace: Trace, crumb: NodeId, by: NodeId) -> None:
        """By a node's slice, what its status named is an address, where no node is.

        To each id there is an address, so what it says of an id that others name counts for nothing.
        """
        part = trace.parts.get(crumb)
        if part is not None and part.only_by is not None:
            part.only_by.discard(by)
            if not part.only_by and self._may_be_address(part):
                self._remove_part(trace, crumb)

    def _may_be_address(self, part: Part) -> bool:
        """Whether nodes' statuses alone name it, and nothing came of a node by this id."""
        came = part.status is not None or part.received > 0 or self._nodes.is_known(part.node)
        return part.only_by is not None and not came

    def _named(
        self,
        trace: Trace,
        identity: NodeId,
        by: str,
        now_ns: int,
        *,
        status_of: NodeId | None = None,
    ) -> bool:
        """``status_of``: by the status of that node, so it may be an address."""
        known = trace.parts.get(identity)
        if known is not None:
            if status_of is None:
                known.only_by = None
            elif known.only_by is not None:
                known.only_by.add(status_of)
            if known.named_by in NOT_A_CRUMB and by not in NOT_A_CRUMB:
                known.named_by = by
            return False
        if len(trace.parts) >= self._config.nodes_per_trace_max:
            trace.nodes_cut += 1
            return False
        part = self._add(trace, identity, PartState.UNASKED, by, now_ns)
        part.only_by = None if status_of is None else {status_of}
        self._ask(trace, part)
        return True

    def answered(
        self, trace: Trace, part: Part, node: Node, status: SliceStatus, now_ns: int, *, kept: bool
    ) -> bool:
        """A node said what it holds. True if that is news.

        ``kept``: it speaks of another slice than the one that is here and stays.
        """
        back = part.state is PartState.RETURNED
        news = part.state is not PartState.ANSWERED or (not kept and status != part.status)
        part.state = PartState.ANSWERED
        part.deadline_ns = None
        if not kept:
            least = part.status.bytes if part.status is not None else 0
            if back and status.epoch != part.epoch:
                # Of the same slice, bytes may have overtaken the status.
                least = max(least, part.received)
            if status.bytes < least:
                part.restarted = True
            part.status = status
        elif part.status is not None and (more := _doubts_of(status) & ~part.status.flags):
            flags = part.status.flags | more
            part.status = replace(part.status, flags=flags)
            news = True
        if part.fired_under not in (None, node.incarnation) and part.is_empty and status.is_blank:
            # What was fired there went with the memory, before anything was told of it.
            part.restarted = True
        part.fired_under = None
        for group in part.told:
            part.told[group] = True
        if back:
            self._ask(trace, part)
        if trace.abandoned_by is not None and not part.told and node.session is not None:
            for group in trace.groups:
                self._outbox.say(node.session, Drop(group))
                part.told[group] = True
        return self.told(trace, status.crumbs, node.id, node.name, now_ns) or news

    def part_of(self, trace: Trace, node: Node, now_ns: int) -> Part:
        """The part of a node that sends bytes, also unasked."""
        part = trace.parts.get(node.id)
        if part is None:
            part = self._add(trace, node.id, PartState.ASKED, ITSELF, now_ns)
        return part

    def add_stored(self, trace: Trace, identity: NodeId, now_ns: int) -> Part:
        """A part out of the store, to be asked when its node is back."""
        part = trace.parts.get(identity)
        if part is None:
            part = self._add(trace, identity, PartState.UNASKED, STORED, now_ns)
            if not self._nodes.is_known(identity):
                part.only_by = set()  # who named it, nobody knows any more
        return part

    def overdue(self, trace: Trace, now_ns: int) -> None:
        """Stop waiting for those whose time is over."""
        for part in trace.parts.values():
            if part.deadline_ns is not None and part.deadline_ns <= now_ns:
                part.deadline_ns = None

    def remove(self, trace: Trace) -> None:
        """The trace leaves the memory."""
        for identity in list(trace.parts):
            self._remove_part(trace, identity)
        self._memory.forget(trace)
        for state in trace.groups.values():
            self._remove_from(state, trace)

    def _remove_from(self, state: GroupState, trace: Trace) -> None:
        del state.traces[trace.id]
        unsettled, pending = trace.counted
        self._memory.count(state, (-unsettled, -pending))
        if not state.traces:
            del self.groups[state.group]

    # ------------------------------------------------------------- nodes

    def connected(self, node: Node, *, restarted: bool, now_ns: int) -> list[Trace]:
        """Ask a node what it was not asked, or did not answer; the traces that wait for it.

        A restarted one is asked again also where all is here: what is written there from now on
        it would not collect, if it lost its memory. If it did not, it says the same again.
        """
        assert node.session is not None
        asked: list[Trace] = []
        dropped: dict[Group, None] = {}
        for trace in list(self._by_node.get(node.id, {}).values()):
            part = trace.parts[node.id]
            # Whether it heard of the group before the stream was lost is not known.
            for group, state in trace.groups.items():
                if state.given_up:
                    dropped[group] = None
            if trace.is_released or trace.abandoned_by is not None:
                continue
            if restarted and part.state is not PartState.RETURNED:
                # It may have lost its memory, and with it that it was asked.
                part.told.clear()
            if restarted and part.is_due and part.state is not PartState.RETURNED:
                # Also where the coordinator was restarted too, and had no answer since.
                part.state = PartState.RETURNED
                part.deadline_ns = now_ns + self._config.answer_timeout_ns
                asked.append(trace)
            elif part.state is PartState.RETURNED:
                part.deadline_ns = now_ns + self._config.answer_timeout_ns
                asked.append(trace)
            elif part.state is PartState.ANSWERED:
                part.told = {group: True for group, sure in part.told.items() if sure}
                self._ask(trace, part)
            elif self._ask(trace, part):
                part.deadline_ns = now_ns + self._config.answer_timeout_ns
                asked.append(trace)
        for group in dropped:
            self._outbox.after_writes(Say(node.session, Drop(group)))
        return asked

    def moved(self, node: Node, traces: Iterable[Trace], now_ns: int) -> list[Trace]:
        """A node has addresses that it had not: it is asked for the traces that went there before.

        Those of which that is news.
        """
        asked: list[Trace] = []
        for trace in traces:
            if trace.is_released or trace.abandoned_by is not None:
                continue
            news = False
            for crumb in node.crumbs:
                part = trace.parts.get(crumb)
                by_status_alone = part is not None and self._may_be_address(part)
                if by_status_alone:
                    self._remove_part(trace, crumb)
                if by_status_alone or crumb in trace.evidence.addresses:
                    news |= self._ask_at(trace, crumb, now_ns) or by_status_alone
            if news:
                asked.append(trace)
        return asked

    def waits_for(self, node: Node) -> bool:
        """Whether a trace waits for what the node was asked, or had before it was restarted."""
        return any(
            trace.parts[node.id].state is PartState.RETURNED
            or not all(trace.parts[node.id].told.values())
            for trace in self._by_node.get(node.id, {}).values()
            if not trace.is_released
        )

    def lost(self, node: Node) -> None:
        """The node's stream is gone, with whatever was on it."""
        for trace in self._by_node.get(node.id, {}).values():
            part = trace.parts[node.id]
            if part.state is PartState.ASKED:
                part.state = PartState.UNASKED
                part.told = {group: True for group, sure in part.told.items() if sure}

    def has_part(self, identity: NodeId) -> bool:
        """Whether a node has a part in any trace in memory."""
        return identity in self._by_node

    def traces_of(self, node: Node) -> Iterator[tuple[Trace, Part]]:
        """All traces in which the node has a part."""
        for trace in self._by_node.get(node.id, {}).values():
            yield trace, trace.parts[node.id]

    # ------------------------------------------------------------ inside

    def _add(self, trace: Trace, identity: NodeId, state: PartState, by: str, now_ns: int) -> Part:
        deadline_ns = now_ns + self._config.answer_timeout_ns
        part = trace.parts[identity] = Part(identity, state, by, deadline_ns)
        self._by_node.setdefault(identity, {})[trace.id] = trace
        return part

    def _remove_part(self, trace: Trace, identity: NodeId) -> None:
        part = trace.parts.pop(identity, None)
        if part is not None:
            node = self._nodes.by_id.get(identity)
            if node is not None:
                node.expected_bytes -= part.expected_bytes
            traces = self._by_node[identity]
            del traces[trace.id]
            if not traces:
                del self._by_node[identity]

    def _ask(self, trace: Trace, part: Part) -> bool:
        """Ask for what the node was not asked; True if it is asked now."""
        node = self._nodes.by_id.get(part.node)
        if node is None or node.session is None or part.state is PartState.RETURNED:
            return False
        if part.state is not PartState.UNASKED and len(part.told) == len(trace.groups):
            return False
        wanted = [state.group for state in wanted_by(trace)]
        for group in wanted:
            if group not in part.told:
                self._outbox.collect(node.session, group, trace.id)
                part.told[group] = False
        if wanted and part.state is PartState.UNASKED:
            part.state = PartState.ASKED
            return True
        return False

    def _is_full(self, trace: Trace) -> bool:
        """It is collected already; one name more would change little."""
        return len(trace.groups) >= self._config.groups_per_trace_max

    @staticmethod
    def _reckon_abandoned(trace: Trace) -> None:
        by = [state.given_up_by for state in trace.groups.values()]
        is_wanted = trace.kept or not by or None in by
        trace.abandoned_by = None if is_wanted else by[0]


def _doubts_of(status: SliceStatus) -> SliceFlags:
    """What it says against a slice that is here. Of what there is no room for, nothing new comes."""
    return status.flags & (DOUBTS if status.epoch else DOUBTS | SliceFlags.STORE_FULL)


def wanted_by(trace: Trace) -> list[GroupState]:
    """The trace's groups that were not given up."""
    return [state for state in trace.groups.values() if not state.given_up]
