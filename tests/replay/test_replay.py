# SPDX-License-Identifier: Apache-2.0
"""The replay as a test: real daemons, real sockets, the independent checker."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ctl.coordinator import NotFound
from protocol.messages import SliceFlags
from protocol.wire import parse_trace_id
from tests.replay.replay import Fault, Recording, Replay
from tests.replay.report import Result
from tests.replay.schedule import Span, StartSpan, build_schedule, read_spans

DATA = Path(__file__).resolve().parent.parent / "data" / "nezha"
CONTENTION = "onlineboutique-cartservice-cpu-contention"

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

# Of the traces of a recording, enough for requests to overlap.
SUBSET = 40


def _recording(name: str) -> Recording:
    return Recording.read(DATA / f"{name}.csv.xz", DATA / "rules.json")


def _subset(name: str, count: int) -> tuple[Recording, dict[str, dict[str, Span]]]:
    """The first traces of a recording with a span on the most nodes among them, and no rule."""
    path = DATA / f"{name}.csv.xz"
    traces: dict[str, dict[str, Span]] = {}
    for span in read_spans(path):
        traces.setdefault(span.trace_id, {})[span.span_id] = span
    widest = max(traces.values(), key=lambda trace: len({span.pod for span in trace.values()}))
    chosen = dict(list(traces.items())[:count])
    chosen[next(iter(widest.values())).trace_id] = widest
    spans = [span for trace in chosen.values() for span in trace.values()]
    return Recording(path, build_schedule(spans), None), chosen


def _widest(traces: dict[str, dict[str, Span]]) -> dict[str, Span]:
    return max(traces.values(), key=lambda trace: len({span.pod for span in trace.values()}))


def _shown(replay: Replay, trace_id: str) -> dict[str, Any]:
    (shown,) = replay.coordinator.ctl_json("show", trace_id)
    return shown


def _span_ids(spans: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(span["span_id"] for span in spans)


def _assert_judged_well(result: Result) -> None:
    assert result.checker_ok, result.checker_failures
    assert result.recall == 1
    assert result.false_coherent == 0
    assert result.coherent_by_checker is not None and result.coherent_by_checker >= 0.99
    assert result.collected == result.selected
    assert 0 < result.bytes_left < 0.1 * result.bytes_generated


@pytest.mark.parametrize(
    ("name", "speed"),
    [
        pytest.param(CONTENTION, 10.0, id="cpu-contention"),
        pytest.param(
            "onlineboutique-cartservice-network-delay", 4.0, id="delay", marks=pytest.mark.slow
        ),
        pytest.param("onlineboutique-normal", 4.0, id="normal", marks=pytest.mark.slow),
        pytest.param("trainticket-normal", 10.0, id="trainticket", marks=pytest.mark.slow),
    ],
)
def test_what_the_rule_selects_is_collected_whole(name: str, speed: float, tmp_path: Path) -> None:
    with Replay(_recording(name), captured=tmp_path / "captured", speed=speed) as replay:
        replay.run()
        result = replay.judge()
    _assert_judged_well(result)
    result.write(tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["recall"] == 1


def _parent(trace: dict[str, Span], span: Span) -> Span | None:
    return trace.get(span.parent_id)


def _is_called(trace: dict[str, Span], span: Span) -> bool:
    parent = _parent(trace, span)
    return parent is not None and parent.pod != span.pod


def _pods_called_from(trace: dict[str, Span], pod: str) -> set[str]:
    return {
        span.pod
        for span in trace.values()
        if (parent := _parent(trace, span)) is not None and parent.pod == pod != span.pod
    }


def _place(trace: dict[str, Span], where: str) -> Span:
    if where == "root":
        return next(span for span in trace.values() if not span.parent_id)
    root_pod = _place(trace, "root").pod
    for span in trace.values():
        calls = bool(_pods_called_from(trace, span.pod))
        if _is_called(trace, span) and span.pod != root_pod and calls == (where == "middle"):
            return span
    raise AssertionError(f"no span in the {where} of the trace")


@pytest.mark.parametrize(
    "where",
    ["root", *(pytest.param(where, marks=pytest.mark.slow) for where in ("middle", "leaf"))],
)
def test_a_trigger_on_one_node_brings_the_slices_of_all(where: str, tmp_path: Path) -> None:
    recording, traces = _subset(CONTENTION, SUBSET)
    trace = _widest(traces)
    span = _place(trace, where)
    with Replay(
        recording,
        captured=tmp_path,
        speed=10.0,
        fire_on={(span.trace_id, span.span_id): ("by-hand", f"at the {where}")},
    ) as replay:
        replay.run()
        (collected,) = replay.traces()
        shown = _shown(replay, span.trace_id)
    assert collected["trace_id"] == span.trace_id
    assert [(t["name"], t["why"], t["node"]) for t in collected["triggers"]] == [
        ("by-hand", f"at the {where}", span.pod)
    ]
    assert {part["node"] for part in shown["slices"] if part["bytes"]} == {
        other.pod for other in trace.values()
    }
    assert _span_ids(shown["spans"]) == sorted(trace)
    assert shown["verdict"]["kind"] == "coherent", shown["verdict"]


@pytest.mark.slow
def test_a_killed_writer_leaves_what_it_wrote(tmp_path: Path) -> None:
    recording, traces = _subset(CONTENTION, SUBSET)
    trace = _widest(traces)
    root = _place(trace, "root")
    victim = _place(trace, "middle")
    with Replay(
        recording,
        captured=tmp_path,
        speed=10.0,
        fire_on={(root.trace_id, root.span_id): ("by-hand", "the caller noticed")},
        die_on=(victim.trace_id, victim.span_id),
    ) as replay:
        replay.run()
        shown = _shown(replay, root.trace_id)
        assert replay.workers[victim.pod].dead
    spans = {span["span_id"]: span for span in shown["spans"]}
    # Started in that process before it died: all there; the last of them never ended.
    before = [
        event.span.span_id
        for event in recording.schedule.pods[victim.pod]
        if isinstance(event, StartSpan) and event.span.trace_id == victim.trace_id
    ]
    before = before[: before.index(victim.span_id) + 1]
    on_victim = {span_id for span_id, span in spans.items() if span["node"] == victim.pod}
    assert on_victim == set(before)
    assert spans[victim.span_id]["unfinished"]
    assert shown["verdict"]["kind"] != "coherent"
    reasons = {(reason["kind"], reason["node"]) for reason in shown["verdict"]["reasons"]}
    assert ("unfinished", victim.pod) in reasons


@pytest.mark.slow
def test_daemons_killed_in_the_middle_cost_nothing(tmp_path: Path) -> None:
    recording = _recording(CONTENTION)
    root_pod = next(pod for pod in recording.schedule.pods if pod.startswith("frontend"))
    killed: list[int] = []

    def kill_node(replay: Replay) -> None:
        killed.append(replay.nodes[root_pod].kill_daemon())

    def kill_coordinator(replay: Replay) -> None:
        killed.append(replay.coordinator.kill_daemon())

    with Replay(
        recording,
        captured=tmp_path / "captured",
        speed=2.0,
        faults=(Fault(0.3, kill_node), Fault(0.5, kill_coordinator), Fault(0.7, kill_node)),
    ) as replay:
        replay.run()
        result = replay.judge()
        lost = [replay.node_status(pod)["dataplane"]["runs_lost"] for pod in replay.nodes]
    assert len(killed) == 3
    assert sum(lost) == 0
    _assert_judged_well(replace(result, bytes_left=1))


def _scaled(name: str, copies: int) -> tuple[Recording, list[Span]]:
    """A recording whose requests happen several times, side by side; and their roots."""
    path = DATA / f"{name}.csv.xz"
    spans: list[Span] = []
    roots: list[Span] = []
    for copy in range(copies):
        for span in read_spans(path):
            trace_id = f"{(int(span.trace_id, 16) * 31 + copy) % (1 << 128):032x}"
            cloned = replace(span, trace_id=trace_id)
            spans.append(cloned)
            if not cloned.parent_id:
                roots.append(cloned)
    return Recording(path, build_schedule(spans), None), sorted(
        roots, key=lambda root: root.trace_id
    )


class Fate(enum.Enum):
    """What a node did with a trace that it recorded."""

    UNTRIGGERED = enum.auto()
    COLLECTED = enum.auto()
    ABANDONED = enum.auto()


def _fate(replay: Replay, pod: str, trace_id: str) -> Fate:
    try:
        view = replay.nodes[pod].control.peek(parse_trace_id(trace_id))
    except NotFound:
        return Fate.UNTRIGGERED
    (part,) = view.slices
    if SliceFlags.ABANDONED in part.flags:
        return Fate.ABANDONED
    return Fate.COLLECTED if part.trigger else Fate.UNTRIGGERED


def _fates(replay: Replay, pods: dict[str, set[str]]) -> dict[str, dict[str, Fate]]:
    """What became of each trace on each node, once the last word of it went round."""
    steady: dict[str, dict[str, Fate]] | None = None
    while True:
        now = {
            trace_id: {pod: _fate(replay, pod, trace_id) for pod in recorded_on}
            for trace_id, recorded_on in pods.items()
        }
        if now == steady:
            return now
        steady = now


@pytest.mark.slow
def test_under_overload_rare_triggers_keep_their_traces_whole(tmp_path: Path) -> None:
    """Triggers tA on 0.1 %, tB on 1 % and a faulty tF on 50 % of the requests, little bandwidth."""
    recording, roots = _scaled(CONTENTION, 10)
    chosen = {"ta": roots[::1000], "tb": roots[7::100], "tf": roots[1::2]}
    fire_on = {
        (root.trace_id, root.span_id): (name, "overload")
        for name in ("tf", "tb", "ta")
        for root in chosen[name]
    }
    pods: dict[str, set[str]] = {}
    span_ids: dict[str, list[str]] = {}
    for pod, events in recording.schedule.pods.items():
        for event in events:
            if isinstance(event, StartSpan):
                pods.setdefault(event.span.trace_id, set()).add(pod)
                span_ids.setdefault(event.span.trace_id, []).append(event.span.span_id)
    unlimited = 1e6
    with Replay(
        recording,
        captured=tmp_path,
        speed=2.0,
        fire_on=fire_on,
        node_config={
            "store_bytes": 1 << 20,
            "report": {"bytes_per_s": 40_000, "burst_bytes": 64 << 10},
            "triggers": {
                "per_process_per_s": unlimited,
                "per_process_burst": unlimited,
                "per_trigger_per_s": unlimited,
                "per_trigger_burst": unlimited,
            },
        },
    ) as replay:
        replay.run()
        listing = {trace["trace_id"]: trace for trace in replay.traces()}
        fates = _fates(replay, {trace_id: pods[trace_id] for trace_id, _ in fire_on})
        for name in ("ta", "tb"):
            mine = [trace_id for (trace_id, _), (fired, _) in fire_on.items() if fired == name]
            coherent = [
                trace_id
                for trace_id in mine
                if listing[trace_id]["verdict"]["kind"] == "coherent"
                and _span_ids(_shown(replay, trace_id)["spans"]) == sorted(span_ids[trace_id])
            ]
            assert len(coherent) >= 0.99 * len(mine), (name, len(coherent), len(mine))
        coherent_tf = {
            trace_id
            for (trace_id, _), (fired, _) in fire_on.items()
            if fired == "tf"
            and listing.get(trace_id, {}).get("verdict", {}).get("kind") == "coherent"
        }
        given_up = {t for t, on_nodes in fates.items() if Fate.ABANDONED in on_nodes.values()}
        # A node may give up what it still holds while the coordinator has all of it already,
        # and says so: nothing is lost then.
        for trace_id in given_up & coherent_tf:
            spans = _span_ids(_shown(replay, trace_id)["spans"])
            assert spans == sorted(span_ids[trace_id]), (trace_id, fates[trace_id])
    assert coherent_tf
    assert given_up, "nothing was abandoned: this was no overload"
    # Given up on one node, it is given up on all that held it. Nodes that were not yet asked
    # when it was never will be: to them it is one of the traces that nobody triggered.
    kept = {t: fates[t] for t in given_up if Fate.COLLECTED in fates[t].values()}
    assert not kept, (len(kept), len(given_up), list(kept.items())[:3])
    whole = [t for t in given_up if set(fates[t].values()) == {Fate.ABANDONED}]
    assert len(whole) >= 0.9 * len(given_up), (len(whole), len(given_up))
