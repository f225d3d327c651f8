# SPDX-License-Identifier: Apache-2.0
"""make bench-plots: a figure a question, with axes that name their units, and what it was measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import plots
from bench.report import About, Param, Result

ABOUT = About(
    "0123abc",
    "",
    {
        "cpu": "Some CPU",
        "cores": "2",
        "virtualised": "yes",
        "kernel": "6.1",
        "date": "2026-01-02",
    },
)


def result(metric: str, unit: str, value: float, **params: Param) -> Result:
    return Result.of(metric, unit, [value * 0.9, value, value * 1.2], {"load": 0.25, **params})


def measured(slower: float = 1.0) -> list[Result]:
    """A little of each metric that is drawn."""
    interval: dict[str, Param] = {"low": 0.98, "high": 1.0}
    return [
        *(
            result("begin_end_ns", "ns", slower * 9, records=records, threads=threads,
                   null_begins=0, begins=100)
            for records in (0, 1) for threads in (1, 2, 4, 8)
        ),
        *(
            result("trace_burst_ns", "ns", slower * 30, burst=600, threads=threads, lost_share=0.0)
            for threads in (1, 2)
        ),
        *(
            result(metric, "ns", slower * size / 9, bytes=size, threads=1, **more)
            for size in (8, 2048)
            for metric, more in (
                ("memcpy_ns", {}),
                ("tracepoint_ns", {"timestamp": False, "lost_share": 0.0}),
                ("tracepoint_ns", {"timestamp": True, "lost_share": 0.5}),
            )
        ),
        *(
            result("horizon_ratio", "ratio", 20000 / size, trace_bytes=size, pool_bytes=1 << 28)
            for size in (100, 32768)
        ),
        *(
            result("node_ns", "ns", slower * 300, rate_per_s=rate, lost_share=0.0)
            for rate in (10_000, 1_000_000)
        ),
        *(
            result("lookup_ms", "ms", slower, pool_bytes=size, trace_bytes=1024, traces=traces)
            for size in (1 << 26, 1 << 32) for traces in (1, 100)
        ),
        result("http_throughput_ratio", "ratio", 0.99, items=1000, record_bytes=1024, **interval),
        result("http_cpu_ratio", "ratio", 0.98, items=2, record_bytes=8192, **interval),
    ]  # fmt: skip


def texts(file: Path) -> list[str]:
    return [
        "".join(element.itertext()).strip()
        for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("figures")
    files = plots.draw(plots.Measured(measured(), (), ABOUT), folder)
    return {file.stem: texts(file) for file in files}


@pytest.mark.parametrize(
    ("name", "across", "up"),
    [
        ("latency-by-threads", "threads", "CPU time a trace, ns"),
        ("throughput-by-size", "payload of a record", "GB/s"),
        ("horizon-by-trace-size", "payload of a trace", "traces held in 256 MiB"),
        ("node-cost-by-rate", "traces a second", "CPU time of the node daemon a trace, ns"),
        ("lookup-by-pool", "size of the pool", "ms"),
        ("services-over-http", "ratio to plain", "requests/s: 1000 items, 1 KiB a hop"),
    ],
)
def test_each_figure_names_its_axes_its_machine_and_its_commit(
    figures: dict[str, list[str]], name: str, across: str, up: str
) -> None:
    said = "\n".join(figures[name])
    for wanted in (
        across,
        up,
        "commit 0123abc",
        "2 cores of Some CPU, virtualised",
        "2026-01-02, load 0.2",
    ):
        assert wanted in said


def test_nothing_else_is_drawn(figures: dict[str, list[str]]) -> None:
    assert len(figures) == 6


def test_a_point_that_lost_much_is_told_apart(figures: dict[str, list[str]]) -> None:
    told = "hollow: more than 1 % was lost"
    assert [name for name, said in figures.items() if told in said] == ["throughput-by-size"]


def test_the_other_commit_of_a_comparison_is_drawn_too(tmp_path: Path) -> None:
    about = About(ABOUT.commit, "fedcba9", ABOUT.machine)
    both = plots.Measured(measured(), measured(slower=2.0), about)
    for file in plots.draw(both, tmp_path):
        said = "\n".join(texts(file))
        assert ", fedcba9" in said
        assert ", 0123abc" in said


def files_of(folder: Path, results: Sequence[Result]) -> dict[str, bytes]:
    files = plots.draw(plots.Measured(results, (), ABOUT), folder)
    return {file.name: file.read_bytes() for file in files}


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    assert files_of(tmp_path / "one", measured()) == files_of(tmp_path / "two", measured())


def test_what_was_not_measured_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = [one for one in measured() if one.metric == "node_ns"]
    assert list(files_of(tmp_path, only)) == ["node-cost-by-rate.svg"]
    assert "lookup-by-pool: left out, lookup_ms was not measured" in capsys.readouterr().out


def test_colours_are_told_apart_by_their_markers_too() -> None:
    assert len(set(plots.MARKERS.values())) == len(plots.MARKERS)


def test_recall_is_drawn_with_the_horizons(tmp_path: Path) -> None:
    params: dict[str, Param] = {"pool_bytes": 4 << 20, "horizon_s": 2.0}
    results = [
        result(f"recall_by_{by}", "share", 0.8, of=of, age=age, **params)
        for by in ("s", "horizon") for of in ("parts", "traces") for age in (0.5, 1.5)
    ]  # fmt: skip
    files = plots.draw(plots.Measured(results, (), ABOUT), tmp_path)
    assert [file.stem for file in files] == ["recall-by-horizon", "recall-by-age"]
    for file, wanted in zip(
        files,
        (
            ("whole traces, by their oldest part", "its node's horizon", "commit 0123abc"),
            ("horizon of the nodes, median", "s; pools of 4 MiB", "commit 0123abc"),
        ),
        strict=True,
    ):
        said = "\n".join(texts(file))
        assert [words for words in wanted if words not in said] == []
