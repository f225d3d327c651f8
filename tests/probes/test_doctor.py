# SPDX-License-Identifier: Apache-2.0
"""``backsightctl doctor`` tells which probes would work."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.probes import doctor
from appliance.probes.native import NativeProbes
from appliance.probes.symptoms import SYMPTOMS
from runtime.settings.node import ProbesSettings
from testbed.daemons import anywhere
from testbed.topology import PYTHON, Host
from tests.probes.kernel import held, left_since
from tests.probes.test_privileges import As

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

DOCTOR = (PYTHON, "-m", "ctl", "doctor")


@dataclass(frozen=True, slots=True)
class Without(Host):
    """This machine, where a directory is empty."""

    directory: str

    def _inside(self, command: Sequence[str]) -> list[str]:
        hide = f'mount -t tmpfs hidden {self.directory} && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", hide, "sh", *command]


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
    assert {"probe.breadcrumbs", "machine.netlink", "machine.listen_overflows"} <= set(found)
    assert [check for check in found.values() if not check["ok"]] == []
    assert found["loader"]["found"] == "core is taken (probes.loader: auto)"
    assert left_since(before) == {}


def test_without_capabilities_it_says_what_to_do(tmp_path: Path) -> None:
    bare = As("here", "", "127.0.0.1", 0, ())
    status, said = asked(bare, "--json")
    found = checks(said)
    assert status == 1
    assert found["capabilities"]["found"] == "missing: CAP_BPF, CAP_PERFMON"
    for loader in ("loader.core", "loader.bcc"):
        assert (found[loader]["ok"], found[loader]["is_needed"]) == (False, True)
        assert found[loader]["remedy"] == "see capabilities above"
    assert found["loader"]["found"] == "none works (probes.loader: auto)"
    assert not [name for name in found if name.startswith("probe.")]
    # Nothing is missing where nothing is wanted.
    config = tmp_path / "node.yaml"
    config.write_text("probes: {bypass: true}\n")
    status, said = asked(bare, "--json", "--config", str(config))
    assert status == 0
    assert not [one for one in checks(said).values() if one["is_needed"] and not one["ok"]]
    # Of two loaders the one that is not configured does not matter.
    config.write_text("probes: {loader: bcc}\n")
    _, said = asked(bare, "--json", "--config", str(config))
    found = checks(said)
    assert not found["loader.core"]["is_needed"]
    assert (found["loader"]["ok"], found["loader"]["is_needed"]) == (False, True)
    assert found["loader"]["found"] == "none works (probes.loader: bcc)"
    status, said = asked(bare)
    assert "what to do: run this as root, or give the process CAP_BPF and CAP_PERFMON" in said


def test_without_pressure_it_says_so_if_it_is_wanted(tmp_path: Path) -> None:
    """As on a kernel that was booted with psi=0."""
    bare = Without("here", "", "127.0.0.1", "/proc/pressure")
    status, said = asked(bare, "--json")
    pressure = checks(said)["machine.pressure"]
    assert (status, pressure["found"]) == (1, "not told: cpu, io, memory")
    config = tmp_path / "node.yaml"
    config.write_text("machine: {io_pressure_percent: null, memory_pressure_percent: null}\n")
    status, said = asked(bare, "--json", "--config", str(config))
    assert (status, checks(said)["machine.pressure"]["is_needed"]) == (0, False)


def test_without_proc_it_says_so() -> None:
    status, said = asked(Without("here", "", "127.0.0.1", "/proc"), "--json")
    assert status == 1
    assert checks(said)["capabilities"]["remedy"] == "mount /proc"


def test_what_one_object_lacks_only_its_symptoms_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that is older than its tracepoints, say."""

    class Old(NativeProbes):
        def attach(self, name: str, code: bytes) -> None:
            if name == "sockets":
                raise OSError(2, "sockets: no tracepoint tcp_sendmsg_locked")
            super().attach(name, code)

    monkeypatch.setattr(doctor, "load", lambda loader: Old(loader, b""))
    found = {check.id: check for check in doctor.examine(ProbesSettings(loader="core"))}
    lacking = {one for one in found if one.startswith("probe.") and not found[one].ok}
    assert lacking == {"probe.breadcrumbs"} | {
        f"probe.{one.key}" for one in SYMPTOMS if "sockets" in one.objects
    }
    for name in lacking:
        assert found[name].found == "sockets: no tracepoint tcp_sendmsg_locked"
        assert found[name].is_needed


def test_a_bad_configuration_is_said(tmp_path: Path) -> None:
    config = tmp_path / "node.yaml"
    config.write_text("probes: {run_queue: {fire_ms: soon}}\n")
    status, said = asked(anywhere(), "--config", str(config))
    assert status == 2
    (line,) = said.splitlines()
    assert line.startswith(f"{config}:1: probes.run_queue.fire_ms: soon; allowed: a number from ")


def test_who_names_headers_that_are_none_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tmp_path))
    _, said = asked(anywhere(), "--json")
    bcc = checks(said)["loader.bcc"]
    assert bcc["found"].startswith(f"threads: BCC_KERNEL_SOURCE is {tmp_path}")
    assert bcc["remedy"] == "unset BCC_KERNEL_SOURCE, or have it name headers of Linux"


def test_that_all_probes_are_out_is_said(tmp_path: Path) -> None:
    config = tmp_path / "node.yaml"
    config.write_text("probes: {bypass: true}\n")
    status, said = asked(anywhere(), "--json", "--config", str(config))
    probes = checks(said)["probes"]
    assert (status, probes["ok"], probes["is_needed"]) == (0, False, False)
    assert probes["found"] == "all are out (probes.bypass: true)"


def test_who_has_read_enough_hears_no_more() -> None:
    with anywhere().popen(
        [*DOCTOR, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"{")
        process.stdout.close()
        assert process.stderr.read() == b""
