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
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from appliance.probes.budget import RAISED_BY, Budget, Step, Verdict
from appliance.probes.compiler import Code, coder, load_any
from appliance.probes.link import Link
from appliance.probes.native import NEVER
from appliance.probes.symptoms import BREADCRUMBS, SYMPTOMS, keys_of
from appliance.probes_packets import VERSION, probes_path
from runtime.events import is_set_within
from runtime.log import Log
from runtime.settings.node import ProbeSettings, Settings
from runtime.threads import in_thread
from runtime.watchdog import Ask

# Below the second in which processes are to be back in segments of ours; a refused
# connect() costs some microseconds.
_RECONNECT_S = 0.1

# Other probes, or a node of another release, are in the way only during an upgrade: processes
# are to be watched again within a second after it.
_REFUSED_S = 0.5

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
        self._loader, self._probes = load_any(settings.probes.loader, log.warning)
        log.info(f"the loader is {self._loader.key} (`probes.loader`: {settings.probes.loader})")
        self._link: Link | None = None
        self._attached: set[str] = set()
        self._budget = Budget(settings.probes.cpu_percent / 100)
        self._too_dear: set[str] = set()
        self._missing: dict[str, str] = {}
        """What cannot be had: by object, why."""
        self._has_to_attach = asyncio.Event()
        self.news = asyncio.Event()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_exit(self._exits)
            self._exits.enter_context(self._probes)
            self._exits.callback(self._hang_up)
            if self._settings.probes.bypass:
                self._say_bypass()
            self._set()
            await self._attach_wanted()
            undo.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._exits.aclose()

    # ---------------------------------------------------------------- probes

    def _set(self) -> None:
        """Have thresholds be as configured, and programs that are of no use be gone."""
        probes = self._settings.probes
        factor = RAISED_BY if self._budget.raised else 1
        self._probes.set_uses(
            uses=probes.breadcrumbs or self._settings.machine.wants_anything,
            breadcrumbs=probes.breadcrumbs,
        )
        self._probes.set_coalescing(int(probes.coalesce_s * 1e9))
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
        self._probes.set_bypass(probes.bypass)
        self._balance()

    async def _attach_wanted(self) -> None:
        """Attach what is to be had. By bcc it is compiled beside the event loop, which takes seconds."""
        made_ready: list[str] = []
        with contextlib.ExitStack() as exits:
            code: Code | None = None
            # What cannot be had takes along what is of no use without it; and meanwhile others
            # may be wanted.
            while wanted := self._balance():
                code = code or exits.enter_context(coder(self._loader))
                name = min(wanted, key=lambda name: (name != BREADCRUMBS, name))
                try:
                    made = await in_thread(code, name)
                    if name in self._balance():
                        self._probes.attach(name, made)
                        self._attached.add(name)
                        made_ready.append(name)
                except OSError as error:
                    self._log.error(f"cannot attach {error}; without it: {_keys([name])}")
                    self._missing[name] = str(error)
        if made_ready:
            self._log.info(f"attached: {', '.join(sorted(made_ready))}")

    async def _keep_attached(self) -> None:
        while True:
            await self._has_to_attach.wait()
            self._has_to_attach.clear()
            await self._attach_wanted()
            self._say_figures()

    def _balance(self) -> set[str]:
        """Detach what is of no use any more; the objects that are still to be attached."""
        probes = self._settings.probes
        gone = self._too_dear | self._missing.keys()
        wanted: set[str] = set()
        for symptom in SYMPTOMS:
            if probes.wants(symptom.key) and not gone & set(symptom.objects):
                wanted.update(symptom.objects)
        # With the bypass none is wanted: an attached program costs its call, whatever it does.
        if probes.wants_breadcrumbs and BREADCRUMBS not in gone:
            wanted.add(BREADCRUMBS)
        for name in self._attached - wanted:
            self._probes.detach(name)
        self._attached &= wanted
        return wanted - self._attached

    # ------------------------------------------------------------------ node

    async def run(self) -> None:
        """Stay connected to the node, within the budget and as configured, until cancelled."""
        await asyncio.gather(self._stay_connected(), self._keep_budget(), self._keep_attached())

    async def _stay_connected(self) -> None:
        path = probes_path(self._settings.socket_path)
        missing = refused = ""
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
            link = self._link = Link(connection, self._probes, self._log, ended.set, self.news.set)
            link.say(
                {
                    "hello": VERSION,
                    "context_bytes": self._probes.context_bytes,
                    "loader": self._loader.key,
                }
            )
            try:
                await self._tell_figures(link, ended)
            finally:
                self._hang_up()
            if link.refused not in ("", refused):
                self._log.error(f"the node takes no probes from here: {link.refused}; trying again")
            refused = link.refused
            await asyncio.sleep(_REFUSED_S if refused else _RECONNECT_S)

    async def _tell_figures(self, link: Link, ended: asyncio.Event) -> None:
        while not ended.is_set():
            if not await is_set_within(ended, _FIGURES_EVERY_S) and link.welcomed:
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
                    f"probes take {spent}, {allowed}: those of {verdict.object}, the costliest, are"
                    f" taken out until the others have kept within it for a while, or the"
                    f" configuration is reloaded; without them: {_keys([verdict.object])}"
                )
                self._too_dear.add(verdict.object)
            case Step.PUT_BACK:
                self._put_back()
                self._has_to_attach.set()
        self._set()

    def _put_back(self) -> None:
        if self._too_dear:
            self._log.info(f"what was taken out is put back: {_keys(sorted(self._too_dear))}")
        self._too_dear.clear()

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
            self.news.set()

    def _figures(self) -> dict[str, Any]:
        return {
            "written": dataclasses.asdict(self._probes.written()),
            "memory": dataclasses.asdict(self._probes.memory()),
            "kinds": {
                one.trigger: dataclasses.asdict(self._probes.counts(one.kind)) for one in SYMPTOMS
            },
            "programs": {one.name: dataclasses.asdict(one.cost) for one in self._probes.programs()},
            "thresholds_raised": int(self._budget.raised),
            "missing": {
                key: 1 for name in self._too_dear | self._missing.keys() for key in keys_of(name)
            },
            "loader": {self._loader.key: 1},
            "bypassed": int(self._settings.probes.bypass),
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
            f"connected; {link.watched} processes watched; loader {self._loader.key}"
            if link is not None and link.welcomed
            else "no node"
        )
        if self._settings.probes.bypass:
            return f"{where}; all probes are out (`probes.bypass`)"
        if self._budget.raised:
            where += f"; thresholds are {RAISED_BY} times as high (`probes.cpu_percent`)"
        what = ", ".join(sorted(self._attached)) or "no probes"
        return f"{where}; attached: {what}" + (
            f"; not to be had: {_keys(sorted(gone))}"
            if (gone := self._too_dear | self._missing.keys())
            else ""
        )

    def reconfigure(self, settings: Settings) -> None:
        """Go on with other settings, of which those that cannot be changed are the same."""
        had_bypass = self._settings.probes.bypass
        self._settings = settings
        if settings.probes.bypass != had_bypass:
            self._say_bypass()
        self._budget = Budget(settings.probes.cpu_percent / 100)
        self._put_back()
        # To try again costs a moment: it is for who asks.
        self._missing.clear()
        self._set()
        self._has_to_attach.set()
        self._say_figures()

    def _say_bypass(self) -> None:
        if self._settings.probes.bypass:
            self._log.warning(
                "`probes.bypass` is true: all probes are out, and fire nothing, until you set it to false"
            )
        else:
            self._log.info("`probes.bypass` is false: all probes that are configured go in again")

    def _say_figures(self) -> None:
        """So that whoever reloads sees at once what came of it."""
        if self._link is not None and self._link.welcomed:
            self._link.say({"figures": self._figures()}, needed=False)


def _keys(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(key for name in names for key in keys_of(name)))


def _ns(ms: float | None, factor: int) -> int:
    return NEVER if ms is None else int(ms * factor * 1e6)
