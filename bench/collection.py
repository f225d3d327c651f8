# SPDX-License-Identifier: Apache-2.0
"""From bs_trigger() to the whole trace at the coordinator, over several nodes."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.topology import PYTHON, Coordinator, Host, Network, Node, started

_PORT = 8080
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Collection:
    """What passed since the trigger until all slices were durable, and until the verdict."""

    durable_ms: float
    verdict_ms: float
    verdict: str


class Program:
    """One of this package's programs on a host, and the pipes by which it is told what to do."""

    def __init__(
        self, host: Host, name: str, argument: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.host = host
        self._process = host.popen(
            # By its path: another commit's packages come first where that is measured.
            [PYTHON, "-P", str(_HERE / f"{name}.py"), argument],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def tell(self, *words: str) -> None:
        """Write a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> list[str]:
        """Read the next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended; its reason stands above")
        return line.split()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def services_on(daemons: Sequence[Node]) -> Iterator[list[Program]]:
    """A service beside each node, attached to it: they call each other in a row."""
    with contextlib.ExitStack() as stack:
        services = []
        for daemon in daemons:
            service = Program(daemon.host, "chain", str(_PORT), daemon.client_environment())
            stack.callback(service.close)
            services.append(service)
        for service in services:
            service.answer()
        yield services


class Chain:
    """Services on hosts of their own that call each other in a row, and who waits for traces."""

    def __init__(self, services: Sequence[Program], watch: Program) -> None:
        self._services = services
        self._watch = watch

    def collect(self, fire_at: int) -> Collection:
        """Send a request through all, fire on one when it is over, and wait for what comes of it."""
        trace = secrets.token_hex(16)
        first, *rest = self._services
        first.tell("request", trace, *(service.host.address for service in rest))
        first.answer()
        self._watch.tell(trace, str(len(self._services)))
        self._services[fire_at].tell("fire", trace)
        fired_ns = int(self._services[fire_at].answer()[0])
        durable_ns = int(self._watch.answer()[0])
        verdict_ns, verdict = self._watch.answer()
        return Collection(
            (durable_ns - fired_ns) / 1e6, (int(verdict_ns) - fired_ns) / 1e6, verdict
        )


@contextlib.contextmanager
def chain(directory: Path, nodes: int) -> Iterator[Chain]:
    """A chain over so many nodes, each in a network namespace of its own (needs root)."""
    with Network("bench") as network, contextlib.ExitStack() as stack:
        coordinator = Coordinator(network.host("coordinator"), directory)
        daemons = [
            Node(network.host(f"node-{i}"), f"node-{i}", directory, coordinator)
            for i in range(nodes)
        ]
        stack.enter_context(started([coordinator, *daemons]))
        watch = Program(coordinator.host, "watch", coordinator.endpoint)
        stack.callback(watch.close)
        yield Chain(stack.enter_context(services_on(daemons)), watch)
