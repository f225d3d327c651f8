# SPDX-License-Identifier: Apache-2.0
"""Puts one service of the demo's shop under load, traced in each of the ways that are compared.

``python3 -m bench.otel_service PYTHON CORES SECONDS ROUNDS``, in a network namespace of its own
with its loopback up, as root: the databases have their usual ports, and a user of their own.
The service is ``orders`` (Flask under gunicorn; two calls to Redis and one by gRPC a request),
one process for each way on one core; the others, which are not traced, the daemons and the load
share the other. Prints a line of JSON a run: processor, requests, requests_per_s,
cpu_ms_per_request (of the service), p50_ms, p99_ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.otel_receiver import Receiver
from testbed.daemons import Cores, bound, node, this_machine
from testbed.processes import APPS, Postgresql, Process, Redis, Service
from testbed.topology import PYTHON, Node
from testbed.venvs import made_once

_HERE = Path(__file__).parent
_STOCK = "127.0.0.1:50051"

# As many as the service has threads: more would wait, and wrk would measure the queue.
CONNECTIONS = _THREADS = 8
_WARM_UP_REQUESTS = 200
_SPAN_BYTES_MIN = 100  # its start and its end, each with a header
_DRAIN_TIMEOUT_S = 30.0
_SPANS_PER_REQUEST = 4  # of the server, two of Redis, one of the call by gRPC

PROCESSORS = ("noop", "backsight", "otlp")
_ORDERS = {processor: f"127.0.0.1:{8001 + i}" for i, processor in enumerate(PROCESSORS)}


def order(number: int) -> tuple[str, ...]:
    """Of the processors in that round: in each another one is the first, as what one leaves is the next's."""
    first = number % len(PROCESSORS)
    return PROCESSORS[first:] + PROCESSORS[:first]


def service_python() -> Path:
    """The Python of the services, made if it is not there, which needs the network."""
    return made_once(
        "service",
        APPS / "shop-requirements.txt",
        _HERE / "otel-service-requirements.txt",
        client=True,
    )


def samples(cores: Cores, seconds: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Run this program in its namespace; what each of its lines says. SystemExit if it fails."""
    command = [
        PYTHON, "-m", __name__, str(service_python()), f"{cores.daemons},{cores.writer}",
        str(seconds), str(rounds),
    ]  # fmt: skip
    with subprocess.Popen(
        bound(
            ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command], None
        ),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        sys.exit("the shop's service could not be measured; the reason stands above")


def _tracing(processor: str, daemon: Node, receiver: Receiver) -> dict[str, str]:
    """What the environment says to ``opentelemetry-instrument``; else it is as out of the box."""
    published = {
        "OTEL_PYTHON_DISTRO": "distro",
        "OTEL_PYTHON_CONFIGURATOR": "configurator",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
    }
    match processor:
        case "backsight":
            return {
                "OTEL_PYTHON_DISTRO": "backsight",
                "OTEL_PYTHON_CONFIGURATOR": "backsight",
                **daemon.client_environment("orders"),
            }
        case "otlp":
            return {
                **published,
                "OTEL_TRACES_EXPORTER": "otlp_proto_grpc",
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receiver.endpoint}",
            }
        case _:
            # Spans are made and recorded, and nobody is told.
            return {**published, "OTEL_TRACES_EXPORTER": "none"}


def _await_health(address: str) -> None:
    subprocess.run(
        [PYTHON, "-m", "testbed.await_health", f"http://{address}/health",
         str(_WARM_UP_REQUESTS)],
        check=True,
    )  # fmt: skip


def _recorded_bytes(daemon: Node) -> int:
    recorded: int = daemon.control.status()["dataplane"]["payload_bytes"]
    return recorded


def _await_recorded(daemon: Node, wanted_bytes: int) -> None:
    """Until so much was recorded. The node reads the last of it when the process has ended."""
    deadline_s = time.monotonic() + _DRAIN_TIMEOUT_S
    while (recorded := _recorded_bytes(daemon)) < wanted_bytes:
        if time.monotonic() > deadline_s:
            sys.exit(
                f"otel_service: {recorded} bytes are in the pool, want {wanted_bytes} at least;"
                " what was not recorded cost less"
            )


def _cpu_s(pid: int) -> float:
    """CPU time of a process and of its children that live."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    # proc(5); after the name, which may hold anything, utime and stime are the 12th and 13th.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") + sum(_cpu_s(int(child)) for child in children)


