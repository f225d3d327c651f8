# SPDX-License-Identifier: Apache-2.0
"""Which local triggers are admitted.

A trigger that fires too often must not drown the others, nor one process its
neighbours. Each firing pays one token to its process, if it has one, and then one
to its trigger name, before anything else happens with it. One that is admitted pays one
more to both for each lateral: a token is the price of a trace that is collected, here and
at the coordinator. These tokens may be owed, so that a group is taken as a whole.

Triggers that fire while the daemon is away come all at once when it is back. That is no burst:
the tokens of that time are there for them, beyond the burst.

Names belong to nobody, so a process could use up all that others may fire by a name, and a
user's processes together what other users may. Who asks for more than half of a name's rate
leaves half of its tokens to the other processes, or users, that fire it, if there are any.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.core.config import NS_PER_S, TriggerLimits
from appliance.core.dataplane import NO_CLIENT
from appliance.core.marks import Asker, Owner
from counting.token_bucket import TokenBucket

PROCESSES_MAX = 4096
"""Buckets of processes that are kept. One that is full again says no more than
a new one, so it is dropped first; the daemon admits fewer clients than this."""


class Refusal(enum.Enum):
    """Which limit a firing met."""

    PROCESS = "process"
    TRIGGER = "trigger"


# Who stopped asking for too much is as others are after so long.
_OWES_MAX_NS = 2 * NS_PER_S

# What is said of longer waits may be a lie of who fires. A daemon that is away for longer loses
# records as well (STOCK_S in native/src/node/grants.c).
_WAITED_MAX_NS = 10 * NS_PER_S

# Of one name, users and processes that are remembered; each costs some 300 bytes.
_ASKERS_MAX = 256


@dataclass(slots=True)
class _Askers:
    """Who asks for the tokens of a name: users, or processes.

    ``demands``: what each asked for, against half of the name's rate.
    """

    demands: OrderedDict[int, TokenBucket] = field(default_factory=OrderedDict)

    def is_too_much(
        self, who: int, tokens: int, limits: TriggerLimits, now_ns: int, waited_ns: int
    ) -> bool:
        """Count that it asks for so many; whether it takes more than half, and there are others."""
        demand = self.demands.get(who)
        if demand is None:
            if len(self.demands) == _ASKERS_MAX:
                self.demands.popitem(last=False)
            demand = self.demands[who] = TokenBucket(
                limits.per_trigger_per_s / 2, limits.per_trigger_burst, now_ns - waited_ns
            )
        self.demands.move_to_end(who)
        owes_ns = demand.ready_ns(now_ns, waited_ns) - now_ns
        if owes_ns < _OWES_MAX_NS:
            demand.charge(tokens, now_ns)
        return owes_ns > 0 and len(self.demands) > 1


@dataclass(slots=True)
class _Name:
    """A trigger name."""

    bucket: TokenBucket
    suppressed: int = 0
    users: _Askers = field(default_factory=_Askers)
    processes: _Askers = field(default_factory=_Askers)

    def take(
        self,
        user: int,
        client: int,
        tokens: int,
        limits: TriggerLimits,
        now_ns: int,
        waited_ns: int,
    ) -> bool:
        """Take tokens for a process of a user; False if there are none for it."""
        burst = limits.per_trigger_burst
        # A second's worth at most, so that it waits no longer than that for the others'.
        half = max(0.0, min(burst / 2, burst - 1, limits.per_trigger_per_s))
        left = 0.0
        if self.users.is_too_much(user, tokens, limits, now_ns, waited_ns):
            left = half
        if self.processes.is_too_much(client, tokens, limits, now_ns, waited_ns):
            # Of what its user has.
            left = min(left + half / 2, burst - 1) if left else half
        if not self.bucket.take(now_ns, left, waited_ns):
            return False
        self.bucket.charge(tokens - 1, now_ns)
        return True


def _only_process(client: int) -> int:
    """A user that no system has."""
    return -1 - client


class Admission:
    """The rate limits of local triggers.

    ``user_of``: whose a process is; None: nobody knows, so it is taken for a user's only one.
    """

    def __init__(
        self, limits: TriggerLimits, user_of: Callable[[int], int | None] = lambda _: None
    ) -> None:
        self._limits = limits
        self._user_of = user_of
        self._processes: OrderedDict[int, TokenBucket] = OrderedDict()
        self._names: dict[str, _Name] = {}

    def admit(
        self, client: int, trigger: str, now_ns: int, waited_ns: int = 0, laterals: int = 0
    ) -> Refusal | None:
        """Charge one firing that names so many laterals; None if it is admitted.

        ``trigger`` is a bounded name (counting.trigger_names). ``waited_ns``: for how long firings
        may have waited that come now.
        """
        waited_ns = min(waited_ns, _WAITED_MAX_NS)
        tokens = 1 + laterals
        name = self._name(trigger, now_ns - waited_ns)
        process = None if client == NO_CLIENT else self._process(client, now_ns - waited_ns)
        if process is not None and not process.take(now_ns, waited_ns=waited_ns):
            name.suppressed += 1
            return Refusal.PROCESS
        user = self._user(client)
        if not name.take(user, client, tokens, self._limits, now_ns, waited_ns):
            name.suppressed += 1
            return Refusal.TRIGGER
        if process is not None:
            process.charge(laterals, now_ns)
        return None

    def reconfigure(self, limits: TriggerLimits, now_ns: int) -> None:
        """Go on with other limits; nobody gets tokens by it."""
        self._limits = limits
        for process in self._processes.values():
            process.change(limits.per_process_per_s, limits.per_process_burst, now_ns)
        for name in self._names.values():
            name.bucket.change(limits.per_trigger_per_s, limits.per_trigger_burst, now_ns)
            name.users.demands.clear()
            name.processes.demands.clear()

    def take_suppressed(self, trigger: str) -> int:
        """Firings of that name refused since this was last asked."""
        name = self._names.get(trigger)
        if name is None:
            return 0
        suppressed, name.suppressed = name.suppressed, 0
        return suppressed

    def forget_process(self, client: int) -> None:
        self._processes.pop(client, None)
        for name in self._names.values():
            name.users.demands.pop(_only_process(client), None)
            name.processes.demands.pop(client, None)

    def forget_name(self, trigger: str) -> None:
        self._names.pop(trigger, None)

    def owner(self, client: int) -> Owner:
        """Whose the mark of a trace is that a process asks for."""
        if client == NO_CLIENT:
            return Asker.NODE
        user = self._user_of(client)
        return Asker.UNKNOWN if user is None else user

    def _user(self, client: int) -> int:
        user = self._user_of(client)
        return _only_process(client) if user is None else user

    def _process(self, client: int, since_ns: int) -> TokenBucket:
        process = self._processes.get(client)
        if process is None:
            self._make_room(since_ns)
            process = self._processes[client] = TokenBucket(
                self._limits.per_process_per_s, self._limits.per_process_burst, since_ns
            )
        self._processes.move_to_end(client)
        return process

    def _name(self, trigger: str, since_ns: int) -> _Name:
        name = self._names.get(trigger)
        if name is None:
            bucket = TokenBucket(
                self._limits.per_trigger_per_s, self._limits.per_trigger_burst, since_ns
            )
            name = self._names[trigger] = _Name(bucket)
        return name

    def _make_room(self, now_ns: int) -> None:
        if len(self._processes) < PROCESSES_MAX:
            return
        for client in [c for c, bucket in self._processes.items() if bucket.full(now_ns)]:
            del self._processes[client]
        while len(self._processes) >= PROCESSES_MAX:
            self._processes.popitem(last=False)
