# SPDX-License-Identifier: Apache-2.0
"""bpf/waits.bpf.c: threads that wait for a CPU, a lock, a disk, or in a system call."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.cgroups import group, unified_group
from testbed.topology import PYTHON
from tests.probes.machine import Machine, Suffered, kernel_spans, machine, trigger_of

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

BLOCKED_FIRE_MS = 30

# Each of four that hog its CPU runs for 1 ms at least, in turn. The disk may be fast.
PROBES = {
    "run_queue": {"fire_ms": 2, "record_ms": 0.2},
    "cpu_throttled": {"fire_ms": 20, "record_ms": 1},
    "lock_wait": {"fire_ms": 30, "record_ms": 5},
    "io_wait": {"fire_ms": 0.05, "record_ms": 0.05},
    "blocked": {"fire_ms": BLOCKED_FIRE_MS, "record_ms": 5},
}

# How much of what the victim waited the probe tells of, at least.
LEAST = {"run_queue": 0.8, "lock_wait": 0.9, "blocked": 0.9, "io_wait": 0.1}


# Twice as many as a CPU keeps of who ran (RUNNERS in bpf/waits.bpf.c).
HOGS = 8

HOG = """
print("runs", flush=True)
while True:
    pass
"""


# For longer than what is noted of who ran (STINT_NS), on any machine: some 30 ms and more.
RUN_IN_SHELL = "i=0; while [ $((i += 1)) -lt 100000 ]; do :; done"


# It runs when it has slept for longer than who ran is kept (AWAY_NS); then another of its threads may.
# At first it sleeps until who always runs has run for longer than it ever does at once.
NEWCOMER = """
import sys, threading, time

def run(for_s):
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        pass

own_s, others_s = map(float, sys.argv[1:])
time.sleep(1)
print("runs", flush=True)
while True:
    time.sleep(0.25)
    run(own_s)
    if not others_s:
        continue
    other = threading.Thread(target=run, args=(others_s,))
    other.start()
    other.join()
