# SPDX-License-Identifier: Apache-2.0
"""Unix sockets of the node: where one can be made, and who connects to it, as the kernel says."""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

_UCRED = struct.Struct("=iII")
_SO_PEERGROUPS = 59

# As much as Python's getsockopt() takes: 256 groups. Of a user with more, only
# the first counts.
_GROUPS_BYTES_MAX = 1024

_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who connected: of the moment of connect()."""

    pid: int
    uid: int
    groups: frozenset[int]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Who may attach: these users, and the members of these groups."""

    uids: frozenset[int]
    gids: frozenset[int]
    uid_ranges: tuple[range, ...] = ()
    gid_ranges: tuple[range, ...] = ()

    def admits(self, credentials: Credentials) -> bool:
        return (
            credentials.uid in self.uids
            or bool(credentials.groups & self.gids)
            or any(credentials.uid in uids for uids in self.uid_ranges)
            or any(gid in gids for gids in self.gid_ranges for gid in credentials.groups)
        )


def pid_of(connection: socket.socket) -> int:
    """Ask the kernel which process connected; 0 for one of a pid namespace that is not below ours."""
    return _ucred(connection)[0]


def uid_of(connection: socket.socket) -> int:
    """Ask the kernel whose process connected."""
    return _ucred(connection)[1]


def credentials_of(connection: socket.socket) -> Credentials:
    """Ask the kernel who connected."""
    pid, uid, gid = _ucred(connection)
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        groups = b""
    return Credentials(pid, uid, frozenset(memoryview(groups).cast("I").tolist()) | {gid})


def is_hung_up(connection: socket.socket) -> bool:
    """Whether nobody has the other end any more."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(happened & select.POLLHUP for _, happened in poll.poll(0))


def _ucred(connection: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _UCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return pid, uid, gid


def make_way(path: Path, key: str = "socket") -> None:
    """Check that a socket can be made there; OSError if nothing but a socket would have to go.

    ``key``: of the configuration, which names the path.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise OSError(
                f"{path}: the directory {path.parent} does not exist; make it, or name"
                f" another path as `{key}`"
            ) from None
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}") from error
    else:
        if not stat.S_ISSOCK(mode):
            raise OSError(
                f"{path}: exists, and is no socket; remove it, or name another path as `{key}`"
            )
    if not os.access(path.parent, os.W_OK):
        raise OSError(f"{path}: no permission to make a socket in {path.parent}")


@dataclass(frozen=True, slots=True)
class Listener:
    """A Unix socket that listens. ``is_ours``: made by us, so that its file goes with it."""

    socket: socket.socket
    path: Path
    is_ours: bool

    def close(self) -> None:
        """Nobody connects any more; to one that is not ours, until the next daemon."""
        if self.is_ours:
            # First, so that nobody connects to what is about to be closed.
            self.path.unlink(missing_ok=True)
        self.socket.close()


def listen(path: Path, kind: socket.SocketKind, key: str = "socket") -> Listener:
    """Listen on a Unix socket; one that a killed daemon left is replaced.

    OSError says what is in the way, and by which ``key`` another path is named. Anybody may connect: who may do what is
    decided by credentials.
    """
    make_way(path, key)
    taken = f"{path}: another daemon listens there; stop that one, or name another path as `{key}`"
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                pass
            except BlockingIOError as error:
                raise OSError(taken) from error
            else:
                raise OSError(taken)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return Listener(listener, path, is_ours=True)


def take_over(fd: int, path: Path, kind: socket.SocketKind) -> Listener:
    """Use a socket that the service manager listens on; it keeps it when we end.

    OSError if it is not one of that kind, or listens elsewhere than at ``path``.
    """
    given = socket.socket(fileno=fd)
    try:
        if (given.family, given.type) != (socket.AF_UNIX, kind) or not given.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            raise OSError(
                f"the service manager gave a socket that is no listening Unix socket of"
                f" {kind.name}; its unit needs ListenSequentialPacket={path}"
            )
        if given.getsockname() != str(path):
            raise OSError(
                f"the service manager listens at {given.getsockname()}, and `socket` says {path};"
                " make ListenSequentialPacket= of the socket unit and `socket` the same"
            )
        given.setblocking(False)
    except BaseException:
        given.close()
        raise
    return Listener(given, path, is_ours=False)
