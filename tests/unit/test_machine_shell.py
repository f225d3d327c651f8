# SPDX-License-Identifier: Apache-2.0
"""What looks for symptoms of the machine (appliance/machine.py), where it cannot look."""

from __future__ import annotations

import asyncio

import pytest

from appliance.core.dataplane import LocalTrigger
from appliance.core.machine import Symptom
from appliance.machine import Machine
from protocol.messages import TraceId
from runtime.settings.node import MachineSettings
from tests.unit.logs import logs_to

NOTHING = MachineSettings(
    links=False,
    qdisc_drops=None,
    listen_overflows=None,
    io_pressure_percent=None,
    memory_pressure_percent=None,
)


class Host:
    def processes(self) -> list[tuple[int, str]]:
        return []

    async def users(self, symptom: Symptom, within_ns: int) -> list[TraceId]:
        return []

    async def recent(self, within_ns: int, service: str, traces_max: int) -> list[TraceId]:
        return []

    def fire(self, trigger: LocalTrigger) -> None:
        raise AssertionError(trigger)


def test_without_netlink_the_node_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = asyncio.Event()
    messages: list[str] = []

    def refuse(_: object) -> None:
        refused.set()
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr("appliance.counters.Counters.__init__", refuse)

    async def run() -> None:
        machine = Machine(MachineSettings(), Host(), logs_to(messages))
        running = asyncio.ensure_future(machine.run())
        await refused.wait()
        refused.clear()
        # Whoever has mended it reloads.
        machine.reconfigure(MachineSettings())
        await refused.wait()
        machine.reconfigure(NOTHING)
        await asyncio.sleep(0)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert len(messages) == 2
    assert "the machine's counters cannot be read: " in messages[0]
    assert "Address family not supported" in messages[0]
