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
from bench.machine import cpu_ns, load
from bench.report import Param, Result, rounded
from bench.scale import Scale
from bench.trees import Tree
from testbed.daemons import Cores, bound
from testbed.topology import Node

_RECORD_HEADER_BYTES = 12
_BYTES = (8, 32, 128, 512, 2048)
PERCENTAGES = (1, 10, 50, 100)
_TRACE_BYTES = 100

# "Without loss" allows for this much.
_LOST_SHARE_MAX = 0.01


@dataclass(frozen=True, slots=True)
class Repetition:
    """A line of writer.c, and the CPU time that the node daemon took meanwhile for an operation."""

    cpu_ns: float
    elapsed_ns: float
    operations: int
    runs: int
    runs_lost: int
    records_lost: int
    node_ns: float


class Bench:
    """Runs programs beside a node daemon."""

    def __init__(self, tree: Tree, node: Node, cores: Cores, scale: Scale) -> None:
        self._tree = tree
        self._node = node
        self.cores = cores
        self.scale = scale

    @contextlib.contextmanager
    def start(
        self, program: str, *arguments: object, pinned: bool = True
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a program, on the writer's core or on any."""
        command = [str(self._tree.program(program)), *map(str, arguments)]
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

    def lines(self, program: str, *arguments: object, pinned: bool = True) -> list[str]:
        """All that a program prints."""
        with self.start(program, *arguments, pinned=pinned) as process:
            output, _ = process.communicate()
        _check_ended(process)
        return output.splitlines()

    def repeat(
        self, operation: str, argument: object, threads: int, operations: int, *more: object
    ) -> list[Repetition]:
        """Repeat an operation in so many threads. The first repetition warms up, and is dropped."""
        scale = self.scale
        repetitions = []
        with self.start(
            "writer", operation, argument, *more, threads, operations, scale.repetitions, scale.pool_bytes,
            pinned=threads == 1,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            before_ns = 0
            for line in process.stdout:
                one, after_ns = json.loads(line), self.node_cpu_ns()
                node_ns = (after_ns - before_ns) / one["operations"]
                repetitions.append(Repetition(**one, node_ns=node_ns))
                before_ns = after_ns
        _check_ended(process)
        return repetitions[1:]

    @property
    def node_pid(self) -> int:
        """The daemon's."""
        return self._node.daemon_pid()

    def node_cpu_ns(self) -> int:
        """CPU time of the node daemon, all threads, dead ones too."""
        return cpu_ns(self.node_pid)


def _check_ended(process: subprocess.Popen[str]) -> None:
    if process.returncode:
        raise RuntimeError(f"{process.args!r} failed; its reason stands above")


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


def chosen(bench: Bench, percentage: float) -> Result:
    """Begin, a small record and end, where only that share of all traces is recorded."""
    done = bench.repeat("begin_end", 1, 1, bench.scale.operations)
    begins = sum(one.operations for one in done)
    return _result(
        "chosen_ns",
        done,
        {
            "percentage": percentage,
            "recorded_share": rounded(sum(one.runs + one.runs_lost for one in done) / begins),
            "null_begins": sum(one.runs_lost for one in done),
            "begins": begins,
        },
    )


def _node_ns(repetitions: Sequence[Repetition]) -> float:
    return rounded(statistics.median(one.node_ns for one in repetitions))


def _traces(bench: Bench, rate_per_s: int, threads: int) -> list[Repetition]:
    # A paced repetition takes a second, whatever the pace.
    operations = min(bench.scale.operations, rate_per_s or bench.scale.operations)
    return bench.repeat("trace", rate_per_s, threads, operations // threads)


def traces(bench: Bench) -> Iterator[Result]:
    """Begin, 100 bytes, end: as fast as it goes, and as fast as nothing is lost."""
    for threads in (1, 2):
        done = _traces(bench, 0, threads)
        lost = _lost_share(done, "runs_lost")
        params: dict[str, Param] = {"threads": threads, "bytes": _TRACE_BYTES}
        unpaced: dict[str, Param] = {"paced": False, "lost_share": lost, "node_ns": _node_ns(done)}
        yield _result("trace_ns", done, {**params, **unpaced})

        high = threads * 1e9 / statistics.median(one.elapsed_ns for one in done)
        best = (done, high) if lost < _LOST_SHARE_MAX else None
        low = 0.0
        for _ in range(bench.scale.search_steps if best is None else 0):
            rate = (low + high) / 2
            done = _traces(bench, int(rate), threads)
            if _lost_share(done, "runs_lost") < _LOST_SHARE_MAX:
                low, best = rate, (done, rate)
            else:
                high = rate
        if best is not None:
            done, rate = best
            # Between its traces the writer waits: what a trace takes is the pace.
            yield Result.of(
                "trace_ns",
                "ns",
                [one.elapsed_ns / threads for one in done],
                {
                    **params,
                    "paced": True,
                    "lost_share": _lost_share(done, "runs_lost"),
                    "traces_per_s": rounded(rate),
                    "node_ns": _node_ns(done),
                    "load": rounded(load()),
                },
            )


def sustained(bench: Bench) -> Iterator[Result]:
    """Begin, 100 bytes, end, for a minute without a pause: as fast as one thread can, and slower."""
    fast = statistics.median(one.elapsed_ns for one in _traces(bench, 0, 1))
    for rate_per_s in (0, *bench.scale.sustained_rates_per_s):
        operations = int(bench.scale.sustained_s * (rate_per_s or 1e9 / fast))
        # No repetition: only the one that else is dropped.
        before_ns = bench.node_cpu_ns()
        (line,) = bench.lines(
            "writer", "trace", rate_per_s, 1, operations, 0, bench.scale.pool_bytes
        )
        one = json.loads(line)
        yield Result.of(
            "sustained_ns",
            "ns",
            [one["elapsed_ns"]],
            {
                "rate_per_s": rate_per_s,
                "threads": 1,
                "bytes": _TRACE_BYTES,
                "traces": one["operations"],
                "lost": one["runs_lost"],
                "seconds": rounded(one["elapsed_ns"] * one["operations"] / 1e9),
                "traces_per_s": rounded(1e9 / one["elapsed_ns"]),
                "node_ns": rounded((bench.node_cpu_ns() - before_ns) / one["operations"]),
                "load": rounded(load()),
            },
        )


def node_cost(bench: Bench) -> Iterator[Result]:
    """CPU time of the node daemon for a trace of 100 bytes, by how many come in a second."""
    for rate_per_s in bench.scale.rates_per_s:
        done = _traces(bench, rate_per_s, 1)
        params: dict[str, Param] = {
            "rate_per_s": rate_per_s,
            "bytes": _TRACE_BYTES,
            "traces_per_s": rounded(1e9 / statistics.median(one.elapsed_ns for one in done)),
            "lost_share": _lost_share(done, "runs_lost"),
            "load": rounded(load()),
        }
        yield Result.of("node_ns", "ns", [one.node_ns for one in done], params)


def bursts(bench: Bench) -> Iterator[Result]:
    """Begin, 100 bytes, end: as fast as it goes, in bursts, between which the node comes to rest."""
    for burst, times in bench.scale.bursts:
        for threads in (1, 2):
            done = bench.repeat("burst", burst, threads, burst * times, bench.node_pid)
            params: dict[str, Param] = {
                "threads": threads,
                "bytes": _TRACE_BYTES,
                "burst": burst,
                "bursts": times * len(done),
                "lost": sum(one.runs_lost for one in done),
                "lost_share": _lost_share(done, "runs_lost"),
            }
            yield _result("trace_burst_ns", done, params)


_STARVED_LOOPS = 4
_STARVED_TRACE_BYTES = 4096
_BURSTS_PER_S = 10


def starved(bench: Bench) -> Iterator[Result]:
    """Traces of 4 KiB in bursts, while four processes keep all cores busy: what is lost."""
    scale = bench.scale
    for rate_per_s in scale.starved_rates_per_s:
        done = [
            json.loads(line)
            for line in bench.lines(
                "starved",
                rate_per_s,
                rate_per_s // _BURSTS_PER_S,
                scale.starved_window_ms,
                scale.starved_windows,
                _STARVED_LOOPS,
                pinned=False,
            )
        ]
        params: dict[str, Param] = {
            "rate_per_s": rate_per_s,
            "bytes": _STARVED_TRACE_BYTES,
            "loops": _STARVED_LOOPS,
            "windows": len(done),
            "window_s": scale.starved_window_ms / 1000,
            "traces": sum(one["traces"] for one in done),
            "lost": sum(one["lost"] for one in done),
            "load": rounded(load()),
        }
        shares = [one["lost"] / one["traces"] for one in done]
        yield Result.of("starved_lost_share", "ratio", shares, params)


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
    yield _latencies("pickup_ms", bench.lines("pickup", "trigger", count, bench.node_pid))
    yield _latencies("wake_ms", bench.lines("pickup", "wake", bench.cores.daemons, count))


def idle(bench: Bench) -> Iterator[Result]:
    """CPU time of a node daemon to which one process is attached that does nothing."""
    scale = bench.scale
    with bench.start("writer", "idle") as process:
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
