# SPDX-License-Identifier: Apache-2.0
"""``sudo make hostile-peers``: who means no good beside thirty honest nodes, and what these lose by it.

Environment: DURATION (600: seconds, of all attacks together), SPEED (20: requests of the
honest nodes a second), ONLY (names of attacks, separated by blanks: no others).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctl.pki import Authority
from runtime.log import Log
from runtime.memory import resident_bytes
from runtime.settings.coordinator import (
    CLOSED_BYTES,
    EVIDENCE_BYTES,
    NODE_BYTES,
    TRACE_BYTES,
)
from testbed.daemons import anywhere, coordinator_on
from testbed.ports import free_port
from testbed.topology import PYTHON, Coordinator
from tests.hostile_peers import strangers
from tests.hostile_peers.honest import Fleet, Judged, Written, judge

OUTPUT = Path(__file__).resolve().parents[2] / "build" / "hostile-peers"

_HONEST = 30
_EVIL = "evil"
_READER = "reader"

# Nobody's number, on all machines; and whom the coordinator lets read.
_STRANGER, _VIEWER = 65534, 65533

# Of the honest requests whose ids nobody hostile knows.
_COHERENT_MIN = 0.99

# Every so many requests, whose trace the liar has learned, as one that it took part in.
_LEAKED_EACH = 20

# As the coordinator is configured, and what that comes to by its own figures.
_LIMITS = {"traces_max": 8192, "evidence_max": 1 << 19, "closed_max": 8192, "nodes_max": 256}
_MEMORY_BYTES = 64 << 20
_BUDGET_BYTES = (
    _MEMORY_BYTES
    + _LIMITS["traces_max"] * TRACE_BYTES
    + _LIMITS["evidence_max"] * EVIDENCE_BYTES
    + _LIMITS["closed_max"] * CLOSED_BYTES
    + _LIMITS["nodes_max"] * NODE_BYTES
)

# Beside that, what gRPC holds for a peer: a few connections with 8 MiB of a message that is
# not whole, and what is on its way to the others (tests.hostile_peers.test_attacks).
_GRPC_BYTES = 96 << 20

# For the last ones to be judged.
_JUDGED_S = 20.0
_SAMPLE_S = 0.25


@dataclass(slots=True)
class Phase:
    """One attack: what came of it, and what the honest ones got meanwhile."""

    name: str
    what: str
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    requests: list[Written] = field(default_factory=list)
    leaked: list[Written] = field(default_factory=list)
    memory_bytes: int = 0
    scrapes: int = 0
    scrapes_failed: int = 0
    honest: Judged = field(default_factory=Judged)
    known: Judged = field(default_factory=Judged)

    def result(self) -> dict[str, Any]:
        """For a file."""
        kept = ("name", "what", "seconds", "counts", "memory_bytes", "scrapes", "scrapes_failed")
        return {
            **{key: getattr(self, key) for key in kept},
            "honest": dataclasses.asdict(self.honest),
            "known_to_the_liar": dataclasses.asdict(self.known),
        }


class Site:
    """A coordinator with TLS, certificates for all who have one, and files for those who have none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = Authority.create(directory / "pki", "hostile.example")
        own = self._issued("coordinator", is_server=True, addresses=["127.0.0.1"])
        self.names = [f"honest-{number}" for number in range(_HONEST)]
        self.files = {name: self._issued(f"node/{name}") for name in (*self.names, _EVIL)}
        self.reader = self._issued(f"viewer/{_READER}")
        other = Authority.create(directory / "other", "hostile.example")
        self.forged = other.issue(f"node/{_EVIL}", is_server=False).directory
        self.leaked = directory / "leaked"
        self.metrics, self.query = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.socket = directory / "c.sock"
        self.coordinator: Coordinator = coordinator_on(
            anywhere(),
            directory,
            {
                "insecure": False,
                "tls": {
                    "ca": str(own / "ca.crt"),
                    "certificate": str(own / "tls.crt"),
                    "key": str(own / "tls.key"),
                },
                "access": {"socket": str(self.socket), "viewers": {"users": [_VIEWER]}},
                "metrics": {"listen": self.metrics},
                "query": {"listen": self.query},
                "memory_bytes": _MEMORY_BYTES,
                # What is closed is closed soon, so that all verdicts stand at the end.
                "missing_linger_s": 5,
                "linger_s": 5,
                **_LIMITS,
            },
        )

    @property
    def endpoint(self) -> str:
        return self.coordinator.endpoint

    @property
    def store(self) -> Path:
        return self.directory / "traces.sqlite"

    def _issued(self, path: str, *, is_server: bool = False, **names: Any) -> Path:
        return self.ca.issue(path, is_server=is_server, **names).directory

    def memory_bytes(self) -> int:
        """Of all processes of the coordinator."""
        total, pids = 0, [self.coordinator.daemon_pid()]
        while pids:
            pid = pids.pop()
            with contextlib.suppress(OSError, ValueError):
                pss = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += next(
                    int(line.split()[1]) << 10 for line in pss.splitlines() if line[:4] == "Pss:"
                )
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return total


