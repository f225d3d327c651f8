# SPDX-License-Identifier: Apache-2.0
"""Draws what bench/run measured: ``python3 -m bench.plots [RESULTS [FOLDER]]``.

Reads build/bench/native.jsonl, and what it was measured on beside it, of a run with
--base the other commit too; and build/replay/recall.jsonl, of `make replay LATE=`. Writes
an SVG a question into docs/figures. A point is the median of its repetitions, the bar
through it reaches from the least to the greatest; of recall a share, and its interval of
95 %. A hollow point lost more than a hundredth of what it wrote.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import lines, pyplot, ticker

from bench.report import About, Result, format_bytes, read

_ROOT = Path(__file__).resolve().parents[1]

# Of Okabe and Ito: told apart with any kind of colour vision. A marker says the same again.
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"
MARKERS = {_BLUE: "o", _ORANGE: "s", _GREEN: "^", _PURPLE: "D", _GREY: "v"}

_LOST_SHARE_TOLD = 0.01
_LOSSY = "lossy"

# Those of the system that this is measured against take a buffer of this much for each trace.
_BUFFER_BYTES = 32768

# At which a full pool's traces become seconds: a busy service.
_TRACES_PER_S = 10_000

_STYLE = {
    "figure.figsize": (7.2, 4.7),
    "figure.constrained_layout.use": True,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9.5,
    "figure.titlesize": 11.5,
    "figure.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
    "errorbar.capsize": 3,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "backsight",  # the same figures give the same file
}

# Matplotlib has no types.
Axes = Any
Axis = Any


@dataclass(frozen=True, slots=True)
class Measured:
    """What was read: this commit's, another's beside it (perhaps none), and on what."""

    results: Sequence[Result]
    base: Sequence[Result]
    about: About

    def sides(self) -> Iterator[tuple[str, bool, Sequence[Result]]]:
        """Suffix of the label, whether it is the other commit, and its results."""
        if self.base:
            yield f", {self.about.base[:7]}", True, self.base
        yield (f", {self.about.commit[:7]}" if self.base else ""), False, self.results


def _of(results: Iterable[Result], metric: str, **conditions: object) -> list[Result]:
    return [
        result
        for result in results
        if result.metric == metric
        and all(result.params.get(name) == value for name, value in conditions.items())
    ]


def _lost_share(result: Result) -> float:
    params = result.params
    if "null_begins" in params:
        return float(params["null_begins"]) / float(params["begins"])
    return float(params.get("lost_share", 0))


def _line(
    axes: Axes,
    found: Sequence[Result],
    by: str,
    label: str,
    colour: str,
    *,
    scaled: Callable[[float, Result], float] = lambda value, _: value,
    is_base: bool = False,
) -> None:
    """Draw medians by a parameter, with the extremes. ``scaled``: from the unit that was measured."""
    if not found:
        return
    found = sorted(found, key=lambda result: float(result.params[by]))
    at = [float(result.params[by]) for result in found]
    middle = [scaled(result.value, result) for result in found]
    ends = [sorted((scaled(result.min, result), scaled(result.max, result))) for result in found]
    marker = MARKERS[colour]
    colour, style = (_lighter(colour), "--") if is_base else (colour, "-")
    axes.errorbar(
        at,
        middle,
        yerr=[
            [value - low for value, (low, _) in zip(middle, ends, strict=True)],
            [high - value for value, (_, high) in zip(middle, ends, strict=True)],
        ],
        color=colour,
        linestyle=style,
        marker=marker,
        label=label,
    )
    for x, y, one in zip(at, middle, found, strict=True):
        if _lost_share(one) > _LOST_SHARE_TOLD:
            axes.plot(x, y, color=colour, marker=marker, markerfacecolor="white", zorder=10,
                      gid=_LOSSY)  # fmt: skip


def _lighter(colour: str) -> str:
    """Half way to white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(channel + 255) // 2:02x}" for channel in channels)


def _bytes(value: float, _: object = None) -> str:
    return format_bytes(value)


def _count(value: float, _: object = None) -> str:
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def _ticks(axis: Axis, values: Iterable[float], text: Callable[[float, object], str]) -> None:
    """Exactly these, in words."""
    axis.set_major_locator(ticker.FixedLocator(sorted(set(values))))
    axis.set_major_formatter(ticker.FuncFormatter(text))
    axis.set_minor_locator(ticker.NullLocator())


