# SPDX-License-Identifier: Apache-2.0
"""Who must give way when the report store runs full.

Weighted max-min fairness: a queue that wants less than its weighted share of
the store gets all that it wants, and what it leaves is shared by the others in
the same way. The queue that holds most beyond its share gives up groups, so a
faulty trigger that fires for everything cannot push out a rare one.
"""

from __future__ import annotations

from collections.abc import Mapping


def fair_shares(
    demands: Mapping[str, int], weights: Mapping[str, float], capacity: float
) -> dict[str, float]:
    """The weighted max-min fair share of each demand, in its own unit."""
    shares: dict[str, float] = {}
    left = capacity
    weight_left = sum(weights[name] for name in demands)
    for name in sorted(demands, key=lambda name: (demands[name] / weights[name], name)):
        share = min(float(demands[name]), left * weights[name] / weight_left)
        shares[name] = share
        left -= share
        weight_left -= weights[name]
    return shares


def by_excess(
    demands: Mapping[str, int], weights: Mapping[str, float], capacity: float
) -> list[str]:
    """The names above their fair share, those furthest above it first."""
    shares = fair_shares(demands, weights, capacity)
    excess = {name: demands[name] - shares[name] for name in demands}
    # A byte too many may be spread over all of them; what is less is the noise of dividing.
    over = [name for name in excess if excess[name] > 0.5 / len(excess)]
    return sorted(over, key=lambda name: (-excess[name], name))
