# SPDX-License-Identifier: Apache-2.0
"""The probes of a machine, and the way to its node.

Loads what the configuration wants, each on its own: what this kernel does not take is said
once, and the others go on. Connects to the node, again and again while there is none. What
the kernel holds is held by this process: when it ends, all of it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from types import TracebackType
from typing import Any, Self

from appliance.probes.budget import RAISED_BY, Budget, Step, Verdict
from appliance.probes.link import Link
from appliance.probes.native import NEVER, NativeProbes
from appliance.probes.packets import VERSION, probes_path
from appliance.probes.symptoms import SYMPTOMS
from runtime.log import Log
from runtime.settings.node import ProbeSettings, Settings
from runtime.watchdog import Ask

# Below the second in which processes are to be back in segments of ours; a refused
# connect() costs some microseconds.
_RECONNECT_S = 0.1

# What is in the way, others that are connected or another release, somebody has to remove.
_REFUSED_S = 5.0

_FIGURES_EVERY_S = 2.0

# At what is spent; the estimate needs some hundred runs.
_LOOK_EVERY_S = 2.0


class Daemon:
    """All of it. Use as ``async with``; serves while it is entered."""

    def __init__(self, settings: Settings, log: Log) -> None:
        """OSError says why this kernel takes no probes at all."""
        self._settings = settings
        self._log = log
        self._exits = contextlib.AsyncExitStack()
        self._probes = NativeProbes()
        self._link: Link | None = None
        self._attached: set[str] = set()
        self._budget = Budget(settings.probes.cpu_percent / 100)
        self._too_dear: set[str] = set()
        self._missing: dict[str, str] = {}
        """What cannot be had: by object, why."""

    async def __aenter__(self) -> Self:
        self._exits.enter_context(self._probes)
        self._exits.callback(self._hang_up)
        self._apply()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._exits.aclose()

    # ---------------------------------------------------------------- probes

    def _apply(self) -> None:
        """Have programs and thresholds be as configured."""
        probes = self._settings.probes
        factor = RAISED_BY if self._budget.raised else 1
        self._probes.set_breadcrumbs(probes.breadcrumbs)
        self._probes.set_coalescing(int(probes.coalesce_s * 1e9))
        wanted: set[str] = set()
        for symptom in SYMPTOMS:
            settings: ProbeSettings = getattr(probes, symptom.key)
            self._probes.set_kind(
                symptom.kind,
                symptom.trigger,
                _ns(settings.fire_ms, factor),
                _ns(settings.record_ms, factor),
                int(1e9 / probes.per_s),
                int((probes.burst - 1) * 1e9 / probes.per_s),
            )
            if probes.wants(symptom.key):
                wanted.update(symptom.objects)
        self._probes.set_bypass(probes.bypass)
        if probes.breadcrumbs and not probes.bypass:
            wanted.add("sockets")
        # With the bypass none is wanted: an attached program costs its call, whatever it does.
        for name in self._attached - wanted:
            self._probes.detach(name)
        for name in self._missing.keys() - wanted:
            del self._missing[name]
        self._attached &= wanted
        for name in sorted(wanted - self._attached - self._too_dear):
            self._attach(name)

    def _attach(self, name: str) -> None:
        try:
            self._probes.attach(name)
        except OSError as error:
            if self._missing.get(name) != str(error):
                keys = ", ".join(one.key for one in SYMPTOMS if name in one.objects)
                self._log.error(f"this kernel does not take the probe {error}; without it: {keys}")
            self._missing[name] = str(error)
        else:
            self._attached.add(name)
            self._missing.pop(name, None)

    # ------------------------------------------------------------------ node

    async def run(self) -> None:
        """Stay connected to the node, and within the budget, until cancelled."""
        await asyncio.gather(self._stay_connected(), self._keep_budget())

    async def _stay_connected(self) -> None:
        path = probes_path(self._settings.socket_path)
        missing = ""
        while True:
            ended = asyncio.Event()
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            connection.setblocking(False)
            try:
                connection.connect(str(path))
            except OSError as error:
                connection.close()
                if missing != str(error):
                    missing = str(error)
                    self._log.warning(f"no node listens on {path} ({error.strerror}); waiting")
                await asyncio.sleep(_RECONNECT_S)
                continue
            missing = ""
            link = self._link = Link(connection, self._probes, self._log, ended.set)
            link.say(
                {
                    "hello": VERSION,
                    "context_bytes": self._probes.context_bytes,
                    "loader": "core",
                }
            )
            try:
                await self._tell_figures(link, ended)
            finally:
                self._hang_up()
            await asyncio.sleep(_REFUSED_S if link.refused else _RECONNECT_S)

    async def _tell_figures(self, link: Link, ended: asyncio.Event) -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _FIGURES_EVERY_S)
            if not ended.is_set() and link.welcomed:
                link.say({"figures": self._figures()}, needed=False)

    async def _keep_budget(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            run_ns: dict[str, int] = dict.fromkeys(self._attached, 0)
            for program in self._probes.programs():
                if program.object in run_ns:
                    run_ns[program.object] += program.cost.run_ns
            self._obey(self._budget.look(time.monotonic_ns(), run_ns))

    def _obey(self, verdict: Verdict) -> None:
        if verdict.step is None:
            return
        spent = f"{100 * verdict.share:.2g} % of a CPU"
        allowed = f"`probes.cpu_percent` allows {self._settings.probes.cpu_percent:g} %"
        match verdict.step:
            case Step.RAISE:
                self._log.warning(
                    f"probes take {spent}, {allowed}: all thresholds are raised by {RAISED_BY}"
                )
            case Step.LOWER:
                self._log.info(f"probes take {spent}: thresholds are as configured again")
            case Step.TAKE_OUT:
                self._log.error(
                    f"probes take {spent}, {allowed}: {verdict.object} is taken out, the costliest,"
                    " until the configuration is reloaded"
                )
                self._probes.detach(verdict.object)
                self._attached.discard(verdict.object)
                self._too_dear.add(verdict.object)
                self._missing[verdict.object] = "too dear"
        self._apply()

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _figures(self) -> dict[str, Any]:
        return {
            "written": dataclasses.asdict(self._probes.written()),
            "kinds": {
                one.trigger: dataclasses.asdict(self._probes.counts(one.kind)) for one in SYMPTOMS
            },
            "programs": {one.name: dataclasses.asdict(one.cost) for one in self._probes.programs()},
            "thresholds_raised": int(self._budget.raised),
            "missing": dict.fromkeys(self._missing, 1),
        }

    # ------------------------------------------- as the service manager sees it

    @property
    def threads(self) -> dict[str, Ask]:
        """The thread that writes records has nothing to answer: it ends the process if it fails."""
        return {}

    def status_text(self) -> str:
        """How it is, in a line."""
        link = self._link
        where = (
            f"connected; {link.watched} processes watched"
            if link is not None and link.welcomed
            else "no node"
        )
        what = ", ".join(sorted(self._attached)) or "no probes"
        return f"{where}; attached: {what}" + (
            f"; not to be had: {', '.join(sorted(self._missing))}" if self._missing else ""
        )

    def reconfigure(self, settings: Settings) -> None:
        """Go on with other settings, of which those that cannot be changed are the same."""
        self._settings = settings
        self._budget = Budget(settings.probes.cpu_percent / 100)
        for name in self._too_dear:
            self._missing.pop(name, None)
        self._too_dear.clear()
        self._apply()
        # So that whoever reloads sees at once what came of it.
        if self._link is not None and self._link.welcomed:
            self._link.say({"figures": self._figures()}, needed=False)


def _ns(ms: float | None, factor: int) -> int:
    return NEVER if ms is None else int(ms * factor * 1e6)
