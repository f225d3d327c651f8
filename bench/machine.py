# SPDX-License-Identifier: Apache-2.0
"""The machine that is measured on: what it is, and who had its cores."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self


def _first_match(path: str, pattern: str) -> str:
    match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    return match[1].strip() if match else "unknown"


def description() -> dict[str, str]:
    """What the figures were measured on."""
    flags = set(_first_match("/proc/cpuinfo", r"^flags\s*:(.*)$").split())
    invariant = {"constant_tsc", "nonstop_tsc"} <= flags
    clocksource = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True)
    return {
        "cpu": _first_match("/proc/cpuinfo", r"^model name\s*:(.*)$"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _first_match("/proc/meminfo", r"^MemTotal:(.*)$"),
        "virtualised": "yes" if "hypervisor" in flags else "no",
        "kernel": platform.release(),
        "compiler": compiler.stdout.splitlines()[0],
        "tsc": f"{'' if invariant else 'not '}invariant, clock source {clocksource.read_text().strip()}",
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """What all cores together did since the start of the machine, in seconds."""

    all_s: float
    idle_s: float
    stolen_s: float

    @classmethod
    def now(cls) -> Self:
        """Read it, to a hundredth of a second."""
        line = Path("/proc/stat").read_text().splitlines()[0]
        # user nice system idle iowait irq softirq steal (proc(5)); those of guests are in the first two.
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in line.split()[1:9]]
        return cls(sum(ticks), ticks[3] + ticks[4], ticks[7])

    def __sub__(self, earlier: Self) -> Self:
        return type(self)(
            self.all_s - earlier.all_s,
            self.idle_s - earlier.idle_s,
            self.stolen_s - earlier.stolen_s,
        )


@contextlib.contextmanager
def stolen_told() -> Iterator[None]:
    """Tell how much of the cores' time others of this machine's host had meanwhile.

    What is measured beside much of it is an upper bound, whatever the load here.
    """
    before = CoreTimes.now()
    yield
    spent = CoreTimes.now() - before
    share = spent.stolen_s / max(spent.all_s, 0.01)
    print(f"  stolen: {share:.1%} of the cores' time, by others of this machine's host", flush=True)


def load() -> float:
    """How many processes ran or wanted to, on average over the last minute."""
    return os.getloadavg()[0]


def cpu_ns(pid: int) -> int:
    """CPU time of a process, all threads, dead ones too."""
    # The clock of a process, from its pid: clock_getcpuclockid(3).
    return time.clock_gettime_ns((~pid << 3) | 2)
