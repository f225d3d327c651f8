# SPDX-License-Identifier: Apache-2.0
"""Who has nothing to show, asks everywhere for what is stored: how often, and how often he got it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path

import grpc

# Nobody's number, on all machines.
_USER = 65534

_PATHS = (
    "/api/services",
    "/api/traces?service=service-honest-1&lookback=1h",
    "/api/v3/services",
    "/api/dependencies?endTs=1&lookback=1",
)
_HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"Authorization": "Bearer x"},
    {"Authorization": "Basic cm9vdDpyb290"},
    {"Host": "evil.example.com"},
)
_METHODS = ("ListTraces", "GetTrace", "ListNodes", "GetCounters", "TakeSnapshot")

_AS_NOBODY = """
import grpc, json, sys
got, asked, said = 0, 0, set()
for endpoint in sys.argv[1:]:
    for method in ("ListTraces", "ListNodes", "GetCounters", "TakeSnapshot"):
        with grpc.insecure_channel(endpoint) as channel:
            asked += 1
            try:
                call = channel.unary_stream(f"/backsight.v1.Coordinator/{method}", None, None)
                got += sum(1 for _ in call(b"", timeout=10))
            except grpc.RpcError as error:
                said.add(error.code().name)
print(json.dumps({"asked": asked, "got": got, "said": sorted(said)}))
"""


def over_http(endpoint: str, seconds: float) -> Counter[str]:
    """Without a token, or with one that nobody gave him."""
    counts: Counter[str] = Counter()
    until_s = time.monotonic() + seconds
    host, _, port = endpoint.rpartition(":")
    while time.monotonic() < until_s:
        for path in _PATHS:
            for headers in _HEADERS:
                with (
                    contextlib.suppress(OSError, http.client.HTTPException),
                    contextlib.closing(http.client.HTTPConnection(host, int(port), 10)) as asked,
                ):
                    asked.request("GET", path, headers=headers)
                    status = asked.getresponse().status
                    counts["asked"] += 1
                    counts[f"status {status}"] += 1
                    counts["got"] += status == 200
        time.sleep(0.05)  # that others have the machine too
    return counts


def over_grpc(endpoint: str, seconds: float) -> Counter[str]:
    """In clear text, where certificates are wanted."""
    counts: Counter[str] = Counter()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        for method in _METHODS:
            with grpc.insecure_channel(
                endpoint, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                counts["asked"] += 1
                call = channel.unary_stream(f"/backsight.v1.Coordinator/{method}", None, None)
                try:
                    counts["got"] += sum(1 for _ in call(b"", timeout=5))
                except grpc.RpcError as error:
                    counts[error.code().name] += 1
    return counts


def at_the_socket(path: Path) -> Counter[str]:
    """As a user whom nobody named, also round the relay."""
    done = subprocess.run(
        ["/usr/bin/python3", "-c", _AS_NOBODY, f"unix:{path}", f"unix:{path}.grpc"],
        user=_USER,
        group=_USER,
        extra_groups=(),
        cwd="/",
        env={},
        stdout=subprocess.PIPE,
        check=True,
    )
    said = json.loads(done.stdout)
    counts = Counter({"asked": said["asked"], "got": said["got"]})
    counts.update(said["said"])
    return counts


def idle(endpoints: list[str], seconds: float) -> Counter[str]:
    """Two hundred connections with each, on which nothing is said, made anew when they end."""
    counts: Counter[str] = Counter()
    until_s = time.monotonic() + seconds
    opened: list[socket.socket] = []
    try:
        while time.monotonic() < until_s:
            for one in [one for one in opened if _is_over(one)]:
                one.close()
                opened.remove(one)
            for endpoint in endpoints:
                host, _, port = endpoint.rpartition(":")
                of_it = sum(_port(one) == int(port) for one in opened)
                for _ in range(200 - of_it):
                    with contextlib.suppress(OSError):
                        opened.append(socket.create_connection((host, int(port)), 5))
                        counts["connections"] += 1
            time.sleep(0.2)  # what they do is to be there
    finally:
        for one in opened:
            one.close()
    return counts


def _port(connection: socket.socket) -> int:
    try:
        port: int = connection.getpeername()[1]
    except OSError:
        return 0
    return port


def _is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
