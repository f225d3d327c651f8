# SPDX-License-Identifier: Apache-2.0
"""Daemons open as many files as they may, whatever their soft limit was."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.daemons import anywhere, coordinator_on
from testbed.topology import Node

LIMITED = ("prlimit", "--nofile=256:4096")


def limits(pid: int) -> list[str]:
    """The soft and the hard one."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("Max open files")]
    return line.split()[3:5]


@pytest.mark.parametrize("program", ["coordinator", "node"])
def test_a_daemon_raises_its_limit(tmp_path: Path, program: str) -> None:
    machine = anywhere()
    daemon = (
        coordinator_on(machine, tmp_path)
        if program == "coordinator"
        else Node(machine, "n", tmp_path, None, {"metrics": {"listen": None}})
    )
    daemon.program = (*LIMITED, *map(str, daemon.program))
    with daemon:
        assert limits(daemon.daemon_pid()) == ["4096", "4096"]
