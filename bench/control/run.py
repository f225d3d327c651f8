# SPDX-License-Identifier: Apache-2.0
"""One coordinator under one load: what it costs, how fast it is, and whether all it says is true."""

from __future__ import annotations

import contextlib
import resource
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import backsight_pb2 as pb
import grpc
from backsight_pb2_grpc import CoordinatorStub

from bench.control.fleet import Fired, Fleet, Load, Plan
from bench.control.plan import NODES_A_TRACE, SERVICES, SPANS_A_NODE
from bench.costs import Costs, family
from bench.trees import started_root
from testbed.daemons import Cores, coordinator_on, this_machine
from testbed.topology import Coordinator

# A coordinator that uses less of its core, and waits no longer for it, has nothing to do but
# what idle nodes cause.
_IDLE_SHARE = 0.05
_IDLE_WINDOW_S = 0.5

# What makes the index rests between two batches, so that it leaves the core to others.
_RESTS_S = 3.0
_IDLE_DEADLINE_S = 300.0

# A coordinator that does nothing for so long, though the machine may be busy, is done.
_STUCK_S = 10.0

_ANSWER_DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True)
class Run:
    """One coordinator under one load.

    ``coherent``: traces with a coherent verdict over all spans of all nodes; ``indexed``: that a
    search finds. ``cpu_ms``, ``written_bytes``: of all that was fired, until nothing was left to
    do. ``store_bytes``: its files, after it ended. ``core_share``: of its core, in the window.
    """

    fired: Fired
    coherent: int
    indexed: int
    cpu_ms: float
    core_share: float
    pss_bytes: int
    peak_bytes: int
    written_bytes: int
    store_bytes: int

    @property
    def traces_per_s(self) -> float:
        return self.fired.window_durable / self.fired.window_s


def allow_open_files() -> None:
    """For us and what we start: two connections a node. 181b7fb's coordinator asks for no more itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _wanted_ns(pid: int) -> int:
    """For how long its threads ran, or could have: others may use the core too."""
    total = 0
    for one in family(pid):
        for stat in Path(f"/proc/{one}/task").glob("*/schedstat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended
                ran, waited, _ = stat.read_text().split()
                total += int(ran) + int(waited)
    return total


def await_idle(pid: int, for_s: float = _IDLE_WINDOW_S) -> None:
    """Until a coordinator has had nothing to do for so long."""
    deadline_s = time.monotonic() + _IDLE_DEADLINE_S
    idle_s = 0.0
    while idle_s < for_s:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the coordinator is busy for {_IDLE_DEADLINE_S:g} s without load")
        before_ns, began_ns = _wanted_ns(pid), time.monotonic_ns()
        time.sleep(_IDLE_WINDOW_S)
        took_ns = time.monotonic_ns() - began_ns
        is_idle = _wanted_ns(pid) - before_ns < _IDLE_SHARE * took_ns
        idle_s = idle_s + took_ns / 1e9 if is_idle else 0.0


def verdicts(endpoint: str, service: str = "") -> Counter[tuple[str, bool]]:
    """All stored traces by their verdict, and whether it is over all nodes and spans."""
    question = pb.ListTracesRequest(service=service)
    with grpc.insecure_channel(endpoint) as channel:
        return Counter(
            (one.verdict.kind, (len(one.nodes), one.span_count) == (
                NODES_A_TRACE, NODES_A_TRACE * SPANS_A_NODE))
            for one in CoordinatorStub(channel).ListTraces(question, timeout=_ANSWER_DEADLINE_S)
        )  # fmt: skip


def _await_indexed(pid: int, endpoint: str, wanted: int) -> Counter[tuple[str, bool]]:
    """What a search finds in the end: what makes the index may be kept from the core by others for long."""
    while True:
        indexed = verdicts(endpoint, SERVICES[-1])
        if indexed.total() >= wanted or not _is_busy(pid):
            return indexed


def _is_busy(pid: int) -> bool:
    """Whether a coordinator still does something, without being asked."""
    before_ns = Costs.of(pid).cpu_ns
    deadline_s = time.monotonic() + _STUCK_S
    while time.monotonic() < deadline_s:
        time.sleep(_IDLE_WINDOW_S)
        if Costs.of(pid).cpu_ns - before_ns > _IDLE_SHARE * 1e9:
            return True
    return False


def store_bytes(directory: Path) -> int:
    """All files of a store, and beside it."""
    return sum(path.stat().st_size for path in directory.glob("traces.*"))


def coordinator(directory: Path, cores: Cores, **config: object) -> Coordinator:
    """One that is to be started on the daemons' core, of the tree whose daemons are started now."""
    daemon = coordinator_on(this_machine(cores.daemons), directory, config)
    # Before it asked for roles there was nothing to be said of them.
    settings = started_root() / "runtime/settings/coordinator.py"
    if not settings.exists() or "\n    access:" not in settings.read_text():
        daemon.config = {key: said for key, said in daemon.config.items() if key != "access"}
    return daemon


def run(
    directory: Path, cores: Cores, program: Path, plan: Plan, load: Load, linger_s: float
) -> Run:
    """Start a coordinator, have the fleet fire, and look at what became of it."""
    with coordinator(directory, cores, linger_s=linger_s) as daemon:
        pid = daemon.daemon_pid()
        with Fleet(program, cores.writer, plan, port_of(daemon), load) as fleet:
            await_idle(pid)
            start = Costs.of(pid)
            moments = fleet.fire()
            next(moments)
            begin, began_ns = Costs.of(pid).cpu_ns, time.monotonic_ns()
            next(moments)
            end, ended_ns = Costs.of(pid), time.monotonic_ns()
            fired = next(moments)
            assert fired is not None
            await_idle(pid, _RESTS_S)
            done = Costs.of(pid)
            found = verdicts(daemon.endpoint)
            indexed = _await_indexed(pid, daemon.endpoint, found.total())
    count = max(1, fired.fired)
    return Run(
        fired=fired,
        coherent=found["coherent", True],
        indexed=indexed.total(),
        cpu_ms=(done.cpu_ns - start.cpu_ns) / 1e6 / count,
        core_share=(end.cpu_ns - begin) / (ended_ns - began_ns),
        pss_bytes=end.pss_bytes,
        peak_bytes=done.peak_bytes,
        written_bytes=(done.written_bytes - start.written_bytes) // count,
        store_bytes=store_bytes(directory) // count,
    )


def port_of(daemon: Coordinator) -> int:
    """Where it listens."""
    return int(daemon.endpoint.rpartition(":")[2])
