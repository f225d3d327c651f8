# SPDX-License-Identifier: Apache-2.0
"""The processes that are attached: who they are, whether they live, and how they outlast the daemon.

The service manager keeps the memory of each (``appliance.client_store``), with whose it is:
token, pid, start time, service, and what was agreed on with it.

That a process is dead, its pidfd tells. A hang-up alone does not: applications
close fds that are not theirs. Nor does a connection say that it lives, whose
other end may be with its children; it is closed when the process is dead. A new
first attachment of a living process whose connection is gone means that it has
called exec(): its old memory is no longer mapped anywhere, so the old client has
exited too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

from appliance.attach import Link, Peer
from appliance.client_store import ClientStore, Found
from appliance.contexts import (
    Context,
    ContextDataPlane,
    Contexts,
    ContextSource,
    Watcher,
    context_part,
    memfd_context,
    number_of_part,
)
from appliance.core.machine import Namespace
from appliance.namespaces import namespace_of
from appliance.packets import Abi, Attachment, AttachRefused, Request
from appliance.probes_packets import SERVICE as PROBES_SERVICE
from appliance.process import pidfd_if_same, start_ticks_of
from appliance.quotas import PROBES as PROBES_TENANT
from appliance.quotas import Quotas
from runtime.log import Log
from runtime.service_manager import ServiceManager, StoredFd
from runtime.settings.allow import trusted_uids

_TOKEN_BYTES = 16

_NO_QUOTAS = Quotas()


@dataclass(frozen=True, slots=True)
class ClientFds:
    """A client's shared memory."""

    arena: int
    channel: int
    context: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.arena, self.channel, self.context))


class ClientDataPlane(ContextDataPlane, Protocol):
    """What of the data plane is about clients (native/src/node.h, "clients")."""

    def client_add(self, pid: int, service: str, abi: Abi) -> tuple[int, ClientFds]:
        """Make a client's shared memory: its number, and fds that the caller closes."""

    def client_adopt(self, number: int, pid: int, service: str, abi: Abi, fds: ClientFds) -> None:
        """Go on with a client from before a restart, under its number."""

    def client_tenant(self, number: int, tenant: int) -> None:
        """Say whose memory it is (appliance.quotas), right after it was added or adopted."""

    def client_lost(self, number: int) -> None:
        """It wrote to memory before that is lost."""

    def client_exited(self, number: int) -> None:
        """Its process is gone."""

    @property
    def policy_fd(self) -> int:
        """Of the policy table; the data plane closes it."""


@dataclass(slots=True)
class Client:
    """One attached process.

    ``start_ticks`` tells it from a later one with its pid. ``link`` is its
    connection, while it has one. ``tenant``: see ``appliance.quotas``.
    ``namespace``: in which it was when it attached, or when the node started;
    None if it was gone by then.
    """

    number: int
    token: bytes
    pid: int
    uid: int
    gids: frozenset[int]
    start_ticks: int
    service: str
    abi: Abi
    pidfd: int | None
    link: Link | None
    tenant: int
    namespace: Namespace | None
    context: Context = field(default_factory=Context)

    @property
    def stored_as(self) -> str:
        """Under which id the service manager keeps it."""
        return self.token.hex()[:12]

    @property
    def is_application(self) -> bool:
        """Not the probes, which write into the applications' traces."""
        return self.tenant != PROBES_TENANT


