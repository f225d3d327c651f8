# SPDX-License-Identifier: Apache-2.0
"""bpf/waits.bpf.c: threads that wait for a CPU, a lock, a disk, or in a system call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.probes.machine import Machine, kernel_spans, machine, trigger_of

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

# Four threads on one CPU take turns of 3 ms. The disk may be fast.
PROBES = {
    "run_queue": {"fire_ms": 5, "record_ms": 0.2},
    "lock_wait": {"fire_ms": 30, "record_ms": 5},
    "io_wait": {"fire_ms": 0.05, "record_ms": 0.05},
    "blocked": {"fire_ms": 30, "record_ms": 5},
}

# How much of what the victim waited the probe tells of, at least.
LEAST = {"run_queue": 0.8, "lock_wait": 0.9, "blocked": 0.9, "io_wait": 0.1}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, build: Path) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("waits"), build, PROBES) as made:
        yield made


@pytest.mark.parametrize("cause", ["run_queue", "lock_wait", "blocked", "io_wait"])
def test_a_wait_fires_for_its_trace(here: Machine, cause: str) -> None:
    with here.suffers(cause) as it:
        shown = here.shown(it.victim)
        trigger = trigger_of(shown, f"kernel.{cause}")
        assert (trigger["source"], trigger["node"]) == ("kernel", "here")
        spans = kernel_spans(shown, cause)
        waits_ns = [span["end_ns"] - span["start_ns"] for span in spans]
        # On a busy machine it waits before, too, until all threads are in place.
        once = cause in ("lock_wait", "blocked")
        waited_ns = max(waits_ns) if once else sum(waits_ns)
        # The victim began to measure a moment after it began to wait, or it took it a
        # moment to notice. In fsync(2) it waits for more than the disk.
        assert LEAST[cause] * it.took_ns <= waited_ns <= 1.1 * it.took_ns
        victim = next(span for span in shown["spans"] if span["name"] == "victim")
        assert {span["parent_id"] for span in spans} == {victim["span_id"]}
        assert {span["service"] for span in spans} == {"sufferer"}
        assert it.innocent not in here.triggered()[f"kernel.{cause}"]
        if cause == "io_wait":
            asked = sum(span["attributes"].get("kernel.bytes", 0) for span in spans)
            assert asked >= 1 << 20
            assert any(span["attributes"].get("system.device") for span in spans)
        if cause in ("run_queue", "lock_wait", "io_wait"):
            assert it.lateral in trigger["laterals"]
        others = [span["attributes"].get("kernel.other.pid") for span in spans]
        assert all(span["attributes"]["thread.id"] not in others for span in spans)
        if cause == "lock_wait":
            assert "released by suffer[" in trigger["why"]
        if cause == "run_queue":
            # On a busy machine others run too, now and then for longer.
            commands = {span["attributes"].get("kernel.other.command") for span in spans}
            assert "suffer" in commands


def test_who_waits_for_work_is_left_alone(here: Machine) -> None:
    with here.suffers("sleep") as it:
        pass
    # What fired for the sleep would have been reported before this.
    with here.suffers("lock_wait") as after:
        here.shown(after.victim)
        fired = here.triggered()
        waits = fired["kernel.lock_wait"] | fired.get("kernel.blocked", set())
        assert not waits & {it.victim, it.lateral, it.innocent}
