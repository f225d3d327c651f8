# SPDX-License-Identifier: Apache-2.0
"""Where applications attach: one packet each way over a Unix socket (native/src/abi.h, "attach").

Whoever connects is untrusted: who it is, the kernel says (SO_PEERCRED,
SO_PEERGROUPS, SO_PEERPIDFD), not the message. Whatever is wrong is answered
with a status and a sentence for the person who runs the application, counted,
and the connection closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from protocol.messages import cut_utf8
from runtime.log import Log
from runtime.printable import printable

ABI_MAGIC = 0x54475342
ABI_VERSION = 2
"""The newest that the node speaks; an older one that it speaks too is what a client of it gets."""

ABI_OLDEST = 2
ABI_FEATURES = 0

_REQUEST = struct.Struct("=IIIiQ2Q64s")
_REPLY = struct.Struct("=IIiI2QQ128sQ")
_NEWS = struct.Struct("=IIQ")
_NEWS_POLICY = 2

# Of any version: a magic number and the newest that is spoken.
_OPENING = struct.Struct("=II")

# What version 1 had of a reply; its clients take no other size.
_REPLY_1_BYTES = 168

# A newer peer may say more than is known here.
_PACKET_BYTES_MAX = 4096
_UCRED = struct.Struct("=iII")
_SO_PEERGROUPS = 59

# As much as Python's getsockopt() takes: 256 groups. Of a user with more, only
# the first counts.
_GROUPS_BYTES_MAX = 1024

# Connections that have not said what they want. They cost an fd each, so their
# number and their time are bounded; an honest library asks at once.
_WAITING_MAX = 256
_REQUEST_TIMEOUT_S = 5.0

_BACKLOG = 1024

# Told of once each; more are a matter for the counter.
_REFUSED_USERS_MAX = 16


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connected, as the kernel says."""

    pid: int
    uid: int
    groups: frozenset[int]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Who may attach: these users, and the members of these groups."""

    uids: frozenset[int]
    gids: frozenset[int]

    def admits(self, peer: Peer) -> bool:
        return peer.uid in self.uids or bool(peer.groups & self.gids)


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for. ``token`` names an earlier attachment; None: a first one.

    ``version`` is what both speak, ``features`` are the bits that both know.
    """

    token: bytes | None
    service: str
    version: int = ABI_VERSION
    features: int = 0


@dataclass(frozen=True, slots=True)
class Attachment:
    """What it is given. No fds: it may go on with those that it has.

    ``policy`` is the fd of the policy table, which stays the host's.
    """

    token: bytes
    arena_bytes: int
    policy: int
    fds: tuple[int, ...] = ()

    @property
    def resumed(self) -> bool:
        return not self.fds


class AttachRefused(Exception):
    """The host of attachments says no: an errno, and why."""

    def __init__(self, status: int, message: str, *, version: int = ABI_VERSION) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.version = version
        """Of the client: it may understand no newer reply than that."""


class AttachHost(Protocol):
    """Who makes attachments (appliance.clients)."""

    def attach(self, peer: Peer, request: Request) -> Attachment:
        """Make or resume one. AttachRefused says why not. The caller closes the fds."""

    def hung_up(self, token: bytes) -> None:
        """The connection of that attachment is gone."""


@dataclass(slots=True)
class AttachCounters:
    """What became of the connections. They only rise."""

    connections: int = 0
    attached: int = 0
    resumed: int = 0
    not_allowed: int = 0
    malformed: int = 0
    other_version: int = 0
    refused: int = 0
    silent: int = 0
    too_many: int = 0


