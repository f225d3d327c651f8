# SPDX-License-Identifier: Apache-2.0
"""Devices of our network namespace, and what becomes of them. Nothing of it needs a privilege."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socket import AF_UNSPEC
from types import TracebackType
from typing import Any, Self

from appliance.core.machine import LINK_SETTLES_NS, MachineWatch, Symptom
from appliance.netlink import NETLINK_ROUTE, NetlinkSocket, by_pyroute2
from appliance.netlink_codecs import (
    RTM_DELLINK,
    RTM_GETLINK,
    RTM_NEWLINK,
    RTMGRP_LINK,
    ifinfmsg,
)
from runtime.main import die_if_it_fails
from runtime.threads import in_thread

# uapi/linux/if.h: the device is on, and its cable, or peer, is there.
_IFF_UP, _IFF_LOOPBACK, _IFF_LOWER_UP = 0x1, 0x8, 0x10000

# Kinds of devices whose ports containers have the other ends of.
_BRIDGES = ("bridge", "openvswitch")

_LINK = by_pyroute2(ifinfmsg)

# A little later, so that it is over by the clock of the core.
_SETTLED_S = LINK_SETTLES_NS / 1e9 + 0.005


@dataclass(frozen=True, slots=True)
class LinkChange:
    """Of a device. ``is_virtual``: made by software, as of a container.

    ``up`` None: it is gone, or its state says nothing about the machine's network.
    """

    device: int
    name: str
    up: bool | None
    is_virtual: bool


class Links:
    """Devices of our namespace, and what becomes of them. Use as ``with``."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as opened:
            # First, so that no change is missed.
            self._told = opened.enter_context(NetlinkSocket(NETLINK_ROUTE, RTMGRP_LINK))
            self._asked = opened.enter_context(NetlinkSocket(NETLINK_ROUTE))
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()

    def fileno(self) -> int:
        """Readable when there are changes."""
        return self._told.fileno()

    def all(self) -> list[LinkChange]:
        """Every device as it is, after any removal of some that is under way.

        OSError if the kernel does not say. It may take seconds: the kernel waits for its lock
        for devices, which a removal of many holds for all of them.
        """
        return _changes(self._asked.dump(RTM_GETLINK, ifinfmsg(), _LINK))

    def all_anew(self) -> list[LinkChange]:
        """The same, where changes were lost. Those that were not are older: they are left out."""
        self._told.forget()
        return self.all()

    def changes(self) -> list[LinkChange]:
        """What became of devices since. OSError: some changes were lost (ENOBUFS)."""
        return _changes(self._told.changes(_LINK))


class LinkFollower:
    """Has the core see what becomes of devices, while ``run()`` runs."""

    def __init__(
        self, links: Links, watch: MachineWatch, on_symptom: Callable[[Symptom], None]
    ) -> None:
        self._links = links
        self._watch = watch
        self._on_symptom = on_symptom
        self._has_news = asyncio.Event()
        # Who followed before may know of others.
        self._has_lost = True

    async def run(self) -> None:
        """Until cancelled. OSError if the kernel refuses to say which devices there are."""
        try:
            with contextlib.suppress(InterruptedError):
                await self._look_anew()
            self._has_news.set()
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                await asyncio.sleep(_SETTLED_S)
                try:
                    if self._has_lost:
                        await self._look_anew()
                    await self._tell()
                except OSError:
                    # Too little memory, or too many changes: again, a moment later.
                    self._has_news.set()
        finally:
            asyncio.get_running_loop().remove_reader(self._links.fileno())

    @die_if_it_fails
    def _on_readable(self) -> None:
        try:
            self._take(self._links.changes())
        except OSError:
            # Too many to keep (ENOBUFS): what counts is how they are now.
            self._has_lost = True
            asyncio.get_running_loop().remove_reader(self._links.fileno())
        self._has_news.set()

    async def _look_anew(self) -> None:
        found = await in_thread(self._links.all_anew)
        self._watch.only_links({link.device for link in found}, time.monotonic_ns())
        self._take(found)
        self._has_lost = False
        self._has_news.set()
        asyncio.get_running_loop().add_reader(self._links.fileno(), self._on_readable)

    def _take(self, changes: Iterable[LinkChange]) -> None:
        now_ns = time.monotonic_ns()
        for link in changes:
            if link.up is None:
                self._watch.on_link_gone(link.device, now_ns)
            else:
                self._watch.on_link(
                    link.device, link.name, up=link.up, now_ns=now_ns, is_virtual=link.is_virtual
                )

    async def _tell(self) -> None:
        now_ns = time.monotonic_ns()
        doubtful = self._watch.doubtful_links(now_ns)
        self._tell_of(self._watch.take_links(now_ns, doubtful))
        if not doubtful:
            return
        found = await in_thread(self._links.all)
        there = {link.device for link in found if link.up is not None}
        for device in doubtful - there:
            self._watch.on_link_gone(device, now_ns)
        self._tell_of(self._watch.take_links(now_ns))

    def _tell_of(self, symptoms: Iterable[Symptom]) -> None:
        for symptom in symptoms:
            self._on_symptom(symptom)


def _changes(messages: Iterable[Any]) -> list[LinkChange]:
    found = []
    for message in messages:
        kind, flags = message["header"]["type"], message["flags"]
        # A bridge tells of its ports, by its own family: of what becomes of them as such.
        is_of_device = kind in (RTM_NEWLINK, RTM_DELLINK) and message["family"] == AF_UNSPEC
        if not is_of_device or flags & _IFF_LOOPBACK:
            continue
        # A cable's device that is a bridge's or bond's port has this too, without a kind.
        info = message.get_attr("IFLA_LINKINFO")
        made_as = info.get_attr("IFLA_INFO_KIND") if info is not None else None
        is_virtual = made_as is not None
        port_of = info.get_attr("IFLA_INFO_SLAVE_KIND") if info is not None else None
        # The other end of a container's device goes with the container; and the bridge of which
        # it was the last port is down then.
        is_of_containers = is_virtual and (port_of in _BRIDGES or made_as == "bridge")
        up = None
        if kind == RTM_NEWLINK and not is_of_containers:
            up = flags & _IFF_UP != 0 and flags & _IFF_LOWER_UP != 0
        name = message.get_attr("IFLA_IFNAME") or ""
        found.append(LinkChange(message["index"], name, up, is_virtual))
    return found
