# SPDX-License-Identifier: Apache-2.0
"""The machines that packages are tried on: each has its own of what the kernel gives them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from testbed.machines import Machine, plain_tree

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(600)]


def test_a_machine_has_its_control_groups_for_itself(tmp_path: Path) -> None:
    tree = plain_tree("bookworm")
    with contextlib.ExitStack() as stack:
        machines = [stack.enter_context(Machine(name, tree, tmp_path)) for name in ("a", "b")]
        for machine in machines:
            found = machine.sh("find /sys/fs/cgroup -path '*.service/cgroup.procs' -exec cat {} +")
            # Who is in no process namespace of the reader has the number 0.
            numbers = set(found.split())
            assert numbers
            assert "0" not in numbers
