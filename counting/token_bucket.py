# SPDX-License-Identifier: Apache-2.0
"""A token bucket: how often something may happen. Without I/O, so that cores can use it."""

from __future__ import annotations

NS_PER_S = 1_000_000_000


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

        So what is charged for need not be cut to what is left: the rate holds over time,
        and the burst is exceeded by one charge at most.
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
