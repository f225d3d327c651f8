# SPDX-License-Identifier: Apache-2.0
"""Recall over age: a table for people, figures for bench/plots.py."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import machine, trees
from bench.report import About, Param, Result, rounded
from tests.recall.judge import Fate, Judgement, Part, TraceFate
from tests.recall.late import Late

_BINS = 24
_Z = 1.96  # both sides of 95 %


@dataclass(frozen=True, slots=True)
class Recall:
    """One run: where, and what came out."""

    run: str
    late: Late
    filled_bytes: int
    lost_bytes: int
    judgement: Judgement

    @property
    def failures(self) -> tuple[str, ...]:
        return self.judgement.failures

    def results(self) -> Iterator[Result]:
        """Shares that are whole by age, with their 95 % intervals: of parts, and of traces."""
        parts = self.judgement.parts
        horizon = _seconds(part.horizon_ns for part in parts)
        params: dict[str, Param] = {
            "run": self.run,
            "pool_bytes": self.late.pool_bytes,
            "horizon_s": horizon,
            "load": rounded(machine.load()),
        }
        reached = [part for part in parts if part.fate is not Fate.UNREACHED]
        by_part = [(part.fate is Fate.WHOLE, (part,)) for part in reached]
        by_trace = [(trace.is_whole, trace.parts) for trace in self.judgement.traces]
        for of, items in (("parts", by_part), ("traces", by_trace)):
            for by, age in (("s", _age_s), ("horizon", _age_in_horizons)):
                points = [
                    (max(ages), whole)
                    for whole, its in items
                    if (ages := [a for part in its if (a := age(part)) is not None])
                ]
                for at, shares in _binned(points):
                    low, high = _interval(sum(shares), len(shares))
                    value = sum(shares) / len(shares)
                    about = {**params, "of": of, "age": rounded(at), "n": len(shares)}
                    yield Result(
                        f"recall_by_{by}",
                        rounded(value),
                        rounded(low),
                        rounded(high),
                        "share",
                        about,
                    )

    def write(self, folder: Path) -> None:
        """``recall.json``, and ``recall.jsonl`` for ``make bench-plots``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recall.json").write_text(
            json.dumps(
                {
                    "run": self.run,
                    "traces": len(self.judgement.traces),
                    "parts": self.judgement.fates(),
                    "failures": self.failures,
                },
                indent=2,
            )
            + "\n"
        )
        path = folder / "recall.jsonl"
        path.write_text("".join(f"{result.line()}\n" for result in self.results()))
        About(trees.this_tree().commit, "", machine.description()).write(path)

    def table(self) -> str:
        """The figures, one a line."""
        traces = self.judgement.traces
        young = [trace for trace in traces if trace.is_young]
        counted = ", ".join(f"{fate} {count}" for fate, count in self.judgement.fates().items())
        rows = [
            ("run", f"{self.run}, {self.late}"),
            (
                "written beside it",
                f"{self.filled_bytes:,} bytes, of which {self.lost_bytes:,} lost",
            ),
            ("traces triggered", f"{len(traces)}, whole {_whole(traces)}"),
            ("parts, one a node", counted),
            ("younger than the horizons", f"{len(young)} traces, whole {_whole(young)}"),
            ("check", "; ".join(self.failures[:5]) if self.failures else "agrees"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _whole(traces: Iterable[TraceFate]) -> int:
    return sum(trace.is_whole for trace in traces)


def _age_s(part: Part) -> float | None:
    return part.age_ns / 1e9


def _age_in_horizons(part: Part) -> float | None:
    return part.age_ns / part.horizon_ns if part.horizon_ns else None


def _seconds(horizons: Iterable[int | None]) -> float:
    known = [ns / 1e9 for ns in horizons if ns]
    return rounded(statistics.median(known)) if known else 0.0


def _binned(points: Sequence[tuple[float, bool]]) -> Iterator[tuple[float, list[bool]]]:
    """As many in each bin, by age; the mean age of each, and what of it is whole."""
    ordered = sorted(points)
    size = max(1, -(-len(ordered) // _BINS))
    for at in range(0, len(ordered), size):
        some = ordered[at : at + size]
        yield statistics.fmean(age for age, _ in some), [whole for _, whole in some]


def _interval(hits: int, n: int) -> tuple[float, float]:
    """Of a share, by Wilson: right for shares of 0 and 1 too."""
    share, z = hits / n, _Z
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return min(share, middle - half), max(share, middle + half)
