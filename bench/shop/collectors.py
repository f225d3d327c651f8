# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry Collectors: built from Go's modules (collector/), configured, run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.shop.parameters import Parameters
from testbed.processes import Process
from testbed.topology import PYTHON, DaemonError, Host

_SOURCE = Path(__file__).with_name("collector")
_PROGRAM = Path(__file__).parents[2] / "build/bench/collector"

AGENT = "127.0.0.1:4316"
GATEWAY_PORT = 4317
"""Another one, so that what is sent to the gateway can be told from what is sent to agents."""
_METRICS = "http://127.0.0.1:8888/metrics"  # where a Collector tells them by default

_ACCEPTED = re.compile(r"^otelcol_receiver_accepted_spans(?:_total)?\{[^}]*\} (\S+)$", re.MULTILINE)


def build() -> Path:
    """The program, built if it is not. SystemExit says what is missing."""
    go = shutil.which("go")
    if go is None:
        raise SystemExit(
            "bench-shop: go is not installed; the Collector is built by Go 1.25 or later"
        )
    done = subprocess.run(
        [go, "build", "-trimpath", "-o", str(_PROGRAM), "."],
        cwd=_SOURCE,
        # One compiler at a time, since it takes long and others use the machine.
        env={**os.environ, "GOFLAGS": "-buildvcs=false -mod=readonly -p=1", "GOTOOLCHAIN": "local"},
        check=False,
    )
    if done.returncode:
        raise SystemExit("bench-shop: the Collector cannot be built; the reason stands above")
    return _PROGRAM


def agent_config(gateway: str) -> dict[str, Any]:
    """What a host's own Collector does: it sends all that it gets to the gateway."""
    return _config(AGENT, {}, gateway)


def gateway_config(listen: str, backend: str, parameters: Parameters) -> dict[str, Any]:
    """What keeps traces with errors, and slow ones."""
    tail_sampling = {
        "decision_wait": f"{parameters.decision_wait_s}s",
        "policies": [
            {
                "name": "errors",
                "type": "status_code",
                "status_code": {"status_codes": ["ERROR"]},
            },
            {
                "name": "slow",
                "type": "latency",
                "latency": {"threshold_ms": parameters.slow_ms},
            },
        ],
    }
    return _config(listen, {"tail_sampling": tail_sampling}, backend)


def _config(listen: str, processors: Mapping[str, Any], to: str) -> dict[str, Any]:
    return {
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": listen}}}},
        "processors": dict(processors),
        "exporters": {"otlp_grpc": {"endpoint": to, "tls": {"insecure": True}}},
        "service": {
            "pipelines": {
                "traces": {
                    "receivers": ["otlp"],
                    "processors": list(processors),
                    "exporters": ["otlp_grpc"],
                }
            }
        },
    }


class Collector(Process):
    """One on a host; it listens when it is opened."""

    def __init__(
        self, host: Host, name: str, program: Path, directory: Path, config: Mapping[str, Any]
    ) -> None:
        self._config_path = directory / f"{name}.yaml"
        self._config = config
        super().__init__(
            host, name, [str(program), "--config", f"file:{self._config_path}"], directory, {}
        )

    def open(self) -> None:
        self._config_path.write_text(yaml.safe_dump(dict(self._config), sort_keys=False))
        super().open()
        listen = self._config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
        try:
            self.host.run(PYTHON, "-m", "testbed.await_health", f"tcp://{listen}", "1")
        except subprocess.CalledProcessError as error:
            raise DaemonError(f"{self.name} does not listen:\n{self.last_words()}") from error

    def accepted_spans(self) -> int:
        """All since its start, as its metrics say."""
        ask = "import sys, urllib.request as r; sys.stdout.write(r.urlopen(sys.argv[1]).read().decode())"
        return accepted_spans(self.host.run(PYTHON, "-c", ask, _METRICS))


def accepted_spans(metrics: str) -> int:
    """Of all receivers, by a page of a Collector's metrics; 0 before the first."""
    return int(sum(float(value) for value in _ACCEPTED.findall(metrics)))
