# SPDX-License-Identifier: Apache-2.0
"""Whether a daemon lives, and is ready, as those who ask for it hear it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from wsgiref.simple_server import demo_app

import grpc
import health_pb2 as pb
import pytest

from appliance.daemon import Daemon
from coordinator.core.coordinator import CoordinatorCore
from coordinator.server import CoordinatorServer
from protocol.messages import Group, Hello, TraceId, TriggerFired
from runtime.health import Health, application
from runtime.http import HttpServer
from runtime.metrics import serving
from runtime.service_manager import ServiceManager
from runtime.settings.coordinator import Settings, StoreSettings
from runtime.settings.node import MetricsSettings
from runtime.settings.node import Settings as NodeSettings
from tests.unit.logs import SILENT
from tests.unit.test_metrics import get

SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING


async def asked(health: Health, path: str) -> tuple[int, str]:
    with serving("127.0.0.1:0", "x", (), dict, health, SILENT) as server:
        assert server is not None
        return await asyncio.to_thread(get, server.port, path)


async def ready(health: Health) -> tuple[int, Any]:
    status, text = await asked(health, "/readyz")
    return status, json.loads(text)


def test_who_is_ready_says_so_and_nothing_else() -> None:
    async def run() -> None:
        health = Health({"store": lambda sign: sign()})
        assert await asked(health, "/healthz") == (200, "ok\n")
        assert await ready(health) == (200, {"ready": True, "reasons": {}})

    asyncio.run(run())


def test_a_thread_that_does_not_move_makes_it_unready_but_not_dead() -> None:
    """And is asked once, however often others ask."""
    signs: list[Callable[[], None]] = []

    async def run() -> None:
        health = Health({"store": signs.append}, sign_s=0.01)
        for _ in range(3):
            status, said = await ready(health)
            assert (status, said["ready"]) == (503, False)
            assert said["reasons"] == {"store thread": "did not move for 0.01 s"}
        assert (await asked(health, "/healthz"))[0] == 200
        (sign,) = signs
        threading.Thread(target=sign).start()
        while (await ready(Health({}, sign_s=0.01)))[0] != 200:
            pass
        health_again = Health({"store": lambda give: give()})
        assert (await ready(health_again))[0] == 200

    asyncio.run(run())


def test_a_loop_that_hangs_is_neither_alive_nor_ready() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        answers: dict[str, tuple[int, str]] = {}
        hanging, go_on = threading.Event(), threading.Event()

        def hang() -> None:
            hanging.set()
            assert go_on.wait(60)

        def ask(port: int) -> None:
            hanging.wait()
            for path in ("/healthz", "/readyz"):
                answers[path] = get(port, path)
            go_on.set()

        pages = application(Health({}), demo_app, loop, timeout_s=0.5)
        with HttpServer("127.0.0.1:0", pages, SILENT) as server:
            asking = threading.Thread(target=ask, args=(server.port,))
            asking.start()
            loop.call_soon(hang)
            await asyncio.to_thread(asking.join)
        assert answers["/healthz"] == (503, "the daemon's event loop did not answer within 0.5 s\n")
        status, text = answers["/readyz"]
        assert status == 503
        assert json.loads(text)["reasons"] == {
            "event loop": "the daemon's event loop did not answer within 0.5 s"
        }

    asyncio.run(run())


@asynccontextmanager
async def coordinator(directory: Path) -> AsyncIterator[CoordinatorServer]:
    settings = Settings("127.0.0.1:0", store=StoreSettings(str(directory / "t.sqlite")))
    async with CoordinatorServer(settings, 1, SILENT) as server:
        yield server


async def check(server: CoordinatorServer, service: str = "") -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server._port}") as channel:
        call = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            pb.HealthCheckRequest.SerializeToString,
            pb.HealthCheckResponse.FromString,
        )
        answer: pb.HealthCheckResponse = await call(pb.HealthCheckRequest(service=service))
        return answer.status


def test_a_coordinator_is_ready_when_what_is_stored_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halted = asyncio.Event()
    recover = CoordinatorCore.recover

    async def run() -> None:
        async with coordinator(tmp_path) as server:
            node = server._core
            assert (await ready(server.health))[0] == 200
            node.on_node_connected(1, Hello("n", 1), "peer", 0)
            node.on_node_message(1, TriggerFired(Group("t", TraceId(bytes(15) + b"1"))), 0, 0)
            server._flush()
        # From here on it takes up nothing until it may.
        monkeypatch.setattr(
            CoordinatorCore, "recover", lambda *given: recover(*given) if halted.is_set() else None
        )
        async with coordinator(tmp_path) as server:
            status, said = await ready(server.health)
            assert status == 503
            # The loop asks for more all the time, so that the store's thread may be late too.
            assert "recovery" in said["reasons"]
            assert "0 traces, 0% of all, so far" in said["reasons"]["recovery"]
            assert await check(server) == NOT_SERVING
            halted.set()
            while (await ready(server.health))[0] != 200:
                pass
            assert (server._stored.taken, server._stored.share) == (1, 1.0)
            assert await check(server) == SERVING

    asyncio.run(run())


def test_a_coordinator_whose_store_cannot_be_written_is_not_ready(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinator(tmp_path) as server:
            with sqlite3.connect(tmp_path / "t.sqlite") as other:
                other.execute(
                    "CREATE TRIGGER no BEFORE INSERT ON traces BEGIN SELECT RAISE(ABORT, 'no'); END"
                )
            node = server._core
            node.on_node_connected(1, Hello("n", 1), "peer", 0)
            node.on_node_message(1, TriggerFired(Group("t", TraceId(bytes(15) + b"1"))), 0, 0)
            server._flush()
            while (await ready(server.health))[0] == 200:
                pass
            assert (await ready(server.health))[1]["reasons"] == {"store": "cannot be written: no"}
            assert await check(server) == NOT_SERVING
            with sqlite3.connect(tmp_path / "t.sqlite") as other:
                other.execute("DROP TRIGGER no")
            while (await ready(server.health))[0] != 200:
                pass
            assert await check(server) == SERVING

    asyncio.run(run())


def test_grpc_health_knows_the_service_and_the_server_and_no_other(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinator(tmp_path) as server:
            assert await check(server) == SERVING
            assert await check(server, "backsight.v1.Coordinator") == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(server, "another")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(run())


async def said_next(watching: Any) -> int:
    answer: pb.HealthCheckResponse = await watching.read()
    return answer.status


def test_who_watches_hears_the_status_at_once_and_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.rpc.health._LOOK_S", 0.01)

    async def run() -> None:
        async with (
            coordinator(tmp_path) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server._port}") as channel,
        ):
            watch = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                pb.HealthCheckRequest.SerializeToString,
                pb.HealthCheckResponse.FromString,
            )
            unknown = watch(pb.HealthCheckRequest(service="another"))
            assert await said_next(unknown) == pb.HealthCheckResponse.SERVICE_UNKNOWN
            watching = watch(pb.HealthCheckRequest())
            assert await said_next(watching) == SERVING
            server._store.failed = "as if"
            assert await said_next(watching) == NOT_SERVING
            server._store.failed = ""
            assert await said_next(watching) == SERVING

    asyncio.run(run())


def test_a_node_is_ready_while_its_data_plane_moves(tmp_path: Path) -> None:
    async def run() -> None:
        settings = NodeSettings(
            "alpha", str(tmp_path / "n.sock"), pool_bytes=4 << 20, metrics=MetricsSettings(None)
        )
        with ServiceManager(None) as manager:
            async with Daemon(settings, 1, manager, (), SILENT) as node:
                health = Health(node.threads)
                assert await asked(health, "/healthz") == (200, "ok\n")
                assert (await ready(health))[0] == 200

    asyncio.run(run())
