# SPDX-License-Identifier: Apache-2.0
"""``make bench-decode``: what it takes to read a trace of 3 nodes and 15 spans.

CPU time of one process a trace: the evidence for a verdict, and the judgement; the rows of the
index; OTLP. And what the evidence of an open trace takes of memory.

BASE (COMMIT): that commit and this tree in turn. ROUNDS (5): how often each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.decode_trace import slices
from bench.machine import description, load, stolen_told
from bench.trees import Tree, base_tree, this_tree
from testbed.topology import PYTHON

_CHILD = Path(__file__).with_name("decode_child.py")
_ROUNDS = 5
_UNITS = {
    "evidence": "us",
    "judge": "us",
    "index": "us",
    "otlp": "us",
    "memory": "bytes",
}


def _measure(tree: Tree, traces: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Of a process of that tree, by metric."""
    with tree.daemons():
        done = subprocess.run(
            [PYTHON, _CHILD],
            input=json.dumps(traces),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> int:
    """Measure, and tell; the exit status."""
    base, rounds = os.environ.get("BASE", ""), int(os.environ.get("ROUNDS", _ROUNDS))
    trees = [*([base_tree(base)] if base else []), this_tree()]
    traces = [
        {node: data.hex() for node, data in slices(number).items()} for number in range(1, 201)
    ]
    size = sum(len(data) // 2 for data in traces[0].values())
    print(json.dumps(description()))
    print(f"a trace of 3 nodes, 15 spans, {size} bytes; load {load():.1f}")
    figures: dict[str, dict[str, list[float]]] = {}
    with stolen_told():
        for _ in range(rounds):
            for tree in trees:
                for metric, value in _measure(tree, traces).items():
                    of_metric = figures.setdefault(metric, {})
                    of_metric.setdefault(tree.commit, []).append(value)
    for metric, by_commit in figures.items():
        for commit, values in by_commit.items():
            spread = f"{min(values):.1f} / {statistics.median(values):.1f} / {max(values):.1f}"
            print(
                f"{metric:<10} {commit:<24} {spread} {_UNITS[metric]} a trace (min / median / max)"
            )
        if len(by_commit) == 2:
            before, after = (statistics.median(values) for values in by_commit.values())
            print(f"{metric:<10} {before / after:.1f} times less")
    return 0


if __name__ == "__main__":
    sys.exit(main())
