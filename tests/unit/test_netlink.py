# SPDX-License-Identifier: Apache-2.0
"""Sockets of netlink, beside an event loop that runs, on this machine's kernel."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable

import pytest

from appliance.counters import Counters
from appliance.links import Links
from appliance.netlink import NETLINK_ROUTE, NetlinkSocket, by_pyroute2
from appliance.netlink_codecs import RTM_GETLINK, RTM_NEWLINK, ifinfmsg
from runtime.threads import in_thread

LINK = by_pyroute2(ifinfmsg)


@pytest.mark.parametrize("before", ["", "import pyroute2\n"])
def test_of_pyroute2_only_the_codecs_are_loaded_and_others_have_it_whole(before: str) -> None:
    program = before + (
        "import sys, appliance.serve\n"
        "print('pyroute2.ndb.main' in sys.modules)\n"
        "import pyroute2\n"
        "with pyroute2.IPRoute() as route:\n"
        "    print(len(list(route.get_links())) > 0)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
    assert said.decode().split() == [str(bool(before)), "True"]


def test_a_dump_has_the_devices_of_this_namespace() -> None:
    with NetlinkSocket(NETLINK_ROUTE) as it:
        for _ in range(2):
            found = {
                m["index"]: m.get_attr("IFLA_IFNAME")
                for m in it.dump(RTM_GETLINK, ifinfmsg(), LINK)
            }
            assert found == dict(socket.if_nameindex())


def test_what_the_kernel_refuses_is_said() -> None:
    with NetlinkSocket(NETLINK_ROUTE) as it:
        # A type that no rtnetlink has.
        with pytest.raises(OSError) as refused:
            it.dump(0xFFFE, ifinfmsg(), LINK)
        assert refused.value.errno == errno.EOPNOTSUPP
        assert it.dump(RTM_GETLINK, ifinfmsg(), LINK)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Have every socket hear this instead of what the kernel says."""

    def answer(data: bytes) -> None:
        monkeypatch.setattr(socket.socket, "recv", lambda _self, _size: data)

    return answer


def message(kind: int, body: bytes, sequence: int = 1, flags: int = 0) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body


@pytest.mark.parametrize("data", [b"", b"\0" * 15, b"\0" * 64, b"\xff" * 64, message(16, b"\1")])
def test_what_makes_no_sense_is_left_out(answering: Callable[[bytes], None], data: bytes) -> None:
    with NetlinkSocket(NETLINK_ROUTE, groups=1) as it:
        answering(data)
        assert it.changes(LINK) == []


def test_a_dump_that_breaks_off_is_an_error(answering: Callable[[bytes], None]) -> None:
    with NetlinkSocket(NETLINK_ROUTE) as it:
        late = message(3, struct.pack("=i", -errno.EIO), sequence=0)
        answering(late + message(3, struct.pack("=i", -errno.ENOMEM)))
        with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
            it.dump(RTM_GETLINK, ifinfmsg(), LINK)


DUMP_INTR = 0x10


