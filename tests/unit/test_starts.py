# SPDX-License-Identifier: Apache-2.0
"""A node that fails again and again waits ever longer before it starts, whoever starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import starts
from appliance.starts import Start
from runtime.memfd import memfd
from runtime.service_manager import ServiceManager, StoredFd
from testbed.daemons import anywhere
from testbed.topology import Node
from tests.unit.attach_harness import Store
from tests.unit.logs import SILENT, logs_to
from tests.unit.open_files import open_files

S = 1_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    store.close()


def test_waits_double_up_to_a_bound_until_it_stays() -> None:
    now_ns = 100 * S
    start = Start(1, now_ns)
    waits = []
    for _ in range(9):
        now_ns += S // 10  # so long it was there
        waits.append(start.next_wait_s(now_ns))
        start = start.next(now_ns, waits[-1])
        now_ns = start.began_ns
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 1.5, 1.5, 1.5]
    assert start.in_a_row == 10
    # To wait is not to be there.
    assert start.next_wait_s(now_ns + 10 * S - 1) == 1.5
    assert start.next_wait_s(now_ns + 10 * S) == 0.0
    assert start.next(now_ns + 10 * S, 0.0) == Start(1, now_ns + 10 * S)


def test_a_million_failures_are_no_other_than_ten() -> None:
    assert Start(1_000_000, 0).next_wait_s(S) == 1.5


class Machine:
    """Starts a node's first steps again and again, and keeps what they have kept."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.kept: list[StoredFd] = []
        self.waits: list[float] = []
        self.log: list[str] = []

    def start(self, *others: StoredFd) -> list[StoredFd]:
        with ServiceManager(str(self.store.path)) as manager:
            left = starts.take_turn(
                manager, [*self.kept, *others], logs_to(self.log), self.waits.append
            )
        self.keep()
        return left

    def end_well(self) -> None:
        with ServiceManager(str(self.store.path)) as manager:
            starts.end_well(manager, SILENT)
        self.keep()

    def keep(self) -> None:
        stored, removed = self.store.take()
        assert set(removed) <= {"starts"}
        self.kept = stored


def test_the_service_manager_keeps_when_it_started(store: Store) -> None:
    machine = Machine(store)
    for _ in range(3):
        assert machine.start() == []
        assert [item.name for item in machine.kept] == ["starts"]
    assert machine.waits == [0.05, 0.1]
    assert (
        "start 3 in a row, each within 10 s of the one before; begins in 0.1 s" in machine.log[-1]
    )
    machine.end_well()
    assert machine.kept == []
    machine.start()
    assert len(machine.waits) == 2


def test_what_else_is_kept_is_left_alone(store: Store, tmp_path: Path) -> None:
    machine = Machine(store)
    machine.start()
    with (tmp_path / "other").open("w") as other:
        item = StoredFd("arena", other.fileno())
        assert machine.start(item) == [item]
        os.fstat(other.fileno())


@pytest.mark.parametrize("content", [b"", b"short", bytes(16), bytes(17)])
def test_what_cannot_be_read_is_a_first_start(store: Store, content: bytes) -> None:
    machine = Machine(store)
    strange = memfd("strange")
    os.write(strange, content)
    machine.start(StoredFd("starts", strange))
    assert not [name for name in open_files() if "memfd:strange" in name]
    assert machine.waits == []
    machine.start()
    assert machine.waits == [0.05]


def test_without_a_service_manager_nothing_waits() -> None:
    waits: list[float] = []
    began = memfd("backsight-starts")
    os.write(began, starts._LAYOUT.pack(9, time.monotonic_ns()))
    left = starts.take_turn(ServiceManager(None), [StoredFd("starts", began)], SILENT, waits.append)
    assert (left, waits) == ([], [])


def test_a_library_that_cannot_be_imported_is_a_failed_start(store: Store, tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text("raise ImportError('half upgraded')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "appliance"],
        check=False,
        env={**os.environ, "PYTHONPATH": path, "NOTIFY_SOCKET": str(store.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("ImportError: half upgraded\n")
    stored, _ = store.take()
    assert [item.name for item in stored] == ["starts"]


@pytest.mark.root
def test_a_node_that_is_killed_waits_and_one_that_is_told_to_end_does_not(tmp_path: Path) -> None:
    with Node(anywhere(), "web-1", tmp_path, None, {"metrics": {"listen": None}}) as node:
        for _ in range(3):
            node.kill_daemon()
        assert [line for line in node.log_path.read_text().splitlines() if "in a row" in line][
            -1
        ].endswith("start 4 in a row, each within 10 s of the one before; begins in 0.2 s")
        os.kill(node.holder_pid(), signal.SIGUSR1)
        node.wait_ready()
        node.kill_daemon()
        said = node.log_path.read_text()
        assert said.count("in a row") == 4
        assert said.rindex("start 2 in a row") > said.rindex("start 4 in a row")


@pytest.mark.root
def test_a_node_that_waits_is_not_ended_by_a_reload(tmp_path: Path) -> None:
    with Node(anywhere(), "web-1", tmp_path, None, {"metrics": {"listen": None}}) as node:
        for _ in range(5):
            node.kill_daemon()
        os.kill(node.daemon_pid(), signal.SIGKILL)
        while "begins in 1.5 s" not in node.log_path.read_text():
            pass
        os.kill(node.holder_pid(), signal.SIGHUP)
        node.wait_ready()
        assert node.log_path.read_text().count("serves on") == 7


@pytest.mark.root
def test_a_node_that_starts_is_not_ended_by_a_reload(tmp_path: Path) -> None:
    with Node(anywhere(), "web-1", tmp_path, None, {"metrics": {"listen": None}}) as node:
        for _ in range(3):
            before = node.daemon_pid()
            os.kill(before, signal.SIGKILL)
            started = Path(f"/proc/{node.holder_pid()}/task/{node.holder_pid()}/children")
            while started.read_text().split() in ([], [str(before)]):
                pass
            pid = node.daemon_pid()
            os.kill(node.holder_pid(), signal.SIGHUP)
            node.wait_ready()
            assert node.daemon_pid() == pid
