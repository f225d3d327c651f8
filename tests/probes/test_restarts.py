# SPDX-License-Identifier: Apache-2.0
"""Probes, the node and applications come and go in any order, and the kernel fires all the same."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.daemons import anywhere, coordinator_on
from testbed.probes import Probes
from testbed.topology import Node
from tests.probes.kernel import held, left_since
from tests.probes.machine import Machine, Sufferer, machine, trigger_of

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(300)]

PROBES = {"lock_wait": {"fire_ms": 30, "record_ms": 5}}

RESTARTS = 20


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """What the kernel holds afterwards is what it held before."""
    before = held()
    yield
    assert left_since(before) == collections.Counter()


@pytest.fixture
def here(tmp_path: Path, build: Path, nothing_left: None) -> Iterator[Machine]:
    with machine(tmp_path, build, PROBES) as made:
        yield made


def see_one(here: Machine, program: Sufferer) -> None:
    """What happens to the program is seen."""
    it = program.suffer()
    trigger = trigger_of(here.shown(it.victim), "kernel.lock_wait")
    assert trigger["laterals"] == [it.lateral]


def test_probes_that_come_later_see_who_was_there_before(
    tmp_path: Path, build: Path, nothing_left: None
) -> None:
    host = anywhere()
    coordinator = coordinator_on(host, tmp_path)
    node = Node(
        host, "here", tmp_path, coordinator, {"metrics": {"listen": None}, "probes": PROBES}
    )
    probes = Probes(node)
    here = Machine(coordinator, node, probes, build / "tests/suffer", tmp_path)
    with coordinator, node, here.sufferer("lock_wait") as program:
        before = program.suffer()
        with probes:
            probes.await_watched(1)
            see_one(here, program)
        probes.await_node(lambda status: not status["probes_connected"])
        # Without probes the node works as before: nothing of the kernel's.
        program.suffer()
        assert before.victim not in here.triggered().get("kernel.lock_wait", set())
        with probes:
            probes.await_watched(1)
            see_one(here, program)


def test_killed_probes_come_back(here: Machine) -> None:
    with here.sufferer("lock_wait") as program:
        here.probes.await_watched(1)
        here.probes.kill_daemon()
        here.probes.await_watched(1)
        see_one(here, program)


def test_a_killed_node_comes_back(here: Machine) -> None:
    with here.sufferer("lock_wait") as program:
        here.probes.await_watched(1)
        here.node.kill_daemon()
        here.probes.await_watched(1)
        see_one(here, program)


@pytest.mark.slow
def test_many_restarts_in_any_order(here: Machine) -> None:
    dice = random.Random(1)
    with contextlib.ExitStack() as programs:
        program = programs.enter_context(here.sufferer("lock_wait"))
        for _ in range(RESTARTS):
            match dice.choice(["probes", "node", "application"]):
                case "probes":
                    here.probes.kill_daemon()
                case "node":
                    here.node.kill_daemon()
                case _:
                    programs.close()
                    program = programs.enter_context(here.sufferer("lock_wait"))
            here.probes.await_watched(1)
            see_one(here, program)
