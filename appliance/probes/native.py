# SPDX-License-Identifier: Apache-2.0
"""The loader of the probes in C (native/src/probes.h), typed.

The only user of the extension ``backsight_probes_native``.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from backsight_probes_native import ffi, lib

_MESSAGE_BYTES = 512
_PROGRAMS_MAX = 64

NEVER = (1 << 64) - 1
"""As a threshold."""


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


@dataclass(frozen=True, slots=True)
class Program:
    """A BPF program that is loaded, of bpf/<object>.bpf.c."""

    object: str
    name: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class Written:
    """Into the pool; or ``refused`` there, since nobody records that trace or there is no node."""

    records: int
    breadcrumbs: int
    refused: int


class NativeProbes:
    """The maps of all probes, and while it is entered the thread that reads what they saw."""

    def __init__(self) -> None:
        """OSError says why the kernel takes no probes of ours."""
        made = ffi.new("struct bsp **")
        message = ffi.new("char[]", _MESSAGE_BYTES)
        _check(lib.bsp_new(made, message, _MESSAGE_BYTES), message)
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

    def attach(self, name: str) -> None:
        """Load and attach the programs of bpf/<name>.bpf.c; OSError says what the kernel minds."""
        message = ffi.new("char[]", _MESSAGE_BYTES)
        _check(lib.bsp_attach(self._probes, name.encode(), message, _MESSAGE_BYTES), message)

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

    def register(self, client: int, pidfd: int, context: int) -> int:
        """Have a client of the node be watched; its number here. The caller closes the fds.

        OSError ESRCH: it is gone.
        """
        return _check(lib.bsp_register(self._probes, client, pidfd, context))

    def unregister(self, number: int) -> None:
        """Watch it no more."""
        _check(lib.bsp_unregister(self._probes, number))

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

    def set_breadcrumbs(self, breadcrumbs: bool) -> None:
        """Have peers to which a trace writes be breadcrumbs of it, or not."""
        lib.bsp_set_breadcrumbs(self._probes, breadcrumbs)

    def set_bell(self, eventfd: int | None) -> None:
        """Ring there when a trigger was fired; None: nowhere. The caller closes it."""
        _check(lib.bsp_set_bell(self._probes, -1 if eventfd is None else eventfd))

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
                Cost(one.runs, one.run_ns, one.recursion_misses, one.verified_instructions),
            )
            for one in raw[0:count]
        ]

    def written(self) -> Written:
        """What became of what probes saw."""
        raw = ffi.new("struct bsp_written *")
        lib.bsp_get_written(self._probes, raw)
        return Written(int(raw.records), int(raw.breadcrumbs), int(raw.refused))


def _check(result: int, message: object = None) -> int:
    if result < 0:
        said = ffi.string(message).decode(errors="replace") if message is not None else ""
        raise OSError(-result, said or os.strerror(-result))
    return int(result)
