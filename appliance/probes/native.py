# SPDX-License-Identifier: Apache-2.0
"""The loader of the probes in C (native/src/probes.h), typed.

The only user of the extension ``backsight_probes_native``.
"""

from __future__ import annotations

import enum
import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Self

from backsight_probes_native import ffi, lib

_MESSAGE_BYTES = 512

# What the kernel has no room for says what: its own words are of files.
_FULL = {
    errno.ENOSPC: "as many processes are watched as there is room for (docs/probes.md)",
    errno.E2BIG: "the loader bcc has no room for more threads (docs/probes.md); core has",
}
_PROGRAMS_MAX = 64

BASE = "threads"
"""The object that all others need."""

NEVER = (1 << 64) - 1
"""As a threshold."""

RECORDS_WITHIN_S = 0.06
"""Until a record of a probe has been read: LOOK_EVERY_MS of records.c, and a little more."""


class Loader(enum.Enum):
    """See ``enum bsp_loader`` in native/src/probes.h."""

    CORE = lib.BSP_CORE
    BCC = lib.BSP_BCC

    @property
    def key(self) -> str:
        """As the configuration has it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A client of the node that is to be watched, by the context in which it shows itself."""

    client: int
    pidfd: int
    context: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one kind of event, since the start: see ``struct probes_counts`` in bpf/interface.h."""

    recorded: int
    record_lost: int
    fired: int
    coalesced: int
    limited: int
    queue_full: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What a BPF program has cost. ``run_ns`` is estimated by the runs that were timed."""

    runs: int
    run_ns: int
    recursion_misses: int
    verified_instructions: int
    map_errors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Program:
    """A BPF program that is loaded, of bpf/<object>.bpf.c."""

    object: str
    name: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the kernel's: see ``struct bsp_memory`` in native/src/probes.h."""

    programs_bytes: int
    maps_bytes: int
    contexts_bytes: int


@dataclass(frozen=True, slots=True)
class Written:
    """Into the pool; or ``refused`` there, since nobody records that trace or there is no node."""

    records: int
    breadcrumbs: int
    refused: int


