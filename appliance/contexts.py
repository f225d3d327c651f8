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
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from runtime.log import Log
from runtime.service_manager import ServiceManager

ContextSource = Callable[[int], int]
"""Makes a segment of so many bytes that are zero, a sealed memfd or a BPF array map: its fd,
which is its caller's to close."""

_NAME = re.compile(r"context(?:-([1-9][0-9]{0,9}))?")


def memfd_context(size: int) -> int:
    """Make a segment of a node without probes: as the data plane makes the first of a process."""
    fd = os.memfd_create("backsight-context", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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

    @property
    def parts(self) -> list[str]:
        """The names of what the service manager keeps, the oldest first."""
        before = [] if self.before is None else [context_part(self.before)]
        return [*before, context_part(self.number)]


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
    def stored_as(self) -> str:
        """What the names of its stored fds begin with."""


class Contexts:
    """Gives processes their context segments."""

    def __init__(self, dataplane: ContextDataPlane, manager: ServiceManager, log: Log) -> None:
        self._dataplane = dataplane
        self._manager = manager
        self._log = log
        self._source: ContextSource = memfd_context
        # They have gone over; not all that they fired before is seen to.
        self._unsettled: list[Process] = []

    def use(self, source: ContextSource) -> None:
        """Take segments from there from now on."""
        self._source = source

    def first(self, number: int, fd: int) -> int:
        """Give a process one of the source, in the place of ``fd``; OSError if there is none.

        Right after it was added: nobody has been told of the one that it has. The caller
        closes what is returned instead of ``fd``.
        """
        if self._source is memfd_context:
            return fd
        made = self._source(self._dataplane.context_bytes)
        try:
            self._dataplane.client_context(number, made)
            self._dataplane.client_context_done(number)
        except OSError:
            os.close(made)
            raise
        os.close(fd)
        return made

    def replace(self, process: Process) -> None:
        """Have a process go over to a new segment; if it is about to, once more after that."""
        context = process.context
        if context.before is not None or process.link is None:
            context.is_due = True
            return
        context.is_due = False
        number = context.number + 1
        try:
            fd = self._make(process, f"{process.stored_as}.{context_part(number)}")
        except OSError as error:
            self._log.warning(
                f"process {process.pid} stays in its context segment, since there is no other:"
                f" {error.strerror}"
            )
            return
        context.before, context.number = context.number, number
        context.fd, context.is_answered = fd, False
        process.link.send_context(number, fd)

    def _make(self, process: Process, name: str) -> int:
        with contextlib.ExitStack() as undo:
            fd = self._source(self._dataplane.context_bytes)
            undo.callback(os.close, fd)
            # Before anybody fires there: a daemon that comes after this one must have it.
            self._manager.store(name, fd)
            undo.callback(self._forget, name)
            self._dataplane.client_context(process.number, fd)
            undo.pop_all()
        return fd

    def connected(self, process: Process) -> None:
        """Go on with a process that has connected again, where it was."""
        context = process.context
        if context.fd is not None and process.link is not None and not context.is_answered:
            process.link.send_context(context.number, context.fd)
        elif context.is_due:
            self.replace(process)

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
                self._forget(f"{process.stored_as}.{context_part(context.before)}")
                context.before = None
            if context.is_due:
                self.replace(process)

    def exited(self, process: Process) -> None:
        """Ask a process for nothing more, which is gone. What it fired stands in both segments."""
        self._close(process.context)
        process.context.is_due = False
        if process in self._unsettled:
            self._unsettled.remove(process)

    def adopt(self, number: int, fds: dict[int, int]) -> Context:
        """Go on with a process that was adopted with the newest of these.

        They are numbered; the caller closes them.
        """
        newest, *others = sorted(fds, reverse=True)
        if not others:
            return Context(newest)
        self._dataplane.client_adopt_context(number, fds[others[0]])
        return Context(newest, others[0], os.dup(fds[newest]))

    def _forget(self, name: str) -> None:
        try:
            self._manager.remove(name)
        except OSError as error:
            # A daemon that comes after this one asks the process about it once more.
            self._log.warning(f"the service manager still keeps {name}: {error.strerror}")

    @staticmethod
    def _close(context: Context) -> None:
        if context.fd is not None:
            os.close(context.fd)
            context.fd = None
