# SPDX-License-Identifier: Apache-2.0
"""appliance/probes/daemon.py: what it attaches when, and what goes with what."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.probes import daemon
from appliance.probes.compiler import Code
from appliance.probes.daemon import Daemon
from appliance.probes.native import Loader
from appliance.probes.symptoms import SYMPTOMS
from runtime.main import Configuration, reload
from runtime.settings.node import PROBES_PROGRAM, ProbesSettings, Settings
from testbed.daemons import anywhere
from testbed.topology import PYTHON
from tests.unit.logs import logs_to

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(60)]

SETTINGS = Settings(probes=ProbesSettings(loader="core"))
BYPASSED = Settings(probes=ProbesSettings(loader="core", bypass=True))


def with_code(monkeypatch: pytest.MonkeyPatch, code: Code) -> None:
    """Have the daemon get what it attaches from there; b"": what is in the library."""

    @contextlib.contextmanager
    def coder(loader: Loader) -> Iterator[Code]:
        assert loader is Loader.CORE
        yield code

    monkeypatch.setattr(daemon, "coder", coder)


def test_while_something_compiles_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is not wanted any more when it is compiled is not attached."""
    compiles, go_on = threading.Event(), threading.Event()

    def code(name: str) -> bytes:
        compiles.set()
        go_on.wait()
        return b""

    async def run() -> None:
        with_code(monkeypatch, code)
        probes = Daemon(SETTINGS, logs_to([]))
        starts = asyncio.ensure_future(probes.__aenter__())
        await asyncio.to_thread(compiles.wait)
        assert not starts.done()
        probes.reconfigure(BYPASSED)
        go_on.set()
        try:
            await starts
            assert "attached" not in probes.status_text()
            probes.reconfigure(SETTINGS)
            assert probes.status_text().endswith("attached: no probes")
        finally:
            await probes.__aexit__(None, None, None)

    asyncio.run(run())


def test_what_needs_an_object_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def code(name: str) -> bytes:
        if name == "sockets":
            raise OSError("sockets: no tracepoint tcp_sendmsg_locked")
        return b""

    async def run() -> None:
        log: list[str] = []
        with_code(monkeypatch, code)
        async with Daemon(SETTINGS, logs_to(log)) as probes:
            said = probes.status_text()
        assert "attached: crash, disks, waits; not to be had: " in said
        assert "attached: crash, disks, waits" in log
        gone = said.partition("not to be had: ")[2].split(", ")
        needing = [one.key for one in SYMPTOMS if "sockets" in one.objects]
        assert gone == [*needing, "breadcrumbs"]
        assert sum("no tracepoint tcp_sendmsg_locked" in line for line in log) == 1

    asyncio.run(run())


def test_a_reload_says_what_becomes_of_each_key(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    words = (
        "`probes.bypass` is true: all probes are out, and fire nothing, until you set it to false"
    )

    async def run() -> None:
        log: list[str] = []
        async with Daemon(SETTINGS, logs_to(log)) as probes:
            configuration = Configuration(PROBES_PROGRAM, SETTINGS, path)

            def reloaded(text: str) -> list[str]:
                log.clear()
                path.write_text(text)
                reload(probes, configuration, logs_to(log))
                return [line.removeprefix(f"{path}: ") for line in log]

            assert reloaded(
                "probes: {loader: bcc, bypass: true}\npercentage: 5\npool_bytes: 8MiB"
            ) == [
                words,
                "reloaded; probes.bypass taken up",
                "these changes wait for a restart: probes.loader",
                "changed for backsight-node, which has a reload of its own: pool_bytes, percentage",
            ]
            assert reloaded(
                "probes: {loader: core, per_s: 5}\npercentage: 5\nlog_level: debug"
            ) == [
                "`probes.bypass` is false: all probes that are configured go in again",
                "reloaded; probes.bypass, probes.per_s, log_level taken up",
                "changed for backsight-node, which has a reload of its own: log_level, pool_bytes",
            ]
        log.clear()
        async with Daemon(BYPASSED, logs_to(log)):
            assert words in log

    asyncio.run(run())


def test_who_is_interrupted_while_it_starts_ends_quietly(tmp_path: Path) -> None:
    """By bcc it takes some seconds."""
    config = tmp_path / "node.yaml"
    config.write_text("probes: {loader: bcc}\n")
    # Who is started in the background by a shell ignores SIGINT, and so do its children.
    command = ["env", "--default-signal=INT", PYTHON, "-m", "appliance.probes"]
    command += ["--config", str(config)]
    with anywhere().popen(
        command, stderr=subprocess.PIPE, env={"TMPDIR": str(tmp_path)}
    ) as process:
        assert process.stderr is not None
        assert b"the loader is bcc" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 128 + signal.SIGINT
    assert said == b""
    assert list(tmp_path.iterdir()) == [config]
