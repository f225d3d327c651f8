# SPDX-License-Identifier: Apache-2.0
"""What a probe in the kernel saw of a trace (``native/src/abi/kernel_event.h``), in words.

Numbers come from shared memory that an application can write to. No input raises.
"""

from __future__ import annotations

import enum
import ipaddress
import signal
import struct
from dataclasses import dataclass

_EVENT = struct.Struct("=QQIIHHIIIQ16s24sQ")
EVENT_BYTES = _EVENT.size

_NO_NUMBER = (1 << 32) - 1


class Kind(enum.IntEnum):
    """What happened to the trace."""

    RUN_QUEUE = 1
    CPU_THROTTLED = 2
    LOCK_WAIT = 3
    IO_WAIT = 4
    BLOCKED = 5
    TCP_RETRANSMIT = 6
    TCP_SYN_RETRANSMIT = 7
    TCP_RESET_SENT = 8
    TCP_RESET_RECEIVED = 9
    TCP_ZERO_WINDOW = 10
    TCP_RTT = 11
    TCP_READ_DELAY = 12
    CRASH = 13
    PACKET_DROP = 14
    QDISC_DELAY = 15
    TCP_LOSS_PROBE = 16

    @property
    def is_tcp(self) -> bool:
        """Of a connection: there is a peer, and no other process."""
        return self.name.startswith("TCP_") or self in (Kind.PACKET_DROP, Kind.QDISC_DELAY)


class Confidence(enum.IntEnum):
    """How sure it is that it happened to that trace."""

    EXACT = 0
    SOCKET = 1


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """See ``struct bs_kernel_event``. Texts are printable; "" where nothing is known.

    ``peer``: ADDRESS:PORT of a connection. ``position`` of a TCP segment: bytes before it.
    ``device`` of a wait for a disk, and ``asked_bytes``.
    """

    time_ns: int
    duration_ns: int
    client: int
    tid: int
    kind: int
    cpu: int
    number: int | None
    other_pid: int
    other_ns: int
    other_comm: str
    name: str
    confidence: int = Confidence.EXACT
    peer: str = ""
    position: int = 0
    device: str = ""
    asked_bytes: int = 0

    @classmethod
    def parse(cls, data: bytes) -> KernelEvent:
        """Read one; what is short or makes no sense is an event of kind 0."""
        if len(data) < _EVENT.size:
            data = bytes(_EVENT.size)
        (
            time_ns, duration_ns, client, tid, kind, cpu, number, other, confidence, other_ns, raw,
            name, amount,
        ) = _EVENT.unpack_from(data)  # fmt: skip
        is_tcp = kind in set(Kind) and Kind(kind).is_tcp
        return cls(
            time_ns,
            duration_ns,
            client,
            tid,
            kind,
            cpu,
            None if number == _NO_NUMBER else number,
            other,
            other_ns,
            "" if is_tcp or kind == Kind.IO_WAIT else _text(raw),
            _text(name),
            confidence,
            _endpoint(raw, number) if is_tcp else "",
            amount if is_tcp else 0,
            _text(raw) if kind == Kind.IO_WAIT else "",
            amount if kind == Kind.IO_WAIT else 0,
        )

    @property
    def title(self) -> str:
        """What happened, in a few words."""
        match self.kind:
            case Kind.RUN_QUEUE:
                return "waited for a CPU"
            case Kind.CPU_THROTTLED:
                return "waited for its CPU quota"
            case Kind.LOCK_WAIT:
                return "waited for a lock"
            case Kind.IO_WAIT:
                return "waited for a disk"
            case Kind.BLOCKED:
                return f"blocked in {self.name or 'a system call'}"
            case Kind.TCP_RETRANSMIT:
                return "TCP segment sent again"
            case Kind.TCP_LOSS_PROBE:
                return "TCP segment sent again to see whether it was lost"
            case Kind.TCP_SYN_RETRANSMIT:
                return "TCP connection asked for again"
            case Kind.TCP_RESET_SENT:
                return "TCP connection broken off here"
            case Kind.TCP_RESET_RECEIVED:
                return "TCP connection broken off by the peer"
            case Kind.TCP_ZERO_WINDOW:
                return "TCP peer takes no more for now"
            case Kind.TCP_RTT:
                return "TCP round trip is long"
            case Kind.TCP_READ_DELAY:
                return "TCP data not read"
            case Kind.PACKET_DROP:
                return f"packet dropped: {self.name or 'for no reason'}"
            case Kind.QDISC_DELAY:
                return f"packet waited in the queue of {self.name or 'a device'}"
            case Kind.CRASH:
                return f"process ended by {_signal(self.number or 0)}"
            case _:
                return f"kernel event {self.kind}"

    @property
    def sentence(self) -> str:
        """What happened, with its figures."""
        if self.peer:
            took = f": {_duration(self.duration_ns)}" if self.duration_ns else ""
            unsure = ", by the last writer" if self.confidence == Confidence.SOCKET else ""
            return f"{self.title}{took}, peer {self.peer}{unsure}"
        if self.kind == Kind.CRASH:
            return f"{self.title}: {self.name}" if self.name else self.title
        parts = [f"{self.title} for {_duration(self.duration_ns)}"]
        match self.kind:
            case Kind.RUN_QUEUE:
                parts.append(f"CPU {self.cpu}")
                if self.other_pid:
                    parts.append(f"{self._other} ran {_duration(self.other_ns)}")
            case Kind.LOCK_WAIT if self.other_pid:
                parts.append(f"released by {self._other}")
            case Kind.IO_WAIT:
                if self.device:
                    parts.append(f"{self.device}, {self.asked_bytes} bytes")
                if self.name:
                    parts.append(f"in {self.name}")
        return ", ".join(parts)

    @property
    def attributes(self) -> dict[str, str | int]:
        """What is known of it, by OpenTelemetry's names where it has any."""
        known: dict[str, str | int] = {
            "kernel.event": Kind(self.kind).name.lower() if self.kind in set(Kind) else self.kind,
            "kernel.duration_ns": self.duration_ns,
            "kernel.what": self.sentence,
            "thread.id": self.tid,
            "cpu.logical_number": self.cpu,
        }
        if self.name:
            known["kernel.name"] = self.name
        if self.peer:
            known["network.peer.address"], _, port = self.peer.rpartition(":")
            known["network.peer.port"] = int(port)
            known["kernel.confidence"] = (
                "exact" if self.confidence == Confidence.EXACT else "socket"
            )
        if self.device:
            known["system.device"] = self.device
            known["kernel.bytes"] = self.asked_bytes & ((1 << 63) - 1)
        if self.position:
            known["kernel.tcp.position"] = self.position & ((1 << 63) - 1)
        if self.other_pid:
            known["kernel.other.pid"] = self.other_pid
            known["kernel.other.command"] = self.other_comm
            if self.other_ns:
                known["kernel.other.ran_ns"] = self.other_ns
        return known

    @property
    def _other(self) -> str:
        return f"{self.other_comm or 'process'}[{self.other_pid}]"


def _text(raw: bytes) -> str:
    text = raw.partition(b"\0")[0].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def _endpoint(raw: bytes, port: int) -> str:
    address = ipaddress.IPv6Address(raw)
    return f"{address.ipv4_mapped or address}:{port & 0xFFFF}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _duration(ns: int) -> str:
    """Three digits, and the unit that suits them."""
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns // size} {unit}"
    return f"{ns} ns"
