# SPDX-License-Identifier: Apache-2.0
"""The same shop on three hosts twice: with Collectors, and with Backsight.

Each has hosts, databases, services and a backend of its own, so that neither meets what the other
leaves, but for the machine.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.costs import Costs
from bench.otel_service import service_python
from bench.shop.backend import Arrival, read
from bench.shop.collectors import (
    AGENT,
    GATEWAY_PORT,
    Collector,
    agent_config,
    build,
    gateway_config,
)
from bench.shop.parameters import Parameters
from bench.shop.reckon import Reading
from testbed.processes import APPS, Postgresql, Process, Redis, Service
from testbed.shop import SERVICES, commands
from testbed.topology import (
    COORDINATOR_PORT,
    PYTHON,
    Coordinator,
    Host,
    Network,
    Node,
    Opened,
    started,
)
from testbed.traffic import count_sent_to, payload_bytes_sent

_HERE = Path(__file__).parent
_PYCACHE = Path(__file__).parents[2] / "build/.pycache"

_PORTS = {"front": 8000, "orders": 8001, "stock": 50051}
_BACKEND_PORT = 4317

# The front end closes a connection on which it raised an error, one of 200 orders, and what wrk sent
# on it meanwhile is lost.
_LOST_SHARE_MAX = 0.01

# Connections made, code imported, threads started.
_WARM_UP_REQUESTS = 64


@dataclass(slots=True)
class Site(Opened):
    """A shop with what watches it; ready when entered.

    ``central``: the daemon that all others report to. ``holders``: what stands in for systemd on
    a testbed, of which an installation has none.
    """

    network: Network
    directory: Path
    parameters: Parameters
    name: str = ""
    central: str = ""
    port: int = 0
    hosts: dict[str, Host] = field(default_factory=dict, init=False)
    services: dict[str, Service] = field(default_factory=dict, init=False)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    def close(self) -> None:
        self.stack.close()

    def open(self) -> None:
        self.directory.mkdir(mode=0o755)  # the databases run as another user
        self.hosts = {
            role: self.network.host(f"{self.name}-{role}")
            for role in (*SERVICES, "central", "backend", "client")
        }
        for service in SERVICES:
            count_sent_to(self.hosts[service], self.port, answers=True)
        self._start_backend()
        self.start_daemons()
        self._start_services()

    def _start_backend(self) -> None:
        program = self.program("backend", "backend", self.backend, str(self._arrivals_path))
        self.stack.enter_context(program)
        self._await(f"tcp://{self.backend}", 1)

    def program(self, role: str, module: str, *arguments: str) -> Process:
        """A program of this folder on a host, to be entered."""
        return Process(
            self.hosts[role],
            module,
            [PYTHON, "-m", f"bench.shop.{module}", *arguments],
            self.directory,
            {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"]},
        )

    def _start_services(self) -> None:
        python = service_python()
        self.stack.enter_context(Postgresql(self.hosts["stock"], self.directory))
        self.stack.enter_context(Redis(self.hosts["orders"], self.directory))
        addresses = {name: f"{self.hosts[name].address}:{port}" for name, port in _PORTS.items()}
        for name, command in commands(addresses).items():
            service = Service(
                self.hosts[name],
                name,
                python,
                command.arguments,
                self.directory,
                {
                    **self.tracing(name),
                    "PYTHONPATH": str(APPS),
                    "PYTHONPYCACHEPREFIX": str(_PYCACHE),
                    **command.environment,
                },
            )
            self.services[name] = self.stack.enter_context(service)
            # The next one calls it.
            self._await(f"tcp://{addresses[name]}", 1)
        self._await(f"{self.url}/health", _WARM_UP_REQUESTS)

    def _await(self, url: str, times: int) -> None:
        self.hosts["client"].run(PYTHON, "-m", "testbed.await_health", url, str(times))

    @property
    def url(self) -> str:
        """The front end, as clients see it."""
        return f"http://{self.hosts['front'].address}:{_PORTS['front']}"

    @property
    def backend(self) -> str:
        """Where traces are sent by OTLP."""
        return f"{self.hosts['backend'].address}:{_BACKEND_PORT}"

    @property
    def _arrivals_path(self) -> Path:
        return self.directory / "arrivals.jsonl"

    def arrivals(self) -> list[Arrival]:
        """What the backend got so far."""
        return read(self._arrivals_path)

    def load(self, seconds: int, first: int) -> int:
        """Put it under load by orders from that number on; how many were answered."""
        parameters = self.parameters
        done = self.hosts["client"].run(
            "wrk", "--threads", "1", "--connections", str(parameters.connections),
            "--duration", f"{seconds}s", "--timeout", "20s", "--script", str(APPS / "load.lua"),
            self.url, "--", str(parameters.pause_ms), str(first),
        )  # fmt: skip
        said: dict[str, int] = json.loads(done.splitlines()[-1])
        if said["lost"] > _LOST_SHARE_MAX * said["answered"]:
            words = "\n".join(one.last_words() for one in self.services.values())
            raise RuntimeError(f"{self.name}: {said['lost']} requests were not answered:\n{words}")
        return said["answered"]

    def wrong_orders(self) -> set[int]:
        """Those of which a service says that something was wrong, or that it had to wait."""
        return {
            entry["order"]
            for service in self.services.values()
            for entry in map(json.loads, service.access_log.read_text().splitlines())
            if entry["outcome"] != "ok"
        }

    def reading(self) -> Reading:
        """What all daemons used so far, and what went over the network."""
        costs = {name: Costs.of(pid) for name, pid in self.daemons().items()}
        wire = sum(payload_bytes_sent(self.hosts[service]) for service in SERVICES)
        return Reading.of(costs, wire)

    @abc.abstractmethod
    def tracing(self, service: str) -> dict[str, str]:
        """What the environment of a service says."""

    @abc.abstractmethod
    def start_daemons(self) -> None: ...

    @abc.abstractmethod
    def daemons(self) -> dict[str, int]:
        """Their process ids by their names."""

    def holders(self) -> Iterable[int]:
        return ()


@dataclass(slots=True)
class CollectorSite(Site):
    """A Collector on each host, and one for all that samples: an agent each, and a gateway."""

    name: str = "collector"
    central: str = "gateway"
    port: int = GATEWAY_PORT
    _collectors: dict[str, Collector] = field(default_factory=dict, init=False)

    def start_daemons(self) -> None:
        program = build()
        listen = f"{self.hosts['central'].address}:{GATEWAY_PORT}"
        configs = {"gateway": gateway_config(listen, self.backend, self.parameters)}
        configs |= {f"agent-{service}": agent_config(listen) for service in SERVICES}
        for name, config in configs.items():
            host = self.hosts["central" if name == "gateway" else name.removeprefix("agent-")]
            collector = Collector(host, name, program, self.directory, config)
            self._collectors[name] = self.stack.enter_context(collector)

    def tracing(self, service: str) -> dict[str, str]:
        del service  # the same for all
        return {
            "OTEL_PYTHON_DISTRO": "distro",
            "OTEL_PYTHON_CONFIGURATOR": "configurator",
            "OTEL_TRACES_EXPORTER": "otlp_proto_grpc",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{AGENT}",
        }

    def daemons(self) -> dict[str, int]:
        return {name: one.process.pid for name, one in self._collectors.items()}

    def spans(self) -> int:
        """That reached the gateway so far."""
        return self._collectors["gateway"].accepted_spans()


@dataclass(slots=True)
class BacksightSite(Site):
    """A node on each host, and a coordinator, as they are by default."""

    name: str = "backsight"
    central: str = "coordinator"
    port: int = COORDINATOR_PORT
    coordinator: Coordinator = field(init=False)
    _nodes: dict[str, Node] = field(default_factory=dict, init=False)

    def start_daemons(self) -> None:
        self.coordinator = self.stack.enter_context(
            Coordinator(self.hosts["central"], self.directory)
        )
        self._nodes = {
            service: Node(self.hosts[service], f"node-{service}", self.directory, self.coordinator)
            for service in SERVICES
        }
        self.stack.enter_context(started(list(self._nodes.values())))

    def tracing(self, service: str) -> dict[str, str]:
        return {
            "OTEL_PYTHON_DISTRO": "backsight",
            "OTEL_PYTHON_CONFIGURATOR": "backsight",
            "BACKSIGHT_TRIGGERS_FILE": str(_HERE / "triggers.yaml"),
            **self._nodes[service].client_environment(service),
        }

    def daemons(self) -> dict[str, int]:
        daemons = [self.coordinator, *self._nodes.values()]
        return {one.name: one.daemon_pid() for one in daemons}

    def holders(self) -> Iterable[int]:
        return [one.holder_pid() for one in (self.coordinator, *self._nodes.values())]

    def traces(self) -> list[dict[str, Any]]:
        """All that are stored, as ``backsightctl traces --json`` prints them."""
        return self.coordinator.ctl_json("traces")

    def export(self) -> None:
        """Send traces to the backend from now on."""
        self.coordinator.reload(export={"endpoint": f"http://{self.backend}", "insecure": True})

    def watch(self) -> Process:
        """Writes down into its log when each trace is there, while it is entered."""
        return self.program("central", "watch", self.coordinator.endpoint)
