# SPDX-License-Identifier: Apache-2.0
"""``backsightctl doctor`` tells which probes would work."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.probes.symptoms import SYMPTOMS
from testbed.daemons import anywhere
from testbed.topology import PYTHON, Host
from tests.probes.kernel import held, left_since
from tests.probes.test_privileges import As

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

DOCTOR = (PYTHON, "-m", "ctl", "doctor")


def asked(host: Host, *arguments: str) -> tuple[int, str]:
    with host.popen(
        [*DOCTOR, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        said, _ = process.communicate()
    return process.returncode, said.decode()


def checks(said: str) -> dict[str, Any]:
    found = [json.loads(line) for line in said.splitlines()]
    return {check["id"]: check for check in found}


def test_all_works_here_and_nothing_is_left() -> None:
    before = held()
    status, said = asked(anywhere(), "--json")
    found = checks(said)
    assert status == 0, said
    assert {f"probe.{symptom.key}" for symptom in SYMPTOMS} <= set(found)
    assert [check for check in found.values() if not check["ok"]] == []
    assert left_since(before) == {}


def test_without_capabilities_it_says_what_to_do(tmp_path: Path) -> None:
    bare = As("here", "", "127.0.0.1", 0, ())
    status, said = asked(bare, "--json")
    found = checks(said)
    assert status == 1
    assert found["capabilities"]["found"] == "missing: CAP_BPF, CAP_PERFMON"
    probes = [check for name, check in found.items() if name.startswith("probe.")]
    assert probes
    assert not any(check["ok"] for check in probes)
    # Nothing is missing where nothing is wanted.
    config = tmp_path / "node.yaml"
    config.write_text("probes: {bypass: true}\n")
    _, said = asked(bare, "--json", "--config", str(config))
    probes = [check for name, check in checks(said).items() if name.startswith("probe.")]
    assert not any(check["is_needed"] for check in probes)
    status, said = asked(bare)
    assert "what to do: run this as root, or give the process CAP_BPF and CAP_PERFMON" in said


def test_a_bad_configuration_is_said(tmp_path: Path) -> None:
    config = tmp_path / "node.yaml"
    config.write_text("probes: {run_queue: {fire_ms: soon}}\n")
    status, said = asked(anywhere(), "--config", str(config))
    assert status == 1
    assert f"{config}:1" in said
