# SPDX-License-Identifier: Apache-2.0
"""Firings: what nodes say that fired, within what each of them may begin.

Each trace that a firing has collected costs its node a token, whether the group is new or not: else
one group, fired again with other laterals each time, would begin any number of them. What a
node is asked to fire by a snapshot was counted by the snapshot. What it says that an operator fired has
tokens of its own, since an operator looks for something while others fire too much; it is the
node's own word, so it has a limit too.

A group that is over the limit is given up. That is written, so that whoever looks for its primary
finds why it is not there; but only of so many, since each takes room that other traces have in
the store. Of a group that is known already the rest is left out: others may want what is here.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.core.closed import Outcome
from coordinator.core.config import CoordinatorConfig
from coordinator.core.figures import CoordinatorCounters, TriggerCounters
from coordinator.core.groups import OF_A_PROCESS, Owner
from coordinator.core.lifecycle import NOBODY, Lifecycle
from coordinator.core.memory import FIRING_BYTES, Memory
from coordinator.core.nodes import FiringTokens, Node
from coordinator.core.outbox import Outbox, Say
from coordinator.core.records import PutTrigger
from coordinator.core.snapshots import Snapshots
from coordinator.core.trace import Trace
from coordinator.core.traversal import Traversal
from counting.trigger_names import OTHER_NAMES, UNUSED_NS, TriggerNames
from protocol.messages import (
    RECOVERED_WHY,
    Drop,
    Group,
    Source,
    TraceId,
    TriggerAck,
    TriggerFired,
)


class Firings:
    """Takes what fired: has it stored, and its traces followed."""

    def __init__(
        self,
        config: CoordinatorConfig,
        traversal: Traversal,
        lifecycle: Lifecycle,
        memory: Memory,
        outbox: Outbox,
        snapshots: Snapshots,
        counters: CoordinatorCounters,
        now_ns: int,
    ) -> None:
        self._config = config
        self._traversal = traversal
        self._lifecycle = lifecycle
        self._memory = memory
        self._outbox = outbox
        self._snapshots = snapshots
        self._counters = counters
        self._names = TriggerNames(config.trigger_names_max)
        self._forgotten_ns = now_ns

    def reconfigure(self, config: CoordinatorConfig) -> None:
        """Go on with other limits; each node begins with what it may at once."""
        self._config = config

    def fired(self, session: int, node: Node, fired: TriggerFired, now_ns: int) -> None:
        """A node says that something fired there. Raises UnreadableError."""
        group = fired.group
        # All at once, before anything is made of it: the store may be unreadable.
        outcomes = {each: self._lifecycle.outcome(each) for each in _members(fired)}
        is_ordered = self._snapshots.on_fired(node, group)
        name = self._names.key(group.trigger)
        counters = self._counters.by_trigger.setdefault(name, TriggerCounters())
        self._counters.triggers += 1
        counters.reports += 1
        state = self._traversal.groups.get(group)
        told = state.fired if state is not None else {}
        is_given_up = group in self._traversal.abandoned
        known = bool(told) or is_given_up or outcomes[group.primary] is not None
        # A process may give any reason; this one counts as a node's own.
        is_recovered = fired.source is Source.NODE and fired.why == RECOVERED_WHY
        adds_nothing = is_recovered and known
        is_new = not adds_nothing and told.get(node.name) != hash(fired)
        cost = 0 if is_given_up else self._cost(group, outcomes)
        if (
            (is_new or cost)
            and not is_ordered
            and not self._tokens(node, now_ns).take(fired.source, max(1, cost), now_ns)
        ):
            if known and not is_given_up:
                self._counters.firings_left_out += 1
                # Of what it said before, on another stream, it knows by this that it is durable.
                self._outbox.after_writes(Say(session, TriggerAck(group)))
                return
            self._refuse(node, fired, now_ns)
            is_new = False
        elif is_new:
            self._outbox.write(PutTrigger(node.name, fired))
        self._outbox.after_writes(Say(session, TriggerAck(group), late=True))
        if group in self._traversal.abandoned:
            self._outbox.say(session, Drop(group))
            self._join_given_up(group, Owner(node.id, fired.process), outcomes, now_ns)
        else:
            self._follow(node, fired, outcomes, counters, name, now_ns)
            state = self._traversal.groups.get(group)
            if state is not None and not adds_nothing:
                state.fired[node.name] = hash(fired)
        if is_new:
            primary = self._lifecycle.traces.get(group.primary)
            if primary is not None:
                self._memory.add_stored(primary, FIRING_BYTES)
            for trace_id in _members(fired):
                self._lifecycle.put_released_unless_here(trace_id, group)

    def may_be_given_up(self, node: Node, now_ns: int) -> bool:
        """Whether a node may give up one more group of which nobody told: it takes room in the store."""
        return self._tokens(node, now_ns).take_refused(now_ns)

    def forget_names(self, now_ns: int) -> None:
        """What was counted for names that nobody fires by any more is of the others now."""
        if now_ns < self._forgotten_ns + UNUSED_NS:
            return
        self._forgotten_ns = now_ns
        by_trigger = self._counters.by_trigger
        for name in self._names.forget():
            counted = by_trigger.pop(name, None)
            if counted is not None:
                by_trigger.setdefault(OTHER_NAMES, TriggerCounters()).add(counted)

    def _tokens(self, node: Node, now_ns: int) -> FiringTokens:
        if node.firing_tokens is None:
            config = self._config
            node.firing_tokens = FiringTokens(config.fired_per_s, config.fired_burst, now_ns)
        return node.firing_tokens

    def _cost(self, group: Group, outcomes: dict[TraceId, Outcome | None]) -> int:
        """How many traces this has followed for the group that were not."""
        cost = 0
        for trace_id, outcome in outcomes.items():
            trace = self._lifecycle.traces.get(trace_id)
            if trace is not None:
                cost += group not in trace.groups
            else:
                cost += _is_begun(outcome)
        return cost

    def _refuse(self, node: Node, fired: TriggerFired, now_ns: int) -> None:
        """Give a group up that is over its node's limit."""
        group = fired.group
        if group in self._traversal.abandoned:
            return
        self._counters.groups_given_up += 1
        if self._tokens(node, now_ns).take_refused(now_ns):
            self._outbox.write(PutTrigger(node.name, replace(fired, laterals=())))
            self._lifecycle.give_up(group, NOBODY, now_ns)
        else:
            self._traversal.remember_abandoned(group, NOBODY)

    def _join_given_up(
        self,
        group: Group,
        owner: Owner,
        outcomes: dict[TraceId, Outcome | None],
        now_ns: int,
    ) -> None:
        for trace_id in outcomes:
            trace = self._lifecycle.traces.get(trace_id)
            # Nodes spoke of it before anybody told of its firing: it was given up with this.
            if trace is not None and not trace.groups:
                self._traversal.join(trace, group, owner)
                self._lifecycle.news(trace, now_ns)

    def _follow(
        self,
        node: Node,
        fired: TriggerFired,
        outcomes: dict[TraceId, Outcome | None],
        counters: TriggerCounters,
        name: str,
        now_ns: int,
    ) -> None:
        by_process = fired.source in OF_A_PROCESS
        for trace_id, outcome in outcomes.items():
            # A closed trace stays as it is, but for what was written since.
            if not _is_begun(outcome):
                continue
            trace = self._lifecycle.traces.get(trace_id)
            trace = trace or self._lifecycle.begin(trace_id, node.id, now_ns, outcome)
            named = self._is_named(trace, name)
            if self._traversal.fired(
                trace,
                fired.group,
                node,
                now_ns,
                process=fired.process,
                by_process=by_process and trace_id == fired.group.primary,
            ):
                self._lifecycle.news(trace, now_ns)
                counters.traces += not named

    def _is_named(self, trace: Trace, name: str) -> bool:
        """Whether a trace has a trigger that counts under this name."""
        return any(self._names.key(group.trigger) == name for group in trace.groups)


def _members(fired: TriggerFired) -> tuple[TraceId, ...]:
    return tuple(dict.fromkeys((fired.group.primary, *fired.laterals)))


def _is_begun(outcome: Outcome | None) -> bool:
    """Whether a trace of which this is known is followed when it is fired."""
    return outcome is None or outcome.is_empty or outcome.given_up
