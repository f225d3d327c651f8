# SPDX-License-Identifier: Apache-2.0
"""Traffic that nobody asks for: ``python3 -m tests.recall.filler BYTES_PER_S``.

Writes traces evenly into the node's pool, so that it is gone round however little the
traced system writes. Says ``ready`` when attached, and once its standard input is closed
``wrote BYTES LOST_BYTES`` of payload.
"""

from __future__ import annotations

import os
import secrets
import select
import sys
import time

import backsight

_ATTACH_TIMEOUT_S = 60.0
_RECORD = bytes(2000)
_RECORDS = 4  # a trace: some eight of them fill a segment
_TRACE_BYTES = _RECORDS * len(_RECORD)

# A segment in 15 ms is as fast as the smallest pool is gone round in a second.
_TURN_S = 0.01


def fill(bytes_per_s: float) -> int:
    """Write until standard input is closed. Returns the bytes that were written."""
    begin_s = time.monotonic()
    written = 0
    while not select.select([0], [], [], _TURN_S)[0] or os.read(0, 4096):
        due = (time.monotonic() - begin_s) * bytes_per_s
        while written + _TRACE_BYTES <= due:
            with backsight.Trace(secrets.token_bytes(16)) as trace:
                for _ in range(_RECORDS):
                    trace.write(_RECORD)
            written += _TRACE_BYTES
    return written


def main() -> int:
    bytes_per_s = float(sys.argv[1])
    if not backsight.wait_attached(_ATTACH_TIMEOUT_S):
        sys.stderr.write("no backsight-node to attach to\n")
        return 1
    print("ready", flush=True)
    written = fill(bytes_per_s)
    print(f"wrote {written} {backsight.stats().payload_bytes_lost}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