Attack = Callable[[Site, float], Awaitable[dict[str, int]]]


async def _program(*command: str | Path) -> dict[str, int]:
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{command}: ended with {process.returncode}")
    counts: dict[str, int] = json.loads(told)
    return counts


def _lie(attack: str, name: str = _EVIL) -> Attack:
    async def run(site: Site, seconds: float) -> dict[str, int]:
        return await _program(
            *(PYTHON, "-m", "tests.hostile_peers.messages", attack, f"{seconds}", name),
            *(site.endpoint, site.directory / "pki" / "ca.crt", site.files[_EVIL], site.leaked),
        )

    return run


async def _again(seconds: float, *arguments: str | Path) -> dict[str, int]:
    """An attack again and again, for that time."""
    counts: dict[str, int] = {}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        told = await _program(PYTHON, "-m", "tests.hostile_peers.attacks", *arguments)
        for key, count in told.items():
            counts[key] = counts.get(key, 0) + count
    return counts


def _transport(attack: str, of: str = _EVIL) -> Attack:
    async def run(site: Site, seconds: float) -> dict[str, int]:
        files: dict[str, Sequence[Path]] = {
            _EVIL: (site.directory / "pki" / "ca.crt", site.files[_EVIL]),
            _READER: (site.directory / "pki" / "ca.crt", site.reader),
            "nobody": (site.directory / "pki" / "ca.crt",),
            "forged": (site.directory / "pki" / "ca.crt", site.forged),
        }
        return await _again(seconds, attack, site.endpoint, *files[of])

    return run


def _at_the_socket(attack: str, uid: int) -> Attack:
    async def run(site: Site, seconds: float) -> dict[str, int]:
        return await _again(seconds, attack, f"unix:{site.socket}", str(uid))

    return run


def _stranger(do: Callable[[Site, float], dict[str, int]]) -> Attack:
    async def run(site: Site, seconds: float) -> dict[str, int]:
        return await asyncio.to_thread(do, site, seconds)

    return run


async def _nobody(_: Site, seconds: float) -> dict[str, int]:
    await asyncio.sleep(seconds)
    return {}


