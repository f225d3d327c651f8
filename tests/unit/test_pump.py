# SPDX-License-Identifier: Apache-2.0
"""No event is lost between the data plane's thread and the event loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from itertools import pairwise

import pytest

from appliance.core.dataplane import DataPlaneEvent, LocalTrigger
from appliance.native import NativeDataPlane, Polled
from appliance.pump import Pump
from protocol.messages import Group
from tests.unit.test_native import MONOTONIC, SMALL, TRACE, fire, trigger_waits

FAILS = """
import asyncio, os
from appliance.native import NativeDataPlane
from appliance.pump import Pump
from tests.unit.test_native import MONOTONIC, SMALL, fire

def fail(events):
    raise RuntimeError("the core failed")

async def run():
    with NativeDataPlane(SMALL, MONOTONIC) as here, Pump(here, fail):
        _, fds = here.client_add(os.getpid(), "shop")
        fire(fds.context, b"slow", b"", [])
        here.wake()
        await asyncio.Event().wait()

asyncio.run(run())
"""


def test_what_the_loop_did_not_take_is_taken_at_the_end() -> None:
    taken: list[DataPlaneEvent] = []

    async def run() -> None:
        with NativeDataPlane(SMALL, MONOTONIC) as here:
            with Pump(here, taken.extend):
                _, fds = here.client_add(os.getpid(), "shop")
                fire(fds.context, b"slow", b"", [])
                for fd in fds:
                    os.close(fd)
                # The loop gets no turn from here to the end.
                while here.metrics()["triggers"] == 0:
                    here.wake()
                assert taken == []
            triggers = [event for event in taken if isinstance(event, LocalTrigger)]
            assert [event.trace for event in triggers] == [TRACE]

    asyncio.run(run())
    # Nor is any taken again by what the loop still had to do.
    assert len(taken) == 1


@pytest.mark.parametrize(("has_open", "first_ms", "polls"), [(True, 20, 23), (False, 150, 14)])
def test_it_looks_often_after_a_trigger_and_then_less_and_less(
    has_open: bool, first_ms: int, polls: int
) -> None:
    ms = 1_000_000

    async def run() -> None:
        with NativeDataPlane(SMALL, MONOTONIC) as here, Pump(here, lambda _: None) as pump:
            here.collect(TRACE, Group("slow", TRACE), here.now_ns())
            pump.has_open = has_open
            # As it is where it works: the thread has looked, and knows that there is something.
            looked = threading.Event()
            pump.give_sign(looked.set)
            await asyncio.to_thread(looked.wait)
            begun_ns = 10_000 * ms
            pump.lively(begun_ns)
            looks_ns = [begun_ns]
            while (wait_ns := pump._timeout_ns(looks_ns[-1])) < 1000 * ms and len(
                looks_ns
            ) <= polls:
                looks_ns.append(looks_ns[-1] + wait_ns)
            assert looks_ns[1:4] == [begun_ns + i * first_ms * ms for i in (1, 2, 3)]
            # What is written soon after is soon seen, and later no later than a quarter of that time.
            for before, after in pairwise(looks_ns):
                assert after - before <= max(first_ms * ms, (before - begun_ns) / 4)
            assert len(looks_ns) == polls
            assert pump._timeout_ns(looks_ns[-1] + 3600 * 1000 * ms) == 1000 * ms

    asyncio.run(run())


def test_a_trigger_leaves_its_queue_when_it_is_seen_to_and_not_before() -> None:
    """Until then a successor would find it there; and for ever it would take up room."""
    waits: list[bool] = []

    async def run() -> None:
        with NativeDataPlane(SMALL, MONOTONIC) as here:
            _, fds = here.client_add(os.getpid(), "shop")
            seen = asyncio.Event()

            def look_after_a_poll(_: object = None) -> None:
                polls = pump.polls
                while pump.polls < polls + 2:
                    here.wake()
                waits.append(trigger_waits(fds.context))
                seen.set()

            with Pump(here, look_after_a_poll) as pump:
                fire(fds.context, b"slow", b"", [])
                here.wake()
                await seen.wait()
                look_after_a_poll()
            for fd in fds:
                os.close(fd)

    asyncio.run(run())
    assert waits == [True, False]


@pytest.mark.timeout(20)
def test_memory_that_nobody_was_granted_is_taken_back_though_nobody_rings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle_wait_ns = 10_000_000
    monkeypatch.setattr("appliance.pump._IDLE_WAIT_NS", idle_wait_ns)
    waits_ns: list[int | None] = []

    class Watched(NativeDataPlane):
        def wait_and_poll(self, timeout_ns: int | None) -> Polled:
            waits_ns.append(timeout_ns)
            return super().wait_and_poll(timeout_ns)

    async def run() -> None:
        with Watched(SMALL, MONOTONIC) as here:
            _, fds = here.client_add(os.getpid(), "shop")
            with Pump(here, lambda _: None):
                for at in range(0, os.fstat(fds.arena).st_size, 4096):
                    os.pwrite(fds.arena, b"x", at)
                while here.metrics()["taken_back_bytes"] == 0:
                    pass
            for fd in fds:
                os.close(fd)

    asyncio.run(run())
    # What is taken back at the first look would be so without another.
    assert set(waits_ns) == {idle_wait_ns}


def test_a_failure_to_take_them_ends_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FAILS], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "RuntimeError: the core failed" in ended.stderr
