# SPDX-License-Identifier: Apache-2.0
"""Context segments: where they come from, and how attached processes go over to others.

A process shows its threads and fires its triggers in a context segment
(native/src/abi/context.h). Whoever has a reason to, as eBPF probes have, says where
segments come from from now on (``Contexts.use``), and all processes go over:

    data plane   drains both queues from here on
    service      keeps both segments, for a daemon that comes after this one
    manager
    process      is sent the new segment, and says when no thread is left in the old queue
    data plane   lets go of the old one when all that stood there is seen to

A process that never says so keeps both: what it fires arrives, whichever it uses.
So it is with a library that does not know the news, and with one that lies. A process
that connects again is sent the segment again, under the same number, and only
answers if it has that one already.

All processes at once are more than the event loop has time for: they go over in pieces.
Who could not be given another segment is tried again later, and when it connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from appliance.seldom import Seldom
from runtime.log import Log
from runtime.main import die_if_it_fails
from runtime.memfd import memfd

ContextSource = Callable[[int], int]
"""Makes a segment of so many bytes that are zero, a sealed memfd or a BPF array map: its fd,
which is its caller's to close. BlockingIOError: not now; ``Contexts.again`` says when."""

# In one turn of the event loop: each is a mapping that is filled under the node's lock, and
# two messages, some 0.2 ms together.
REPLACED_A_TURN = 16

# What was short, memory or a service manager that listens, is not back at once.
_AGAIN_S = 10.0

_NAME = re.compile(r"context(?:-([1-9][0-9]{0,9}))?")


def memfd_context(size: int) -> int:
    """Make a segment of a node without probes: as the data plane makes the first of a process."""
    fd = memfd("backsight-context")
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def context_part(number: int) -> str:
    """Under which the service manager keeps a segment, among what it keeps of the process."""
    return f"context-{number}" if number else "context"


def number_of_part(part: str) -> int | None:
    """Which segment is kept under a name; None: the name is of something else."""
    match = _NAME.fullmatch(part)
    return None if match is None else int(match[1] or 0)


class ContextDataPlane(Protocol):
    """What of the data plane is about contexts (native/src/node.h, "clients")."""

    @property
    def context_bytes(self) -> int:
        """Of a segment."""

    def client_context(self, number: int, fd: int) -> None:
        """Use that segment too, from now on. The caller closes fd."""

    def client_context_done(self, number: int) -> bool:
        """Let go of the one before; False if something of it is not seen to."""

    def client_adopt_context(self, number: int, fd: int) -> None:
        """Go on with the one before too, right after the client was adopted."""


class ContextStore(Protocol):
    """What the service manager keeps (``appliance.client_store``)."""

    def store_context(self, client_id: str, number: int, fd: int) -> None:
        """Keep one more of a process. OSError if it is not taken."""

    def forget_context(self, client_id: str, number: int) -> None:
        """Let go of one."""


class ContextLink(Protocol):
    """A way to the process."""

    def send_context(self, number: int, fd: int) -> None:
        """Send it a segment. If that fails, the process connects again."""


@dataclass(slots=True)
class Context:
    """The segment of a process, and of what is under way.

    Segments are numbered by process. ``before`` is the one that it may be in still,
    and ``fd`` the new one meanwhile. ``is_due``: it is to have yet another.
    """

    number: int = 0
    before: int | None = None
    fd: int | None = None
    is_answered: bool = False
    is_due: bool = False


class Process(Protocol):
    """A process, as far as its context goes (``appliance.clients.Client``)."""

    @property
    def number(self) -> int:
        """Its client number."""

    @property
    def pid(self) -> int:
        """Of the process."""

    @property
    def context(self) -> Context:
        """Its segment."""

    @property
    def link(self) -> ContextLink | None:
        """Its connection, while it has one."""

    @property
    def pidfd(self) -> int | None:
        """Of the process, while it lives."""

    @property
    def stored_as(self) -> str:
        """Under which id the service manager keeps it."""


class Watcher(Protocol):
    """Who looks into segments from outside, as probes do."""

    def watch(self, process: Process, fd: int) -> None:
        """A process is about to use that segment. The caller closes fd."""

    def exited(self, process: Process) -> None:
        """It is gone."""


