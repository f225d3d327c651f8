# SPDX-License-Identifier: Apache-2.0
"""Who fires a trigger by hand on a real node hears what that node holds, however it looks for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from appliance import control
from appliance.daemon import Daemon
from appliance.native import NativeDataPlane, Polled
from ctl.node import Held, NodeClient
from protocol.messages import TraceId
from runtime.service_manager import ServiceManager
from runtime.settings.node import MetricsSettings, Settings
from tests.unit.logs import SILENT

# Two traces, of the same length.
WRITER = """
import backsight
assert backsight.wait_attached(60)
for number in (1, 2):
    with backsight.Trace(f"{number:032x}") as trace:
        trace.write(b"x" * 1000)
"""


def trace(number: int) -> TraceId:
    return TraceId(number.to_bytes(16, "big"))


class Gate:
    """Holds the thread that polls the data plane, while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, self._is_held = threading.Event(), threading.Event()
        self._open.set()
        poll = NativeDataPlane.wait_and_poll

        def wait_and_poll(plane: NativeDataPlane, timeout_ns: int | None) -> Polled:
            if not self._open.is_set():
                self._is_held.set()
                self._open.wait()
            return poll(plane, timeout_ns)

        monkeypatch.setattr(NativeDataPlane, "wait_and_poll", wait_and_poll)

    def shut(self, node: Daemon) -> None:
        self._open.clear()
        node.threads["data plane"](lambda: None)
        self._is_held.wait()

    def open(self) -> None:
        self._open.set()


def test_who_fires_by_hand_hears_what_is_found_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second trigger between two polls is looked for with the next one; in a large pool the first is."""
    monkeypatch.setattr(control, "_KNOWN_TIMEOUT_S", 600.0)
    socket_path = str(tmp_path / "node.sock")
    settings = Settings("alpha", socket_path, pool_bytes=8 << 20, metrics=MetricsSettings(None))
    gate = Gate(monkeypatch)
    known = Daemon.known

    async def known_later(node: Daemon, identity: TraceId) -> None:
        if node._core.is_searching(identity):
            gate.open()
        await known(node, identity)

    monkeypatch.setattr(Daemon, "known", known_later)

    async def run() -> list[Held | None]:
        with ServiceManager(None) as manager:
            async with Daemon(settings, 1, manager, (), SILENT) as node:
                try:
                    await asyncio.to_thread(
                        subprocess.run,
                        [sys.executable, "-c", WRITER],
                        env={**os.environ, "BACKSIGHT_SOCKET": socket_path},
                        check=True,
                    )
                    gate.shut(node)
                    ask = NodeClient(socket_path).trigger
                    fired = [
                        await asyncio.to_thread(ask, "operator", trace(number), "")
                        for number in (1, 2)
                    ]
                    assert gate._open.is_set(), "the second one is not looked for at once"
                finally:
                    gate.open()
        return fired

    at_once, later = asyncio.run(run())
    assert at_once is not None and at_once.bytes > 1000
    assert later == at_once
