# SPDX-License-Identifier: Apache-2.0
"""The node's shell: sockets, threads, clocks and gRPC around the core and the data plane.

The core runs on the event loop. Facts come in from the pump (what processes
did), the uplink (what the coordinator says), the control socket and a timer;
after each, ``_on_fact`` lets the uplink fetch what the core wants to say, and
sets the timer for when it wants to be asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import random
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from appliance.attach import AttachServer
from appliance.clients import Clients
from appliance.contexts import ContextSource
from appliance.control import ControlServer, Peek
from appliance.core.dataplane import ClientDrained, DataPlaneEvent, LocalTrigger
from appliance.core.machine import Namespace, Symptom
from appliance.core.node import NodeCore, earliest
from appliance.core.snapshot import TRACES_MAX
from appliance.lossy import most_lossy
from appliance.machine import Machine
from appliance.native import NativeDataPlane
from appliance.probes_packets import probes_path
from appliance.probes_server import ProbesServer
from appliance.pump import Pump
from appliance.recovery import recover
from appliance.report import report_text
from appliance.settings import allowed, core_config, quotas
from appliance.ticks import choose_tick_source
from appliance.uplink import Uplink
from appliance.words import NO_WORDS, KeptWords, Words
from counting.histogram import Histogram
from protocol.control import control_path
from protocol.hashing import percentage_of
from protocol.messages import (
    NO_POLICY,
    WHY_BYTES_MAX,
    Group,
    Policy,
    Snapshot,
    TraceId,
    cut_utf8,
)
from protocol.versions import OURS, Versions
from protocol.wire import Opening
from runtime.log import Level, Log
from runtime.loop_lag import LAG_BOUNDS_S, watch_loop
from runtime.main import die_if_it_fails
from runtime.printable import printable
from runtime.schema import ConfigError
from runtime.service_manager import ServiceManager, StoredFd
from runtime.settings.node import Settings
from runtime.threads import in_thread
from runtime.tls import TlsError
from runtime.unix_socket import Listener, listen, take_over
from runtime.watchdog import Ask

# FileDescriptorName= of the socket unit.
_ATTACH = "attach"

# 5 ms is what a trigger shall be picked up in; far above it only a daemon that was away.
_PICK_UP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 10.0)


async def own_address(endpoint: str) -> str | None:
    """The address of this machine that faces an endpoint; None if it cannot be told.

    Of this moment: the next one may be another, or the first (DHCP, a cable).
    """
    host, _, port = endpoint.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: asks the routes, sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return own


def _listener(path: Path, given: Iterable[StoredFd]) -> tuple[Listener, list[StoredFd]]:
    """Where applications attach: what the service manager listens on, else our own; and the rest."""
    attach = [item for item in given if item.name == _ATTACH]
    others = [item for item in given if item.name != _ATTACH]
    if len(attach) > 1:
        raise OSError(
            f"the service manager gave {len(attach)} sockets named {_ATTACH}; allowed: one. In a drop-in"
            " of the socket's unit, an empty ListenSequentialPacket= comes before another path"
        )
    if attach:
        return take_over(attach[0].fd, path, socket.SOCK_SEQPACKET), others
    return listen(path, socket.SOCK_SEQPACKET), others


class Daemon:
    """One node. Use as ``async with``; serves while it is entered."""

    def __init__(
        self,
        settings: Settings,
        incarnation: int,
        manager: ServiceManager,
        stored: Iterable[StoredFd],
        log: Log,
        versions: Versions = OURS,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self._looking: set[asyncio.Task[None]] = set()
        self._heard = asyncio.Event()
        self._exits = contextlib.AsyncExitStack()
        self._kept_words = KeptWords(manager, log)
        listener, stored = _listener(settings.socket_path, stored)
        self._words, stored = self._kept_words.recover(stored)
        if settings.coordinator is None and self._words != NO_WORDS:
            # Nobody is there any more who could change it.
            self._words = NO_WORDS
            self._kept_words.keep(self._words)
        self._dataplane = self._exits.enter_context(NativeDataPlane(settings, choose_tick_source()))
        self._set_sampling(self._words.policy)
        if self._words.priority_seed:
            self._dataplane.set_priority_seed(self._words.priority_seed)
        self._quotas = quotas(settings)
        for tenant, quota in self._quotas:
            self._dataplane.set_quota(tenant, quota.bytes)
        self._clients = self._exits.enter_context(
            Clients(
                self._dataplane,
                manager,
                settings.arena_bytes_or_default,
                settings.clients_per_user_max_or_default,
                log,
                self._quotas,
            )
        )
        recover(self._dataplane, self._clients, settings, manager, stored, log)
        now_ns = time.monotonic_ns()
        self._core = NodeCore(
            core_config(settings),
            self._dataplane,
            incarnation,
            now_ns,
            time.time_ns() - now_ns,
            versions,
            self._words.policy,
            self._clients.user_of,
            self._words.priority_seed,
        )
        # Of the one coordinator that there is.
        (self._link,) = self._core.links
        self._pick_up = Histogram(_PICK_UP_BOUNDS_S)
        self._loop_lag = Histogram(LAG_BOUNDS_S)
        self._pump = Pump(self._dataplane, self._on_events, self._clients.events_done)
        self._uplink: Uplink | None = None
        self._was_welcomed = False
        self._said_no_address = False
        self.news = asyncio.Event()
        if settings.coordinator is not None:
            self._uplink = Uplink(
                settings.coordinator.endpoint,
                Opening(settings.node, incarnation),
                self._core,
                self._addresses,
                self._on_fact,
                log,
                random.Random(incarnation),
                tls=settings.coordinator.tls,
            )
        self._attach = AttachServer(listener, allowed(settings), self._clients, log)
        self._probes = ProbesServer(
            probes_path(settings.socket_path),
            settings.node,
            self._dataplane.context_bytes,
            self._clients,
            self._dataplane.wake,
            log,
        )
        self._machine = Machine(settings.machine, self, log)

    async def __aenter__(self) -> Self:
        try:
            self._exits.enter_context(self._attach)
            self._exits.enter_context(self._probes)
            control = control_path(self._settings.socket_path)
            await self._exits.enter_async_context(ControlServer(control, self._settings.node, self))
            self._exits.push_async_callback(self._await_looking)
            self._exits.enter_context(self._pump)
        except BaseException:
            await self._exits.aclose()
            raise
        self._on_fact()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._exits.aclose()
        finally:
            # The last events, taken at the end of the pump, set it once more.
            if self._timer is not None:
                self._timer.cancel()

    async def run(self) -> None:
        """Talk to the coordinator, look at the machine and at the loop, until cancelled."""
        runs = [self._machine.run(), watch_loop(self._loop_lag.observe)]
        if self._uplink is not None:
            runs.append(self._uplink.run())
        await asyncio.gather(*runs)

    async def _addresses(self) -> tuple[str, ...]:
        """By which peers know this node: as configured, else the one that faces the coordinator."""
        assert self._settings.coordinator is not None
        if self._settings.addresses:
            return self._settings.addresses
        endpoint = self._settings.coordinator.endpoint
        own = await own_address(endpoint)
        if own is None:
            return ()
        if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
            return (own,)
        if not self._said_no_address:
            self._said_no_address = True
            self._log.info(
                f"{endpoint} is this machine itself, so this node does not know by which address others"
                " see it, and what they say of peers by address does not lead here; set `addresses`,"
                " or give `coordinator.endpoint` this machine's own address"
            )
        return ()

    # ----------------------------------------------------------------- facts

    def _on_events(self, events: list[DataPlaneEvent]) -> None:
        now_ns = time.monotonic_ns()
        self._core.on_clock(now_ns, time.time_ns())
        self._core.on_dataplane(events, now_ns)
        for event in events:
            if isinstance(event, LocalTrigger):
                self._pick_up.observe((now_ns - event.fired_ns) / 1e9)
                self._say_fired(event)
            if isinstance(event, ClientDrained):
                self._clients.drained(event.client)
            else:
                self._pump.lively(now_ns)
        self._on_fact()

    def _say_fired(self, event: LocalTrigger) -> None:
        if self._log.says(Level.DEBUG):
            self._log.debug(
                f"trigger {event.trigger} fired for {event.trace.hex()}: {event.why}",
                trigger=event.trigger,
                trace_id=event.trace.hex(),
                reason=event.why,
            )

    def _on_fact(self) -> None:
        now_ns = time.monotonic_ns()
        policy = self._core.take_policy()
        if policy is not None:
            self._on_policy(policy)
        seed = self._core.take_priority_seed()
        if seed is not None:
            self._keep(replace(self._words, priority_seed=seed))
            self._dataplane.set_priority_seed(seed)
        self._pump.has_open = self._core.has_open
        # It may be written still.
        if self._core.take_collected():
            self._pump.lively(now_ns)
        asked = self._core.take_status_question()
        if asked is not None:
            self._core.on_status(asked, report_text(self.status()))
        sends_ns = None
        if self._uplink is not None:
            if self._uplink.welcomed != self._was_welcomed:
                self._was_welcomed = self._uplink.welcomed
                self.news.set()
            sends_ns = self._uplink.poke()
        self._look_for_recent()
        self._set_timer(now_ns, sends_ns)
        # Who waits looks again after each fact.
        self._heard.set()
        self._heard.clear()

    def _keep(self, words: Words) -> None:
        self._words = words
        self._kept_words.keep(words)

    def _on_policy(self, policy: Policy) -> None:
        self._keep(replace(self._words, policy=policy))
        self._set_sampling(policy)
        self._say_percentage(policy)

    def _say_percentage(self, policy: Policy) -> None:
        whose = (
            "this node's own configuration: the coordinator has no policy"
            if policy == NO_POLICY
            else f"the coordinator's policy {policy.number:016x}"
        )
        self._log.info(
            f"{self._percentage(policy):g} % of all traces are recorded from now on, by {whose}"
        )

    def _threshold(self, policy: Policy) -> int:
        """Below which a trace's hash means that it is recorded."""
        if policy.percentage_threshold is not None:
            return policy.percentage_threshold
        return self._settings.percentage_threshold

    def _percentage(self, policy: Policy) -> float:
        return percentage_of(self._threshold(policy))

    def _set_sampling(self, policy: Policy) -> None:
        self._dataplane.set_sampling(
            self._threshold(policy), trust_incoming=self._settings.trust_incoming
        )

    def _look_for_recent(self) -> None:
        """For a snapshot: in a thread, since it looks at the whole pool."""
        order = self._core.take_recent_question()
        if order is not None:
            task = asyncio.ensure_future(self._answer_recent(order))
            self._looking.add(task)
            task.add_done_callback(self._looked)

    async def _answer_recent(self, order: Snapshot) -> None:
        of = f" of {printable(order.service)}" if order.service else ""
        self._log.info(
            f"{order.trigger}: the last {order.age_ns / 1e9:g} s{of} are collected, as ordered by"
            f" {printable(order.by) or 'somebody whom an older coordinator does not name'}",
            trigger=order.trigger,
        )
        found, traces = await asyncio.to_thread(
            self._dataplane.recent, order.age_ns, order.service, TRACES_MAX
        )
        self._core.on_recent(order, found, traces, time.monotonic_ns())
        self._on_fact()

    @die_if_it_fails
    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking.discard(task)
        task.result()

    async def _await_looking(self) -> None:
        """The data plane must stay until nobody looks at it."""
        await asyncio.gather(*self._looking, return_exceptions=True)

    def _set_timer(self, now_ns: int, sends_ns: int | None) -> None:
        timer_ns = earliest(self._core.next_tick_ns(), sends_ns)
        if timer_ns == self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if timer_ns is not None:
            self._timer = self._loop.call_later((timer_ns - now_ns) / 1e9, self._on_timer)
        self._timer_ns = timer_ns

    @die_if_it_fails
    def _on_timer(self) -> None:
        self._timer = self._timer_ns = None
        now_ns = time.monotonic_ns()
        self._core.on_clock(now_ns, time.time_ns())
        self._core.on_tick(now_ns)
        self._set_timer(now_ns, self._uplink.poke() if self._uplink is not None else None)

    # ------------------------------------------- as the service manager sees it

    @property
    def threads(self) -> dict[str, Ask]:
        """What must move so that the node does."""
        return {"data plane": self._pump.give_sign}

    def status_text(self) -> str:
        """How the node is, in a line."""
        if self._uplink is None:
            uplink = "no coordinator configured"
        elif self._link.refused is not None:
            uplink = f"refused by the coordinator: {self._link.refused}"
        else:
            assert self._settings.coordinator is not None
            state = "connected to" if self._uplink.welcomed else "not connected to"
            uplink = f"{state} {self._settings.coordinator.endpoint}"
        figures = self._dataplane.metrics()
        horizon_ns = figures["horizon_ns"]
        horizon = f"{horizon_ns / 1e9:.0f} s back" if horizon_ns else "all since the start"
        return (
            f"{uplink}; {self._clients.live_applications} clients; pool holds {horizon};"
            f" {self._core.unreported_groups} triggers unreported"
        )

    @property
    def context_bytes(self) -> int:
        """Of a context segment."""
        return self._dataplane.context_bytes

    def use_contexts(self, source: ContextSource) -> None:
        """Take context segments from there, also for processes that are attached: they go over."""
        self._clients.use_contexts(source)

    def reconfigure(self, settings: Settings) -> None:
        """Go on with other settings, of which those that cannot be changed are the same."""
        # First, since a name may be gone by now.
        attachable = allowed(settings)
        if self._uplink is not None and settings.coordinator is not None:
            try:
                self._uplink.reconfigure(settings.coordinator.tls)
            except TlsError as error:
                raise ConfigError([str(error)]) from error
        self._attach.allowed = attachable
        before, self._settings = self._settings, settings
        self._set_sampling(self._core.policy)
        # By a policy it stays as it is, which who changed this key should know.
        if settings.percentage != before.percentage:
            self._say_percentage(self._core.policy)
        self._core.reconfigure(core_config(settings), time.monotonic_ns())
        self._machine.reconfigure(settings.machine)
        self._on_fact()

    # ------------------------------------------------------------ MachineHost

    def processes(self) -> list[int]:
        """Of the applications that are attached and live."""
        return [
            client.pid
            for client in self._clients
            if client.is_application and client.pidfd is not None
        ]

    async def users(self, symptom: Symptom, within_ns: int) -> list[TraceId]:
        """Traces that used a device or port of ours lately, as far as there are probes that know."""
        return await self._probes.users(symptom.device, symptom.port, within_ns)

    async def recent(
        self, within_ns: int, namespace: Namespace | None, traces_max: int
    ) -> list[TraceId]:
        """Traces that applications there wrote to lately, which may have ended since.

        None: anywhere.
        """
        clients = [
            client.number
            for client in self._clients
            if client.is_application and namespace in (None, client.namespace)
        ]
        return await in_thread(self._dataplane.recent_of, within_ns, clients, traces_max)

    def fire(self, trigger: LocalTrigger) -> None:
        """Fire a trigger as the node itself."""
        self._on_events([trigger])

    # ------------------------------------------------------------ ControlHost

    def status(self) -> dict[str, Any]:
        """Figures about the node, ready for JSON."""
        uplink, counters = self._uplink, self._core.counters
        # To the data plane the probes are one of them.
        dataplane = self._dataplane.metrics() | {"clients": self._clients.live_applications}
        return {
            "node": self._settings.node,
            "coordinator": self._settings.coordinator.endpoint
            if self._settings.coordinator
            else "",
            "certificate_expires_s": uplink.expires_at_s if uplink is not None else 0.0,
            "connected": uplink is not None and uplink.welcomed,
            "not_connected": uplink.not_connected if uplink is not None else "",
            "refused": self._link.refused or "",
            "protocol": self._link.agreed.protocol if self._link.agreed is not None else 0,
            "policy": f"{self._core.policy.number:016x}" if self._core.policy.number else "",
            "percentage": self._percentage(self._core.policy),
            "clients_in_pool": len(self._clients),
            "triggers_unreported": self._core.unreported_groups,
            "triggered_traces": self._core.triggered_traces,
            "queues": {
                name: dataclasses.asdict(depth) for name, depth in self._core.queues.items()
            },
            "triggers": {
                name: dataclasses.asdict(counted) for name, counted in counters.triggers.items()
            },
            "core": {
                field.name: getattr(counters, field.name)
                for field in dataclasses.fields(counters)
                if field.name != "triggers"
            },
            "dataplane": dataplane,
            "lossy": most_lossy(self._clients, self._dataplane.client_records_lost),
            "quotas": {
                quota.name: {
                    "quota_bytes": quota.bytes,
                    "held_bytes": self._dataplane.tenant_bytes(tenant),
                }
                for tenant, quota in self._quotas
            },
            "attach_waiting": self._attach.waiting,
            "attach_moving": self._clients.moving,
            "attach": dataclasses.asdict(self._attach.counters),
            "uplink": dataclasses.asdict(uplink.counters) if uplink else {},
            "probes_connected": self._probes.connected,
            "probes_watched": self._probes.watched,
            "probes": self._probes.figures,
            "machine": self._machine.figures,
            "polls": self._pump.polls,
            "events_waiting": self._pump.events_waiting,
            "pick_up": dataclasses.asdict(self._pick_up),
            "loop_lag": dataclasses.asdict(self._loop_lag),
        }

    def peek(self, trace: TraceId) -> Peek:
        """What the node holds of a trace."""
        return self._dataplane.peek(trace)

    async def known(self, trace: TraceId) -> None:
        """Wait while a triggered trace is still looked for."""
        while self._core.is_searching(trace):
            await self._heard.wait()

    def trigger(self, name: str, trace: TraceId, why: str) -> None:
        """Fire a trigger as the operator."""
        now_ns = time.monotonic_ns()
        cut = cut_utf8(why, WHY_BYTES_MAX)
        self._core.on_operator_trigger(Group(name, trace), (), cut, now_ns)
        self._pump.lively(now_ns)
        self._on_fact()
