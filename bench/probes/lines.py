# SPDX-License-Identifier: Apache-2.0
"""What is printed of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.http_pair import median_interval


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Of each pair."""
    return [a / b for a, b in zip(over, under, strict=True)]


def interval(samples: Sequence[float]) -> str:
    """Their median, where it lies with 95 %, and the least and the most."""
    median = median_interval(samples)
    return (
        f"{statistics.median(samples):.4f} ({median.low:.4f} to {median.high:.4f};"
        f" all {min(samples):.4f} to {max(samples):.4f})"
    )


def tell_kept(
    what: str, without: Sequence[float], with_it: Sequence[float], kept: Sequence[float], unit: str
) -> None:
    """A line about pairs: medians, and how much of the speed is kept."""
    print(
        f"  {what:<36} {statistics.median(without):8.0f} {statistics.median(with_it):8.0f} {unit}"
        f"   kept {interval(kept)}",
        flush=True,
    )


def tell_times(what: str, without: Sequence[float], with_it: Sequence[float]) -> None:
    """The same of times, in ns."""
    tell_kept(what, without, with_it, ratios(without, with_it), "ns")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The least, the median and the most."""
    return " / ".join(
        f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )


def tell_spread(what: str, values: Sequence[float], unit: str) -> None:
    """A line about something that was done some times."""
    print(f"  {what:<44} {spread(values)} {unit} (min / median / max)", flush=True)
