# SPDX-License-Identifier: Apache-2.0
"""How often BPF programs ran and how long, as the kernel counts it (kernel.bpf_stats_enabled)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from testbed.descriptors import fdinfo

_RUN_TIME = 0  # BPF_STATS_RUN_TIME of linux/bpf.h


@dataclass(frozen=True, slots=True)
class RunCount:
    """Of one program."""

    runs: int
    run_ns: int

    @property
    def ns_a_run(self) -> float:
        return self.run_ns / self.runs

    def __sub__(self, earlier: RunCount) -> RunCount:
        return RunCount(self.runs - earlier.runs, self.run_ns - earlier.run_ns)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """The kernel counts meanwhile, and stops at the latest with this process: what it counts by is a descriptor."""
    libbpf = ctypes.CDLL("libbpf.so.1", use_errno=True)
    descriptor = libbpf.bpf_enable_stats(_RUN_TIME)
    if descriptor < 0:
        raise OSError(-descriptor, os.strerror(-descriptor), "BPF_ENABLE_STATS")
    try:
        yield
    finally:
        os.close(descriptor)


def run_counts(pid: int) -> Mapping[str, RunCount]:
    """By tracepoint: of each program that this process has attached to one."""
    hooks: dict[str, str] = {}
    counts: dict[str, RunCount] = {}
    for text in fdinfo(pid):
        told = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        if "tp_name" in told:
            hooks[told["tp_name"]] = told["prog_id"]
        elif "run_cnt" in told:
            counts[told["prog_id"]] = RunCount(int(told["run_cnt"]), int(told["run_time_ns"]))
    return {hook: counts[program] for hook, program in hooks.items()}
