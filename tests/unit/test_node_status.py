# SPDX-License-Identifier: Apache-2.0
"""How a node is, asked from elsewhere: by its coordinator, on its Control stream."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from appliance.core.config import NodeConfig
from appliance.core.node import NodeCore
from appliance.daemon import Daemon
from appliance.report import report_text
from coordinator.core.nodes import Reach
from ctl.__main__ import main
from protocol import wire
from protocol.messages import (
    REPORT_BYTES_MAX,
    Hello,
    NodeReport,
    StatusQuestion,
    Welcome,
)
from protocol.versions import OURS, Agreed, Feature, Versions
from runtime.service_manager import ServiceManager
from runtime.settings.node import CoordinatorSettings, MetricsSettings
from runtime.settings.node import Settings as NodeSettings
from tests.simulation.pool import PoolConfig, PoolModel
from tests.unit.coordinator_harness import REAL_NS, Harness
from tests.unit.logs import SILENT
from tests.unit.test_server import Client

AGREED = Agreed(OURS.newest, OURS.features)
OLDER = Versions(OURS.oldest, OURS.newest, OURS.features & ~Feature.STATUS)


def questions(harness: Harness) -> list[tuple[str, int]]:
    return [
        (name, message.number)
        for name, message in harness.take_said()
        if isinstance(message, StatusQuestion)
    ]


def test_who_is_connected_and_knows_how_is_asked_and_its_answer_taken_once() -> None:
    harness = Harness()
    harness.connect("here")
    harness.connect("gone")
    harness.lose("gone")
    harness.core.on_node_connected(99, Hello("old", 1, (), OLDER), "p", harness.now_ns)
    harness._names[99] = "old"
    harness.fetch()
    core = harness.core
    assert core.ask_status("nobody", 1) is Reach.UNKNOWN
    assert core.ask_status("gone", 2) is Reach.AWAY
    assert core.ask_status("old", 3) is Reach.TOO_OLD
    assert core.ask_status("here", 4) is Reach.ASKED
    harness.fetch()
    assert questions(harness) == [("here", 4)]
    for _ in range(2):
        harness.say("here", NodeReport(4, "{}"))
    assert core.take_reports() == [NodeReport(4, "{}")]
    assert core.take_reports() == []
    assert core.counters.messages_unexpected == 1


def test_nobody_answers_for_another_nor_when_nobody_waits() -> None:
    harness = Harness()
    harness.connect("one")
    harness.connect("two")
    harness.core.ask_status("one", 1)
    harness.say("two", NodeReport(1, '{"node": "one"}'))
    harness.core.forget_question(1)
    harness.say("one", NodeReport(1, "{}"))
    assert harness.core.take_reports() == []
    assert harness.core.counters.messages_unexpected == 2


def test_a_node_answers_the_last_question_on_the_stream_that_it_came_on() -> None:
    core = NodeCore(NodeConfig("n"), PoolModel(PoolConfig(), "n"), 1, 0, REAL_NS)

    def connect() -> None:
        core.on_control_connected(0, ())
        core.on_control(Welcome(1, AGREED), 0, REAL_NS)
        core.take_control(0, REAL_NS)

    connect()
    core.on_control(StatusQuestion(7), 0, REAL_NS)
    core.on_control(StatusQuestion(8), 0, REAL_NS)
    assert core.take_status_question() == 8
    assert core.take_status_question() is None
    core.on_status(8, "{}")
    assert core.take_control(0, REAL_NS) == [NodeReport(8, "{}")]
    assert core.take_control(0, REAL_NS) == []
    # What was not said on one stream is of no use on the next.
    core.on_status(9, "{}")
    core.on_control_lost(0)
    connect()
    assert core.take_control(0, REAL_NS) == []


def test_what_is_too_long_for_a_message_lacks_its_longest_sections() -> None:
    small = {"node": "n", "triggers": {"a": 1}}
    assert json.loads(report_text(small)) == small
    large: dict[str, Any] = {
        "node": "n",
        "triggers": {f"t{n}": {"fired": n} for n in range(100)},
        "probes": {"x": "y" * 2000},
        "queues": {},
        "pool": 7,
    }
    assert json.loads(report_text(large, 2500)) == {
        "node": "n",
        "probes": large["probes"],
        "queues": {},
        "pool": 7,
        "left_out": ["triggers"],
    }
    assert json.loads(report_text(large, 100)) == {
        "node": "n",
        "pool": 7,
        "left_out": ["triggers", "probes"],
        "queues": {},
    }


def test_messages_hold_what_may_be_said_and_no_more() -> None:
    report = NodeReport((1 << 32) - 1, "x" * REPORT_BYTES_MAX)
    assert wire.decode_node_batch(wire.encode_node_batch([report])) == [report]
    question = StatusQuestion((1 << 32) - 1)
    assert wire.decode_coordinator_batch(wire.encode_coordinator_batch([question])) == [question]
    with pytest.raises(wire.WireError, match=r"node_report\.json: 262145 bytes; allowed: 0 to"):
        wire.encode_node_batch([NodeReport(1, "x" * (REPORT_BYTES_MAX + 1))])
    with pytest.raises(wire.WireError, match=r"status_question\.number"):
        wire.encode_coordinator_batch([StatusQuestion(1 << 32)])


def test_an_operator_asks_a_node_through_its_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.questions._NODE_ANSWERS_S", 0.1)

    async def run() -> None:
        async with Client(tmp_path) as client:

            async def ctl(*command: str) -> tuple[int, str, str]:
                ask = ["--coordinator", client.endpoint, "status", *command]
                status = await asyncio.to_thread(main, ask)
                said = capsys.readouterr()
                return status, said.out, said.err

            settings = NodeSettings(
                "web-1",
                str(tmp_path / "n.sock"),
                CoordinatorSettings(client.endpoint),
                pool_bytes=4 << 20,
                metrics=MetricsSettings(None),
            )
            with ServiceManager(None) as manager:
                async with Daemon(settings, 1, manager, (), SILENT) as node:
                    running = asyncio.ensure_future(node.run())
                    await client.logged("node web-1 connected")
                    monkeypatch.setattr("coordinator.questions._NODE_ANSWERS_S", 60.0)
                    status, out, err = await ctl("web-1", "--json")
                    assert (status, err) == (0, "")
                    said = json.loads(out)
                    assert said["node"] == "web-1"
                    assert said["connected"] is True
                    assert said["not_connected"] == ""
                    assert said.keys() == node.status().keys()
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
            while "node web-1 is not connected" not in (await ctl("web-1"))[2]:
                pass
            status, _, err = await ctl("nobody")
            assert (status, "no node 'nobody' is known" in err) == (1, True)
            # One that hears, and says nothing.
            monkeypatch.setattr("coordinator.questions._NODE_ANSWERS_S", 0.1)
            for name, versions, why in (
                ("mute", OURS, "node mute did not answer within 0.1 s"),
                ("old", OLDER, "node old is of a version that cannot be asked from here"),
            ):
                control = client.call("Control")
                await control.write(wire.encode_node_batch([Hello(name, 1, (), versions)]))
                await client.logged(f"node {name} connected")
                status, _, err = await ctl(name)
                assert (status, why in err) == (1, True)
            assert client.server._core._status_asked == {}

    asyncio.run(run())
