# SPDX-License-Identifier: Apache-2.0
"""Two services in C that call each other over HTTP, traced and not, in turn (http_service.c).

Everything shares the cores: wrk, both services, node and coordinator, unpinned. As many
connections ask without a pause as keep all cores busy, so whatever tracing costs anybody
(the services, the node daemon, caches) is missing in what is answered. Traced
requests and plain ones are answered by the same processes; only the path differs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.machine import CoreTimes, cpu_ns, load
from bench.report import Param, Result, rounded
from bench.scale import Scale
from testbed.daemons import anywhere, bound, coordinator_on
from testbed.ports import free_port
from testbed.topology import Coordinator, Node

_SCRIPT = Path(__file__).with_name("http.lua")

# Of each service: one a core, so that none stands still while the other has work.
_THREADS = 2
CONNECTIONS = 16

# An event of http_service.c with its header, in the log.
EVENT_LOG_BYTES = 128

# What is recorded a hop, beside a span and hops.
RECORD_BYTES = (1024, 8192)

# How much a service does for a request, as items that it renders: a quarter of a millisecond of
# CPU time, which is little for a service that has 64 things to record; and next to nothing.
_ITEMS_SERVICE = 1000
_ITEMS_BARE = 2

_CONFIDENCE = 0.95
_SHOW_TIMEOUT_S = 30.0

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of load: what was answered, and the CPU time of who took part."""

    requests: int
    seconds: float
    cpu_ns: Mapping[str, int]
    cores: CoreTimes

    @property
    def per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def cpu_ns_per_request(self) -> float:
        """Of all who took part."""
        return sum(self.cpu_ns.values()) / self.requests


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the median lies, by order statistics: no assumption about the distribution."""

    low: float
    high: float
    confidence: float


def median_interval(samples: Sequence[float]) -> Interval:
    """The narrowest interval between two samples with 95 % confidence, or what all of them give."""
    ordered = sorted(samples)
    count = len(ordered)

    def confidence(rank: int) -> float:
        """That the median is between the rank-th sample from below and from above."""
        outside = sum(math.comb(count, k) for k in range(rank)) / (1 << count)
        return 1 - 2 * outside

    rank = max(
        (r for r in range(1, (count + 1) // 2 + 1) if confidence(r) >= _CONFIDENCE), default=1
    )
    return Interval(ordered[rank - 1], ordered[-rank], confidence(rank))


class Pair:
    """Both services beside a node and a coordinator; wrk drives the first."""

    def __init__(
        self, program: Path, directory: Path, node: Node, items: int, record_bytes: int
    ) -> None:
        self._program = program
        self._directory = directory
        self._node = node
        self._work = (items, record_bytes // EVENT_LOG_BYTES)
        self._stack = contextlib.ExitStack()
        self._pids: dict[str, int] = {"node": node.daemon_pid()}
        self.front_port = free_port()
        self.back_port = free_port()

    def __enter__(self) -> Pair:
        with contextlib.ExitStack() as stack:
            self._start(stack, "back", self.back_port)
            self._start(stack, "front", self.front_port, self.back_port)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack, name: str, port: int, *next_port: int) -> None:
        arguments = (port, _THREADS, *self._work, *next_port)
        process = subprocess.Popen(
            bound([str(self._program), *map(str, arguments)], None),
            env={**os.environ, **self._node.client_environment(name)},
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} did not start; its reason stands above")
        self._pids[name] = process.pid

    def watch(self, coordinator: Coordinator) -> None:
        """Count the coordinator's CPU time too."""
        self._pids["coordinator"] = coordinator.daemon_pid()

    def load(self, *, traced: bool, seconds: int) -> Window:
        """Ask without a pause. RuntimeError if a request fails."""
        cores, before = CoreTimes.now(), self._cpu_ns()
        with self.loading(traced=traced, seconds=seconds) as (process, output):
            said = output.read()
            # Its CPU time comes with its end.
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        after, cores = self._cpu_ns(), CoreTimes.now() - cores
        if process.returncode:
            raise RuntimeError("wrk failed; its reason stands above")
        done = json.loads(said.splitlines()[-1])
        if done["failed"]:
            raise RuntimeError(f"{done['failed']} of {done['requests']} requests failed")
        spent = {name: after[name] - before[name] for name in before}
        spent["wrk"] = round((usage.ru_utime + usage.ru_stime) * 1e9)
        return Window(done["requests"], done["duration_us"] / 1e6, spent, cores)

    @contextlib.contextmanager
    def loading(
        self, *, traced: bool, seconds: int
    ) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
        """Requests without a pause, from wrk."""
        path = "traced" if traced else "plain"
        with subprocess.Popen(
            bound(
                [
                    "wrk", "--threads", "1", "--connections", str(CONNECTIONS),
                    "--duration", f"{seconds}s", "--timeout", "10s", "--script", str(_SCRIPT),
                    f"http://127.0.0.1:{self.front_port}/{path}",
                ],
                None,
            ),
            stdout=subprocess.PIPE,
            text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                yield process, process.stdout
            except BaseException:
                process.kill()
                raise

    def _cpu_ns(self) -> dict[str, int]:
        return {name: cpu_ns(pid) for name, pid in self._pids.items()}

    def stats(self) -> list[Json]:
        """What both services wrote and lost."""
        return [json.loads(_get(port, "/stats")) for port in (self.front_port, self.back_port)]

    def collect(self) -> str:
        """Send a request that fires a trigger at its end. Its trace id."""
        trace = secrets.token_hex(16)
        _get(
            self.front_port,
            "/traced",
            {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01", "x-collect": "yes"},
        )
        return trace


def _get(port: int, path: str, headers: Mapping[str, str] | None = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=dict(headers or {}))
        return connection.getresponse().read()


def shown_when_judged(coordinator: Coordinator, trace: str) -> Json:
    """What ``backsightctl show`` says of a trace when its verdict is final."""
    deadline_s = time.monotonic() + _SHOW_TIMEOUT_S
    while True:
        # It is unknown until the node has told of it.
        with contextlib.suppress(subprocess.CalledProcessError):
            (shown,) = coordinator.ctl_json("show", trace)
            if shown["verdict"]["kind"] != "provisional":
                return shown
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"trace {trace} has no verdict after {_SHOW_TIMEOUT_S} s")


def missing(shown: Json, record_bytes: int) -> list[str]:
    """What a trace of both services lacks."""
    wanted = 2 * record_bytes // EVENT_LOG_BYTES
    kinds = sorted(hop["kind"] for hop in shown["hops"])
    found = {
        "verdict": (shown["verdict"]["kind"], "coherent"),
        "services": (sorted(span["service"] for span in shown["spans"]), ["back", "front"]),
        "unfinished spans": (sum(span["unfinished"] for span in shown["spans"]), 0),
        "records": (len(shown["records"]), wanted),
        "hops": (kinds, ["in", "out"]),
    }
    return [f"{name}: {was}, want {want}" for name, (was, want) in found.items() if was != want]


def _collected(pair: Pair, coordinator: Coordinator, record_bytes: int) -> str:
    """The verdict on one trace of the load. RuntimeError if it is called whole and is not."""
    with pair.loading(traced=True, seconds=1) as (_, output):
        trace = pair.collect()
        output.read()
    shown = shown_when_judged(coordinator, trace)
    verdict = str(shown["verdict"]["kind"])
    lacks = missing(shown, record_bytes)
    if lacks:
        print(f"  trace {trace} was not collected whole: {'; '.join(lacks)}")
    if lacks and verdict == "coherent":
        raise RuntimeError(f"trace {trace} is called {verdict}, but is not")
    return verdict


@contextlib.contextmanager
def running(
    program: Path, directory: Path, items: int, record_bytes: int, pool_bytes: int
) -> Iterator[tuple[Pair, Coordinator]]:
    """Daemons and services, on whatever core is free."""
    coordinator = coordinator_on(anywhere(), directory)
    config = {"metrics": {"listen": None}, "pool_bytes": pool_bytes}
    with (
        coordinator,
        Node(anywhere(), "bench", directory, coordinator, config) as node,
        Pair(program, directory, node, items, record_bytes) as pair,
    ):
        pair.watch(coordinator)
        yield pair, coordinator


def pairs(program: Path, scale: Scale) -> Iterator[Result]:
    """Two services that call each other over HTTP, traced and not: requests a second, and CPU time."""
    for items in (_ITEMS_SERVICE, _ITEMS_BARE):
        for record_bytes in RECORD_BYTES:
            pool_bytes = scale.http_pool_bytes
            with (
                tempfile.TemporaryDirectory(prefix="backsight-bench-") as name,
                running(program, Path(name), items, record_bytes, pool_bytes) as (
                    pair,
                    coordinator,
                ),
            ):
                _warm_up(pair, record_bytes, pool_bytes)
                windows = [_one_pair(pair, scale, number) for number in range(scale.http_pairs)]
                stats = pair.stats()
                collected = _collected(pair, coordinator, record_bytes)
            params: dict[str, Param] = {"record_bytes": record_bytes, "items": items}
            yield from _results(windows, stats, collected, params)


def _warm_up(pair: Pair, record_bytes: int, pool_bytes: int) -> None:
    """Go round the pool once: new pages are the first round's affair."""
    written_bytes = 0
    while written_bytes < pool_bytes:
        written_bytes += 2 * record_bytes * pair.load(traced=True, seconds=1).requests


def _one_pair(pair: Pair, scale: Scale, number: int) -> dict[bool, Window]:
    # The first of two has the machine as the pair before left it: in turn.
    order = (False, True) if number % 2 else (True, False)
    return {traced: pair.load(traced=traced, seconds=scale.http_window_s) for traced in order}


def _results(
    windows: Sequence[Mapping[bool, Window]],
    stats: Sequence[Json],
    collected: str,
    params: Mapping[str, Param],
) -> Iterator[Result]:
    every = [window for one in windows for window in one.values()]
    common: dict[str, Param] = {
        **params,
        "connections": CONNECTIONS,
        "window_s": rounded(every[0].seconds),
        "pairs": len(windows),
    }
    ratios = [one[True].per_s / one[False].per_s for one in windows]
    yield Result.of(
        "http_throughput_ratio",
        "ratio",
        ratios,
        {
            **common,
            **_interval_of(ratios),
            "plain_per_s": rounded(statistics.median(one[False].per_s for one in windows)),
            "traced_per_s": rounded(statistics.median(one[True].per_s for one in windows)),
            "runs": sum(one["runs"] for one in stats),
            "lost": sum(one["runs_lost"] for one in stats),
            "collected": collected,
            **_shares(every),
            "load": rounded(load()),
        },
    )
    # The same where nobody else has the cores, and steadier where somebody has.
    ratios = [one[False].cpu_ns_per_request / one[True].cpu_ns_per_request for one in windows]
    yield Result.of(
        "http_cpu_ratio",
        "ratio",
        ratios,
        {**common, **_interval_of(ratios), "load": rounded(load())},
    )
    for part in every[0].cpu_ns:
        for traced in (False, True):
            samples = [one[traced].cpu_ns[part] / one[traced].requests for one in windows]
            of_part: dict[str, Param] = {**params, "part": part, "traced": traced}
            yield Result.of("http_cpu_ns", "ns", samples, {**of_part, "load": rounded(load())})


def _interval_of(ratios: Sequence[float]) -> dict[str, Param]:
    interval = median_interval(ratios)
    return {
        "low": rounded(interval.low),
        "high": rounded(interval.high),
        "confidence": rounded(interval.confidence),
    }


def _shares(windows: Sequence[Window]) -> dict[str, Param]:
    """Who else had the cores meanwhile, and how much nobody had."""
    all_s = sum(window.cores.all_s for window in windows)
    idle_s = sum(window.cores.idle_s for window in windows)
    stolen_s = sum(window.cores.stolen_s for window in windows)
    ours_s = sum(sum(window.cpu_ns.values()) for window in windows) / 1e9
    return {
        "idle_share": rounded(idle_s / all_s),
        "stolen_share": rounded(stolen_s / all_s),
        # Of this machine, but of none that takes part; the kernel's own threads too.
        "others_share": rounded(max(0.0, all_s - idle_s - stolen_s - ours_s) / all_s),
    }
