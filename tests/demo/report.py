# SPDX-License-Identifier: Apache-2.0
"""What the demo showed: a table for people, ``result.json`` for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tests.demo.check import SLOW_MS
from tests.replay import report as replay
from tests.replay.report import counts, share, verdict_counts

# What leaves a node, of what is written on it, with all triggers on.
BYTES_LEFT_SHARE_MAX = 0.08


@dataclass(frozen=True, slots=True)
class Result(replay.Result):
    """The figures of a replay, and those of each kind of trouble by its letter.

    ``spans``: requests and calls by the access logs, a lower bound. ``bytes_generated``: payload that
    the services wrote, as their nodes count it. ``others``: collected without trouble of these
    kinds: what was rare, or slow for another reason. ``shown``: an example of each kind.
    """

    kinds: dict[str, dict[str, Any]] = field(default_factory=dict)
    others: int = 0
    shown: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checked: dict[str, Any],
        listing: Sequence[dict[str, Any]],
        *,
        duration_s: int,
        nodes: int,
        bytes_generated: int,
        bytes_left: int,
    ) -> Self:
        """From what the check said, and ``backsightctl traces``."""
        verdicts, reasons = verdict_counts(listing)
        failures = list(checked["failures"])
        if bytes_left > BYTES_LEFT_SHARE_MAX * bytes_generated:
            failures.append(
                f"bytes: {bytes_left} left of {bytes_generated}, want {BYTES_LEFT_SHARE_MAX:.0%} at most"
            )
        return cls(
            file=f"live shop, {duration_s} s",
            nodes=nodes,
            speed=1.0,
            requests=checked["requests"],
            spans=checked["spans"],
            bytes_generated=bytes_generated,
            bytes_left=bytes_left,
            triggers=dict(
                Counter(
                    trigger["name"] for trace in listing for trigger in trace["triggers"]
                ).most_common()
            ),
            collected=checked["collected"],
            verdicts=verdicts,
            reasons=reasons,
            selected=checked["selected"],
            selected_share=checked["selected_share"],
            recall=checked["recall"],
            coherent_by_checker=checked["coherent_by_checker"],
            false_coherent=checked["false_coherent"],
            checker_ok=not failures,
            checker_failures=failures,
            kinds=checked["kinds"],
            others=checked["others"],
            shown=checked["shown"],
        )


def table(result: Result) -> str:
    """The figures, one a line, and a line for each kind of trouble."""
    left = share(result.bytes_left / max(result.bytes_generated, 1))
    rows = [
        ("load", f"{result.file}, {result.requests:,} orders on {result.nodes} nodes"),
        ("spans", f"{result.spans:,} at least, by the access logs"),
        ("bytes written to the pools", f"{result.bytes_generated:,}"),
        ("bytes that left the nodes", f"{result.bytes_left:,} ({left} of those written)"),
        ("triggers fired", counts(result.triggers)),
        (
            "traces collected",
            f"{result.collected:,}, of which {result.others} rare, or slow for another reason",
        ),
        ("verdicts", counts(result.verdicts)),
        ("reasons", counts(result.reasons)),
        ("coherent by the check", share(result.coherent_by_checker)),
        ("falsely called coherent", f"{result.false_coherent}"),
        ("recall", share(result.recall)),
        (
            "check",
            "agrees" if result.checker_ok else "DISAGREES: " + "; ".join(result.checker_failures),
        ),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    what_width = max(len(kind["what"]) for kind in result.kinds.values())
    lines += [
        "",
        f"     {'trouble, by the access logs':<{what_width}}  happened  captured  all nodes  fired on",
    ]
    for letter, kind in result.kinds.items():
        lines.append(
            f"  {letter}  {kind['what']:<{what_width}}  {kind['happened']:>8}  {kind['captured']:>8}"
            f"  {kind['of_all_nodes']:>9}  {counts(kind['firing_nodes'])}"
        )
    lines.append(f"     b counts orders that took {SLOW_MS:.0f} ms and more")
    return "\n".join(lines)
