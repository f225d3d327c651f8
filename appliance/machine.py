# SPDX-License-Identifier: Apache-2.0
"""Looks for symptoms of the machine itself, and fires for the traces that they hit.

Which ones used a device, or a port, the probes know, if they are there. Else those fire that
were at work in the last moments: of the processes in that network namespace, or on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from appliance.core.dataplane import NO_CLIENT, LocalTrigger
from appliance.core.machine import (
    LINK_DOWN,
    LINK_SETTLES_NS,
    TRIGGERS,
    Limits,
    MachineWatch,
    Symptom,
)
from appliance.namespaces import namespace_of
from protocol.messages import LATERALS_MAX, WHY_BYTES_MAX, Source, TraceId, cut_utf8
from runtime.log import Log
from runtime.main import die_if_it_fails
from runtime.settings.node import MachineSettings
from runtime.threads import in_thread

if TYPE_CHECKING:
    from appliance.counters import Counters, LinkChange, Links

_TRACES_MAX = 1 + LATERALS_MAX

# A little later, so that it is over by the clock of the core.
_SETTLED_S = LINK_SETTLES_NS / 1e9 + 0.005


class MachineHost(Protocol):
    """Who has the processes and their traces (``appliance.daemon.Daemon``)."""

    def processes(self) -> Collection[tuple[int, int]]:
        """Of those that are attached: process id and client number."""

    async def users(self, symptom: Symptom, within_ns: int) -> list[TraceId]:
        """Traces known to have used that device or port of ours lately, the last one first."""

    async def recent(
        self, within_ns: int, clients: Collection[int], traces_max: int
    ) -> list[TraceId]:
        """Traces that these processes wrote to lately."""

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
        self._runs = False
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
        self._runs = True
        try:
            while True:
                self._changed.clear()
                if self._settings.wants_anything:
                    await self._look_until_changed()
                else:
                    await self._changed.wait()
        finally:
            # What a timer tells from here on would ask a data plane that is about to be closed.
            self._runs = False
            for task in self._firing:
                task.cancel()
            await asyncio.gather(*self._firing, return_exceptions=True)

    async def _look_until_changed(self) -> None:
        # Here, since it takes 12 MiB, which who wants nothing of it need not have.
        from appliance.counters import Counters, Links

        self._watch.limits = limits_of(self._settings)
        # It may have been a while since.
        self._watch.forget_reading()
        try:
            with Counters() as counters, Links() as links, self._following(links):
                while not self._changed.is_set():
                    await self._look(counters)
                    await _event_within(self._changed, self._settings.look_every_s)
        except OSError as error:
            # A sandbox without netlink (AF_NETLINK), say.
            self._log.error(
                f"the machine's counters cannot be read: {error}; without them: all of `machine`,"
                " until the configuration is reloaded"
            )
            await self._changed.wait()

    @contextlib.contextmanager
    def _following(self, links: Links) -> Iterator[None]:
        """See what becomes of devices."""
        loop = asyncio.get_running_loop()

        def take() -> None:
            for symptom in self._watch.take_links(time.monotonic_ns()):
                self._on_symptom(symptom)

        def on_changes(changes: Iterable[LinkChange]) -> None:
            now_ns = time.monotonic_ns()
            for link in changes:
                if link.up is None:
                    self._watch.on_link_gone(link.device, now_ns, is_virtual=link.is_virtual)
                else:
                    self._watch.on_link(link.device, link.name, up=link.up, now_ns=now_ns)
            loop.call_later(_SETTLED_S, take)

        @die_if_it_fails
        def on_readable() -> None:
            try:
                on_changes(links.changes())
            except OSError:
                # Too many to keep (ENOBUFS): what counts is how they are now.
                with contextlib.suppress(OSError):
                    on_changes(links.all_anew())

        on_changes(links.all())
        loop.add_reader(links.fileno(), on_readable)
        try:
            yield
        finally:
            loop.remove_reader(links.fileno())

    async def _look(self, counters: Counters) -> None:
        processes = self._host.processes()
        # Where nobody records, nothing can be hit.
        if not processes:
            self._watch.forget_reading()
            return
        reading = await in_thread(counters.read, [pid for pid, _ in processes])
        for symptom in self._watch.on_reading(reading):
            self._on_symptom(symptom)
        self._looks += 1

    def _on_symptom(self, symptom: Symptom) -> None:
        if not self._runs:
            return
        task = asyncio.ensure_future(self._fire(symptom, time.monotonic_ns()))
        self._firing.add(task)
        task.add_done_callback(self._fired)

    @die_if_it_fails
    def _fired(self, task: asyncio.Task[None]) -> None:
        self._firing.discard(task)
        if not task.cancelled():
            task.result()

    async def _fire(self, symptom: Symptom, seen_ns: int) -> None:
        if symptom.trigger == LINK_DOWN and await _is_removed(symptom.device):
            return
        self._seen[symptom.trigger] += 1
        traces = await self._hit(symptom)
        if not traces:
            self._without_traces += 1
            self._log.info(f"{symptom.why}; no trace is known that it hit")
            return
        self._log.info(f"{symptom.why}; {len(traces)} traces may have been hit, and are collected")
        self._host.fire(
            LocalTrigger(
                NO_CLIENT,
                seen_ns,
                symptom.trigger,
                traces[0],
                tuple(traces[1:]),
                cut_utf8(symptom.why, WHY_BYTES_MAX),
                Source.NODE,
            )
        )

    async def _hit(self, symptom: Symptom) -> list[TraceId]:
        window_ns = int(self._settings.window_s * 1e9)
        if (symptom.device or symptom.port) and self._watch.is_ours(symptom):
            users = await self._host.users(symptom, window_ns)
            # That they know of none may be since whoever wrote showed no trace.
            if users:
                return users[:_TRACES_MAX]
        clients = [
            client
            for pid, client in self._host.processes()
            if symptom.namespace is None or namespace_of(pid) == symptom.namespace
        ]
        return await self._host.recent(window_ns, clients, _TRACES_MAX)


async def _is_removed(device: int) -> bool:
    """With others it takes longer: it goes down, and a while later it is gone."""
    from appliance.counters import is_there

    with contextlib.suppress(OSError):
        return not await in_thread(is_there, device)
    return False


async def _event_within(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
