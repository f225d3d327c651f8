# SPDX-License-Identifier: Apache-2.0
"""What looks for symptoms of the machine (appliance/machine.py), where it cannot look."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from typing import Self

import pytest

from appliance import counters
from appliance.core.dataplane import LocalTrigger
from appliance.core.machine import Symptom
from appliance.counters import LinkChange
from appliance.machine import Machine
from protocol.messages import TraceId
from runtime.settings.node import MachineSettings
from tests.unit.attach_harness import another_turn
from tests.unit.logs import logs_to

NOTHING = MachineSettings(
    links=False,
    qdisc_drops=None,
    listen_overflows=None,
    io_pressure_percent=None,
    memory_pressure_percent=None,
)


class Host:
    def processes(self) -> list[tuple[int, int]]:
        return []

    async def users(self, symptom: Symptom, within_ns: int) -> list[TraceId]:
        return []

    async def recent(
        self, within_ns: int, clients: Collection[int], traces_max: int
    ) -> list[TraceId]:
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


class FakeLinks:
    """One device, which goes down as soon as anybody looks."""

    def __init__(self) -> None:
        self._changed = os.eventfd(1, os.EFD_NONBLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._changed)

    def fileno(self) -> int:
        return self._changed

    def all(self) -> list[LinkChange]:
        return [LinkChange(7, "veth7", up=True, is_virtual=True)]

    def changes(self) -> list[LinkChange]:
        os.eventfd_read(self._changed)
        return [LinkChange(7, "veth7", up=False, is_virtual=True)]


class HostWithTrace(Host):
    def __init__(self) -> None:
        self.fired: list[str] = []

    async def recent(
        self, within_ns: int, clients: Collection[int], traces_max: int
    ) -> list[TraceId]:
        return [TraceId(bytes(range(16)))]

    def fire(self, trigger: LocalTrigger) -> None:
        self.fired.append(trigger.trigger)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_device_that_is_about_to_be_removed_does_not_go_down(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    answered = asyncio.Event()

    async def in_thread(call: Callable[[int], bool], device: int) -> bool:
        answered.set()
        return call(device)

    monkeypatch.setattr(counters, "Links", FakeLinks)
    monkeypatch.setattr(counters, "is_there", lambda device: is_there and device == 7)
    monkeypatch.setattr("appliance.machine.in_thread", in_thread)
    host = HostWithTrace()

    async def run() -> None:
        machine = Machine(MachineSettings(), host, logs_to([]))
        running = asyncio.ensure_future(machine.run())
        await answered.wait()
        # What comes of an answer comes in a few turns.
        for _ in range(10):
            await another_turn()
        assert machine.figures["seen"]["machine.link_down"] == int(is_there)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert host.fired == ["machine.link_down"] * is_there
