# SPDX-License-Identifier: Apache-2.0
"""``make bench-control`` has a fleet report real traces, and sees what became of each.

No figure is judged here: a quick run on a busy machine says nothing about time.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bench.control import fleet
from bench.control.parameters import Parameters
from bench.control.plan import NODES_A_TRACE, SERVICES, SPANS_A_NODE, visits
from bench.control.run import run
from bench.trees import this_tree
from formats.spans import read_slice
from protocol.hashing import node_id
from testbed.daemons import Cores

NODES = ("alpha", "beta", "gamma")

OF_EACH_RUN = {
    "control_cpu_ms",
    "control_written_kb",
    "control_store_kb",
    "control_pss_mb",
    "control_peak_mb",
    "control_messages",
}
OF_A_RATE = {"control_p50_ms", "control_p99_ms", "control_max_ms"}


def test_a_quick_run_measures_all_and_loses_no_trace(
    build: Path, repository: Path, tmp_path: Path
) -> None:
    output = tmp_path / "control.jsonl"
    # What is written to a disk is measured, which the directories of tests may not be on.
    with tempfile.TemporaryDirectory(dir=build) as disk:
        subprocess.run(
            [sys.executable, "-m", "bench.control", "--output", output],
            cwd=repository,
            env={**os.environ, "QUICK": "1", "TMPDIR": disk},
            check=True,
            stdout=subprocess.DEVNULL,
        )
    lines: list[dict[str, Any]] = [json.loads(line) for line in output.read_text().splitlines()]
    found = {(line["metric"], line["params"].get("offered", "")) for line in lines}
    assert found == {
        *((metric, offered) for metric in OF_EACH_RUN for offered in ("10 in flight", "50/s")),
        *((metric, "50/s") for metric in OF_A_RATE),
        ("control_traces_per_s", "10 in flight"),
        ("control_core_traces_per_s", "10 in flight"),
        ("control_listen_s", ""),
    }
    assert [line["params"]["open_traces"] for line in lines if "open_traces" in line["params"]] == [
        0,
        Parameters.quick().open_traces,
    ]
    for line in lines:
        params = line["params"]
        assert params["lost"] == params.get("undurable", 0) == params.get("unindexed", 0) == 0
        assert params.get("fired", 1) > 0
        assert line["value"] > 0


@pytest.mark.slow
def test_traces_that_do_not_end_are_not_taken_for_coherent(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_DRAIN_S", 0.1)
    tree = this_tree()
    plan = fleet.make_plan(tree, tmp_path, 3, 1000, is_open=True)
    load = fleet.Load(rate_per_s=50, in_flight=0, warm_up_s=0, window_s=0.5)
    with tree.daemons():
        done = run(tmp_path, Cores.choose(), tree.program("fleet"), plan, load, linger_s=30)
    assert done.fired.durable == done.fired.fired > 0
    assert done.fired.released == done.coherent == 0


def test_a_request_visits_three_nodes_and_is_whole() -> None:
    written = visits(random.Random(1), NODES, 1_800_000_000_000_000_000)
    contents = [read_slice([visit.slice(1)]) for visit in written]
    assert len(contents) == NODES_A_TRACE
    for content, service in zip(contents, SERVICES, strict=True):
        assert content.whole
        assert not content.malformed
        assert len(content.spans) == SPANS_A_NODE
        assert {span.process.service for span in content.spans if span.process} == {service}
        assert not any(span.unfinished for span in content.spans)
        assert all(span.scope and span.resource and span.attributes for span in content.spans)
    # The first is fired: it knows the second, which knows both others.
    assert [[crumb.node_id for crumb in content.breadcrumbs] for content in contents] == [
        [node_id("beta")],
        [node_id("alpha"), node_id("gamma")],
        [node_id("beta"), node_id("alpha")],
    ]
    assert [visit.crumbs for visit in written] == [
        [crumb.node_id for crumb in content.breadcrumbs] for content in contents
    ]
    spans = {span.span_id: span for content in contents for span in content.spans}
    assert [span.name for span in spans.values() if span.parent_id not in spans] == [
        "POST /orders/<order>"
    ]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NODES", "30 many", "NODES=many: want a whole number from 3 on"),
        ("NODES", "2", "NODES=2: want a whole number from 3 on"),
        ("ROUNDS", "0", "ROUNDS=0: want a whole number from 1 on"),
        ("ONLY", "rate everything", "ONLY=rate everything: want some of saturation rate restart"),
    ],
)
def test_what_cannot_be_measured_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Parameters.of_environment({name: value})


def test_what_is_measured_is_chosen_by_the_environment() -> None:
    chosen = Parameters.of_environment({"NODES": "3 30", "WINDOW_S": "4", "ONLY": "restart"})
    assert (chosen.nodes, chosen.window_s, chosen.only) == ((3, 30), 4.0, ("restart",))
    assert chosen.rounds == Parameters().rounds
