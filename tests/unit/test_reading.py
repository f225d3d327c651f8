# SPDX-License-Identifier: Apache-2.0
"""The process that reads the store begins wherever the coordinator does."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import reading
from ctl.pki import Authority
from runtime.settings.coordinator import QuerySettings, Settings, StoreSettings
from runtime.settings.tls import CoordinatorTlsSettings, TlsFiles
from testbed.ports import free_port
from tests.unit.logs import SILENT, logs_to
from tests.unit.test_store import driver


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


def test_it_tells_when_the_certificate_of_the_api_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_STATUS_INTERVAL_S", 0.0)
    monkeypatch.setattr(reading, "_END_S", 1e6)  # it is this very process
    monkeypatch.setattr(os, "nice", lambda more: more)
    ca = Authority.create(tmp_path / "pki", "d")

    def issued(name: str, days: float) -> tuple[CoordinatorTlsSettings, float]:
        made = ca.issue(name, is_server=True, addresses=["127.0.0.1"], days=days)
        files = TlsFiles.of_directory(made.directory)
        tls = CoordinatorTlsSettings(files.ca, files.certificate, files.key)
        return tls, made.expires_at.timestamp()

    first, first_expires_s = issued("first", days=9)
    second, second_expires_s = issued("second", days=8)
    settings = Settings(
        tls=first,
        store=StoreSettings(str(tmp_path / "t.sqlite")),
        query=QuerySettings(f"127.0.0.1:{free_port()}", tls=True),
    )
    with driver(settings.store_path):
        pass
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    news = os.eventfd(0, os.EFD_NONBLOCK)
    thread = threading.Thread(target=reading._read, args=(theirs, news, SILENT))

    def hear(is_it: Callable[[dict[str, float]], bool]) -> None:
        """Until it says that."""
        ours.settimeout(60)
        while not is_it(json.loads(ours.recv(1 << 20)).get("status", {})):
            pass

    def tells(expires_s: float) -> Callable[[dict[str, float]], bool]:
        # A certificate has whole seconds.
        return lambda status: abs(status.get("certificate_expires_s", 0) - expires_s) <= 1

    with ours:
        thread.start()
        ours.send(pickle.dumps(settings))
        hear(tells(first_expires_s))
        ours.send(pickle.dumps(replace(settings, tls=second)))
        hear(tells(second_expires_s))
    thread.join()
    os.close(news)
    theirs.close()
