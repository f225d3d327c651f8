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

from appliance.probes.native import NativeProbes
from appliance.probes.packets import FDS_MAX, BadPacket, Packet, fds_of, number_of, receive, send
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


class Link:
    """A connection to the node, whose processes are watched while it lasts."""

    def __init__(
        self, connection: socket.socket, probes: NativeProbes, log: Log, ended: Callable[[], None]
    ) -> None:
        self._socket = connection
        self._probes = probes
        self._log = log
        self._on_end = ended
        self._loop = asyncio.get_running_loop()
        # By the node's number: ours.
        self._watched: dict[int, int] = {}
        self.welcomed = False
        self.refused = False
        self._loop.add_reader(connection, self._readable)

    @property
    def watched(self) -> int:
        """Processes that are watched."""
        return len(self._watched)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._probes.set_bell(None)
        for number in self._watched.values():
            self._probes.unregister(number)
        self._watched.clear()
        self.welcomed = False

    def _ended(self) -> None:
        """Hear nothing more; whoever has this closes it."""
        self._loop.remove_reader(self._socket)
        self._on_end()

    def say(self, said: dict[str, Any], *, needed: bool = True) -> None:
        """Tell the node something; a node that does not listen is left.

        What is not ``needed`` is left out while the node has its hands full.
        """
        try:
            send(self._socket, said)
        except OSError as error:
            if isinstance(error, BlockingIOError) and not needed:
                return
            self._log.warning(f"the node does not take what it is told: {error.strerror}")
            self._ended()

    @die_if_it_fails
    def _readable(self) -> None:
        try:
            packet = receive(self._socket)
        except BlockingIOError:
            return
        except (OSError, BadPacket) as error:
            self._log.warning(f"the node said something that cannot be read: {error}")
            self._ended()
            return
        if packet is None:
            if self.welcomed:
                self._log.info("the node has hung up; connecting again")
            self._ended()
            return
        try:
            self._on_packet(packet)
        except BadPacket as error:
            self._log.warning(f"the node said something that makes no sense: {error}")
            self._ended()
        finally:
            packet.close()

    def _on_packet(self, packet: Packet) -> None:
        match packet.said:
            case {"welcome": _, "node": node}:
                (bell,) = fds_of(packet, 1)
                self._probes.set_bell(bell)
                self.welcomed = True
                self._log.info(f"connected to node {node}")
            case {"refused": why}:
                self.refused = True
                self._log.error(f"the node takes no probes from here: {why}")
                self._ended()
            case {"want": _}:
                self._send_contexts(number_of(packet, "want"))
            case {"watch": _}:
                self._watch(number_of(packet, "watch"), *fds_of(packet, 2))
            case {"exited": _}:
                ours = self._watched.pop(number_of(packet, "exited"), None)
                if ours is not None:
                    self._probes.unregister(ours)
            case _:
                pass  # of a newer node

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
                    send(self._socket, {"contexts": len(fds)}, fds)
                except OSError as error:
                    self._log.warning(f"no context segments for the node: {error.strerror}")
                    self._ended()
                    return

    def _watch(self, number: int, pidfd: int, context: int) -> None:
        before = self._watched.pop(number, None)
        if before is not None:
            self._probes.unregister(before)
        try:
            # What this process itself does would be taken for part of the trace that it
            # writes about.
            if _pid_of(pidfd) == os.getpid():
                return
            self._watched[number] = self._probes.register(number, pidfd, context)
        except OSError as error:
            self.say({"watching": number, "error": str(error)})
        else:
            self.say({"watching": number})
