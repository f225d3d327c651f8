# SPDX-License-Identifier: Apache-2.0
"""Token buckets, and which local triggers they admit.

A trigger that fires too often must not drown the others, nor one process its
neighbours. Each firing pays one token to its process, if it has one, and then one
to its trigger name, before anything else happens with it.

Triggers that fire while the daemon is away come all at once when it is back. That is no burst:
the tokens of that time are there for them, beyond the burst.

Names belong to nobody, so a user's processes could use up all that others may fire by a
name. Who asks for more than half of a name's rate leaves half of its tokens to its other
users, if there are any.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.core.config import NS_PER_S, TriggerLimits
from appliance.core.dataplane import NO_CLIENT
from appliance.core.marks import Asker, Owner

PROCESSES_MAX = 4096
"""Buckets of processes that are kept. One that is full again says no more than
a new one, so it is dropped first; the daemon admits fewer clients than this."""


class TokenBucket:
    """Tokens that come at a rate, up to a burst.

    ``rate_per_s`` and ``burst`` are in tokens. The level is kept in
    billionths, as an integer, so that equal inputs give equal decisions on
    every machine and no refill is lost to rounding at integer rates.
    """

    __slots__ = ("_at_ns", "_burst", "_level", "_rate")

    def __init__(self, rate_per_s: float, burst: float, now_ns: int) -> None:
        if rate_per_s <= 0 or burst <= 0:
            raise ValueError(f"rate {rate_per_s} and burst {burst} of a bucket must be positive")
        self._rate = rate_per_s
        self._burst = int(burst * NS_PER_S)
        self._level = self._burst
        self._at_ns = now_ns

    def change(self, rate_per_s: float, burst: float, now_ns: int) -> None:
        """Go on at another rate, with the tokens that there are, as far as they fit."""
        self._refill(now_ns)
        changed = TokenBucket(rate_per_s, burst, now_ns)
        self._rate, self._burst = changed._rate, changed._burst
        self._level = min(self._level, self._burst)

    def _refill(self, now_ns: int, waited_ns: int = 0) -> None:
        if now_ns > self._at_ns:
            room = self._burst + int(self._rate * waited_ns)
            self._level = min(room, self._level + int(self._rate * (now_ns - self._at_ns)))
            self._at_ns = now_ns

    def take(self, now_ns: int, left: float = 0, waited_ns: int = 0) -> bool:
        """Take one token, if so many are left then.

        ``waited_ns``: for how long nobody could; the tokens of that time go beyond the burst.
        """
        self._refill(now_ns, waited_ns)
        if self._level < NS_PER_S + int(left * NS_PER_S):
            return False
        self._level -= NS_PER_S
        return True

    def charge(self, tokens: int, now_ns: int) -> None:
        """Take tokens that were spent, into debt if need be.

        So chunks need not be cut to what is left: the rate holds over time,
        and the burst is exceeded by one chunk at most.
        """
        self._refill(now_ns)
        self._level -= tokens * NS_PER_S

    def ready_ns(self, now_ns: int, waited_ns: int = 0) -> int:
        """When the bucket is out of debt: now, or the time to wait for; as in take()."""
        self._refill(now_ns, waited_ns)
        if self._level > 0:
            return now_ns
        return now_ns + int((-self._level) / self._rate) + 1

    def full(self, now_ns: int) -> bool:
        """Whether it is as good as a new one."""
        self._refill(now_ns)
        return self._level >= self._burst


class Refusal(enum.Enum):
    """Which limit a firing met."""

    PROCESS = "process"
    TRIGGER = "trigger"


# Who stopped asking for too much is as others are after so long.
_OWES_MAX_NS = 2 * NS_PER_S

# What is said of longer waits may be a lie of who fires. A daemon that is away for longer loses
# records as well (STOCK_S in native/src/node/grants.c).
_WAITED_MAX_NS = 10 * NS_PER_S

# Users of one name that are remembered; each costs some 300 bytes.
_USERS_MAX = 256


@dataclass(slots=True)
class _Name:
    """A trigger name. ``demands``: what its users asked for, against half of its rate."""

    bucket: TokenBucket
    suppressed: int = 0
    demands: OrderedDict[int, TokenBucket] = field(default_factory=OrderedDict)

    def take(self, user: int, limits: TriggerLimits, now_ns: int, waited_ns: int) -> bool:
        """Take a token for a user; False if there is none for it."""
        left = 0.0
        if self._asks_too_much(user, limits, now_ns, waited_ns) and len(self.demands) > 1:
            burst = limits.per_trigger_burst
            # A second's worth at most, so that it waits no longer than that for the others'.
            left = max(0.0, min(burst / 2, burst - 1, limits.per_trigger_per_s))
        return self.bucket.take(now_ns, left, waited_ns)

    def _asks_too_much(self, user: int, limits: TriggerLimits, now_ns: int, waited_ns: int) -> bool:
        """Count that it asks."""
        demand = self.demands.get(user)
        if demand is None:
            if len(self.demands) == _USERS_MAX:
                self.demands.popitem(last=False)
            demand = self.demands[user] = TokenBucket(
                limits.per_trigger_per_s / 2, limits.per_trigger_burst, now_ns - waited_ns
            )
        self.demands.move_to_end(user)
        owes_ns = demand.ready_ns(now_ns, waited_ns) - now_ns
        if owes_ns < _OWES_MAX_NS:
            demand.charge(1, now_ns)
        return owes_ns > 0


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

    def admit(self, client: int, trigger: str, now_ns: int, waited_ns: int = 0) -> Refusal | None:
        """Charge one firing; None if it is admitted.

        ``trigger`` is a bounded name (counting.trigger_names). ``waited_ns``: for how long firings
        may have waited that come now.
        """
        waited_ns = min(waited_ns, _WAITED_MAX_NS)
        name = self._name(trigger, now_ns - waited_ns)
        if client != NO_CLIENT:
            process = self._process(client, now_ns - waited_ns)
            if not process.take(now_ns, waited_ns=waited_ns):
                name.suppressed += 1
                return Refusal.PROCESS
        if not name.take(self._user(client), self._limits, now_ns, waited_ns):
            name.suppressed += 1
            return Refusal.TRIGGER
        return None

    def reconfigure(self, limits: TriggerLimits, now_ns: int) -> None:
        """Go on with other limits; nobody gets tokens by it."""
        self._limits = limits
        for process in self._processes.values():
            process.change(limits.per_process_per_s, limits.per_process_burst, now_ns)
        for name in self._names.values():
            name.bucket.change(limits.per_trigger_per_s, limits.per_trigger_burst, now_ns)
            name.demands.clear()

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
            name.demands.pop(_only_process(client), None)

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
