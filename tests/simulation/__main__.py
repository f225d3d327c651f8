# SPDX-License-Identifier: Apache-2.0
"""Run one random fault schedule and print what happened.

/usr/bin/python3 -m tests.simulation --seed 42 --trace
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.simulation.faults import Schedule
from tests.simulation.simulator import OracleError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="as a failed test named it")
    parser.add_argument("--trace", action="store_true", help="print every message and fault")
    arguments = parser.parse_args()
    schedule = Schedule(arguments.seed, trace_log=arguments.trace)
    failure = ""
    try:
        schedule.run()
    except OracleError as error:
        failure = str(error)
    sim = schedule.sim
    print("\n".join(sim.log_lines), end="\n" if sim.log_lines else "")
    kinds = Counter(sim.kind(trace) for trace in sim.coordinator.store.traces)
    print(f"seed {arguments.seed}: {len(sim.nodes)} nodes, {len(sim.traffic.requests)} requests,")
    print(f"conditions: {', '.join(sorted(schedule.conditions.names)) or 'none'};")
    print(f"{len(sim.fired)} firings, verdicts {dict(sorted(kinds.items()))}")
    if failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
