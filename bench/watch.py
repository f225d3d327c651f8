# SPDX-License-Identifier: Apache-2.0
"""Waits for traces at a coordinator: ``python3 watch.py ENDPOINT``.

Told by a line ``TRACE NODES`` on standard input, it answers with two: the time,
CLOCK_MONOTONIC ns, at which slices of so many nodes were durable, and then the
time and the kind of the verdict. The coordinator keeps no time at which a trace
became whole, so it is asked, as often as leaves it time to work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import backsight_pb2 as pb
import grpc
from backsight_pb2_grpc import CoordinatorStub

# The resolution of what is measured.
POLL_INTERVAL_S = 0.001

_DEADLINE_S = 60.0


def fetch(coordinator: CoordinatorStub, trace: bytes) -> pb.TraceDetail | None:
    """A trace with all its bytes, put together from the pieces in which it comes; None: unknown."""
    question = pb.GetTraceRequest(trace=trace)
    detail: pb.TraceDetail
    try:
        detail, *pieces = coordinator.GetTrace(question, timeout=_DEADLINE_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return None
        raise
    data: dict[str, list[bytes]] = {}
    for piece in pieces:
        for part in piece.slices:
            data.setdefault(part.node, []).append(part.data)
    for part in detail.slices:
        part.data = b"".join(data.get(part.node, ()))
    return detail


def wait(
    coordinator: CoordinatorStub, trace: bytes, until: Callable[[pb.TraceDetail], bool]
) -> tuple[int, pb.TraceDetail]:
    """Ask until the trace is as wanted. Returns when, and how it is."""
    deadline_s = time.monotonic() + _DEADLINE_S
    detail: pb.TraceDetail | None = None
    while time.monotonic() < deadline_s:
        detail = fetch(coordinator, trace)
        now_ns = time.monotonic_ns()
        if detail is not None and until(detail):
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
    with grpc.insecure_channel(sys.argv[1]) as channel:
        coordinator = CoordinatorStub(channel)
        for line in sys.stdin:
            trace_id, nodes = line.split()
            trace = bytes.fromhex(trace_id)
            durable_ns, _ = wait(coordinator, trace, is_delivered(int(nodes)))
            print(durable_ns, flush=True)
            verdict_ns, detail = wait(coordinator, trace, is_judged)
            print(verdict_ns, detail.summary.verdict.kind, flush=True)


if __name__ == "__main__":
    main()
