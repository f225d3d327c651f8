# SPDX-License-Identifier: Apache-2.0
"""The process that reads the store begins wherever the coordinator does."""

from __future__ import annotations

import os
import socket

import pytest

from coordinator import reading
from tests.unit.logs import logs_to


def test_it_begins_though_a_sandbox_forbids_to_be_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def forbidden(more: int) -> int:
        asked.append(more)
        raise PermissionError

    monkeypatch.setattr(os, "nice", forbidden)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said: list[str] = []
    with ours:
        theirs.shutdown(socket.SHUT_WR)
        with theirs:
            reading._read(ours, -1, logs_to(said))
            assert theirs.recv(100) == b'{"begins": true}'
    assert asked
    assert said == []
