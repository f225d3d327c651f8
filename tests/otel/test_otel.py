# SPDX-License-Identifier: Apache-2.0
"""The OpenTelemetry integration, run by PyPI's SDK, read back from the pool of a real node."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from ctl.node import NodeClient
from ctl.trace import TraceView
from formats.spans import About
from protocol.messages import TraceId
from testbed.topology import Node
from testbed.venvs import made_once
from tests.otel.conftest import REPOSITORY, Application


def peek(application: Application, trace: str) -> TraceView:
    return NodeClient(str(application.node.socket_path)).peek(TraceId(bytes.fromhex(trace.strip())))


def otlp(application: Application, trace: str) -> TracesData:
    identity = TraceId(bytes.fromhex(trace.strip()))
    view = NodeClient(str(application.node.socket_path)).peek(identity)
    encoded = [part.content.otlp(identity, About(part.node)) for part in view.slices]
    return TracesData.FromString(b"".join(encoded))


def by_name(data: TracesData) -> dict[str, tuple[str, str, Span]]:
    """Each span with its resource and scope, as text."""
    return {
        span.name: (
            f"{resource.resource}{resource.schema_url}",
            f"{scope.scope}{scope.schema_url}",
            span,
        )
        for resource in data.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }


def test_otlp_is_what_the_sdk_would_have_sent(application: Application, tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    trace = application.run("fidelity", sent)
    # The request has the fields of TracesData.
    wanted = TracesData.FromString(sent.read_bytes())
    got = otlp(application, trace)
    assert sorted(by_name(got)) == sorted(by_name(wanted))
    assert len(by_name(wanted)) == 8
    for name, expected in by_name(wanted).items():
        resource, scope, span = by_name(got)[name]
        assert (resource, scope) == expected[:2], name
        assert span == expected[2], name
    root = by_name(got)["GET /cart/{id}"][2]
    # The limits of the SDK were at work, and are told.
    assert root.dropped_attributes_count > 0
    assert root.dropped_events_count == 2
    assert root.dropped_links_count == 1
    assert root.events[0].dropped_attributes_count == 1
    assert root.trace_state == "vendor=x,ot=rv:12345678901234"
    assert len(got.resource_spans) == len(wanted.resource_spans) == 1


def names(view: TraceView) -> Iterable[str]:
    return (placed.span.name for placed in view.spans)


def test_what_is_unusual_is_recorded_as_well_as_may_be(
    application: Application, tmp_path: Path
) -> None:
    rules = tmp_path / "triggers.yaml"
    rules.write_text("error:\nwhen: [{name: served, kind: server}]\n")
    view = peek(application, application.run("unusual", BACKSIGHT_TRIGGERS_FILE=str(rules)))
    misused = [
        *("float start", "negative start", "text start", "float end", "large end"),
        *("None", "7", "bytes", "None", "number of a kind", "no kind", "linked", "event"),
    ]
    assert Counter(names(view)) == Counter(["child", "root", *misused]) + Counter(thread=200)
    assert all(part.content.whole for part in view.slices)
    (root,) = (placed.span for placed in view.spans if placed.span.name == "root")
    assert root.attributes == {"huge": str(1 << 70), "surrogate": "?"}
    assert not any(placed.span.unfinished for placed in view.spans)
    spans = {placed.span.name: placed.span for placed in view.spans}
    assert spans["float start"].start_ns == spans["float end"].end_ns == 1_500_000_000_000_000_000
    assert spans["negative start"].start_ns == spans["text start"].start_ns == 0
    assert spans["number of a kind"].kind == Span.SPAN_KIND_PRODUCER
    assert spans["no kind"].kind == Span.SPAN_KIND_UNSPECIFIED
    assert [link.span_id for link in spans["linked"].links] == [6]
    assert spans["linked"].dropped_links == 1
    assert [(event.name, event.time_ns) for event in spans["event"].events] == [("None", 1)]


def test_what_cannot_be_recorded_is_counted_and_fails_no_request(application: Application) -> None:
    view = peek(application, application.run("unwritable", BACKSIGHT_TRIGGERS="none"))
    assert list(names(view)) == ["whose rules fail"]


def test_scopes_have_numbers_of_their_own_and_take_no_more_memory_than_some(
    application: Application,
) -> None:
    view = peek(application, application.run("scopes", BACKSIGHT_TRIGGERS="none"))
    assert Counter(names(view)) == {"root": 1, "again": 3}


def test_tracestate_is_shared_with_others(application: Application) -> None:
    inside, outside = json.loads(application.run("contexts"))
    first, *others = inside["tracestate"].split(",")
    assert first.startswith("bs=1-")
    assert others == ["vendor=x"]
    assert outside == {}


def test_rules_fire_for_what_they_are_meant_for(application: Application, tmp_path: Path) -> None:
    rules = tmp_path / "triggers.yaml"
    rules.write_text(
        "error:\nwhen:\n- name: refused\n  attributes: {http.response.status_code: [402]}\n"
    )
    fired = json.loads(application.run("triggers", BACKSIGHT_TRIGGERS_FILE=str(rules)))
    triggers = {
        what: next(iter(peek(application, trace).slices)).trigger for what, trace in fired.items()
    }
    assert triggers == {
        "ok": "",
        "error": "error",
        "refused": "refused",
        # By the semantic conventions, these are errors of the callee's span too.
        **dict.fromkeys(("answered 500", "answered 503 of old"), ""),
        **dict.fromkeys(("answered UNAVAILABLE", "answered INTERNAL"), ""),
        # These are none there.
        **dict.fromkeys(("answered 404", "answered 429 of old", "answered NOT_FOUND"), "error"),
        "answered nothing": "error",
        "served": "error",
        "message": "",
    }


def test_a_call_that_nobody_answered_says_so(application: Application) -> None:
    called = json.loads(application.run("unanswered", BACKSIGHT_TRIGGERS="none"))
    said = {
        what: [
            (body.address, body.error, body.unsent)
            for part in peek(application, trace).slices
            for body in part.content.unanswered
        ]
        for what, trace in called.items()
    }
    refused = "ConnectionRefusedError: nobody listens"
    assert said == {
        **{what: [] for what in called},
        "refused": [("10.9.9.9", refused, True)],
        "refused, says its status": [("10.9.9.9", refused, True)],
        # A try before the last one may have been heard.
        "refused at last": [("10.9.9.9", refused, False)],
        "unavailable": [("10.9.9.9", "failed", False)],
    }


def test_a_limited_error_says_how_many_were_suppressed(application: Application) -> None:
    told, rest, last = json.loads(application.run("limited"))
    assert told == [
        *(["pays: error: no money"], ["pays: error: no money"], []),
        *(["ships: error: no money"], ["pays: Timeout: no money"]),
        # Two spans a trace.
        *([], ["pays: error (4 suppressed before): no money"], []),
        *(["pays: error (2 suppressed before): no money"], ["ships: error: no money"]),
        ["pays: error: no money"],
    ]
    assert [len(whys) for whys in rest] == [1, 1, 1, 0]
    assert last == ["last: error: no money"]


@pytest.mark.slow
@pytest.mark.root
def test_the_benchmark_measures_a_process_and_a_service_each_way(tmp_path: Path) -> None:
    output = tmp_path / "otel.jsonl"
    subprocess.run(
        [REPOSITORY / "bench/otel.py", "--quick", "--output", output],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    results = [json.loads(line) for line in output.read_text().splitlines()]
    units = {
        "cpu_us_per_span": "us",
        "service_requests_per_s": "1/s",
        "service_cpu_ms_per_request": "ms",
        "service_p50_ms": "ms",
        "service_p99_ms": "ms",
    }
    assert [
        (result["metric"], result["unit"], result["params"]["processor"]) for result in results
    ] == [
        (metric, unit, processor)
        for metric, unit in units.items()
        for processor in ("noop", "backsight", "otlp")
    ]
    for result in results:
        assert 0 < result["min"] <= result["value"] <= result["max"]


def test_no_request_fails_for_the_headers_of_its_answer(application: Application) -> None:
    traces = json.loads(application.run("answers"))
    told = {
        what: next(iter(peek(application, trace).slices)).trigger for what, trace in traces.items()
    }
    # A call that no node answered is told here; else by who answered.
    nameless = dict.fromkeys(("none", "empty", "text", "broken", "pairs"), "error")
    assert told == {**nameless, "named": "", "named pairs": ""}


def test_a_thread_shows_the_trace_of_the_span_that_it_is_in(application: Application) -> None:
    assert json.loads(application.run("shown_spans")) == []


def test_a_server_names_its_node_beside_what_others_tell_the_caller(
    application: Application,
) -> None:
    told = json.loads(application.run("contexts_of_servers"))
    node = "backsight-node"
    assert told == {
        "ServerContext": [[node, "before"], [node, "after"]],
        "Slotted": [[node, "before"], ["after"]],
        "Unreadable": [["before"], [node, "after"]],
        # Nobody is sent here for a request of which there is no span here.
        "untraced": [["before"]],
    }


def test_a_context_of_a_server_is_gone_with_its_request(application: Application) -> None:
    gone = json.loads(application.run("contexts_that_go"))
    assert gone == {"ServerContext": True, "Slotted": True, "Unreadable": True}


def test_finalizers_and_signal_handlers_may_make_spans_at_any_place(
    application: Application, tmp_path: Path
) -> None:
    rules = tmp_path / "triggers.yaml"
    rules.write_text(
        "error:\nlatency: {warmup: 1, window: 2}\nrare: {attribute: rare, window: 300}\n"
    )
    trace, made = json.loads(application.run("reentered", BACKSIGHT_TRIGGERS_FILE=str(rules)))
    view = peek(application, trace)
    assert Counter(names(view)) == made
    assert all(part.content.whole for part in view.slices)
    assert not any(placed.span.unfinished for placed in view.spans)
    # Each of its own scope, whose number is no other's.
    assert all(
        placed.span.scope is not None and placed.span.scope.name == placed.span.name
        for placed in view.spans
    )


@pytest.mark.parametrize("chosen", ["", "parentbased_always_on"])
def test_a_provider_that_was_told_nothing_samples_nothing(
    application: Application, chosen: str
) -> None:
    environment = {"OTEL_TRACES_SAMPLER": chosen} if chosen else {}
    made = json.loads(application.run("samplers", **environment))
    root = {what: sampler.partition("root:")[2].partition(",")[0] for what, sampler in made.items()}
    assert root["none"] == ("AlwaysOnSampler" if chosen else "AlwaysOffSampler")
    assert root["always"] == "AlwaysOnSampler"
    assert made["never"] == "BacksightAlwaysRecord{AlwaysOffSampler}"


def test_the_oldest_sdk_that_is_admitted_loses_nothing(daemon: Node) -> None:
    python = made_once("otel-oldest", REPOSITORY / "tests/otel/oldest.txt")
    application = Application(python, daemon)
    view = peek(application, application.run_file("oldest.py"))
    spans = {placed.span.name: placed.span for placed in view.spans}
    assert set(spans) == {"root", "fails", "told"}
    root = spans["root"]
    assert (root.dropped_attributes, root.dropped_events, root.dropped_links) == (1, 1, 1)
    assert root.scope is not None
    assert (root.scope.name, root.scope.version) == ("lib", "1")
    assert [event.name for event in root.events] == ["e1", "e2"]
    assert [link.attributes for link in root.links] == [{"n": 6}]
    assert [event.name for event in spans["fails"].events] == ["exception"]
    assert spans["told"].status_message == "why"
