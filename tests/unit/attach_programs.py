# SPDX-License-Identifier: Apache-2.0
"""Processes of all kinds of users that connect to a node, one function each.

    python3 -m tests.unit.attach_programs NAME ARGUMENTS

What they tell the test, they print; what they shall do next, they read, a line each.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from unittest import mock

from runtime.unix_socket import is_hung_up
from tests.unit.attach_harness import UNKNOWN_OPTION, Peer, node, open_directory, request


def become(uid: int, gid: int, groups: list[int]) -> None:
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)


def connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    return connection


def asked(path: str, service: str = "other") -> tuple[socket.socket, int]:
    """A connection that asked to be attached, and the status of the answer."""
    connection = connected(path)
    # Who may not attach is answered, and the connection closed, at once.
    with contextlib.suppress(BrokenPipeError):
        connection.send(request(service=service.encode()))
    while True:
        # An error comes once, and before the answer.
        with contextlib.suppress(ConnectionResetError):
            return connection, status_of(connection.recv(1000))


def status_of(reply: bytes) -> int:
    return int(struct.unpack_from("=IIi", reply)[2])


def client(path: str, uid: str, gid: str, *groups: str) -> None:
    """Ask to be attached; the status. Stay."""
    become(int(uid), int(gid), [int(group) for group in groups])
    stay(*asked(path))


def client_of(service: str, path: str, uid: str) -> None:
    """The same, of a service."""
    become(int(uid), int(uid), [])
    stay(*asked(path, service))


def stay(connection: socket.socket, status: int) -> None:
    """Say what came of it, and hold the connection."""
    print(status, flush=True)
    sys.stdin.read()
    connection.close()


def client_with_heir(path: str) -> None:
    """Attach, and exit; a child holds the connection, and says what it is when it is told to."""
    connection, status = asked(path)
    if os.fork():
        print(status, flush=True)
        os._exit(0)
    sys.stdin.readline()
    print("closed" if is_hung_up(connection) else "open", flush=True)


def client_again_and_again(path: str, uid: str, times: str) -> None:
    """Ask so often; the statuses, counted."""
    become(int(uid), int(uid), [])
    statuses = collections.Counter(asked(path)[1] for _ in range(int(times)))
    print(json.dumps(statuses), flush=True)


def silent(path: str, uid: str, count: str) -> None:
    """Open so many connections and say nothing; when told to, what came of them, counted."""
    become(int(uid), int(uid), [])
    connections = [connected(path) for _ in range(int(count))]
    print("open", flush=True)
    while sys.stdin.readline():
        print(json.dumps(collections.Counter(map(outcome, connections))), flush=True)


def outcome(connection: socket.socket) -> str:
    """What came of a connection that said nothing: "waits", "closed", or the status it got first."""
    connection.setblocking(False)
    try:
        reply = connection.recv(1000)
        if not reply:
            return "closed"
        return f"{status_of(reply)}, {outcome(connection)}"
    except BlockingIOError:
        return "waits"


def loop(path: str, uid: str, times: str) -> None:
    """Connect in a loop until that is not permitted; when told to, until it is again."""
    become(int(uid), int(uid), [])
    print(
        "kept out" if not all(may_connect(path) for _ in range(int(times))) else "never", flush=True
    )
    sys.stdin.readline()
    # To be refused takes microseconds: many times the second for which it is kept out.
    print("in" if any(may_connect(path) for _ in range(1000 * int(times))) else "never", flush=True)


def may_connect(path: str) -> bool:
    try:
        connected(path).close()
    except PermissionError:
        return False
    return True


def pid_reuse(kernel: str, when: str) -> None:
    """In a pid namespace: connect, exit, and have another process with that pid; the status.

    ``kernel``: "new" or "old", which does not know SO_PEERPIDFD. ``when``: the node
    accepts "before" that exit, or "after" the other process has started.
    """
    with (
        mock.patch("appliance.process.SO_PEERPIDFD", UNKNOWN_OPTION)
        if kernel == "old"
        else contextlib.nullcontext(),
        open_directory() as directory,
    ):
        print(asyncio.run(_attach_by_reused_pid(directory, accept_first=when == "before")))


async def _attach_by_reused_pid(directory: Path, *, accept_first: bool) -> int:
    async with node(directory, uids=frozenset({0})) as here:
        # The credentials are of whoever calls connect(); the end stays open here.
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            end.connect(str(here.path))
            theirs.send(b"connected")
            theirs.recv(1)
            os._exit(0)
        ours.recv(100)
        if accept_first:
            for _ in range(3):
                await asyncio.sleep(0)
        assert here.server.counters.connections == accept_first
        ours.send(b"exit")
        other = _successor_of(pid)
        reply = await Peer(end).ask(request())
        os.kill(other, signal.SIGKILL)
        return reply.status


def _successor_of(pid: int) -> int:
    """Wait until a child exits, and start another with its pid."""
    os.waitpid(pid, 0)
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    other = os.fork()
    if other == 0:
        signal.pause()
    assert other == pid
    return other


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