ATTACKS: Sequence[tuple[str, str, Attack]] = (
    ("peace", "nobody attacks", _nobody),
    ("floods", "a node: triggers of 32 laterals, 100 breadcrumbs each, 400 names", _lie("floods")),
    ("names", "a node: each trigger under a new name", _lie("names")),
    ("silence", "a node: triggers, and no answer", _lie("silence")),
    ("claims", "a node: a part in traces of others, which never comes", _lie("claims")),
    ("abandons", "a node: gives up traces of others", _lie("abandons")),
    ("snapshots", "a node: news of snapshots that nobody ordered", _lie("snapshots")),
    ("chunks", "a node: slices without credit, with holes", _lie("chunks")),
    ("nonsense", "a node: bytes", _lie("nonsense")),
    ("unfinished", "a node: messages without an end, on many streams", _transport("unfinished")),
    ("endless", "a node: a message of a GiB", _transport("endless")),
    ("question", "a viewer: a question of a GiB", _transport("question", _READER)),
    ("questions", "a node: 200 questions without an end", _transport("questions")),
    ("reader", "a viewer: 200 questions without an end", _transport("questions", _READER)),
    ("bomb", "a node: a small message that is a large one", _transport("bomb")),
    ("silent", "a node: a thousand connections", _transport("silent")),
    ("calls", "a node: a hundred streams", _transport("calls")),
    ("crowd", "a node: a hundred thousand calls on two connections", _transport("crowd")),
    ("noise", "a node: calls that are refused", _transport("noise")),
    ("another", "a node: under another's name", _lie("another", "honest-3")),
    ("forged", "a certificate of another CA", _transport("endless", "forged")),
    ("stranger", "no certificate", _transport("endless", "nobody")),
    ("grpc", "clear text", _stranger(lambda site, s: strangers.over_grpc(site.endpoint, s))),
    ("http", "no token", _stranger(lambda site, s: strangers.over_http(site.query, s))),
    ("socket", "a user", _stranger(lambda site, _: strangers.at_the_socket(site.socket))),
    ("user", "a user: questions of a GiB", _at_the_socket("gibibytes", _STRANGER)),
    ("viewer", "a user who may read: the same", _at_the_socket("gibibytes", _VIEWER)),
    (
        "idle",
        "200 connections each with metrics and queries",
        _stranger(lambda site, s: strangers.idle([site.metrics, site.query], s)),
    ),
)

# What these got, they may not have.
_GET_NOTHING = ("grpc", "http", "socket")


