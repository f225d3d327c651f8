# SPDX-License-Identifier: Apache-2.0
"""``backsight-holder``: keeps a daemon running, and its file descriptors over restarts.

    backsight-holder -- backsight-node --config node.yaml

A service manager in small. Where there is no systemd (containers, tests, the demo) this
process takes its place: it gives the daemon a $NOTIFY_SOCKET, keeps the fds that the daemon
stores, starts it again when it dies of anything but being told to, and hands
it the fds as $LISTEN_FDS. SIGTERM, SIGINT, SIGHUP and SIGUSR2 are passed on. SIGUSR1 ends
the daemon by SIGTERM and starts it again, with the fds: for another version or
configuration. It ends, with the daemon's exit status, when the daemon ends cleanly, or with
status 2 before any was ready, as it does for a bad configuration; what it kept is gone then.
Once one was ready, a configuration that has become bad is waited for to be mended.
The daemon's READY=1 is passed on to the holder's own $NOTIFY_SOCKET, if it has one. With
--watchdog-s, a daemon that was ready and gives no sign of life for so long is
killed, and started again; so is one that is not ready after three times as long.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import NoReturn, Self

from runtime import VERSION
from runtime.open_files import raise_open_files_limit
from runtime.service_manager import LISTEN_FDS_START, ServiceManager
from runtime.settings.node import stored_fds_max

_PROGRAM = "backsight-holder"

# As systemd's Restart=on-failure: how a service may end that was told to.
_CLEAN_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
_ENDING = (signal.SIGINT, signal.SIGTERM)
_FORWARDED = (signal.SIGHUP, signal.SIGUSR2, *_ENDING)
_RESTART = signal.SIGUSR1
_TAKEN = (*_FORWARDED, _RESTART, signal.SIGCHLD)

# A bad configuration or usage: somebody must mend it first.
_EXIT_USAGE = 2
_RESTART_USAGE_S = 1.0

# As systemd's RestartSec= by default: a node that fails again and again paces itself.
_RESTART_S = 0.1

# A node is there in half a second, on a machine that is overloaded in some seconds.
_WATCHDOGS_TO_START = 3

_FDS_MAX = stored_fds_max()

_MESSAGE_BYTES_MAX = 4096
_MESSAGE_FDS_MAX = 16
_CREDENTIALS_BYTES = 12  # struct ucred: pid, uid, gid
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class _Held:
    name: str
    fd: int


class Holder:
    """Runs one daemon. Bring it up with ``with``, then run()."""

    def __init__(
        self, command: Sequence[str], manager: ServiceManager, watchdog_s: float | None = None
    ) -> None:
        self._watchdog_s = watchdog_s
        self._patience_s = 0.0
        self._alive_until: float | None = None
        self._command = list(command)
        self._manager = manager
        self._held: list[_Held] = []
        self._child: int | None = None
        self._was_ready = False
        self._told_to_end = False
        self._told_to_restart = False
        # Abstract, and so gone with us; the kernel chooses the name.
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._notify.bind("")
        self._notify.setblocking(False)
        self._signals_in, self._signals_out = socket.socketpair()
        self._signals_in.setblocking(False)
        self._signals_out.setblocking(False)

    def __enter__(self) -> Self:
        for number in _TAKEN:
            signal.signal(number, _wake_only)
        signal.set_wakeup_fd(self._signals_out.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number in _TAKEN:
            signal.signal(number, signal.SIG_DFL)
        if self._child is not None:
            os.kill(self._child, signal.SIGTERM)
            os.waitpid(self._child, 0)
        for held in self._held:
            os.close(held.fd)
        self._notify.close()
        self._signals_in.close()
        self._signals_out.close()

    def run(self) -> int:
        """Keep the daemon running until it ends cleanly; its exit status."""
        while True:
            status = self._run_once()
            code = os.waitstatus_to_exitcode(status)
            how = f"with status {code}" if code >= 0 else f"by signal {-code}"
            is_clean = code == 0 or -code in _CLEAN_SIGNALS
            restarts = self._told_to_restart and is_clean
            self._told_to_restart = False
            is_hopeless = code == _EXIT_USAGE and not self._was_ready
            if self._told_to_end or is_hopeless or (is_clean and not restarts):
                self._say_end(f"{self._command[0]} ended {how}")
                return code if code >= 0 else 128 - code
            if restarts:
                self._say(f"{self._command[0]} ended {how}; again, as told")
                continue
            wait_s = _RESTART_USAGE_S if code == _EXIT_USAGE else _RESTART_S
            self._say(f"{self._command[0]} ended {how}; again in {wait_s:g} s")
            if self._wait_told_to_end(wait_s):
                self._say_end("told to end")
                return 128 + signal.SIGTERM

    def _say_end(self, why: str) -> None:
        """With what goes: the pool, where that was a node's."""
        self._say(f"{why}; ends too, and lets go of {len(self._held)} file descriptors")

    def _say(self, text: str) -> None:
        print(f"{_PROGRAM}: {text}", file=sys.stderr, flush=True)

    def _run_once(self) -> int:
        self._await_life(_WATCHDOGS_TO_START)
        self._child = self._spawn()
        poll = select.poll()
        poll.register(self._notify, select.POLLIN)
        poll.register(self._signals_in, select.POLLIN)
        while True:
            poll.poll(self._poll_timeout_ms())
            self._take_messages()
            self._take_signals()
            self._kill_if_overdue(self._child)
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid:
                # What it said last may have come after our last look.
                self._take_messages()
                self._child = None
                return status

    def _poll_timeout_ms(self) -> float | None:
        if self._alive_until is None:
            return None
        return max(0.0, 1000 * (self._alive_until - time.monotonic()))

    def _await_life(self, watchdogs: int = 1) -> None:
        if self._watchdog_s is not None:
            self._patience_s = watchdogs * self._watchdog_s
            self._alive_until = time.monotonic() + self._patience_s

    def _kill_if_overdue(self, child: int) -> None:
        if self._alive_until is not None and time.monotonic() >= self._alive_until:
            self._say(f"no sign of life from {self._command[0]} for {self._patience_s:g} s; killed")
            self._alive_until = None
            # A signal that it could take would find nobody who takes it.
            os.kill(child, signal.SIGKILL)

    def _wait_told_to_end(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._told_to_end and (left := deadline - time.monotonic()) > 0:
            select.select([self._signals_in], [], [], left)
            self._take_signals()
        return self._told_to_end

    def _take_signals(self) -> None:
        try:
            numbers = self._signals_in.recv(4096)
        except BlockingIOError:
            return
        for number in numbers:
            if number == _RESTART and self._child is not None:
                # Without one it is about to be started anyway.
                self._told_to_restart = True
                os.kill(self._child, signal.SIGTERM)
            if number not in _FORWARDED:
                continue
            if number in _ENDING:
                self._told_to_end = True
            if self._child is not None:
                os.kill(self._child, number)

    def _spawn(self) -> int:
        name = "@" + self._notify.getsockname()[1:].decode()
        holder = os.getpid()
        # What comes for the child before it has said how it takes signals waits until then.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
        pid = os.fork()
        if pid == 0:
            self._exec(name, holder, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _exec(
        self, notify_name: str, holder: int, mask: Iterable[signal.Signals | int]
    ) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            for number in _TAKEN:
                # A daemon that does not take a reload yet reads its configuration later anyway; to end
                # by it would be to end cleanly.
                is_ignored = number in (signal.SIGHUP, signal.SIGUSR2)
                signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            # A group of its own: Ctrl-C reaches it once, through the holder.
            os.setpgid(0, 0)
            # Nothing is left over when the holder itself is killed.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != holder:
                os._exit(1)
            environment = os.environ | {"NOTIFY_SOCKET": notify_name, "FDSTORE": str(_FDS_MAX)}
            if self._watchdog_s is not None:
                environment |= {
                    "WATCHDOG_USEC": str(int(self._watchdog_s * 1e6)),
                    "WATCHDOG_PID": str(os.getpid()),
                }
            if self._held:
                # First out of the way of the numbers that they shall get.
                high = LISTEN_FDS_START + len(self._held)
                moved = [_dup_above(held.fd, high) for held in self._held]
                for i, fd in enumerate(moved):
                    os.dup2(fd, LISTEN_FDS_START + i, inheritable=True)
                environment |= {
                    "LISTEN_PID": str(os.getpid()),
                    "LISTEN_FDS": str(len(self._held)),
                    "LISTEN_FDNAMES": ":".join(held.name for held in self._held),
                }
            os.execvpe(self._command[0], self._command, environment)
        except OSError as error:
            self._say(f"cannot run {self._command[0]}: {error.strerror}")
        finally:
            os._exit(_EXIT_USAGE)

    def _take_messages(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self._notify.recvmsg(
                    _MESSAGE_BYTES_MAX,
                    socket.CMSG_SPACE(_CREDENTIALS_BYTES) + socket.CMSG_SPACE(4 * _MESSAGE_FDS_MAX),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                return
            fds: list[int] = []
            sender = None
            for level, kind, content in ancillary:
                if level != socket.SOL_SOCKET:
                    continue
                if kind == socket.SCM_RIGHTS:
                    fds += memoryview(content[: len(content) & ~3]).cast("i").tolist()
                elif kind == socket.SCM_CREDENTIALS:
                    sender = int.from_bytes(content[:4], sys.byteorder)
            # Anybody in our network namespace can write to an abstract socket.
            if sender != self._child:
                for fd in fds:
                    os.close(fd)
                continue
            self._take_message(data.decode(errors="replace"), fds)

    def _take_message(self, text: str, fds: list[int]) -> None:
        said = dict(line.partition("=")[::2] for line in text.splitlines())
        name = said.get("FDNAME", "stored")
        if said.get("FDSTORE") == "1":
            room = max(0, _FDS_MAX - len(self._held))
            self._held += [_Held(name, fd) for fd in fds[:room]]
            if fds[room:]:
                self._say(f"keeps {_FDS_MAX} fds already; refused {name}")
            fds = fds[room:]
        for fd in fds:
            os.close(fd)
        if said.get("FDSTOREREMOVE") == "1":
            for held in self._held:
                if held.name == name:
                    os.close(held.fd)
            self._held = [held for held in self._held if held.name != name]
        if "1" in (said.get("READY"), said.get("WATCHDOG")):
            self._await_life()
        if said.get("READY") == "1":
            self._was_ready = True
            self._manager.ready()


def _wake_only(number: int, frame: FrameType | None) -> None:
    """A handler, so that the signal reaches the wake-up fd."""


def _dup_above(fd: int, minimum: int) -> int:
    """One that the daemon does not get, which has its own by then."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, minimum)


def argument_parser(program: str, description: str) -> argparse.ArgumentParser:
    """What its command line is."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument(
        "--watchdog-s",
        type=float,
        metavar="SECONDS",
        help="start it again when it gives no sign of life for so long (default: never)",
    )
    parser.add_argument("--version", action="version", version=f"{program} {VERSION}")
    parser.add_argument("command", nargs="+", help="the daemon and its arguments, after --")
    return parser


def main() -> int:
    """Run the command that follows ``--``."""
    arguments = argument_parser(_PROGRAM, __doc__.splitlines()[0]).parse_args()
    # Room for the fds of all clients, here and in the daemon.
    raise_open_files_limit()
    with (
        ServiceManager.from_environment(os.environ) as manager,
        Holder(arguments.command, manager, arguments.watchdog_s) as holder,
    ):
        return holder.run()


if __name__ == "__main__":
    sys.exit(main())
