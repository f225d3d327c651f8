# SPDX-License-Identifier: Apache-2.0
"""Looks for symptoms of the machine itself, and fires for the traces that they hit.

Which ones used a device, or a port, the probes know, if they are there. Else those fire that
were at work in the last moments: of the processes in that network namespace, or on the machine.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from appliance.core.dataplane import NO_CLIENT, LocalTrigger
from appliance.core.machine import TRIGGERS, Limits, MachineWatch, Namespace, Symptom
from appliance.namespaces import namespace_of
from protocol.messages import LATERALS_MAX, WHY_BYTES_MAX, Source, TraceId, cut_utf8
from runtime.events import is_set_within
from runtime.log import Log
from runtime.main import die_if_it_fails
from runtime.settings.node import MachineSettings
from runtime.threads import in_thread

if TYPE_CHECKING:
    from appliance.counters import Counters

_TRACES_MAX = 1 + LATERALS_MAX


class MachineHost(Protocol):
    """Who has the processes and their traces (``appliance.daemon.Daemon``)."""

    def processes(self) -> Collection[int]:
        """Of the applications that are attached and live."""

    async def users(self, symptom: Symptom, within_ns: int) -> list[TraceId]:
        """Traces known to have used that device or port of ours lately, the last one first."""

    async def recent(
        self, within_ns: int, namespace: Namespace | None, traces_max: int
    ) -> list[TraceId]:
        """Traces that applications there wrote to lately, which may have ended since.

        None: anywhere.
        """

    def fire(self, trigger: LocalTrigger) -> None:
        """Collect these traces."""


def limits_of(settings: MachineSettings) -> Limits:
    """The part that the core decides by."""
    return Limits(
        links=settings.links,
        qdisc_drops=settings.qdisc_drops,
        qdisc_backlog=settings.qdisc_backlog,
        listen_overflows=settings.listen_overflows,
        pressures={
            "cpu": settings.cpu_pressure_percent,
            "io": settings.io_pressure_percent,
            "memory": settings.memory_pressure_percent,
        },
        quiet_ns=int(settings.quiet_s * 1e9),
    )


class Machine:
    """Looks while ``run()`` runs."""

    def __init__(self, settings: MachineSettings, host: MachineHost, log: Log) -> None:
        self._settings = settings
        self._host = host
        self._log = log
        self._changed = asyncio.Event()
        own = namespace_of("self")
        assert own is not None, "/proc is there: all of a node needs it"
        self._watch = MachineWatch(limits_of(settings), own)
        self._firing: set[asyncio.Task[None]] = set()
        self._looks = 0
        self._seen: Counter[str] = Counter()
        self._without_traces = 0

    @property
    def figures(self) -> dict[str, Any]:
        """How often it looked and saw each symptom, and how often nobody knew a trace that it hit."""
        return {
            "looks": self._looks,
            "seen": {trigger: self._seen[trigger] for trigger in TRIGGERS},
            "without_traces": self._without_traces,
        }

    def reconfigure(self, settings: MachineSettings) -> None:
        """Go on with other limits."""
        self._settings = settings
        self._changed.set()

    async def run(self) -> None:
        """Look, until cancelled."""
        try:
            while True:
                self._changed.clear()
                if self._settings.wants_anything:
                    await self._look_until_changed()
                else:
                    await self._wait_until_changed()
        finally:
            # The data plane that they ask is about to be closed.
            for task in self._firing:
                task.cancel()
            await asyncio.gather(*self._firing, return_exceptions=True)

    async def _look_until_changed(self) -> None:
        # Here, since it takes 12 MiB, which who wants nothing of it need not have.
        from appliance.counters import Counters
        from appliance.links import LinkFollower, Links

        self._watch.limits = limits_of(self._settings)
        try:
            with Counters() as counters, Links() as links:
                follower = LinkFollower(links, self._watch, self._on_symptom)
                await _first_of(follower.run(), self._look_often(counters))
        except OSError as error:
            # A sandbox without netlink (AF_NETLINK), say.
            self._log.error(
                f"the machine's counters cannot be read: {error}; without them: all of `machine`,"
                " until the configuration is reloaded"
            )
            await self._wait_until_changed()

    async def _wait_until_changed(self) -> None:
        await self._changed.wait()
        # It may have been a while.
        self._watch.forget()

    async def _look_often(self, counters: Counters) -> None:
        while not self._changed.is_set():
            await self._look(counters)
            await is_set_within(self._changed, self._settings.look_every_s)

    async def _look(self, counters: Counters) -> None:
        processes = self._host.processes()
        # Where nobody records, nothing can be hit.
        if not processes:
            self._watch.forget_reading()
            return
        reading = await in_thread(counters.read, processes)
        for symptom in self._watch.on_reading(reading):
            self._on_symptom(symptom)
        self._looks += 1

    def _on_symptom(self, symptom: Symptom) -> None:
        task = asyncio.ensure_future(self._fire(symptom))
        self._firing.add(task)
        task.add_done_callback(self._fired)

    @die_if_it_fails
    def _fired(self, task: asyncio.Task[None]) -> None:
        self._firing.discard(task)
        if not task.cancelled():
            task.result()

    async def _fire(self, symptom: Symptom) -> None:
        self._seen[symptom.trigger] += 1
        traces = await self._hit(symptom)
        if not traces:
            self._without_traces += 1
            self._log.info(
                f"{symptom.why}; no trace is known that it hit",
                trigger=symptom.trigger,
                reason=symptom.why,
            )
            return
        self._log.info(
            f"{symptom.why}; {len(traces)} traces may have been hit, and are collected",
            trigger=symptom.trigger,
            trace_id=traces[0].hex(),
            reason=symptom.why,
        )
        self._host.fire(
            LocalTrigger(
                NO_CLIENT,
                symptom.seen_ns,
                symptom.trigger,
                traces[0],
                tuple(traces[1:]),
                cut_utf8(symptom.why, WHY_BYTES_MAX),
                Source.NODE,
            )
        )

    async def _hit(self, symptom: Symptom) -> list[TraceId]:
        # As of when it was seen.
        window_ns = int(self._settings.window_s * 1e9) + time.monotonic_ns() - symptom.seen_ns
        if (symptom.device or symptom.port) and self._watch.is_ours(symptom):
            users = await self._host.users(symptom, window_ns)
            # That they know of none may be since whoever wrote showed no trace.
            if users:
                return users[:_TRACES_MAX]
        return await self._host.recent(window_ns, symptom.namespace, _TRACES_MAX)


async def _first_of(*runs: Coroutine[Any, Any, None]) -> None:
    """Until one of them ends, and as that one does; the others are cancelled."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
