# SPDX-License-Identifier: Apache-2.0
"""``python3 -m bench.shop.watch ENDPOINT``: when a coordinator has each trace, judged and stored.

Prints a line of JSON (reckon.Ended) for each that is coherent and was not before; its end is that of the
last of its spans. The coordinator tells nobody by itself, so it is asked again and again.
"""

from __future__ import annotations

import json
import sys
import time

import backsight_pb2 as pb
import grpc
from backsight_pb2_grpc import CoordinatorStub

_PAUSE_S = 0.02  # the resolution, but for how long an answer takes
_SINCE_S = 30  # older ones are told, and make answers long
_TIMEOUT_S = 30.0


def main() -> None:
    """Ask until the end."""
    told: set[bytes] = set()
    with grpc.insecure_channel(sys.argv[1]) as channel:
        stub = CoordinatorStub(channel)
        while True:
            question = pb.ListTracesRequest(
                verdict="coherent", since_ns=time.time_ns() - _SINCE_S * 10**9
            )
            for one in stub.ListTraces(question, timeout=_TIMEOUT_S):
                if one.trace not in told:
                    told.add(one.trace)
                    line = {
                        "trace": one.trace.hex(),
                        "there_ns": time.time_ns(),
                        "end_ns": one.end_ns,
                    }
                    print(json.dumps(line), flush=True)
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
