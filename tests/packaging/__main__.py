# SPDX-License-Identifier: Apache-2.0
"""``sudo make cluster``: the cluster of vagrant/ in containers, a fault, and machines that go away.

Environment: NODES (3), SUITE (bookworm: the release of Debian that the packages are for), KEEP (1:
leave everything up at the end, to look around). Writes build/cluster/result.json.
Status 1 if something was not as it should be.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from tests.packaging.cluster import Cluster
from tests.packaging.story import Story

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build/cluster/result.json"

# Each takes a gigabyte of disk, and two seconds to boot.
_NODES_MAX = 20


def _say(step: str) -> None:
    sys.stderr.write(f"- {step}\n")


def _nodes(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= _NODES_MAX:
        raise SystemExit(f"NODES={text}: want 2 to {_NODES_MAX}")
    return int(text)


def _keep(cluster: Cluster) -> None:
    print("\nAll stays up until you press Ctrl-C. On another terminal:")
    for machine in cluster.machines.values():
        print(f"  {machine.name:<12} {' '.join(machine.enter_command())} bash")
    print(
        "\n  on node-1:       curl 'localhost:8080/order?error=node-2'"
        "\n  on coordinator:  backsightctl traces; backsightctl show TRACE\n"
    )
    signal.pause()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    if os.geteuid() != 0:
        sys.stderr.write("the cluster boots containers, which needs root: sudo make cluster\n")
        return 2
    nodes = _nodes(os.environ.get("NODES", "3"))
    suite = os.environ.get("SUITE", "bookworm")
    packages = sorted((ROOT / "dist").glob("*.deb"))
    OUTPUT.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        try:
            with Cluster(packages, nodes, Path(directory), _say, suite) as cluster:
                return _tell(cluster)
        except KeyboardInterrupt:
            return 130
        except RuntimeError as error:
            sys.stderr.write(f"cluster: {error}\n")
            return 1


def _tell(cluster: Cluster) -> int:
    result = Story(cluster, _say).tell()
    result.write(OUTPUT)
    failed = cluster.order(error=cluster.names[-1])
    cluster.judged([failed])
    print(cluster.show(failed))
    print(OUTPUT.read_text())
    problems = result.problems()
    for problem in problems:
        sys.stderr.write(f"cluster: {problem}\n")
    if os.environ.get("KEEP") == "1":
        with contextlib.suppress(KeyboardInterrupt):
            _keep(cluster)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
