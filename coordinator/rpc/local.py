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
from coordinator.rpc.identity import Caller, Identity, Unidentified
from coordinator.rpc.peers import address_of_user, local_name
from coordinator.rpc.refusal import refuse
from runtime.log import Log, PeerLog
from runtime.schema import InvalidValue
from runtime.settings.coordinator import AccessSettings
from runtime.unix_socket import Credentials, credentials_of, listen

_Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"

# Of one user; a person has one for each command that runs.
CONNECTIONS_OF_A_USER_MAX = 16

# Of all. Each costs two fds, and some memory in gRPC.
CONNECTIONS_MAX = 128

# What is read at once; a message may be longer.
_READ_BYTES = 64 << 10


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
        access: Callable[[], AccessSettings],
        service: str,
        handlers: Callable[[Who], _Handlers],
        budget: Budget,
        counters: ServerCounters,
        log: Log,
    ) -> None:
        """``access`` says who is let in, at the moment; ``handlers`` makes those of the service."""
        self._path = path
        self._inner = path.with_name(f"{path.name}.grpc")
        self._access = access
        self._counters = counters
        self._relayed: dict[str, _Relayed] = {}
        self._users: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        # Who could guess a name could take it before us, and keep somebody out.
        self._secret = secrets.token_hex(8)
        self._numbers = 0
        self._peer_log = PeerLog(log)
        admission = Admission(self._who, lambda: None, budget, counters, self._peer_log)
        self._server = grpc.aio.server(options=listener.options(identified=True))
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    service, admission.handlers(handlers(self._who))
                ),
            )
        )

    async def __aenter__(self) -> Self:
        try:
            self._listener = listen(self._path, socket.SOCK_STREAM)
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
        name = _user_name(credentials.uid)
        try:
            role = role_of(self._access(), credentials)
        except InvalidValue as error:
            return Unidentified(f"{error}; correct it, and reload the coordinator")
        if role is not None:
            proof = f"uid {credentials.uid} on the coordinator's machine"
            return Caller(Identity(role, name, proof))
        return Unidentified(
            f"the user {name} (uid {credentials.uid}) is neither operator nor viewer here; root can name"
            " him, or one of his groups, in `access.operators` or `access.viewers` of the coordinator's"
            " configuration"
        )

    # ------------------------------------------------------------------ relay

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._meet(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # All that was written is sent before the next, so nothing is lost when this ends.
        writer.transport.set_write_buffer_limits(0)
        try:
            credentials = credentials_of(writer.get_extra_info("socket"))
            with self._place(credentials.uid) as reason:
                if reason is None:
                    await self._admit(credentials, reader, writer)
                else:
                    self._peer_log.warning(
                        address_of_user(credentials.uid),
                        f"{self._path}: one connection is ended: {reason}",
                    )
        finally:
            # Who reads nothing would keep one open that is closed.
            writer.transport.abort()

    @contextlib.contextmanager
    def _place(self, uid: int) -> Iterator[str | None]:
        """Count a connection while it is there; why it has no place, if it has none."""
        self._users[uid] += 1
        try:
            if self._users[uid] > CONNECTIONS_OF_A_USER_MAX:
                yield f"uid {uid} has {CONNECTIONS_OF_A_USER_MAX} already; allowed are no more"
            elif len(self._tasks) > CONNECTIONS_MAX:
                yield f"there are {CONNECTIONS_MAX} already; allowed are no more"
            else:
                yield None
        finally:
            self._users[uid] -= 1
            if not self._users[uid]:
                del self._users[uid]

    async def _admit(
        self, credentials: Credentials, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # May ask a directory service.
        caller = await asyncio.to_thread(self._caller, credentials)
        if isinstance(caller, Unidentified):
            self._counters.not_permitted += 1
            self._peer_log.warning(
                address_of_user(credentials.uid),
                f"{self._path}: one connection is refused: {caller}",
            )
            await refuse(reader, writer, grpc.StatusCode.UNAUTHENTICATED, str(caller))
        else:
            await self._relay(credentials, caller, reader, writer)

    async def _relay(
        self,
        credentials: Credentials,
        caller: Caller,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._numbers += 1
        name = local_name(self._secret, credentials.uid, self._numbers)
        task = asyncio.current_task()
        assert task is not None
        relayed = _Relayed(f"unix-abstract:{name}", caller, task)
        self._relayed[relayed.peer] = relayed
        try:
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner,
                contextlib.suppress(OSError),  # one of both is gone, or gRPC is
            ):
                inner.setblocking(False)
                inner.bind(f"\0{name}")
                await asyncio.get_running_loop().sock_connect(inner, str(self._inner))
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


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
