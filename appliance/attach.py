# SPDX-License-Identifier: Apache-2.0
"""Where applications attach: one packet each way over a Unix socket (native/src/abi/attach.h).

Whoever connects is untrusted: who it is, the kernel says (SO_PEERCRED,
SO_PEERGROUPS, SO_PEERPIDFD), not the message. Whatever is wrong is answered
with a status and a sentence for the person who runs the application, counted,
and the connection closed.

Anybody can connect, so this costs the others as little as can be. Who may not
attach is answered as soon as it is accepted, and takes up nothing. Who may, and
does not say what it wants, waits in places of its own user. A turn of the event
loop accepts so many connections and no more. Who connects in a loop is kept out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from appliance.door import Door, DoorLimits
from appliance.packets import (
    NEWS_CONTEXT,
    NEWS_POLICY,
    Attachment,
    AttachRefused,
    Request,
    pack_news,
    pack_refusal,
    pack_reply,
    parse_answer,
    parse_request,
)
from appliance.process import pidfd_of_peer
from appliance.seldom import Seldom
from appliance.waiting import Waiting
from runtime.log import Log
from runtime.settings.allow import trusted_uids
from runtime.unix_socket import (
    Allowed,
    Credentials,
    Listener,
    credentials_of,
    is_hung_up,
)

# A newer peer may say more than is known here.
_PACKET_BYTES_MAX = 4096

# A request is there when its connection is accepted, or a moment later: an honest
# library sends it at once. So these are for processes of one user that start
# together and are preempted in that moment. A place costs two fds.
SILENT_PER_USER_MAX = 64
_SILENT_MAX = 1024
_REQUEST_TIMEOUT_S = 5.0

# Accepted in one turn of the event loop, which has other things to do: to turn one
# away takes 30 us, to attach a process more than 1 ms.
ACCEPTS_A_TURN = 16

# After this, a file that was closed somewhere may have left room for a connection.
_ACCEPT_AGAIN_S = 1.0

# What sending to somebody fails with who is gone.
_HUNG_UP = (errno.EPIPE, errno.ECONNRESET)

_DOOR_LIMITS = DoorLimits()


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that wants to attach. Who keeps the pidfd beyond the call duplicates it."""

    pid: int
    uid: int
    pidfd: int
    gids: frozenset[int] = frozenset()


class Link(Protocol):
    """The connection of an attachment, as its host sees it."""

    def is_open(self) -> bool:
        """Whether anybody has its other end: the process, or one that the process gave it to."""

    def close(self) -> None:
        """Close it, if it is not closed yet."""

    def send_context(self, number: int, fd: int) -> None:
        """Send the process another context. If that fails, close it: it connects again."""


class AttachHost(Protocol):
    """Who makes attachments (appliance.clients)."""

    def attach(self, peer: Peer, request: Request, link: Link) -> Attachment:
        """Make or resume one. AttachRefused says why not. The caller closes the fds."""

    def attached(self, token: bytes) -> None:
        """That attachment has arrived; what comes next may be sent."""

    def hung_up(self, token: bytes) -> None:
        """The connection of that attachment is gone."""

    def moved(self, token: bytes, number: int) -> bool:
        """Take a process's word that it uses that context. False: it was not asked to."""


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
    kept_out: int = 0
    moved: int = 0
    unsent: int = 0


@dataclass(slots=True, eq=False)
class _Connection:
    """Of somebody who may attach. It has a token once it is attached."""

    socket: socket.socket
    peer: Peer
    end: Callable[[_Connection], None]
    unsent: Callable[[_Connection, OSError], None]
    timeout: asyncio.TimerHandle | None = None
    token: bytes | None = None

    def is_open(self) -> bool:
        return self.socket.fileno() >= 0 and not is_hung_up(self.socket)

    def close(self) -> None:
        self.end(self)

    def send_context(self, number: int, fd: int) -> None:
        news = pack_news(NEWS_CONTEXT, number)
        try:
            socket.send_fds(self.socket, [news], [fd])
        except OSError as error:
            self.unsent(self, error)


