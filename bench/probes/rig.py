# SPDX-License-Identifier: Apache-2.0
"""A node, probes that come and go, and programs that have done over and over what probes look at."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.probes.parameters import Parameters
from testbed.daemons import Cores, bound
from testbed.probes import Probes
from testbed.topology import Host, Node

BUILD = Path(__file__).resolve().parent.parent.parent / "build"

Settings = Mapping[str, Any]

# Of their budget, these loads leave none: what costs too much would be taken out.
ON: Settings = {"cpu_percent": 1000}
BYPASS: Settings = {"bypass": True}

# A load of nothing but context switches, and one of nothing but messages: arguments of ping_pong.c.
PING_PONGS: Mapping[str, tuple[str, ...]] = {
    "not attached, by pipes": (),
    "attached, in a trace, by pipes": ("attached",),
    "not attached, by TCP": ("tcp",),
    "attached, in a trace, by TCP": ("attached", "tcp"),
}


@dataclass(frozen=True, slots=True)
class Took:
    """What one time of something took: by the clock, and of CPU time of the program's threads."""

    wall_ns: float
    cpu_ns: float


Measure = Callable[[int], Took]
"""Has it happen so often."""


@dataclass(frozen=True, slots=True)
class Rig:
    """A node and probes, which are started by who needs them."""

    node: Node
    probes: Probes
    parameters: Parameters

    def write(self, settings: Settings) -> None:
        """Have that be the configuration, for who reads it next."""
        probes = {"loader": self.parameters.loader, **settings}
        self.probes.config_path.write_text(yaml.safe_dump({**self.node.config, "probes": probes}))

    def configure(self, settings: Settings) -> None:
        """Have the probes be so, and wait until they are."""
        self.write(settings)
        os.kill(self.probes.daemon_pid(), signal.SIGHUP)
        wanted = not settings.get("bypass", False)
        self.probes.await_node(
            lambda status: ("on_switch" in status["probes"].get("programs", {})) == wanted
        )

    @contextlib.contextmanager
    def happening(
        self,
        program: str,
        arguments: Sequence[str],
        host: Host | None = None,
        core: int | None = None,
    ) -> Iterator[Measure]:
        """A program of rounds.h that runs meanwhile, on that host, bound to that core."""
        with (host or self.node.host).popen(
            bound([str(BUILD / "bench" / program), *arguments], core),
            env=self.node.client_environment(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None
            assert stdout is not None
            if stdout.readline() != b"ready\n":
                raise RuntimeError(f"{program} did not start; its reason stands above")

            def measure(times: int) -> Took:
                stdin.write(f"{times}\n".encode())
                stdin.flush()
                said = stdout.readline().split()
                if len(said) != 2:
                    raise RuntimeError(f"{program} ended; its reason stands above")
                return Took(*map(float, said))

            yield measure

    @contextlib.contextmanager
    def ping_pong(self, *what: str) -> Iterator[Callable[[], Took]]:
        """What measures a round trip; ``what``: see ping_pong.c."""
        with self.happening("ping_pong", what, core=Cores.choose().writer) as measure:
            yield lambda: measure(self.parameters.round_trips)


@contextlib.contextmanager
def empty_programs(hooks: Sequence[str]) -> Iterator[int]:
    """Programs that do nothing are on these hooks meanwhile. The pid of who has them."""
    with subprocess.Popen(
        bound([str(BUILD / "bench/empty"), str(BUILD / "bench/empty.bpf.o"), *hooks], None),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("empty did not start; its reason stands above")
        # It ends when its input does.
        yield process.pid
