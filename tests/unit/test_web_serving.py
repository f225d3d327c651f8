# SPDX-License-Identifier: Apache-2.0
"""Where Jaeger's API is served, and by which certificate."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.web import serving as web_serving
from coordinator.web.serving import serving
from ctl.pki import Authority, Issued
from runtime.settings.coordinator import QuerySettings, Settings, StoreSettings
from runtime.settings.tls import CoordinatorTlsSettings, TlsFiles
from testbed.ports import free_port
from tests.unit.logs import logs_to
from tests.unit.test_tls import weaken


def tls_of(directory: Path) -> CoordinatorTlsSettings:
    files = TlsFiles.of_directory(directory)
    return CoordinatorTlsSettings(files.ca, files.certificate, files.key)


class World:
    """An API by TLS, whose settings change."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.said: list[str] = []
        self.told: asyncio.Queue[float] = asyncio.Queue()
        self.changed = asyncio.Event()
        self._ca = Authority.create(directory / "pki", "d")
        self.first = self.issued("first")
        self.settings = Settings(
            tls=tls_of(self.first.directory),
            store=StoreSettings(str(directory / "t.sqlite")),
            query=QuerySettings(f"127.0.0.1:{self.port}", tls=True),
        )

    def issued(self, name: str, days: float = 9) -> Issued:
        return self._ca.issue(name, is_server=True, addresses=["127.0.0.1"], days=days)

    def turn_to(self, directory: Path) -> None:
        self.settings = replace(self.settings, tls=tls_of(directory))
        self.changed.set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        tell = self.told.put_nowait
        async with serving(lambda: self.settings, self.changed, tell, logs_to(self.said)):
            yield

    async def shown(self) -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", self.port))


def shown_of(issued: Issued) -> str:
    return (issued.directory / "tls.crt").read_text()


def test_a_reload_has_other_files_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not because it looks now and then.
    monkeypatch.setattr(web_serving, "LOOK_EVERY_S", 1e6)

    async def run() -> None:
        world = World(tmp_path)
        async with world.serving():
            assert await world.told.get() == pytest.approx(
                world.first.expires_at.timestamp(), abs=1
            )
            assert await world.shown() == shown_of(world.first)
            second = world.issued("second", days=8)
            world.turn_to(second.directory)
            assert await world.told.get() == pytest.approx(second.expires_at.timestamp(), abs=1)
            assert await world.shown() == shown_of(second)
            assert "second/tls.crt: taken up" in world.said.pop()
            # What cannot be used is said, once it stays so; what was there before is kept.
            for _ in range(3):
                world.turn_to(tmp_path)
                assert await world.told.get() == pytest.approx(second.expires_at.timestamp(), abs=1)
            assert await world.shown() == shown_of(second)
            (said,) = world.said
            assert said.startswith(f"tls.ca: {tmp_path}/ca.crt: there is no such file")
            assert said.endswith("What was read before is kept")

    asyncio.run(run())


def test_a_renewal_that_cannot_be_shown_is_said_and_counts_for_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        world = World(tmp_path)
        expires = pytest.approx(world.first.expires_at.timestamp(), abs=1)
        async with world.serving():
            assert await world.told.get() == expires
            before = await world.shown()
            weaken(world.first.directory)
            for _ in range(3):
                world.changed.set()
                assert await world.told.get() == expires
            assert await world.shown() == before
            (said,) = world.said
            assert "first/tls.crt: OpenSSL refuses to show it" in said

    asyncio.run(run())
