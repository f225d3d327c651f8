# SPDX-License-Identifier: Apache-2.0
"""Two commits that were measured in turn: which figures are of the same thing, and their ratio."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.report import Param, Result, format_param, rounded

# What is found out beside a figure, and not what it depends on. Over rounds, counts are added up,
# and of the rest the mean is taken.
_COUNTS = frozenset(
    (
        "begins", "bursts", "coherent", "fired", "lost", "null_begins", "pairs", "passes", "polls", "runs",
        "times", "traces", "triggers", "undurable", "unindexed",
    )
)  # fmt: skip
_OBSERVED = _COUNTS | frozenset(
    (
        "adopt_ms", "at_full_speed", "collected", "confidence", "core_share", "elapsed_ms", "elapsed_ns",
        "first_poll_ms", "fleet_share", "found_after_most_ms", "found_after_ms", "high", "idle_share",
        "late_max_ms", "load", "lost_share", "low", "node_ns", "others_share", "p99", "plain_per_s",
        "poll_p90_ms", "recorded_share", "seconds", "stolen_share", "traced_per_s", "traces_held",
        "traces_per_s", "window_s",
    )
)  # fmt: skip

# Shown beside the figure of the later commit, by metric.
_SHOWN = {"lookup_ms": "elapsed_ms", "payload_share": "at_full_speed"}

Rounds = Sequence[Sequence[Result]]


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both commits; ratio: after by before, the median of the rounds."""

    before: Result | None  # None: that commit cannot do it
    after: Result
    ratio: float | None  # None: before was 0, or nothing


def _is_condition(metric: str, name: str) -> bool:
    # There it is how many were looked for at once; elsewhere, how many were made.
    return name not in _OBSERVED or (metric, name) == ("lookup_ms", "traces")


def key(result: Result) -> tuple[object, ...]:
    """Equal for two figures of the same thing."""
    conditions = ((k, v) for k, v in result.params.items() if _is_condition(result.metric, k))
    return (result.metric, *sorted(conditions))


def merged(rounds: Rounds) -> list[Result]:
    """One figure for all rounds: the median of their medians, and the extremes of all."""
    by_key: dict[tuple[object, ...], list[Result]] = {}
    for result in (result for one in rounds for result in one):
        by_key.setdefault(key(result), []).append(result)
    return [
        replace(
            same[0],
            value=rounded(statistics.median(one.value for one in same)),
            min=min(one.min for one in same),
            max=max(one.max for one in same),
            params={name: _over_rounds(name, same) for name in same[0].params},
        )
        for same in by_key.values()
    ]


def _over_rounds(name: str, same: Sequence[Result]) -> Param:
    values = [one.params[name] for one in same]
    if not _is_condition(same[0].metric, name):
        if isinstance(values[0], str):
            return values[0] if len(set(values)) == 1 else " ".join(map(str, values))
        numbers = [float(value) for value in values]
        return int(sum(numbers)) if name in _COUNTS else rounded(statistics.mean(numbers))
    return values[0]


def compared(before: Rounds, after: Rounds) -> list[Compared]:
    """All that the later one has. Within each round, since the machine differs from one to the next."""
    ratios: dict[tuple[object, ...], list[float]] = {}
    for earlier, later in zip(before, after, strict=True):
        values = {key(result): result.value for result in earlier}
        for result in later:
            if values.get(key(result)):
                ratios.setdefault(key(result), []).append(result.value / values[key(result)])
    earlier_by_key = {key(result): result for result in merged(before)}
    return [
        Compared(
            earlier_by_key.get(key(result)),
            result,
            rounded(statistics.median(ratios[key(result)])) if key(result) in ratios else None,
        )
        for result in merged(after)
    ]


def table(figures: Iterable[Compared], before: str, after: str) -> str:
    """All figures as Markdown, a table a metric: both, their ratio, and what either lost."""
    by_metric: dict[str, list[Compared]] = {}
    for figure in figures:
        by_metric.setdefault(figure.after.metric, []).append(figure)
    parts = [_section(metric, rows, before, after) for metric, rows in by_metric.items()]
    return "\n\n".join(parts) + "\n"


def _section(metric: str, rows: Sequence[Compared], before: str, after: str) -> str:
    unit = rows[0].after.unit
    names = _columns(metric, rows)
    heads = [*names, f"{before}, {unit}", f"{after}, {unit}", "ratio"]
    shown = _SHOWN.get(metric)
    if shown:
        heads.append(f"{shown} {after}")
    has_losses = any(_lost(figure.before) or _lost(figure.after) for figure in rows)
    if has_losses:
        heads += ["lost before", "lost now"]
    lines = [f"### {metric}", "", f"| {' | '.join(heads)} |", "|" + " ---: |" * len(heads)]
    for figure in rows:
        params = figure.after.params
        cells = [format_param(params[name], name) if name in params else "" for name in names]
        cells += [_spread(figure.before), _spread(figure.after)]
        cells.append("" if figure.ratio is None else f"**{figure.ratio:g}**")
        if shown:
            cells.append(format_param(params[shown]) if shown in params else "")
        if has_losses:
            cells += [_lost(figure.before), _lost(figure.after)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _columns(metric: str, rows: Sequence[Compared]) -> list[str]:
    """On what the rows depend; where there are several, what they differ in."""
    params = [figure.after.params for figure in rows]
    names = dict.fromkeys(name for one in params for name in one if _is_condition(metric, name))
    if len(rows) == 1:
        return list(names)
    return [name for name in names if len({one.get(name) for one in params}) > 1]


def _spread(result: Result | None) -> str:
    return "" if result is None else f"{result.value:g} ({result.min:g} to {result.max:g})"


def _lost(result: Result | None) -> str:
    if result is None:
        return ""
    for name in ("lost_share", "lost", "null_begins"):
        if name in result.params:
            return format_param(result.params[name])
    return ""
