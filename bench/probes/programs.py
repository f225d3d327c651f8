# SPDX-License-Identifier: Apache-2.0
"""What each program costs by event: of a thread that is not attached, and of one in a trace.

The kernel takes the time of each run. Most of what it takes for the shortest ones is the clock itself: so
beside each program there is one on the same hook that does nothing, and what that takes
is subtracted. What the kernel does before and after any program is not in it: that
stands in ``nothing`` of speed.py.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bench.probes.lines import spread
from bench.probes.rig import ON, Measure, Rig, empty_programs
from bench.probes.run_counts import RunCount, counted, run_counts
from testbed.daemons import Cores
from testbed.faults import dropping, dropping_here, slow_device
from testbed.topology import Host, Network

_PORT = 7000

# How often a load does what it does, in a repetition: of what takes some microseconds; of
# what takes a thousand times longer than the program that sees it; of what takes
# milliseconds; and of chunks of which few are lost, since many of them go in one segment.
_OFTEN = 20_000
_SELDOM = 2_000
_MOST_SELDOM = 200
_MOST_OFTEN = 100_000

_STATES = ("not attached", "in a trace")

Fault = Callable[[Host], contextlib.AbstractContextManager[object]]


def _lossy(host: Host) -> contextlib.AbstractContextManager[object]:
    """So few that the sender hardly ever has to wait for its timer."""
    return dropping(host, _PORT, "numgen inc mod 20 == 0", device="lo")


def _refusing(host: Host) -> contextlib.AbstractContextManager[object]:
    """Of what is sent: a packet that has come in is nobody's any more on this device."""
    return dropping_here(host, _PORT, "tcp flags & (syn | fin) == 0 numgen inc mod 20 == 0")


def _queueing(host: Host) -> contextlib.AbstractContextManager[object]:
    """A queue that is short enough for no event of its own."""
    return slow_device(host, "2gbit", "128kb", device="lo")


def _well(_: Host) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class Load:
    """What makes programs run, and on which tracepoints those are."""

    name: str
    program: str
    arguments: tuple[str, ...]
    hooks: tuple[str, ...]
    times: int
    fault: Fault = _well
    states: tuple[str, ...] = _STATES
    """In which who does it may be."""


def _loads(file: str) -> Sequence[Load]:
    stream = ("stream", str(_PORT))
    return (
        Load("pipe", "ping_pong", (), ("sched_switch", "sched_waking"), _OFTEN),
        Load(
            "messages", "ping_pong", ("tcp",),
            ("tcp_sendmsg_locked", "sock_send_length", "tcp_probe", "tcp_rcv_space_adjust"),
            _OFTEN,
        ),
        Load("loss", "events", stream, ("tcp_retransmit_skb",), _MOST_OFTEN, _lossy),
        Load("drop", "events", stream, ("kfree_skb",), _MOST_OFTEN, _refusing),
        Load("tbf", "events", stream, ("qdisc_enqueue", "qdisc_dequeue"), _OFTEN, _queueing),
        Load(
            "reset", "events", ("reset",),
            ("inet_sock_set_state", "tcp_destroy_sock", "tcp_send_reset", "tcp_receive_reset"),
            _SELDOM,
        ),
        Load("write", "events", ("disk", file), ("block_bio_queue",), _SELDOM),
        Load("thread", "events", ("thread",), ("task_newtask", "sched_process_exit"), _SELDOM),
        # Who executes a program is a process of its own, which nobody watches yet.
        Load(
            "exec", "events", ("exec",), ("sched_process_exec",), _MOST_SELDOM,
            states=_STATES[:1],
        ),
        Load("signal", "events", ("signal",), ("signal_deliver",), _OFTEN),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one program, in one repetition."""

    runs: int
    run_ns: float
    empty_ns: float

    @property
    def net_ns(self) -> float:
        return self.run_ns - self.empty_ns


@dataclass(frozen=True, slots=True)
class _Counted:
    """The probes' programs, and beside each one that does nothing."""

    probes_pid: int
    empty_pid: int

    def during(self, happen: Callable[[], object]) -> Mapping[str, _Cost]:
        """By tracepoint: what those programs cost that ran meanwhile."""
        before = self._now()
        happen()
        after = self._now()
        costs = {}
        for hook, ends in after.items():
            probe, empty = (now - then for now, then in zip(ends, before[hook], strict=True))
            if probe.runs and empty.runs:
                costs[hook] = _Cost(probe.runs, probe.ns_a_run, empty.ns_a_run)
        return costs

    def _now(self) -> Mapping[str, tuple[RunCount, RunCount]]:
        probes, empty = run_counts(self.probes_pid), run_counts(self.empty_pid)
        return {hook: (probes[hook], empty[hook]) for hook in empty}


def programs(rig: Rig) -> None:
    """A line for each program and state."""
    with Network("cost") as network, rig.probes, counted():
        rig.configure(ON)
        probes_pid = rig.probes.daemon_pid()
        hooks = tuple(run_counts(probes_pid))
        with empty_programs(hooks) as empty_pid:
            host = network.host("load")
            measured: set[str] = set()
            both = _Counted(probes_pid, empty_pid)
            for load in _loads(str(rig.node.directory / "blocks")):
                with load.fault(host), _both_states(rig, load, host) as measures:
                    measured |= _tell(load, _repeated(rig, load, both, measures))
    for hook in sorted(set(hooks) - measured):
        print(f"  {hook:<21} did not run", flush=True)


@contextlib.contextmanager
def _both_states(rig: Rig, load: Load, host: Host) -> Iterator[Mapping[str, Measure]]:
    """The load's program twice, once attached."""
    core = Cores.choose().writer
    with (
        rig.happening(load.program, load.arguments, host, core) as plain,
        rig.happening(load.program, ("attached", *load.arguments), host, core) as attached,
    ):
        rig.probes.await_watched(1)
        yield dict(zip(_STATES, (plain, attached), strict=True))


def _repeated(
    rig: Rig, load: Load, both: _Counted, measures: Mapping[str, Measure]
) -> Mapping[tuple[str, str], list[_Cost]]:
    """By tracepoint and state: what was measured each time, each state first in half of them."""
    times = max(load.times // rig.parameters.events_divided_by, 1)
    costs: dict[tuple[str, str], list[_Cost]] = {}
    # What is first done once is not what is measured.
    for measure in measures.values():
        measure(max(times // 10, 1))
    for number in range(rig.parameters.pairs):
        for state in load.states if number % 2 else reversed(load.states):
            measured = both.during(partial(measures[state], times))
            for hook, cost in measured.items():
                costs.setdefault((hook, state), []).append(cost)
    return costs


def _tell(load: Load, costs: Mapping[tuple[str, str], list[_Cost]]) -> set[str]:
    """The tracepoints that it told of."""
    for hook in load.hooks:
        for state in load.states:
            measured = costs.get((hook, state))
            if measured is None:
                continue  # this kernel, or this loader, has another hook for it
            runs = statistics.median(cost.runs for cost in measured)
            empty_ns = statistics.median(cost.empty_ns for cost in measured)
            net_ns = spread([cost.net_ns for cost in measured], 0)
            print(
                f"  {hook:<21} {load.name:<9} {state:<13} {runs:8.0f} runs"
                f"   empty {empty_ns:4.0f} ns   net {net_ns} ns (min / median / max)",
                flush=True,
            )
    return {hook for hook in load.hooks for state in _STATES if (hook, state) in costs}