"""


@contextlib.contextmanager
def running(here: Machine, *commands: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """HOG or NEWCOMER, so many of them; they end with the block."""
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(here.node.host.popen(command, stdout=subprocess.PIPE))
            for command in commands
        ]
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == b"runs\n"
        yield started
        for one in started:
            one.terminate()


@pytest.fixture(scope="module")
def here(
    tmp_path_factory: pytest.TempPathFactory, build: Path, either_loader: str
) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("waits"), build, either_loader, PROBES) as made:
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
        # On a busy machine it then waits for a CPU, which is another wait.
        for_cpu = kernel_spans(shown, "run_queue") if once else []
        all_ns = waited_ns + sum(span["end_ns"] - span["start_ns"] for span in for_cpu)
        # The victim began to measure a moment after it began to wait, or it took it a
        # moment to notice. In fsync(2) it waits for more than the disk.
        assert LEAST[cause] * it.took_ns <= all_ns
        assert waited_ns <= 1.1 * it.took_ns
        victim = next(span for span in shown["spans"] if span["name"] == "victim")
        # On a busy machine it waits before its span and after it too.
        for span in spans:
            within = victim["start_ns"] <= span["end_ns"] and span["start_ns"] <= victim["end_ns"]
            assert span["parent_id"] == (victim["span_id"] if within else "")
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


def test_what_another_trace_asked_a_disk_for_is_not_counted(here: Machine) -> None:
    with here.suffers("io_wait_for_less") as it:
        spans = kernel_spans(here.shown(it.victim), "io_wait")
    asked = sum(span["attributes"].get("kernel.bytes", 0) for span in spans)
    assert 1 << 20 <= asked < 16 << 20


def test_the_example_of_the_docs(here: Machine, repository: Path) -> None:
    """Beside the thresholds that it has here: both wait as long as it says."""
    text = (repository / "docs/probes.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    with here.node.host.popen(
        [PYTHON, "-c", code], env=here.node.client_environment("example"), stdout=subprocess.PIPE
    ) as process:
        said, _ = process.communicate()
    traces = dict(line.rsplit(" ", 1) for line in said.decode().splitlines())
    shown = here.shown(traces["waited"])
    assert trigger_of(shown, "kernel.lock_wait")["laterals"] == [traces["held it"]]
    (wait,) = kernel_spans(shown, "lock_wait")
    assert wait["end_ns"] - wait["start_ns"] > 200e6


STOPPED_S = 1.0


def assert_did_not_wait(here: Machine, it: Suffered) -> None:
    """Not all the time: on a busy machine it waits before it is stopped, perhaps for long."""
    assert it.took_ns > STOPPED_S * 1e9
    with here.suffers("lock_wait") as after:
        here.shown(after.victim)
        if it.victim not in here.triggered()["kernel.lock_wait"]:
            return
    spans = kernel_spans(here.shown(it.victim), "lock_wait")
    assert sum(span["end_ns"] - span["start_ns"] for span in spans) < STOPPED_S * 1e9 / 2


def test_who_is_stopped_does_not_wait(here: Machine) -> None:
    """By a signal, in the middle of a wait for a lock, which it then goes on with."""
    here.probes.await_watched(0)
    with here.sufferer("is_stopped") as program:
        here.probes.await_watched(1)
        program.begin()
        stat = Path(f"/proc/{program.process.pid}/stat")
        # The field behind the command.
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        time.sleep(STOPPED_S)
        program.process.send_signal(signal.SIGCONT)
        it = program.end()
    assert_did_not_wait(here, it)


def test_who_is_frozen_does_not_wait(here: Machine) -> None:
    """As a container is that is paused: with its control group."""
    here.probes.await_watched(0)
    with (
        unified_group() as group,
        here.sufferer("is_frozen", path=group.path / "cgroup.freeze") as program,
    ):
        group.take([program.process.pid])
        here.probes.await_watched(1)
        program.begin()
        while "frozen 1" not in (group.path / "cgroup.events").read_text():
            time.sleep(0.01)
        time.sleep(STOPPED_S)
        group.set("cgroup.freeze", "0")
        it = program.end()
    assert_did_not_wait(here, it)


@pytest.mark.parametrize("cause", ["sleep", "epoll_wait", "accept"])
def test_who_waits_for_work_is_left_alone(here: Machine, cause: str) -> None:
    with here.suffers(cause) as it:
        assert it.took_ns > BLOCKED_FIRE_MS * 1e6
    # What fired for that would have been reported before this.
    with here.suffers("lock_wait") as after:
        here.shown(after.victim)
        fired = here.triggered()
        waits = fired["kernel.lock_wait"] | fired.get("kernel.blocked", set())
        assert not waits & {it.victim, it.lateral, it.innocent}


def test_several_share_the_blame(here: Machine) -> None:
    """Four others run in turn on that CPU, a quarter of each wait each."""
    with here.suffers("run_queue") as it:
        spans = kernel_spans(here.shown(it.victim), "run_queue")
    ran_ns = sum(span["attributes"].get("kernel.other.ran_ns", 0) for span in spans)
    waited_ns = sum(span["end_ns"] - span["start_ns"] for span in spans)
    assert 0.15 * waited_ns < ran_ns < 0.7 * waited_ns


def test_who_ran_is_named_where_it_has_no_trace(here: Machine) -> None:
    """A process of somebody else's, which has far more weight on that CPU."""
    here.probes.await_watched(0)
    cpu = str(min(os.sched_getaffinity(0)))
    on_cpu = ["taskset", "--cpu-list", cpu, "nice", "-n", "-10"]
    hog = [*on_cpu, "sh", "-c", f'{RUN_IN_SHELL}; exec "$@"', "sh", PYTHON, "-c", HOG]
    with here.sufferer("hog_of_another") as program, running(here, hog) as (process,):
        here.probes.await_watched(1)
        it = program.suffer()
        command = Path(f"/proc/{process.pid}/comm").read_text().strip()
    shown = here.shown(it.victim)
    trigger = trigger_of(shown, "kernel.run_queue")
    assert trigger["laterals"] == []
    spans = kernel_spans(shown, "run_queue")
    # On a busy machine others run too, now and then for longer.
    ran_ns = Counter[tuple[int, str]]()
    for span in spans:
        told = span["attributes"]
        if "kernel.other.pid" in told:
            who = (told["kernel.other.pid"], told["kernel.other.command"])
            ran_ns[who] += told["kernel.other.ran_ns"]
    waited_ns = sum(span["end_ns"] - span["start_ns"] for span in spans)
    assert 0.8 * it.took_ns <= waited_ns <= 1.1 * it.took_ns
    assert 0.5 * waited_ns < ran_ns[process.pid, command] <= 1.1 * waited_ns
    assert any(
        f"{command}[{process.pid}] ran " in one["attributes"]["kernel.what"] for one in spans
    )


