# SPDX-License-Identifier: Apache-2.0
"""A coordinator and a node daemon on this machine as it is, pinned to a core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.ports import free_port
from testbed.topology import DIES_WITH_PARENT, Coordinator, Host, Node


@dataclass(frozen=True, slots=True)
class Cores:
    """Where what runs: daemons on one core, a single writer on the other."""

    daemons: int
    writer: int

    @classmethod
    def choose(cls) -> Cores:
        """Take the first and the last core that this process may use."""
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[-1])


def bound(command: Sequence[str], core: int | None) -> list[str]:
    """Bind a command's life to ours, and it to a core if one is given."""
    return [*DIES_WITH_PARENT, *_affinity(core), *command]


def _affinity(core: int | None) -> list[str]:
    return [] if core is None else ["taskset", "--cpu-list", str(core)]


@dataclass(frozen=True, slots=True)
class _ThisMachine(Host):
    """No namespace: benchmarks of one node need no rights. ``core`` None: any."""

    core: int | None

    def _inside(self, command: Sequence[str]) -> list[str]:
        return [*_affinity(self.core), *command]


# The user's own daemons may have the usual ports, and so may another benchmark's.
_NO_METRICS = {"metrics": {"listen": None}}


def free_endpoint(host: Host) -> str:
    """An address of that host, with a port that nobody listens on."""
    return f"{host.address}:{free_port(host.address)}"


class _Coordinator(Coordinator):
    """On a port that is free."""

    def __init__(self, host: Host, directory: Path, config: Mapping[str, Any]) -> None:
        endpoint = free_endpoint(host)
        super().__init__(
            host,
            directory,
            {"listen": endpoint, **_NO_METRICS, "query": {"listen": None}, **config},
        )
        self.endpoint = endpoint


def this_machine(core: int) -> Host:
    """This machine as a host whose programs run on one core."""
    return _ThisMachine("localhost", "", "127.0.0.1", core)


def anywhere() -> Host:
    """This machine as a host whose programs run where the scheduler puts them."""
    return _ThisMachine("localhost", "", "127.0.0.1", None)


def coordinator_on(
    machine: Host, directory: Path, config: Mapping[str, Any] | None = None
) -> Coordinator:
    """A coordinator on a port of that host that is free, to be started."""
    return _Coordinator(machine, directory, config or {})


@contextlib.contextmanager
def node(directory: Path, cores: Cores, config: Mapping[str, Any]) -> Iterator[Node]:
    """A node daemon that is connected to a coordinator, as it is where it works."""
    machine = this_machine(cores.daemons)
    coordinator = _Coordinator(machine, directory, {})
    with (
        coordinator,
        Node(machine, "bench", directory, coordinator, {**_NO_METRICS, **config}) as daemon,
    ):
        yield daemon


def lone_node(directory: Path, cores: Cores, config: Mapping[str, Any]) -> Node:
    """A node daemon without a coordinator, to be started: it keeps what it collects."""
    return Node(this_machine(cores.daemons), "bench", directory, None, {**_NO_METRICS, **config})