def _plain(axis: Axis) -> None:
    """Numbers as people write them, where the axis is logarithmic."""
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


# ---------------------------------------------------------------- the figures


def latency_by_threads(axes: Axes, measured: Measured) -> None:
    """What a trace costs its thread, by threads that trace at the same time."""
    for suffix, is_base, results in measured.sides():
        for records, label, colour in (
            (0, "begin and end alone", _BLUE),
            (1, "with a record of 8 bytes", _ORANGE),
        ):
            found = _of(results, "begin_end_ns", records=records)
            _line(axes, found, "threads", label + suffix, colour, is_base=is_base)
        found = _of(results, "trace_burst_ns", burst=600)
        label = "with 100 bytes, bursts of 600"
        _line(axes, found, "threads", label + suffix, _GREEN, is_base=is_base)
    axes.set_xscale("log", base=2)
    _ticks(axes.xaxis, (1, 2, 4, 8), _count)
    axes.set_xlabel("threads, on two cores with the node daemon")
    axes.set_ylabel("CPU time a trace, ns")
    axes.set_ylim(bottom=0)


def throughput_by_size(axes: Axes, measured: Measured) -> None:
    """What one thread records, by size of record."""

    def gigabytes_per_s(ns: float, result: Result) -> float:
        return float(result.params["bytes"]) / ns

    for suffix, is_base, results in measured.sides():
        for metric, conditions, label, colour in (
            ("memcpy_ns", {}, "copying the same bytes", _GREY),
            ("tracepoint_ns", {"timestamp": False}, "tracepoint, its time given", _BLUE),
            ("tracepoint_ns", {"timestamp": True}, "tracepoint, stamped now", _ORANGE),
        ):
            if is_base and metric == "memcpy_ns":
                continue
            found = _of(results, metric, threads=1, **conditions)
            named = label + suffix if metric != "memcpy_ns" else label
            _line(axes, found, "bytes", named, colour, scaled=gigabytes_per_s, is_base=is_base)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _ticks(axes.xaxis, (8, 32, 128, 512, 2048), _bytes)
    _plain(axes.yaxis)
    axes.set_xlabel("payload of a record (beside it, 12 bytes of header are written)")
    axes.set_ylabel("payload a second of CPU time, GB/s")


def horizon_by_trace_size(axes: Axes, measured: Measured) -> None:
    """How many traces a full pool holds, by their size."""
    every = _of(measured.results, "horizon_ratio")
    if not every:
        return
    pool_bytes = float(every[0].params["pool_bytes"])
    buffers = pool_bytes / _BUFFER_BYTES

    def traces(ratio: float, _: Result) -> float:
        return ratio * buffers

    sizes = sorted(float(result.params["trace_bytes"]) for result in every)
    axes.plot(sizes, [pool_bytes / size for size in sizes], color=_GREY, linestyle=":",
              label="nothing but payload")  # fmt: skip
    for suffix, is_base, results in measured.sides():
        found = _of(results, "horizon_ratio")
        label = "backsight" + suffix
        _line(axes, found, "trace_bytes", label, _BLUE, scaled=traces, is_base=is_base)
    axes.plot(sizes, [buffers] * len(sizes), color=_ORANGE, linestyle="-.",
              label="a buffer of 32 KiB for each trace")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _ticks(axes.xaxis, sizes, _bytes)
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(_count))
    axes.set_xlabel("payload of a trace, in records of at most 128 bytes")
    axes.set_ylabel(f"traces held in {_bytes(pool_bytes)}")
    seconds = axes.secondary_yaxis(
        "right", functions=(lambda n: n / _TRACES_PER_S, lambda s: s * _TRACES_PER_S)
    )
    _plain(seconds.yaxis)
    seconds.set_ylabel(f"horizon at {_TRACES_PER_S:,} traces/s, s")


