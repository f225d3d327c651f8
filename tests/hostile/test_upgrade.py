# SPDX-License-Identifier: Apache-2.0
"""Daemons are replaced one by one under load, beside hostile processes that go on meanwhile."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from testbed.topology import Node
from tests.cluster.test_upgrade import (
    OLDER,
    Step,
    in_both_orders,
    releases,
    upgrade_under_load,
)
from tests.hostile.attacks import ATTACKER, HOSTILE

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(400)]

# Some of each group of the campaign's. All at once, on both nodes, would leave the coordinator
# no processor.
_ATTACKS = (
    "scribble", "directories", "grants", "losses", "context", "triggers", "touch", "leftovers",
    "attach", "chatter", "open-handles", "wash",
)  # fmt: skip

# No honest trace has this id.
_AIM = struct.pack("=QQ", 1, 0)


@contextlib.contextmanager
def attacked(nodes: Sequence[Node], directory: Path) -> Iterator[None]:
    """Each node, in each way that a user has who may attach."""
    aim = directory / "aim"
    aim.write_bytes(_AIM)
    aim.chmod(0o644)
    with contextlib.ExitStack() as stack:
        for node in nodes:
            for seed, attack in enumerate(_ATTACKS, 1):
                process = node.host.popen(
                    [
                        str(ATTACKER), attack, str(HOSTILE), str(node.socket_path),
                        str(aim), str(seed),
                    ],
                    stdin=subprocess.DEVNULL,
                )  # fmt: skip
                stack.callback(process.wait)
                stack.callback(process.kill)
        yield


@in_both_orders
def test_beside_hostile_processes_nothing_is_lost(steps: Sequence[Step]) -> None:
    # Short, because a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="backsight-") as name:
        directory = Path(name)
        # Other users come here.
        directory.chmod(0o755)
        node = {"allow": {"users": [HOSTILE]}, "pool_bytes": 128 << 20}
        with (
            releases("hostile", directory, OLDER, node) as running,
            attacked(running.cluster.nodes, directory),
        ):
            upgrade_under_load(running, steps)
