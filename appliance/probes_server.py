# SPDX-License-Identifier: Apache-2.0
"""Where ``backsight-probes`` connects to the node (appliance/probes_packets.py).

From then on processes have context segments that BPF programs can read and push into: the
probes make them, ahead of need, and are told whose each is. When they hang up, processes
keep what they have, since it is ordinary memory; those that come get the node's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from appliance.acl import READ_WRITE, write_acl
from appliance.contexts import ContextSource, Process, Watcher
from appliance.probes_outbox import Outbox
from appliance.probes_packets import VERSION, BadPacket, Packet, fds_of, number_of, receive, send
from appliance.seldom import Seldom
from protocol.messages import TraceId
from runtime.log import Log
from runtime.main import die_if_it_fails
from runtime.settings.allow import trusted_uids
from runtime.unix_socket import listen, pid_of, uid_of

# Made ahead, so that a process that attaches has one at once: 200 KiB each of the kernel's
# memory, used or not.
STOCK = 16

_BELL_BYTES = 8

# In which they say who used a device: they look into a table of theirs.
_ANSWER_S = 0.5

_HEX = re.compile("[0-9a-f]{32}")

# After this, a file that was closed somewhere may have left room for a connection.
_ACCEPT_AGAIN_S = 1.0


class ProbesHost(Protocol):
    """Who gives processes their contexts (``appliance.clients.Clients``)."""

    def use_contexts(self, source: ContextSource, watcher: Watcher | None = None) -> None:
        """Take segments from there from now on, also for processes that are attached."""

    def no_contexts(self) -> None:
        """Take them from the node itself, for processes that come."""

    def contexts_again(self) -> None:
        """There are some again."""


class _Probes:
    """A connection that is welcome."""

    def __init__(
        self,
        connection: socket.socket,
        host: ProbesHost,
        log: Log,
        ring: Callable[[], None],
        ended: Callable[[_Probes], None],
    ) -> None:
        self.pid = pid_of(connection)
        self.figures: dict[str, Any] = {}
        self.watched: set[int] = set()
        """Clients of which the probes say that they watch them."""
        self._told: set[int] = set()
        self._seldom = Seldom()
        self._socket = connection
        self._host = host
        self._log = log
        self._ring = ring
        self._ended = ended
        self._stock: deque[int] = deque()
        self._wanted = 0
        self._asked: dict[int, asyncio.Future[list[TraceId]]] = {}
        self._questions = count(1)
        self._namespace = Path("/proc/self/ns/net").stat().st_ino
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(connection, self._fail)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop.add_reader(self._bell, self._rung)
        self._loop.add_reader(connection, self._readable)

    def begin(self, node: str) -> None:
        """Have all processes go over to segments of these probes."""
        self._outbox.say({"welcome": VERSION, "node": node}, [self._bell])
        self._fill_up()
        self._host.use_contexts(self._take, self)

    def close(self) -> None:
        self._loop.remove_reader(self._bell)
        self._loop.remove_reader(self._socket)
        self._outbox.close()
        os.close(self._bell)
        self._socket.close()
        for number in list(self._asked):
            self._answer(number, [])
        while self._stock:
            os.close(self._stock.popleft())

    @die_if_it_fails
    def _rung(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, _BELL_BYTES)
        self._ring()

    # ---------------------------------------------------------------- contexts

    def _take(self, size: int) -> int:
        """Of that size they all are: the probes said so when they came."""
        del size
        if not self._stock:
            self._fill_up()
            raise BlockingIOError(errno.EAGAIN, "the probes have not made enough segments yet")
        fd = self._stock.popleft()
        self._fill_up()
        return fd

    def _fill_up(self) -> None:
        missing = STOCK - len(self._stock) - self._wanted
        # Not one by one.
        if missing >= STOCK // 2:
            self._wanted += missing
            self._outbox.say({"want": missing})

    def watch(self, process: Process, fd: int) -> None:
        """A process is about to use that segment."""
        if process.pidfd is not None:
            self._told.add(process.number)
            self._outbox.say({"watch": process.number}, [process.pidfd, fd])

    def exited(self, process: Process) -> None:
        """It is gone."""
        self.watched.discard(process.number)
        self._told.discard(process.number)
        self._outbox.say({"exited": process.number})

    # ------------------------------------------------------------------- users

    async def users(self, device: int, port: int, within_ns: int) -> list[TraceId]:
        """Traces that used a device or a port of ours lately; none if they do not say in time."""
        number = next(self._questions)
        answer: asyncio.Future[list[TraceId]] = self._loop.create_future()
        self._asked[number] = answer
        question = {
            "namespace": self._namespace,
            "device": device,
            "port": port,
            "within_ns": within_ns,
        }
        self._outbox.say({"who": number, **question})
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            return []
        finally:
            del self._asked[number]

    def _answer(self, number: int, traces: list[TraceId]) -> None:
        asked = self._asked.get(number)
        if asked is not None and not asked.done():
            asked.set_result(traces)

    # ----------------------------------------------------------------- packets

    def _fail(self, error: OSError) -> None:
        # Whom to watch they learn when they connect again.
        self._log.warning(f"the probes do not take what they are told: {error.strerror}")
        self._loop.call_soon(self._ended, self)

    @die_if_it_fails
    def _readable(self) -> None:
        try:
            packet = receive(self._socket)
        except BlockingIOError:
            return
        except (OSError, BadPacket) as error:
            self._log.warning(f"the probes said something that cannot be read: {error}")
            packet = None
        if packet is None:
            self._ended(self)
            return
        try:
            self._on_packet(packet)
        except BadPacket as error:
            packet.close()
            self._log.warning(f"the probes said something that makes no sense: {error}")
            self._ended(self)

    def _on_packet(self, packet: Packet) -> None:
        match packet.said:
            case {"contexts": _}:
                fds = fds_of(packet, number_of(packet, "contexts"))
                self._stock.extend(fds)
                self._wanted = max(0, self._wanted - len(fds))
                self._host.contexts_again()
                return
            case {"watching": _}:
                self._on_watching(number_of(packet, "watching"), packet.said.get("error"))
            case {"who": _, "traces": list(traces)}:
                self._answer(number_of(packet, "who"), [_trace_of(trace) for trace in traces])
            case {"figures": dict(figures)} if _are_figures(figures):
                self.figures = figures
            case _:
                pass  # of newer probes
        packet.close()

    def _on_watching(self, number: int, error: object) -> None:
        # It may have ended meanwhile, which is no fault of theirs.
        if number not in self._told:
            return
        if error is None:
            self.watched.add(number)
        elif self._seldom.is_due(str(error), self._loop.time()):
            self._log.warning(f"the probes cannot watch client {number}, and maybe others: {error}")


def _trace_of(said: object) -> TraceId:
    """BadPacket if it is none."""
    if not isinstance(said, str) or not _HEX.fullmatch(said):
        raise BadPacket(f"{said!r} is no trace id")
    return TraceId(bytes.fromhex(said))


# The deepest are those of a program: under its name, under "programs".
_FIGURES_DEEP = 4


def _are_figures(tree: object, deep: int = _FIGURES_DEEP) -> bool:
    """Numbers under names: what metrics are made of."""
    if isinstance(tree, dict):
        return deep > 0 and all(
            isinstance(name, str) and _are_figures(tree[name], deep - 1) for name in tree
        )
    return type(tree) is int


class ProbesServer:
    """Listens for probes, and has those that are connected. Use as ``with``."""

    def __init__(
        self,
        path: Path,
        node: str,
        context_bytes: int,
        host: ProbesHost,
        ring: Callable[[], None],
        log: Log,
    ) -> None:
        """``ring``: somebody's trigger queue has something."""
        self._node = node
        self._context_bytes = context_bytes
        self._host = host
        self._ring = ring
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._trusted = trusted_uids()
        self._probes: _Probes | None = None
        self._new: set[socket.socket] = set()
        self._seldom = Seldom()
        self._again: asyncio.TimerHandle | None = None
        self._listener = listen(path, socket.SOCK_SEQPACKET)
        self._admit_only_trusted(path)

    def __enter__(self) -> Self:
        self._loop.add_reader(self._listener.socket, self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener.socket)
        self._listener.close()
        for connection in list(self._new):
            self._drop(connection)
        if self._probes is not None:
            self._probes.close()
            self._probes = None

    def _admit_only_trusted(self, path: Path) -> None:
        """Whoever is refused in any case does not even connect, and cannot keep us busy with that."""
        try:
            # Also root without a right to override permissions, as in a container.
            write_acl(path, dict.fromkeys(self._trusted, READ_WRITE), 0)
        except OSError:
            path.chmod(0o600)

    @property
    def connected(self) -> bool:
        """Whether probes are."""
        return self._probes is not None

    @property
    def watched(self) -> int:
        """Processes of which the probes say that they watch them."""
        return len(self._probes.watched) if self._probes is not None else 0

    async def users(self, device: int, port: int, within_ns: int) -> list[TraceId]:
        """Traces that used a device or a port of ours lately; none if nobody is there to say it."""
        if self._probes is None:
            return []
        return await self._probes.users(device, port, within_ns)

    @property
    def figures(self) -> dict[str, Any]:
        """What the probes said of themselves last."""
        return self._probes.figures if self._probes is not None else {}

    @die_if_it_fails
    def _accept(self) -> None:
        try:
            connection, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of fds: what is not accepted stays in the backlog, and we would spin.
            self._log.error(f"cannot accept on {self._listener.path}: {error.strerror}")
            self._loop.remove_reader(self._listener.socket)
            self._again = self._loop.call_later(
                _ACCEPT_AGAIN_S, self._loop.add_reader, self._listener.socket, self._accept
            )
            return
        connection.setblocking(False)
        if uid_of(connection) not in self._trusted:
            self._refuse(
                connection, f"user {uid_of(connection)} is neither root nor the node's own"
            )
            return
        self._new.add(connection)
        self._loop.add_reader(connection, self._hear, connection)

    @die_if_it_fails
    def _hear(self, connection: socket.socket) -> None:
        try:
            packet = receive(connection)
        except BlockingIOError:
            return
        except (OSError, BadPacket):
            packet = None
        self._loop.remove_reader(connection)
        self._new.discard(connection)
        if packet is None:
            connection.close()
            return
        packet.close()
        try:
            version = number_of(packet, "hello")
            size = number_of(packet, "context_bytes")
        except BadPacket as error:
            self._refuse(connection, str(error))
            return
        if version != VERSION or size != self._context_bytes:
            self._refuse(
                connection,
                f"they speak version {version} with contexts of {size} bytes, the node {VERSION} with"
                f" {self._context_bytes}: backsight-probes and backsight-node are to be of one release",
            )
        elif self._probes is not None:
            who = f" (process {self._probes.pid})" if self._probes.pid else ""
            self._refuse(connection, f"others are connected to it{who}")
        else:
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        try:
            probes = _Probes(connection, self._host, self._log, self._ring, self._end)
        except OSError as error:
            self._refuse(connection, f"there is no eventfd for them: {error.strerror}")
            return
        self._log.info("probes have connected; processes go over to segments that they can read")
        self._probes = probes
        self._probes.begin(self._node)

    def _end(self, probes: _Probes) -> None:
        if self._probes is not probes:
            return
        probes.close()
        self._probes = None
        self._log.warning("the probes are gone: until they are back, the kernel fires no triggers")
        self._host.no_contexts()

    def _refuse(self, connection: socket.socket, why: str) -> None:
        # Probes that are refused try again.
        if self._seldom.is_due(why, self._loop.time()):
            self._log.warning(f"probes are refused: {why}")
        with contextlib.suppress(OSError):
            send(connection, {"refused": why})
        connection.close()

    def _drop(self, connection: socket.socket) -> None:
        self._loop.remove_reader(connection)
        self._new.discard(connection)
        connection.close()
