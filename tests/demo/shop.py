# SPDX-License-Identifier: Apache-2.0
"""The shop on three nodes: a coordinator, databases, services, each in its network namespace."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.processes import APPS, Postgresql, Redis, Service
from testbed.shop import SERVICES, commands
from testbed.topology import PYTHON, Coordinator, Host, Network, Node, Opened, started
from testbed.venvs import made_once

_REPOSITORY = Path(__file__).parents[2]

PORTS = {"front": 8000, "orders": 8001, "stock": 50051}

# Connections made, code imported, threads started: no service goes live without.
_WARM_UP_REQUESTS = 64


class DemoError(RuntimeError):
    """The demo did not come to its end; the message says where it stopped."""


@dataclass(slots=True)
class Shop(Opened):
    """Entering it starts everything; leaving it stops and removes what it started.

    ``environment``: more of it for all services, as what fires. ``witnessed``: spans are
    written down beside. ``backlog``: connections that wait for the front end; None: its default.
    ``prepare`` is called with each node's host before anything runs there.
    """

    environment: Mapping[str, str]
    coordinator_config: Mapping[str, Any] = field(default_factory=dict)
    node_config: Mapping[str, Any] = field(default_factory=dict)
    witnessed: bool = False
    backlog: int | None = None
    prepare: Callable[[Host], None] = lambda _: None
    on_step: Callable[[str], None] = lambda _: None
    directory: Path = field(init=False)
    network: Network = field(init=False)
    coordinator: Coordinator = field(init=False)
    client: Host = field(init=False)
    nodes: dict[str, Node] = field(default_factory=dict, init=False)
    services: dict[str, Service] = field(default_factory=dict, init=False)
    _python: Path = field(init=False)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    def close(self) -> None:
        self._stack.close()

    def open(self) -> None:
        self.on_step("making the shop's virtual environment, if it is not there")
        self._python = made_once("shop", APPS / "shop-requirements.txt", client=True)
        self.on_step("starting a coordinator and three nodes, each in its own network namespace")
        # Short, because a Unix socket's path has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="backsight-"))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        # The databases run as another user.
        self.directory.chmod(0o755)
        self.network = self._stack.enter_context(Network("shop"))
        self.coordinator = Coordinator(
            self.network.host("coordinator"), self.directory, self.coordinator_config
        )
        self._stack.enter_context(self.coordinator)
        hosts = {service: self.network.host(node) for service, node in SERVICES.items()}
        self.client = self.network.host("client")
        for service, host in hosts.items():
            self.prepare(host)
            self.nodes[service] = Node(
                host, SERVICES[service], self.directory, self.coordinator, self.node_config
            )
        self._stack.enter_context(started(list(self.nodes.values())))
        self.on_step("starting PostgreSQL, Redis and the shop's three services")
        self._stack.enter_context(Postgresql(hosts["stock"], self.directory))
        self._stack.enter_context(Redis(hosts["orders"], self.directory))
        for name in ("stock", "orders", "front"):
            self.start_service(name)
        self.await_open(_WARM_UP_REQUESTS)

    @property
    def url(self) -> str:
        """The front end, as clients see it."""
        return f"http://{self._at('front')}"

    def _at(self, name: str) -> str:
        return f"{self.nodes[name].host.address}:{PORTS[name]}"

    def start_service(self, name: str) -> None:
        """Start one, also in the place of one that has ended; until it listens."""
        node = self.nodes[name]
        command = commands({name: self._at(name) for name in SERVICES}, backlog=self.backlog)[name]
        service = Service(
            node.host,
            name,
            self._python,
            command.arguments,
            self.directory,
            {
                **node.client_environment(name),
                "PYTHONPATH": str(APPS),
                "PYTHONPYCACHEPREFIX": str(_REPOSITORY / "build" / ".pycache"),
                **self.environment,
                **command.environment,
            },
            witnessed=self.witnessed,
        )
        self.services[name] = self._stack.enter_context(service)
        # Who called one that does not listen yet would fail, and be captured as an error.
        self._await(f"tcp://{self._at(name)}", 1)

    def await_open(self, times: int = 1) -> None:
        """Until it has answered so often that all of it is well."""
        self._await(f"{self.url}/health", times)

    def _await(self, url: str, times: int) -> None:
        try:
            self.client.run(PYTHON, "-m", "testbed.await_health", url, str(times))
        except subprocess.CalledProcessError as error:
            said = "\n".join(
                f"--- {name}\n{service.last_words()}" for name, service in self.services.items()
            )
            raise DemoError(f"the shop does not open:\n{said}") from error
