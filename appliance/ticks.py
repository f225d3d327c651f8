# SPDX-License-Identifier: Apache-2.0
"""What the ticks of records are: the CPU's counter where it is steady, else CLOCK_MONOTONIC."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from backsight_node_native import ffi, lib

# Two readings of the clocks are good to some 30 ns each; over 50 ms that makes
# less than 1 ppm, which is what a record 50 s away from the nearest pair of
# clock values is wrong by 50 us for.
_CALIBRATION_S = 0.05

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TickSource:
    """What the ticks of records are."""

    is_counter: bool
    per_s: int


def counter_is_steady() -> bool:
    """Whether the CPU's counter is the same on all CPUs and runs evenly, in every state."""
    machine = os.uname().machine
    if machine == "aarch64":
        # The architecture promises it. Where a chip is known to break the promise, the
        # kernel does not let programs read the counter but answers in its place.
        return True
    return machine == "x86_64" and _tsc_is_invariant()


def _tsc_is_invariant() -> bool:
    """Whether the kernel trusts the time-stamp counter."""
    sources = Path("/sys/devices/system/clocksource/clocksource0/available_clocksource")
    try:
        available = sources.read_text().split()
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line for line in cpu.splitlines() if line.startswith("flags")), "").split()
    # The watchdog takes a counter that it caught out of the list of sources.
    return "tsc" in available and {"constant_tsc", "nonstop_tsc", "rdtscp"} <= set(flags)


def choose_tick_source() -> TickSource:
    """The CPU's counter with its measured rate where it is steady, else CLOCK_MONOTONIC. Takes 50 ms.

    Measured, although arm64 has a register for it: what counts is the rate against
    CLOCK_MONOTONIC, which NTP steers, and firmware is known to fill in that register wrongly.
    """
    if not counter_is_steady():
        return TickSource(False, _NS_PER_S)
    ticks0, monotonic0, _ = read_clocks(True)
    time.sleep(_CALIBRATION_S)
    ticks1, monotonic1, _ = read_clocks(True)
    return TickSource(True, (ticks1 - ticks0) * _NS_PER_S // (monotonic1 - monotonic0))


def read_clocks(counter: bool) -> tuple[int, int, int]:
    """Ticks, CLOCK_MONOTONIC ns and Unix ns of one moment."""
    values = ffi.new("uint64_t[3]")
    lib.bsn_clock_read(counter, values, values + 1, values + 2)
    return values[0], values[1], values[2]
