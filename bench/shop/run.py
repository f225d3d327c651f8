# SPDX-License-Identifier: Apache-2.0
"""The rounds: who has the load when, and what is read meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bench import machine, report
from bench.costs import Costs
from bench.shop.parameters import Parameters
from bench.shop.reckon import (
    Ended,
    Idle,
    Reading,
    Turn,
    Window,
    delays_ms,
    figures,
    kept_orders,
    median_and_most,
    whole,
)
from bench.shop.sites import BacksightSite, CollectorSite, Site

# Each load has orders of its own, of which each kind of trouble strikes as many.
_ORDERS_A_LOAD = 100_000


@dataclass(frozen=True, slots=True)
class _Load:
    """A load: when it was there (Unix time), from which order on, and what there was at its end."""

    begin_ns: int
    end_ns: int
    first: int
    requests: int
    end: Reading

    def among(self, orders: set[int]) -> set[int]:
        """Of these orders those that it asked for."""
        return {one for one in orders if self.first <= one < self.first + _ORDERS_A_LOAD}


@dataclass(slots=True)
class Bench:
    """What measures both sites in turn."""

    parameters: Parameters
    collector: CollectorSite
    backsight: BacksightSite
    say: Callable[[str], None]
    _loads: int = field(default=0, init=False)

    @property
    def _sites(self) -> tuple[Site, Site]:
        return self.collector, self.backsight

    def measure(self) -> Iterator[report.Result]:
        """All results, as they come."""
        for site in self._sites:
            self._load(site)  # imports, caches, connections; not measured
        idle = self._idle_windows()
        windows, loads, spans_a_request = self._rounds()
        for name, more in self._idle_windows().items():
            idle[name] += more
        kept = {
            "collector": self._kept(loads["collector"], self._collected_ends()),
            "backsight": self._kept(loads["backsight"], self._stored_starts()),
        }
        for site in self._sites:
            turns = [
                Turn(window, self.parameters.load_s, load.requests, load.requests * spans_a_request,
                     count, load.end)
                for window, load, count in zip(
                    windows[site.name], loads[site.name], kept[site.name], strict=True)
            ]  # fmt: skip
            yield from self._figures(site, idle[site.name], turns)
        yield from self._latencies(loads["collector"])

    def _load(self, site: Site) -> _Load:
        first = self._loads * _ORDERS_A_LOAD + 1
        self._loads += 1
        begin_ns = time.time_ns()
        requests = site.load(self.parameters.load_s, first)
        end_ns = time.time_ns()
        self.say(f"  {site.name}: {requests} orders; load {machine.load():.1f}")
        return _Load(begin_ns, end_ns, first, requests, site.reading())

    def _idle_windows(self) -> dict[str, list[Window]]:
        """Without load, once what it left to do is done: timers are all that is waited for."""
        time.sleep(self.parameters.settle_s)
        windows: dict[str, list[Window]] = {site.name: [] for site in self._sites}
        for _ in range(self.parameters.idle_windows):
            before = {site.name: _Moment.of(site) for site in self._sites}
            time.sleep(self.parameters.idle_s)
            for site in self._sites:
                windows[site.name].append(before[site.name].until(_Moment.of(site)))
        return windows

    def _rounds(self) -> tuple[dict[str, list[Window]], dict[str, list[_Load]], float]:
        """By site; and spans a request."""
        loads: dict[str, list[_Load]] = {site.name: [] for site in self._sites}
        moments: dict[str, list[_Moment]] = {site.name: [] for site in self._sites}
        before = self.collector.spans()
        for number in range(self.parameters.rounds):
            self.say(f"round {number + 1} of {self.parameters.rounds}")
            for site in self._sites:
                moments[site.name].append(_Moment.of(site))
                loads[site.name].append(self._load(site))
        moments["collector"].append(_Moment.of(self.collector))
        # As long as the others of its windows.
        time.sleep(self.parameters.load_s)
        moments["backsight"].append(_Moment.of(self.backsight))
        spans = self.collector.spans() - before
        requests = sum(load.requests for load in loads["collector"])
        windows = {
            name: [one.until(next_one) for one, next_one in pairwise(all_)]
            for name, all_ in moments.items()
        }
        return windows, loads, spans / requests

    def _kept(self, loads: Sequence[_Load], moments_ns: Sequence[int]) -> list[int]:
        """How many traces of each load, by a moment of each trace."""
        return [sum(load.begin_ns <= one < load.end_ns for one in moments_ns) for load in loads]

    def _collected_ends(self) -> list[int]:
        return [one.end_ns for one in whole(self.collector.arrivals())]

    def _stored_starts(self) -> list[int]:
        return [trace["start_ns"] for trace in self.backsight.traces()]

    def _figures(
        self, site: Site, idle_windows: Sequence[Window], turns: Sequence[Turn]
    ) -> Iterator[report.Result]:
        params: Mapping[str, report.Param] = {"site": site.name}
        rates = [sum(one.cpu_ms.values()) / one.seconds for one in idle_windows]
        yield report.Result.of("idle_cpu_ms_per_s", "ms/s", rates, params)
        wire = [one.wire_bytes / one.seconds for one in idle_windows]
        yield report.Result.of("idle_bytes_per_s", "B/s", wire, params)
        idle = Idle.of(idle_windows)
        of_turns = [figures(turn, idle, site.central) for turn in turns]
        for name in of_turns[0]:
            yield report.Result.of(name, "", [one[name] for one in of_turns], params)
        for daemon in site.daemons():
            shares = [
                (turn.window.cpu_ms[daemon] - idle.cpu_ms[daemon] * turn.window.seconds)
                / (turn.spans / 1000)
                for turn in turns
            ]
            yield report.Result.of(
                "cpu_ms_per_1000_spans_of", "ms", shares, {**params, "daemon": daemon}
            )
            pss = [turn.end.pss_bytes[daemon] / 1e6 for turn in turns]
            yield report.Result.of("pss_mb_of", "MB", pss, {**params, "daemon": daemon})
        holders = [Costs.alone(pid).pss_bytes / 1e6 for pid in site.holders()]
        if holders:
            yield report.Result.of("holders_pss_mb", "MB", [sum(holders)], params)

    def _latencies(self, before: Sequence[_Load]) -> Iterator[report.Result]:
        """When traces are there: of the Collector in all rounds, of Backsight in some further ones."""
        self.backsight.export()
        loads: dict[str, list[_Load]] = {"collector": [*before], "backsight": []}
        with self.backsight.watch() as watch:
            for number in range(self.parameters.latency_rounds):
                self.say(f"when traces are there, {number + 1} of {self.parameters.latency_rounds}")
                # The Collector's first: the watch has begun by the time that it is over.
                for site in self._sites:
                    loads[site.name].append(self._load(site))
            time.sleep(self.parameters.settle_s)
            seen = [Ended(**json.loads(line)) for line in watch.log_path.read_text().splitlines()]
        ways = {
            ("collector", "exported"): [*whole(self.collector.arrivals())],
            ("backsight", "stored"): seen,
            ("backsight", "exported"): [*whole(self.backsight.arrivals())],
        }
        for (name, way), ended in ways.items():
            rounds = [delays_ms(ended, load.begin_ns, load.end_ns) for load in loads[name]]
            params: Mapping[str, report.Param] = {"site": name, "way": way}
            for metric, values in median_and_most([one for one in rounds if one]).items():
                yield report.Result.of(metric, "ms", values, params)
        for site in self._sites:
            yield from self._recall(site, loads[site.name][-self.parameters.latency_rounds :])

    def _recall(self, site: Site, loads: Sequence[_Load]) -> Iterator[report.Result]:
        """Of orders that went wrong those whose traces reached the backend, and how many others did."""
        orders = kept_orders(site.arrivals())
        wrong = site.wrong_orders()
        of_wrong = [
            len(load.among(wrong) & orders) / max(1, len(load.among(wrong))) for load in loads
        ]
        yield report.Result.of("kept_of_wrong", "", of_wrong, {"site": site.name})
        others = [len(load.among(orders) - wrong) for load in loads]
        yield report.Result.of("kept_others", "traces", others, {"site": site.name})


@dataclass(frozen=True, slots=True)
class _Moment:
    """A reading, and when it was taken."""

    at_s: float
    reading: Reading

    @classmethod
    def of(cls, site: Site) -> _Moment:
        return cls(time.monotonic(), site.reading())

    def until(self, later: _Moment) -> Window:
        return Window.between(self.reading, later.reading, later.at_s - self.at_s)
