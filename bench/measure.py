# SPDX-License-Identifier: Apache-2.0
"""The measurements, one function a metric. docs/benchmarks.md says what each means."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.collection import Collection, chain
from bench.report import Param, Result, load, rounded
from testbed.daemons import Cores, bound
from testbed.topology import Node

_RECORD_HEADER_BYTES = 16
_BYTES = (8, 32, 128, 512, 2048)

# "sustained without loss" (DESIGN.md, part 8) allows for this much.
_LOST_SHARE_MAX = 0.01

# A burst that a thread's ring, and the segments that wait for it, have room for.
_BURST_TRACES = 600

# Halvings of the interval in which the highest rate is sought: to a hundredth.
_SEARCH_STEPS = 7


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done. The results of a quick run mean nothing but that everything works."""

    pool_bytes: int
    repetitions: int
    written_bytes: int  # a repetition of what is counted in bytes
    operations: int  # a repetition of what is not
    triggers: int
    idle_s: float
    collections: int
    chains: tuple[int, ...]
    search_steps: int

    @classmethod
    def full(cls) -> Scale:
        """About ten minutes. The pool is as large as published benchmarks of such systems have it."""
        return cls(1 << 30, 5, 2 << 30, 10_000_000, 200, 10.0, 20, (2, 10), _SEARCH_STEPS)

    @classmethod
    def quick(cls) -> Scale:
        """Seconds."""
        return cls(16 << 20, 2, 4 << 20, 20_000, 5, 0.2, 2, (2,), 1)


@dataclass(frozen=True, slots=True)
class Repetition:
    """A line of writer.c."""

    cpu_ns: float
    elapsed_ns: float
    operations: int
    runs: int
    runs_lost: int
    records_lost: int


