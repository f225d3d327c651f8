# SPDX-License-Identifier: Apache-2.0
"""What a daemon stored comes back to it after its death; what was told to end, ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.service_manager import ServiceManager, take_stored_fds

# A daemon: says on its standard output what it was given, then does as it is told
# on its standard input, a line of Python each.
DAEMON = """
import os, signal, sys
from runtime.service_manager import ServiceManager, take_stored_fds

def content(fd):
    return os.pread(fd, 100, 0).decode()

given = take_stored_fds(os.environ)
print("pid", os.getpid(), *(f"{s.name}={content(s.fd)}" for s in given), flush=True)
with ServiceManager.from_environment(os.environ) as manager:
    def memfd(text):
        fd = os.memfd_create("test")
        os.write(fd, text.encode())
        return fd
    for line in sys.stdin:
        exec(line)
        print("done", flush=True)
"""


class HeldDaemon:
    """A daemon under a holder, and the pipe by which it is told what to do."""

    def __init__(
        self, *command: str, notify: Path | None = None, watchdog_s: float | None = None
    ) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"}
        if notify is not None:
            environment["NOTIFY_SOCKET"] = str(notify)
        watchdog = [] if watchdog_s is None else ["--watchdog-s", str(watchdog_s)]
        self.holder = subprocess.Popen(
            [sys.executable, "-m", "appliance.holder", *watchdog, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )

    def line(self) -> str:
        assert self.holder.stdout is not None
        return self.holder.stdout.readline().rstrip("\n")

    def do(self, statement: str) -> None:
        self.send(statement)
        assert self.line() == "done"

    def send(self, statement: str) -> None:
        assert self.holder.stdin is not None
        self.holder.stdin.write(statement + "\n")

    def started(self) -> tuple[int, list[str]]:
        _, pid, *stored = self.line().split(" ")
        return int(pid), stored


@contextlib.contextmanager
def held_daemon(
    *command: str, notify: Path | None = None, watchdog_s: float | None = None
) -> Iterator[HeldDaemon]:
    daemon = HeldDaemon(
        *(command or (sys.executable, "-c", DAEMON)), notify=notify, watchdog_s=watchdog_s
    )
    with daemon.holder:
        try:
            yield daemon
        finally:
            daemon.holder.kill()


def test_fds_survive_a_killed_daemon() -> None:
    with held_daemon() as daemon:
        pid, stored = daemon.started()
        assert stored == []
        daemon.do("manager.store('client-1.arena', memfd('one'))")
        daemon.do("manager.store('store', memfd('two'))")
        os.kill(pid, signal.SIGKILL)
        again, stored = daemon.started()
        assert again != pid
        assert stored == ["client-1.arena=one", "store=two"]
        # Not only once.
        os.kill(again, signal.SIGKILL)
        _, stored = daemon.started()
        assert stored == ["client-1.arena=one", "store=two"]


def test_what_was_removed_does_not_come_back() -> None:
    with held_daemon() as daemon:
        daemon.started()
        for name in ("a", "b", "a"):
            daemon.do(f"manager.store('{name}', memfd('{name}'))")
        daemon.do("manager.remove('a')")
        daemon.send("os._exit(7)")
        assert daemon.started()[1] == ["b=b"]


def test_a_message_sent_just_before_death_counts() -> None:
    with held_daemon() as daemon:
        daemon.started()
        daemon.send("manager.store('last', memfd('words')); os.kill(os.getpid(), signal.SIGKILL)")
        assert daemon.started()[1] == ["last=words"]


def test_many_fds_keep_their_names_and_order() -> None:
    with held_daemon() as daemon:
        daemon.started()
        daemon.do("for i in range(300): manager.store(f'fd-{i}', memfd(str(i)))")
        daemon.send("os._exit(1)")
        pid, stored = daemon.started()
        assert stored == [f"fd-{i}={i}" for i in range(300)]
        # Once each: what a daemon closes is gone.
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert len([link for link in links if link.startswith("/memfd:")]) == 300


@pytest.mark.parametrize("status", [0, 2])
def test_holder_ends_with_a_daemon_that_ended_by_itself(status: int) -> None:
    with held_daemon() as daemon:
        daemon.started()
        daemon.do("manager.store('a', memfd('a'))")
        daemon.send(f"os._exit({status})")
        assert daemon.holder.wait() == status
        assert daemon.holder.stderr is not None
        said = daemon.holder.stderr.read()
        assert f"ended with status {status}; ends too, and lets go of 1 file desc" in said


# A daemon ends cleanly when it is told to, or dies of it before it can take the signal.
@pytest.mark.parametrize("taken", [True, False])
def test_a_daemon_is_started_again_with_its_fds_when_the_holder_is_told_so(*, taken: bool) -> None:
    with held_daemon() as daemon:
        pid, _ = daemon.started()
        daemon.do("manager.store('a', memfd('a'))")
        if taken:
            daemon.do("signal.signal(signal.SIGTERM, lambda *_: os._exit(0))")
        daemon.holder.send_signal(signal.SIGUSR1)
        again, stored = daemon.started()
        assert again != pid
        assert stored == ["a=a"]
        # It holds for once.
        daemon.send("os._exit(0)")
        assert daemon.holder.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR2])
def test_what_a_daemon_takes_in_passing_the_holder_passes_on_and_stays(
    number: signal.Signals,
) -> None:
    with held_daemon() as daemon:
        pid, _ = daemon.started()
        # Before it is taken, it ends nothing.
        os.kill(pid, number)
        daemon.do(f"signal.signal({int(number)}, lambda *_: print('took', flush=True))")
        daemon.holder.send_signal(number)
        assert daemon.line() == "took"
        daemon.do("pass")
        daemon.send("os._exit(0)")
        assert daemon.holder.wait() == 0


def test_a_daemon_that_cannot_go_on_ends_the_holder_though_told_to_start_again() -> None:
    with held_daemon() as daemon:
        daemon.started()
        daemon.do("signal.signal(signal.SIGTERM, lambda *_: os._exit(2))")
        daemon.holder.send_signal(signal.SIGUSR1)
        assert daemon.holder.wait() == 2


def test_a_daemon_that_cannot_go_on_is_started_again_if_one_was_ready() -> None:
    """Somebody made its configuration a bad one, and may mend it."""
    with held_daemon() as daemon:
        daemon.started()
        daemon.do("manager.store('a', memfd('a'))")
        daemon.do("manager.ready()")
        daemon.send("os._exit(2)")
        assert daemon.started()[1] == ["a=a"]
        daemon.send("os._exit(0)")
        assert daemon.holder.wait() == 0
        assert daemon.holder.stderr is not None
        assert "ended with status 2; again in 1 s" in daemon.holder.stderr.read()


def test_a_daemon_that_is_never_ready_is_started_again() -> None:
    with held_daemon(watchdog_s=0.2) as daemon:
        first, _ = daemon.started()
        assert daemon.started()[0] != first
        daemon.holder.terminate()
        daemon.holder.wait()
        assert daemon.holder.stderr is not None
        assert "for 0.6 s; killed" in daemon.holder.stderr.read()


def test_sigterm_ends_both() -> None:
    with held_daemon() as daemon:
        pid, _ = daemon.started()
        daemon.holder.send_signal(signal.SIGTERM)
        assert daemon.holder.wait() == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_holder_leaves_no_daemon_behind() -> None:
    with held_daemon() as daemon:
        daemon.started()
        daemon.holder.kill()
        # The pipe ends when the last process that has it, the daemon, is gone.
        assert daemon.line() == ""


def test_a_command_that_is_not_there_is_a_clear_error() -> None:
    with held_daemon("/nonexistent/daemon") as daemon:
        assert daemon.holder.wait() == 2
        assert daemon.holder.stderr is not None
        assert "cannot run /nonexistent/daemon: No such file" in daemon.holder.stderr.read()


def test_readiness_is_passed_on(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(address))
        with held_daemon(notify=address) as daemon:
            pid, _ = daemon.started()
            daemon.do("manager.ready()")
            assert notify.recv(100) == b"READY=1"
            os.kill(pid, signal.SIGKILL)
            daemon.started()
            daemon.do("manager.ready()")
            assert notify.recv(100) == b"READY=1"


def test_strangers_cannot_store_fds() -> None:
    with held_daemon() as daemon:
        daemon.started()
        daemon.send("print(manager._socket.getpeername()[1:].decode(), flush=True)")
        name = "@" + daemon.line()
        assert daemon.line() == "done"
        with ServiceManager(name) as stranger:
            stranger.store("foreign", 0)
        daemon.do("manager.store('own', memfd('own'))")
        daemon.send("os._exit(1)")
        assert daemon.started()[1] == ["own=own"]


def test_a_manager_that_is_stuck_stops_no_daemon(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stuck,
        Path(os.devnull).open("rb") as something,
    ):
        stuck.bind(str(path))
        with ServiceManager(str(path)) as manager:
            with pytest.raises(TimeoutError, match="took no message for 1 s"):
                for _ in range(10_000):  # the longest queue that a kernel is set to is far shorter
                    manager.store("one", something.fileno())
            with pytest.raises(TimeoutError):
                manager.remove("one")
            manager.status("goes on")
            assert len(stuck.recv(1000)) > 0  # it goes on, too
            manager.remove("one")


def test_without_a_manager_nothing_happens() -> None:
    environment: dict[str, str] = {}
    assert take_stored_fds(environment) == []
    with ServiceManager.from_environment(environment) as manager:
        assert not manager.is_there
        manager.ready()
        manager.store("name", 0)
        manager.remove("name")


def test_fds_of_another_process_are_not_taken() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
    assert take_stored_fds(environment) == []
    assert environment == {}


@pytest.mark.parametrize("name", ["", "a:b", "a\nREADY=1", "x" * 33, "Ä"])
def test_names_that_would_break_the_protocol_are_refused(name: str) -> None:
    with ServiceManager(None) as manager, pytest.raises(ValueError, match="fd name"):
        manager.store(name, 0)
