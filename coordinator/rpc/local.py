# SPDX-License-Identifier: Apache-2.0
"""Answers backsightctl on the coordinator's own machine, at a Unix socket, by who the kernel says it is.

gRPC listens at Unix sockets, and tells nothing of who connects there. So it listens at one
that nobody is told of, and what clients connect to is ours:

    backsightctl ──▶ access.socket ──▶ relay ──▶ access.socket + ".grpc" ──▶ gRPC
                     (SO_PEERCRED)     binds each connection's own end to a name,
                                       which gRPC shows as the peer of its calls

Who has no role is answered before that (coordinator.rpc.refusal), and never comes to gRPC. What
a connection of the others holds is bounded as over TCP (coordinator.rpc.budget).

What comes to gRPC by any other way has a name that the relay does not know, and is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc

from coordinator.access import role_of
from coordinator.counters import ServerCounters
from coordinator.rpc import listener
from coordinator.rpc.admission import Admission, Context, Who
from coordinator.rpc.budget import Budget
from coordinator.rpc.connections import Connection
from coordinator.rpc.identity import Caller, Identity, Role, Unidentified
from coordinator.rpc.peers import address_of_user, local_name
from coordinator.rpc.refusal import refuse
from runtime.log import Log, PeerLog
from runtime.schema import InvalidValue
from runtime.settings.allow import trusted_uids
from runtime.settings.coordinator import AccessSettings
from runtime.unix_socket import Credentials, credentials_of, listen

_Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"

# Of one user; a person has one for each command that runs.
CONNECTIONS_OF_A_USER_MAX = 16

# Of all whom the configuration names. Each costs two fds, and some memory in gRPC.
_NAMED_MAX = 128

# Beside that, so that no other takes root's places: there are two such users at most.
_TRUSTED_MAX = 2 * CONNECTIONS_OF_A_USER_MAX

# Whose names are being looked up: more than asyncio accepts at once.
_UNDECIDED_MAX = 256

# Who is told why he may not. Whoever finds no place there is hung up on.
_REFUSED_MAX = 64

# What is read at once; a message may be longer.
_READ_BYTES = 64 << 10


class _Places:
    """How many connections there may be at some stage: of each user, and of all."""

    def __init__(self, of_all: int) -> None:
        self._of_all = of_all
        self._taken: Counter[int] = Counter()  # by uid

    @contextlib.contextmanager
    def place(self, uid: int) -> Iterator[str | None]:
        """Count a connection while it is there; why it has no place, if it has none."""
        if self._taken[uid] >= CONNECTIONS_OF_A_USER_MAX:
            yield f"uid {uid} has {CONNECTIONS_OF_A_USER_MAX} connections already; allowed are no more"
        elif self._taken.total() >= self._of_all:
            yield f"there are {self._of_all} connections already; allowed are no more"
        else:
            self._taken[uid] += 1
            try:
                yield None
            finally:
                self._taken[uid] -= 1
                if not self._taken[uid]:
                    del self._taken[uid]


@dataclass(eq=False, slots=True)
class _Relayed:
    """A connection that gRPC sees under a name of ours."""

    peer: str
    caller: Caller
    task: asyncio.Task[None]
    bytes_received: int = 0

    def shut(self) -> None:
        self.task.cancel()


class LocalDoor:
    """Answers while it is entered, on the running loop. OSError says why it cannot."""

    def __init__(
        self,
        path: Path,
        access: AccessSettings,
        service: str,
        handlers: Callable[[Who], _Handlers],
        budget: Budget,
        counters: ServerCounters,
        log: Log,
    ) -> None:
        """``access`` says who is let in; ``handlers`` makes those of the service."""
        self._path = path
        self._inner = path.with_name(f"{path.name}.grpc")
        self._access = access
        self._counters = counters
        self._relayed: dict[str, _Relayed] = {}
        # Without a look at the configuration, which may ask a directory service.
        self._trusted = {uid: _caller_of(uid, Role.OPERATOR) for uid in trusted_uids()}
        self._trusted_places = _Places(_TRUSTED_MAX)
        self._named_places = _Places(_NAMED_MAX)
        self._undecided_places = _Places(_UNDECIDED_MAX)
        self._refused_places = _Places(_REFUSED_MAX)
        self._tasks: dict[asyncio.Task[None], int] = {}  # of each connection, and its uid
        self._log = log
        self._peer_log = PeerLog(log)
        admission = Admission(self._who, lambda: None, budget, counters, self._peer_log)
        self._server = grpc.aio.server(options=listener.options(identified=True))
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    service, admission.handlers(handlers(admission.caller))
                ),
            )
        )

    async def __aenter__(self) -> Self:
        try:
            self._listener = listen(self._path, socket.SOCK_STREAM, "access.socket")
        except OSError as error:
            raise OSError(f"access.socket: {error}") from error
        try:
            self._inner.unlink(missing_ok=True)
            before = os.umask(0o077)
            try:
                listener.add_unix_socket(self._server, self._inner)
            finally:
                os.umask(before)
            await self._server.start()
            self._accepting = await asyncio.start_unix_server(
                self._connected, sock=self._listener.socket, limit=_READ_BYTES
            )
        except BaseException:
            self._listener.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._accepting.close()
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop(None)
        self._inner.unlink(missing_ok=True)

    def reconfigure(self, access: AccessSettings) -> None:
        """Go on with these users. Who is trusted no more must not go on; all others come again."""
        before, self._access = self._access, access
        if (before.operators, before.viewers) != (access.operators, access.viewers):
            self._log.info(f"{self._path}: lets in others than before, so connections begin anew")
            for task, uid in self._tasks.items():
                if uid not in self._trusted:
                    task.cancel()

    def connections(self) -> Iterable[Connection]:
        """What gRPC has of this socket."""
        return list(self._relayed.values())

    # -------------------------------------------------------------- who calls

    def _who(self, context: Context) -> Caller:
        relayed = self._relayed.get(context.peer())
        if relayed is None:
            raise Unidentified(f"this socket is not for calls; call at {self._path}")
        return relayed.caller

    def _caller(self, credentials: Credentials) -> Caller | Unidentified:
        try:
            role = role_of(self._access, credentials)
        except InvalidValue as error:
            return Unidentified(f"{error}; correct it, and reload the coordinator")
        if role is not None:
            return _caller_of(credentials.uid, role)
        name = _user_name(credentials.uid)
        return Unidentified(
            f"the user {name} (uid {credentials.uid}) is neither operator nor viewer here; root can name"
            " him, or one of his groups, in `access.operators` or `access.viewers` of the coordinator's"
            " configuration"
        )

    # ------------------------------------------------------------------ relay

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        credentials = credentials_of(writer.get_extra_info("socket"))
        task = asyncio.get_running_loop().create_task(self._meet(credentials, reader, writer))
        self._tasks[task] = credentials.uid
        task.add_done_callback(self._tasks.pop)

    async def _meet(
        self, credentials: Credentials, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # All that was written is sent before the next, so nothing is lost when this ends.
        writer.transport.set_write_buffer_limits(0)
        try:
            reason = await self._admit(credentials, reader, writer)
            if reason is not None:
                await self._refuse(credentials.uid, *reason, reader, writer)
        finally:
            # Who reads nothing would keep one open that is closed.
            writer.transport.abort()

    async def _admit(
        self, credentials: Credentials, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[grpc.StatusCode, str] | None:
        """Relay what comes of somebody, by his role; why not, if not."""
        uid = credentials.uid
        caller: Caller | Unidentified
        if uid in self._trusted:
            caller, places = self._trusted[uid], self._trusted_places
        else:
            places = self._named_places
            with self._undecided_places.place(uid) as reason:
                if reason is not None:
                    return grpc.StatusCode.RESOURCE_EXHAUSTED, reason
                caller = await asyncio.to_thread(self._caller, credentials)
        if isinstance(caller, Unidentified):
            return grpc.StatusCode.UNAUTHENTICATED, str(caller)
        # By role first: who has none takes no place of those who have one.
        with places.place(uid) as reason:
            if reason is not None:
                return grpc.StatusCode.RESOURCE_EXHAUSTED, reason
            await self._relay(uid, caller, reader, writer)
        return None

    async def _refuse(
        self,
        uid: int,
        status: grpc.StatusCode,
        reason: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if status is grpc.StatusCode.UNAUTHENTICATED:
            self._counters.not_permitted += 1
        else:
            self._counters.too_many_calls += 1
        self._peer_log.warning(
            address_of_user(uid), f"{self._path}: one connection is refused: {reason}"
        )
        with self._refused_places.place(uid) as no_place:
            if no_place is None:
                await refuse(reader, writer, status, reason)

    async def _relay(
        self,
        uid: int,
        caller: Caller,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        # All users see the names of sockets that there are. Who could guess the next one could
        # take it before us, and keep somebody out.
        name = local_name(uid, secrets.token_hex(16))
        task = asyncio.current_task()
        assert task is not None
        relayed = _Relayed(f"unix-abstract:{name}", caller, task)
        self._relayed[relayed.peer] = relayed
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner:
                inner.setblocking(False)
                try:
                    inner.bind(f"\0{name}")
                    await asyncio.get_running_loop().sock_connect(inner, str(self._inner))
                except OSError as error:
                    self._peer_log.warning(
                        address_of_user(uid),
                        f"{self._path}: a connection of uid {uid} does not get to gRPC: {error}",
                    )
                    return
                their_reader, their_writer = await asyncio.open_connection(
                    sock=inner, limit=_READ_BYTES
                )
                try:
                    await _first_to_end(
                        _pump(reader, their_writer, relayed), _pump(their_reader, writer)
                    )
                finally:
                    their_writer.transport.abort()
        finally:
            del self._relayed[relayed.peer]


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: _Relayed | None = None
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_READ_BYTES):
            if counts is not None:
                counts.bytes_received += len(data)
            writer.write(data)
            await writer.drain()


async def _first_to_end(*pumps: Any) -> None:  # noqa: ANN401 # coroutines
    tasks = [asyncio.ensure_future(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _caller_of(uid: int, role: Role) -> Caller:
    return Caller(Identity(role, _user_name(uid), f"uid {uid} on the coordinator's machine"))


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
