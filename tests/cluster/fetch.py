# SPDX-License-Identifier: Apache-2.0
"""``python3 -m tests.cluster.fetch HOST:PORT DIRECTORY``: all that ``backsightctl`` shows, as files.

``traces.jsonl`` is what ``backsightctl traces --json`` prints, TRACE.json what ``show TRACE
--json`` prints: one process for all of it, since each has to import gRPC.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import backsight_pb2 as pb

from ctl.coordinator import CoordinatorClient
from ctl.trace import summary_json, trace_view


def main() -> None:
    endpoint, directory = sys.argv[1], Path(sys.argv[2])
    with (
        CoordinatorClient(endpoint) as coordinator,
        (directory / "traces.jsonl").open("w") as listing,
    ):
        for summary in list(coordinator.traces(pb.ListTracesRequest())):
            listing.write(json.dumps(summary_json(summary)) + "\n")
            shown = trace_view(coordinator.trace(summary.trace)).to_json()
            (directory / f"{summary.trace.hex()}.json").write_text(json.dumps(shown))


if __name__ == "__main__":
    main()
