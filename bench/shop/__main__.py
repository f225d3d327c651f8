# SPDX-License-Identifier: Apache-2.0
"""``make bench-shop``: what Backsight and a Collector with tail sampling cost beside the same shop.

docs/benchmarks.md says how and what. QUICK=1: a little of everything, to see that it works. ROUNDS,
LOAD_S, IDLE_WINDOWS, IDLE_S, SETTLE_S, LATENCY_ROUNDS, CONNECTIONS, PAUSE_MS, DECISION_WAIT_S, SLOW_MS:
bench/shop/parameters.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import machine, report
from bench.shop.parameters import Parameters
from bench.shop.run import Bench
from bench.shop.sites import BacksightSite, CollectorSite
from bench.shop.tables import table
from bench.trees import this_tree
from testbed.topology import Network

_OUTPUT = Path("build/bench/shop.jsonl")


def _say(text: str) -> None:
    print(text, flush=True)


def main(environment: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Measure and print it all."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="bench.shop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=_OUTPUT)
    output: Path = parser.parse_args(arguments).output
    try:
        parameters = Parameters.of_environment(environment)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if os.geteuid():
        sys.stderr.write("hosts are network namespaces, which needs root: sudo make bench-shop\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the daemons are taken down
    about = report.About(this_tree().commit, "", machine.description())
    for name, value in about.machine.items():
        _say(f"{name:12} {value}")
    _say(f"{'commit':12} {about.commit}")
    _say(f"{'parameters':12} {parameters}")
    _say(f"{'load':12} {machine.load():.2f}")
    output.parent.mkdir(parents=True, exist_ok=True)
    about.write(output)
    # Short, because a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="backsight-") as name:
        directory = Path(name)
        directory.chmod(0o755)  # the databases run as another user
        with (
            Network("shop") as network,
            CollectorSite(network, directory / "collector", parameters) as collector,
            BacksightSite(network, directory / "backsight", parameters) as backsight,
            machine.stolen_told(),
        ):
            results = list(Bench(parameters, collector, backsight, _say).measure())
    output.write_text("".join(result.line() + "\n" for result in results))
    written = table(results)
    output.with_suffix(".md").write_text(written)
    _say(f"\n{written}\nwritten to {output.with_suffix('.*')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ, sys.argv[1:]))
