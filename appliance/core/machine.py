# SPDX-License-Identifier: Apache-2.0
"""Symptoms of the machine itself, which its counters tell without BPF: what is new in a reading.

Sans-IO: readings and link changes go in, symptoms come out. The first reading of anything is
only what later ones are compared with. A symptom that lasts is told once in a while.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

PREFIX = "machine."

LINK_DOWN = PREFIX + "link_down"
LINK_UP = PREFIX + "link_up"
QDISC_DROPS = PREFIX + "qdisc_drops"
QDISC_BACKLOG = PREFIX + "qdisc_backlog"
LISTEN_OVERFLOW = PREFIX + "listen_overflow"
PRESSURES = {name: f"{PREFIX}{name}_pressure" for name in ("cpu", "io", "memory")}

TRIGGERS = (
    *(LINK_DOWN, LINK_UP, QDISC_DROPS, QDISC_BACKLOG, LISTEN_OVERFLOW),
    *PRESSURES.values(),
)

LINK_SETTLES_NS = 50_000_000
"""Within this time the kernel says that a device went down, and that it is gone.

It takes longer if many are removed at once.
"""

Namespace: TypeAlias = int
"""A network namespace, by a number that it has alone."""

QueueKey: TypeAlias = tuple[int, int, int]
"""A device; its class or queue above this one; this one's handle, which several may have (0)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """From when on a reading is a symptom; None: never.

    Packets and connections are counted between two readings; pressures are the percentage of
    that time in which some task waited (PSI).
    """

    links: bool = True
    qdisc_drops: int | None = None
    qdisc_backlog: int | None = None
    listen_overflows: int | None = None
    pressures: Mapping[str, float | None] = field(default_factory=dict)
    quiet_ns: int = 0


@dataclass(frozen=True, slots=True)
class Queue:
    """A queueing discipline of a device, by its counters."""

    device: str
    kind: str
    drops: int
    backlog: int
    """Packets that wait."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The machine's counters at one time.

    ``overflows``: connections that a full listening queue turned away, of each namespace.
    ``listeners``: the same of each listening port of our own. ``stalled_us``: by resource.
    """

    time_ns: int
    queues: Mapping[QueueKey, Queue] = field(default_factory=dict)
    overflows: Mapping[Namespace, int] = field(default_factory=dict)
    listeners: Mapping[int, int] = field(default_factory=dict)
    stalled_us: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Symptom:
    """Something is wrong, with whom it concerns: users of that device, or port, or namespace."""

    trigger: str
    why: str
    seen_ns: int
    device: int = 0
    port: int = 0
    namespace: Namespace | None = None
    """None: all of the machine."""


@dataclass(slots=True)
class _Link:
    """``changed_ns``: since when nobody was told of it; None: all is told.

    ``is_virtual``: made by software, so that whoever removes it does not want it up.
    """

    name: str
    up: bool
    was_up: bool
    is_virtual: bool
    is_gone: bool = False
    changed_ns: int | None = None


class MachineWatch:
    """What was seen last, and told."""

    def __init__(self, limits: Limits, own: Namespace) -> None:
        """``own``: our namespace, whose devices and listeners are read."""
        self.limits = limits
        self._own = own
        self._before: Reading | None = None
        self._links: dict[int, _Link] = {}
        self._told_ns: dict[tuple[str, object], int] = {}

    def on_link(
        self, device: int, name: str, *, up: bool, now_ns: int, is_virtual: bool = False
    ) -> None:
        """A device is, or has become, able to carry packets, or not. See ``take_links``."""
        link = self._links.get(device)
        if link is None:
            self._links[device] = _Link(name, up, was_up=up, is_virtual=is_virtual)
            return
        link.name, link.is_gone = name, False
        if link.up == up:
            return
        link.up = up
        # A device that is new comes up for the first time.
        if link.was_up:
            link.changed_ns = now_ns
        link.was_up = True

    def on_link_gone(self, device: int, now_ns: int) -> None:
        """There is no such device any more, or it is one that nobody is told of."""
        link = self._links.get(device)
        if link is None:
            return
        self.on_link(device, link.name, up=False, now_ns=now_ns)
        link.is_gone = True
        if link.is_virtual or link.changed_ns is None:
            del self._links[device]

    def only_links(self, devices: Collection[int], now_ns: int) -> None:
        """These are all devices that there are."""
        for device in self._links.keys() - set(devices):
            self.on_link_gone(device, now_ns)

    def doubtful_links(self, now_ns: int) -> set[int]:
        """Devices that went down, and may be among many that are removed together.

        The kernel says so of each first, and only a while later that it is gone.
        """
        return {
            device
            for device, link in self._links.items()
            if link.is_virtual and not link.up and _has_settled(link, now_ns)
        }

    def take_links(self, now_ns: int, doubtful: Collection[int] = ()) -> list[Symptom]:
        """What became of links, a moment after it; without those that are doubtful."""
        self._forget(now_ns)
        found = []
        settled = [
            (device, link)
            for device, link in self._links.items()
            if device not in doubtful and _has_settled(link, now_ns)
        ]
        for device, link in settled:
            changed_ns, link.changed_ns = link.changed_ns, None
            if link.is_gone:
                del self._links[device]
            trigger, became = (LINK_UP, "came up") if link.up else (LINK_DOWN, "went down")
            if (
                changed_ns is not None
                and self.limits.links
                and self._is_new((trigger, device), now_ns)
            ):
                why = f"link {link.name} {became}"
                found.append(Symptom(trigger, why, changed_ns, device=device, namespace=self._own))
        return found

    def is_ours(self, symptom: Symptom) -> bool:
        """Whether it is of our own namespace."""
        return symptom.namespace == self._own

    def forget_reading(self) -> None:
        """No counter was read for a while: begin anew."""
        self._before = None

    def forget(self) -> None:
        """Nobody looked at anything for a while, not even at links: begin anew."""
        self.forget_reading()
        self._links.clear()

    def on_reading(self, reading: Reading) -> list[Symptom]:
        """Compare with the reading before."""
        before, self._before = self._before, reading
        now_ns = reading.time_ns
        self._forget(now_ns)
        if before is None or now_ns <= before.time_ns:
            return []
        found = [
            *self._queues(before, reading),
            *self._overflows(before, reading),
            *self._pressures(before, reading),
        ]
        return [
            symptom
            for symptom in found
            if self._is_new(
                (symptom.trigger, (symptom.device, symptom.port, symptom.namespace)), now_ns
            )
        ]

    def _queues(self, before: Reading, reading: Reading) -> Iterator[Symptom]:
        limits = self.limits
        for key, queue in reading.queues.items():
            device, known = key[0], before.queues.get(key)
            if known is None or known.kind != queue.kind:
                continue
            dropped = queue.drops - known.drops
            if limits.qdisc_drops is not None and dropped >= limits.qdisc_drops:
                why = f"{queue.kind} of {queue.device} dropped {dropped} packets in {_span(before, reading)}"
                yield self._of_device(QDISC_DROPS, why, device, reading)
            if limits.qdisc_backlog is not None and queue.backlog >= limits.qdisc_backlog:
                why = f"{queue.backlog} packets wait in {queue.kind} of {queue.device}"
                yield self._of_device(QDISC_BACKLOG, why, device, reading)

    def _of_device(self, trigger: str, why: str, device: int, reading: Reading) -> Symptom:
        return Symptom(trigger, why, reading.time_ns, device=device, namespace=self._own)

    def _overflows(self, before: Reading, reading: Reading) -> Iterator[Symptom]:
        least = self.limits.listen_overflows
        if least is None:
            return
        span, seen_ns = _span(before, reading), reading.time_ns
        turned_away = {
            namespace: overflows - before.overflows.get(namespace, overflows)
            for namespace, overflows in reading.overflows.items()
        }
        full = False
        for port, drops in reading.listeners.items():
            if port in before.listeners:
                lost = drops - before.listeners[port]
            elif before.listeners:
                # It is new, or was missing in the reading before.
                lost = min(drops, turned_away.get(self._own, 0))
            else:
                continue  # all may be old
            if lost >= least:
                full = True
                # The other counter, read a moment before, may have the rest of it next time.
                self._told_ns[LISTEN_OVERFLOW, (0, 0, self._own)] = seen_ns
                why = f"the listening queue of port {port} turned {lost} away in {span}"
                yield Symptom(LISTEN_OVERFLOW, why, seen_ns, port=port, namespace=self._own)
        for namespace, lost in turned_away.items():
            # Those whose port is known are told of.
            if lost >= least and not (namespace == self._own and full):
                why = f"listening queues turned {lost} connections away in {span}"
                yield Symptom(LISTEN_OVERFLOW, why, seen_ns, namespace=namespace)

    def _pressures(self, before: Reading, reading: Reading) -> Iterator[Symptom]:
        elapsed_us = (reading.time_ns - before.time_ns) / 1e3
        for name, stalled_us in reading.stalled_us.items():
            least = self.limits.pressures.get(name)
            if least is None or name not in before.stalled_us:
                continue
            percent = min(100.0, 100 * (stalled_us - before.stalled_us[name]) / elapsed_us)
            if percent >= least:
                why = f"tasks waited for {_RESOURCES[name]} in {percent:.0f} % of {_span(before, reading)}"
                yield Symptom(PRESSURES[name], why, reading.time_ns)

    def _is_new(self, what: tuple[str, object], now_ns: int) -> bool:
        if now_ns - self._told_ns.get(what, -self.limits.quiet_ns) < self.limits.quiet_ns:
            return False
        self._told_ns[what] = now_ns
        return True

    def _forget(self, now_ns: int) -> None:
        over_ns = now_ns - self.limits.quiet_ns
        for what in [what for what, told_ns in self._told_ns.items() if told_ns < over_ns]:
            del self._told_ns[what]


_RESOURCES = {"cpu": "a CPU", "io": "I/O", "memory": "memory"}


def _has_settled(link: _Link, now_ns: int) -> bool:
    return link.changed_ns is not None and now_ns - link.changed_ns >= LINK_SETTLES_NS


def _span(before: Reading, reading: Reading) -> str:
    return f"{(reading.time_ns - before.time_ns) / 1e9:.1f} s"
