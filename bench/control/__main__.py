# SPDX-License-Identifier: Apache-2.0
"""``make bench-control``: what a coordinator costs, and how fast it is, under a fleet of nodes.

docs/benchmarks.md says how and what. With BASE=COMMIT, that one too, in turn. QUICK=1: a little of
everything, to see that it works. ONLY: some of saturation, rate, restart. NODES ("30 300 1000"),
RATE_PER_S, IN_FLIGHT, WARM_UP_S, WINDOW_S, LINGER_S, TRACES_MAX, OPEN_TRACES, ROUNDS:
bench/control/parameters.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import compare, machine, report
from bench.control.fleet import Load, Plan, make_plan
from bench.control.parameters import Parameters
from bench.control.restart import restart
from bench.control.run import Run, allow_open_files, run
from bench.trees import Tree, base_tree, this_tree
from testbed.daemons import Cores

_OUTPUT = Path("build/bench/control.jsonl")

# From there on the fleet may be what was measured.
_FLEET_SHARE_MAX = 0.7
_LATE_MAX_MS = 20.0

_KB = 1000
_MB = 1_000_000


def _say(text: str) -> None:
    print(text, flush=True)


@dataclass(slots=True)
class Bench:
    """What measures a tree. ``lost``: traces that did not end coherent and found by searches."""

    tree: Tree
    program: Path  # of this tree, whichever is measured
    cores: Cores
    parameters: Parameters
    directory: Path
    lost: dict[str, int] = field(default_factory=dict)
    _plans: dict[tuple[int, bool], Plan] = field(default_factory=dict)

    def plan(self, nodes: int, traces: int, *, is_open: bool = False) -> Plan:
        """Made once."""
        key = (nodes, is_open)
        if key not in self._plans:
            self._plans[key] = make_plan(self.tree, self.directory, nodes, traces, is_open=is_open)
        return self._plans[key]

    def run(self, nodes: int, load: Load) -> Run:
        """A coordinator of its own, that inherits nothing."""
        plan = self.plan(nodes, self.parameters.traces_max)
        with tempfile.TemporaryDirectory(dir=self.directory) as directory:
            done = run(
                Path(directory), self.cores, self.program, plan, load, self.parameters.linger_s
            )
        fired = done.fired
        if fired.fired == self.parameters.traces_max:
            raise RuntimeError(
                f"all {fired.fired} traces of the plan were fired before the window was over; set"
                " TRACES_MAX to more"
            )
        if fired.fleet_cpu_share > _FLEET_SHARE_MAX or fired.late_max_ms > _LATE_MAX_MS:
            _say(
                f"  the fleet itself may be the bottleneck: {fired.fleet_cpu_share:.0%} of its core,"
                f" late by {fired.late_max_ms:.0f} ms at most"
            )
        self.lost[f"{nodes} nodes, {load.name}"] = fired.fired - min(done.coherent, done.indexed)
        return done


def _params(nodes: int, load: Load, done: Run) -> dict[str, report.Param]:
    fired = done.fired
    return {
        "nodes": nodes,
        "offered": load.name,
        "fired": fired.fired,
        "lost": fired.fired - done.coherent,
        "undurable": fired.fired - fired.durable,
        "unindexed": fired.fired - done.indexed,
        "core_share": report.rounded(done.core_share),
        "fleet_share": fired.fleet_cpu_share,
        "late_max_ms": fired.late_max_ms,
        "load": report.rounded(machine.load()),
    }


def _costs(done: Run, params: Mapping[str, report.Param]) -> Iterator[report.Result]:
    fired = done.fired
    count = max(1, fired.fired)
    for metric, unit, value in (
        ("control_cpu_ms", "ms a trace", done.cpu_ms),
        ("control_written_kb", "kB a trace", done.written_bytes / _KB),
        ("control_store_kb", "kB a trace", done.store_bytes / _KB),
        ("control_pss_mb", "MB", done.pss_bytes / _MB),
        ("control_peak_mb", "MB", done.peak_bytes / _MB),
        ("control_messages", "a trace", (fired.sent + fired.received) / count),
    ):
        yield report.Result.of(metric, unit, [value], params)


def _saturation(bench: Bench, nodes: int) -> Iterator[report.Result]:
    given = bench.parameters
    load = Load(0, given.in_flight, given.warm_up_s, given.window_s)
    done = bench.run(nodes, load)
    params = _params(nodes, load, done)
    yield report.Result.of("control_traces_per_s", "traces/s", [done.traces_per_s], params)
    of_core = done.traces_per_s / max(done.core_share, 0.001)
    yield report.Result.of("control_core_traces_per_s", "traces/s", [of_core], params)
    yield from _costs(done, params)


def _rate(bench: Bench, nodes: int) -> Iterator[report.Result]:
    given = bench.parameters
    load = Load(given.rate_per_s, 0, given.warm_up_s, given.window_s)
    done = bench.run(nodes, load)
    params = _params(nodes, load, done)
    for metric, value in (
        ("control_p50_ms", done.fired.p50_ms),
        ("control_p99_ms", done.fired.p99_ms),
        ("control_max_ms", done.fired.max_ms),
    ):
        yield report.Result.of(metric, "ms", [value], params)
    yield from _costs(done, params)


def _restart(bench: Bench, nodes: int) -> Iterator[report.Result]:
    count = bench.parameters.open_traces
    plan = bench.plan(nodes, count, is_open=True)
    with tempfile.TemporaryDirectory(dir=bench.directory) as directory:
        done = restart(Path(directory), bench.cores, bench.program, plan, count)
    bench.lost[f"restart of {nodes} nodes"] = lost = count - done.open_traces
    if lost:
        _say(f"  verdicts before it was killed {dict(done.before)}, after it {dict(done.after)}")
    for traces, missed, value in (
        (0, 0, done.empty_s),
        (count, lost, done.listen_s),
    ):
        params = {"nodes": nodes, "open_traces": traces, "lost": missed}
        yield report.Result.of("control_listen_s", "s", [value], params)


_PARTS: dict[str, Callable[[Bench, int], Iterator[report.Result]]] = {
    "saturation": _saturation,
    "rate": _rate,
    "restart": _restart,
}


def _turns(parameters: Parameters) -> Iterator[tuple[str, int]]:
    for part in parameters.only:
        # How many nodes there are makes no difference to a restart.
        for nodes in parameters.nodes[:1] if part == "restart" else parameters.nodes:
            yield part, nodes


def _measure(bench: Bench, part: str, nodes: int) -> list[report.Result]:
    results = []
    with bench.tree.daemons(), machine.stolen_told():
        for result in _PARTS[part](bench, nodes):
            _say(f"  {result.metric}: {result.value:g} {result.unit}")
            results.append(result)
        _say(f"  {' '.join(f'{name}={value}' for name, value in results[-1].params.items())}")
    return results


def _in_turn(benches: Mapping[str, Bench], parameters: Parameters, output: Path) -> None:
    rounds: dict[str, list[list[report.Result]]] = {label: [] for label in benches}
    table = ""
    for number in range(parameters.rounds):
        for results in rounds.values():
            results.append([])
        for part, nodes in _turns(parameters):
            # Another is first each time: what one leaves to the machine is the next one's.
            for label in sorted(benches, reverse=number % 2 == 1):
                _say(
                    f"\n{part}, {nodes} nodes, round {number + 1} of {parameters.rounds}, {label}:"
                )
                rounds[label][-1] += _measure(benches[label], part, nodes)
        # Each time, since all rounds take long.
        table = _written(rounds, output)
    _say("\n" + table)
    _say(f"written to {output.with_suffix('.*')}")


def _written(rounds: Mapping[str, list[list[report.Result]]], output: Path) -> str:
    """Write what there is; the table of it."""
    for results, path in zip(rounds.values(), _outputs(output, len(rounds)), strict=True):
        lines = [result.line() + "\n" for result in compare.merged(results)]
        path.write_text("".join(lines))
    table = _table(rounds)
    output.with_suffix(".md").write_text(table)
    return table


def _table(rounds: Mapping[str, compare.Rounds]) -> str:
    *before, after = rounds.values()
    if not before:
        return report.table(compare.merged(after))
    return compare.table(compare.compared(before[0], after), next(iter(rounds)), "now")


def _outputs(output: Path, count: int) -> Sequence[Path]:
    """Of the base, if there is one, and of this tree."""
    return [output.with_name(f"{output.stem}-base.jsonl"), output][-count:]


def main(environment: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Measure and print it all. 1 if any trace of this tree was lost."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="bench.control",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=_OUTPUT)
    output: Path = parser.parse_args(arguments).output
    try:
        parameters = Parameters.of_environment(environment)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    allow_open_files()
    tree = this_tree()
    base = base_tree(parameters.base) if parameters.base else None
    about = report.About(tree.commit, base.commit if base else "", machine.description())
    for name, value in about.machine.items():
        _say(f"{name:12} {value}")
    cores = Cores.choose()
    _say(f"{'commit':12} {tree.commit}" + (f", beside {base.commit}" if base else ""))
    _say(f"{'pinned':12} coordinator to core {cores.daemons}, fleet to core {cores.writer}")
    _say(f"{'parameters':12} {parameters}")
    _say(f"{'load':12} {machine.load():.2f}")
    output.parent.mkdir(parents=True, exist_ok=True)
    about.write(output)
    with tempfile.TemporaryDirectory(prefix="backsight-bench-") as directory:
        benches = {
            label: Bench(one, tree.program("fleet"), cores, parameters, Path(directory))
            for label, one in ((base.commit if base else "", base), ("this tree", tree))
            if one is not None
        }
        _in_turn(benches, parameters, output)
    lost = {what: count for what, count in benches["this tree"].lost.items() if count}
    for what, count in lost.items():
        sys.stderr.write(f"{what}: {count} traces did not end as they should\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(os.environ, sys.argv[1:]))
