#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what tracing costs an OpenTelemetry application. docs/benchmarks.md says how and what.

native/bench/otel.py            all processors; one JSON object a line in build/bench/otel.jsonl
native/bench/otel.py --quick    a little of it, to see that it works
native/bench/otel.py --table    what was measured last, as Markdown
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_BUILD = _ROOT / "build"

# The Makefile's PYTHONPATH, for who calls this without make.
_PACKAGES = [str(_ROOT), str(_BUILD / "protocol"), str(_BUILD / "native/python")]
sys.path[:0] = _PACKAGES

from native.bench import otel_service, report  # noqa: E402 - found by the path above
from native.bench.daemons import Cores, bound, node  # noqa: E402
from native.bench.otel_receiver import Receiver  # noqa: E402
from tests.venvs import clean_environment, otel_python  # noqa: E402

_APPLICATION = Path(__file__).with_name("otel_application.py")
_POOL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done: requests of ten spans a repetition, repetitions, and rounds of all.

    ``service_s``: how long a service is under load, each round.
    """

    requests: int
    repetitions: int
    rounds: int
    service_s: int


def _say(text: str) -> None:
    print(text, flush=True)


def _run(
    python: Path,
    cores: Cores,
    scale: Scale,
    processor: str,
    environment: dict[str, str],
    *more: str,
) -> list[float]:
    """CPU time a span in us, a repetition each."""
    done = subprocess.run(
        bound(
            [str(python), str(_APPLICATION), processor, str(scale.requests), str(scale.repetitions),
             *more],
            cores.writer,
        ),
        env={**clean_environment(), "PYTHONPATH": str(_BUILD / "native/python"), **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"the application with {processor} failed; its reason stands above")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [line["cpu_ns"] / line["spans"] / 1000 for line in lines]


@contextlib.contextmanager
def _surroundings(directory: Path, cores: Cores) -> Iterator[tuple[dict[str, str], Receiver]]:
    with node(directory, cores, {"pool_bytes": _POOL_BYTES}) as daemon, Receiver() as receiver:
        yield daemon.client_environment("bench"), receiver


def _measure(scale: Scale, cores: Cores) -> Iterator[report.Result]:
    python = otel_python()
    samples: dict[str, list[float]] = {name: [] for name in otel_service.PROCESSORS}
    with (
        tempfile.TemporaryDirectory(prefix="backsight-bench-") as directory,
        _surroundings(Path(directory), cores) as (environment, receiver),
    ):
        # In turn, so that all meet the same neighbours.
        for number in range(scale.rounds):
            for processor in otel_service.PROCESSORS:
                some = _run(python, cores, scale, processor, environment,
                            *([receiver.endpoint] if processor == "otlp" else []))  # fmt: skip
                samples[processor] += some
                _say(f"  round {number + 1} of {scale.rounds}, {processor}: {min(some):.1f} us")
        wanted = scale.rounds * (scale.repetitions + 1) * scale.requests * 10
        if receiver.spans != wanted:
            sys.exit(f"the receiver got {receiver.spans} of {wanted} spans; the rest cost less")
    noop, otlp = (report.Result.of("", "", samples[name], {}).value for name in ("noop", "otlp"))
    for processor in otel_service.PROCESSORS:
        params: dict[str, report.Param] = {
            "processor": processor,
            "attributes": 8,
            "events": 1,
            "spans": scale.requests * 10,
            "load": report.rounded(report.load()),
        }
        result = report.Result.of("cpu_us_per_span", "us", samples[processor], params)
        if processor == "backsight":
            added = report.rounded((result.value - noop) / (otlp - noop))
            params["of_what_otlp_adds"] = added
        yield result


def _measure_service(scale: Scale, cores: Cores) -> Iterator[report.Result]:
    """Requests a second and latencies of one of the shop's services."""
    units = {
        "requests_per_s": "1/s",
        "cpu_ms_per_request": "ms",
        "p50_ms": "ms",
        "p99_ms": "ms",
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in otel_service.PROCESSORS}
    for run in otel_service.samples(cores, scale.service_s, scale.rounds):
        runs[run["processor"]].append(run)
        figures = ", ".join(f"{run[name]:.4g} {unit}" for name, unit in units.items())
        _say(f"  service, {run['processor']}: {figures}")
    for name, unit in units.items():
        for processor in otel_service.PROCESSORS:
            yield report.Result.of(
                f"service_{name}",
                unit,
                [run[name] for run in runs[processor]],
                {
                    "processor": processor,
                    "connections": otel_service.CONNECTIONS,
                    "seconds": scale.service_s,
                    "load": report.rounded(report.load()),
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
    scale = Scale(20, 1, 1, 1) if options.quick else Scale(1000, 3, 3, 10)
    for name, value in report.machine().items():
        _say(f"{name:12} {value}")
    _say(f"{'pinned':12} the application to core {cores.writer}, daemons to core {cores.daemons}")
    _say(f"{'scale':12} {scale}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as lines, report.stolen_told():
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
