# SPDX-License-Identifier: Apache-2.0
"""The results as the table of docs/benchmarks.md: a row a metric, a column a site."""

from __future__ import annotations

from collections.abc import Iterable

from bench.report import Result

SITES = ("collector", "backsight")

_TITLES = {
    "cpu_ms_per_1000_spans": "CPU of all daemons, ms per 1,000 spans, net of idle",
    "gross_cpu_ms_per_1000_spans": "the same with what they take idle",
    "central_cpu_ms_per_1000_spans": "of it the gateway's, the coordinator's",
    "idle_cpu_ms_per_s": "CPU of all daemons without load, ms a second",
    "pss_mb": "Pss of all daemons, MB",
    "pss_without_shared_mb": "the same without shared memory (pools)",
    "central_pss_mb": "of it the gateway's, the coordinator's, MB",
    "holders_pss_mb": "Pss of holders, which are systemd's part elsewhere, MB",
    "bytes_per_request": "bytes out of band a request",
    "gross_bytes_per_request": "the same with those of the time after the load",
    "idle_bytes_per_s": "bytes out of band without load, a second",
    "central_cpu_ms_per_kept": "gateway, coordinator: CPU ms a kept trace",
    "available_p50_ms exported": "request's end to trace exported, median, ms",
    "available_max_ms exported": "longest, ms",
    "available_p50_ms stored": "request's end to trace stored and judged, median, ms",
    "available_max_ms stored": "longest, ms",
    "requests": "requests a turn",
    "spans_per_request": "spans a request",
    "kept": "traces that were kept, a turn",
    "kept_of_wrong": "of requests that went wrong, the share that was kept",
    "kept_others": "traces of other requests that were kept, a turn",
}


def table(results: Iterable[Result]) -> str:
    """As Markdown: median (least to most)."""
    cells: dict[str, dict[str, str]] = {}
    for result in results:
        if "daemon" in result.params:
            continue
        name = f"{result.metric} {result.params.get('way', '')}".strip()
        spread = "" if result.min == result.max else f" ({result.min:g} to {result.max:g})"
        cells.setdefault(name, {})[str(result.params["site"])] = f"{result.value:g}{spread}"
    lines = ["| | " + " | ".join(SITES) + " |", "| --- |" + " ---: |" * len(SITES)]
    for name, title in _TITLES.items():
        if name in cells:
            row = [cells[name].get(site, "") for site in SITES]
            lines.append(f"| {title} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"
