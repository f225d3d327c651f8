# SPDX-License-Identifier: Apache-2.0
"""What probes may cost, and what goes when they cost more (sans-IO).

    within the budget
        | over it, twice in a row
    thresholds raised: fewer events are written down and fired for
        | over it still (far below it for a while: back to the first)
    the costliest object is taken out of the kernel; and the next, as long as it is over

What was taken out is put back when the others have kept within the budget for ten minutes: what
made it cost so much may be over. If it is not, it is taken out again, and for twice as long, up to
160 minutes. If all is well for as long as it would be taken out for, the next time it is ten
minutes again. Reading the configuration puts it back at once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

RAISED_BY = 10
"""As often are thresholds raised: an event that was worth 1 ms is worth 10 ms then."""

# One look may have met a moment that is not typical.
_OVER_IN_A_ROW = 2

# Below this part of the budget, for so long, thresholds go back.
_FAR_BELOW = 0.5
_BELOW_FOR_NS = 60_000_000_000

# What is put back and costs too much again costs it for four looks. On a machine that is always
# too busy for it, that is to be rare in the end.
BACK_AFTER_NS = 600_000_000_000
_BACK_AFTER_MAX = 16  # times as long


class Step(enum.Enum):
    """What there is to do."""

    RAISE = enum.auto()
    LOWER = enum.auto()
    TAKE_OUT = enum.auto()
    PUT_BACK = enum.auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """``share`` of a CPU since the last look; ``object``: which one is to be taken out."""

    share: float
    step: Step | None = None
    object: str = ""


@dataclass(slots=True)
class Budget:
    """``share_max`` of a CPU; all objects together."""

    share_max: float
    raised: bool = False
    _over: int = 0
    _below_since_ns: int | None = None
    _looked_ns: int | None = None
    _out_since_ns: int | None = None
    _back_since_ns: int | None = None
    _back_after_ns: int = field(default_factory=lambda: BACK_AFTER_NS)
    _before: dict[str, int] = field(default_factory=dict)

    def look(self, now_ns: int, run_ns: Mapping[str, int]) -> Verdict:
        """Judge what objects have cost up to now, each in all."""
        since_ns, before = self._looked_ns, self._before
        self._looked_ns, self._before = now_ns, dict(run_ns)
        if since_ns is None or now_ns <= since_ns:
            return Verdict(0.0)
        # What one that was put back had cost before it was taken out is in what it has cost.
        spent = {name: max(0, ns - before.get(name, ns)) for name, ns in run_ns.items()}
        share = sum(spent.values()) / (now_ns - since_ns)
        if share > self.share_max:
            return self._is_over(now_ns, share, spent)
        self._over = 0
        if self._out_since_ns is not None and now_ns - self._out_since_ns >= self._back_after_ns:
            self._out_since_ns, self._back_since_ns = None, now_ns
            self._back_after_ns = min(2 * self._back_after_ns, _BACK_AFTER_MAX * BACK_AFTER_NS)
            return Verdict(share, Step.PUT_BACK)
        if self._back_since_ns is not None and now_ns - self._back_since_ns >= self._back_after_ns:
            self._back_since_ns, self._back_after_ns = None, BACK_AFTER_NS
        if not self.raised or share > _FAR_BELOW * self.share_max:
            self._below_since_ns = None
            return Verdict(share)
        if self._below_since_ns is None:
            self._below_since_ns = now_ns
        if now_ns - self._below_since_ns < _BELOW_FOR_NS:
            return Verdict(share)
        self.raised, self._below_since_ns = False, None
        return Verdict(share, Step.LOWER)

    def _is_over(self, now_ns: int, share: float, spent: Mapping[str, int]) -> Verdict:
        self._below_since_ns = None
        self._over += 1
        if self._over < _OVER_IN_A_ROW:
            return Verdict(share)
        self._over = 0
        if self._out_since_ns is not None:
            self._out_since_ns = now_ns
        if not self.raised:
            self.raised = True
            return Verdict(share, Step.RAISE)
        self._out_since_ns, self._back_since_ns = now_ns, None
        return Verdict(share, Step.TAKE_OUT, max(spent, key=lambda name: spent[name]))
