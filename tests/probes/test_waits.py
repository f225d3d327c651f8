# SPDX-License-Identifier: Apache-2.0
"""bpf/waits.bpf.c: threads that wait for a CPU, a lock, a disk, or in a system call."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.daemons import anywhere, coordinator_on
from testbed.probes import Probes
from testbed.topology import Coordinator, Node

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

DEADLINE_S = 30.0
LOOK_EVERY_S = 0.05

# Four threads on one CPU take turns of 3 ms. The disk may be fast.
PROBES = {
    "run_queue": {"fire_ms": 5, "record_ms": 0.2},
    "lock_wait": {"fire_ms": 30, "record_ms": 5},
    "io_wait": {"fire_ms": 0.05, "record_ms": 0.05},
    "blocked": {"fire_ms": 30, "record_ms": 5},
}

# How much of what the victim waited the probe tells of, at least.
LEAST = {"run_queue": 0.8, "lock_wait": 0.9, "blocked": 0.9, "io_wait": 0.1}


@dataclass
class Suffered:
    """What the program said that happened to it."""

    victim: str
    lateral: str
    innocent: str
    took_ns: int
    pid: int


@dataclass
class Machine:
    coordinator: Coordinator
    node: Node
    probes: Probes
    program: Path
    directory: Path

    @contextlib.contextmanager
    def suffers(self, cause: str) -> Iterator[Suffered]:
        self.probes.await_watched(0)
        with self.node.host.popen(
            [str(self.program), cause, str(self.directory / "data")],
            env=self.node.client_environment("sufferer"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            self.probes.await_watched(1)
            process.stdin.write(b"go\n")
            process.stdin.flush()
            said = json.loads(process.stdout.readline())
            yield Suffered(pid=process.pid, **said)
            process.stdin.write(b"end\n")
            process.stdin.flush()
        assert process.returncode == 0

    def shown(self, trace: str) -> dict[str, Any]:
        """What the coordinator shows of a trace when it has a last verdict."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(subprocess.CalledProcessError):
                shown: dict[str, Any] = self.coordinator.ctl_json("show", trace)[0]
                if shown["verdict"]["kind"] != "provisional":
                    return shown
            time.sleep(LOOK_EVERY_S)
        raise AssertionError(f"after {DEADLINE_S} s the coordinator has no verdict of {trace}")

    def triggered(self) -> dict[str, set[str]]:
        """By trigger: the traces that it was fired for, laterals too."""
        found: dict[str, set[str]] = {}
        for trace in self.coordinator.ctl_json("traces"):
            for trigger in trace["triggers"]:
                found.setdefault(trigger["name"], set()).add(trace["trace_id"])
        return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, build: Path) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("waits")
    host = anywhere()
    coordinator = coordinator_on(host, directory)
    node = Node(
        host, "here", directory, coordinator, {"metrics": {"listen": None}, "probes": PROBES}
    )
    probes = Probes(node)
    with coordinator, node, probes:
        yield Machine(coordinator, node, probes, build / "tests/suffer", directory)


def kernel_spans(shown: dict[str, Any], event: str) -> list[dict[str, Any]]:
    return [span for span in shown["spans"] if span["attributes"].get("kernel.event") == event]


def trigger_of(shown: dict[str, Any], name: str) -> dict[str, Any]:
    """The one that fired for this trace, and not for one that it is a neighbour of."""
    own = (name, shown["trace_id"])
    triggers = [one for one in shown["triggers"] if (one["name"], one["primary"]) == own]
    assert triggers, f"{name} did not fire: {shown['triggers']}"
    return triggers[0]


@pytest.mark.parametrize("cause", ["run_queue", "lock_wait", "blocked", "io_wait"])
def test_a_wait_fires_for_its_trace(machine: Machine, cause: str) -> None:
    with machine.suffers(cause) as it:
        shown = machine.shown(it.victim)
        trigger = trigger_of(shown, f"kernel.{cause}")
        assert (trigger["source"], trigger["node"]) == ("kernel", "here")
        spans = kernel_spans(shown, cause)
        waited_ns = sum(span["end_ns"] - span["start_ns"] for span in spans)
        # The victim began to measure a moment after it began to wait, or it took it a
        # moment to notice. In fsync(2) it waits for more than the disk.
        assert LEAST[cause] * it.took_ns <= waited_ns <= 1.1 * it.took_ns
        victim = next(span for span in shown["spans"] if span["name"] == "victim")
        assert {span["parent_id"] for span in spans} == {victim["span_id"]}
        assert {span["service"] for span in spans} == {"sufferer"}
        assert it.innocent not in machine.triggered()[f"kernel.{cause}"]
        if cause in ("run_queue", "lock_wait"):
            assert it.lateral in trigger["laterals"]
            assert "suffer[" in trigger["why"]


def test_who_waits_for_work_is_left_alone(machine: Machine) -> None:
    with machine.suffers("sleep") as it:
        pass
    # What fired for the sleep would have been reported before this.
    with machine.suffers("lock_wait") as after:
        machine.shown(after.victim)
        fired = machine.triggered()
        waits = fired["kernel.lock_wait"] | fired.get("kernel.blocked", set())
        assert not waits & {it.victim, it.lateral, it.innocent}