def _load(address: str, cores: Cores, seconds: int) -> dict[str, int]:
    done = subprocess.run(
        bound(
            [
                "wrk", "--threads", "1", "--connections", str(CONNECTIONS),
                "--duration", f"{seconds}s", "--timeout", "20s",
                "--script", str(_HERE / "otel_service.lua"), f"http://{address}",
            ],
            cores.daemons,
        ),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )  # fmt: skip
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _service(
    processor: str, python: Path, directory: Path, cores: Cores, tracing: dict[str, str]
) -> Service:
    own = directory / processor
    own.mkdir()
    return Service(
        this_machine(cores.writer),
        "orders",
        python,
        [
            "gunicorn", "--bind", _ORDERS[processor], "--threads", str(_THREADS),
            "--keep-alive", "60", "--no-control-socket", "shop.orders:app",
        ],
        own,
        {
            **tracing,
            "PYTHONPATH": str(APPS),
            "REDIS_URL": Redis.URL,
            "STOCK_ADDRESS": _STOCK,
        },
    )  # fmt: skip


def _run(processor: str, service: Service, cores: Cores, seconds: int) -> dict[str, Any]:
    cpu_s = _cpu_s(service.process.pid)
    measured = _load(_ORDERS[processor], cores, seconds)
    cpu_s = _cpu_s(service.process.pid) - cpu_s
    if measured["failed"]:
        sys.exit(f"otel_service: {measured['failed']} requests failed:\n{service.last_words()}")
    return {
        "processor": processor,
        "requests": measured["requests"],
        "requests_per_s": measured["requests"] / (measured["duration_us"] / 1e6),
        "cpu_ms_per_request": cpu_s * 1e3 / measured["requests"],
        "p50_ms": measured["p50_us"] / 1e3,
        "p99_ms": measured["p99_us"] / 1e3,
    }


def _measure(
    python: Path, directory: Path, cores: Cores, seconds: int, rounds: int, daemon: Node
) -> None:
    spans = dict.fromkeys(PROCESSORS, 0)
    with Receiver() as receiver:
        before = _recorded_bytes(daemon)
        with contextlib.ExitStack() as stack:
            services = {
                processor: stack.enter_context(
                    _service(processor, python, directory, cores,
                             _tracing(processor, daemon, receiver))
                )
                for processor in PROCESSORS
            }  # fmt: skip
            for address in _ORDERS.values():
                _await_health(address)
            for number in range(rounds):
                # In turn, so that all meet the same neighbours; who has no load is idle.
                for processor in order(number):
                    run = _run(processor, services[processor], cores, seconds)
                    spans[processor] += _SPANS_PER_REQUEST * run["requests"]
                    print(json.dumps(run), flush=True)
        if receiver.spans < spans["otlp"]:
            sys.exit(
                f"otel_service: the receiver got {receiver.spans} of {spans['otlp']} spans; what"
                " was dropped cost less"
            )
        _await_recorded(daemon, before + spans["backsight"] * _SPAN_BYTES_MIN)


def main() -> None:
    """Do as the command line says."""
    python = Path(sys.argv[1])
    cores = Cores(*map(int, sys.argv[2].split(",")))
    seconds, rounds = map(int, sys.argv[3:])
    with tempfile.TemporaryDirectory(prefix="backsight-bench-") as name:
        directory = Path(name)
        directory.chmod(0o755)  # the databases run as another user
        others = this_machine(cores.daemons)
        stock = Process(
            others,
            "stock",
            [str(python), "-m", "shop.stock", _STOCK],
            directory,
            {
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(APPS),
                "DATABASE_URL": Postgresql.URL,
                "ACCESS_LOG": str(directory / "stock.access.jsonl"),
            },
        )
        with (
            Postgresql(others, directory),
            Redis(others, directory),
            stock,
            node(directory, cores, {}) as daemon,
        ):
            _measure(python, directory, cores, seconds, rounds, daemon)


if __name__ == "__main__":
    main()
