# SPDX-License-Identifier: Apache-2.0
"""The campaign as a test, for a minute; and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from testbed.topology import PYTHON
from tests.cluster.leftovers import interrupt_and_look, namespaces_of, processes_in
from tests.hostile.attacks import ALL, ATTACKER
from tests.hostile.campaign import Campaign

# Four daemons are killed, however long it takes, and what each had in its hands is lost: up to
# five triggers. In half a minute on two processors, that can be more than one in a hundred.
SECONDS = 60
SEED = 11


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(300)
def test_hostile_processes_cost_honest_ones_nothing(tmp_path: Path) -> None:
    with Campaign(SECONDS, SEED) as campaign:
        campaign.run()
        result = campaign.judge()
        directory = campaign.directory
    assert result.failures == ()
    assert result.honest_records_lost == 0
    assert result.false_coherent == 0
    assert result.honest_triggers_collected >= 0.99
    # It was what it is meant to be: both sides worked.
    assert set(result.attacks) == {attack.label for attack in ALL}
    assert result.honest_triggers > 100
    assert result.restarts == 4
    for counted in result.nodes.values():
        assert counted["corrupt"] > 100
        assert counted["not_allowed"] > 100
        assert counted["malformed"] > 10
        assert counted["taken_back_bytes"] > 0
    result.write(tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["honest_records_lost"] == 0
    assert not directory.exists()
    assert namespaces_of(os.getpid()) == []
    assert processes_in(str(directory)) == []


@pytest.mark.slow
@pytest.mark.root
def test_ctrl_c_removes_everything() -> None:
    interrupt_and_look("tests.hostile", "scribbling")


@pytest.mark.root
@pytest.mark.parametrize(
    ("variable", "text", "want"),
    [
        ("DURATION", "9", "want a whole number, 10 to 86400"),
        ("DURATION", "x", "want a whole number, 10 to 86400"),
        ("ONLY", "wash,nothing", "no attack nothing; there is: attach, bulk,"),
    ],
)
def test_what_makes_no_sense_is_refused(variable: str, text: str, want: str) -> None:
    done = subprocess.run(
        [PYTHON, "-m", "tests.hostile"],
        env={**os.environ, variable: text},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"hostile: {variable}={text}: {want}")


def test_the_attacker_has_each_attack() -> None:
    done = subprocess.run([str(ATTACKER)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert {attack.name for attack in ALL} == set(done.stderr.split("is one of")[1].split())
