# SPDX-License-Identifier: Apache-2.0
"""What ``bench.decode`` measures, in a process of the tree that is measured.

It reads traces from standard input, and writes microseconds of CPU time a trace, and bytes of memory,
as JSON. It is run by its path, with the packages of either tree.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import backsight_pb2 as pb

from coordinator.core.evidence import Evidence
from coordinator.core.nodes import Nodes
from coordinator.core.trace import Part, PartState, Trace
from coordinator.core.verdict import judge
from formats.stamped import StampedTrace, stamped
from protocol.hashing import node_id
from protocol.messages import TraceId
from protocol.versions import OURS

try:
    from coordinator.index.making import index_of
except ImportError:  # a tree of before
    from coordinator.index import index_of  # type: ignore[attr-defined, no-redef]

Slices = dict[str, bytes]

# Each is repeated until it took so long: what a process does first is slower.
_AT_LEAST_NS = 1_000_000_000
_ITEMS = 1 << 18
_HELD = 4000


def _us(traces: Sequence[Slices], read: Callable[[Slices], object]) -> float:
    for one in traces:
        read(one)
    begun_ns, count = time.process_time_ns(), 0
    while time.process_time_ns() - begun_ns < _AT_LEAST_NS:
        for one in traces:
            read(one)
        count += len(traces)
    return (time.process_time_ns() - begun_ns) / count / 1000


def _evidence(trace: Slices) -> Evidence:
    evidence = Evidence(_ITEMS)
    for node, data in trace.items():
        evidence.add(node_id(node), data)
    return evidence


def _detail(trace: Slices) -> pb.TraceDetail:
    return pb.TraceDetail(
        summary=pb.TraceSummary(
            trace=bytes(range(16)),
            triggers=[
                pb.Trigger(name="latency", why="99 ms", node="web", primary=bytes(range(16)))
            ],
            verdict=pb.Verdict(kind="coherent", version=1),
            nodes=list(trace),
        ),
        slices=[
            pb.NodeSlice(node=node, bytes=len(data), data=data, clock_error_ns=1)
            for node, data in trace.items()
        ],
    )


def _otlp(trace: StampedTrace) -> bytes:
    # Of a tree before it was written in C.
    if not hasattr(trace, "otlp_bytes"):
        return trace.otlp().SerializeToString()
    return trace.otlp_bytes()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    """Measure, and write it."""
    traces = [
        {node: bytes.fromhex(data) for node, data in trace.items()}
        for trace in json.load(sys.stdin)
    ]
    details = {id(trace): _detail(trace) for trace in traces}
    nodes = Nodes(1 << 10, OURS)

    def judged(slices: Slices) -> object:
        trace = Trace(TraceId(bytes(16)), _evidence(slices), 0, 0)
        for name in slices:
            node = node_id(name)
            trace.parts[node] = Part(node, PartState.ANSWERED, "the trigger", None)
        verdict = judge(trace, nodes, final=True)
        if verdict.span_count != 15:
            raise AssertionError(f"{verdict.span_count} spans, of 15")
        return verdict

    evidence = _us(traces, _evidence)
    figures = {
        "evidence": evidence,
        "judge": _us(traces, judged) - evidence,
        "index": _us(
            traces, lambda trace: index_of(stamped(details[id(trace)], one_clock=True), 1)
        ),
        "otlp": _us(
            traces,
            lambda trace: _otlp(stamped(details[id(trace)], one_clock=False)),
        ),
    }
    gc.collect()
    before = _resident_bytes()
    held = [_evidence(traces[number % len(traces)]) for number in range(_HELD)]
    figures["memory"] = (_resident_bytes() - before) / len(held)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
