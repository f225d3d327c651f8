# SPDX-License-Identifier: Apache-2.0
"""bpf/crash.bpf.c: a process ends by a signal, and all that it was doing is kept."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.cgroups import group
from tests.probes.machine import Machine, Suffered, kernel_spans, machine, trigger_of

ATTEMPTS = 5

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, build: Path, loader: str) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("crash"), build, loader, {}) as made:
        yield made


def assert_did_not_crash(here: Machine, it: Suffered) -> None:
    """None of its traces: a crash that comes after would be told of after it."""
    with here.suffers("crash", -signal.SIGILL) as after:
        pass
    here.shown(after.victim)
    crashed = here.triggered()["kernel.crash"]
    assert not crashed & {it.victim, it.lateral, it.innocent}


def test_all_that_was_open_is_collected_once(here: Machine) -> None:
    before = here.triggered().get("kernel.crash", set())
    with here.suffers("crash", -signal.SIGILL) as it:
        pass
    shown = here.shown(it.victim)
    trigger = trigger_of(shown, "kernel.crash")
    assert trigger["why"] == "process ended by SIGILL"
    # All threads end, each by a signal; the first one tells.
    assert sorted(trigger["laterals"]) == sorted([it.lateral, it.innocent])
    assert len(kernel_spans(shown, "crash")) == 1
    assert here.triggered()["kernel.crash"] - before == {it.victim, it.lateral, it.innocent}
    # What it was about to do when it ended.
    (victim,) = [span for span in shown["spans"] if span["name"] == "victim"]
    assert victim["unfinished"]


@pytest.mark.parametrize(
    ("cause", "by"),
    [("is_surprised", signal.SIGUSR1), ("is_surprised_last", signal.SIGRTMAX)],
)
def test_any_signal_that_is_not_meant_is_a_crash(
    here: Machine, cause: str, by: signal.Signals
) -> None:
    with here.suffers(cause, -by) as it:
        pass
    (trigger,) = here.shown(it.victim)["triggers"]
    # Where no core is dumped, all threads end at once: any of them may be the first.
    assert {trigger["primary"], *trigger["laterals"]} == {it.victim, it.lateral, it.innocent}
    assert (trigger["name"], trigger["why"]) == ("kernel.crash", f"process ended by {by.name}")


def test_what_is_open_in_another_process_is_left_alone(here: Machine) -> None:
    here.probes.await_watched(0)
    with here.sufferer("stays_open") as lives:
        here.probes.await_watched(1)
        beside = lives.suffer()
        with here.sufferer("crash", -signal.SIGILL) as dies:
            here.probes.await_watched(2)
            it = dies.suffer()
        shown = here.shown(it.victim)
        trigger = trigger_of(shown, "kernel.crash")
        assert sorted(trigger["laterals"]) == sorted([it.lateral, it.innocent])
        crashed = here.triggered()["kernel.crash"]
        assert {it.victim, it.lateral, it.innocent} <= crashed
        assert not crashed & {beside.victim, beside.innocent}
        # They were open until now.
        lives.suffer()


def test_who_ends_by_itself_does_not_crash(here: Machine) -> None:
    with here.sufferer("ends", 0) as program:
        here.probes.await_watched(1)
        # The kernel kills its other threads, which are in the middle of traces.
        it = program.suffer()
    assert_did_not_crash(here, it)


def test_a_program_that_comes_after_has_none_of_its_traces(here: Machine) -> None:
    with here.sufferer("executes_another", -signal.SIGILL) as program:
        here.probes.await_watched(1)
        it = program.suffer()
    assert_did_not_crash(here, it)


def test_who_may_go_on_does_not_crash(here: Machine) -> None:
    """The first process of a pid namespace: signals that it does not handle are dropped."""
    here.probes.await_watched(0)
    with here.sufferer("is_spared", under=["unshare", "--fork", "--pid"]) as program:
        here.probes.await_watched(1)
        it = program.suffer()
    assert_did_not_crash(here, it)


def test_who_is_asked_to_end_does_not_crash(here: Machine) -> None:
    with here.sufferer("asked_to_end", -signal.SIGTERM) as program:
        here.probes.await_watched(1)
        # Its traces are open when it is.
        it = program.suffer()
    assert_did_not_crash(here, it)


def test_who_is_killed_for_want_of_memory_is_told_apart(here: Machine) -> None:
    """The kernel sends the signal first, and then notes why: a thread may end in between."""
    told = set()
    for _ in range(ATTEMPTS):
        with group("memory") as limited:
            limited.limit_memory(64 << 20)
            with here.suffers_in(limited, "out_of_memory", -signal.SIGKILL) as it:
                pass
        # On a busy machine it waits for a disk or a CPU before.
        (trigger,) = (
            one for one in here.shown(it.victim)["triggers"] if one["name"] == "kernel.crash"
        )
        # All of its threads are killed: any of them may be the first.
        assert {trigger["primary"], *trigger["laterals"]} == {it.victim, it.lateral, it.innocent}
        told.add(trigger["why"])
        if "process ended by SIGKILL: out of memory" in told:
            break
    assert "process ended by SIGKILL: out of memory" in told
    assert told <= {"process ended by SIGKILL", "process ended by SIGKILL: out of memory"}
