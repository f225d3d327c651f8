# SPDX-License-Identifier: Apache-2.0
"""What a probe in the kernel saw of a trace (``native/src/abi/kernel_event.h``), in words.

Numbers come from shared memory that an application can write to. No input raises.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

_EVENT = struct.Struct("=QQIIHHIIIQ16s24s8x")
EVENT_BYTES = _EVENT.size

_NO_NUMBER = (1 << 32) - 1


class Kind(enum.IntEnum):
    """What happened to the trace."""

    RUN_QUEUE = 1
    CPU_THROTTLED = 2
    LOCK_WAIT = 3
    IO_WAIT = 4
    BLOCKED = 5


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """See ``struct bs_kernel_event``. Texts are printable; "" where nothing is known."""

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

    @classmethod
    def parse(cls, data: bytes) -> KernelEvent:
        """Read one; what is short or makes no sense is an event of kind 0."""
        if len(data) < _EVENT.size:
            data = bytes(_EVENT.size)
        time_ns, duration_ns, client, tid, kind, cpu, number, other, _, other_ns, comm, name = (
            _EVENT.unpack_from(data)
        )
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
            _text(comm),
            _text(name),
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
            case _:
                return f"kernel event {self.kind}"

    @property
    def sentence(self) -> str:
        """What happened, with its figures."""
        parts = [f"{self.title} for {_duration(self.duration_ns)}"]
        match self.kind:
            case Kind.RUN_QUEUE:
                parts.append(f"CPU {self.cpu}")
                if self.other_pid:
                    parts.append(f"{self._other} ran {_duration(self.other_ns)}")
            case Kind.LOCK_WAIT if self.other_pid:
                parts.append(f"released by {self._other}")
            case Kind.IO_WAIT if self.name:
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
        if self.other_pid:
            known["kernel.other.pid"] = self.other_pid
            known["kernel.other.command"] = self.other_comm
        return known

    @property
    def _other(self) -> str:
        return f"{self.other_comm or 'process'}[{self.other_pid}]"


def _text(raw: bytes) -> str:
    text = raw.partition(b"\0")[0].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def _duration(ns: int) -> str:
    """Three digits, and the unit that suits them."""
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns // size} {unit}"
    return f"{ns} ns"
