# SPDX-License-Identifier: Apache-2.0
"""A request that computes, and computes, on one CPU, before all others: ``hog.py CPU``.

Says its trace, and goes on until its standard input ends.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading

import backsight

_NICE = -20


def main() -> None:
    """See above."""
    trace = secrets.token_bytes(16)
    backsight.begin(trace)
    backsight.tracepoint(b"computes")
    backsight.wait_attached(30)
    backsight.begin(trace)
    backsight.tracepoint(b"computes on")
    print(trace.hex(), flush=True)
    sys.stdin.readline()
    ended = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=await_end, daemon=True).start()
    os.sched_setaffinity(0, {int(sys.argv[1])})
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    while not ended.is_set():
        pass


if __name__ == "__main__":
    main()
