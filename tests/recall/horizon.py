# SPDX-License-Identifier: Apache-2.0
"""How far back a node's pool reached at any time, by what its metrics said."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """What a node said of its horizon, at some time between two (Unix ns)."""

    asked_ns: int
    answered_ns: int
    horizon_ns: int

    @classmethod
    def of(cls, asked_ns: int, answered_ns: int, dataplane: Mapping[str, Any]) -> Reading:
        """From what ``backsightctl --node SOCKET status --json`` prints."""
        return cls(asked_ns, answered_ns, dataplane["horizon_ns"])


@dataclass(slots=True)
class Horizon:
    """One node's readings, in order. What was written within a horizon must be there."""

    readings: list[Reading] = field(default_factory=list)

    def said_ns(self, at_ns: int) -> int | None:
        """As it was read last; None before the first reclaim."""
        last = bisect_right(self.readings, at_ns, key=lambda reading: reading.answered_ns) - 1
        return (self.readings[last].horizon_ns or None) if last >= 0 else None

    def sure_ns(self, at_ns: int) -> int | None:
        """At least, by what was read next; None: nothing was reclaimed yet."""
        after = bisect_left(self.readings, at_ns, key=lambda reading: reading.asked_ns)
        if after == len(self.readings):
            return 0  # nobody looked since: perhaps all is gone
        reading = self.readings[after]
        if not reading.horizon_ns:
            return None
        return max(0, at_ns - (reading.answered_ns - reading.horizon_ns))
