# SPDX-License-Identifier: Apache-2.0
"""Where the coordinator's gRPC listens, and how much it takes in there."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc

from protocol import wire

_OPTIONS = [
    ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", wire.MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a second coordinator must not share the port
    # Or a small message would become as large a one as a peer likes.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Who connects, says something soon; and who has no call any more, hangs up or is gone.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
    # Nodes send a ping each 30 s at most; a quarter of that is no abuse yet.
    ("grpc.http2.min_ping_interval_without_data_ms", 7500),
    ("grpc.http2.max_ping_strikes", 0),
    # A node that vanished without a word is noticed within a minute.
    ("grpc.keepalive_time_ms", 40_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Saves a ping for each few frames of data.
    ("grpc.http2.bdp_probe", 0),
]


# A stream that was ended lasts, with a message, until its peer reads that it was; a node has
# one on a connection, backsightctl a few.
CALLS_OF_A_CONNECTION = 64


def options(*, identified: bool) -> list[tuple[str, int]]:
    """Of the server. Who says who he is has one call at a time on a connection (coordinator.rpc.budget)."""
    calls = 1 if identified else CALLS_OF_A_CONNECTION
    return [*_OPTIONS, ("grpc.max_concurrent_streams", calls)]


def add_port(
    server: grpc.aio.Server, endpoint: str, credentials: grpc.ServerCredentials | None
) -> int:
    """Have a server listen there, at which port; OSError says why it cannot.

    Credentials None: in clear text.
    """
    # First, since gRPC says it on standard error, and in its own words.
    reason = _why_not(endpoint)
    if reason is None:
        try:
            port = (
                server.add_insecure_port(endpoint)
                if credentials is None
                else server.add_secure_port(endpoint, credentials)
            )
        except RuntimeError:
            port = 0
        if port != 0:
            return port
        reason = "gRPC refused it"
    raise OSError(
        f"listen: cannot listen on {endpoint}: {reason}; give it another endpoint, of"
        " this machine and free"
    )


def add_unix_socket(server: grpc.aio.Server, path: Path) -> None:
    """Have a server listen there; OSError if it cannot."""
    try:
        port = server.add_insecure_port(f"unix:{path}")
    except RuntimeError:
        port = 0
    if port == 0:
        raise OSError(
            f"access.socket: cannot listen on {path}; name another path as `access.socket`"
        )


def _why_not(endpoint: str) -> str | None:
    """Why nothing can listen there; None if something can."""
    host, _, port = endpoint.rpartition(":")
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return None
