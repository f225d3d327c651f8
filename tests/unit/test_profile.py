# SPDX-License-Identifier: Apache-2.0
"""SIGUSR2 has a daemon write down where its event loop spends its time."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.log import Entry, Level, Log
from runtime.profile import Profiler
from testbed.ports import free_port

LINE = re.compile(r"(\S+) ([1-9][0-9]*)")


class Said:
    """What was logged; each line can be awaited."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._came = threading.Condition()
        self.log = Log(self._write)

    def _write(self, entry: Entry) -> None:
        with self._came:
            self.entries.append(entry)
            self._came.notify_all()

    def has(self, text: str) -> bool:
        return any(text in entry.message for entry in self.entries)

    def wait_for(self, text: str) -> None:
        with self._came:
            assert self._came.wait_for(lambda: self.has(text), 60)


def stacks(path: Path) -> dict[str, int]:
    found = {}
    for line in path.read_text().splitlines():
        match = LINE.fullmatch(line)
        assert match is not None, line
        found[match[1]] = int(match[2])
    return found


def spin(until: Callable[[], bool]) -> None:
    while not until():
        sum(range(100))


def test_what_the_loops_thread_does_is_in_it_and_who_called_it(tmp_path: Path) -> None:
    said, path = Said(), tmp_path / "x.profile"
    profiler = Profiler(path, said.log, samples=100, every_s=0.001)
    os.umask(os.umask(0o022))  # it must not depend on this
    profiler.begin()
    spin(lambda: said.has("the profile is in"))
    found = stacks(path)
    assert sum(found.values()) == 100
    spinning = [stack for stack in found if ":spin" in stack]
    assert sum(found[stack] for stack in spinning) > 90
    here = test_what_the_loops_thread_does_is_in_it_and_who_called_it.__qualname__
    assert all(f"{__name__}:{here};{__name__}:spin" in stack for stack in spinning)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert said.entries[-1].message.startswith(f"the profile is in {path}: ")


def test_a_loop_that_waits_is_seen_to_wait(tmp_path: Path) -> None:
    said, path = Said(), tmp_path / "x.profile"

    async def run() -> None:
        Profiler(path, said.log, samples=20, every_s=0.001).begin()
        await asyncio.to_thread(said.wait_for, "the profile is in")

    asyncio.run(run())
    assert any("selectors:" in stack for stack in stacks(path))


def test_a_second_one_meanwhile_is_told_and_ignored(tmp_path: Path) -> None:
    said, path = Said(), tmp_path / "x.profile"
    profiler = Profiler(path, said.log, samples=10**9, every_s=0.0001)
    profiler.begin()
    profiler.begin()
    assert said.has("a profile is being taken already")
    assert said.entries[-1].level is Level.WARNING
    profiler.end()
    assert not path.exists()
    # One that is over makes room for the next, which replaces it.
    again = Profiler(path, said.log, samples=3, every_s=0.0001)
    for _ in range(20):
        said.entries.clear()
        again.begin()
        said.wait_for("the profile is in")
        assert not said.has("already")
    assert sum(stacks(path).values()) == 3


def test_ways_and_depths_without_end_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.profile._FRAMES_MAX", 5)
    monkeypatch.setattr("runtime.profile._STACKS_MAX", 1)
    said, path = Said(), tmp_path / "x.profile"
    profiler = Profiler(path, said.log, samples=200, every_s=0.0005)
    profiler.begin()

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        else:
            sum(range(2000))

    while not said.has("the profile is in"):
        deep(50)
        deep(0)
    found = stacks(path)
    assert len(found) <= 2
    assert sum(found.values()) == 200
    assert all(stack.count(";") < 5 for stack in found)


@pytest.mark.parametrize("in_the_way", ["directory", "link"])
def test_what_is_in_the_way_is_told_and_ends_nothing(tmp_path: Path, in_the_way: str) -> None:
    said, path = Said(), tmp_path / "x.profile"
    new = tmp_path / "x.profile.new"
    if in_the_way == "directory":
        new.mkdir()
    else:
        new.symlink_to(tmp_path / "elsewhere")
    profiler = Profiler(path, said.log, samples=1, every_s=0.0001)
    profiler.begin()
    if in_the_way == "directory":
        said.wait_for("the profile cannot be written")
        assert said.entries[-1].level is Level.ERROR
    else:
        said.wait_for("the profile is in")
    # Nothing was written through it.
    assert not (tmp_path / "elsewhere").exists()


DAEMONS = {
    "coordinator": "listen: 127.0.0.1:{port}\naccess: {{socket: null}}\nquery: {{listen: null}}\n"
    "metrics: {{listen: null}}\nstore: {{path: {directory}/t.sqlite}}\nlog_format: json\n",
    "appliance": "node: n\nsocket: {directory}/t.sock\npool_bytes: 4MiB\nmetrics: {{listen: null}}\n",
}


@pytest.mark.parametrize("module", DAEMONS)
def test_a_daemon_that_gets_the_signal_writes_it_down_and_goes_on(
    module: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(DAEMONS[module].format(directory=tmp_path, port=free_port()))
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    daemon = subprocess.Popen(
        [sys.executable, "-m", module, "--config", config],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")},
    )
    assert daemon.stderr is not None

    def told(text: str) -> None:
        assert daemon.stderr is not None
        while text not in (line := daemon.stderr.readline()):
            assert line, f"it ended before it said: {text}"

    try:
        while b"READY=1" not in manager.recv(4096):
            pass
        daemon.send_signal(signal.SIGUSR2)
        told("takes a profile of the event loop, for 10 s")
        daemon.send_signal(signal.SIGUSR2)
        told("a profile is being taken already")
        told(f"the profile is in {tmp_path}/t.profile")
        assert any(
            ":supervise" in stack or "selectors:" in stack
            for stack in stacks(tmp_path / "t.profile")
        )
        daemon.send_signal(signal.SIGUSR2)
        told("takes a profile")
        daemon.terminate()
        daemon.stderr.read()
        assert daemon.wait() == 0
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stderr.close()
        manager.close()
