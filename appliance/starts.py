# SPDX-License-Identifier: Apache-2.0
"""How long a node that fails again and again waits before it starts.

A service manager that counts starts gives up at some point (systemd's start limit), and
lets go of the pool with it. So it is to start the node at once and without end, and the
node paces itself. When it started last stands in a memfd that the service manager keeps
with the pool.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from runtime.log import Log
from runtime.memfd import memfd
from runtime.service_manager import ServiceManager, StoredFd

_NAME = "starts"

# The first wait is short, since somebody's footage may be at stake; the longest such that what
# processes trigger until a node is there again has room (BS_TRIGGER_CELLS: 256 of each, at 100 a
# second), with the service manager's wait and half a second to start.
_WAIT_FIRST_S = 0.05
_WAIT_MAX_S = 1.5

# A node that was there for so long is no failed start.
_HEALTHY_S = 10.0

# Starts in a row; when the last one began, by CLOCK_MONOTONIC.
_LAYOUT = struct.Struct("=QQ")


@dataclass(frozen=True, slots=True)
class Start:
    """One of ``in_a_row`` starts, each soon after the one before."""

    in_a_row: int
    began_ns: int

    def next_wait_s(self, now_ns: int) -> float:
        """How long the next start waits, if this one has ended now without being told to."""
        if self._was_healthy(now_ns):
            return 0.0
        doublings = min(self.in_a_row - 1, 10)  # by then it is over the bound
        return min(_WAIT_FIRST_S * (1 << doublings), _WAIT_MAX_S)

    def next(self, now_ns: int, waited_s: float) -> Start:
        """The next start."""
        began_ns = now_ns + int(waited_s * 1e9)
        return Start(1 if self._was_healthy(now_ns) else self.in_a_row + 1, began_ns)

    def _was_healthy(self, now_ns: int) -> bool:
        return now_ns - self.began_ns >= _HEALTHY_S * 1e9


def take_turn(
    manager: ServiceManager,
    given: Iterable[StoredFd],
    log: Log,
    sleep: Callable[[float], None] = time.sleep,
) -> list[StoredFd]:
    """Wait if this is one of many starts in a row; what the service manager kept besides.

    To be called first of all: what fails later counts as a failed start. end_well() takes it back.
    """
    given = list(given)
    kept = [item.fd for item in given if item.name == _NAME]
    if manager.is_there:
        last = next((start for start in map(_read, kept) if start is not None), None)
        now_ns = time.monotonic_ns()
        if last is None:
            this = Start(1, now_ns)
        else:
            wait_s = last.next_wait_s(now_ns)
            this = last.next(now_ns, wait_s)
            if wait_s:
                log.warning(
                    f"start {this.in_a_row} in a row, each within {_HEALTHY_S:g} s of the one"
                    f" before; begins in {wait_s:g} s"
                )
                sleep(wait_s)
        _keep(manager, this, log, instead=bool(kept))
    for fd in kept:
        os.close(fd)
    return [item for item in given if item.name != _NAME]


def end_well(manager: ServiceManager, log: Log) -> None:
    """The node ends since it was told to: whatever starts next does not wait."""
    try:
        manager.remove(_NAME)
    except OSError as error:
        log.warning(f"the service manager still keeps when this node started: {error.strerror}")


def _read(fd: int) -> Start | None:
    """None if it is not ours, as that of another version."""
    try:
        data = os.pread(fd, _LAYOUT.size + 1, 0)
    except OSError:
        return None
    if len(data) != _LAYOUT.size:
        return None
    in_a_row, began_ns = _LAYOUT.unpack(data)
    return Start(in_a_row, began_ns) if in_a_row else None


def _keep(manager: ServiceManager, start: Start, log: Log, *, instead: bool) -> None:
    memory = memfd("backsight-starts")
    try:
        os.write(memory, _LAYOUT.pack(start.in_a_row, start.began_ns))
        if instead:
            manager.remove(_NAME)
        manager.store(_NAME, memory)
    except OSError as error:
        log.warning(
            f"the service manager does not keep when this node started, so a node that fails"
            f" again and again does not wait between: {error.strerror}"
        )
    finally:
        os.close(memory)