@dataclass(frozen=True, slots=True)
class _Stored:
    """A client that came back from the service manager, and what is said about it."""

    found: Found
    number: int
    token: bytes
    pid: int
    uid: int
    gids: frozenset[int]
    start_ticks: int
    service: str
    abi: Abi

    @classmethod
    def read(cls, found: Found) -> _Stored:
        """OSError, ValueError, KeyError, TypeError: it is not all there, or is not ours."""
        if found.error is not None:
            raise found.error
        about = found.about
        token = bytes.fromhex(about["token"])
        if len(token) != _TOKEN_BYTES or not token.hex().startswith(found.client_id):
            raise ValueError("its token is not the one of its name")
        abi = Abi(int(about["version"]), int(about["features"]))
        if not abi.is_spoken:
            raise ValueError(
                f"it has ABI {abi.version} with features {abi.features:#x}, which this node"
                " does not speak: it was attached by another version of backsight-node"
            )
        one = cls(
            found=found,
            # From here and not from its memory, which it can write to.
            number=int(about["number"]),
            token=token,
            pid=int(about["pid"]),
            uid=int(about["uid"]),
            gids=frozenset(map(int, about["gids"])),
            start_ticks=int(about["start_ticks"]),
            service=str(about["service"]),
            abi=abi,
        )
        if not one.contexts:
            raise KeyError(context_part(0))
        return one

    @property
    def contexts(self) -> dict[int, int]:
        """By number."""
        return {
            number: fd
            for part, fd in self.found.parts.items()
            if (number := number_of_part(part)) is not None
        }


