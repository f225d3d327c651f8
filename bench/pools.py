# SPDX-License-Identifier: Apache-2.0
"""What a full pool holds, and what it takes to find a trace in it: runs pool_*.c."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bench.machine import load
from bench.report import Param, Result, rounded
from bench.scale import Scale
from testbed.daemons import bound

# What Hindsight, the system that came before, takes of its pool for each trace.
_BUFFER_BYTES = 32768

# The rate at which the pool lasts ten minutes, which it is for; and as fast as it goes, when
# more of it is in the writer's hand.
_FILL_S = 600

_AT_ONCE = (1, 100)

# The traces of which the pool is full that a restart finds.
_RESTART_TRACE_BYTES = 1024

# Of which the pool is full, and which are triggered.
_TRIGGERED_BYTES = 1024


def _run(program: Path, *arguments: object) -> list[dict[str, float]]:
    done = subprocess.run(
        bound([str(program), *map(str, arguments)], None),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def horizon(program: Path, scale: Scale) -> Iterator[Result]:
    """How many traces a full pool holds, and how much of it is what applications wrote."""
    pool_bytes = scale.horizon_pool_bytes
    for trace_bytes in scale.horizon_trace_bytes:
        held, held_at_full_speed = (
            [
                _run(program, pool_bytes, trace_bytes, scale.horizon_samples, fill_s)[0][
                    "traces_held"
                ]
                for _ in range(scale.horizon_times)
            ]
            for fill_s in (_FILL_S, 0)
        )
        params: dict[str, Param] = {
            "trace_bytes": trace_bytes,
            "pool_bytes": pool_bytes,
            "traces_held": rounded(statistics.median(held)),
            "load": rounded(load()),
        }
        buffers = pool_bytes / _BUFFER_BYTES
        yield Result.of("horizon_ratio", "ratio", [count / buffers for count in held], params)
        shares = [count * trace_bytes / pool_bytes for count in held]
        params = {
            **params,
            "at_full_speed": rounded(
                statistics.median(held_at_full_speed) * trace_bytes / pool_bytes
            ),
        }
        yield Result.of("payload_share", "ratio", shares, params)


def lookup(program: Path, scale: Scale) -> Iterator[Result]:
    """CPU time from the trigger until the traces are found in a full pool and copied out of it."""
    for pool_bytes in scale.lookup_pool_bytes:
        if _is_too_large(pool_bytes):
            continue
        for trace_bytes in scale.lookup_trace_bytes:
            for traces in _AT_ONCE:
                done = _run(program, pool_bytes, trace_bytes, traces, scale.lookup_times)
                params: dict[str, Param] = {
                    "pool_bytes": pool_bytes,
                    "trace_bytes": trace_bytes,
                    "traces": traces,
                    "times": len(done),
                    "elapsed_ms": _median_ms([one["elapsed_ns"] for one in done]),
                    "load": rounded(load()),
                }
                yield Result.of("lookup_ms", "ms", [one["cpu_ns"] / 1e6 for one in done], params)


def restart(program: Path, scale: Scale) -> Iterator[Result]:
    """CPU time from the start of a node with a full pool of before to the end of its first poll."""
    done = _run(program, scale.restart_pool_bytes, _RESTART_TRACE_BYTES, scale.restart_times)
    params: dict[str, Param] = {
        "pool_bytes": scale.restart_pool_bytes,
        "trace_bytes": _RESTART_TRACE_BYTES,
        "times": len(done),
        "adopt_ms": _median_ms([one["adopt_ns"] for one in done]),
        "first_poll_ms": _median_ms([one["first_poll_ns"] for one in done]),
        "load": rounded(load()),
    }
    samples = [(one["adopt_ns"] + one["first_poll_ns"]) / 1e6 for one in done]
    yield Result.of("restart_cpu_ms", "ms", samples, params)


def triggers(program: Path, scale: Scale) -> Iterator[Result]:
    """How much of a core the data plane needs for so many triggers a second, in full pools."""
    rate = scale.triggers_rate_per_s
    for pool_bytes in scale.triggers_pool_bytes:
        if _is_too_large(pool_bytes):
            continue
        (done,) = _run(program, pool_bytes, _TRIGGERED_BYTES, rate, scale.triggers_s)
        params: dict[str, Param] = {
            "pool_bytes": pool_bytes,
            "trace_bytes": _TRIGGERED_BYTES,
            "rate_per_s": rate,
            "triggers": int(done["triggers"]),
            "passes": int(done["passes"]),
            "found_after_ms": rounded(done["found_after_ns"] / 1e6),
            "found_after_most_ms": rounded(done["found_after_most_ns"] / 1e6),
            "load": rounded(load()),
        }
        yield Result.of("trigger_cpu_share", "ratio", [done["cpu_ns"] / done["elapsed_ns"]], params)


def _is_too_large(pool_bytes: int) -> bool:
    """A pool that is swapped out says nothing."""
    if pool_bytes <= _memory_available_bytes() * 3 // 4:
        return False
    print(f"  left out: a pool of {pool_bytes >> 20} MiB; too little memory is free")
    return True


def _median_ms(samples_ns: list[float]) -> float:
    return rounded(statistics.median(samples_ns) / 1e6)


def _memory_available_bytes() -> int:
    match = re.search(
        r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE
    )
    assert match is not None
    return int(match[1]) << 10
