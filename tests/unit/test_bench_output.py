# SPDX-License-Identifier: Apache-2.0
"""bench/run measures everything that it promises, in the form in which others read it.

No figure is judged here: a quick run on a busy machine says nothing about time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# A little of every benchmark takes a minute.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Line = dict[str, Any]

KEYS = ["metric", "value", "min", "max", "unit", "params"]
SIZES = (8, 32, 128, 512, 2048)


@pytest.fixture(scope="module")
def output(build: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "native.jsonl"
    with printed(path).open("w") as stdout:
        subprocess.run(
            [repository / "bench/run", "--quick", "--output", path],
            check=True,
            stdout=stdout,
        )
    return path


def printed(output: Path) -> Path:
    return output.with_suffix(".txt")


@pytest.fixture(scope="module")
def lines(output: Path) -> list[Line]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def of(lines: list[Line], metric: str) -> list[Line]:
    return [line for line in lines if line["metric"] == metric]


def params(lines: list[Line], metric: str, *names: str) -> set[tuple[Any, ...]]:
    found = [tuple(line["params"][name] for name in names) for line in of(lines, metric)]
    assert max(Counter(found).values(), default=0) <= 1
    return set(found)


def test_each_line_is_a_result(lines: list[Line]) -> None:
    for line in lines:
        assert list(line) == KEYS
        assert 0 <= line["min"] <= line["value"] <= line["max"], line
        # An idle daemon may well do nothing, and nothing be lost; nothing else costs nothing.
        idle = {"idle_cpu_ms_per_s", "idle_clients_cpu", "http_cpu_ns", "starved_lost_share"}
        assert line["max"] > 0 or line["metric"] in idle, line
        assert line["unit"] in {"ns", "ms", "ms/s", "ratio", "% of a core"}
        assert line["params"]["load"] >= 0


def test_each_metric_says_how_much_time_others_of_the_host_had(output: Path) -> None:
    metrics = re.split(r"^(\w+): ", printed(output).read_text(), flags=re.MULTILINE)
    stolen = {
        name: re.findall(r"^  stolen: ([\d.]+)% of", text, flags=re.MULTILINE)
        for name, text in zip(metrics[1::2], metrics[2::2], strict=True)
    }
    assert {"idle", "pickup", "trigger_to_trace"} <= set(stolen)
    for shares in stolen.values():
        (share,) = shares
        assert 0 <= float(share) <= 100


def test_tracepoints_and_copies_are_measured_in_all_sizes(lines: list[Line]) -> None:
    sizes = {(size, threads) for size in SIZES for threads in (1, 2)}
    assert params(lines, "memcpy_ns", "bytes", "threads") == sizes
    assert params(lines, "tracepoint_ns", "bytes", "threads", "timestamp") == {
        (*size, timestamp) for size in sizes for timestamp in (False, True)
    }
    for line in of(lines, "tracepoint_ns"):
        assert 0 <= line["params"]["lost_share"] <= 1


def test_begin_and_end_are_measured_in_many_threads(lines: list[Line]) -> None:
    assert params(lines, "begin_end_ns", "threads", "records") == {
        (threads, records) for threads in (1, 2, 4, 8) for records in (0, 1)
    }
    for line in of(lines, "begin_end_ns"):
        assert 0 <= line["params"]["null_begins"] <= line["params"]["begins"]
        # Nothing is written, so nothing is missing.
        assert line["params"]["records"] or not line["params"]["null_begins"]


def test_traces_are_measured_of_which_a_share_is_recorded(lines: list[Line]) -> None:
    found = {line["params"]["percentage"]: line["params"] for line in of(lines, "chosen_ns")}
    assert list(found) == [1, 10, 50, 100]
    for percentage, params in found.items():
        assert 0.8 * percentage < 100 * params["recorded_share"] < 1.2 * percentage


def test_traces_are_measured_unpaced_and_at_a_rate_without_loss(lines: list[Line]) -> None:
    assert {(1, False), (2, False)} <= params(lines, "trace_ns", "threads", "paced")
    for line in of(lines, "trace_ns"):
        assert 0 <= line["params"]["lost_share"] <= 1
        if line["params"]["paced"]:
            assert line["params"]["lost_share"] < 0.01
            assert line["params"]["traces_per_s"] > 0


def test_the_rest_of_one_node_is_measured(lines: list[Line]) -> None:
    assert params(lines, "interleaved_ns", "bytes", "handles") == {(32, 8), (128, 8)}
    assert params(lines, "pickup_ms", "times") == params(lines, "wake_ms", "times") == {(5,)}
    assert params(lines, "idle_cpu_ms_per_s", "clients") == {(1,)}


def test_many_processes_that_do_nothing_are_measured(lines: list[Line]) -> None:
    loads = {(200, 0, 0), (200, 32, 0), (200, 32, 1)}
    assert params(lines, "idle_clients_cpu", "clients", "threads", "triggers_per_s") == loads


def test_bursts_of_both_sizes_are_measured(lines: list[Line]) -> None:
    assert params(lines, "trace_burst_ns", "burst", "threads") == {
        (burst, threads) for burst in (600, 100_000) for threads in (1, 2)
    }
    for line in of(lines, "trace_burst_ns"):
        of_burst = line["params"]
        assert of_burst["bursts"] > 0
        assert 0 <= of_burst["lost"] <= of_burst["bursts"] * of_burst["burst"] * of_burst["threads"]


def test_a_minute_without_a_pause_and_the_nodes_cost_by_rate_are_measured(
    lines: list[Line],
) -> None:
    assert params(lines, "sustained_ns", "rate_per_s") == {(0,), (10_000,)}
    for line in of(lines, "sustained_ns"):
        assert 0 <= line["params"]["lost"] <= line["params"]["traces"]
    assert params(lines, "node_ns", "rate_per_s") == {(10_000,), (100_000,)}


def test_what_a_starved_node_loses_is_measured(lines: list[Line]) -> None:
    (starved,) = of(lines, "starved_lost_share")
    of_windows = starved["params"]
    assert of_windows["windows"] == 2
    assert 0 <= of_windows["lost"] <= of_windows["traces"]


def test_what_a_full_pool_holds_is_measured(lines: list[Line]) -> None:
    sizes = {(100,), (1024,)}
    assert params(lines, "horizon_ratio", "trace_bytes") == sizes
    assert params(lines, "payload_share", "trace_bytes") == sizes
    for line in of(lines, "horizon_ratio"):
        held, size = line["params"]["traces_held"], line["params"]["trace_bytes"]
        assert 0 < held * size < line["params"]["pool_bytes"]


def test_lookups_and_restarts_are_measured(lines: list[Line]) -> None:
    assert params(lines, "lookup_ms", "trace_bytes", "traces") == {
        (size, traces) for size in (100, 1024) for traces in (1, 100)
    }
    (restart,) = of(lines, "restart_cpu_ms")
    assert restart["params"]["times"] == 2


def test_what_triggers_cost_is_measured(lines: list[Line]) -> None:
    (triggers,) = of(lines, "trigger_cpu_share")
    of_line = triggers["params"]
    assert of_line["triggers"] == of_line["rate_per_s"] == 1000
    assert 0 < of_line["passes"] <= 1000
    assert 0 < of_line["found_after_ms"] <= of_line["found_after_most_ms"]


def test_services_are_measured_traced_and_not(lines: list[Line]) -> None:
    kinds = {(size, items) for size in (1024, 8192) for items in (2, 1000)}
    for metric in ("http_throughput_ratio", "http_cpu_ratio"):
        assert params(lines, metric, "record_bytes", "items") == kinds
        for line in of(lines, metric):
            of_line = line["params"]
            assert of_line["pairs"] == 2
            assert line["min"] == of_line["low"] <= line["value"] <= of_line["high"] == line["max"]
    for line in of(lines, "http_throughput_ratio"):
        of_line = line["params"]
        # Two items a request are more requests than a starved node may keep up with.
        assert of_line["collected"] == "coherent" or of_line["items"] == 2
        assert of_line["runs"] > 0
        assert of_line["lost"] >= 0
        assert 0 <= of_line["idle_share"] + of_line["stolen_share"] + of_line["others_share"] <= 1
    parts = ("front", "back", "node", "coordinator", "wrk")
    assert params(lines, "http_cpu_ns", "record_bytes", "items", "part", "traced") == {
        (*kind, part, traced) for kind in kinds for part in parts for traced in (False, True)
    }


@pytest.mark.root
def test_collection_over_nodes_is_measured(lines: list[Line]) -> None:
    assert params(lines, "trigger_to_trace_ms", "nodes", "fired_on", "until") == {
        (2, fired_on, until) for fired_on in ("first", "last") for until in ("durable", "verdict")
    }
    for line in of(lines, "trigger_to_trace_ms"):
        assert line["params"]["coherent"] == line["params"]["traces"]


def test_without_root_the_cluster_is_left_out(lines: list[Line]) -> None:
    assert (os.geteuid() == 0) == bool(of(lines, "trigger_to_trace_ms"))


def test_the_table_has_a_row_a_line(repository: Path, output: Path, lines: list[Line]) -> None:
    done = subprocess.run(
        [repository / "bench/run", "--table", "--output", output],
        check=True,
        capture_output=True,
        text=True,
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    metrics = len({line["metric"] for line in lines})
    assert len(rows) == len(lines) + 2 * metrics
    assert done.stdout.count("### ") == metrics
