# SPDX-License-Identifier: Apache-2.0
"""The machine's counters, by netlink and procfs; nothing of it needs a privilege.

What cannot be read, since this kernel or container has it not, is left out of the reading.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from appliance.core.machine import PRESSURES, Namespace, Queue, QueueKey, Reading
from appliance.namespaces import namespace_of
from appliance.netlink import HEADER, NETLINK_ROUTE, NETLINK_SOCK_DIAG, NetlinkSocket, by_pyroute2
from appliance.netlink_codecs import RTM_GETQDISC, SOCK_DIAG_BY_FAMILY, inet_diag_req, tcmsg

_QUEUE = by_pyroute2(tcmsg)

# uapi/linux/inet_diag.h: where struct inet_diag_msg has its port, and how long it is before its
# attributes; which of these is a socket's memory, and the bit that asks for it. sock_diag.h:
# which of its words are the packets that it dropped. tcp_states.h: a listening socket.
_PORT = struct.Struct(">H")
_PORT_AT, _ATTRIBUTES_AT = HEADER.size + 4, HEADER.size + 72
_SKMEMINFO = 7
_SKMEMINFO_EXTENSION = 1 << (_SKMEMINFO - 1)
_DROPS_AT = 4 * 8
_LISTEN_STATES = 1 << 10

# uapi/linux/netlink.h: struct nlattr (length, type), and a word of one.
_ATTRIBUTE = struct.Struct("=HH")
_WORD = struct.Struct("=I")

# Namespaces that are looked into: a file each of some 10 KiB, read in 50 us.
_NAMESPACES_MAX = 64


class Counters:
    """Reads them. Use as ``with``, from one thread at a time."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as opened:
            self._route = opened.enter_context(NetlinkSocket(NETLINK_ROUTE))
            self._diag = opened.enter_context(NetlinkSocket(NETLINK_SOCK_DIAG))
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

    def read(self, pids: Iterable[int]) -> Reading:
        """Of the machine, and of the network namespaces of these processes."""
        return Reading(
            time.monotonic_ns(),
            self._queues(),
            self._overflows(pids),
            self._listeners(),
            _stalled(),
        )

    def _queues(self) -> dict[QueueKey, Queue]:
        queues: dict[QueueKey, Queue] = {}
        with contextlib.suppress(OSError):
            for message in self._route.dump(RTM_GETQDISC, tcmsg(), _QUEUE):
                _add_queue(queues, message)
        return queues

    def _listeners(self) -> dict[int, int]:
        drops: dict[int, int] = {}
        for family in (socket.AF_INET, socket.AF_INET6):
            request = inet_diag_req()
            request["sdiag_family"] = family
            request["sdiag_protocol"] = socket.IPPROTO_TCP
            request["idiag_states"] = _LISTEN_STATES
            request["idiag_ext"] = _SKMEMINFO_EXTENSION
            with contextlib.suppress(OSError):
                for port, lost in self._diag.dump(SOCK_DIAG_BY_FAMILY, request, _listener):
                    # Several may listen there together (SO_REUSEPORT).
                    drops[port] = drops.get(port, 0) + lost
        return drops

    def _overflows(self, pids: Iterable[int]) -> dict[Namespace, int]:
        found: dict[Namespace, int] = {}
        processes: list[int | str] = ["self", *pids]
        for process in processes:
            if len(found) >= _NAMESPACES_MAX:
                break
            namespace = namespace_of(process)
            if namespace is None or namespace in found:
                continue
            overflows = _overflows_of(process)
            if overflows is not None:
                found[namespace] = overflows
        return found


def _listener(message: bytes) -> tuple[int, int] | None:
    """Its port, and how many connections it turned away.

    By hand: any user may have ten thousand, and pyroute2 takes 50 us for one.
    """
    offset = _ATTRIBUTES_AT
    while offset + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, offset)
        drops_at = offset + _ATTRIBUTE.size + _DROPS_AT
        if kind == _SKMEMINFO and drops_at + _WORD.size <= min(offset + length, len(message)):
            return _PORT.unpack_from(message, _PORT_AT)[0], _WORD.unpack_from(message, drops_at)[0]
        offset += max((length + 3) & ~3, _ATTRIBUTE.size)
    return None


def _overflows_of(process: int | str) -> int | None:
    """How often a listening queue was full, of the namespace in which that process is."""
    try:
        text = Path(f"/proc/{process}/net/netstat").read_text()
    except OSError:
        return None
    lines = [line.split() for line in text.splitlines() if line.startswith("TcpExt:")]
    if len(lines) != 2 or "ListenOverflows" not in lines[0]:
        return None
    return int(lines[1][lines[0].index("ListenOverflows")])


def _add_queue(queues: dict[QueueKey, Queue], message: Any) -> None:  # noqa: ANN401
    stats = message.get_attr("TCA_STATS2")
    figures = stats.get_attr("TCA_STATS_QUEUE") if stats is not None else None
    if figures is None:
        return
    device = message["index"]
    with contextlib.suppress(OSError):  # the device is gone since
        queues[device, message["parent"], message["handle"]] = Queue(
            socket.if_indextoname(device),
            message.get_attr("TCA_KIND") or "",
            figures["drops"],
            figures["qlen"],
        )


def _stalled() -> dict[str, int]:
    stalled: dict[str, int] = {}
    for name in PRESSURES:
        # Not there, or refused, where the kernel was started without (psi=0).
        with contextlib.suppress(OSError, ValueError):
            some = Path(f"/proc/pressure/{name}").read_text().splitlines()[0]
            stalled[name] = int(some.rpartition("total=")[2])
    return stalled
