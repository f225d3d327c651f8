# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks give: results, one JSON object a line, and the table made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

Param = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Result:
    """One figure: the median of its repetitions, their extremes, and all that it depends on."""

    metric: str
    value: float
    min: float
    max: float
    unit: str
    params: Mapping[str, Param]

    @classmethod
    def of(
        cls, metric: str, unit: str, samples: Sequence[float], params: Mapping[str, Param]
    ) -> Result:
        """Sum up the repetitions of one measurement."""
        low, middle, high = min(samples), statistics.median(samples), max(samples)
        return cls(metric, rounded(middle), rounded(low), rounded(high), unit, params)

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class About:
    """What results were measured of, and on what. It lies beside them."""

    commit: str
    base: str  # the other commit of a comparison; empty: none
    machine: Mapping[str, str]

    @staticmethod
    def _path(results: Path) -> Path:
        return results.with_suffix(".about.json")

    @classmethod
    def read(cls, results: Path) -> Self:
        """What lies beside a file of results."""
        return cls(**json.loads(cls._path(results).read_text()))

    def write(self, results: Path) -> None:
        """Lay it beside a file of results."""
        self._path(results).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def caption(self) -> str:
        """One line."""
        machine = self.machine
        virtual = ", virtualised" if machine["virtualised"] == "yes" else ""
        return (
            f"commit {self.commit}; {machine['cores']} cores of {machine['cpu']}{virtual},"
            f" Linux {machine['kernel']}, {machine['date']}"
        )


def rounded(value: float) -> float:
    """Four significant digits: more is noise."""
    return float(f"{value:.4g}")


def read(path: Path) -> list[Result]:
    """Read back what was written, a Result.line() each."""
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def format_bytes(value: float) -> str:
    """In the largest binary unit that it has one of."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"


def format_param(value: Param, name: str = "") -> str:
    """As a table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int | float):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def table(results: Iterable[Result]) -> str:
    """All results as Markdown, a table a metric."""
    by_metric: dict[str, list[Result]] = {}
    for result in results:
        by_metric.setdefault(result.metric, []).append(result)
    parts = []
    for metric, rows in by_metric.items():
        names = list(dict.fromkeys(name for row in rows for name in row.params))
        lines = [
            f"### {metric}",
            "",
            "| " + " | ".join([*names, f"median, {rows[0].unit}", "min", "max"]) + " |",
            "|" + " ---: |" * (len(names) + 3),
        ]
        for row in rows:
            cells = [
                format_param(row.params[name], name) if name in row.params else "" for name in names
            ]
            cells += [f"**{row.value:g}**", f"{row.min:g}", f"{row.max:g}"]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
