# SPDX-License-Identifier: Apache-2.0
"""Processes, told apart for good: by a pidfd while they live, by pid and start time over a restart."""

from __future__ import annotations

import errno
import os
import select
import socket
from pathlib import Path

from runtime.unix_socket import is_hung_up

# As in <asm-generic/socket.h> of Linux 6.5 and later, which x86 and arm64 use.
SO_PEERPIDFD = 77

# What kernels say, one or the other, of a process that connected and was reaped.
_REAPED = (errno.ESRCH, errno.EINVAL, errno.ENODATA)


def pidfd_of_peer(connection: socket.socket, pid: int) -> int:
    """Open a pidfd of the process that connected; ProcessLookupError if it is gone.

    From Linux 6.5 on, the kernel knows which process that was. Before, only its
    pid is known, which is another's once the process was reaped. But while the
    connection is open, somebody holds its other end: the process that
    connected, unless it has given that end away. What remains before 6.5: a
    process connects, hands its end to another, exits, and its pid is taken anew,
    all before the connection is accepted. What is attached by it passes for the
    new owner of the pid, who then cannot attach while the connection lasts.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in _REAPED:
            raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone") from error
        if error.errno != errno.ENOPROTOOPT:
            raise
    pidfd = os.pidfd_open(pid)
    # In this order: now the pid cannot become another's any more.
    if is_hung_up(connection):
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone")
    return pidfd


def pidfd_if_same(pid: int, start_ticks: int) -> int | None:
    """Open a pidfd of the process that started then; None if it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    is_same = False
    try:
        is_same = start_ticks_of(pid, pidfd) == start_ticks
    except ProcessLookupError:
        pass
    finally:
        if not is_same:
            os.close(pidfd)
    return pidfd if is_same else None


def start_ticks_of(pid: int, pidfd: int) -> int:
    """When a process started, in clock ticks since boot; ProcessLookupError if it is gone.

    PermissionError where /proc does not show it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError) as error:
        # In this order: it is in /proc until it was reaped, which is after its exit.
        if not has_exited(pidfd):
            raise PermissionError(
                errno.EACCES, "/proc hides it from this user (hidepid=, ProtectProc=)"
            ) from error
        raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone") from error
    # In this order: while it has not exited, the pid is its own, and so was what was read.
    if has_exited(pidfd):
        raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone")
    # The second field, the name, may hold anything, parentheses too.
    return int(stat.rpartition(b")")[2].split()[19])


def has_exited(pidfd: int) -> bool:
    """Whether a process has come to its end; it may still wait for its parent to look."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
