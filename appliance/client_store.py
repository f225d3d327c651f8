# SPDX-License-Identifier: Apache-2.0
"""What the service manager keeps of clients, for the daemon that comes after this one.

Of a client one fd, named <id>.client, where the id is the beginning of its token in hex: a
*bundle*, a socket in whose queue one message waits. Its text says whose it is, and its fds are the
arena, the channel and the context. It is read without being taken out, so that the service
manager's copy stays whole. While a client goes over from one context to another
(``appliance.contexts``), the new one is kept beside it, as <id>.context-N. Once the old one is
left, a bundle without it takes the place of the first: <id>.client-1, and next <id>.client again.

Not an fd for each part, since systemd compares each that it is given with all that it has
(kcmp(2)), and serves nobody else meanwhile: with four of each of 256 clients, 50 processes a
second that came and went kept it from answering for half a minute. Nor what is said of it in
the names: all names together must fit into one environment variable (runtime.service_manager).
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.contexts import context_part
from runtime.log import Log
from runtime.service_manager import ServiceManager, StoredFd

_BUNDLES = ("client", "client-1")

# As it was before there were bundles: each part under its own name, and this is what is said.
_ABOUT = "about"
_PARTS = ("arena", "channel", context_part(0))

_NAME = re.compile(rf"([0-9a-f]{{12}})\.({'|'.join((*_BUNDLES, _ABOUT, *_PARTS))}|context-[0-9]+)")

# It is ours, but a store is only as good as who fills it. A process may be in thousands of groups.
_TEXT_BYTES_MAX = 128 << 10
_PARTS_MAX = 8


@dataclass(slots=True)
class Found:
    """A client that came back: what is said of it, and its parts, which the caller closes."""

    client_id: str
    about: Any = None
    parts: dict[str, int] = field(default_factory=dict)
    error: Exception | None = None
    """Why it cannot be read."""


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Its name behind the id, our own copy, and what is in it."""

    name: str
    fd: int
    parts: tuple[str, ...]


@dataclass(slots=True)
class _Kept:
    """What the service manager has of a client, by name behind the id."""

    names: set[str] = field(default_factory=set)
    bundle: _Bundle | None = None


