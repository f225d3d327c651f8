# SPDX-License-Identifier: Apache-2.0
"""Looks at each honest trace whenever the coordinator judges it.

    python3 -m tests.hostile.collect COORDINATOR RUN

Reads lines: ``pid NODE PID`` names an honest process, ``ask LOW`` asks about a trace by
the lower half of its id. Prints an ``Outcome`` as a line of JSON for each verdict on an
honest trace, and for each question.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
from collections import defaultdict
from dataclasses import asdict

import backsight_pb2 as pb

from ctl.coordinator import AskError, CoordinatorClient, NotFound
from ctl.trace import summary_json
from tests.hostile.footage import compare
from tests.hostile.judge import Outcome
from tests.hostile.truth import Honest, honest


def look(coordinator: CoordinatorClient, trace: Honest, pids: dict[str, set[int]]) -> Outcome:
    """What the coordinator holds of a trace, and says of it, in one answer."""
    try:
        detail = coordinator.trace(trace.trace_id)
    except NotFound:
        return Outcome(trace.low, "none", 0, 0, 0)
    summary = summary_json(detail.summary)
    compared = compare(trace, {part.node: part.data for part in detail.slices}, pids)
    return Outcome(
        trace.low,
        summary["verdict"]["kind"],
        compared.wanted,
        compared.missing,
        compared.wrong,
        tuple(sorted({reason["kind"] for reason in summary["verdict"]["reasons"]})),
        tuple(sorted({trigger["name"] for trigger in summary["triggers"]})),
    )


def main() -> None:
    endpoint, run = sys.argv[1], int(sys.argv[2], 16)
    pids: dict[str, set[int]] = defaultdict(set)
    waiting: queue.SimpleQueue[Honest | None] = queue.SimpleQueue()

    def follow() -> None:
        with contextlib.suppress(AskError), CoordinatorClient(endpoint) as follower:
            for summary in follower.tail(pb.ListTracesRequest()):
                trace = honest(summary.trace, run)
                if trace is not None:
                    waiting.put(trace)

    def listen() -> None:
        for line in sys.stdin:
            match line.split():
                case ["pid", node, pid]:
                    pids[node].add(int(pid))
                case ["ask", low]:
                    waiting.put(honest(run.to_bytes(8, "big") + int(low).to_bytes(8, "big"), run))
        waiting.put(None)

    for target in (follow, listen):
        threading.Thread(target=target, daemon=True).start()
    with CoordinatorClient(endpoint) as coordinator:
        while (trace := waiting.get()) is not None:
            print(json.dumps(asdict(look(coordinator, trace, pids))), flush=True)


if __name__ == "__main__":
    main()