def test_a_dump_in_which_something_may_be_missing_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel says so of any part of it, and at the end."""
    said = [
        link("one", 1) + message(3, bytes(4), flags=DUMP_INTR),
        link("one", 1, flags=DUMP_INTR) + message(3, bytes(4)),
        link("one", 1) + link("two", 2) + message(3, bytes(4)),
    ]
    with NetlinkSocket(NETLINK_ROUTE) as it:
        made = itertools.count(1)
        monkeypatch.setattr(
            socket.socket, "recv", lambda _self, _size: numbered(said.pop(0), next(made))
        )
        assert [m["index"] for m in it.dump(RTM_GETLINK, ifinfmsg(), LINK)] == [1, 2]
        monkeypatch.setattr(
            socket.socket,
            "recv",
            lambda _self, _size: numbered(message(3, bytes(4), flags=DUMP_INTR), next(made)),
        )
        with pytest.raises(InterruptedError, match="changed during each try"):
            it.dump(RTM_GETLINK, ifinfmsg(), LINK)


def numbered(data: bytes, sequence: int) -> bytes:
    """As the answer to the request of that number."""
    messages = bytearray(data)
    at = 0
    while at < len(messages):
        struct.pack_into("=I", messages, at + 8, sequence)
        at += struct.unpack_from("=I", messages, at)[0] + 3 & ~3
    return bytes(messages)


def link(
    name: str,
    index: int,
    family: int = socket.AF_UNSPEC,
    flags: int = 0,
    **attributes: object,
) -> bytes:
    """What the kernel says of a device that is up."""
    made = ifinfmsg()
    made["family"] = family
    made["index"], made["flags"] = index, 0x1 | 0x10000  # IFF_UP, IFF_LOWER_UP
    made["attrs"] = [
        ["IFLA_IFNAME", name],
        *(["IFLA_" + key, it] for key, it in attributes.items()),
    ]
    made["header"]["type"], made["header"]["sequence_number"] = RTM_NEWLINK, 1
    made["header"]["flags"] = flags
    made.encode()
    return bytes(made.data)


def test_which_devices_are_virtual_and_which_say_nothing(
    answering: Callable[[bytes], None],
) -> None:
    """A cable's that is a port of a bridge has this description too, but no kind."""
    port = {"attrs": [["IFLA_INFO_SLAVE_KIND", "bridge"]]}
    veth = {"attrs": [["IFLA_INFO_KIND", "veth"]]}
    container = {"attrs": [["IFLA_INFO_KIND", "veth"], ["IFLA_INFO_SLAVE_KIND", "bridge"]]}
    switched = {"attrs": [["IFLA_INFO_KIND", "veth"], ["IFLA_INFO_SLAVE_KIND", "openvswitch"]]}
    vlan = {"attrs": [["IFLA_INFO_KIND", "vlan"], ["IFLA_INFO_SLAVE_KIND", "vrf"]]}
    bridge = {"attrs": [["IFLA_INFO_KIND", "bridge"]]}
    answering(
        link("eth0", 2)
        + link("eth1", 3, MASTER=9, LINKINFO=port)
        + link("veth4", 4, LINKINFO=veth)
        + link("veth5", 5, MASTER=9, LINKINFO=container)
        + link("veth6", 6, MASTER=9, LINKINFO=switched)
        + link("vlan7", 7, MASTER=9, LINKINFO=vlan)
        + link("bridge", 9, LINKINFO=bridge)
        # As the bridge tells of it.
        + link("veth5", 5, family=7, MASTER=9)
        + message(3, bytes(4))
    )
    with Links() as links:
        assert [(one.name, one.up, one.is_virtual) for one in links.all()] == [
            ("eth0", True, False),
            ("eth1", True, False),
            ("veth4", True, True),
            ("veth5", None, True),
            ("veth6", None, True),
            ("vlan7", True, True),
            ("bridge", None, True),
        ]


def test_who_lost_changes_forgets_those_that_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a device would go down, and up, that is up since."""
    kept: list[bytes | OSError] = [
        b"old",
        OSError(errno.ENOBUFS, "lost"),
        b"old",
        BlockingIOError(),
    ]
    recv = socket.socket.recv

    def first_those(self: socket.socket, size: int) -> bytes:
        if not kept:
            return recv(self, size)
        data = kept.pop(0)
        if isinstance(data, OSError):
            raise data
        return data

    with Links() as links:
        monkeypatch.setattr(socket.socket, "recv", first_those)
        devices = {link.device for link in links.all_anew()}
        assert kept == []
        assert devices <= dict(socket.if_nameindex()).keys()


def test_counters_are_read_in_any_thread_beside_an_event_loop() -> None:
    """pyroute2's own sockets of today refuse to be made where a loop runs."""

    async def read() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            Counters() as counters,
            Links() as links,
        ):
            for _ in range(3):
                reading = await in_thread(counters.read, [os.getpid()])
                assert reading.listeners[listener.getsockname()[1]] == 0
                assert {device for device, _, _ in reading.queues} <= dict(
                    socket.if_nameindex()
                ).keys()
            names = {link.name for link in links.all()}
            assert names <= {name for _, name in socket.if_nameindex()}
            assert links.changes() == []

    asyncio.run(read())