class Run:
    """All attacks, one after the other."""

    def __init__(self, site: Site, fleet: Fleet, speed: float) -> None:
        self._site = site
        self._fleet = fleet
        self._speed = speed

    async def phase(self, name: str, what: str, attack: Attack, seconds: float) -> Phase:
        """One of them, beside honest requests."""
        phase = Phase(name, what)
        begun_s, first = time.monotonic(), len(self._fleet.written)
        beside = [
            asyncio.ensure_future(self._watch(phase)),
            asyncio.ensure_future(self._honest(phase, first)),
        ]
        try:
            phase.counts = dict(await attack(self._site, seconds))
            await asyncio.sleep(begun_s + seconds - time.monotonic())
        finally:
            for task in beside:
                task.cancel()
            ended = await asyncio.gather(*beside, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        phase.seconds = time.monotonic() - begun_s
        return phase

    async def _honest(self, phase: Phase, first: int) -> None:
        number = first
        while True:
            written = self._fleet.request()
            number += 1
            if number % _LEAKED_EACH:
                phase.requests.append(written)
            else:
                phase.leaked.append(written)
                with self._site.leaked.open("a") as file:
                    file.write(f"{written.trace.hex()}\n")
            await asyncio.sleep(1 / self._speed)

    async def _watch(self, phase: Phase) -> None:
        scraped_s = 0.0
        while True:
            memory_bytes = await asyncio.to_thread(self._site.memory_bytes)
            phase.memory_bytes = max(phase.memory_bytes, memory_bytes)
            if time.monotonic() - scraped_s >= 1.0:
                scraped_s = time.monotonic()
                phase.scrapes += 1
                phase.scrapes_failed += not await asyncio.to_thread(self._scrape)
            await asyncio.sleep(_SAMPLE_S)

    def _scrape(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._site.metrics}/metrics", timeout=10) as got:
                return b"verdicts_total" in got.read()
        except OSError:
            return False


def _failures(phases: Sequence[Phase], base_bytes: int) -> Iterator[str]:
    """What must not have been."""
    honest = Judged(
        sum(phase.honest.requests for phase in phases),
        sum(phase.honest.coherent for phase in phases),
    )
    if honest.share < _COHERENT_MIN:
        yield f"{honest.share:.2%} of the honest requests are coherent; wanted: {_COHERENT_MIN:.0%}"
    budget_bytes = base_bytes + _BUDGET_BYTES + _GRPC_BYTES
    for phase in phases:
        false = phase.honest.falsely_coherent + phase.known.falsely_coherent
        if false:
            yield f"{phase.name}: {false} are called coherent and are not"
        if phase.memory_bytes > budget_bytes:
            yield (
                f"{phase.name}: the coordinator took {phase.memory_bytes >> 20} MiB; its budget is"
                f" {budget_bytes >> 20} MiB"
            )
        if phase.name in _GET_NOTHING and (phase.counts.get("got") or not phase.counts["asked"]):
            yield f"{phase.name}: a stranger got {phase.counts['got']} answers of {phase.counts['asked']}"
        if phase.name == "another" and (
            phase.counts.get("Welcome") or phase.counts.get("slices answered")
        ):
            yield "another: a node was taken in under a name that is not its own"
        if phase.scrapes_failed:
            yield f"{phase.name}: {phase.scrapes_failed} of {phase.scrapes} scrapes failed"


def _print(phases: Sequence[Phase]) -> None:
    print(f"{'attack':<12} {'honest':>7} {'coherent':>9} {'false':>6} {'known':>12} {'MiB':>6}")
    for phase in phases:
        known = f"{phase.known.coherent}/{phase.known.requests}"
        print(
            f"{phase.name:<12} {phase.honest.requests:>7} {phase.honest.share:>9.2%}"
            f" {phase.honest.falsely_coherent + phase.known.falsely_coherent:>6} {known:>12}"
            f" {phase.memory_bytes >> 20:>6}  {phase.what}"
        )


async def _attacked(site: Site, seconds: float, speed: float, only: Sequence[str]) -> list[Phase]:
    chosen = [attack for attack in ATTACKS if not only or attack[0] in only]
    if len(chosen) < len(only):
        known = " ".join(name for name, _, _ in ATTACKS)
        raise SystemExit(f"ONLY={' '.join(only)}: allowed: {known}")
    said = (site.directory / "nodes.log").open("w")
    log = Log(lambda entry: print(entry.message, file=said, flush=True))
    phases = []
    async with Fleet.connected(site.names, site.endpoint, site.files, log) as fleet:
        run = Run(site, fleet, speed)
        for name, what, attack in chosen:
            sys.stderr.write(f"- {name}: {what}\n")
            phases.append(await run.phase(name, what, attack, seconds / len(chosen)))
        await asyncio.sleep(_JUDGED_S)  # by then all are judged that will be
    said.close()
    return phases


def main() -> int:
    """Attack, judge, print and write what came of it. Exit status 1: an attack did harm."""
    seconds = float(os.environ.get("DURATION") or 600)
    speed = float(os.environ.get("SPEED") or 20)
    only = os.environ.get("ONLY", "").split()
    with tempfile.TemporaryDirectory(prefix="backsight-peers-") as name:
        Path(name).chmod(0o755)
        site = Site(Path(name))
        with site.coordinator:
            base_bytes = site.memory_bytes()
            phases = asyncio.run(_attacked(site, seconds, speed, only))
            for phase in phases:
                phase.honest = judge(site.store, phase.requests)
                phase.known = judge(site.store, phase.leaked)
            words = site.coordinator.last_words()
    failures = list(_failures(phases, base_bytes))
    OUTPUT.mkdir(parents=True, exist_ok=True)
    result = {
        "passed": not failures,
        "failures": failures,
        "budget_bytes": base_bytes + _BUDGET_BYTES + _GRPC_BYTES,
        "idle_bytes": base_bytes,
        "this_process_bytes": resident_bytes(),
        "phases": [phase.result() for phase in phases],
    }
    (OUTPUT / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _print(phases)
    for failure in failures:
        print(f"FAILED: {failure}")
    if failures:
        print(words)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
