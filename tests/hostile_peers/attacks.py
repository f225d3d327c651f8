# SPDX-License-Identifier: Apache-2.0
"""What a peer does to a coordinator: ``python3 -m tests.hostile_peers.attacks ATTACK ENDPOINT CA [DIRECTORY]``.

CA: by which the coordinator's certificate is checked; DIRECTORY: with the certificate that is
shown. Without both: in clear text. Or ``... ATTACK unix:PATH UID``: at a Unix socket, as that user.
Prints what came of it, as JSON, when it is over.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile_peers.http2 import Http2, Shown, connected, is_open

_MESSAGE_BYTES = 4 << 20
_LARGE_BYTES = 1 << 30
_ATTACK_S = 3.0
# What is too much is ended at once when memory grows by it. Where it is in what the heap has left
# from others, the coordinator looks every ten seconds.
_LOOKED_AT_S = 15.0

# Its address is barred afterwards, and others are to attack from theirs.
CROWD_FROM = "127.0.0.12"

Result = dict[str, int]


class Attacker:
    """Whoever it is, with whatever certificate."""

    def __init__(self, endpoint: str, shown: Shown | None) -> None:
        self._endpoint = endpoint
        self._shown = shown

    @contextlib.contextmanager
    def _connections(
        self, number: int, source: str = "", *, heeds: bool = True, reads: bool = True
    ) -> Iterator[list[Http2]]:
        with contextlib.ExitStack() as stack:
            opened = []
            for _ in range(number):
                with contextlib.suppress(OSError, ssl.SSLError):
                    one = Http2(self._endpoint, self._shown, source, heeds=heeds, reads=reads)
                    opened.append(stack.enter_context(one))
            yield opened

    def _fill(self, connections: list[Http2], bytes_max: int, lasts_s: float = _ATTACK_S) -> Result:
        """Send all that the coordinator lets, for some seconds, but never the last byte."""
        until_s = time.monotonic() + lasts_s
        sent = 0
        while time.monotonic() < until_s and not all(one.ended for one in connections):
            for one in connections:
                one.listen(0.01)
                sent += one.fill(bytes_max)
        return {
            "connections": len(connections),
            "sent_bytes": sent,
            "ended": sum(one.ended for one in connections),
        }

    def unfinished(self) -> Result:
        """Messages of the largest size that is allowed, on as many streams as may be."""
        with self._connections(4) as connections:
            for one in connections:
                one.listen(0.2)
                for _ in range(64):
                    one.call("Control", _MESSAGE_BYTES)
            return self._fill(connections, _MESSAGE_BYTES - 1)

    def endless(self) -> Result:
        """One message of a GiB."""
        with self._connections(1) as connections:
            for one in connections:
                one.listen(0.2)
                one.call("Slices", _LARGE_BYTES)
            return self._fill(connections, _LARGE_BYTES - 1)

    def question(self) -> Result:
        """The same as a question, on two connections."""
        with self._connections(2) as connections:
            for one in connections:
                one.listen(0.2)
                one.call("ListTraces", _LARGE_BYTES)
            return self._fill(connections, _LARGE_BYTES - 1, _LOOKED_AT_S)

    def questions(self) -> Result:
        """Two hundred questions that never end, from ten addresses, each within what one connection may."""
        with contextlib.ExitStack() as stack:
            opened = []
            for number in range(200):
                source = f"127.0.0.{2 + number % 10}"
                with contextlib.suppress(OSError, ssl.SSLError):
                    one = stack.enter_context(Http2(self._endpoint, self._shown, source))
                    one.listen(0.01)
                    one.call("GetTrace", _MESSAGE_BYTES)
                    opened.append(one)
            return self._fill(opened, _MESSAGE_BYTES - 1)

    def gibibytes(self) -> Result:
        """Questions of a GiB, on half of a few connections more of them than one may have."""
        with self._connections(8) as connections:
            for number, one in enumerate(connections):
                one.listen(0.1)
                for _ in range(64 if number % 2 else 1):
                    one.call("ListTraces", _LARGE_BYTES)
            return self._fill(connections, _LARGE_BYTES - 1, _LOOKED_AT_S)

    def bomb(self) -> Result:
        """A small message that would be a large one."""
        packed = gzip.compress(bytes(256 << 20), 9)
        sent = 0
        with self._connections(1) as connections:
            for one in connections:
                one.listen(0.5)
                number = one.call("Control", len(packed), b"gzip")
                until_s = time.monotonic() + _ATTACK_S
                while sent < len(packed) and time.monotonic() < until_s and not one.ended:
                    room = min(one.streams[number].window, 16384)
                    if room > 0:
                        one.write(number, packed[sent : sent + room])
                        sent += room
                    one.listen(0.005)
                one.listen(2)
            return {"connections": len(connections), "sent_bytes": sent}

    def silent(self) -> Result:
        """A thousand connections on which nothing is said."""
        opened = [connected(self._endpoint) for _ in range(1000)]
        time.sleep(_ATTACK_S)  # what it does is to be there
        still = sum(map(is_open, opened))
        for one in opened:
            one.close()
        return {"connections": len(opened), "open": still}

    def calls(self) -> Result:
        """A hundred streams, each on its own connection."""
        with self._connections(100) as connections:
            for one in connections:
                one.call("Control", 100)
            for one in connections:
                one.listen(0.05)
            return {
                "connections": len(connections),
                "refused": sum(
                    stream.window < 0 for one in connections for stream in one.streams.values()
                ),
            }

    def crowd(self) -> Result:
        """A hundred thousand calls on two connections, which do not say that they heard what is allowed."""
        with self._connections(2, CROWD_FROM, heeds=False) as connections:
            for one in connections:
                one.listen(0.2)
            for number in range(50_000):
                for one in connections:
                    # Such as gRPC refuses itself, and such as we do.
                    one.call("Nothing" if number % 2 else "Control", 4)
                if all(one.ended for one in connections):
                    break
            return {
                "connections": len(connections),
                "ended": sum(one.ended for one in connections),
            }

    def unread(self) -> Result:
        """As many calls as each connection may have, on many, whose answers have nowhere to go."""
        with self._connections(60, reads=False) as connections:
            for one in connections:
                for _ in range(64):
                    one.call("Check", 0, service="grpc.health.v1.Health")
            until_s = time.monotonic() + _ATTACK_S
            while time.monotonic() < until_s:
                for one in connections:
                    one.listen(0.01)
            return {
                "connections": len(connections),
                "ended": sum(one.ended for one in connections),
            }

    def noise(self) -> Result:
        """Calls that are refused, one after the other."""
        refused = 0
        until_s = time.monotonic() + _ATTACK_S
        while time.monotonic() < until_s:
            with self._connections(1) as connections:
                for one in connections:
                    number = one.call("Control", 4)
                    one.write(number, struct.pack(">I", 0xFFFFFFFF))
                    one.listen(0.02)
                    refused += 1
        return {"refused": refused}


def main() -> int:
    """Attack, and tell."""
    attack, endpoint, *files = sys.argv[1:]
    shown = None
    if endpoint.startswith("unix:"):
        uid = int(files[0])
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    elif files:
        ca, *directory = map(Path, files)
        shown = Shown(ca, directory[0] if directory else None)
    do: Callable[[], Result] = getattr(Attacker(endpoint, shown), attack)
    print(json.dumps(do()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
