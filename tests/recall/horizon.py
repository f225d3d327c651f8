# SPDX-License-Identifier: Apache-2.0
"""How far back a node's pool reached at any time, by what its metrics said."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SEGMENT_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Reading:
    """A node's metrics, as of some time between two (Unix ns).

    ``sealed``: segments that were sealed so far, of which ``reclaimed`` are gone.
    """

    asked_ns: int
    answered_ns: int
    horizon_ns: int
    reclaimed: int
    sealed: int

    @classmethod
    def of(cls, asked_ns: int, answered_ns: int, dataplane: Mapping[str, Any]) -> Reading:
        """From what ``backsightctl --node SOCKET status --json`` prints."""
        reclaimed = dataplane["reclaims"]
        sealed = reclaimed + dataplane["sealed_bytes"] // _SEGMENT_BYTES
        return cls(asked_ns, answered_ns, dataplane["horizon_ns"], reclaimed, sealed)


@dataclass(slots=True)
class Horizon:
    """One node's readings, in order.

    The horizon that a node exports is the age of the oldest sealed segment's grant. But a
    segment lies in its process's stock before it is written: what is a little younger than
    that may be gone. The *sure* horizon follows from two counters: segments are reclaimed in
    the order in which they were sealed, so what was written since as many were sealed as
    are reclaimed now, is still there.
    """

    readings: list[Reading] = field(default_factory=list)

    def exported_ns(self, at_ns: int) -> int | None:
        """As last read; None before the first reclaim."""
        last = bisect_right(self.readings, at_ns, key=lambda reading: reading.answered_ns) - 1
        return (self.readings[last].horizon_ns or None) if last >= 0 else None

    def sure_ns(self, at_ns: int) -> int | None:
        """None: nothing was reclaimed yet."""
        after = bisect_left(self.readings, at_ns, key=lambda reading: reading.asked_ns)
        if after == len(self.readings):
            return 0  # nobody looked since: perhaps all is gone
        reclaimed = self.readings[after].reclaimed
        if not reclaimed:
            return None
        then = next(reading for reading in self.readings if reading.sealed >= reclaimed)
        return max(0, at_ns - then.answered_ns)
