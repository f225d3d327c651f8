# SPDX-License-Identifier: Apache-2.0
"""What fires on this node: whether it is admitted, and what is collected for it.

A group goes to one coordinator, whichever of its traces fired where: the link of its primary.
"""

from __future__ import annotations

from collections.abc import Callable

from appliance.core.config import NodeConfig
from appliance.core.dataplane import NO_CLIENT, LocalTrigger
from appliance.core.holdings import Holdings
from appliance.core.limits import Admission, Refusal
from appliance.core.link import Link
from appliance.core.marks import Owner
from protocol.messages import DRY_RUN_PREFIX, Group, Source, TraceId, TriggerFired


class Firings:
    """See the module. ``link_of`` tells whose a group is, by its primary."""

    def __init__(
        self,
        config: NodeConfig,
        holdings: Holdings,
        link_of: Callable[[TraceId], Link],
        user_of: Callable[[int], int | None],
        realtime_offset_ns: int,
    ) -> None:
        self.realtime_offset_ns = realtime_offset_ns
        """Unix time minus CLOCK_MONOTONIC, for what fires from now on."""
        self._config = config
        self._holdings = holdings
        self._link_of = link_of
        self._admission = Admission(config.limits, user_of)

    def reconfigure(self, config: NodeConfig, now_ns: int) -> None:
        """Go on with other limits."""
        self._config = config
        self._admission.reconfigure(config.limits, now_ns)

    def forget_process(self, client: int) -> None:
        """It is gone, with all that it wrote."""
        self._admission.forget_process(client)

    def forget_name(self, name: str) -> None:
        """Nobody has fired by it for long."""
        self._admission.forget_name(name)

    def on_local_trigger(self, event: LocalTrigger, now_ns: int, waited_ns: int) -> None:
        """A trigger fired here. ``waited_ns``: for how long the oldest of those that came has."""
        queue = self._holdings.queue(event.trigger)
        counters = self._holdings.count(event.trigger)
        counters.fired += 1
        others = len({*event.laterals} - {event.trace})
        laterals = min(others, self._config.limits.laterals_max)
        match self._admission.admit(event.client, queue, now_ns, waited_ns, laterals):
            case Refusal.PROCESS:
                counters.rate_limited_process += 1
            case Refusal.TRIGGER:
                counters.rate_limited_trigger += 1
            case None if event.trigger.startswith(DRY_RUN_PREFIX):
                counters.dry_run += 1
            case None:
                counters.admitted += 1
                group = Group(event.trigger, event.trace)
                owner = self._admission.owner(event.client)
                self.fire(
                    group,
                    event.laterals,
                    event.why,
                    event.source,
                    owner,
                    event.fired_ns,
                    now_ns,
                    event.client,
                )

    def fire(
        self,
        group: Group,
        laterals: tuple[TraceId, ...],
        why: str,
        source: Source,
        owner: Owner,
        fired_ns: int,
        now_ns: int,
        client: int = NO_CLIENT,
    ) -> None:
        """Collect a group, however many there were; its coordinator hears of it."""
        owed = self._link_of(group.primary).owed
        counters = self._holdings.count(group.trigger)
        if group in owed.abandoned_groups:
            counters.merged += 1
            return
        known = self._holdings.groups.get(group)
        told = known.fired.laterals if known is not None and known.fired is not None else ()
        others = dict.fromkeys((*told, *laterals))
        others.pop(group.primary, None)
        self._holdings.want((group.primary, *others), owner, now_ns)
        # What has so many triggers that it cannot join is not told of either, so that the
        # coordinator expects nothing of it for this one.
        joins = self._holdings.may_join(group.primary, group)
        named = tuple(t for t in others if joins and self._holdings.may_join(t, group))
        named = named[: self._config.limits.laterals_max]
        counters.laterals_cut += len(others) - len(named)
        if not joins or (known is not None and {group.primary, *named} <= set(known.traces)):
            counters.merged += 1
            return
        held = known or self._holdings.group(group, now_ns)
        if held is None:
            self._holdings.counters.firings_dropped += 1
            return
        if held.fired is not None:
            why, source, client = held.fired.why, held.fired.source, held.fired.process
            fired_at_ns = held.fired.fired_at_ns
        else:
            fired_at_ns = fired_ns + self.realtime_offset_ns
        suppressed = self._admission.take_suppressed(held.queue)
        held.fired = TriggerFired(group, named, why, source, fired_at_ns, suppressed, client)
        held.acknowledged = False
        owed.firing(group)
        unknown = self._holdings.collect(held, (group.primary, *named), owner, now_ns)
        # What was told of the others stands; if it is released meanwhile, the coordinator is
        # asked again once it has the firing.
        for trace in dict.fromkeys((group.primary, *unknown)):
            owed.answer(trace)
