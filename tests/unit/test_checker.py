# SPDX-License-Identifier: Apache-2.0
"""The checker finds each single fault, and selects what it must from the recordings."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checker.__main__ import main
from tests.checker.errors import BadInput
from tests.checker.recording import RecordedSpan, read_recording
from tests.checker.rule import Parameters, Window, firing_spans, read_parameters

TESTS = Path(__file__).parent.parent
DATA = TESTS / "data" / "nezha"
NORMAL = DATA / "onlineboutique-normal.csv.xz"

# What backsightctl prints of one trace; JSON has no better type.
Shown = dict[str, Any]

# (traces, spans, selected traces, spans that fire)
GOLDEN = {
    "onlineboutique-cartservice-cpu-contention": (497, 23292, 10, 11),
    "onlineboutique-cartservice-network-delay": (479, 22164, 10, 10),
    "onlineboutique-normal": (502, 22969, 10, 10),
    "trainticket-normal": (71, 4890, 1, 1),
}


@cache
def recording() -> dict[str, dict[str, RecordedSpan]]:
    return read_recording(NORMAL)


@cache
def selected() -> tuple[str, ...]:
    spans = (span for trace in recording().values() for span in trace.values())
    fired = firing_spans(spans, read_parameters(DATA / "rules.json", NORMAL))
    return tuple(dict.fromkeys(span.trace_id for span in fired))


def shown(trace_id: str) -> Shown:
    """What a coordinator that did everything right would show of a trace."""
    spans = recording()[trace_id].values()
    nodes = sorted({span.pod for span in spans})
    return {
        "trace_id": trace_id,
        "triggers": [
            {"name": "latency", "why": "slow", "node": nodes[0], "fired_at_ns": 1, "laterals": []}
        ],
        "verdict": {"kind": "coherent", "version": 1, "reasons": []},
        "nodes": nodes,
        "span_count": len(spans),
        "bytes": 1000,
        "slices": [{"node": node, "bytes": 10, "complete": True, "open": False} for node in nodes],
        "spans": [
            {
                "span_id": span.span_id,
                "parent_id": span.parent_id,
                "name": span.operation,
                "node": span.pod,
                "service": "service",
                "pid": 1,
                "start_ns": span.start_ns,
                "end_ns": span.end_ns,
                "status": "ok",
                "attributes": {"pod": span.pod, "duration_us": span.duration_us},
                "unfinished": False,
            }
            for span in spans
        ],
    }


def capture(folder: Path, traces: list[Shown], listed: list[str] | None = None) -> Path:
    """Writes the two kinds of output as a user would save them: the listing, and a file a trace."""
    ids = [trace["trace_id"] for trace in traces] if listed is None else listed
    listing = [
        {key: value for key, value in trace.items() if key not in ("spans", "slices")}
        for trace in (shown(trace_id) for trace_id in ids if trace_id in recording())
    ]
    (folder / "traces.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in listing))
    for index, trace in enumerate(traces):
        (folder / f"{index}.json").write_text(json.dumps(trace, indent=1))
    return folder


class Checker:
    """Runs the program and keeps its exit status and its JSON."""

    def __init__(self, folder: Path, output: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.output = output

    def run(
        self, traces: list[Shown], *options: str, listed: list[str] | None = None
    ) -> tuple[int, Any]:
        captured = capture(self.folder, traces, listed)
        status = main(["--file", str(NORMAL), "--captured", str(captured), "--json", *options])
        return status, json.loads(self.output.readouterr().out)


@pytest.fixture
def checker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Checker:
    return Checker(tmp_path, capsys)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_selection(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--file", str(DATA / f"{name}.csv.xz"), "--select-only", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["requests"],
        result["spans"],
        result["selected"],
        len(result["fired"]),
    ) == GOLDEN[name]
    # One trace of Train Ticket's 71 is 1.4 %, two are 2.8 %.
    assert abs(result["selected_share"] - 0.02) < 0.001 or name == "trainticket-normal"


@pytest.mark.parametrize(
    "case",
    json.loads((TESTS / "checker" / "vectors.json").read_text()),
    ids=lambda case: str(case["what"]),
)
def test_vectors(case: dict[str, Any]) -> None:
    window = Window(
        Parameters(
            case["quantile_permille"], case["warmup"], case["window"], case["factor_permille"]
        )
    )
    fires = [at for at, duration in enumerate(case["durations_ns"]) if window.present(duration)]
    assert fires == case["fires"]


@given(
    st.lists(st.integers(0, 50), max_size=60),
    st.integers(1, 1000),
    st.integers(1, 12),
    st.integers(0, 8),
    st.integers(1, 4000),
)
def test_rule_is_its_specification(
    durations: list[int], quantile: int, warmup: int, more: int, factor: int
) -> None:
    """Against the text taken literally: all of the history, sorted anew, with exact fractions."""
    window = Window(Parameters(quantile, warmup, warmup + more, factor))
    for at, duration in enumerate(durations):
        before = sorted(durations[max(0, at - warmup - more) : at])
        fires = False
        if len(before) >= warmup:
            nearest = next(
                value
                for rank, value in enumerate(before, 1)
                if Fraction(rank, len(before)) >= Fraction(quantile, 1000)
            )
            fires = duration > Fraction(factor, 1000) * nearest
        assert window.present(duration) == fires


def test_spans_are_taken_by_end_start_and_id() -> None:
    def span(span_id: str, start_ns: int, end_ns: int) -> RecordedSpan:
        return RecordedSpan("t", span_id, "", "pod", "op", start_ns, end_ns, 0)

    # Each is compared with the one presented before it.
    parameters = Parameters(1, 1, 1, 1000)

    def fired(*spans: RecordedSpan) -> list[str]:
        ids = [one.span_id for one in firing_spans(spans, parameters)]
        assert ids == [one.span_id for one in firing_spans(reversed(spans), parameters)]
        return ids

    # By end: 195 after 90. By start or id, 90 would come last and nothing fire.
    assert fired(span("b", 10, 100), span("a", 5, 200)) == ["a"]
    # The same end, so by start: 30 and 3 after 40. By id, 3 would come before 30, which fires.
    assert fired(span("y", 5, 45), span("d", 20, 50), span("a", 47, 50)) == []
    # The same end and start, so by id: the first fires, the second equals it.
    assert fired(span("y", 9, 10), span("c", 17, 20), span("a", 17, 20)) == ["a"]
    other_pod = RecordedSpan("t", "e", "", "other", "op", 0, 1000, 0)
    other_operation = RecordedSpan("t", "f", "", "pod", "other", 0, 1000, 0)
    assert fired(span("y", 9, 10), other_pod, other_operation, span("z", 18, 20)) == ["z"]


def test_all_is_well(checker: Checker) -> None:
    status, result = checker.run([shown(trace_id) for trace_id in selected()])
    assert status == 0
    assert result["ok"]
    assert result["failures"] == []
    assert result["selected"] == result["collected"] == 10
    assert (result["recall"], result["coherent_by_checker"]) == (1, 1)
    assert (result["false_coherent"], result["false_incoherent"]) == (0, 0)
    assert result["verdicts"] == {"coherent": 10}
    assert result["missing"] == result["not_selected"] == result["without_latency_trigger"] == []
    assert all(trace["complete"] for trace in result["per_trace"].values())


def test_a_file_of_lines_is_as_good_as_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "captured"
    file.write_text("\n".join(json.dumps(shown(trace_id)) for trace_id in selected()))
    assert main(["--file", str(NORMAL), "--captured", str(file)]) == 0
    text = capsys.readouterr().out
    assert "recall               100.00%" in text
    assert "FAILED" not in text


def lose_span(trace: Shown) -> None:
    del trace["spans"][3]
    trace["span_count"] -= 1


def lose_all_spans(trace: Shown) -> None:
    trace["spans"].clear()
    trace["span_count"] = 0


def repeat_span(trace: Shown) -> None:
    trace["spans"].append(copy.deepcopy(trace["spans"][3]))
    trace["span_count"] += 1


def add_span(trace: Shown) -> None:
    trace["spans"].append({**trace["spans"][3], "span_id": "0" * 16})
    trace["span_count"] += 1


def miscount(trace: Shown) -> None:
    trace["span_count"] += 1


def unfinish(trace: Shown) -> None:
    trace["spans"][3].update(end_ns=None, unfinished=True)


def change(field: str, to: Callable[[Any], Any]) -> Callable[[Shown], None]:
    def fault(trace: Shown) -> None:
        trace["spans"][3][field] = to(trace["spans"][3][field])

    return fault


def change_attribute(name: str, value: object) -> Callable[[Shown], None]:
    def fault(trace: Shown) -> None:
        trace["spans"][3]["attributes"][name] = value

    return fault


FAULTS: dict[str, tuple[Callable[[Shown], None], str]] = {
    "missing span": (lose_span, "missing_span"),
    "no span at all": (lose_all_spans, "missing_span"),
    "span twice": (repeat_span, "duplicate_span"),
    "span of nowhere": (add_span, "extra_span"),
    "wrong count": (miscount, "span_count"),
    "unfinished": (unfinish, "unfinished"),
    "unfinished, with an end": (change("unfinished", lambda _: True), "unfinished"),
    "without an end, said to be finished": (change("end_ns", lambda _: None), "unfinished"),
    "start 1 ns late": (change("start_ns", lambda value: value + 1), "start"),
    "end 1 ns early": (change("end_ns", lambda value: value - 1), "end"),
    "other node": (change("node", lambda value: value + "x"), "node"),
    "other parent": (change("parent_id", lambda _: "1" * 16), "parent"),
    "no parent": (change("parent_id", lambda _: ""), "parent"),
    "other operation": (change("name", lambda _: "op"), "operation"),
    "other pod attribute": (change_attribute("pod", "x"), "attribute"),
    "no duration attribute": (change_attribute("duration_us", None), "attribute"),
    "other duration attribute": (change_attribute("duration_us", 1.5), "attribute"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("verdict", ["coherent", "partial"])
def test_one_fault_is_found(name: str, verdict: str, checker: Checker) -> None:
    fault, kind = FAULTS[name]
    traces = [shown(trace_id) for trace_id in selected()]
    fault(traces[4])
    traces[4]["verdict"]["kind"] = verdict
    status, result = checker.run(traces)
    assert status == 1
    broken = {key: trace for key, trace in result["per_trace"].items() if not trace["complete"]}
    assert broken.keys() == {selected()[4]}
    assert {one["kind"] for one in broken[selected()[4]]["differences"]} == {kind}
    assert result["recall"] == 1
    assert result["coherent_by_checker"] == 0.9
    assert result["false_coherent"] == (verdict == "coherent")
    assert result["false_incoherent"] == 0
    assert [text.split(":")[0] for text in result["failures"]] == (
        ["false_coherent"] if verdict == "coherent" else []
    ) + ["coherent_by_checker"]


def test_number_of_differences_is_that_of_the_faults(checker: Checker) -> None:
    trace = shown(selected()[0])
    trace["spans"][0]["start_ns"] += 1
    trace["spans"][1]["start_ns"] += 1
    trace["spans"][1]["node"] = "x"
    _, result = checker.run([trace])
    assert [
        (one["kind"], one["span_id"]) for one in result["per_trace"][selected()[0]]["differences"]
    ] == [
        ("start", trace["spans"][0]["span_id"]),
        ("node", trace["spans"][1]["span_id"]),
        ("start", trace["spans"][1]["span_id"]),
    ]


def test_missing_trace(checker: Checker) -> None:
    status, result = checker.run([shown(trace_id) for trace_id in selected()[1:]])
    assert status == 1
    assert result["recall"] == 0.9
    assert result["missing"] == [selected()[0]]
    assert result["failures"] == ["recall: 1 of 10 selected traces were not collected"]


def test_nothing_collected_at_all(checker: Checker) -> None:
    status, result = checker.run([])
    assert status == 1
    assert (result["recall"], result["coherent_by_checker"], result["verdicts"]) == (0, None, {})


def test_extra_trace(checker: Checker) -> None:
    extra = next(trace_id for trace_id in recording() if trace_id not in selected())
    status, result = checker.run([shown(trace_id) for trace_id in (*selected(), extra)])
    assert status == 0
    assert result["not_selected"] == [extra]
    assert result["collected"] == 11
    assert result["recall"] == 1


def test_trace_that_is_not_in_the_file(checker: Checker) -> None:
    traces = [shown(trace_id) for trace_id in selected()]
    traces.append({**shown(selected()[0]), "trace_id": "f" * 32})
    status, result = checker.run(traces)
    assert status == 1
    assert result["not_selected"] == ["f" * 32]
    assert [one["kind"] for one in result["per_trace"]["f" * 32]["differences"]] == [
        "unknown_trace"
    ]
    assert result["false_coherent"] == 1


def test_spans_under_the_wrong_trace(checker: Checker) -> None:
    traces = [shown(trace_id) for trace_id in selected()]
    traces[0]["spans"], traces[1]["spans"] = traces[1]["spans"], traces[0]["spans"]
    status, result = checker.run(traces)
    assert status == 1
    assert result["false_coherent"] == 2


def test_trace_that_was_listed_and_never_shown(checker: Checker) -> None:
    traces = [shown(trace_id) for trace_id in selected()[1:]]
    status, result = checker.run(traces, listed=list(selected()))
    assert status == 1
    assert result["recall"] == 1
    assert result["verdicts"] == {"coherent": 9, "none": 1}
    assert [one["kind"] for one in result["per_trace"][selected()[0]]["differences"]] == [
        "not_shown"
    ]


def test_complete_trace_that_is_called_partial(checker: Checker) -> None:
    traces = [shown(trace_id) for trace_id in selected()]
    traces[2]["verdict"]["kind"] = "partial"
    status, result = checker.run(traces)
    assert status == 1
    assert result["false_incoherent"] == 1
    assert result["verdicts"] == {"coherent": 9, "partial": 1}
    assert result["failures"] == [
        "false_incoherent: 1 of 10 complete traces are not called coherent"
    ]
    assert checker.run(traces, "--allow-false-incoherent")[0] == 0


def test_trace_that_another_trigger_brought(checker: Checker) -> None:
    traces = [shown(trace_id) for trace_id in selected()]
    traces[2]["triggers"][0]["name"] = "operator"
    status, result = checker.run(traces)
    assert status == 0
    assert result["without_latency_trigger"] == [selected()[2]]


def test_overwritten_traces_are_excused_but_not_when_called_coherent(
    checker: Checker, tmp_path: Path
) -> None:
    lost, torn, whole = selected()[:3]
    traces = [shown(trace_id) for trace_id in selected() if trace_id != lost]
    lose_span(traces[0])
    traces[0]["verdict"]["kind"] = "lossy"
    assert traces[0]["trace_id"] == torn
    excuses = tmp_path / "overwritten"
    excuses.write_text(f"{lost}\n{torn}\n{whole}\n")
    assert checker.run(traces)[0] == 1
    status, result = checker.run(traces, "--allow-overwritten", str(excuses))
    assert status == 0
    assert result["excused"] == sorted([lost, torn])
    assert (result["recall"], result["coherent_by_checker"], result["missing"]) == (1, 1, [])

    traces[0]["verdict"]["kind"] = "coherent"
    status, result = checker.run(traces, "--allow-overwritten", str(excuses))
    assert status == 1
    assert result["false_coherent"] == 1

    excuses.write_text(f"{torn}\n")
    traces[0]["verdict"]["kind"] = "lossy"
    status, result = checker.run(traces, "--allow-overwritten", str(excuses))
    assert status == 1
    assert result["missing"] == [lost]


def test_text_names_trace_and_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = [shown(trace_id) for trace_id in selected()]
    lost = traces[0]["spans"][3]
    lose_span(traces[0])
    status = main(["--file", str(NORMAL), "--captured", str(capture(tmp_path, traces))])
    text = capsys.readouterr().out
    assert status == 1
    assert f"missing_span {lost['span_id']}: {lost['name']} on {lost['node']}" in text
    assert "FAILED false_coherent: 1 traces" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "captured:1: not JSON"),
        ('\n\n{"trace_id": 5}', "captured:3: field 'trace_id' is 5, want str"),
        ("[]", "no field 'trace_id'"),
        ('{"trace_id": "a", "spans": []}', "no field 'triggers'"),
        ('{"trace_id": "a"} {"trace_id": "a"}', "listed a second time"),
    ],
)
def test_bad_output_is_refused(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "captured"
    file.write_text(text)
    assert main(["--file", str(NORMAL), "--captured", str(file)]) == 2
    assert says in capsys.readouterr().err


def test_ill_typed_span_and_repeated_trace_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = shown(selected()[0])
    file = tmp_path / "captured"
    file.write_text(json.dumps(trace) * 2)
    assert main(["--file", str(NORMAL), "--captured", str(file)]) == 2
    assert "shown a second time" in capsys.readouterr().err
    trace["spans"][0]["start_ns"] = "12"
    file.write_text(json.dumps(trace))
    assert main(["--file", str(NORMAL), "--captured", str(file)]) == 2
    assert "field 'start_ns' is '12', want int" in capsys.readouterr().err


HEADER = (
    "TraceID,SpanID,ParentID,PodName,OperationName,StartTimeUnixNano,EndTimeUnixNano,Duration\n"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n", "columns are"),
        (HEADER, "holds no span"),
        (HEADER + "t,s,root,p,o,1,x,0\n", ":2: invalid literal"),
        (HEADER + "t,s,root,p,o,1\n", ":2: not enough values"),
        (HEADER + "t,s,root,p,o,2,1,0\n", "ends before it starts"),
        (HEADER + "t,s,root,p,o,1,2,0\n" * 2, "is there twice"),
    ],
)
def test_bad_recording_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "recording.csv"
    file.write_text(text)
    with pytest.raises(BadInput, match=says):
        read_recording(file)


def test_recording_without_a_rule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no factor_permille for 'other'; it knows onlineboutique"):
        read_parameters(DATA / "rules.json", Path("other.csv.xz"))
    broken = tmp_path / "rules.json"
    broken.write_text("[]")
    with pytest.raises(BadInput, match="not a table"):
        read_parameters(broken, NORMAL)


@pytest.mark.parametrize(
    "values", [(0, 1, 1, 1), (1001, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 0), (1, 1, 1, 2.0)]
)
def test_bad_parameters_are_refused(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(BadInput, match="want an integer"):
        Parameters(*values)


def test_checker_shares_no_code_with_what_it_judges() -> None:
    """Its modules import the standard library and each other only."""
    for module in (TESTS / "checker").glob("*.py"):
        for line in module.read_text().splitlines():
            if line.startswith(("import ", "from ")):
                package = line.split()[1]
                assert package.startswith("tests.checker.") or "." not in package.removeprefix(
                    "collections."
                )
                assert package.split(".")[0] not in (
                    "appliance",
                    "coordinator",
                    "protocol",
                    "backsight",
                )
