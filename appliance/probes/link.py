# SPDX-License-Identifier: Apache-2.0
"""The way from the probes to the node: what each says, and what is done about it (packets.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.probes.native import RECORDS_WITHIN_S, NativeProbes, Newcomer
from appliance.probes_outbox import Outbox
from appliance.probes_packets import (
    FDS_MAX,
    MAP_BITS,
    PORT_BITS,
    USERS_MAX,
    BadPacket,
    Packet,
    fds_of,
    number_of,
    receive,
)
from runtime.log import Log
from runtime.main import die_if_it_fails


def _pid_of(pidfd: int) -> int:
    """In our namespace; -1 if it is gone, 0 if it has none there (pidfd_open(2), fdinfo)."""
    with Path(f"/proc/self/fdinfo/{pidfd}").open() as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key == "Pid":
                return int(value)
    raise OSError(f"fd {pidfd} is no pidfd")


# A node has sixteen in stock; each takes 200 KiB of the kernel's memory.
_WANT_BITS = 8


class Link:
    """A connection to the node, whose processes are watched while it lasts."""

    def __init__(
        self,
        connection: socket.socket,
        probes: NativeProbes,
        log: Log,
        ended: Callable[[], None],
        met: Callable[[], None],
    ) -> None:
        self._socket = connection
        self._probes = probes
        self._log = log
        self._on_end = ended
        self._on_met = met
        self._loop = asyncio.get_running_loop()
        # By the node's number: ours.
        self._watched: dict[int, int] = {}
        self._to_watch: dict[int, Packet] = {}
        # Not by the node's number any more: ours of those that are still registered.
        self._gone: list[int] = []
        self.welcomed = False
        self.refused = ""
        """Why the node takes no probes from here."""
        self._has_ended = False
        self._outbox = Outbox(connection, self._fail)
        self._loop.add_reader(connection, self._readable)

    @property
    def watched(self) -> int:
        """Processes that are watched."""
        return len(self._watched)

    def close(self) -> None:
        self._has_ended = True
        self._loop.remove_reader(self._socket)
        self._outbox.close()
        self._socket.close()
        self._probes.set_bell(None)
        self._gone += self._watched.values()
        self._watched.clear()
        self._forget_gone()
        self.welcomed = False

    def _ended(self) -> None:
        """Hear nothing more; whoever has this closes it."""
        self._has_ended = True
        self._loop.remove_reader(self._socket)
        self._on_end()

    def say(self, said: dict[str, Any], *, needed: bool = True) -> None:
        """Tell the node something; a node that does not listen is left.

        What is not ``needed`` is left out while the node has its hands full.
        """
        if needed or self._outbox.is_empty:
            self._outbox.say(said)

    def _fail(self, error: OSError) -> None:
        if isinstance(error, (BrokenPipeError, ConnectionResetError)):
            return  # it has hung up: what it said last comes first, then we read that
        self._log.warning(f"the node does not take what it is told: {error.strerror}")
        self._ended()

    @die_if_it_fails
    def _readable(self) -> None:
        # What waits is read in one go: many processes are watched as soon as one, or forgotten.
        while not self._has_ended and self._read_one():
            pass
        self._watch_all()

    def _read_one(self) -> bool:
        """Whether there may be more."""
        try:
            packet = receive(self._socket)
        except BlockingIOError:
            return False
        except (OSError, BadPacket) as error:
            self._log.warning(f"the node said something that cannot be read: {error}")
            self._ended()
            return False
        if packet is None:
            if self.welcomed:
                self._log.info("the node has hung up; connecting again")
            self._ended()
            return False
        is_kept = False
        try:
            is_kept = self._on_packet(packet)
        except BadPacket as error:
            self._log.warning(f"the node said something that makes no sense: {error}")
            self._ended()
        finally:
            if not is_kept:
                packet.close()
        return True

    def _on_packet(self, packet: Packet) -> bool:
        """Whether its fds are needed later."""
        match packet.said:
            case {"welcome": _, "node": node}:
                (bell,) = fds_of(packet, 1)
                self._probes.set_bell(bell)
                self.welcomed = True
                self._log.info(f"connected to node {node}")
                self._on_met()
            case {"refused": why}:
                self.refused = str(why)
                self._ended()
            case {"want": _}:
                self._send_contexts(number_of(packet, "want", _WANT_BITS))
            case {"watch": _}:
                number = number_of(packet, "watch", MAP_BITS)
                fds_of(packet, 2)
                self._let_go(number)
                self._to_watch[number] = packet
                return True
            case {"who": _}:
                self._on_who(packet)
            case {"exited": _}:
                self._let_go(number_of(packet, "exited"))
            case _:
                pass  # of a newer node
        return False

    def _on_who(self, packet: Packet) -> None:
        number, namespace, within_ns = (
            number_of(packet, key) for key in ("who", "namespace", "within_ns")
        )
        device = number_of(packet, "device", MAP_BITS)
        port = number_of(packet, "port", PORT_BITS)

        def answer() -> None:
            if self.welcomed and not self._has_ended:
                traces = self._probes.users(namespace, device, port, within_ns, USERS_MAX)
                self.say({"who": number, "traces": traces})

        # What the kernel has seen until now is known by then.
        self._loop.call_later(RECORDS_WITHIN_S, answer)

    def _send_contexts(self, count: int) -> None:
        while count > 0:
            some = min(count, FDS_MAX)
            count -= some
            with contextlib.ExitStack() as made:
                try:
                    fds = []
                    for _ in range(some):
                        fds.append(self._probes.make_context())
                        made.callback(os.close, fds[-1])
                except OSError as error:
                    self._log.warning(f"no context segments for the node: {error.strerror}")
                    self._ended()
                    return
                self._outbox.say({"contexts": len(fds)}, fds)

    def _let_go(self, number: int) -> None:
        """Of whoever had it the last word was said."""
        waits = self._to_watch.pop(number, None)
        if waits is not None:
            waits.close()
        ours = self._watched.pop(number, None)
        if ours is not None:
            self._gone.append(ours)

    def _forget_gone(self) -> None:
        gone, self._gone = self._gone, []
        if gone:
            self._probes.unregister(gone)

    def _watch_all(self) -> None:
        """Watch those of whom the node has told."""
        packets, self._to_watch = self._to_watch, {}
        newcomers = []
        try:
            for number, packet in packets.items():
                pidfd, context = fds_of(packet, 2)
                # What this process itself does would be taken for part of the trace that it
                # writes about.
                try:
                    if _pid_of(pidfd) != os.getpid():
                        newcomers.append(Newcomer(number, pidfd, context))
                except OSError as error:
                    self._say_watching(number, error)
            self._forget_gone()
            found = self._probes.register(newcomers)
        finally:
            for packet in packets.values():
                packet.close()
        for newcomer, ours in zip(newcomers, found, strict=True):
            if isinstance(ours, int):
                self._watched[newcomer.client] = ours
            self._say_watching(newcomer.client, ours)

    def _say_watching(self, number: int, found: int | OSError) -> None:
        if self._has_ended:
            return
        failed = {"error": str(found)} if isinstance(found, OSError) else {}
        self.say({"watching": number, **failed})
