# SPDX-License-Identifier: Apache-2.0
"""What a replay showed: a table for people, ``result.json`` for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one replay. Shares are between 0 and 1.

    ``bytes_generated``: payload written to the pools. ``bytes_left``: TCP
    payload that the nodes sent to the coordinator, control included
    (testbed/traffic.py). ``verdicts`` and ``reasons`` count traces by the
    coordinator's word; everything from ``selected_share`` on is the independent
    checker's (tests/checker), which computes it from the recording.
    """

    file: str
    nodes: int
    speed: float
    requests: int
    spans: int
    bytes_generated: int
    bytes_left: int
    triggers: dict[str, int]
    collected: int
    verdicts: dict[str, int]
    reasons: dict[str, int]
    selected: int
    selected_share: float
    recall: float
    coherent_by_checker: float | None
    false_coherent: int
    checker_ok: bool
    checker_failures: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def verdict_counts(listing: Iterable[dict[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """Traces by verdict kind, and by the kinds of reasons given (a trace counts once a kind)."""
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for trace in listing:
        kinds[trace["verdict"]["kind"]] += 1
        reasons.update({reason["kind"] for reason in trace["verdict"]["reasons"]})
    return dict(kinds.most_common()), dict(reasons.most_common())


def counts(counted: dict[str, int]) -> str:
    """Names with their numbers."""
    return ", ".join(f"{name} {count}" for name, count in counted.items()) or "none"


def share(value: float | None) -> str:
    """As a percentage; None is nothing to take a share of."""
    return "-" if value is None else f"{100 * value:.1f} %"


def table(result: Result) -> str:
    """The figures, one a line."""
    left = result.bytes_left / result.bytes_generated if result.bytes_generated else None
    rows = [
        ("recording", f"{result.file}, {result.nodes} nodes, speed {result.speed:g}"),
        ("requests", f"{result.requests:,}"),
        ("spans", f"{result.spans:,}"),
        ("bytes written to the pools", f"{result.bytes_generated:,}"),
        ("bytes that left the nodes", f"{result.bytes_left:,} ({share(left)} of those written)"),
        ("triggers fired", counts(result.triggers)),
        (
            "selected by the rule",
            f"{result.selected:,} traces ({share(result.selected_share)}), by the checker",
        ),
        ("traces collected", f"{result.collected:,}"),
        ("recall", share(result.recall)),
        ("verdicts", counts(result.verdicts)),
        ("reasons", counts(result.reasons)),
        ("coherent by the checker", share(result.coherent_by_checker)),
        ("falsely called coherent", f"{result.false_coherent}"),
        (
            "checker",
            "agrees" if result.checker_ok else "DISAGREES: " + "; ".join(result.checker_failures),
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
