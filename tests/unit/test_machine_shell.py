# SPDX-License-Identifier: Apache-2.0
"""What looks for symptoms of the machine (appliance/machine.py), where it cannot look."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterable
from typing import Self

import pytest

from appliance import counters, links
from appliance.core.dataplane import LocalTrigger
from appliance.core.machine import LINK_SETTLES_NS, Namespace, Symptom
from appliance.links import LinkChange, LinkFollower
from appliance.machine import Machine
from protocol.messages import TraceId
from runtime.log import Entry, Log
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


async def ended_by_us(running: asyncio.Future[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def all_fired() -> None:
    """What was told of is collected in a few turns."""
    for _ in range(10):
        await another_turn()


class Host:
    def processes(self) -> list[int]:
        return []

    async def users(self, symptom: Symptom, within_ns: int) -> list[TraceId]:
        return []

    async def recent(
        self, within_ns: int, namespace: Namespace | None, traces_max: int
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
        await ended_by_us(running)

    asyncio.run(run())
    assert len(messages) == 2
    assert "the machine's counters cannot be read: " in messages[0]
    assert "Address family not supported" in messages[0]


class FakeLinks:
    """One device, which goes down as soon as anybody looks; then it is there, or is not.

    ``fails_once``: the kernel does not say at once how it is then.
    """

    is_there = True
    is_virtual = True
    loses_changes = False
    fails_once: OSError | None = None

    def __init__(self) -> None:
        self._changed = os.eventfd(1, os.EFD_NONBLOCK)
        self._asked = 0
        self.went_down = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._changed)

    def fileno(self) -> int:
        return self._changed

    def _as_it_is(self, *, up: bool) -> LinkChange:
        return LinkChange(7, "seven", up=up, is_virtual=self.is_virtual)

    def all(self) -> list[LinkChange]:
        self._asked += 1
        if self._asked == 1:
            return [self._as_it_is(up=True)]
        error, self.fails_once = self.fails_once, None
        if error is not None:
            raise error
        return [self._as_it_is(up=False)] if self.is_there else []

    def all_anew(self) -> list[LinkChange]:
        return self.all()

    def changes(self) -> list[LinkChange]:
        os.eventfd_read(self._changed)
        self.went_down = True
        if self.loses_changes:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return [self._as_it_is(up=False)]


class FakeCounters:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class HostWithTrace(Host):
    def __init__(self) -> None:
        self.fired: list[str] = []
        self.windows_ns: list[int] = []
        self.log: list[Entry] = []

    async def recent(
        self, within_ns: int, namespace: Namespace | None, traces_max: int
    ) -> list[TraceId]:
        self.windows_ns.append(within_ns)
        return [TraceId(bytes(range(16)))]

    def fire(self, trigger: LocalTrigger) -> None:
        self.fired.append(trigger.trigger)


def follower(settled: asyncio.Event, has_happened: Callable[[], bool]) -> type[LinkFollower]:
    """One that says when it has told of what had happened when it took something."""

    class Follower(LinkFollower):
        _took_ns: int | None = None

        def _take(self, changes: Iterable[LinkChange]) -> None:
            super()._take(changes)
            if self._took_ns is None and has_happened():
                self._took_ns = time.monotonic_ns()

        async def _tell(self) -> None:
            took_ns, now_ns = self._took_ns, time.monotonic_ns()
            await super()._tell()
            if took_ns is not None and now_ns - took_ns >= LINK_SETTLES_NS:
                settled.set()

    return Follower


def looked_at(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> HostWithTrace:
    """Such a link, until it has been told of, or cannot be any more; ``seconds``: it takes to look."""
    settled = asyncio.Event()
    made: list[FakeLinks] = []

    def make() -> FakeLinks:
        made.append(FakeLinks())
        return made[-1]

    async def in_thread(call: Callable[[], list[LinkChange]]) -> list[LinkChange]:
        if made[-1].went_down:
            await asyncio.sleep(seconds)
        return call()

    monkeypatch.setattr(links, "Links", make)
    monkeypatch.setattr(links, "LinkFollower", follower(settled, lambda: made[-1].went_down))
    monkeypatch.setattr(links, "in_thread", in_thread)
    monkeypatch.setattr(counters, "Counters", FakeCounters)
    host = HostWithTrace()

    async def run() -> None:
        machine = Machine(MachineSettings(), host, Log(host.log.append))
        running = asyncio.ensure_future(machine.run())
        await settled.wait()
        await all_fired()
        assert machine.figures["seen"]["machine.link_down"] == len(host.fired)
        await ended_by_us(running)

    asyncio.run(run())
    return host


@pytest.mark.parametrize("loses_changes", [True, False])
@pytest.mark.parametrize("is_virtual", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_virtual_device_that_is_about_to_be_removed_does_not_go_down(
    monkeypatch: pytest.MonkeyPatch, is_there: bool, is_virtual: bool, loses_changes: bool
) -> None:
    monkeypatch.setattr(FakeLinks, "is_there", is_there)
    monkeypatch.setattr(FakeLinks, "is_virtual", is_virtual)
    monkeypatch.setattr(FakeLinks, "loses_changes", loses_changes)
    went_down = is_there or not is_virtual
    assert looked_at(monkeypatch).fired == ["machine.link_down"] * went_down


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), InterruptedError()])
@pytest.mark.parametrize(
    ("is_there", "loses_changes"), [(True, False), (True, True), (False, False)]
)
def test_what_the_kernel_does_not_say_at_once_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, is_there: bool, loses_changes: bool, error: OSError
) -> None:
    monkeypatch.setattr(FakeLinks, "is_there", is_there)
    monkeypatch.setattr(FakeLinks, "loses_changes", loses_changes)
    monkeypatch.setattr(FakeLinks, "fails_once", error)
    assert looked_at(monkeypatch).fired == ["machine.link_down"] * is_there


@pytest.mark.parametrize("nobody_looks", [True, False])
def test_what_went_while_nobody_looked_went_at_no_known_time(
    monkeypatch: pytest.MonkeyPatch, nobody_looks: bool
) -> None:
    """Unlike what went while the configuration was reloaded."""
    settled, ended = asyncio.Event(), asyncio.Event()
    looks = 0

    class QuietLinks(FakeLinks):
        is_virtual = False

        def __init__(self) -> None:
            nonlocal looks
            super().__init__()
            looks += 1
            os.eventfd_read(self._changed)

        def __exit__(self, *_: object) -> None:
            super().__exit__()
            ended.set()

        def all(self) -> list[LinkChange]:
            return [self._as_it_is(up=True)] if looks == 1 else []

    monkeypatch.setattr(links, "Links", QuietLinks)
    monkeypatch.setattr(links, "LinkFollower", follower(settled, lambda: True))
    monkeypatch.setattr(counters, "Counters", FakeCounters)
    host = HostWithTrace()

    async def run() -> None:
        machine = Machine(MachineSettings(), host, logs_to([]))
        running = asyncio.ensure_future(machine.run())
        await settled.wait()
        machine.reconfigure(NOTHING if nobody_looks else MachineSettings())
        await ended.wait()
        settled.clear()
        await another_turn()
        machine.reconfigure(MachineSettings())
        await settled.wait()
        await all_fired()
        await ended_by_us(running)

    asyncio.run(run())
    assert host.fired == ["machine.link_down"] * (not nobody_looks)


def test_who_was_at_work_when_it_happened_is_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it took the kernel a while to say that it is no device that somebody removes."""
    took_s = 0.3
    (window_ns,) = looked_at(monkeypatch, seconds=took_s).windows_ns
    assert window_ns >= (MachineSettings().window_s + took_s) * 1e9


def test_a_symptom_is_logged_with_the_trigger_and_the_trace_that_it_hit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (said,) = looked_at(monkeypatch).log
    assert said.fields["TRIGGER"] == "machine.link_down"
    assert said.fields["TRACE_ID"] == bytes(range(16)).hex()
    assert said.message.startswith(said.fields["REASON"] + "; 1 traces")


def test_who_cannot_follow_links_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    said = asyncio.Event()

    def refuse(_: object) -> list[LinkChange]:
        said.set()
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(links, "Links", FakeLinks)
    monkeypatch.setattr(FakeLinks, "all", refuse)

    async def run() -> None:
        machine = Machine(MachineSettings(), Host(), logs_to(messages))
        running = asyncio.ensure_future(machine.run())
        await said.wait()
        while not messages and not running.done():
            await another_turn()
        assert not running.done(), running
        await ended_by_us(running)

    asyncio.run(run())
    assert len(messages) == 1
    assert "the machine's counters cannot be read: " in messages[0]
