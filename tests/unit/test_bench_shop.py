# SPDX-License-Identifier: Apache-2.0
"""``make bench-shop``: what it makes of what it reads, and that it runs.

No figure of a run is judged here: a quick one on a busy machine says nothing about cost.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench.costs import Costs
from bench.report import Result
from bench.shop.backend import Arrival, arrivals, read
from bench.shop.collectors import accepted_spans, gateway_config
from bench.shop.parameters import Parameters
from bench.shop.reckon import (
    Ended,
    Idle,
    Reading,
    Turn,
    Window,
    delays_ms,
    figures,
    kept_orders,
    median_and_most,
    whole,
)
from bench.shop.tables import table

S = 10**9
MS = 10**6


def costs(cpu_ms: int, pss_mb: int, shared_mb: int) -> Costs:
    mb = 1_000_000
    return Costs(cpu_ms * MS, 0, pss_mb * mb, shared_mb * mb, 0)


def test_a_turn_is_net_of_what_idle_daemons_take() -> None:
    before = Reading.of({"node": costs(1000, 30, 5), "hub": costs(500, 40, 0)}, 10_000)
    after = Reading.of({"node": costs(1900, 31, 6), "hub": costs(1100, 42, 0)}, 70_000)
    idle = Idle({"node": 5.0, "hub": 2.0}, 100.0)
    window = Window.between(before, after, 60.0)
    turn = Turn(window, load_s=30.0, requests=1000, spans=10_000, kept=20, end=after)
    # 900 ms less 300 that it takes in a minute without load, and 600 less 120.
    assert figures(turn, idle, "hub") == {
        "cpu_ms_per_1000_spans": 108.0,
        "gross_cpu_ms_per_1000_spans": 150.0,
        "central_cpu_ms_per_1000_spans": 48.0,
        "pss_mb": 73.0,
        "pss_without_shared_mb": 67.0,
        "central_pss_mb": 42.0,
        # 60,000 bytes less those of 30 s without load.
        "bytes_per_request": 57.0,
        "gross_bytes_per_request": 60.0,
        "central_cpu_ms_per_kept": 24.0,
        "kept": 20,
        "requests": 1000,
        "spans_per_request": 10.0,
    }


def test_idle_is_the_median_by_daemon() -> None:
    windows = [
        Window(10.0, {"node": 50.0, "hub": 90.0}, 1000.0),
        Window(20.0, {"node": 80.0, "hub": 20.0}, 8000.0),
        Window(10.0, {"node": 60.0, "hub": 30.0}, 2000.0),
    ]
    assert Idle.of(windows) == Idle({"node": 5.0, "hub": 3.0}, 200.0)
    with pytest.raises(ValueError, match="no window"):
        Idle.of([])


def test_a_daemon_that_is_missing_in_a_reading_is_no_saving() -> None:
    both = Reading.of({"node": costs(1, 1, 0), "hub": costs(1, 1, 0)}, 0)
    one = Reading.of({"hub": costs(1, 1, 0)}, 0)
    with pytest.raises(ValueError, match="node"):
        Window.between(both, one, 1.0)


def test_costs_are_of_all_processes_below() -> None:
    with subprocess.Popen(
        ["sh", "-c", "cat; exit"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(b"x")
        shell.stdin.flush()
        shell.stdout.read(1)  # so cat is there
        alone, with_child = Costs.alone(shell.pid), Costs.of(shell.pid)
        shell.stdin.close()
    assert with_child.pss_bytes > alone.pss_bytes > 0
    assert alone.shared_bytes == 0


def request(*spans: dict[str, Any]) -> ExportTraceServiceRequest:
    made = ExportTraceServiceRequest()
    scope = made.resource_spans.add().scope_spans.add()
    for span in spans:
        one = scope.spans.add(
            trace_id=bytes([span["trace"]]) * 16,
            span_id=bytes(8),
            parent_span_id=span.get("parent", b""),
            end_time_unix_nano=span["end_ns"],
        )
        if path := span.get("path"):
            one.attributes.add(key="url.path").value.string_value = path
    return made


def test_arrivals_are_told_by_trace_with_the_requests_own_span(tmp_path: Path) -> None:
    came = arrivals(
        request(
            {"trace": 1, "parent": b"12345678", "end_ns": 3 * S},
            {"trace": 1, "end_ns": 4 * S, "path": "/orders/7/invoice"},
            {"trace": 2, "parent": b"12345678", "end_ns": 9 * S},
        ),
        5 * S,
    )
    assert list(came) == [
        Arrival("01" * 16, 5 * S, 2, "/orders/7/invoice", 4 * S),
        Arrival("02" * 16, 5 * S, 1, "", 0),
    ]
    file = tmp_path / "arrivals"
    assert read(file) == []
    line = '{"trace": "a", "arrived_ns": 2, "spans": 1, "path": "", "end_ns": 1}\n'
    file.write_text(line + line[:10])  # of one that is still being written nothing
    assert read(file) == [Arrival("a", 2, 1, "", 1)]


def test_a_trace_is_there_when_its_last_part_is() -> None:
    parts = [
        Arrival("a", 12 * S, 9, "/orders/7", 2 * S),
        Arrival("b", 11 * S, 4),
        Arrival("a", 14 * S, 3),
    ]
    assert list(whole(parts)) == [Ended("a", 2 * S, 14 * S)]
    assert kept_orders([*parts, Arrival("c", 1, 1, "/health", 1)]) == {7}


def test_delays_are_of_requests_that_ended_in_the_load() -> None:
    ended = [Ended("a", 10 * S, 13 * S), Ended("b", 12 * S, 13 * S), Ended("c", 20 * S, 21 * S)]
    assert delays_ms(ended, 10 * S, 20 * S) == [1000.0, 3000.0]
    assert median_and_most([[1.0, 2.0, 30.0], [4.0]]) == {
        "available_p50_ms": [2.0, 4.0],
        "available_max_ms": [30.0, 4.0],
    }
    assert median_and_most([]) == {}


def test_accepted_spans_are_those_of_all_receivers() -> None:
    page = """\