def node_cost_by_rate(axes: Axes, measured: Measured) -> None:
    """What the node daemon spends on a trace of 100 bytes, by traces a second."""
    for suffix, is_base, results in measured.sides():
        found = _of(results, "node_ns")
        _line(axes, found, "rate_per_s", "node daemon" + suffix, _BLUE, is_base=is_base)
    rates = sorted(
        {float(result.params["rate_per_s"]) for result in _of(measured.results, "node_ns")}
    )
    found = [one for _, _, results in measured.sides() for one in _of(results, "node_ns")]
    low, high = min(max(one.min, 1) for one in found) / 2, max(one.max for one in found) * 3
    for share in (0.01, 0.1, 1.0):
        # At that many traces a second, this is all of the share.
        axes.plot(rates, [share * 1e9 / rate for rate in rates], color=_GREY, linewidth=0.8,
                  linestyle=":")  # fmt: skip
        enters = max(rates[0], share * 1e9 / high)
        if enters < rates[-1]:
            axes.annotate(
                f"{share:.0%} of a core",
                (enters, share * 1e9 / enters),
                (6, -4),
                textcoords="offset points",
                color=_GREY,
                fontsize=8,
                va="top",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    _ticks(axes.xaxis, rates, _count)
    _plain(axes.yaxis)
    axes.set_xlabel("traces a second that one thread writes")
    axes.set_ylabel("CPU time of the node daemon a trace, ns")


def lookup_by_pool(axes: Axes, measured: Measured) -> None:
    """What it takes to find triggered traces in a full pool, by its size."""
    for suffix, is_base, results in measured.sides():
        for trace_bytes, traces, colour in (
            (100, 100, _ORANGE),
            (1024, 100, _BLUE),
            (32768, 100, _GREEN),
            (1024, 1, _PURPLE),
        ):
            found = _of(results, "lookup_ms", trace_bytes=trace_bytes, traces=traces)
            many = "one trace" if traces == 1 else f"{traces} traces at once"
            label = f"{many}, {_bytes(trace_bytes)} each{suffix}"
            _line(axes, found, "pool_bytes", label, colour, is_base=is_base)
    sizes = {float(one.params["pool_bytes"]) for one in _of(measured.results, "lookup_ms")}
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _ticks(axes.xaxis, sizes, _bytes)
    _plain(axes.yaxis)
    axes.set_xlabel("size of the pool")
    axes.set_ylabel("CPU time until all are copied out, ms")


def services_over_http(axes: Axes, measured: Measured) -> None:
    """Two services that call each other over HTTP: traced, by plain."""
    rows: list[tuple[str, Result, str]] = []
    for suffix, is_base, results in measured.sides():
        for metric, name, colour in (
            ("http_throughput_ratio", "requests/s", _BLUE),
            ("http_cpu_ratio", "CPU time", _ORANGE),
        ):
            for result in _of(results, metric):
                items = result.params["items"]
                work = "bare HTTP" if items == 2 else f"{items} items"
                kind = f"{work}, {_bytes(float(result.params['record_bytes']))} a hop"
                rows.append(
                    (f"{name}{suffix}: {kind}", result, _lighter(colour) if is_base else colour)
                )
    if not rows:
        return
    for number, (_, result, colour) in enumerate(rows):
        axes.plot([result.min, result.max], [number] * 2, color=colour, linewidth=1)
        axes.plot([float(result.params["low"]), float(result.params["high"])], [number] * 2,
                  color=colour, linewidth=5, solid_capstyle="butt")  # fmt: skip
        axes.plot([result.value], [number], marker="o", color="white", markeredgecolor=colour)
    # One odd pair of seconds must not hide where the intervals are.
    lows, highs = ([float(result.params[end]) for _, result, _ in rows] for end in ("low", "high"))
    axes.set_xlim(min(0.95, *lows) - 0.05, max(1.0, *highs) + 0.05)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvline(0.99, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ratio to plain (of CPU time, plain by traced); dotted: 0.99")
    axes.set_title(
        "dot: median of the pairs; thick: its interval of 95 %; thin: all of them",
        fontsize=8.5,
        loc="right",
    )


def recall_by_horizon(axes: Axes, measured: Measured) -> None:
    """What is whole of a trace whose trigger comes late, by its age in horizons."""
    for of, label, colour in (
        ("parts", "parts on a node", _BLUE),
        ("traces", "whole traces, by their oldest part", _ORANGE),
    ):
        _line(axes, _of(measured.results, "recall_by_horizon", of=of), "age", label, colour,
              scaled=_percent)  # fmt: skip
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(0, 4)
    axes.set_ylim(0, 102)
    axes.set_xlabel("age of the first record when the trigger fired, by its node's horizon")
    axes.set_ylabel("whole, %")


def recall_by_age(axes: Axes, measured: Measured) -> None:
    """What is whole of a trace whose trigger comes late, by its age in seconds."""
    found = _of(measured.results, "recall_by_s")
    for of, label, colour in (
        ("parts", "parts on a node", _BLUE),
        ("traces", "whole traces", _ORANGE),
    ):
        _line(axes, _of(found, "recall_by_s", of=of), "age", label, colour, scaled=_percent)
    params = found[0].params
    axes.axvline(
        float(params["horizon_s"]),
        color="black",
        linewidth=0.8,
        label="horizon of the nodes, median",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 102)
    axes.set_xlabel(
        f"age of the first record when the trigger fired, s; pools of {_bytes(float(params['pool_bytes']))}"
    )
    axes.set_ylabel("whole, %")


def _percent(share: float, _: Result) -> float:
    return 100 * share


_Figures = dict[str, tuple[Callable[[Axes, Measured], None], tuple[str, ...]]]

_RECALL: _Figures = {
    "recall-by-horizon": (recall_by_horizon, ("recall_by_horizon",)),
    "recall-by-age": (recall_by_age, ("recall_by_s",)),
}

_FIGURES: _Figures = {
    "latency-by-threads": (latency_by_threads, ("begin_end_ns",)),
    "throughput-by-size": (throughput_by_size, ("tracepoint_ns", "memcpy_ns")),
    "horizon-by-trace-size": (horizon_by_trace_size, ("horizon_ratio",)),
    "node-cost-by-rate": (node_cost_by_rate, ("node_ns",)),
    "lookup-by-pool": (lookup_by_pool, ("lookup_ms",)),
    "services-over-http": (services_over_http, ("http_throughput_ratio", "http_cpu_ratio")),
}
"""By file name: who draws it, and the metrics without which there is nothing to draw."""


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if any(line.get_gid() == _LOSSY for line in axes.get_lines()):
        hollow = lines.Line2D([], [], color="black", linestyle="none", marker="o",
                              markerfacecolor="white")  # fmt: skip
        handles.append(hollow)
        labels.append("hollow: more than 1 % was lost")
    if handles:
        # Above, where nothing is drawn, whatever the figures are.
        axes.legend(handles, labels, fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2,
                    columnspacing=1.2, borderaxespad=0.2)  # fmt: skip


def _load(results: Iterable[Result]) -> str:
    """Of the machine meanwhile: whoever looks knows how much else ran."""
    loads = [float(result.params["load"]) for result in results]
    return f"load {min(loads):.1f} to {max(loads):.1f}"


def draw(measured: Measured, folder: Path) -> list[Path]:
    """All figures for which there are results. Returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    there = {result.metric for result in measured.results}
    is_recall = any(there.issuperset(metrics) for _, metrics in _RECALL.values())
    for name, (function, metrics) in (_RECALL if is_recall else _FIGURES).items():
        if not there.issuperset(metrics):
            print(
                f"{name}: left out, {' and '.join(sorted(set(metrics) - there))} was not measured"
            )
            continue
        assert function.__doc__ is not None
        with pyplot.rc_context(_STYLE):
            figure, axes = pyplot.subplots()
            function(axes, measured)
            figure.suptitle(function.__doc__.rstrip("."), x=0.01, ha="left")
            _legend(axes)
            caption = f"{measured.about.caption()}, {_load(measured.results)}"
            figure.supxlabel(caption, x=0.01, ha="left", fontsize=7.5, color=_GREY)
            drawn = io.StringIO()
            figure.savefig(drawn, format="svg", metadata={"Date": None, "Title": function.__doc__})
            pyplot.close(figure)
        # As any text in this tree: without blanks at the ends of lines.
        path = folder / f"{name}.svg"
        path.write_text("".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines()))
        files.append(path)
    return files


def main() -> None:
    """Do as the command line says."""
    measured = [_ROOT / "build/bench/native.jsonl", _ROOT / "build/replay/recall.jsonl"]
    paths = (
        [Path(sys.argv[1])] if len(sys.argv) > 1 else [path for path in measured if path.exists()]
    )
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else _ROOT / "docs/figures"
    if not paths:
        sys.exit(
            f"{measured[0]} and {measured[1]} are missing; measure first: make bench-native,"
            " or sudo make replay LATE=3"
        )
    for path in paths:
        about = About.read(path)
        base = read(path.with_name("base.jsonl")) if about.base else []
        for file in draw(Measured(read(path), base, about), folder):
            print(file)


if __name__ == "__main__":
    main()
