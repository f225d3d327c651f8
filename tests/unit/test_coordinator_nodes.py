# SPDX-License-Identifier: Apache-2.0
"""Which nodes a coordinator knows, what operators see of them, and when one is forgotten."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import backsight_pb2 as pb
import grpc
import pytest

from coordinator.core.config import NS_PER_S, CoordinatorConfig
from coordinator.core.coordinator import EXPIRY_GRACE_NS
from coordinator.core.nodes import Forgotten
from coordinator.core.records import DropNode, PutNode
from ctl.__main__ import main
from protocol import wire
from protocol.messages import Hello, NodeMessage
from tests.unit.coordinator_harness import Harness, S, trace_id
from tests.unit.test_server import Client
from tests.unit.test_store import Clock, driver

DAY = 86400 * S


def known(harness: Harness) -> set[str]:
    views = {view.node for view in harness.core.nodes(harness.now_ns)}
    assert views == set(harness.store.nodes)
    return views


def test_a_node_that_is_gone_for_long_is_forgotten_and_no_other() -> None:
    harness = Harness(CoordinatorConfig(node_expiry_ns=3 * DAY))
    for name in ("here", "gone", "late", "back"):
        harness.connect(name)
    harness.lose("gone")
    harness.lose("back")
    harness.wait(1 * DAY)
    harness.lose("late")
    harness.connect("back")
    harness.wait(2 * DAY - 1 * S)
    assert known(harness) == {"here", "gone", "late", "back"}
    harness.wait(2 * EXPIRY_GRACE_NS)
    assert known(harness) == {"here", "late", "back"}
    harness.wait(1 * DAY)
    assert known(harness) == {"here", "back"}
    # It is known by its name again when it comes back.
    harness.connect("gone")
    assert known(harness) == {"here", "gone", "back"}


def test_a_node_that_an_open_trace_names_stays_until_that_is_closed() -> None:
    config = CoordinatorConfig(node_expiry_ns=3 * EXPIRY_GRACE_NS, missing_linger_ns=DAY)
    harness = Harness(config)
    harness.cluster("here", "gone")
    trace = trace_id("T")
    harness.fire("here", trace)
    harness.status("here", trace, 100, ["gone"])
    harness.lose_slices("gone")
    harness.lose("gone")
    harness.wait(5 * EXPIRY_GRACE_NS)
    assert known(harness) == {"here", "gone"}
    assert harness.core.forget_node("gone") is Forgotten.NEEDED
    harness.wait(DAY + 2 * EXPIRY_GRACE_NS)
    assert known(harness) == {"here"}


def test_a_new_coordinator_gives_nodes_time_to_come_back() -> None:
    """One that was killed had not heard that they went, so they seem gone since they came."""
    harness = Harness(CoordinatorConfig(node_expiry_ns=3 * DAY))
    for name in ("here", "gone"):
        harness.connect(name)
    for name in ("here", "gone"):
        put = harness.store.nodes[name]
        harness.store.nodes[name] = PutNode(name, put.addresses, put.incarnation, 9 * DAY)
    harness.restart()
    harness.core.on_tick(harness.now_ns)
    harness.fetch()
    assert known(harness) == {"here", "gone"}
    harness.connect("here")
    harness.wait(2 * EXPIRY_GRACE_NS + 2 * S)
    assert known(harness) == {"here"}


def test_another_expiry_is_in_force_after_a_reload() -> None:
    harness = Harness()
    harness.connect("here")
    harness.connect("gone")
    harness.lose("gone")
    harness.wait(3 * EXPIRY_GRACE_NS)
    assert known(harness) == {"here", "gone"}
    harness.core.reconfigure(CoordinatorConfig(node_expiry_ns=2 * EXPIRY_GRACE_NS))
    harness.wait(2 * EXPIRY_GRACE_NS)
    assert known(harness) == {"here"}


def test_an_operator_forgets_who_is_gone_only() -> None:
    harness = Harness()
    harness.connect("here")
    harness.connect("gone")
    harness.lose("gone")
    assert harness.core.forget_node("here") is Forgotten.CONNECTED
    assert harness.core.forget_node("never") is Forgotten.UNKNOWN
    assert harness.core.forget_node("gone") is Forgotten.DONE
    harness.fetch()
    assert known(harness) == {"here"}
    assert harness.core.forget_node("gone") is Forgotten.UNKNOWN


def test_what_operators_see_of_a_node() -> None:
    harness = Harness()
    hello = Hello("web-1", 1, ("10.0.0.7",), software="0.3.1")
    harness.core.on_node_connected(7, hello, "ipv4:10.0.0.7:5", harness.now_ns, "node web-1 (x)")
    (view,) = harness.core.nodes(harness.now_ns)
    assert (view.connected, view.gone_ns) == (True, 0)
    harness.core.on_node_lost(7, harness.now_ns)
    (view,) = harness.core.nodes(harness.now_ns + 5 * S)
    assert (view.connected, view.gone_ns) == (False, 5 * S)
    # What it was last.
    seen = (view.software, view.identity, view.peer, view.addresses)
    assert seen == ("0.3.1", "node web-1 (x)", "ipv4:10.0.0.7:5", ("10.0.0.7",))


def test_the_store_says_for_how_long_a_node_was_not_put(tmp_path: Path) -> None:
    clock = Clock()
    with driver(tmp_path / "t.db", clock=clock) as here:
        here.write(PutNode("a", ()), PutNode("b", ()))
        clock.now_s += 100
        here.write(PutNode("b", ()), PutNode("c", ()), DropNode("c"))
    clock.now_s += 7
    with driver(tmp_path / "t.db", clock=clock) as again:
        gone = {known.node: known.gone_ns // NS_PER_S for known in again.store.recover_nodes()}
    assert gone == {"a": 107, "b": 7}


@pytest.mark.parametrize("software", ["", "0.3.1", "é" * 16])
def test_a_node_says_which_backsight_it_is(software: str) -> None:
    hello = Hello("n", 1, software=software)
    assert wire.decode_node_batch(wire.encode_node_batch([hello])) == [hello]


@pytest.mark.parametrize("software", ["x" * 33, "é" * 17])
def test_but_no_story(software: str) -> None:
    messages: list[NodeMessage] = [Hello("n", 1, software=software)]
    with pytest.raises(wire.WireError, match=r"hello\.software: 3[34] bytes; allowed: 0 to 32"):
        wire.encode_node_batch(messages)


def test_backsightctl_shows_and_forgets_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            control = client.call("Control")
            await control.write(wire.encode_node_batch([Hello("web-1", 1, software="0.3.1")]))
            await client.logged("node web-1 connected")

            async def ctl(*command: str) -> tuple[int, str, str]:
                ask = ["--coordinator", client.endpoint, *command]
                status = await asyncio.to_thread(main, ask)
                said = capsys.readouterr()
                return status, said.out, said.err

            async def listed() -> list[dict[str, Any]]:
                _, out, _ = await ctl("nodes", "--json")
                return [json.loads(line) for line in out.splitlines()]

            (node,) = await listed()
            assert (node["version"], node["connected"]) == ("0.3.1", True)
            assert node["peer"].startswith("ipv4:127.0.0.1:")
            assert abs(node["seen_ns"] - time.time_ns()) < 60 * NS_PER_S
            status, _, err = await ctl("nodes", "--forget", "web-1")
            assert status == 1
            assert "node web-1 is connected, and would be known again at once" in err
            control.cancel()
            while (await listed())[0]["connected"]:
                pass
            assert await ctl("nodes", "--forget", "web-1") == (0, "", "")
            await client.logged("node web-1 is forgotten by an unnamed caller at ipv4:127.0.0.1:")
            assert await listed() == []
            status, _, err = await ctl("nodes", "--forget", "web-1")
            assert (status, "no node 'web-1' is known" in err) == (1, True)

    asyncio.run(run())


def test_who_has_a_node_forgotten_is_logged_before_that_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He may hang up meanwhile, and the node is gone all the same."""

    async def run() -> None:
        async with Client(tmp_path) as client:
            control = client.call("Control")
            await control.write(wire.encode_node_batch([Hello("web-1", 1)]))
            await client.logged("node web-1 connected")
            control.cancel()
            while client.server.status()["now"]["nodes_connected"]:
                await client.server.news.wait()
                client.server.news.clear()
            waits, never = asyncio.Event(), asyncio.Event()

            async def not_durable() -> None:
                waits.set()
                await never.wait()

            monkeypatch.setattr(client.server._operations, "_is_durable", not_durable)
            call = client._channel.unary_unary("/backsight.v1.Coordinator/ForgetNode", None, None)
            asked = call(pb.ForgetNodeRequest(node="web-1").SerializeToString())
            await waits.wait()
            assert client.server.status()["now"]["nodes_known"] == 0
            said = [client.log.get_nowait() for _ in range(client.log.qsize())]
            assert any("node web-1 is forgotten by an unnamed caller" in text for text in said)
            asked.cancel()

    asyncio.run(run())


def test_no_node_is_forgotten_while_what_is_stored_is_taken_up(tmp_path: Path) -> None:
    async def run() -> None:
        async with Client(tmp_path) as client:
            client.server._core._recovery = object()  # type: ignore[assignment]
            call = client._channel.unary_unary("/backsight.v1.Coordinator/ForgetNode", None, None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(pb.ForgetNodeRequest(node="n").SerializeToString())
            client.server._core._recovery = None
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())
