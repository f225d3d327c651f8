# SPDX-License-Identifier: Apache-2.0
"""How often a figure was how large. Without I/O, so that cores can count in it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(slots=True)
class Histogram:
    """Counts of values by upper bound, in the bounds' unit.

    ``counts`` has one for each bound, of the values above the bound before and up to it, and a
    last one for those above all. ``sum`` is that of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