def test_who_ran_longest_is_named_among_many(here: Machine) -> None:
    """They run in turn, many times in one wait of who has little weight: each an equal part of it."""
    here.probes.await_watched(0)
    hog = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), PYTHON, "-c", HOG]
    with (
        here.sufferer("hog_of_another", under=["nice", "-n", "10"]) as program,
        running(here, *[hog] * HOGS),
    ):
        here.probes.await_watched(1)
        it = program.suffer()
    spans = kernel_spans(here.shown(it.victim), "run_queue")
    longest = max(spans, key=lambda span: int(span["end_ns"] - span["start_ns"]))
    ran_ns = longest["attributes"]["kernel.other.ran_ns"]
    assert ran_ns > 0.5 * longest["attributes"]["kernel.duration_ns"] / HOGS


# Less than the credit that who runs often may have (CREDIT_MAX_NS), and more. Who has no place is
# known while nobody else without one runs, so there are three victims of who runs for less.
@pytest.mark.parametrize(("own_s", "others_s", "victims"), [(0.007, 0.0, 3), (0.06, 0.001, 1)])
def test_who_seldom_runs_is_named_beside_four_who_always_do(
    here: Machine, own_s: float, others_s: float, victims: int
) -> None:
    on_cpu = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]
    hog = [*on_cpu, PYTHON, "-c", HOG]
    newcomer = [*on_cpu, "chrt", "--fifo", "1", PYTHON, "-c", NEWCOMER, str(own_s), str(others_s)]
    seen: list[list[tuple[bool, int, int]]] = []
    with running(here, hog, hog, hog, hog, newcomer) as beside:
        for _ in range(victims):
            here.probes.await_watched(0)
            with here.sufferer("hog_of_another") as program:
                here.probes.await_watched(1)
                it = program.suffer()
            seen.append(
                [
                    (
                        span["attributes"].get("kernel.other.pid") == beside[-1].pid,
                        span["attributes"].get("kernel.other.ran_ns", 0),
                        span["attributes"]["kernel.duration_ns"],
                    )
                    for span in kernel_spans(here.shown(it.victim), "run_queue")
                ]
            )
            if any(is_it and own_s / 2 < ran_ns / 1e9 < 2 * own_s for is_it, ran_ns, _ in seen[-1]):
                return
    raise AssertionError(f"the newcomer is not named by any of {victims} victims: {seen}")


def test_a_group_that_has_used_up_its_quota_is_told_apart(here: Machine) -> None:
    """And who runs as much outside of it is not touched."""
    here.probes.await_watched(0)
    with (
        group("cpu") as limited,
        here.sufferer("cpu_throttled") as inside,
        here.sufferer("cpu_throttled") as outside,
    ):
        limited.limit_cpu(0.3)
        # On a busy machine it gets its quota nevertheless.
        limited.prefer()
        limited.take([inside.process.pid])
        here.probes.await_watched(2)
        outside.begin()
        it = inside.suffer()
        beside = outside.end()
        shown = here.shown(it.victim)
    trigger = trigger_of(shown, "kernel.cpu_throttled")
    assert "waited for its CPU quota" in trigger["why"]
    throttled_ns, starved_ns = (
        sum(span["end_ns"] - span["start_ns"] for span in kernel_spans(shown, kind))
        for kind in ("cpu_throttled", "run_queue")
    )
    assert it.took_ns > 500e6
    assert 0.6 * it.took_ns < throttled_ns < 1.1 * it.took_ns
    assert starved_ns < 0.5 * throttled_ns
    assert trigger["laterals"] == []
    assert not here.triggered()["kernel.cpu_throttled"] & {beside.victim, beside.innocent}