class Clients:
    """Makes attachments, and sees processes die."""

    def __init__(
        self,
        dataplane: ClientDataPlane,
        manager: ServiceManager,
        arena_bytes: int,
        per_user_max: int,
        log: Log,
        quotas: Quotas = _NO_QUOTAS,
    ) -> None:
        self._dataplane = dataplane
        self._store = ClientStore(manager, log)
        self._contexts = Contexts(dataplane, self._store, log)
        self._arena_bytes = arena_bytes
        self._per_user_max = per_user_max
        self._quotas = quotas
        self._trusted_uids = trusted_uids()
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._by_number: dict[int, Client] = {}
        self._by_token: dict[bytes, Client] = {}
        self._by_pid: dict[int, Client] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for client in self._by_number.values():
            self._unwatch(client)
            self._contexts.exited(client)
        self._contexts.close()
        self._store.close()

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def live_applications(self) -> int:
        """Processes that are attached and live, but for the probes."""
        return sum(client.is_application and client.pidfd is not None for client in self)

    def __iter__(self) -> Iterator[Client]:
        return iter(self._by_number.values())

    # ------------------------------------------------------------- attaching

    def attach(self, peer: Peer, request: Request, link: Link) -> Attachment:
        """Make an attachment for a process, or let it go on with one from before a restart."""
        try:
            start_ticks = start_ticks_of(peer.pid, peer.pidfd)
        except ProcessLookupError as error:
            raise AttachRefused(errno.ESRCH, f"process {peer.pid} is gone") from error
        except OSError as error:
            raise AttachRefused(
                error.errno or errno.EIO,
                f"the node cannot see when process {peer.pid} started: {error.strerror}",
            ) from error
        before = self._by_pid.get(peer.pid)
        if before is not None and before.start_ticks == start_ticks:
            if before.link is not None:
                if before.link.is_open():
                    raise AttachRefused(
                        errno.EBUSY,
                        f"process {peer.pid} is attached already, by another connection",
                    )
                before.link.close()
            if request.token == before.token:
                before.uid, before.link = peer.uid, link
                return Attachment(
                    before.token, before.abi, self._arena_bytes, self._dataplane.policy_fd
                )
        if before is not None:
            self._exited(before)
        return self._new(peer, start_ticks, request, link)

    def attached(self, token: bytes) -> None:
        """Say what a client is to do next, which has its attachment now."""
        self._contexts.connected(self._by_token[token])

    def hung_up(self, token: bytes) -> None:
        """Note that a client's connection is gone; its process may live on."""
        client = self._by_token.get(token)
        if client is not None:
            client.link = None

    def moved(self, token: bytes, number: int) -> bool:
        """Note that a client says that it uses the context that it was sent. Whether it was."""
        client = self._by_token.get(token)
        return client is not None and self._contexts.moved(client, number)

    def use_contexts(self, source: ContextSource, watcher: Watcher | None = None) -> None:
        """Take context segments from there from now on, and have all clients go over to such.

        ``watcher`` is told of each.
        """
        self._contexts.use(source, self._by_pid.values(), watcher)

    def no_contexts(self) -> None:
        """Have clients that come get segments of the node's own; others keep what they have."""
        self._contexts.use(memfd_context, ())

    def contexts_again(self) -> None:
        """Go on with what had to wait for the source of context segments."""
        self._contexts.again()

    def events_done(self) -> None:
        """Go on with what waited until the triggers were seen to that the data plane told of."""
        self._contexts.settle()

    @property
    def moving(self) -> int:
        """Clients that are to go over to another context, and have not left the one before."""
        contexts = [client.context for client in self._by_pid.values()]
        return sum(context.is_due or context.before is not None for context in contexts)

    def _tenant(self, uid: int, gids: frozenset[int], service: str) -> int:
        if service == PROBES_SERVICE and uid in self._trusted_uids:
            return PROBES_TENANT
        return self._quotas.tenant(uid, gids)

    def _new(self, peer: Peer, start_ticks: int, request: Request, link: Link) -> Attachment:
        self._check_quota(peer.uid)
        service, abi = request.service, request.abi
        with contextlib.ExitStack() as undo:
            try:
                pidfd = os.dup(peer.pidfd)
                undo.callback(os.close, pidfd)
                number, fds = self._dataplane.client_add(peer.pid, service, abi)
                undo.callback(self._dataplane.client_exited, number)
                for fd in (fds.arena, fds.channel):
                    undo.callback(os.close, fd)
                with contextlib.ExitStack() as first:
                    first.callback(os.close, fds.context)
                    own = fds.context
                    fds = replace(fds, context=self._contexts.first(number, own))
                    first.pop_all()
                undo.callback(os.close, fds.context)
                tenant = self._tenant(peer.uid, peer.gids, service)
                self._dataplane.client_tenant(number, tenant)
                if request.token is not None:
                    # Of an attachment that nobody has any more, and what it wrote there.
                    self._dataplane.client_lost(number)
            except OSError as error:
                message = (
                    "the node has as many clients as its `clients_max` allows"
                    if error.errno == errno.ENOSPC
                    else f"the node cannot make the shared memory: {error.strerror}"
                )
                raise AttachRefused(error.errno or errno.EIO, message) from error
            undo.pop_all()
        token = os.urandom(_TOKEN_BYTES)
        client = Client(
            number,
            token,
            peer.pid,
            peer.uid,
            peer.gids,
            start_ticks,
            service,
            abi,
            pidfd,
            link,
            tenant,
            namespace_of(peer.pid),
        )
        self._remember(client)
        self._contexts.given(client, fds.context, of_source=fds.context != own)
        try:
            self._keep(client, fds)
        except OSError as error:
            self._log.warning(
                f"process {peer.pid} ({service}) will not outlast a restart of the node: its memory"
                f" cannot be kept by the service manager: {error.strerror}"
            )
        return Attachment(token, abi, self._arena_bytes, self._dataplane.policy_fd, tuple(fds))

    def user_of(self, number: int) -> int | None:
        """Whose a client is or was; None: it is none of this node's."""
        client = self._by_number.get(number)
        return None if client is None else client.uid

    def _check_quota(self, uid: int) -> None:
        if uid in self._trusted_uids:
            return
        attached = sum(client.uid == uid for client in self._by_pid.values())
        if attached >= self._per_user_max:
            raise AttachRefused(
                errno.EDQUOT,
                f"user {uid} has {attached} processes attached, as many as the node's"
                " `clients_per_user_max` allows",
            )

    def _remember(self, client: Client) -> None:
        self._by_number[client.number] = client
        self._by_token[client.token] = client
        if client.pidfd is not None:
            self._by_pid[client.pid] = client
            self._loop.add_reader(client.pidfd, self._exited, client)

    # ------------------------------------------------------------ life, death

    def _unwatch(self, client: Client) -> None:
        if client.pidfd is not None:
            self._loop.remove_reader(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = None

    def _exited(self, client: Client) -> None:
        self._unwatch(client)
        if client.link is not None:
            client.link.close()
        self._contexts.exited(client)
        if self._by_pid.get(client.pid) is client:
            del self._by_pid[client.pid]
        self._dataplane.client_exited(client.number)

    def drained(self, number: int) -> None:
        """Forget a client: its process is gone and its last segment reclaimed."""
        client = self._by_number.pop(number, None)
        if client is None:
            return
        del self._by_token[client.token]
        self._store.forget(client.stored_as)

    # ------------------------------------------------------ over the restart

    def _keep(self, client: Client, fds: ClientFds) -> None:
        self._store.store(
            client.stored_as,
            {
                "number": client.number,
                "token": client.token.hex(),
                "pid": client.pid,
                "uid": client.uid,
                "gids": sorted(client.gids),
                "start_ticks": client.start_ticks,
                "service": client.service,
                "version": client.abi.version,
                "features": client.abi.features,
            },
            {"arena": fds.arena, "channel": fds.channel, context_part(0): fds.context},
        )

    def adopt(self, stored: Iterable[StoredFd]) -> None:
        """Go on with the clients whose fds came back from the service manager, in any order.

        Closes the fds. Of what is incomplete, or of a client that is lost, the service
        manager is told to let go; what is not ours is closed. The log has a line for
        each reason.
        """
        all_found = self._store.recover(stored)
        lost: dict[str, list[str]] = {}  # by why
        taken: list[_Stored] = []
        for found in all_found:
            try:
                taken.append(_Stored.read(found))
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._lose(lost, found.client_id, error)
        # In the order in which they attached. A process that connected anew, or executed another
        # program, keeps its pid and the time of its start: what it had before is of nobody.
        taken.sort(key=lambda one: one.number)
        latest = {(one.pid, one.start_ticks): one.number for one in taken}
        for one in taken:
            try:
                self._adopt_one(one, latest[one.pid, one.start_ticks] == one.number)
                self._store.renew(one.found)
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._lose(lost, one.found.client_id, error)
        for found in all_found:
            for fd in found.parts.values():
                os.close(fd)
        # Where the ledger is of another version, all are lost for one reason.
        for why, clients in lost.items():
            who = (
                f"client {clients[0]} of before the restart is lost"
                if len(clients) == 1
                else f"{len(clients)} clients of before the restart are lost, {clients[0]} among them"
            )
            self._log.warning(f"{who}: {why}")

    def _lose(self, lost: dict[str, list[str]], stored_as: str, why: Exception) -> None:
        lost.setdefault(repr(why), []).append(stored_as)
        self._store.forget(stored_as)

    def _adopt_memory(self, one: _Stored) -> dict[int, int]:
        """Have the data plane go on with it; with which contexts, by number."""
        contexts = dict(one.contexts)
        newest = max(contexts)
        fds = ClientFds(one.found.parts["arena"], one.found.parts["channel"], contexts[newest])
        try:
            self._dataplane.client_adopt(one.number, one.pid, one.service, one.abi, fds)
            return contexts
        except OSError as error:
            if len(contexts) == 1 or error.errno != errno.EPROTO:
                raise
        # It was stored, and the daemon ended before it was made, or anybody was sent it.
        del contexts[newest]
        fds = replace(fds, context=contexts[max(contexts)])
        self._dataplane.client_adopt(one.number, one.pid, one.service, one.abi, fds)
        self._store.forget_context(one.found.client_id, newest)
        return contexts

    def _adopt_one(self, one: _Stored, is_latest: bool) -> None:
        contexts = self._adopt_memory(one)
        context: Context | None = None
        try:
            context = self._contexts.adopt(one.number, contexts)
            # As of now: quotas may be others than before.
            tenant = self._tenant(one.uid, one.gids, one.service)
            self._dataplane.client_tenant(one.number, tenant)
            pidfd = pidfd_if_same(one.pid, one.start_ticks) if is_latest else None
        except OSError:
            if context is not None:
                self._contexts.let_go(context)
            # Nobody watches it: what it wrote goes in its turn, as that of a process that is gone.
            self._dataplane.client_exited(one.number)
            raise
        client = Client(
            one.number,
            one.token,
            one.pid,
            one.uid,
            one.gids,
            one.start_ticks,
            one.service,
            one.abi,
            pidfd,
            None,
            tenant,
            # Where it is gone, another process may have its number.
            None if pidfd is None else namespace_of(one.pid),
            context,
        )
        self._remember(client)
        if pidfd is None:
            self._contexts.exited(client)
            self._dataplane.client_exited(one.number)
