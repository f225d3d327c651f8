# SPDX-License-Identifier: Apache-2.0
"""The service manager's side of things: readiness, signs of life, and fds that outlive the daemon.

systemd's notification protocol (sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3),
FileDescriptorStoreMax= in systemd.service(5)), which ``appliance.holder``
speaks as well: datagrams of ``KEY=value`` lines to $NOTIFY_SOCKET, with fds as
SCM_RIGHTS; at the next start the fds come back from number 3 on, their names
in $LISTEN_FDNAMES.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import struct
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from runtime.printable import printable

LISTEN_FDS_START = 3

# A manager that takes nothing for so long is stuck. What waits for it meanwhile is the
# daemon's event loop; the socket's queue is short, so it waits now and then for a busy one.
_STUCK_S = 1

# systemd allows 255 characters without ":". Ours are short because all names
# together are one environment variable, and the kernel ends those at 128 KiB.
_NAME = re.compile(r"[a-z0-9.-]{1,32}")


@dataclass(frozen=True, slots=True)
class StoredFd:
    """An fd that came back from the store; whoever takes it closes it."""

    name: str
    fd: int


class ServiceManager:
    """The way to whoever started this process; without one, every call does nothing."""

    def __init__(
        self,
        address: str | None,
        watchdog_s: float | None = None,
        stored_fds_max: int | None = None,
    ) -> None:
        """``watchdog_s``: without a sign of life for so long, it ends the daemon; None: never.

        ``stored_fds_max``: as many fds it keeps; None: it does not say (systemd before 254).
        """
        self.stored_fds_max = stored_fds_max
        self.watchdog_s = watchdog_s if address is not None else None
        self._socket: socket.socket | None = None
        if address is None:
            return
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        notify.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _STUCK_S, 0))
        try:
            # "@" stands for the NUL byte of an abstract address.
            notify.connect("\0" + address[1:] if address.startswith("@") else address)
        except OSError:
            notify.close()
            raise
        self._socket = notify

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Self:
        """Connect to $NOTIFY_SOCKET, and take it from the environment of our children."""
        usec = environ.pop("WATCHDOG_USEC", "")
        # Inherited through a process that it was meant for, it says another pid.
        ours = environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_s = int(usec) / 1e6 if ours and usec.isdecimal() and int(usec) > 0 else None
        fds = environ.pop("FDSTORE", "")
        return cls(
            environ.pop("NOTIFY_SOCKET", None), watchdog_s, int(fds) if fds.isdecimal() else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def is_there(self) -> bool:
        """Whether there is one: who is told, and keeps fds."""
        return self._socket is not None

    def ready(self) -> None:
        """Say that the daemon serves."""
        self._tell(["READY=1"])

    def reloading(self) -> None:
        """Say that the configuration is being read again; ready() ends it."""
        now_us = time.monotonic_ns() // 1000
        self._tell(["RELOADING=1", f"MONOTONIC_USEC={now_us}"])

    def alive(self) -> None:
        """Give a sign of life."""
        self._tell(["WATCHDOG=1"], socket.MSG_DONTWAIT)

    def status(self, text: str) -> None:
        """Say in one line how the daemon is."""
        self._tell([f"STATUS={printable(text)}"], socket.MSG_DONTWAIT)

    def stopping(self) -> None:
        """Say that the daemon ends because it was told to."""
        self._tell(["STOPPING=1"])

    def store(self, name: str, fd: int) -> None:
        """Have a duplicate of an fd kept under a name; the caller keeps its own.

        OSError if it cannot be handed over: TimeoutError if the manager is stuck. That it was
        handed over does not say that it is kept: what is one too many for the manager
        (``stored_fds_max``) it drops, and tells nobody but its own log.
        """
        # FDPOLL=0: an mmapable BPF map reports an error when polled, for which
        # the manager would drop it; and nothing of ours ever hangs up.
        self._notify(["FDSTORE=1", f"FDNAME={_checked(name)}", "FDPOLL=0"], [fd])

    def remove(self, name: str) -> None:
        """Have all fds of that name closed."""
        self._notify(["FDSTOREREMOVE=1", f"FDNAME={_checked(name)}"])

    def _tell(self, assignments: Sequence[str], flags: int = 0) -> None:
        # A manager that is gone, or does not listen, is no reason to end.
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send("\n".join(assignments).encode(), flags)

    def _notify(self, assignments: Sequence[str], fds: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        try:
            socket.send_fds(self._socket, ["\n".join(assignments).encode()], list(fds))
        except BlockingIOError as error:
            raise TimeoutError(
                errno.ETIMEDOUT, f"the service manager took no message for {_STUCK_S} s"
            ) from error


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"fd name {name!r}; allowed: 1 to 32 of a-z 0-9 . -")
    return name


def take_stored_fds(environ: MutableMapping[str, str]) -> list[StoredFd]:
    """Take the fds that the service manager kept, in its order; at most once.

    $LISTEN_PID says whom they are for: a process that inherited the variables
    from its parent, but not the fds, gets none.
    """
    pid = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "0")
    names = environ.pop("LISTEN_FDNAMES", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    stored = []
    given = names.split(":") if names else []
    for i in range(int(count)):
        fd = LISTEN_FDS_START + i
        os.set_inheritable(fd, False)
        stored.append(StoredFd(given[i] if i < len(given) else "", fd))
    return stored