class ClientStore:
    """Has the service manager keep clients. To close it lets go of none."""

    def __init__(self, manager: ServiceManager, log: Log) -> None:
        self._manager = manager
        self._log = log
        self._kept: dict[str, _Kept] = {}
        self._is_stuck = False

    def close(self) -> None:
        """Close our own copies."""
        for kept in self._kept.values():
            if kept.bundle is not None:
                os.close(kept.bundle.fd)
        self._kept.clear()

    def store(self, client_id: str, about: Any, parts: Mapping[str, int]) -> None:  # noqa: ANN401
        """Keep a client. OSError if the manager does not take it."""
        if self._manager.is_there:
            kept = self._kept[client_id] = _Kept()
            self._store_bundle(client_id, kept, about, parts)

    def forget(self, client_id: str) -> None:
        """Let go of a client."""
        kept = self._kept.pop(client_id, None)
        if kept is None:
            return
        if kept.bundle is not None:
            os.close(kept.bundle.fd)
        try:
            for name in sorted(kept.names):
                self._remove(client_id, kept, name)
        except OSError as error:
            # It comes back at the next start, as a client whose process is gone.
            self._log.warning(
                f"the service manager still keeps client {client_id}: {error.strerror}"
            )

    def store_context(self, client_id: str, number: int, fd: int) -> None:
        """Keep one more of its contexts. OSError if the manager does not take it."""
        name = context_part(number)
        self._manager.store(f"{client_id}.{name}", fd)
        if client_id in self._kept:
            self._kept[client_id].names.add(name)

    def forget_context(self, client_id: str, number: int) -> None:
        """Let go of one of its contexts."""
        part = context_part(number)
        kept = self._kept.get(client_id, _Kept())
        try:
            if kept.bundle is None or part not in kept.bundle.parts:
                self._remove(client_id, kept, part)
            else:
                self._leave_out(client_id, kept, kept.bundle, part)
        except OSError as error:
            # A daemon that comes after this one asks the process about it once more.
            self._log.warning(
                f"the service manager still keeps {client_id}.{part}: {error.strerror}"
            )

    def recover(self, stored: Iterable[StoredFd]) -> list[Found]:
        """All that came back, in any order; the caller renews what is taken up, and forgets the rest.

        What is not ours is closed, and the log says so.
        """
        by_id: dict[str, dict[str, int]] = {}
        for item in stored:
            match = _NAME.fullmatch(item.name)
            if match is None or match[2] in by_id.get(match[1], {}):
                self._log.warning(f"a stored fd named {item.name!r} is not ours, or there twice")
                os.close(item.fd)
            else:
                by_id.setdefault(match[1], {})[match[2]] = item.fd
        return [self._recover(client_id, fds) for client_id, fds in by_id.items()]

    def renew(self, found: Found) -> None:
        """Have one bundle of it, and beside that only contexts."""
        client_id = found.client_id
        kept = self._kept[client_id]
        if self._is_stuck:
            return
        try:
            if kept.bundle is None:
                parts = {part: found.parts[part] for part in _PARTS if part in found.parts}
                self._store_bundle(client_id, kept, found.about, parts)
            for name in sorted(kept.names & {*_BUNDLES, _ABOUT, *_PARTS}):
                if kept.bundle is None or name != kept.bundle.name:
                    self._remove(client_id, kept, name)
        except OSError as error:
            # Each further attempt might wait as long as this one.
            self._is_stuck = True
            self._log.warning(f"clients are kept as they were: {error.strerror}")

    # ------------------------------------------------------------- recovering

    def _recover(self, client_id: str, fds: dict[str, int]) -> Found:
        kept = self._kept[client_id] = _Kept(set(fds))
        found = Found(client_id)
        try:
            if kept.names.isdisjoint(_BUNDLES):
                found.about = json.loads(os.pread(fds[_ABOUT], _TEXT_BYTES_MAX, 0))
            else:
                self._open_bundles(kept, fds, found)
            for part in fds.keys() - {*_BUNDLES, _ABOUT} - found.parts.keys():
                found.parts[part] = fds.pop(part)
        except (OSError, ValueError, KeyError, TypeError) as error:
            found.error = error
        finally:
            for fd in fds.values():
                os.close(fd)
        return found

    @staticmethod
    def _open_bundles(kept: _Kept, fds: dict[str, int], found: Found) -> None:
        """Of two, the smaller one was to take the place of the other."""
        for name in _BUNDLES:
            if name not in fds:
                continue
            about, parts = _unbundled(fds[name])
            if kept.bundle is not None and len(parts) >= len(kept.bundle.parts):
                _close(parts)
                continue
            if kept.bundle is not None:
                os.close(kept.bundle.fd)
                _close(found.parts)
            kept.bundle = _Bundle(name, fds.pop(name), tuple(parts))
            found.about, found.parts = about, parts

    # ---------------------------------------------------------------- bundles

    def _store_bundle(
        self,
        client_id: str,
        kept: _Kept,
        about: Any,  # noqa: ANN401
        parts: Mapping[str, int],
    ) -> None:
        """Keep it instead of the one before."""
        before = kept.bundle
        name = _BUNDLES[0] if before is None else _BUNDLES[1 - _BUNDLES.index(before.name)]
        fd = _bundled(about, parts)
        try:
            self._manager.store(f"{client_id}.{name}", fd)
        except OSError:
            os.close(fd)
            raise
        kept.names.add(name)
        kept.bundle = _Bundle(name, fd, tuple(parts))
        if before is not None:
            os.close(before.fd)
            self._remove(client_id, kept, before.name)

    def _leave_out(self, client_id: str, kept: _Kept, bundle: _Bundle, part: str) -> None:
        about, parts = _unbundled(bundle.fd)
        try:
            rest = {name: fd for name, fd in parts.items() if name != part}
            self._store_bundle(client_id, kept, about, rest)
        finally:
            _close(parts)

    def _remove(self, client_id: str, kept: _Kept, name: str) -> None:
        self._manager.remove(f"{client_id}.{name}")
        kept.names.discard(name)


def _bundled(about: Any, parts: Mapping[str, int]) -> int:  # noqa: ANN401
    """A bundle; the caller closes it, and keeps the parts."""
    text = json.dumps({"about": about, "parts": list(parts)}).encode()
    inner, outer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with inner, outer:
        socket.send_fds(inner, [text], list(parts.values()))
        return outer.detach()


def _unbundled(fd: int) -> tuple[Any, dict[str, int]]:
    """What is said in a bundle, and its parts, which the caller closes. OSError, ValueError."""
    # Not by recv_fds(), which takes flags and does not pass them on (Python 3.11).
    with socket.socket(fileno=os.dup(fd)) as bundle:
        text, ancillary, _, _ = bundle.recvmsg(
            _TEXT_BYTES_MAX,
            socket.CMSG_SPACE(4 * _PARTS_MAX),
            socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
        )
    fds: list[int] = []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += memoryview(content[: len(content) & ~3]).cast("i")
    try:
        said = json.loads(text)
        parts = dict(zip(said["parts"], fds, strict=True))
        return said["about"], parts
    except (ValueError, KeyError, TypeError) as error:
        for one in fds:
            os.close(one)
        raise ValueError(f"its bundle cannot be read: {error!r}") from error


def _close(parts: Mapping[str, int]) -> None:
    for fd in parts.values():
        os.close(fd)