def peer_of(connection: socket.socket) -> Peer:
    """Ask the kernel who is on the other side."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(credentials)
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        groups = b""
    return Peer(pid, uid, frozenset(memoryview(groups).cast("I").tolist()) | {gid})


def parse_request(data: bytes) -> Request:
    """Parse a bs_attach_request; AttachRefused says what is wrong with it."""
    if len(data) < _OPENING.size:
        raise AttachRefused(errno.EPROTO, f"not an attach request: {len(data)} bytes")
    magic, newest = _OPENING.unpack_from(data)
    if magic != ABI_MAGIC:
        raise AttachRefused(errno.EPROTO, f"not an attach request: magic {magic:#x}")
    if newest < ABI_OLDEST:
        raise AttachRefused(
            errno.EPROTONOSUPPORT,
            f"the library speaks ABI {newest}, the node {_window(ABI_OLDEST, ABI_VERSION)}:"
            " update libbacksight",
            version=newest,
        )
    if len(data) < _REQUEST.size:
        raise AttachRefused(
            errno.EPROTO, f"not an attach request: {len(data)} bytes instead of {_REQUEST.size}"
        )
    _, _, oldest, _, features, token_hi, token_lo, service = _REQUEST.unpack_from(data)
    if oldest > ABI_VERSION:
        raise AttachRefused(
            errno.EPROTONOSUPPORT,
            f"the library speaks ABI {_window(oldest, newest)}, the node"
            f" {_window(ABI_OLDEST, ABI_VERSION)}: update backsight-node",
        )
    name = printable(service.partition(b"\0")[0].decode(errors="replace"))
    token = struct.pack("=2Q", token_hi, token_lo)
    return Request(
        token if any(token) else None,
        name or "unnamed",
        min(newest, ABI_VERSION),
        features & ABI_FEATURES,
    )


def _window(oldest: int, newest: int) -> str:
    return f"{oldest}" if oldest == newest else f"{oldest} to {newest}"


def _pack_reply(request: Request, attachment: Attachment) -> bytes:
    return _REPLY.pack(
        ABI_MAGIC,
        request.version,
        0,
        int(attachment.resumed),
        *struct.unpack("=2Q", attachment.token),
        attachment.arena_bytes,
        b"",
        request.features,
    )


def _pack_refusal(refused: AttachRefused) -> bytes:
    # 127 bytes, so that a NUL follows; cut between characters.
    message = cut_utf8(refused.message, 127).encode()
    reply = _REPLY.pack(ABI_MAGIC, ABI_VERSION, -refused.status, 0, 0, 0, 0, message, 0)
    return reply[:_REPLY_1_BYTES] if refused.version < ABI_OLDEST else reply


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    timeout: asyncio.TimerHandle
    token: bytes | None = field(default=None)


class AttachServer:
    """Listens on the socket. Everything happens in callbacks of the event loop."""

    def __init__(
        self,
        path: Path,
        allowed: Allowed,
        host: AttachHost,
        log: Log,
    ) -> None:
        self.counters = AttachCounters()
        self._path = path
        self.allowed = allowed
        """Who may attach from now on; who has, stays."""
        self._host = host
        self._log = log
        self._refused_users: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, _Connection] = {}
        self._waiting = 0
        self._listener = listen(path, socket.SOCK_SEQPACKET)

    def __enter__(self) -> Self:
        self._loop.add_reader(self._listener, self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.remove_reader(self._listener)
        # Nobody connects to what is about to be closed.
        self._path.unlink(missing_ok=True)
        self._listener.close()
        for connection in list(self._connections.values()):
            self._close(connection, tell_host=False)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of fds: the connection stays in the backlog, and we would spin.
            self._log.error(f"cannot accept on {self._path}: {error.strerror}")
            self._loop.remove_reader(self._listener)
            self._loop.call_later(1.0, self._loop.add_reader, self._listener, self._accept)
            return
        self.counters.connections += 1
        if self._waiting >= _WAITING_MAX:
            self.counters.too_many += 1
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(
            accepted, self._loop.call_later(_REQUEST_TIMEOUT_S, self._timed_out, accepted.fileno())
        )
        self._connections[accepted.fileno()] = connection
        self._waiting += 1
        self._loop.add_reader(accepted, self._readable, connection)

    def _timed_out(self, fd: int) -> None:
        self.counters.silent += 1
        self._close(self._connections[fd])

    def _readable(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
        elif connection.token is not None:
            # An attached client has nothing to say.
            self.counters.malformed += 1
            self._close(connection)
        else:
            self._answer(connection, data)

    def _tell_once(self, peer: Peer) -> None:
        """Whose applications record nothing: they say so only where BACKSIGHT_DEBUG is set."""
        if peer.uid in self._refused_users or len(self._refused_users) >= _REFUSED_USERS_MAX:
            return
        self._refused_users.add(peer.uid)
        self._log.warning(
            f"process {peer.pid} of user {peer.uid} may not attach, and records nothing; to let"
            " it, name the user, or a group of it, in `allow`"
        )

    def _answer(self, connection: _Connection, data: bytes) -> None:
        try:
            peer = peer_of(connection.socket)
            if not self.allowed.admits(peer):
                self.counters.not_allowed += 1
                self._tell_once(peer)
                self._refuse(
                    connection,
                    AttachRefused(
                        errno.EACCES,
                        f"user {peer.uid} may not attach; the node's `allow` names who may",
                    ),
                )
                return
            request = parse_request(data)
        except AttachRefused as refused:
            if refused.status == errno.EPROTONOSUPPORT:
                self.counters.other_version += 1
            else:
                self.counters.malformed += 1
            self._refuse(connection, refused)
            return
        except OSError as error:
            self._log.warning(f"cannot tell who connected: {error.strerror}")
            self._close(connection)
            return
        try:
            attachment = self._host.attach(peer, request)
        except AttachRefused as refused:
            self.counters.refused += 1
            self._log.warning(
                f"process {peer.pid} ({request.service}) not attached: {refused.message}"
            )
            self._refuse(connection, refused)
            return
        try:
            self._send(connection, request, attachment)
        except OSError:
            # It hung up in the meantime; it exists for the host all the same.
            connection.token = attachment.token
            self._answered(connection)
            self._close(connection)
            return
        finally:
            _close_all(attachment.fds)
        if attachment.resumed:
            self.counters.resumed += 1
        else:
            self.counters.attached += 1
        connection.token = attachment.token
        self._answered(connection)

    def _send(
        self, connection: _Connection, request: Request, attachment: Attachment
    ) -> None:
        reply = _pack_reply(request, attachment)
        if not attachment.resumed:
            fds = [*attachment.fds, attachment.policy]
            socket.send_fds(connection.socket, [reply], fds)
            return
        connection.socket.send(reply)
        # The table that it has is an earlier daemon's, which nobody writes any more.
        news = _NEWS.pack(ABI_MAGIC, _NEWS_POLICY, 1)
        socket.send_fds(connection.socket, [news], [attachment.policy])

    def _refuse(self, connection: _Connection, refused: AttachRefused) -> None:
        # A peer that does not wait for the answer misses it.
        with contextlib.suppress(OSError):
            connection.socket.send(_pack_refusal(refused))
        self._close(connection)

    def _answered(self, connection: _Connection) -> None:
        connection.timeout.cancel()
        self._waiting -= 1

    def _close(self, connection: _Connection, *, tell_host: bool = True) -> None:
        fd = connection.socket.fileno()
        self._loop.remove_reader(fd)
        del self._connections[fd]
        if connection.token is None:
            self._answered(connection)
        connection.socket.close()
        if connection.token is not None and tell_host:
            self._host.hung_up(connection.token)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def make_way(path: Path) -> None:
    """Check that a socket can be made there; OSError if nothing but a socket would have to go."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise OSError(
                f"{path}: the directory {path.parent} does not exist; make it, or name"
                " another path as `socket`"
            ) from None
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}") from error
    else:
        if not stat.S_ISSOCK(mode):
            raise OSError(f"{path}: exists, and is no socket; remove it, or name another path")
    if not os.access(path.parent, os.W_OK):
        raise OSError(f"{path}: no permission to make a socket in {path.parent}")


def listen(path: Path, kind: socket.SocketKind) -> socket.socket:
    """Listen on a Unix socket; one that a killed daemon left is replaced.

    OSError says what is in the way. Anybody may connect: who may do what is
    decided by credentials.
    """
    make_way(path)
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                pass
            except BlockingIOError as error:
                raise OSError(f"{path}: another daemon listens there") from error
            else:
                raise OSError(f"{path}: another daemon listens there")
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
