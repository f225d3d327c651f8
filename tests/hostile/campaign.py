# SPDX-License-Identifier: Apache-2.0
"""Two nodes under attack, honest processes beside the hostile ones, and what became of them."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctl.coordinator import AskError
from testbed.topology import PYTHON, Coordinator, Host, Network, Node, Opened, started
from tests.hostile.attacks import ATTACKER, HONEST, HOSTILE, Attack, phases
from tests.hostile.client import Said
from tests.hostile.interrupts import uninterrupted
from tests.hostile.judge import Judged, Outcome, Result, Turn, Visitors, Written, judge
from tests.hostile.memory import Sample, sample
from tests.hostile.truth import NODES

ROOT = Path(__file__).resolve().parents[2]

_PORT = 8080

# Of each front; so each node has twice as many, a side of each trace.
TRACES_PER_S = 250
_TRIGGER_EVERY = 25

_POOL_BYTES = 128 << 20
_STORE_BYTES = 32 << 20
_CLIENTS_MAX = 128

NODE: Mapping[str, Any] = {
    "pool_bytes": _POOL_BYTES,
    "store_bytes": _STORE_BYTES,
    "clients_max": _CLIENTS_MAX,
    "allow": {"users": [HONEST, HOSTILE]},
}

# Traces of a long attack are looked at when they are judged, so they need not be kept for long.
COORDINATOR: Mapping[str, Any] = {
    "linger_s": 5.0,
    "missing_linger_s": 10.0,
}
_TRACES_BYTES_MAX = 1 << 30

# Channel and context of a process (native/src/abi), all pages touched.
_CLIENT_BYTES = 1_200_000

# The daemon's own, beyond what it has when it starts: tables of the pool, what it keeps of traces
# until the coordinator lets go of them (4 KiB each), of users and names.
_OWN_BYTES = 64 << 20

# A place of a user that waits, of which there are 64, for three users and root; of a client the
# arena, and while it lives its connection, and a pidfd for each of both; what a daemon has
# without them.
_FILES_MAX = 4 * 64 + 4 * _CLIENTS_MAX + 100

# From one look at all daemons to the next: dense beside the second in which they must answer.
_TICK_S = 0.5
_CALM_S = 5.0  # a node looks for memory that it did not grant once a second, and takes it in pieces
_ATTACH_TIMEOUT_S = 60.0
_SETTLE_TIMEOUT_S = 30.0  # longer than the coordinator waits for what is missing
_VISIT_TRACES = 4


class HostileError(RuntimeError):
    """The campaign did not come to its end; the message says where it stopped."""


@dataclass(slots=True)
class _Client:
    """An honest process, seen from here. ``heard`` tells of all that they say."""

    node: str
    process: subprocess.Popen[bytes]
    heard: threading.Condition
    said: list[Said] = field(default_factory=list)
    silent: bool = False
    left: bool = False

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            said["fired"] = tuple(said["fired"])
            with self.heard:
                self.said.append(Said(**said))
                self.heard.notify_all()
        with self.heard:
            self.silent = True
            self.heard.notify_all()

    def tell(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def leave(self) -> None:
        """Have it end, if it has done all that it came for."""
        if self.last is not None and self.last.final and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()
            self.left = True

    @property
    def last(self) -> Said | None:
        return self.said[-1] if self.said else None

    def written(self) -> Written:
        last = self.last
        return Written(
            traces=last.traces if last else 0,
            records=last.records if last else 0,
            records_lost=last.records_lost if last else 0,
            triggers_lost=last.triggers_lost if last else 0,
            fired=frozenset(low for said in list(self.said) for low in said.fired),
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a campaign is."""

    elapsed_s: float
    duration_s: float
    fired: int
    whole: int
    lost: int


