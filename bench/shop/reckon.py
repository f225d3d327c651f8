# SPDX-License-Identifier: Apache-2.0
"""From what was read to the figures of the table. Nothing here reads anything itself."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from bench.costs import Costs
from bench.shop.backend import Arrival

_MB = 1_000_000

_PATH = re.compile(r"/orders/(\d+)")


@dataclass(frozen=True, slots=True)
class Reading:
    """What daemons used since their start, by name, and have now.

    ``cpu_ms``: CPU time. ``wire_bytes``: payload of TCP between hosts. ``pss_bytes`` with shared
    memory, ``shared_bytes`` that alone.
    """

    cpu_ms: Mapping[str, float]
    wire_bytes: float
    pss_bytes: Mapping[str, int]
    shared_bytes: Mapping[str, int]

    @classmethod
    def of(cls, costs: Mapping[str, Costs], wire_bytes: int) -> Self:
        """From what each costs."""
        return cls(
            {name: one.cpu_ns / 1e6 for name, one in costs.items()},
            wire_bytes,
            {name: one.pss_bytes for name, one in costs.items()},
            {name: one.shared_bytes for name, one in costs.items()},
        )


@dataclass(frozen=True, slots=True)
class Window:
    """What was used between two readings, in so many seconds."""

    seconds: float
    cpu_ms: Mapping[str, float]
    wire_bytes: float

    @classmethod
    def between(cls, before: Reading, after: Reading, seconds: float) -> Self:
        """ValueError if a daemon is not in both, as one that was started anew has another name."""
        if before.cpu_ms.keys() != after.cpu_ms.keys():
            raise ValueError(f"{set(before.cpu_ms) ^ set(after.cpu_ms)} are in one reading only")
        return cls(
            seconds,
            {name: after.cpu_ms[name] - used for name, used in before.cpu_ms.items()},
            after.wire_bytes - before.wire_bytes,
        )


@dataclass(frozen=True, slots=True)
class Idle:
    """What daemons use without load, in ms and bytes a second: the median of some windows."""

    cpu_ms: Mapping[str, float]
    wire_bytes: float

    @classmethod
    def of(cls, windows: Sequence[Window]) -> Self:
        """ValueError if there are none."""
        if not windows:
            raise ValueError("no window without load")
        return cls(
            {
                name: statistics.median(one.cpu_ms[name] / one.seconds for one in windows)
                for name in windows[0].cpu_ms
            },
            statistics.median(one.wire_bytes / one.seconds for one in windows),
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """A load on one site, and what its daemons did from its start to the next one's.

    ``kept``: traces of this load that were kept. ``end``: what daemons have when the load ends.
    """

    window: Window
    load_s: float
    requests: int
    spans: float
    kept: int
    end: Reading


def figures(turn: Turn, idle: Idle, central: str) -> dict[str, float]:
    """Of one turn, by the name of the metric; ``central``: who all others report to.

    CPU time is net of what is used without load in as long a time. Of bytes what idle daemons send
    while there is load counts, since it goes over the network for these requests or not.
    """
    window = turn.window
    net_ms = {
        name: used - idle.cpu_ms[name] * window.seconds for name, used in window.cpu_ms.items()
    }
    wire_bytes = window.wire_bytes - idle.wire_bytes * (window.seconds - turn.load_s)
    kspans = turn.spans / 1000
    pss = sum(turn.end.pss_bytes.values())
    return {
        "cpu_ms_per_1000_spans": sum(net_ms.values()) / kspans,
        "gross_cpu_ms_per_1000_spans": sum(window.cpu_ms.values()) / kspans,
        "central_cpu_ms_per_1000_spans": net_ms[central] / kspans,
        "pss_mb": pss / _MB,
        "pss_without_shared_mb": (pss - sum(turn.end.shared_bytes.values())) / _MB,
        "central_pss_mb": turn.end.pss_bytes[central] / _MB,
        "bytes_per_request": wire_bytes / turn.requests,
        "gross_bytes_per_request": window.wire_bytes / turn.requests,
        "central_cpu_ms_per_kept": net_ms[central] / max(turn.kept, 1),
        "kept": turn.kept,
        "requests": turn.requests,
        "spans_per_request": turn.spans / turn.requests,
    }


@dataclass(frozen=True, slots=True)
class Ended:
    """A trace that is there: ``end_ns`` of its request, ``there_ns`` when all of it was."""

    trace: str
    end_ns: int
    there_ns: int


def whole(arrivals: Iterable[Arrival]) -> Iterator[Ended]:
    """Each trace of which the request's own span came, once the last of its parts had come."""
    parts: dict[str, list[Arrival]] = {}
    for arrival in arrivals:
        parts.setdefault(arrival.trace, []).append(arrival)
    for trace, some in parts.items():
        end_ns = max(one.end_ns for one in some)
        if end_ns:
            yield Ended(trace, end_ns, max(one.arrived_ns for one in some))


def kept_orders(arrivals: Iterable[Arrival]) -> set[int]:
    """The numbers of orders by the paths that were asked for."""
    return {int(found[1]) for one in arrivals if (found := _PATH.match(one.path))}


def delays_ms(ended: Iterable[Ended], begin_ns: int, end_ns: int) -> list[float]:
    """From a request's end until its trace is there, of requests that ended within; sorted."""
    return sorted(
        (one.there_ns - one.end_ns) / 1e6 for one in ended if begin_ns <= one.end_ns < end_ns
    )


def median_and_most(rounds: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Of sorted delays of some rounds, none of them empty, by the name of the metric."""
    if not rounds:
        return {}
    return {
        "available_p50_ms": [statistics.median(one) for one in rounds],
        "available_max_ms": [one[-1] for one in rounds],
    }
