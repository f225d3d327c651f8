# SPDX-License-Identifier: Apache-2.0
"""The check of the demo, with what is good, and with what is broken in one way each."""

from __future__ import annotations

import ast
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.demo.check import Result, judge, main, read_logs, read_traces, read_witness

SERVICES = {"front": "node-1", "orders": "node-2", "stock": "node-3"}
ARGUMENTS = [f"--service={service}={node}" for service, node in SERVICES.items()]
CALLS = {"front": {"http": 1}, "orders": {"redis": 2, "grpc": 1}, "stock": {"postgresql": 2}}

Json = dict[str, Any]

# Status and outcome at front, orders and stock, the trigger's name, and where it fired.
KINDS = {
    "a": (("500", "500", "UNKNOWN"), "StockMiscountedError", "error", ["node-3", "node-2"]),
    "b": (("200", "200", "OK"), "waited", "latency", ["node-3"]),
    "c": (("500", "200", "OK"), "ok", "error", ["node-1"]),
    "d": (("200", "200", "UNAVAILABLE"), "closed", "error", ["node-3"]),
}
ORDERS = {"a": 525, "b": 550, "c": 575, "d": 599}
HEALTHY = 600


def _log(order: int, kind: str) -> dict[str, Json]:
    statuses, outcome, _, _ = KINDS.get(kind, (("200", "200", "OK"), "ok", "", []))
    return {
        service: {
            "service": service,
            "order": order,
            "status": status,
            "outcome": outcome if service == "stock" else "ok",
            "duration_ms": 1010.5 if kind == "b" else 10.5,
            "calls": CALLS[service],
        }
        for service, status in zip(SERVICES, statuses, strict=True)
    }


def _span(number: int, parent: int, node: str, kind: str, **attributes: object) -> Json:
    return {
        "span_id": f"{number:016x}",
        "parent_id": f"{parent:016x}" if parent else "",
        "name": f"span {number}",
        "node": node,
        "kind": kind,
        "start_ns": 1000 * number,
        "end_ns": 1000 * number + 500,
        "status": "unset",
        "events": [{"name": "exception"}] if number == 9 else [],
        "unfinished": False,
        "attributes": {key.replace("__", "."): value for key, value in attributes.items()},
    }


def _trace(order: int, kind: str) -> Json:
    _, _, trigger, nodes = KINDS[kind]
    spans = [
        _span(1, 0, "node-1", "server", url__path=f"/orders/{order}"),
        _span(2, 1, "node-1", "client", url__full=f"http://10.77.0.3:8001/orders/{order}"),
        _span(3, 2, "node-2", "server", url__path=f"/orders/{order}"),
        _span(4, 3, "node-2", "client", db__system__name="redis"),
        _span(5, 3, "node-2", "client", db__system__name="redis"),
        _span(6, 3, "node-2", "client"),
        _span(7, 6, "node-3", "server"),
        _span(8, 7, "node-3", "client", db__system__name="postgresql"),
        _span(9, 7, "node-3", "client", db__system__name="postgresql"),
        _span(10, 7, "node-3", "internal", reserved=2),
    ]
    return {
        "trace_id": f"{order:032x}",
        "verdict": {"kind": "coherent"},
        "triggers": [{"name": trigger, "node": node} for node in nodes],
        "span_count": len(spans),
        "spans": spans,
    }


class Case:
    """What a good run left: an order of each kind, and one without trouble."""

    def __init__(self) -> None:
        self.logs = {order: _log(order, kind) for kind, order in ORDERS.items()}
        self.logs[HEALTHY] = _log(HEALTHY, "")
        self.traces = {kind: _trace(order, kind) for kind, order in ORDERS.items()}
        self.witness = copy.deepcopy(list(self.traces.values()))

    def write(self, directory: Path) -> None:
        for service in SERVICES:
            (directory / f"{service}.access.jsonl").write_text(
                "".join(
                    json.dumps(logged[service]) + "\n"
                    for logged in self.logs.values()
                    if service in logged
                )
            )
        for service, node in SERVICES.items():
            (directory / f"{service}.spans.jsonl").write_text(
                "".join(
                    json.dumps(
                        span
                        | {
                            "trace_id": trace["trace_id"],
                            "events": [event["name"] for event in span["events"]],
                        }
                    )
                    + "\n"
                    for trace in self.witness
                    for span in trace["spans"]
                    if span["node"] == node
                )
            )
        listing = [{"trace_id": trace["trace_id"]} for trace in self.traces.values()]
        (directory / "traces.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in listing)
        )
        for trace in self.traces.values():
            (directory / f"{trace['trace_id']}.json").write_text(json.dumps(trace))

    def judged(self, directory: Path) -> Result:
        self.write(directory)
        return judge(
            read_logs(directory, SERVICES),
            read_traces(directory),
            SERVICES,
            read_witness(directory, SERVICES),
        )


