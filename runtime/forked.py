# SPDX-License-Identifier: Apache-2.0
"""A part of a daemon in a process of its own, which is begun again when it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from runtime.log import Log

# Between two beginnings of what ends at once, at most.
_AGAIN_MAX_S = 30.0
_AGAIN_S = 0.5

# What lasted so long is begun again at once.
_LASTED_S = 60.0

_FD = struct.Struct("=i")


class Forked:
    """Runs ``work`` in another process, with one end of a socket; ``socket`` is the other end.

    It is a SOCK_SEQPACKET: each message is received whole, or not at all. ``work`` ends when it
    receives an empty message, which is that this process is gone, or wants it to end. If it ends
    before, or fails, it is begun again, with the same socket, on which messages may wait.

    To be made while this process has one thread: it is forked, so that both share the memory of
    what was imported until then. Later it has others, and a fork could take a lock that one of them
    holds. So what is begun again is a program: the command ``again``, with ``environment``, the
    descriptors that ``again_with`` has, and that of the socket as its last argument. It calls
    ``leave_signals_to_the_parent()`` first.
    """

    def __init__(
        self,
        work: Callable[[socket.socket], None],
        again: Sequence[str],
        environment: Mapping[str, str],
        name: str,
        log: Log,
        again_with: Sequence[int] = (),
    ) -> None:
        self.socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._again = again
        self._environment = environment
        self._again_with = again_with
        self._name = name
        self._log = log
        self._ended = threading.Event()
        # What the collector looks at is written to; what is frozen stays shared, and is not looked at.
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            _in_child(lambda: work(self._theirs), self.socket)
        self._keeper = threading.Thread(target=self._keep, args=(pid,), name="keeper", daemon=True)
        self._keeper.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Have it end, and wait until it has."""
        self._ended.set()
        self.socket.close()
        self._keeper.join()
        self._theirs.close()

    def _keep(self, pid: int) -> None:
        again_s = _AGAIN_S
        while True:
            begun_s = time.monotonic()
            _, status = os.waitpid(pid, 0)
            if status == 0 or self._ended.is_set():
                return
            if time.monotonic() - begun_s >= _LASTED_S:
                again_s = _AGAIN_S
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an error"
            self._log.error(f"{self._name} ended by {how}; again in {again_s:g} s")
            if self._ended.wait(again_s):
                return
            again_s = min(2 * again_s, _AGAIN_MAX_S)
            pid = self._begin_again()

    def _begin_again(self) -> int:
        theirs = self._theirs.fileno()
        # To itself: so it stays open there.
        kept = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in (theirs, *self._again_with)]
        command = [*self._again, str(theirs)]
        return os.posix_spawn(command[0], command, self._environment, file_actions=kept)


def leave_signals_to_the_parent() -> None:
    """They are sent to all processes of a service, or of a terminal; the parent says when to end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _in_child(do: Callable[[], None], not_ours: socket.socket) -> None:
    """Never returns: what the parent would do after is not for its child."""
    status = 1
    try:
        leave_signals_to_the_parent()
        not_ours.close()
        do()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - whatever it is, the process ends
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class Message(NamedTuple):
    """What the other end said, and a socket that it passed with that."""

    data: bytes
    passed: socket.socket | None = None


def next_message(ours: socket.socket) -> Message | None:
    """The next message, without waiting; empty: the other end is closed, None: there is none now."""
    with contextlib.suppress(BlockingIOError):
        try:
            data, passed, _, _ = ours.recvmsg(
                1 << 20, socket.CMSG_SPACE(_FD.size), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return Message(b"")
        fds = [_FD.unpack(fd)[0] for _, kind, fd in passed if kind == socket.SCM_RIGHTS]
        return Message(data, socket.socket(fileno=fds[0]) if fds else None)
    return None


def pass_on(ours: socket.socket, data: bytes, passed: socket.socket) -> None:
    """Say something, with a socket; OSError if the other end takes nothing now."""
    # Not send_fds() and recv_fds(), which forget their flags in Python 3.11.
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(passed.fileno()))
    ours.sendmsg([data], [rights], socket.MSG_DONTWAIT)