class AttachServer:
    """Listens on the socket. Everything happens in callbacks of the event loop."""

    def __init__(
        self,
        listener: Listener,
        allowed: Allowed,
        host: AttachHost,
        log: Log,
        door_limits: DoorLimits = _DOOR_LIMITS,
    ) -> None:
        """``listener``: SOCK_SEQPACKET; closed with the server."""
        self.counters = AttachCounters()
        self.allowed = allowed
        """Who may attach from now on; who has, stays."""
        self._host = host
        self._log = log
        # Apart: any local user can use up what there is to be said of anybody.
        self._said_of_anybody = Seldom()
        self._said_of_permitted = Seldom()
        self._loop = asyncio.get_running_loop()
        self._open: set[_Connection] = set()
        self._silent: Waiting[_Connection] = Waiting(SILENT_PER_USER_MAX, _SILENT_MAX)
        self._accept_again: asyncio.TimerHandle | None = None
        self._listener = listener
        self._door = Door(listener.path, door_limits, trusted_uids())

    def __enter__(self) -> Self:
        self._loop.add_reader(self._listener.socket, self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._accept_again is not None:
            self._accept_again.cancel()
        self._loop.remove_reader(self._listener.socket)
        self._door.close()
        self._listener.close()
        for connection in list(self._open):
            self._close(connection, tell_host=False)

    @property
    def waiting(self) -> int:
        """Connections that have not said what they want."""
        return len(self._silent)

    # ------------------------------------------------------- who connects

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                accepted, _ = self._listener.socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._accept_later(error)
                return
            self.counters.connections += 1
            accepted.setblocking(False)
            self._receive(accepted)

    def _accept_later(self, error: OSError) -> None:
        """Out of fds: what is not accepted stays in the backlog, and we would spin."""
        if self._said_of_permitted.is_due(error.errno, self._loop.time()):
            self._log.error(f"cannot accept on {self._listener.path}: {error.strerror}")
        self._loop.remove_reader(self._listener.socket)
        self._accept_again = self._loop.call_later(
            _ACCEPT_AGAIN_S, self._loop.add_reader, self._listener.socket, self._accept
        )

    def _receive(self, accepted: socket.socket) -> None:
        who = credentials_of(accepted)
        self._count_knock(who.uid)
        if not self.allowed.admits(who):
            self._turn_away(accepted, who)
            return
        try:
            peer = Peer(who.pid, who.uid, _pidfd_of(accepted, who.pid), who.groups)
        except AttachRefused as refused:
            self._count_refused(who, refused)
            _say_no(accepted, refused)
            accepted.close()
            return
        connection = _Connection(accepted, peer, self._close, self._unsent)
        self._open.add(connection)
        self._loop.add_reader(accepted, self._readable, connection)
        if not self._take_request(connection):
            self._let_wait(connection)

    def _turn_away(self, accepted: socket.socket, who: Credentials) -> None:
        self.counters.not_allowed += 1
        # Its applications say so only where BACKSIGHT_DEBUG is set.
        if self._said_of_anybody.is_due((who.uid, errno.EACCES), self._loop.time()):
            self._log.warning(
                f"process {who.pid} of user {who.uid} may not attach, and records nothing; to let"
                " it, name the user, or a group of it, in `allow`"
            )
        _say_no(
            accepted,
            AttachRefused(
                errno.EACCES, f"user {who.uid} may not attach; the node's `allow` names who may"
            ),
        )
        accepted.close()

    def _count_refused(self, who: Credentials | Peer, refused: AttachRefused) -> None:
        self.counters.refused += 1
        if self._said_of_permitted.is_due((who.uid, refused.status), self._loop.time()):
            self._log.warning(
                f"process {who.pid} of user {who.uid} not attached: {refused.message}",
                reason=refused.message,
            )

    def _count_knock(self, uid: int) -> None:
        try:
            if not self._door.knocked(uid):
                return
        except OSError as error:
            # A filesystem without ACLs.
            if self._said_of_anybody.is_due((uid, error.errno), self._loop.time()):
                self._log.warning(
                    f"user {uid} connects to {self._listener.path} in a loop, which holds up others, and"
                    f" cannot be kept out: {error.strerror}"
                )
            return
        self.counters.kept_out += 1
        if self._said_of_anybody.is_due((uid, "kept out"), self._loop.time()):
            self._log.warning(
                f"user {uid} connects to {self._listener.path} in a loop, and is kept out for"
                f" {self._door.limits.kept_out_s:g} s"
            )

    # ------------------------------------------------------- what it wants

    def _let_wait(self, connection: _Connection) -> None:
        connection.timeout = self._loop.call_later(_REQUEST_TIMEOUT_S, self._timed_out, connection)
        crowded_out = self._silent.add(connection, connection.peer.uid)
        if crowded_out is not None:
            self.counters.too_many += 1
            self._refuse(
                crowded_out,
                AttachRefused(errno.EBUSY, "too many connections that do not ask for anything"),
            )

    def _timed_out(self, connection: _Connection) -> None:
        self.counters.silent += 1
        self._close(connection)

    def _readable(self, connection: _Connection) -> None:
        if connection.token is None:
            self._take_request(connection)
            return
        try:
            data = connection.socket.recv(_PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            # An attached client has nothing to say but that it did what it was sent.
            number = parse_answer(data)
            if number is not None and self._host.moved(connection.token, number):
                self.counters.moved += 1
                return
            self.counters.malformed += 1
        self._close(connection)

    def _take_request(self, connection: _Connection) -> bool:
        """Answer its request, or its hang-up. Whether there was any."""
        try:
            data = connection.socket.recv(_PACKET_BYTES_MAX)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._wait_no_more(connection)
        if data:
            self._answer(connection, data)
        else:
            self._close(connection)
        return True

    def _answer(self, connection: _Connection, data: bytes) -> None:
        peer = connection.peer
        try:
            request = parse_request(data)
        except AttachRefused as refused:
            if refused.status == errno.EPROTONOSUPPORT:
                self.counters.other_version += 1
            else:
                self.counters.malformed += 1
            self._refuse(connection, refused)
            return
        try:
            attachment = self._host.attach(peer, request, connection)
        except AttachRefused as refused:
            self._count_refused(peer, refused)
            self._refuse(connection, refused)
            return
        connection.token = attachment.token
        try:
            self._send(connection, attachment)
        except OSError as error:
            # It exists for the host all the same.
            self._unsent(connection, error)
            return
        finally:
            _close_all(attachment.fds)
        if attachment.resumed:
            self.counters.resumed += 1
        else:
            self.counters.attached += 1
        self._host.attached(attachment.token)

    # ----------------------------------------------------------- the end

    def _send(self, connection: _Connection, attachment: Attachment) -> None:
        reply = pack_reply(attachment)
        if not attachment.resumed:
            fds = [*attachment.fds, attachment.policy]
            socket.send_fds(connection.socket, [reply], fds)
            return
        connection.socket.send(reply)
        # The table that it has is an earlier daemon's, which nobody writes any more.
        news = pack_news(NEWS_POLICY, 1)
        socket.send_fds(connection.socket, [news], [attachment.policy])

    def _unsent(self, connection: _Connection, error: OSError) -> None:
        # It may have hung up in the meantime.
        if error.errno not in _HUNG_UP:
            self.counters.unsent += 1
            peer = connection.peer
            if self._said_of_permitted.is_due((peer.uid, "unsent", error.errno), self._loop.time()):
                self._log.warning(
                    f"process {peer.pid} of user {peer.uid} is cut off, and attaches again: what it"
                    f" was to have cannot be sent: {error.strerror}"
                )
        self._close(connection)

    def _refuse(self, connection: _Connection, refused: AttachRefused) -> None:
        _say_no(connection.socket, refused)
        self._close(connection)

    def _wait_no_more(self, connection: _Connection) -> None:
        if connection in self._silent:
            self._silent.remove(connection)
        if connection.timeout is not None:
            connection.timeout.cancel()

    def _close(self, connection: _Connection, *, tell_host: bool = True) -> None:
        if connection not in self._open:
            return
        self._open.remove(connection)
        self._wait_no_more(connection)
        self._loop.remove_reader(connection.socket)
        connection.socket.close()
        os.close(connection.peer.pidfd)
        if connection.token is not None and tell_host:
            self._host.hung_up(connection.token)


def _pidfd_of(accepted: socket.socket, pid: int) -> int:
    if pid <= 0:
        # 0: it has no number in our namespace, so nothing of it could be looked up.
        raise AttachRefused(
            errno.ESRCH,
            "the node's pid namespace lacks the process; run the node in the machine's own",
        )
    try:
        return pidfd_of_peer(accepted, pid)
    except ProcessLookupError as error:
        raise AttachRefused(errno.ESRCH, f"process {pid} is gone") from error
    except OSError as error:
        raise AttachRefused(
            error.errno or errno.EIO, f"the node cannot watch process {pid}: {error.strerror}"
        ) from error


def _say_no(connection: socket.socket, refused: AttachRefused) -> None:
    # A peer that does not wait for the answer misses it.
    with contextlib.suppress(OSError):
        connection.send(pack_refusal(refused))
    # A request that is not read before the connection is closed would give the
    # peer an error in the place of the answer.
    with contextlib.suppress(OSError):
        connection.recv(1)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