def test_a_good_run_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Case().judged(tmp_path)
    assert result.failures == []
    assert result.ok
    assert result.differences == {}
    assert (result.requests, result.selected, result.collected) == (5, 4, 4)
    assert result.spans == 5 * 9
    assert result.recall == result.coherent_by_checker == 1
    assert {kind: r.firing_nodes for kind, r in result.kinds.items()} == {
        kind: dict.fromkeys(sorted(nodes), 1) for kind, (_, _, _, nodes) in KINDS.items()
    }
    assert [r.one_node_fired for r in result.kinds.values()] == [0, 1, 1, 1]
    assert main([str(tmp_path), *ARGUMENTS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"]["d"]["captured"] == 1


def _drop(spans: list[Json], *numbers: int) -> list[Json]:
    return [span for span in spans if int(span["span_id"], 16) not in numbers]


def _without(trace: Json, *numbers: int) -> None:
    trace["spans"] = _drop(trace["spans"], *numbers)
    trace["span_count"] = len(trace["spans"])


def _set(trace: Json, number: int, **values: object) -> None:
    trace["spans"][number - 1].update(values)


def _forget(trace: Json, *attributes: str) -> None:
    for span in trace["spans"]:
        for name in attributes:
            span["attributes"].pop(name, None)


BROKEN: dict[str, tuple[Callable[[Json], object], str]] = {
    "an internal span": (lambda trace: _without(trace, 10), "witness"),
    "another name": (lambda trace: _set(trace, 10, name="GET /"), "witness"),
    "another kind": (lambda trace: _set(trace, 10, kind="producer"), "witness"),
    "another start": (lambda trace: _set(trace, 10, start_ns=1), "witness"),
    "another end": (lambda trace: _set(trace, 10, end_ns=1), "witness"),
    "another status": (lambda trace: _set(trace, 10, status="error"), "witness"),
    "no attribute": (lambda trace: _set(trace, 10, attributes={}), "witness"),
    "no exception": (lambda trace: _set(trace, 9, events=[]), "witness"),
    "another's span": (lambda trace: _set(trace, 10, span_id="f" * 16), "witness"),
    "another node's span": (lambda trace: _set(trace, 10, node="node-2"), "witness"),
    "the last node's spans": (lambda trace: _without(trace, 7, 8, 9), "server"),
    "the middle": (lambda trace: _without(trace, 3, 4, 5, 6), "parent"),
    "a statement": (lambda trace: _without(trace, 9), "calls"),
    "a call": (lambda trace: _without(trace, 6), "calls"),
    "a parent": (lambda trace: _set(trace, 4, parent_id="f" * 16), "parent"),
    "a caller": (lambda trace: _set(trace, 7, parent_id=f"{3:016x}"), "caller"),
    "an end": (lambda trace: _set(trace, 9, unfinished=True), "unfinished"),
    "a second root": (lambda trace: _set(trace, 4, parent_id=""), "root"),
    "a span twice": (lambda trace: _set(trace, 5, span_id=f"{4:016x}"), "duplicate_span"),
    "another count": (lambda trace: trace.update(span_count=8), "span_count"),
    "another node": (lambda trace: _set(trace, 9, node="node-4"), "extra_node"),
    "another order": (lambda trace: _set(trace, 3, attributes={"url.path": "/orders/7"}), "order"),
    "no order": (lambda trace: _forget(trace, "url.path", "url.full"), "order"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_and_called_coherent_is_found(what: str, tmp_path: Path) -> None:
    case = Case()
    break_it, kind = BROKEN[what]
    trace = case.traces["d"]
    break_it(trace)
    result = case.judged(tmp_path)
    assert [wrong.split(":")[0] for wrong in result.differences[trace["trace_id"]]].count(kind)
    assert list(result.differences) == [trace["trace_id"]]
    assert result.false_coherent == 1
    assert result.coherent_by_checker == 0.75
    assert not result.ok


def test_one_that_is_broken_and_not_called_coherent_is_not_false(tmp_path: Path) -> None:
    case = Case()
    _without(case.traces["d"], 9)
    case.traces["d"]["verdict"]["kind"] = "partial"
    result = case.judged(tmp_path)
    assert (result.false_coherent, result.false_incoherent) == (0, 0)
    # Nor is it a capture: of what is not whole, who looks for a reason may miss just that.
    assert result.kinds["d"].captured == 0
    assert [failure.split(":")[0] for failure in result.failures] == ["d", "coherent_by_checker"]


def test_captures_of_what_was_no_trouble_are_few(tmp_path: Path) -> None:
    case = Case()
    case.logs |= {order: _log(order, "") for order in range(601, 610)}
    for order in (601, 602):
        trace = _trace(order, "d")
        case.traces[str(order)] = trace
        case.witness.append(copy.deepcopy(trace))
    result = case.judged(tmp_path)
    assert result.others == 2
    assert [failure.split(":")[0] for failure in result.failures] == ["others"]


def test_whole_ones_have_to_be_called_coherent(tmp_path: Path) -> None:
    case = Case()
    case.traces["d"]["verdict"]["kind"] = "partial"
    result = case.judged(tmp_path)
    assert result.false_incoherent == 1
    assert [failure.split(":")[0] for failure in result.failures] == ["false_incoherent"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_collected_is_missed(kind: str, tmp_path: Path) -> None:
    case = Case()
    del case.traces[kind]
    result = case.judged(tmp_path)
    assert result.kinds[kind].missing == [ORDERS[kind]]
    assert result.recall == 0.75
    assert [failure.split(":")[0] for failure in result.failures] == [kind]


def test_collected_for_another_reason_is_not_captured(tmp_path: Path) -> None:
    case = Case()
    case.traces["c"]["triggers"] = [{"name": "rare", "node": "node-1"}]
    result = case.judged(tmp_path)
    assert result.kinds["c"].captured == 0
    assert not result.ok


@pytest.mark.parametrize("kind", ["c", "d"])
def test_a_second_node_may_not_fire(kind: str, tmp_path: Path) -> None:
    case = Case()
    case.traces[kind]["triggers"].append({"name": "error", "node": "node-2"})
    result = case.judged(tmp_path)
    assert (result.kinds[kind].captured, result.kinds[kind].one_node_fired) == (1, 0)
    assert [failure.split(":")[0] for failure in result.failures] == [kind]


def test_an_order_has_one_trace(tmp_path: Path) -> None:
    case = Case()
    case.traces["twin"] = {**case.traces["d"], "trace_id": "f" * 32}
    result = case.judged(tmp_path)
    assert set(result.differences) == {case.traces["d"]["trace_id"], "f" * 32}


def test_a_kind_that_never_happened_shows_nothing(tmp_path: Path) -> None:
    case = Case()
    del case.logs[ORDERS["a"]], case.traces["a"]
    assert [failure.split(":")[0] for failure in case.judged(tmp_path).failures] == ["a"]


def _spoil(name: str, text: str) -> Callable[[Path], None]:
    return lambda directory: _append(directory / name, text)


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


TRACE_A = f"{ORDERS['a']:032x}.json"

BAD_INPUT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no log": (lambda d: (d / "stock.access.jsonl").unlink(), "stock.access.jsonl"),
    "no JSON": (_spoil("front.access.jsonl", "GET /\n"), "front.access.jsonl"),
    "an order twice": (
        _spoil("front.access.jsonl", json.dumps(_log(HEALTHY, "")["front"])),
        "front.access.jsonl:6",
    ),
    "another's line": (
        _spoil("front.access.jsonl", json.dumps(_log(7, "")["stock"])),
        "not a line of front",
    ),
    "a field is missing": (_spoil("front.access.jsonl", '{"order": 7}'), "'service'"),
    "a trace that is not shown": (lambda d: (d / TRACE_A).unlink(), TRACE_A),
    "a trace of another shape": (lambda d: (d / TRACE_A).write_text("[]"), "trace_id"),
    "no trace id": (_spoil("traces.jsonl", '{"trace_id": "../x"}'), "traces.jsonl:5"),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_told(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Case().write(tmp_path)
    spoil, said = BAD_INPUT[what]
    spoil(tmp_path)
    assert main([str(tmp_path), *ARGUMENTS]) == 2
    assert said in capsys.readouterr().err


def test_empty_logs_judge_nothing(tmp_path: Path) -> None:
    case = Case()
    case.logs, case.traces = {}, {}
    case.write(tmp_path)
    assert main([str(tmp_path), *ARGUMENTS]) == 2


def test_the_check_shares_no_code_with_what_it_judges() -> None:
    tree = ast.parse((Path(__file__).parent / "check.py").read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
        )
    }
    assert "json" in imported
    assert imported <= sys.stdlib_module_names
