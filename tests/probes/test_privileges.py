# SPDX-License-Identifier: Apache-2.0
"""The probes run with the capabilities that are documented and no others, and the node with none.

Both without a right to memory that is written and run, as MemoryDenyWriteExecute= of their units has it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.topology import PYTHON, Host
from tests.probes.machine import Machine, machine, trigger_of

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

NOBODY = 65534

# docs/probes.md says so.
CAPABILITIES = ("bpf", "perfmon")

# What sees the symptoms.
PROGRAMS = {
    "on_switch", "on_waking", "on_bio", "on_signal", "on_retransmit", "on_reset_sent",
    "on_reset_received", "on_segment", "on_read", "on_drop", "on_enqueue", "on_dequeue",
}  # fmt: skip


# PR_SET_MDWE with PR_MDWE_REFUSE_EXEC_GAIN (linux/prctl.h), which execve() keeps.
WITHOUT_NEW_CODE = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).prctl(65, 1, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl")
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class As(Host):
    """This machine, as a user with some capabilities."""

    uid: int
    capabilities: tuple[str, ...]

    def _inside(self, command: Sequence[str]) -> list[str]:
        keep = "".join(f",+{name}" for name in self.capabilities)
        return [
            "setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups",
            f"--bounding-set=-all{keep}", f"--inh-caps=-all{keep}", f"--ambient-caps=-all{keep}",
            "--no-new-privs", PYTHON, "-c", WITHOUT_NEW_CODE, *command,
        ]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, build: Path, loader: str) -> Iterator[Machine]:
    # pytest's own directories above it are root's.
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and "pytest" in str(path):
            path.chmod(0o755)
    os.chown(tmp_path, NOBODY, NOBODY)
    with machine(
        tmp_path,
        build,
        loader,
        {"lock_wait": {"fire_ms": 30, "record_ms": 5}},
        As("here", "", "127.0.0.1", NOBODY, ()),
        As("here", "", "127.0.0.1", NOBODY, CAPABILITIES),
    ) as made:
        yield made


def capabilities(pid: int) -> dict[str, int]:
    status = dict(
        line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {name: int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")}


def test_a_trigger_of_the_kernel_needs_two_capabilities(here: Machine) -> None:
    assert set(capabilities(here.node.daemon_pid()).values()) == {0}
    cap_perfmon, cap_bpf = 38, 39  # linux/capability.h
    assert set(capabilities(here.probes.daemon_pid()).values()) == {1 << cap_perfmon | 1 << cap_bpf}
    # None of them needs more.
    figures = here.probes.await_node(lambda status: bool(status["probes"]))["probes"]
    assert figures["missing"] == {}
    assert set(figures["programs"]) >= PROGRAMS
    with here.suffers("lock_wait") as it:
        trigger = trigger_of(here.shown(it.victim), "kernel.lock_wait")
        assert trigger["laterals"] == [it.lateral]


def test_without_them_it_is_said_what_is_missing() -> None:
    nobody = As("here", "", "127.0.0.1", 0, ())
    with nobody.popen(
        [PYTHON, "-m", "appliance.probes"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        said, _ = process.communicate()
    assert process.returncode == 1
    assert b"the process needs CAP_BPF and CAP_PERFMON" in said
