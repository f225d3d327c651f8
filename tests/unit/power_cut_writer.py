# SPDX-License-Identifier: Apache-2.0
"""Writes traces into a store for ever, and tells up to which record it is durable.

/usr/bin/python3 -m tests.unit.power_cut_writer STORE
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from coordinator.core.records import (
    AppendSlice,
    PutReleased,
    PutStatus,
    PutTrigger,
    PutVerdict,
    Record,
    Write,
)
from coordinator.core.verdict import Verdict
from coordinator.store.keeping import Keep
from coordinator.store.retention import StoreLimits
from coordinator.store.writer import Store
from protocol.messages import Group, SliceFlags, SliceStatus, TraceId, TriggerFired
from protocol.verdicts import VerdictKind
from tests.unit.logs import SILENT

RECORDS = 5
"""Of each trace."""

AT_ONCE = 40


def trace_of(number: int) -> TraceId:
    return TraceId((1 + number).to_bytes(16, "big"))


def slice_of(number: int) -> bytes:
    """Bytes that nothing makes shorter."""
    rng = random.Random(number)
    return rng.randbytes(rng.choice((200, 2000, 6000)))


def records_of(number: int) -> list[Record]:
    """What is written of one trace, in order."""
    trace, data = trace_of(number), slice_of(number)
    status = SliceStatus(trace, True, SliceFlags.HELD, len(data), epoch=1)
    verdict = Verdict(1, VerdictKind.COHERENT, (), ("n",), len(data), 0, None, None)
    return [
        PutTrigger("n", TriggerFired(Group("t", trace), (), "why")),
        PutStatus("n", status, None),
        AppendSlice(trace, "n", 1, 0, data),
        PutVerdict(trace, verdict),
        PutReleased(trace),
    ]


def writes() -> Iterator[Write]:
    token = number = 0
    while True:
        for record in records_of(number):
            token += 1
            yield Write(token, record)
        number += 1


def main() -> int:
    source = writes()
    limits = StoreLimits(1 << 40, Keep(1e9))

    def tell(token: int) -> None:
        os.write(1, b"%d\n" % token)
        store.submit([next(source) for _ in range(AT_ONCE)])

    store = Store(Path(sys.argv[1]), limits, tell, SILENT)
    with store:
        store.submit([next(source) for _ in range(AT_ONCE)])
        sys.stdin.read()  # until whoever reads what is told has heard enough
    return 0


if __name__ == "__main__":
    sys.exit(main())
