# SPDX-License-Identifier: Apache-2.0
"""``make demo-probes``, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from testbed.topology import PYTHON
from tests.cluster.leftovers import namespaces_of
from tests.probes.kernel import held, left_since

# The virtual environment is made by the first who wants it.
pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(400)]

SYMPTOMS = [
    "cpu_hog", "lost_packets", "slow_queue", "full_listener",
    "slow_disk", "held_lock", "unplugged", "crash",
]  # fmt: skip


def demo(build: Path, **environment: str) -> tuple[str, list[dict[str, Any]]]:
    """What it prints, and its figures. AssertionError if something was wrong."""
    before = held()
    done = subprocess.run(
        [PYTHON, "-m", "tests.mishaps"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert namespaces_of(os.getpid()) == []
    assert left_since(before) == {}
    rows: list[dict[str, Any]] = json.loads((build / "demo-probes/result.json").read_text())
    return done.stdout, rows


def test_some_of_it(build: Path) -> None:
    # Without the quiet time: on a busy machine something is starved now and then.
    said, rows = demo(build, ONLY="held_lock crash", QUIET="0")
    assert [row["symptom"] for row in rows] == ["held_lock", "crash"]
    lock, crash = rows
    assert (lock["fired"], lock["node"]) == ("kernel.lock_wait", "node-2")
    assert (lock["victim_right"], lock["lateral_right"]) == (True, True)
    assert "with 1 lateral, collected 1 of 1" in said
    assert (crash["fired"], crash["node"]) == ("kernel.crash", "node-3")
    # The wait stands between the spans of the services.
    assert "waited for a lock" in said.partition("as backsightctl show tells it")[2]


@pytest.mark.slow
def test_all_of_it(build: Path) -> None:
    _, rows = demo(build)
    assert [row["symptom"] for row in rows] == ["quiet", *SYMPTOMS]
    assert all(row["victim_right"] and not row["innocent_triggered"] for row in rows)
    lateral = {row["symptom"]: row["lateral_right"] for row in rows}
    assert lateral["cpu_hog"] and lateral["held_lock"] and lateral["lost_packets"]


def test_what_makes_no_sense_is_refused() -> None:
    for environment, expected in (
        ({"ONLY": "flood"}, "ONLY=flood: there is no flood; allowed: cpu_hog "),
        ({"QUIET": "x"}, "QUIET=x: want seconds, 0 to 3600"),
        ({"QUIET": "nan"}, "QUIET=nan: want seconds, 0 to 3600"),
    ):
        done = subprocess.run(
            [PYTHON, "-m", "tests.mishaps"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"demo-probes: {expected}")
