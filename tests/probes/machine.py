# SPDX-License-Identifier: Apache-2.0
"""A machine with a node, probes and a coordinator, and a program to which what they look for happens."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.cgroups import Group
from testbed.daemons import anywhere, coordinator_on
from testbed.probes import Probes
from testbed.topology import Coordinator, Host, Node
from tests.probes.attributes import assert_documented

_DEADLINE_S = 30.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Suffered:
    """What the program said that happened to it (suffer.c)."""

    victim: str
    lateral: str
    innocent: str
    took_ns: int


@dataclass(frozen=True, slots=True)
class Sufferer:
    """The program, which does what it is told."""

    process: subprocess.Popen[bytes]

    def suffer(self) -> Suffered:
        """Have it happen once."""
        self.begin()
        return self.end()

    def begin(self) -> None:
        """Have it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def end(self) -> Suffered:
        """Wait until it has happened."""
        assert self.process.stdout is not None
        return Suffered(**json.loads(self.process.stdout.readline()))


@dataclass(slots=True)
class Machine:
    """Its daemons, which run."""

    coordinator: Coordinator
    node: Node
    probes: Probes
    program: Path
    directory: Path

    @contextlib.contextmanager
    def sufferer(
        self,
        cause: str,
        ends_with: int = 0,
        under: Sequence[str] = (),
        path: Path | None = None,
    ) -> Iterator[Sufferer]:
        """The program, attached to the node; it ends with the block.

        ``under``: what runs it. ``path``: of a file that it writes to.
        """
        with self.node.host.popen(
            [*under, str(self.program), cause, str(path or self.directory / "data")],
            env=self.node.client_environment("sufferer"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield Sufferer(process)
        assert process.returncode == ends_with

    @contextlib.contextmanager
    def suffers_in(self, group: Group, cause: str, ends_with: int = 0) -> Iterator[Suffered]:
        """The same, of a program in a control group."""
        self.probes.await_watched(0)
        with self.sufferer(cause, ends_with) as program:
            group.take([program.process.pid])
            self.probes.await_watched(1)
            yield program.suffer()

    @contextlib.contextmanager
    def suffers(self, cause: str, ends_with: int = 0) -> Iterator[Suffered]:
        """The program, when it has happened; it ends with the block."""
        self.probes.await_watched(0)
        with self.sufferer(cause, ends_with) as program:
            self.probes.await_watched(1)
            yield program.suffer()

    def shown(self, trace: str) -> dict[str, Any]:
        """What the coordinator shows of a trace when it has a last verdict."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(subprocess.CalledProcessError):
                shown: dict[str, Any] = self.coordinator.ctl_json("show", trace)[0]
                if shown["verdict"]["kind"] != "provisional":
                    assert_documented(shown)
                    return shown
            time.sleep(_LOOK_EVERY_S)
        raise AssertionError(f"after {_DEADLINE_S} s the coordinator has no verdict of {trace}")

    def outcomes(self, trigger: str) -> dict[str, int]:
        """How many of its events were ``recorded``, ``fired`` and so on, once there are no more of them."""
        told: list[dict[str, Any]] = []

        def is_over(status: dict[str, Any]) -> bool:
            figures = status["probes"]
            # Programs run all the time, so other figures are newer ones.
            if figures and figures not in told:
                told.append(figures)
            return len(told) > 1 and told[-1]["kinds"] == told[-2]["kinds"]

        kinds: dict[str, dict[str, int]] = self.probes.await_node(is_over)["probes"]["kinds"]
        return kinds[trigger]

    def await_own(self, trigger: str, count: int) -> None:
        """Until it was fired for so many traces, not counting those that went along; never for more."""
        deadline_s = time.monotonic() + _DEADLINE_S
        own: set[str] = set()
        while time.monotonic() < deadline_s:
            own = {
                one["primary"]
                for trace in self.coordinator.ctl_json("traces", "--limit", "0")
                for one in trace["triggers"]
                if one["name"] == trigger
            }
            if len(own) >= count:
                break
            time.sleep(_LOOK_EVERY_S)
        assert len(own) == count

    def triggered(self) -> dict[str, set[str]]:
        """By trigger: the traces that it was fired for, laterals too."""
        found: dict[str, set[str]] = {}
        for trace in self.coordinator.ctl_json("traces"):
            for trigger in trace["triggers"]:
                found.setdefault(trigger["name"], set()).add(trace["trace_id"])
        return found


@contextlib.contextmanager
def machine(
    directory: Path,
    build: Path,
    loader: str,
    probes: Mapping[str, Any],
    host: Host | None = None,
    host_of_probes: Host | None = None,
    triggers: Mapping[str, Any] | None = None,
    program: str = "appliance.probes",
) -> Iterator[Machine]:
    """Everything on this machine as it is; ``probes``, ``triggers``: of the node's configuration.

    ``program``: the module that runs as the probes.
    """
    host = host or anywhere()
    coordinator = coordinator_on(anywhere(), directory)
    config = {
        "metrics": {"listen": None},
        "probes": {"loader": loader, **probes},
        "triggers": dict(triggers or {}),
    }
    node = Node(host, "here", directory, coordinator, config)
    watching = Probes(node, host_of_probes, program)
    with coordinator, node, watching:
        yield Machine(coordinator, node, watching, build / "tests/suffer", directory)


def kernel_spans(shown: Mapping[str, Any], event: str) -> list[dict[str, Any]]:
    """What probes wrote into a trace of one kind of event."""
    return [span for span in shown["spans"] if span["attributes"].get("kernel.event") == event]


def trigger_of(shown: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The one that fired for this trace, and not for one that it is a neighbour of."""
    own = (name, shown["trace_id"])
    triggers: list[dict[str, Any]] = [
        one for one in shown["triggers"] if (one["name"], one["primary"]) == own
    ]
    assert triggers, f"{name} did not fire: {shown['triggers']}"
    return triggers[0]