# TYPE otelcol_receiver_accepted_spans_total counter
otelcol_receiver_accepted_spans_total{receiver="otlp",transport="grpc"} 1.2e+03
otelcol_receiver_accepted_spans_total{receiver="otlp",transport="http"} 34
otelcol_receiver_refused_spans_total{receiver="otlp",transport="grpc"} 5
"""
    assert accepted_spans(page) == 1234
    assert accepted_spans("") == 0


def test_tail_sampling_keeps_errors_and_slow_traces() -> None:
    config = gateway_config("0.0.0.0:1", "backend:2", Parameters(decision_wait_s=7, slow_ms=250))
    sampling = config["processors"]["tail_sampling"]
    assert sampling["decision_wait"] == "7s"
    assert [policy["type"] for policy in sampling["policies"]] == ["status_code", "latency"]
    assert sampling["policies"][1]["latency"] == {"threshold_ms": 250}
    assert config["service"]["pipelines"]["traces"]["processors"] == ["tail_sampling"]


def test_a_parameter_that_cannot_be_is_named() -> None:
    assert Parameters.of_environment({"ROUNDS": "4"}).rounds == 4
    assert Parameters.of_environment({"QUICK": "1", "LOAD_S": "9"}).load_s == 9
    for text in ("0", "-1", "many"):
        with pytest.raises(ValueError, match=f"LOAD_S={text}: want a whole number"):
            Parameters.of_environment({"LOAD_S": text})


def test_the_table_has_a_column_a_site() -> None:
    results = [
        Result.of("pss_mb", "MB", [80.0, 86.0, 90.0], {"site": "collector"}),
        Result.of("pss_mb", "MB", [100.0], {"site": "backsight"}),
        Result.of("pss_mb_of", "MB", [1.0], {"site": "backsight", "daemon": "node"}),
        Result.of("available_p50_ms", "ms", [250.0], {"site": "backsight", "way": "stored"}),
    ]
    assert table(results).splitlines() == [
        "| | collector | backsight |",
        "| --- | ---: | ---: |",
        "| Pss of all daemons, MB | 86 (80 to 90) | 100 |",
        "| request's end to trace stored and judged, median, ms |  | 250 |",
    ]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)  # two shops start, and what they leave to do is waited for
@pytest.mark.skipif(shutil.which("go") is None, reason="the Collector is built by Go")
def test_a_quick_run_measures_both(build: Path, repository: Path, tmp_path: Path) -> None:
    output = tmp_path / "shop.jsonl"
    subprocess.run(
        [sys.executable, "-m", "bench.shop", "--output", output],
        cwd=repository,
        env={**os.environ, "QUICK": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines: list[dict[str, Any]] = [json.loads(line) for line in output.read_text().splitlines()]
    by_site = {
        site: {line["metric"]: line for line in lines if line["params"]["site"] == site}
        for site in ("collector", "backsight")
    }
    only = {"holders_pss_mb"}  # a Collector has none
    assert by_site["collector"].keys() == by_site["backsight"].keys() - only
    for figures_ in by_site.values():
        assert figures_["requests"]["value"] > 0
        assert figures_["gross_cpu_ms_per_1000_spans"]["value"] > 0
        # By the numbers of the orders. One that is under way when the load ends may be cut off, and
        # where all is slow a rule does not call a second slow.
        assert figures_["kept_of_wrong"]["min"] > 0.5
    ways = {(line["params"]["site"], line["params"].get("way")) for line in lines}
    assert {("collector", "exported"), ("backsight", "stored"), ("backsight", "exported")} <= ways
