# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks give: results, one JSON object a line, and the table made of them."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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


def rounded(value: float) -> float:
    """Four significant digits: more is noise."""
    return float(f"{value:.4g}")


def read(path: Path) -> list[Result]:
    """Read back what was written, a Result.line() each."""
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def format_param(value: Param) -> str:
    """As a table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
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
            cells = [format_param(row.params[name]) if name in row.params else "" for name in names]
            cells += [f"**{row.value:g}**", f"{row.min:g}", f"{row.max:g}"]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _first_match(path: str, pattern: str) -> str:
    match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    return match[1].strip() if match else "unknown"


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    flags = set(_first_match("/proc/cpuinfo", r"^flags\s*:(.*)$").split())
    invariant = {"constant_tsc", "nonstop_tsc"} <= flags
    clocksource = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True)
    return {
        "cpu": _first_match("/proc/cpuinfo", r"^model name\s*:(.*)$"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _first_match("/proc/meminfo", r"^MemTotal:(.*)$"),
        "virtualised": "yes" if "hypervisor" in flags else "no",
        "kernel": platform.release(),
        "compiler": compiler.stdout.splitlines()[0],
        "tsc": f"{'' if invariant else 'not '}invariant, clock source {clocksource.read_text().strip()}",
        "python": platform.python_version(),
    }


@contextlib.contextmanager
def stolen_told() -> Iterator[None]:
    """Tell how much of the cores' time others of this machine's host had meanwhile.

    What is measured beside much of it is an upper bound, whatever the load here.
    """
    before = _core_times()
    yield
    spent = [after - since for after, since in zip(_core_times(), before, strict=True)]
    # user nice system idle iowait irq softirq steal (proc(5)); those of guests are in the first two.
    share = spent[7] / max(sum(spent[:8]), 1)
    print(f"  stolen: {share:.1%} of the cores' time, by others of this machine's host", flush=True)


def _core_times() -> list[int]:
    """Of all cores together, in ticks."""
    return [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


def load() -> float:
    """How many processes ran or wanted to, on average over the last minute."""
    return os.getloadavg()[0]