class Bench:
    """Runs writer.c beside a node daemon."""

    def __init__(self, writer: Path, node: Node, cores: Cores, scale: Scale) -> None:
        self._writer = writer
        self._node = node
        self.cores = cores
        self.scale = scale

    @contextlib.contextmanager
    def start(self, *arguments: object, pinned: bool = True) -> Iterator[subprocess.Popen[str]]:
        """Start the writer, on its own core or on any."""
        command = [str(self._writer), *map(str, arguments)]
        with subprocess.Popen(
            bound(command, self.cores.writer if pinned else None),
            env={**os.environ, **self._node.client_environment("bench")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise

    def lines(self, *arguments: object, pinned: bool = True) -> list[str]:
        """All that the writer prints."""
        with self.start(*arguments, pinned=pinned) as process:
            output, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{process.args!r} failed; its reason stands above")
        return output.splitlines()

    def repeat(
        self, operation: str, argument: object, threads: int, operations: int, *more: object
    ) -> list[Repetition]:
        """Repeat an operation in so many threads. The first repetition warms up, and is dropped."""
        scale = self.scale
        lines = self.lines(
            operation, argument, *more, threads, operations, scale.repetitions, scale.pool_bytes,
            pinned=threads == 1,
        )  # fmt: skip
        return [Repetition(**json.loads(line)) for line in lines[1:]]

    def node_cpu_ns(self) -> int:
        """CPU time of the node daemon, all threads, dead ones too."""
        # The clock of a process, from its pid: clock_getcpuclockid(3).
        return time.clock_gettime_ns((~self._node.daemon_pid() << 3) | 2)


def _lost_share(repetitions: Sequence[Repetition], field: str) -> float:
    lost = sum(getattr(one, field) for one in repetitions)
    return rounded(lost / sum(one.operations for one in repetitions))


def _result(metric: str, repetitions: Sequence[Repetition], params: Mapping[str, Param]) -> Result:
    elapsed_ns = rounded(statistics.median(one.elapsed_ns for one in repetitions))
    return Result.of(
        metric,
        "ns",
        [one.cpu_ns for one in repetitions],
        {**params, "elapsed_ns": elapsed_ns, "load": rounded(load())},
    )


def _operations(bench: Bench, payload_bytes: int) -> int:
    return bench.scale.written_bytes // (_RECORD_HEADER_BYTES + payload_bytes)


def tracepoints(bench: Bench) -> Iterator[Result]:
    """A record of each size, with and without a time stamp."""
    for threads in (1, 2):
        for timestamp in (False, True):
            for size in _BYTES:
                done = bench.repeat(
                    "tracepoint", size, threads, _operations(bench, size), int(timestamp)
                )
                yield _result(
                    "tracepoint_ns",
                    done,
                    {
                        "bytes": size,
                        "threads": threads,
                        "timestamp": timestamp,
                        "pool_bytes": bench.scale.pool_bytes,
                        "lost_share": _lost_share(done, "records_lost"),
                    },
                )


def copies(bench: Bench) -> Iterator[Result]:
    """The same bytes to the same places in memory of the same kind."""
    for threads in (1, 2):
        for size in _BYTES:
            done = bench.repeat("memcpy", size, threads, _operations(bench, size))
            yield _result(
                "memcpy_ns",
                done,
                {"bytes": size, "threads": threads, "pool_bytes": bench.scale.pool_bytes},
            )


def begin_end(bench: Bench) -> Iterator[Result]:
    """Begin and end, with no record between them or a small one."""
    for records in (0, 1):
        for threads in (1, 2, 4, 8):
            done = bench.repeat("begin_end", records, threads, bench.scale.operations // threads)
            yield _result(
                "begin_end_ns",
                done,
                {
                    "records": records,
                    "threads": threads,
                    "null_begins": sum(one.runs_lost for one in done),
                    "begins": sum(one.operations for one in done),
                },
            )


def traces(bench: Bench) -> Iterator[Result]:
    """Begin, 100 bytes, end: as fast as it goes, and as fast as nothing is lost."""
    for threads in (1, 2):

        def at(rate_per_s: int, threads: int = threads) -> tuple[list[Repetition], float, float]:
            # A paced repetition takes a second, whatever the pace.
            operations = min(bench.scale.operations, rate_per_s or bench.scale.operations)
            before_ns = bench.node_cpu_ns()
            done = bench.repeat("trace", rate_per_s, threads, operations // threads)
            # Of the repetition that is dropped too.
            written = sum(one.runs for one in done) * (1 + 1 / len(done))
            node_ns = (bench.node_cpu_ns() - before_ns) / written
            return done, _lost_share(done, "runs_lost"), node_ns

        done, lost, node_ns = at(0)
        params: dict[str, Param] = {"threads": threads, "bytes": 100}
        yield _result("trace_ns", done, {**params, "paced": False, "lost_share": lost})

        high = threads * 1e9 / statistics.median(one.elapsed_ns for one in done)
        best = (done, lost, high, node_ns) if lost < _LOST_SHARE_MAX else None
        low = 0.0
        for _ in range(bench.scale.search_steps if best is None else 0):
            rate = (low + high) / 2
            done, lost, node_ns = at(int(rate))
            if lost < _LOST_SHARE_MAX:
                low, best = rate, (done, lost, rate, node_ns)
            else:
                high = rate
        if best is not None:
            done, lost, rate, node_ns = best
            # Between its traces the writer waits: what a trace takes is the pace.
            yield Result.of(
                "trace_ns",
                "ns",
                [one.elapsed_ns / threads for one in done],
                {
                    **params,
                    "paced": True,
                    "lost_share": lost,
                    "traces_per_s": rounded(rate),
                    "node_ns": rounded(node_ns),
                    "load": rounded(load()),
                },
            )


def bursts(bench: Bench) -> Iterator[Result]:
    """Begin, 100 bytes, end: as fast as it goes, in bursts that the node reads in between."""
    for threads in (1, 2):
        operations = bench.scale.operations // 10 // threads
        done = bench.repeat("burst", _BURST_TRACES, threads, operations)
        yield _result(
            "trace_burst_ns",
            done,
            {
                "threads": threads,
                "bytes": 100,
                "burst": _BURST_TRACES,
                "lost_share": _lost_share(done, "runs_lost"),
            },
        )


def interleaved(bench: Bench) -> Iterator[Result]:
    """Eight handles on one thread take turns, a record each."""
    for size in (32, 128):
        done = bench.repeat("interleaved", size, 1, bench.scale.operations)
        lost = _lost_share(done, "records_lost")
        yield _result(
            "interleaved_ns", done, {"bytes": size, "handles": 8, "threads": 1, "lost_share": lost}
        )


def _latencies(metric: str, lines: Sequence[str]) -> Result:
    samples = sorted(next(iter(json.loads(line).values())) / 1e6 for line in lines)
    p99 = samples[min(len(samples) - 1, len(samples) * 99 // 100)]
    params: dict[str, Param] = {"times": len(samples), "p99": rounded(p99)}
    return Result.of(metric, "ms", samples, {**params, "load": rounded(load())})


def pickup(bench: Bench) -> Iterator[Result]:
    """From bs_trigger() until a node that slept has done with it; and the wake-up alone."""
    count = bench.scale.triggers
    yield _latencies("pickup_ms", bench.lines("pickup", count))
    yield _latencies("wake_ms", bench.lines("wake", bench.cores.daemons, count))


def idle(bench: Bench) -> Iterator[Result]:
    """CPU time of a node daemon to which one process is attached that does nothing."""
    scale = bench.scale
    with bench.start("idle") as process:
        assert process.stdout is not None
        process.stdout.readline()
        # What was triggered before is held and looked at for a while; wait until it is not.
        time.sleep(scale.idle_s)
        samples = []
        for _ in range(scale.repetitions):
            begun_ns, begun_cpu_ns = time.monotonic_ns(), bench.node_cpu_ns()
            time.sleep(scale.idle_s)
            spent_ns = bench.node_cpu_ns() - begun_cpu_ns
            samples.append(spent_ns / 1e6 / ((time.monotonic_ns() - begun_ns) / 1e9))
        assert process.stdin is not None
        process.stdin.close()
    params: dict[str, Param] = {"seconds": scale.idle_s, "clients": 1, "load": rounded(load())}
    yield Result.of("idle_cpu_ms_per_s", "ms/s", samples, params)


def collections(directory: Path, scale: Scale) -> Iterator[Result]:
    """From bs_trigger() until the coordinator holds the trace of all nodes."""
    for nodes in scale.chains:
        with chain(directory / f"chain-{nodes}", nodes) as services:
            # The first dials connections, imports modules and so on.
            services.collect(0)
            for where, fire_at in (("first", 0), ("last", nodes - 1)):
                done = [services.collect(fire_at) for _ in range(scale.collections)]
                yield from _collected(done, nodes, where)


def _collected(done: Sequence[Collection], nodes: int, where: str) -> Iterator[Result]:
    coherent = sum(one.verdict == "coherent" for one in done)
    for until in ("durable", "verdict"):
        params: dict[str, Param] = {
            "nodes": nodes,
            "fired_on": where,
            "until": until,
            "traces": len(done),
            "coherent": coherent,
            "load": rounded(load()),
        }
        samples = [getattr(one, f"{until}_ms") for one in done]
        yield Result.of("trigger_to_trace_ms", "ms", samples, params)
