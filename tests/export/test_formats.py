# SPDX-License-Identifier: Apache-2.0
"""What stands in an export, in each format."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import backsight_pb2 as pb
import perfetto_pb2 as pf
import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from ctl import __main__ as ctl
from ctl.coordinator import NotFound
from formats import stamped as names
from formats.jaeger import trace_json
from formats.otlp import NodeSpans
from formats.otlp_json import otlp_json
from formats.perfetto import PerfettoWriter
from formats.spans import Resource, Span
from formats.stamped import ShownTrace, stamped
from formats.tags import text_of
from protocol.messages import TraceId
from tests.export.collected import BEGIN_NS, EVENTS, FLOWS, MS, SPANS, TRACE, detail


def spans_of(data: TracesData) -> dict[int, Any]:
    return {
        int.from_bytes(span.span_id, "big"): span
        for resource in data.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }


def attributes_of(span: Any) -> dict[str, Any]:
    return {item.key: item.value for item in span.attributes}


def test_local_roots_say_why_the_trace_is_there() -> None:
    spans = spans_of(stamped(detail(), one_clock=False).otlp())
    roots = {span_id for span_id, span in spans.items() if names.VERDICT in attributes_of(span)}
    assert roots == {0x1, 0x3, 0x6}
    said = attributes_of(spans[0x6])
    assert said[names.TRIGGER].string_value == "error"  # it fired before the other
    assert said[names.TRIGGER_WHY].string_value == "OutOfStock"
    assert said[names.TRIGGER_NODE].string_value == "back"
    assert said[names.TRIGGER_SOURCE].string_value == "application"
    others = said[names.OTHER_TRIGGERS].array_value.values
    assert [item.string_value for item in others] == ["latency"]
    assert said[names.VERDICT].string_value == "partial"
    assert said[names.VERDICT_VERSION].int_value == 2
    reasons = said[names.VERDICT_REASONS].array_value.values
    assert [item.string_value for item in reasons] == ["unfinished on back: span 7"]
    assert said[names.NODE].string_value == "back"
    assert names.LATERAL not in said
    assert said["rpc.system"].string_value == "grpc"


def test_sixteen_reasons_are_told_and_how_many_more_there_are() -> None:
    for count in (16, 17, 40):
        collected = detail()
        del collected.summary.verdict.reasons[:]
        for number in range(count):
            collected.summary.verdict.reasons.add(kind="lossy", node="edge", detail=str(number))
        (said,) = {
            tuple(span.attributes[names.VERDICT_REASONS])  # type: ignore[arg-type]
            for part in stamped(collected, one_clock=True).parts
            for span in part.spans
            if names.VERDICT_REASONS in span.attributes
        }
        told = tuple(f"lossy on edge: {number}" for number in range(min(count, 16)))
        assert said == told + ((f"and {count - 16} more",) if count > 16 else ())


def test_whole_numbers_are_compared_without_a_fraction_while_they_are_short() -> None:
    assert [text_of(value) for value in (2.0, -3.0, 2.5, 1e20, -1e20)] == [
        "2", "-3", "2.5", "1" + "0" * 20, "-1" + "0" * 20
    ]  # fmt: skip
    assert [text_of(value) for value in (1e21, -1e21, 1e300)] == ["1e+21", "-1e+21", "1e+300"]


def test_a_lateral_is_called_one() -> None:
    lateral = detail(TraceId(bytes(15) + b"\x01"))
    for trigger in lateral.summary.triggers:
        trigger.primary = TRACE
    spans = spans_of(stamped(lateral, one_clock=False).otlp())
    assert attributes_of(spans[0x1])[names.LATERAL].bool_value


def test_a_trace_without_a_trigger_has_a_verdict_all_the_same() -> None:
    without = detail()
    del without.summary.triggers[:]
    said = attributes_of(spans_of(stamped(without, one_clock=False).otlp())[0x1])
    assert names.TRIGGER not in said
    assert said[names.VERDICT].string_value == "partial"


def test_times_are_as_written_or_on_one_clock() -> None:
    written = spans_of(stamped(detail(), one_clock=False).otlp())
    corrected = spans_of(stamped(detail(), one_clock=True).otlp())
    assert written[0x6].start_time_unix_nano == BEGIN_NS + 45 * MS
    assert corrected[0x6].start_time_unix_nano == BEGIN_NS + 40 * MS
    assert corrected[0x6].end_time_unix_nano == BEGIN_NS + 60 * MS
    assert corrected[0x6].events[0].time_unix_nano == BEGIN_NS + 55 * MS
    assert corrected[0x7].end_time_unix_nano == 0
    assert written[0x1] == corrected[0x1]


def test_otlp_json_keeps_to_its_own_rules() -> None:
    data = stamped(detail(), one_clock=False).otlp()
    encoded = json.loads(json.dumps(otlp_json(data)))
    found = {
        span["spanId"]: span
        for resource in encoded["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }
    assert len(found) == SPANS
    root = found["0000000000000001"]
    assert root["traceId"] == TRACE.hex()
    assert "parentSpanId" not in root
    assert root["kind"] == 2  # a number
    assert root["startTimeUnixNano"] == str(BEGIN_NS)  # a text
    assert root["status"]["code"] == 2
    attributes = {item["key"]: item["value"] for item in root["attributes"]}
    assert attributes["n"] == {"intValue": str(1 << 60)}
    assert found["0000000000000002"]["parentSpanId"] == "0000000000000001"
    (link,) = found["0000000000000004"]["links"]
    assert (link["traceId"], link["spanId"]) == ("0" * 30 + "07", "0" * 14 + "99")
    raw = {item["key"]: item["value"] for item in found["0000000000000003"]["attributes"]}
    assert raw["raw"] == {"bytesValue": "AP8="}  # Base64, as only ids are not


def test_otlp_json_says_all_that_otlp_does() -> None:
    data = stamped(detail(), one_clock=False).otlp()
    ids = [span.span_id for span in spans_of(data).values()]
    encoded = otlp_json(data)
    # A reader of plain protobuf JSON wants Base64, of which hexadecimal is a case.
    for resource in encoded["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for item in (span, *span.get("links", ())):
                    for key in ("traceId", "spanId", "parentSpanId"):
                        if key in item:
                            item[key] = base64_of(item[key])
    assert ParseDict(encoded, TracesData()) == data
    assert len(ids) == SPANS


def base64_of(hexadecimal: str) -> str:
    return base64.b64encode(bytes.fromhex(hexadecimal)).decode()


def test_jaeger_json_is_what_its_page_imports() -> None:
    encoded = json.loads(json.dumps(trace_json(stamped(detail(), one_clock=True))))
    assert encoded["traceID"] == TRACE.hex()
    services = {name: process["serviceName"] for name, process in encoded["processes"].items()}
    spans = {span["spanID"]: span for span in encoded["spans"]}
    assert len(spans) == SPANS
    stock = spans["0000000000000006"]
    assert services[stock["processID"]] == "stock"
    assert stock["references"] == [
        {"refType": "CHILD_OF", "traceID": TRACE.hex(), "spanID": "0000000000000005"}
    ]
    assert stock["startTime"] == BEGIN_NS // 1000 + 40_000
    assert stock["duration"] == 20_000
    tags = {tag["key"]: (tag["type"], tag["value"]) for tag in stock["tags"]}
    assert tags["span.kind"] == ("string", "server")
    assert tags["error"] == ("bool", True)
    assert tags["otel.status_code"] == ("string", "ERROR")
    assert tags["otel.status_description"] == ("string", "out of stock")
    assert tags["otel.scope.name"] == ("string", "shop.instrumentation")
    assert tags[names.TRIGGER] == ("string", "error")
    (log,) = stock["logs"]
    assert log["timestamp"] == BEGIN_NS // 1000 + 55_000
    assert {field["key"]: field["value"] for field in log["fields"]} == {
        "event": "exception",
        "exception.type": "OutOfStock",
        "exception.stacktrace": "Traceback ...",
    }
    front = {tag["key"]: (tag["type"], tag["value"]) for tag in spans["0000000000000001"]["tags"]}
    assert front["n"] == ("int64", str(1 << 60))  # JavaScript has no such number
    cart = {tag["key"]: (tag["type"], tag["value"]) for tag in spans["0000000000000003"]["tags"]}
    assert cart["tags"] == ("string", '["a",1]')
    assert cart["raw"] == ("binary", "AP8=")
    link = spans["0000000000000004"]["references"][1]
    assert link == {
        "refType": "FOLLOWS_FROM",
        "traceID": "0" * 30 + "07",
        "spanID": "0" * 14 + "99",
    }
    running = spans["0000000000000007"]
    assert running["duration"] == 0
    assert running["warnings"] == ["no end was recorded: it still ran, or its process died"]
    process = encoded["processes"][stock["processID"]]
    assert process["tags"] == [{"key": "process.pid", "type": "int64", "value": 102}]


def packets_of(encoded: bytes) -> list[pf.TracePacket]:
    return list(pf.Trace.FromString(encoded).packet)


def test_a_process_that_calls_itself_ever_otherwise_costs_no_more_a_span() -> None:
    calls = []
    for count in (100, 1000):
        spans = [
            Span(
                i + 1,
                0,
                "work",
                1,
                1,
                client=1,
                handle=i,
                process=None,
                resource=Resource({"n": i}),
            )
            for i in range(count)
        ]
        made: list[None] = []
        sys.setprofile(lambda *_, made=made: made.append(None))
        try:
            shown = trace_json(ShownTrace(TRACE, (NodeSpans("front", spans),)))
        finally:
            sys.setprofile(None)
        assert len(shown["processes"]) == count
        calls.append(len(made) / count)
    assert calls[1] < 2 * calls[0]


def test_equal_resources_are_one_process() -> None:
    spans = [
        Span(i + 1, 0, "work", 1, 1, client=1, handle=i, process=None, resource=Resource({"n": 1}))
        for i in range(3)
    ]
    shown = trace_json(ShownTrace(TRACE, (NodeSpans("front", spans),)))
    assert list(shown["processes"]) == ["p1"]


def test_slices_of_a_track_lie_within_each_other() -> None:
    packets = packets_of(PerfettoWriter().write(stamped(detail(), one_clock=True)))
    times = [packet.timestamp for packet in packets if packet.HasField("track_event")]
    assert times == sorted(times)
    open_on: dict[int, list[str]] = {}
    kinds = dict.fromkeys(pf.TrackEvent.Type.values(), 0)
    for packet in packets:
        event = packet.track_event
        kinds[event.type] += 1
        if event.type == pf.TrackEvent.TYPE_SLICE_BEGIN:
            open_on.setdefault(event.track_uuid, []).append(event.name)
        elif event.type == pf.TrackEvent.TYPE_SLICE_END:
            open_on[event.track_uuid].pop()
    assert kinds[pf.TrackEvent.TYPE_SLICE_BEGIN] == SPANS
    assert kinds[pf.TrackEvent.TYPE_SLICE_END] == SPANS - 1
    assert kinds[pf.TrackEvent.TYPE_INSTANT] == EVENTS
    assert [name for names_open in open_on.values() for name in names_open] == ["still runs"]
    flows = [flow for packet in packets for flow in packet.track_event.flow_ids]
    assert sorted(flows) == sorted(list(range(1, FLOWS + 1)) * 2)
    processes = [
        packet.track_descriptor.process.process_name
        for packet in packets
        if packet.track_descriptor.HasField("process")
    ]
    assert sorted(processes) == ["cart on back", "front on edge", "stock on back"]


def test_a_second_trace_uses_the_tracks_of_the_first() -> None:
    writer = PerfettoWriter()
    later = detail(TraceId(bytes(15) + b"\x01"))
    for part in later.slices:
        part.clock_offset_ns -= 1000 * MS
    first = packets_of(writer.write(stamped(detail(), one_clock=True)))
    second = packets_of(writer.write(stamped(later, one_clock=True)))
    described = [p.track_descriptor for p in second if p.HasField("track_descriptor")]
    assert all(track.HasField("parent_uuid") for track in described)
    assert len(described) < sum(p.HasField("track_descriptor") for p in first)
    flows = [
        {flow for packet in packets for flow in packet.track_event.flow_ids}
        for packets in (first, second)
    ]
    assert not flows[0] & flows[1]


def test_spans_that_never_ended_cost_no_more_the_more_there_are() -> None:
    def calls(count: int) -> int:
        spans = [
            Span(i + 1, 0, "work", 1, i, client=1, handle=i, process=None) for i in range(count)
        ]
        made = 0

        def made_one(*_: object) -> None:
            nonlocal made
            made += 1

        trace = ShownTrace(TRACE, (NodeSpans("front", spans),))
        writer = PerfettoWriter()
        sys.setprofile(made_one)
        try:
            packets = packets_of(writer.write(trace))
        finally:
            sys.setprofile(None)
        assert sum(p.track_descriptor.HasField("parent_uuid") for p in packets) == count
        return made

    assert calls(800) < 4.5 * calls(200)


def test_a_span_stands_in_its_parent_or_on_the_first_free_lane() -> None:
    def span(number: int, parent: int, start_ns: int, end_ns: int | None) -> Span:
        return Span(
            number, parent, str(number), 1, start_ns, 1, number, process=None, end_ns=end_ns
        )

    spans = [
        span(1, 0, 10, 100),
        span(2, 1, 20, 40),  # in 1
        span(3, 1, 30, 60),  # beside 2
        span(4, 1, 50, 90),  # in 1 again: 2 is over
        span(5, 4, 55, 95),  # longer than its parent: beside it
        span(6, 1, 60, 70),  # 4 is open in 1; where 3 was
        span(7, 0, 100, None),  # where 1 was
        span(8, 7, 110, 120),  # in it
    ]
    packets = packets_of(PerfettoWriter().write(ShownTrace(TRACE, (NodeSpans("front", spans),))))
    lanes = {
        p.track_descriptor.uuid: p.track_descriptor.name
        for p in packets
        if p.track_descriptor.HasField("parent_uuid")
    }
    stands = {
        p.track_event.name: lanes[p.track_event.track_uuid]
        for p in packets
        if p.track_event.type == pf.TrackEvent.TYPE_SLICE_BEGIN
    }
    first, second, third = "lane 1", "lane 2", "lane 3"
    assert list(stands.values()) == [first, first, second, first, third, second, first, first]


class Coordinator:
    """Has the traces that it is made with."""

    def __init__(self, *traces: pb.TraceDetail) -> None:
        self.by_id = {trace.summary.trace: trace for trace in traces}
        self.gone: set[bytes] = set()

    def __call__(self, endpoint: str, tls: object) -> Coordinator:
        return self

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def traces(self, request: pb.ListTracesRequest) -> list[pb.TraceSummary]:
        assert (request.trigger, request.limit) == ("latency", 2)
        return [trace.summary for trace in self.by_id.values()]

    def trace(self, trace: bytes) -> pb.TraceDetail:
        if trace not in self.by_id or trace in self.gone:
            raise NotFound(f"no trace {trace.hex()} is stored")
        return self.by_id[trace]


T1, T2 = (TraceId(number.to_bytes(16, "big")) for number in (1, 2))


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    coordinator = Coordinator(detail(T1), detail(T2))
    monkeypatch.setattr(ctl, "CoordinatorClient", coordinator)
    return coordinator


def test_an_export_of_named_traces(
    coordinator: Coordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    command = ["export", T2.hex(), T1.hex(), "--output", str(output)]
    assert ctl.main(command) == 0
    lines = output.read_text().splitlines()
    assert [json.loads(line).keys() for line in lines] == [{"resourceSpans"}] * 2
    assert f"exported 2 traces, {2 * SPANS} spans" in capsys.readouterr().err
    assert ctl.main([*command, "--format", "jaeger-json"]) == 0
    answer = json.loads(output.read_text())
    assert [trace["traceID"] for trace in answer["data"]] == [T2.hex(), T1.hex()]
    assert ctl.main([*command, "--format", "perfetto"]) == 0
    events = [packet.track_event for packet in packets_of(output.read_bytes())]
    begins = [event for event in events if event.type == pf.TrackEvent.TYPE_SLICE_BEGIN]
    assert len(begins) == 2 * SPANS


def test_an_export_of_what_a_filter_finds_leaves_out_what_was_deleted_meanwhile(
    coordinator: Coordinator, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    coordinator.gone = {T1}
    assert ctl.main(["export", "--trigger", "latency", "--limit", "2"]) == 0
    (line,) = capsysbinary.readouterr().out.splitlines()
    assert T2.hex().encode() in line


def test_a_failed_export_leaves_no_file(
    coordinator: Coordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator.gone = {T2}
    output = tmp_path / "out.json"
    assert ctl.main(["export", T1.hex(), T2.hex(), "--output", str(output)]) == 1
    assert f"no trace {T2.hex()} is stored" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [[], [T1.hex(), "--limit", "1"], ["--format", "zipkin"]])
def test_what_to_export_must_be_said(coordinator: Coordinator, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ctl.main(["export", *wrong])
    assert ended.value.code == 2