@dataclass(slots=True)
class Campaign(Opened):
    """A coordinator and two nodes, honest processes on both, and attacks by turns.

    Entering it starts everything; ``run`` attacks; leaving it stops and removes what it started.
    """

    duration_s: float
    seed: int
    only: Sequence[str] = ()
    on_progress: Callable[[Progress], None] = lambda _: None
    on_step: Callable[[str], None] = lambda _: None
    directory: Path = field(init=False)
    coordinator: Coordinator = field(init=False)
    nodes: dict[str, Node] = field(default_factory=dict, init=False)
    _run: int = field(default_factory=lambda: secrets.randbits(63) | 1, init=False)
    _attackers: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)
    _launched: Counter[str] = field(default_factory=Counter, init=False)
    _heard: threading.Condition = field(default_factory=threading.Condition, init=False)
    _services: list[_Client] = field(default_factory=list, init=False)
    _visitors: list[_Client] = field(default_factory=list, init=False)
    _judged: Judged = field(default_factory=Judged, init=False)
    _samples: list[Sample] = field(default_factory=list, init=False)
    _answers_s: list[float] = field(default_factory=list, init=False)
    _daemons: dict[str, int] = field(default_factory=dict, init=False)
    _turns: list[Turn] = field(default_factory=list, init=False)
    _deaths: list[str] = field(default_factory=list, init=False)
    _base_bytes: int = field(default=0, init=False)
    _restarts: int = field(default=0, init=False)
    _begin_s: float = field(default=0.0, init=False)
    _collector: subprocess.Popen[bytes] = field(init=False)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    # -------------------------------------------------------------- start

    def close(self) -> None:
        self._stack.close()

    def open(self) -> None:
        if not ATTACKER.exists():
            raise HostileError(f"{ATTACKER} is not there: make build")
        self.on_step("starting a coordinator and two nodes, each in its own network namespace")
        # Short, because a Unix socket's path has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="backsight-"))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        # Other users come here.
        self.directory.chmod(0o755)
        network = self._stack.enter_context(Network("hostile"))
        store = {"path": str(self.directory / "traces.sqlite"), "bytes_max": _TRACES_BYTES_MAX}
        self.coordinator = Coordinator(
            network.host("coordinator"), self.directory, {**COORDINATOR, "store": store}
        )
        self._stack.enter_context(self.coordinator)
        hosts = {name: network.host(name) for name in NODES}
        self.nodes = {
            name: Node(host, name, self.directory, self.coordinator, NODE)
            for name, host in hosts.items()
        }
        self._stack.enter_context(started(list(self.nodes.values())))
        self._stack.callback(self._stop_attackers)
        self._daemons = {name: node.daemon_pid() for name, node in self.nodes.items()}
        self._begin_s = time.monotonic()
        self._base_bytes = max(self._sample(name).private_bytes for name in NODES)
        self._samples.clear()

        self.on_step("starting honest processes on both nodes")
        aim = self.directory / "aim"
        aim.write_bytes(struct.pack("=QQ", self._run, 0))
        aim.chmod(0o644)
        self._collector = self._popen(
            self.coordinator.host, "collect", self.coordinator.endpoint, f"{self._run:x}"
        )
        threading.Thread(target=self._collect, daemon=True).start()
        for name, peer in zip(NODES, reversed(NODES), strict=True):
            self._services.append(
                self._client(
                    name, "serve", str(_PORT), hosts[peer].address, str(aim),
                    str(TRACES_PER_S), str(_TRIGGER_EVERY),
                )
            )  # fmt: skip
        self._await_services(lambda said: True, "the first word of honest processes")
        for service in self._services:
            if not (service.last and service.last.attached):
                raise HostileError(f"the honest process on {service.node} could not attach")

    def _popen(
        self, host: Host, program: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with uninterrupted():
            process = host.popen(
                [PYTHON, "-m", f"tests.hostile.{program}", *arguments],
                env=env,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._stack.callback(_end, process)
        return process

    def _client(self, node: str, kind: str, *arguments: str) -> _Client:
        process = self._popen(
            self.nodes[node].host, "client", kind, node, str(HONEST), f"{self._run:x}", *arguments,
            env=self.nodes[node].client_environment(f"honest-{node}"),
        )  # fmt: skip
        # Each program in between becomes the next: it is the pid that the node will see.
        self._say_to_collector("pid", node, str(process.pid))
        client = _Client(node, process, self._heard)
        threading.Thread(target=client.listen, daemon=True).start()
        return client

    def _await_services(self, is_it: Callable[[Said], bool], what: str) -> None:
        """Until each of them has said it last, or will say nothing any more."""

        def said() -> bool:
            return all(
                service.silent or (service.last is not None and is_it(service.last))
                for service in self._services
            )

        with self._heard:
            if not self._heard.wait_for(said, _ATTACH_TIMEOUT_S):
                raise HostileError(f"{what} did not come in {_ATTACH_TIMEOUT_S:g} s")

    # ------------------------------------------------------------- attack

    def run(self) -> None:
        """Attack for as long as wanted, and wait until every verdict stands."""
        chance = random.Random(self.seed)
        self._begin_s = time.monotonic()
        for service in self._services:
            service.tell()
        for number, phase in enumerate(phases(self.duration_s, chance, self.only)):
            self.on_step(f"{phase.what}, for {phase.seconds:.0f} s")
            until_s = time.monotonic() + phase.seconds
            lost, fired = self._records_lost(), self._fired()
            killed = ""
            self._attack(phase.attacks, chance)
            self._visit(number)
            self._pass_time(until_s - phase.seconds / 2)
            if number % 2 and not self._deaths:
                killed = NODES[number // 2 % 2]
                self._restart(killed)
            self._pass_time(until_s)
            self._stop_attackers()
            # What they wrote stays; and more processes than work here take no part of stocks.
            for visitor in self._visitors:
                if not visitor.left:
                    visitor.leave()
            self._turns.append(
                Turn(phase.what, killed, self._records_lost() - lost, self._fired() - fired)
            )
            if self._deaths:
                break
        # First no front begins anything, then no back is called any more.
        for service in self._services:
            service.tell()
        self._await_services(lambda said: said.ended, "the end of honest fronts")
        for service in self._services:
            service.tell()
        self._await_services(lambda said: said.final, "the end of honest processes")
        self._settle()

    def _attack(self, attacks: Sequence[Attack], chance: random.Random) -> None:
        for node in self.nodes.values():
            for attack in attacks:
                self._launched[attack.label] += 1
                command = [
                    str(ATTACKER), attack.name, str(attack.uid), str(node.socket_path),
                    str(self.directory / "aim"), str(chance.randrange(1, 1 << 32)),
                ]  # fmt: skip
                with uninterrupted():
                    self._attackers.append(node.host.popen(command, stdin=subprocess.DEVNULL))

    def _stop_attackers(self) -> None:
        """All at once, in the midst of what they do."""
        for process in self._attackers:
            if process.poll() not in (None, 0):
                self._deaths.append(
                    f"an attacker ended with {process.returncode}: {process.args!r}"
                )
            process.kill()
        for process in self._attackers:
            process.wait()
        self._attackers.clear()

    def _pass_time(self, until_s: float) -> None:
        while time.monotonic() < until_s and not self._deaths:
            self._tick()

    def _restart(self, name: str) -> None:
        """Have the daemon die in the midst of it; the next one finds what liars left."""
        node = self.nodes[name]
        node.kill_daemon()
        self._daemons[name] = node.daemon_pid()
        self._restarts += 1

    def _visit(self, number: int) -> None:
        """Honest processes that come now."""
        for name in NODES:
            first = number * _VISIT_TRACES
            self._visitors.append(self._client(name, "visit", str(first), str(_VISIT_TRACES)))

    def _tick(self) -> None:
        time.sleep(_TICK_S)
        for name, node in self.nodes.items():
            pid = node.daemon_pid()
            if pid != self._daemons[name]:
                self._deaths.append(f"the daemon of {name} ended:\n{node.last_words()}")
                self._daemons[name] = pid
            self._samples.append(self._sample(name))
            self._ask(node)
        for client in (*self._services, *self._visitors):
            if not client.left and client.process.poll() is not None:
                self._deaths.append(
                    f"an honest process on {client.node} ended with {client.process.returncode}"
                )
        self.on_progress(
            Progress(
                time.monotonic() - self._begin_s,
                self.duration_s,
                sum(len(one.fired) for one in self._written()),
                sum(outcome.whole for outcome in list(self._judged.last.values())),
                self._records_lost(),
            )
        )

    def _ask(self, node: Node) -> None:
        """Time how long the daemon takes to say how it is."""
        begin_s = time.monotonic()
        # One that is starting just now refuses at once.
        with contextlib.suppress(AskError):
            node.control.status()
        self._answers_s.append(time.monotonic() - begin_s)

    def _written(self) -> list[Written]:
        return [client.written() for client in (*self._services, *self._visitors)]

    def _fired(self) -> frozenset[int]:
        return frozenset().union(*(one.fired for one in self._written()))

    def _records_lost(self) -> int:
        return sum(one.records_lost for one in self._written())

    def _sample(self, name: str) -> Sample:
        holder = self.nodes[name].holder_pid()
        return sample(name, time.monotonic() - self._begin_s, self._daemons[name], holder)

    # -------------------------------------------------------------- judge

    def _collect(self) -> None:
        assert self._collector.stdout is not None
        for line in self._collector.stdout:
            said = json.loads(line)
            self._judged.add(
                Outcome(
                    **{
                        **said,
                        "reasons": tuple(said["reasons"]),
                        "triggers": tuple(said["triggers"]),
                    }
                )
            )

    def _say_to_collector(self, *words: str) -> None:
        assert self._collector.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._collector.stdin.write(" ".join(words).encode() + b"\n")
            self._collector.stdin.flush()

    def _settle(self) -> None:
        """Until each trigger's trace is there, or nothing comes any more; and memory is at rest."""
        self.on_step("waiting for the last verdicts")
        calm_s = time.monotonic() + _CALM_S
        deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
        fewest = 1 << 62
        asked: dict[int, float] = defaultdict(float)
        while (now_s := time.monotonic()) < deadline_s:
            fired = self._fired()
            open_ = [
                low
                for low in fired
                if (outcome := self._judged.last.get(low)) is None
                or not outcome.whole
                or outcome.verdict == "provisional"
            ]
            self._samples += map(self._sample, NODES)
            if not open_ and now_s >= calm_s:
                return
            if len(open_) < fewest:
                fewest, deadline_s = len(open_), now_s + _SETTLE_TIMEOUT_S
            for low in open_:
                # A verdict comes by itself, unless its line was lost on the way.
                if now_s - asked[low] > 5:
                    asked[low] = now_s
                    self._say_to_collector("ask", str(low))
            time.sleep(_TICK_S)

    def judge(self) -> Result:
        """What came of it."""
        attached = sum(bool(one.last and one.last.attached) for one in self._visitors)
        budget = (
            _POOL_BYTES + _POOL_BYTES // 16 + _STORE_BYTES
            + _CLIENTS_MAX * _CLIENT_BYTES + self._base_bytes + _OWN_BYTES
        )  # fmt: skip
        return judge(
            duration_s=self.duration_s,
            seed=self.seed,
            attacks=self._launched,
            written=self._written(),
            visitors=Visitors(len(self._visitors), attached),
            judged=self._judged,
            samples=self._samples,
            answers_s=self._answers_s,
            budget_bytes=budget,
            pool_bytes=_POOL_BYTES,
            files_max=_FILES_MAX,
            deaths=self._deaths,
            restarts=self._restarts,
            turns=self._turns,
            nodes={name: _counted(node) for name, node in self.nodes.items()},
        )


# What a node says of the attack.
_COUNTED = {
    "dataplane": (
        "corrupt", "reclaims", "taken_back_bytes", "triggers", "triggers_lost", "cells_skipped",
        "second_chances", "entries_searched", "records_lost",
    ),
    "attach": ("connections", "attached", "refused", "not_allowed", "malformed", "silent", "too_many"),
}  # fmt: skip


def _counted(node: Node) -> dict[str, float]:
    status = node.control.status()
    return {
        name: status[part][name]
        for part, names in _COUNTED.items()
        for name in names
        if name in status[part]
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    if process.stdin is not None:
        process.stdin.close()
    process.wait()
