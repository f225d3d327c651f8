# SPDX-License-Identifier: Apache-2.0
"""Waits for traces at a coordinator: ``python3 -m bench.watch ENDPOINT``.

Told by a line ``TRACE NODES`` on standard input, it answers with two: the time,
CLOCK_MONOTONIC ns, at which slices of so many nodes were durable, and then the
time and the kind of the verdict. The coordinator keeps no time at which a trace
became whole, so it is asked, as often as leaves it time to work.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

import backsight_pb2 as pb

from ctl.coordinator import CoordinatorClient, NotFound

# The resolution of what is measured.
POLL_INTERVAL_S = 0.001

_DEADLINE_S = 60.0


def wait(
    client: CoordinatorClient, trace: bytes, until: Callable[[pb.TraceDetail], bool]
) -> tuple[int, pb.TraceDetail]:
    """Ask until the trace is as wanted. Returns when, and how it is."""
    deadline_s = time.monotonic() + _DEADLINE_S
    detail: pb.TraceDetail | None = None
    while time.monotonic() < deadline_s:
        with contextlib.suppress(NotFound):
            detail = client.trace(trace)
            now_ns = time.monotonic_ns()
            if until(detail):
                return now_ns, detail
        time.sleep(POLL_INTERVAL_S)
    state = "is unknown" if detail is None else f"has {len(detail.slices)} slices"
    raise TimeoutError(f"after {_DEADLINE_S} s trace {trace.hex()} {state}")


def is_delivered(nodes: int) -> Callable[[pb.TraceDetail], bool]:
    """So many nodes' slices are there. All was written before the trigger: one is whole at once."""
    return lambda detail: nodes == sum(0 < part.bytes <= len(part.data) for part in detail.slices)


def is_judged(detail: pb.TraceDetail) -> bool:
    """The verdict is final."""
    return detail.summary.verdict.kind not in ("", "provisional")


def main() -> None:
    """Answer until standard input ends."""
    with CoordinatorClient(sys.argv[1]) as client:
        for line in sys.stdin:
            trace_id, nodes = line.split()
            trace = bytes.fromhex(trace_id)
            durable_ns, _ = wait(client, trace, is_delivered(int(nodes)))
            print(durable_ns, flush=True)
            verdict_ns, detail = wait(client, trace, is_judged)
            print(verdict_ns, detail.summary.verdict.kind, flush=True)


if __name__ == "__main__":
    main()
