# SPDX-License-Identifier: Apache-2.0
"""Probes, the node and applications come and go in any order, and the kernel fires all the same."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.probes_server import STOCK
from testbed.daemons import anywhere, coordinator_on
from testbed.probes import Probes
from testbed.topology import Daemon, Node
from tests.probes.kernel import held, left_since
from tests.probes.machine import Machine, Sufferer, machine, trigger_of

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(300)]

PROBES = {"lock_wait": {"fire_ms": 30, "record_ms": 5}}

RESTARTS = 20
MANY = 70

LOADS = ("io_wait", "blocked", "run_queue")
"""What other programs suffer from meanwhile."""

_REFUSED_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.02


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """What the kernel holds afterwards is what it held before."""
    before = held()
    yield
    assert left_since(before) == collections.Counter()


@pytest.fixture
def here(tmp_path: Path, build: Path, nothing_left: None, loader: str) -> Iterator[Machine]:
    with machine(tmp_path, build, loader, PROBES) as made:
        yield made


def see_one(here: Machine, program: Sufferer) -> None:
    """What happens to the program is seen."""
    it = program.suffer()
    trigger = trigger_of(here.shown(it.victim), "kernel.lock_wait")
    assert trigger["laterals"] == [it.lateral]


def parts(directory: Path, build: Path, of_node: type[Node] = Node) -> Machine:
    """Daemons that do not run yet."""
    host = anywhere()
    coordinator = coordinator_on(host, directory)
    config = {"metrics": {"listen": None}, "probes": PROBES}
    node = of_node(host, "here", directory, coordinator, config)
    return Machine(coordinator, node, Probes(node), build / "tests/suffer", directory)


def test_probes_that_come_later_see_who_was_there_before(
    tmp_path: Path, build: Path, nothing_left: None
) -> None:
    here = parts(tmp_path, build)
    with here.coordinator, here.node, here.sufferer("lock_wait") as program:
        before = program.suffer()
        with here.probes:
            here.probes.await_watched(1)
            see_one(here, program)
        here.probes.await_node(lambda status: not status["probes_connected"])
        # Without probes the node works as before: nothing of the kernel's.
        program.suffer()
        assert before.victim not in here.triggered().get("kernel.lock_wait", set())
        with here.probes:
            here.probes.await_watched(1)
            see_one(here, program)


class OfAnotherRelease(Daemon):
    """A daemon that speaks another version to the one beside it."""

    def command(self) -> list[str]:
        python, _, *module = super().command()
        return [python, "-m", "tests.probes.other_release", *module]


class OtherProbes(OfAnotherRelease, Probes):
    """Probes that a node of this release refuses."""

    def open(self) -> None:
        Daemon.open(self)


class OtherNode(OfAnotherRelease, Node):
    """A node that refuses probes of this release."""


def await_refused(probes: Probes) -> None:
    """Until their log says so."""
    deadline_s = time.monotonic() + _REFUSED_WITHIN_S
    while "the node takes no probes from here: they speak version" not in probes.last_words():
        assert time.monotonic() < deadline_s, probes.last_words()
        time.sleep(_LOOK_EVERY_S)


def test_an_upgrade_that_begins_with_the_node(
    tmp_path: Path, build: Path, nothing_left: None
) -> None:
    here = parts(tmp_path, build)
    with here.coordinator, here.node, here.sufferer("lock_wait") as program:
        with OtherProbes(here.node) as old:
            await_refused(old)
            # It works without them.
            program.suffer()
        with here.probes:
            here.probes.await_watched(1)
            see_one(here, program)


def test_an_upgrade_that_begins_with_the_probes(
    tmp_path: Path, build: Path, nothing_left: None
) -> None:
    old, here = parts(tmp_path, build, OtherNode), parts(tmp_path, build)
    with here.coordinator, contextlib.ExitStack() as stack:
        with old.node:
            # Not until they are connected.
            Daemon.open(here.probes)
            stack.callback(here.probes.close)
            program = stack.enter_context(here.sufferer("lock_wait"))
            await_refused(here.probes)
        with here.node:
            here.probes.await_watched(1)
            see_one(here, program)
            stack.close()


def test_many_processes_are_watched_at_once(here: Machine) -> None:
    """More than are told to the kernel in one call; and one of them is seen among them."""
    with contextlib.ExitStack() as programs:
        *_, program = [programs.enter_context(here.sufferer("lock_wait")) for _ in range(MANY)]
        here.probes.await_watched(MANY)
        here.probes.kill_daemon()
        here.probes.await_watched(MANY)
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


@contextlib.contextmanager
def suffering(here: Machine, cause: str) -> Iterator[None]:
    """A program that suffers again and again."""
    over = threading.Event()

    def work(program: Sufferer) -> None:
        while not over.is_set():
            program.suffer()

    with here.sufferer(cause) as program, concurrent.futures.ThreadPoolExecutor() as pool:
        done = pool.submit(work, program)
        try:
            yield
        finally:
            over.set()
            done.result()


@pytest.mark.slow
def test_many_restarts_in_any_order_under_load(here: Machine) -> None:
    dice = random.Random(1)
    with contextlib.ExitStack() as stack:
        for cause in LOADS:
            stack.enter_context(suffering(here, cause))
        programs = stack.enter_context(contextlib.ExitStack())
        program = programs.enter_context(here.sufferer("lock_wait"))
        here.probes.await_watched(1 + len(LOADS))
        see_one(here, program)
        at_first, footage_of_first = held(), here.node.control.status()["clients_in_pool"]
        for _ in range(RESTARTS):
            match dice.choice(["probes", "node", "application"]):
                case "probes":
                    here.probes.kill_daemon()
                case "node":
                    here.node.kill_daemon()
                case _:
                    programs.close()
                    program = programs.enter_context(here.sufferer("lock_wait"))
            here.probes.await_watched(1 + len(LOADS))
            see_one(here, program)
        # What was there after the first start is there again, and no more; but the segment of a
        # process that is gone stays with its footage, and the node has more or fewer in stock.
        left = left_since(at_first)
        footage_of = here.node.control.status()["clients_in_pool"]
        assert left.pop("map array bs_context", 0) <= footage_of - footage_of_first + STOCK // 2
        assert left == collections.Counter()
        assert at_first - held() <= collections.Counter({"map array bs_context": STOCK // 2})