class Contexts:
    """Gives processes their context segments."""

    def __init__(self, dataplane: ContextDataPlane, store: ContextStore, log: Log) -> None:
        self._dataplane = dataplane
        self._store = store
        self._log = log
        self._seldom = Seldom()
        self._loop = asyncio.get_running_loop()
        self._source: ContextSource = memfd_context
        self._watcher: Watcher | None = None
        # They have gone over; not all that they fired before is seen to.
        self._unsettled: list[Process] = []
        # To be replaced, by number: now, and when that failed, later.
        self._now: dict[int, Process] = {}
        self._later: dict[int, Process] = {}
        # When the source has some again.
        self._without: dict[int, Process] = {}
        self._turn: asyncio.Handle | None = None
        self._again: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Replace nothing any more."""
        self._now, self._later, self._without = {}, {}, {}
        for handle in (self._turn, self._again):
            if handle is not None:
                handle.cancel()

    def use(
        self,
        source: ContextSource,
        processes: Iterable[Process],
        watcher: Watcher | None = None,
    ) -> None:
        """Take segments from there from now on, and have these processes go over to such.

        ``watcher`` is told of each segment of that source.
        """
        self._source, self._watcher = source, watcher
        for process in processes:
            self._replace_soon(process)
        self._replace_some()

    def again(self) -> None:
        """Try again what had to wait for a source."""
        self._now |= self._without
        self._without = {}
        self._replace_some()

    def first(self, number: int, fd: int) -> int:
        """Give a process one of the source, in the place of ``fd``; OSError if there is none.

        Right after it was added: nobody has been told of the one that it has. The caller
        closes what is returned instead of ``fd``. If it is ``fd``, there was no other: the
        process goes over to one when there is (``given``).
        """
        if self._source is memfd_context:
            return fd
        try:
            made = self._source(self._dataplane.context_bytes)
        except BlockingIOError:
            return fd
        try:
            self._dataplane.client_context(number, made)
            self._dataplane.client_context_done(number)
        except OSError:
            os.close(made)
            raise
        os.close(fd)
        return made

    def given(self, process: Process, fd: int, *, of_source: bool) -> None:
        """Note which segment a new process has: one of the source, or one to do without for now."""
        if of_source and self._watcher is not None:
            self._watcher.watch(process, fd)
        if not of_source and self._source is not memfd_context:
            process.context.is_due = True

    def _replace_soon(self, process: Process) -> None:
        """Have a process go over to a new segment; if it is about to, once more after that."""
        process.context.is_due = True
        self._later.pop(process.number, None)
        self._without.pop(process.number, None)
        self._now[process.number] = process
        self._schedule()

    def _schedule(self) -> None:
        if self._now and self._turn is None:
            self._turn = self._loop.call_soon(self._on_turn)
        if self._later and self._again is None:
            self._again = self._loop.call_later(_AGAIN_S, self._on_again)

    @die_if_it_fails
    def _on_turn(self) -> None:
        self._turn = None
        self._replace_some()

    @die_if_it_fails
    def _on_again(self) -> None:
        self._again = None
        self._now |= self._later
        self._later = {}
        self._schedule()

    def _replace_some(self) -> None:
        for number in list(self._now)[:REPLACED_A_TURN]:
            process = self._now.pop(number)
            try:
                self._replace(process)
            except BlockingIOError:
                self._without[number] = process
            except OSError as error:
                self._later[number] = process
                self._say_failed(process, error)
                # Each further attempt would wait for the service manager as long as this one.
                if isinstance(error, TimeoutError):
                    self._later |= self._now
                    self._now = {}
                    break
        self._schedule()

    def _say_failed(self, process: Process, error: OSError) -> None:
        if self._seldom.is_due(error.errno, self._loop.time()):
            self._log.warning(
                f"process {process.pid} stays in its context segment for now, and others may, since"
                f" there is no other: {error.strerror}"
            )

    def _replace(self, process: Process) -> None:
        context = process.context
        if context.before is not None or process.link is None:
            return  # it stays due
        number = context.number + 1
        fd = self._make(process, number)
        context.is_due = False
        context.before, context.number = context.number, number
        context.fd, context.is_answered = fd, False
        if self._watcher is not None:
            self._watcher.watch(process, fd)
        process.link.send_context(number, fd)

    def _make(self, process: Process, number: int) -> int:
        with contextlib.ExitStack() as undo:
            fd = self._source(self._dataplane.context_bytes)
            undo.callback(os.close, fd)
            # Before anybody fires there: a daemon that comes after this one must have it.
            self._store.store_context(process.stored_as, number, fd)
            undo.callback(self._store.forget_context, process.stored_as, number)
            self._dataplane.client_context(process.number, fd)
            undo.pop_all()
        return fd

    def connected(self, process: Process) -> None:
        """Go on with a process that has connected again, where it was."""
        context = process.context
        if context.fd is not None and process.link is not None and not context.is_answered:
            process.link.send_context(context.number, context.fd)
        elif context.is_due:
            self._replace_soon(process)

    def moved(self, process: Process, number: int) -> bool:
        """Note that a process says that it has left the segment before. Whether it was asked to."""
        context = process.context
        if context.fd is None or number != context.number or context.is_answered:
            return False
        context.is_answered = True
        self._unsettled.append(process)
        self.settle()
        return True

    def settle(self) -> None:
        """Let go of segments of which all is seen to. Call it when events were."""
        waiting, self._unsettled = self._unsettled, []
        for process in waiting:
            if not self._dataplane.client_context_done(process.number):
                self._unsettled.append(process)
                continue
            context = process.context
            self._close(context)
            if context.before is not None:
                self._store.forget_context(process.stored_as, context.before)
                context.before = None
            if context.is_due:
                self._replace_soon(process)

    def exited(self, process: Process) -> None:
        """Ask a process for nothing more, which is gone. What it fired stands in both segments."""
        self._close(process.context)
        process.context.is_due = False
        self._now.pop(process.number, None)
        self._later.pop(process.number, None)
        self._without.pop(process.number, None)
        if process in self._unsettled:
            self._unsettled.remove(process)
        if self._watcher is not None:
            self._watcher.exited(process)

    def adopt(self, number: int, fds: dict[int, int]) -> Context:
        """Go on with a process that was adopted with the newest of these.

        They are numbered; the caller closes them.
        """
        newest, *others = sorted(fds, reverse=True)
        if not others:
            return Context(newest)
        self._dataplane.client_adopt_context(number, fds[others[0]])
        return Context(newest, others[0], os.dup(fds[newest]))

    def let_go(self, context: Context) -> None:
        """Of a process that was not taken up after all."""
        self._close(context)

    @staticmethod
    def _close(context: Context) -> None:
        if context.fd is not None:
            os.close(context.fd)
            context.fd = None
