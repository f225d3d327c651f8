# SPDX-License-Identifier: Apache-2.0
"""Keeps those out who connect to a Unix socket in a loop.

All who may connect share the backlog of a listening socket, and two processes
that do nothing but connect keep it full: others find no place in it. Whatever we
check when we accept comes too late for that. But connect() wants permission to
write to the socket's file, so an entry in the file's ACL has the kernel itself
refuse one user, before the backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.acl import READ_WRITE, write_acl

# What a filesystem takes on without further ado; ext4 has room for some 500.
_KEPT_OUT_MAX = 256

_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """From how many connections in a second on a user is kept out, and for how long.

    After a restart of the node each of a user's processes connects, 1024 at most,
    and some again. One that connects in a loop does so 20,000 times a second; so it
    is kept out after some 0.1 s, and can come back for as long every 10 s.
    """

    connections_per_s: int = 2048
    kept_out_s: float = 10.0


class Door:
    """Counts connections by user, in callbacks of the event loop."""

    def __init__(self, path: Path, limits: DoorLimits, free: frozenset[int]) -> None:
        """Whoever is ``free`` is never kept out."""
        self.limits = limits
        self._path = path
        self._free = free
        self._loop = asyncio.get_running_loop()
        self._knocks: Counter[int] = Counter()
        self._window_ends_s = 0.0
        self._kept_out: dict[int, asyncio.TimerHandle] = {}
        # A socket of the service manager's outlives the daemon that kept somebody out.
        self._let_all_in()

    def close(self) -> None:
        for timer in self._kept_out.values():
            timer.cancel()
        if self._kept_out:
            self._kept_out.clear()
            self._let_all_in()

    def _let_all_in(self) -> None:
        # Where it cannot be written, nobody was kept out.
        with contextlib.suppress(OSError):
            self._write_acl(())

    def knocked(self, uid: int) -> bool:
        """A user has connected. Whether it is kept out from now on; OSError if that cannot be."""
        now_s = self._loop.time()
        if now_s >= self._window_ends_s:
            self._knocks.clear()
            self._window_ends_s = now_s + _WINDOW_S
        self._knocks[uid] += 1
        # Of one that is kept out, what is in the backlog comes yet.
        if (
            self._knocks[uid] != self.limits.connections_per_s
            or uid in self._free
            or self.keeps_out(uid)
            or len(self._kept_out) >= _KEPT_OUT_MAX
        ):
            return False
        self._write_acl([*self._kept_out, uid])
        self._let_in_later(uid)
        return True

    def keeps_out(self, uid: int) -> bool:
        """Whether a user is kept out."""
        return uid in self._kept_out

    def _let_in_later(self, uid: int) -> None:
        self._kept_out[uid] = self._loop.call_later(self.limits.kept_out_s, self._let_in, uid)

    def _let_in(self, uid: int) -> None:
        del self._kept_out[uid]
        try:
            self._write_acl(self._kept_out)
        except FileNotFoundError:
            pass  # its ACL is gone with it
        except OSError:
            self._let_in_later(uid)  # the entry stands there still

    def _write_acl(self, kept_out: Iterable[int]) -> None:
        write_acl(self._path, dict.fromkeys(kept_out, 0), READ_WRITE)
