# SPDX-License-Identifier: Apache-2.0
"""A process beside a daemon: begun again when it ends, and gone when the daemon is, however that ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

# What it is told it says, with its pid; "fail" and "end" it does.
PROGRAM = """
import os, socket, sys
import runtime.forked
from runtime.forked import Forked, leave_signals_to_the_parent
from runtime.log import Log

runtime.forked._AGAIN_S = 0.01

def work(ours):
    ours.send(b"begins %d" % os.getpid())
    while said := ours.recv(100):
        if said == b"fail":
            raise RuntimeError("as it was told")
        if said == b"exit":
            raise SystemExit(3)
        ours.send(said + b" %d" % os.getpid())

if sys.argv[2:]:
    leave_signals_to_the_parent()
    work(socket.socket(fileno=int(sys.argv[2])))
    sys.exit()
again = [sys.executable, "-c", sys.argv[1], sys.argv[1]]
with Forked(work, again, os.environ, "the other", Log.of("daemon")) as forked:
    print(forked.socket.recv(100).decode(), flush=True)
    for line in sys.stdin:
        forked.socket.send(line.strip().encode())
        print(forked.socket.recv(100).decode(), flush=True)
print("ended", flush=True)
"""


class Daemon:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.other = self.pid_of(self.hears())

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.hears()

    @staticmethod
    def pid_of(said: str) -> int:
        return int(said.split()[1])

    def end(self) -> tuple[str, str]:
        return self.process.communicate(timeout=30)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    here = Daemon()
    yield here
    here.process.kill()
    here.process.communicate()


def wait_for_end_of(pid: int) -> None:
    """Of a process that is no child of ours."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], 30)[0]
    finally:
        os.close(pidfd)


def test_it_hears_and_says_and_ends_when_it_is_told(daemon: Daemon) -> None:
    assert daemon.tell("hello") == f"hello {daemon.other}"
    out, err = daemon.end()
    assert (out, err) == ("ended\n", "")
    wait_for_end_of(daemon.other)


@pytest.mark.parametrize(("how", "why"), [("fail", "an error"), ("exit", "an error")])
def test_it_is_begun_again_where_it_fails(daemon: Daemon, how: str, why: str) -> None:
    begun = daemon.tell(how)
    assert begun.startswith("begins")
    again = daemon.pid_of(begun)
    assert again != daemon.other
    assert daemon.tell("hello") == f"hello {again}"
    out, err = daemon.end()
    assert out == "ended\n"
    assert f"daemon: error: the other ended by {why}; again in 0.01 s" in err
    assert ("RuntimeError: as it was told" in err) == (how == "fail")


def test_it_is_begun_again_where_it_is_killed(daemon: Daemon) -> None:
    os.kill(daemon.other, signal.SIGKILL)
    # What was under way is lost; what is said after that it hears.
    begun = daemon.tell("hello")
    assert begun.startswith("begins")
    assert daemon.pid_of(begun) != daemon.other
    _, err = daemon.end()
    assert "the other ended by signal 9" in err


def test_signals_are_for_the_daemon_alone(daemon: Daemon) -> None:
    for how in ("hello", "fail"):
        pid = daemon.pid_of(daemon.tell(how))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        assert daemon.tell("hello") == f"hello {pid}"


@pytest.mark.parametrize("how", ["hello", "fail"])
def test_it_goes_with_the_daemon_that_is_killed(daemon: Daemon, how: str) -> None:
    pid = daemon.pid_of(daemon.tell(how))
    daemon.process.kill()
    wait_for_end_of(pid)
