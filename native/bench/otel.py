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
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_BUILD = _ROOT / "build"

# The Makefile's PYTHONPATH, for who calls this without make.
_PACKAGES = [str(_ROOT), str(_BUILD / "protocol"), str(_BUILD / "native/python")]
sys.path[:0] = _PACKAGES

import grpc  # noqa: E402 - found by the path above
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: E402
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from native.bench import report  # noqa: E402
from native.bench.daemons import Cores, bound, node  # noqa: E402
from tests.venvs import clean_environment, otel_python  # noqa: E402

_APPLICATION = Path(__file__).with_name("otel_application.py")
_PROCESSORS = ("noop", "backsight", "otlp")
_POOL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done: requests of ten spans a repetition, repetitions, and rounds of all."""

    requests: int
    repetitions: int
    rounds: int


class Receiver:
    """An OTLP/gRPC receiver that takes everything, and counts it."""

    def __init__(self) -> None:
        self.spans = 0
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "opentelemetry.proto.collector.trace.v1.TraceService",
                    {
                        "Export": grpc.unary_unary_rpc_method_handler(
                            self._export,
                            ExportTraceServiceRequest.FromString,
                            ExportTraceServiceResponse.SerializeToString,
                        )
                    },
                ),
            )
        )
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Receiver:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def _export(
        self, request: ExportTraceServiceRequest, _: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.spans += sum(
            len(scope.spans)
            for resource in request.resource_spans
            for scope in resource.scope_spans
        )
        return ExportTraceServiceResponse()


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
    samples: dict[str, list[float]] = {name: [] for name in _PROCESSORS}
    with (
        tempfile.TemporaryDirectory(prefix="backsight-bench-") as directory,
        _surroundings(Path(directory), cores) as (environment, receiver),
    ):
        # In turn, so that all meet the same neighbours.
        for number in range(scale.rounds):
            for processor in _PROCESSORS:
                some = _run(python, cores, scale, processor, environment,
                            *([receiver.endpoint] if processor == "otlp" else []))  # fmt: skip
                samples[processor] += some
                _say(f"  round {number + 1} of {scale.rounds}, {processor}: {min(some):.1f} us")
        wanted = scale.rounds * (scale.repetitions + 1) * scale.requests * 10
        if receiver.spans != wanted:
            sys.exit(f"the receiver got {receiver.spans} of {wanted} spans; the rest cost less")
    noop, otlp = (report.Result.of("", "", samples[name], {}).value for name in ("noop", "otlp"))
    for processor in _PROCESSORS:
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

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the daemons are taken down
    os.environ["PYTHONPATH"] = os.pathsep.join(_PACKAGES)
    cores = Cores.choose()
    scale = Scale(20, 1, 1) if options.quick else Scale(1000, 3, 3)
    for name, value in report.machine().items():
        _say(f"{name:12} {value}")
    _say(f"{'pinned':12} the application to core {cores.writer}, daemons to core {cores.daemons}")
    _say(f"{'scale':12} {scale}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as lines:
        for result in _measure(scale, cores):
            lines.write(result.line() + "\n")
            params = " ".join(f"{name}={value}" for name, value in result.params.items())
            _say(f"  {result.metric} {params}: {result.min:g} {result.value:g} {result.max:g} us")
    _say(f"\nwritten to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
