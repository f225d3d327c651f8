#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what tracing costs an OpenTelemetry application. docs/benchmarks.md says how and what.

bench/otel.py            all processors; one JSON object a line in build/bench/otel.jsonl
bench/otel.py --quick    a little of it, to see that it works
bench/otel.py --table    what was measured last, as Markdown
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_BUILD = _ROOT / "build"

# The Makefile's PYTHONPATH, for who calls this without make.
_GENERATED = ("protocol", "formats", "appliance", "native/python")
_PACKAGES = [str(_ROOT), *(str(_BUILD / folder) for folder in _GENERATED)]
sys.path[:0] = _PACKAGES

from bench import machine, otel_service, report  # noqa: E402 - found by the path above
from bench.otel_receiver import Receiver  # noqa: E402
from testbed.daemons import Cores, bound, node  # noqa: E402
from testbed.venvs import clean_environment, otel_python  # noqa: E402

_APPLICATION = Path(__file__).with_name("otel_application.py")
_POOL_BYTES = 256 << 20
_ROUNDS_TOLD = 10  # every so many


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done: rounds of all in turn, and how many requests of ten spans a turn.

    ``service_rounds``, ``service_s``: the same of services, and how long each is under load.
    """

    rounds: int
    requests: int
    service_rounds: int
    service_s: int


def _say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def _application(
    python: Path, cores: Cores, processor: str, environment: dict[str, str], *more: str
) -> Iterator[Callable[[int], float]]:
    """A process that makes as many requests as it is told, and gives its CPU time a span in us."""
    failed = f"the application with {processor} failed; its reason stands above"
    with subprocess.Popen(
        bound([str(python), str(_APPLICATION), processor, *more], cores.writer),
        env={**clean_environment(), "PYTHONPATH": str(_BUILD / "native/python"), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None

        def turn(requests: int) -> float:
            with contextlib.suppress(BrokenPipeError):
                print(requests, file=asked, flush=True)
            line = told.readline()
            if not line:
                with contextlib.suppress(BrokenPipeError):  # of what it did not take
                    asked.close()
                sys.exit(failed)
            done = json.loads(line)
            return float(done["cpu_ns"] / done["spans"] / 1000)

        yield turn
    if process.returncode:
        sys.exit(failed)


def _measure(scale: Scale, cores: Cores) -> Iterator[report.Result]:
    python = otel_python()
    rounds: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="backsight-bench-") as directory,
        node(Path(directory), cores, {"pool_bytes": _POOL_BYTES}) as daemon,
        Receiver() as receiver,
    ):
        environment = daemon.client_environment("bench")
        with contextlib.ExitStack() as stack:
            turns = {
                processor: stack.enter_context(
                    _application(python, cores, processor, environment,
                                 *([receiver.endpoint] if processor == "otlp" else []))
                )
                for processor in otel_service.PROCESSORS
            }  # fmt: skip
            for turn in turns.values():
                turn(scale.requests)  # for caches, and for what is made once
            while len(rounds) < scale.rounds:
                # So short that all meet the same neighbours.
                rounds.append(
                    {name: turns[name](scale.requests) for name in otel_service.order(len(rounds))}
                )
                if len(rounds) % _ROUNDS_TOLD == 0:
                    figures = ", ".join(f"{name} {us:.1f} us" for name, us in rounds[-1].items())
                    _say(f"  round {len(rounds)} of {scale.rounds}: {figures}")
        wanted = (scale.rounds + 1) * scale.requests * 10
        if receiver.spans != wanted:
            sys.exit(f"the receiver got {receiver.spans} of {wanted} spans; the rest cost less")
    # Within each round, since a core that is slower for a while is so for all three.
    shares = [(each["backsight"] - each["noop"]) / (each["otlp"] - each["noop"]) for each in rounds]
    for processor in otel_service.PROCESSORS:
        params: dict[str, report.Param] = {
            "processor": processor,
            "attributes": 8,
            "events": 1,
            "spans": scale.requests * 10,
            "load": report.rounded(machine.load()),
        }
        if processor == "backsight":
            params["of_what_otlp_adds"] = report.rounded(statistics.median(shares))
        us = [each[processor] for each in rounds]
        yield report.Result.of("cpu_us_per_span", "us", us, params)


def _measure_service(scale: Scale, cores: Cores) -> Iterator[report.Result]:
    """Requests a second and latencies of one of the shop's services."""
    units = {
        "requests_per_s": "1/s",
        "cpu_ms_per_request": "ms",
        "p50_ms": "ms",
        "p99_ms": "ms",
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in otel_service.PROCESSORS}
    for run in otel_service.samples(cores, scale.service_s, scale.service_rounds):
        runs[run["processor"]].append(run)
        figures = ", ".join(f"{run[name]:.4g} {unit}" for name, unit in units.items())
        _say(f"  service, {run['processor']}: {figures}")
    for name, unit in units.items():
        noop = [run[name] for run in runs["noop"]]
        for processor in otel_service.PROCESSORS:
            samples = [run[name] for run in runs[processor]]
            # Within each round, as above.
            of_noop = [value / base for value, base in zip(samples, noop, strict=True)]
            yield report.Result.of(
                f"service_{name}",
                unit,
                samples,
                {
                    "processor": processor,
                    "connections": otel_service.CONNECTIONS,
                    "seconds": scale.service_s,
                    "of_noop": report.rounded(statistics.median(of_noop)),
                    "load": report.rounded(machine.load()),
                },
            )


def main() -> int:
    """Do as the command line says."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the figures mean nothing then")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table")
    parser.add_argument("--output", type=Path, default=_BUILD / "bench/otel.jsonl")
    options = parser.parse_args()

    if options.table:
        if not options.output.exists():
            sys.exit(f"{options.output} is missing; measure first: make bench-otel")
        print(report.table(report.read(options.output)), end="")
        return 0

    if os.geteuid():
        sys.exit("the databases of the shop's service need root: sudo make bench-otel")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the daemons are taken down
    os.environ["PYTHONPATH"] = os.pathsep.join(_PACKAGES)
    cores = Cores.choose()
    scale = Scale(1, 20, 1, 1) if options.quick else Scale(60, 200, 6, 5)
    for name, value in machine.description().items():
        _say(f"{name:12} {value}")
    _say(f"{'pinned':12} the application to core {cores.writer}, daemons to core {cores.daemons}")
    _say(f"{'scale':12} {scale}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as lines, machine.stolen_told():
        for result in itertools.chain(_measure(scale, cores), _measure_service(scale, cores)):
            lines.write(result.line() + "\n")
            params = " ".join(f"{name}={value}" for name, value in result.params.items())
            _say(
                f"  {result.metric} {params}: {result.min:g} {result.value:g} {result.max:g} {result.unit}"
            )
    _say(f"\nwritten to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
