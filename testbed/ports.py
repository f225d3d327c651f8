# SPDX-License-Identifier: Apache-2.0
"""Ports that nobody listens on."""

from __future__ import annotations

import socket


def free_port(address: str = "127.0.0.1") -> int:
    """One at that address of this machine; it is free until somebody takes it."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