class NativeProbes:
    """The maps of all probes, and while it is entered the thread that reads what they saw."""

    def __init__(self, loader: Loader, code: bytes) -> None:
        """OSError says why the kernel takes no probes of ours. ``code``: of BASE (see ``attach``)."""
        made = ffi.new("struct bsp **")
        message = ffi.new("char[]", _MESSAGE_BYTES)
        _check(
            lib.bsp_new(
                made, loader.value, ffi.from_buffer(code), len(code), message, _MESSAGE_BYTES
            ),
            message,
        )
        self._probes = made[0]
        self._thread = threading.Thread(target=self._run, name="records")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lib.bsp_stop(self._probes)
        self._thread.join()
        self.close()

    def close(self) -> None:
        """Take all of it out of the kernel."""
        lib.bsp_free(self._probes)
        self._probes = None

    def _run(self) -> None:
        _check(lib.bsp_run(self._probes))

    def attach(self, name: str, code: bytes) -> None:
        """Load and attach the programs of bpf/<name>.bpf.c; OSError says what the kernel minds.

        ``code``: what bcc made of it (``compiler.py``); empty for the loader ``core``.
        """
        message = ffi.new("char[]", _MESSAGE_BYTES)
        _check(
            lib.bsp_attach(
                self._probes,
                name.encode(),
                ffi.from_buffer(code),
                len(code),
                message,
                _MESSAGE_BYTES,
            ),
            message,
        )

    def detach(self, name: str) -> None:
        """Take them away again."""
        _check(lib.bsp_detach(self._probes, name.encode()))

    @property
    def context_bytes(self) -> int:
        """Of a context segment."""
        return int(lib.bsp_context_bytes())

    def make_context(self) -> int:
        """Make a context segment: an fd that the caller closes."""
        return _check(lib.bsp_context())

    def register(self, newcomers: Sequence[Newcomer]) -> list[int | OSError]:
        """Have clients of the node be watched, all at once, which takes hardly longer than one.

        Of each its number here, or why not; ESRCH: it is gone. The caller closes the fds.
        """
        raw = ffi.new("struct bsp_newcomer[]", [(*astuple(one), 0) for one in newcomers])
        lib.bsp_register(self._probes, raw, len(newcomers))
        return [int(one.number) if one.number >= 0 else _unregistered(-one.number) for one in raw]

    def unregister(self, numbers: Sequence[int]) -> None:
        """Watch them no more; many at once take hardly longer than one."""
        _check(lib.bsp_unregister(self._probes, numbers, len(numbers)))

    def set_kind(
        self,
        kind: int,
        trigger: str,
        fire_ns: int,
        record_ns: int,
        interval_ns: int,
        burst_ns: int,
    ) -> None:
        """Set from when on an event of a kind fires and is recorded, and how often it may fire."""
        _check(
            lib.bsp_set_kind(
                self._probes, kind, trigger.encode(), fire_ns, record_ns, interval_ns, burst_ns
            )
        )

    def set_coalescing(self, within_ns: int) -> None:
        """A trace fires once for a kind within such a time."""
        lib.bsp_set_coalescing(self._probes, within_ns)

    def set_bypass(self, bypass: bool) -> None:
        """Have all programs do nothing, or go on."""
        lib.bsp_set_bypass(self._probes, bypass)

    def set_uses(self, *, uses: bool, breadcrumbs: bool) -> None:
        """Know who uses connections (``users``), or not; and have their peers be breadcrumbs."""
        lib.bsp_set_uses(self._probes, uses, breadcrumbs)

    def set_bell(self, eventfd: int | None) -> None:
        """Ring there when a trigger was fired; None: nowhere. The caller closes it."""
        _check(lib.bsp_set_bell(self._probes, -1 if eventfd is None else eventfd))

    def users(
        self, namespace: int, device: int, port: int, within_ns: int, traces_max: int
    ) -> list[str]:
        """Traces in hex that used a device, or a port, the last one first; 0: any."""
        ids = ffi.new("uint64_t[]", 2 * traces_max)
        found = lib.bsp_get_users(
            self._probes, namespace & 0xFFFFFFFF, device, port, within_ns, ids, traces_max
        )
        return [f"{ids[2 * i]:016x}{ids[2 * i + 1]:016x}" for i in range(found)]

    def counts(self, kind: int) -> Counts:
        """What came of the events of a kind."""
        raw = ffi.new("struct bsp_counts *")
        _check(lib.bsp_get_counts(self._probes, kind, raw))
        return Counts(
            *(int(getattr(raw, name)) for name, _ in ffi.typeof("struct bsp_counts").fields)
        )

    def programs(self) -> list[Program]:
        """Those that are loaded."""
        raw = ffi.new("struct bsp_program[]", _PROGRAMS_MAX)
        count = _check(lib.bsp_get_programs(self._probes, raw, _PROGRAMS_MAX))
        return [
            Program(
                ffi.string(one.object).decode(),
                ffi.string(one.name).decode(),
                Cost(
                    one.runs,
                    one.run_ns,
                    one.recursion_misses,
                    one.verified_instructions,
                    one.map_errors,
                    one.bytes,
                ),
            )
            for one in raw[0:count]
        ]

    def written(self) -> Written:
        """What became of what probes saw."""
        raw = ffi.new("struct bsp_written *")
        lib.bsp_get_written(self._probes, raw)
        return Written(int(raw.records), int(raw.breadcrumbs), int(raw.refused))

    def memory(self) -> Memory:
        """What all of it takes of the kernel's memory."""
        raw = ffi.new("struct bsp_memory *")
        lib.bsp_get_memory(self._probes, raw)
        return Memory(int(raw.programs_bytes), int(raw.maps_bytes), int(raw.contexts_bytes))


def _unregistered(number: int) -> OSError:
    return OSError(number, _FULL.get(number) or os.strerror(number))


def layout() -> bytes:
    """How structures of the kernel that runs are laid out, for bcc; OSError: why that is not known."""
    text = ffi.new("char **")
    message = ffi.new("char[]", _MESSAGE_BYTES)
    _check(lib.bsp_layout(text, message, _MESSAGE_BYTES), message)
    try:
        return bytes(ffi.string(text[0]))
    finally:
        lib.bsp_layout_free(text[0])


def source(name: str) -> bytes:
    """bpf/<name>.bpf.c as bcc is to compile it, after the layout."""
    return bytes(ffi.string(lib.bsp_source(name.encode())))


def _check(result: int, message: object = None) -> int:
    if result < 0:
        said = ffi.string(message).decode(errors="replace") if message is not None else ""
        raise OSError(-result, said or os.strerror(-result))
    return int(result)
