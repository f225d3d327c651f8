# SPDX-License-Identifier: Apache-2.0
"""``make bench-probes`` measures all that it promises, by each loader.

No figure is judged here: a quick run on a busy machine says nothing about time.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from bench.probes.__main__ import PARTS
from bench.probes.rig import PING_PONGS
from testbed.topology import PYTHON

# Hooks that both loaders have on every kernel.
HOOKS = {
    "sched_switch", "sched_waking", "tcp_probe", "tcp_rcv_space_adjust", "tcp_retransmit_skb",
    "kfree_skb", "qdisc_enqueue", "qdisc_dequeue", "inet_sock_set_state", "tcp_send_reset",
    "tcp_receive_reset", "block_bio_queue", "task_newtask", "signal_deliver",
    "sched_process_exec",
}  # fmt: skip

# Nobody is in a trace in the program that he has just executed.
NEVER_IN_A_TRACE = {("sched_process_exec", "in a trace")}

# Those of a table of threads and sockets, which the kernel does not empty by itself.
BCC_HOOKS = {"sched_process_exit", "tcp_destroy_sock"}

KEPT = re.compile(r"^  (.+?) +\d+ +\d+ (?:ns|/s)   kept [\d.]+ \([\d.]+ to [\d.]+; all ", re.M)
COST = re.compile(
    r"^  (\w+) +\w+ +(not attached|in a trace) +(\d+) runs   empty +\d+ ns"
    r"   net -?\d+ / -?\d+ / -?\d+ ns",
    re.M,
)
SPREAD = re.compile(r"^  (.+?) +[\d.]+ / [\d.]+ / [\d.]+ ", re.M)


def bench(repository: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-m", "bench.probes"],
        cwd=repository,
        env={**os.environ, "QUICK": "1", "ONLY": "", "LOADER": "core", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"LOADER": "other"}, "LOADER: there is no other; allowed: core bcc\n"),
        ({"ONLY": "cpu other"}, f"ONLY: there is no other; allowed: {' '.join(PARTS)}\n"),
        ({"PAIRS": "0"}, "PAIRS: not a number of measurements: 0\n"),
        ({"PAIRS": "many"}, "PAIRS: not a number of measurements: many\n"),
    ],
)
def test_what_cannot_be_measured_is_told(
    repository: Path, environment: dict[str, str], reason: str
) -> None:
    done = bench(repository, **environment)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", reason)


@pytest.mark.root
@pytest.mark.bpf
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("by", ["core", "bcc"])
def test_all_parts_print_what_they_measured(repository: Path, build: Path, by: str) -> None:
    assert (build / "bench/events").exists()
    done = bench(repository, LOADER=by)
    assert done.returncode == 0, done.stderr
    head, *rest = re.split(
        rf"^({'|'.join(PARTS)}): .*\n", done.stdout[done.stdout.index("loader: ") :], flags=re.M
    )
    parts = dict(zip(rest[::2], rest[1::2], strict=True))
    assert head.startswith(f"loader: {by}; repetitions: 1;")
    assert list(parts) == list(PARTS)
    assert [KEPT.findall(parts[name]) for name in ("switches", "http", "nothing", "bypass")] == [
        list(PING_PONGS), ["requests a second"], *2 * [["not attached, by pipes"]],
    ]  # fmt: skip
    assert re.findall(r"^  (\w.*)$", parts["cpu"], re.M) == list(PING_PONGS)
    assert re.findall(r"^    (\w+) +\d+ ns", parts["cpu"], re.M) == ["off", "on", "bypass"] * 4
    costs = {(hook, state): int(runs) for hook, state, runs in COST.findall(parts["programs"])}
    hooks = {hook for hook, _ in costs}
    assert hooks >= (HOOKS | BCC_HOOKS if by == "bcc" else HOOKS)
    assert (
        set(costs)
        == {(hook, state) for hook in hooks for state in ("not attached", "in a trace")}
        - NEVER_IN_A_TRACE
    )
    assert min(costs.values()) > 0
    assert "did not run" not in parts["programs"]
    assert len(SPREAD.findall(parts["footprint"])) == 4
    assert parts["pick_up"].count("triggers within") == 3
    assert len(SPREAD.findall(parts["moves"])) == 2
