# SPDX-License-Identifier: Apache-2.0
"""Jaeger's HTTP API: what Jaeger UI and Grafana ask is answered in the shapes that they parse.

The requests are those of their sources, each named where it is used:

    jaegertracing/jaeger-ui  packages/jaeger-ui/src/api/jaeger.ts (legacy)
                             packages/jaeger-ui/src/api/v3/client.ts, schemas.ts (v3)
    grafana/grafana          pkg/tsdb/jaeger/client.go (legacy), grpc_client.go (v3)
"""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import re
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.answers import trace_detail
from coordinator.core.clock import ClockOffset
from coordinator.core.records import (
    AppendSlice,
    PutReleased,
    PutStatus,
    PutTrigger,
    PutVerdict,
)
from coordinator.core.verdict import Verdict
from coordinator.index import asking, making
from coordinator.index import indexer as indexing
from coordinator.index.asking import IndexReader, Search
from coordinator.index.file import IndexFile, index_path
from coordinator.index.indexer import Indexer
from coordinator.store import reader as reading
from coordinator.store.keeping import Keep
from coordinator.store.reader import StoreReader, Wanted
from coordinator.store.retention import StoreLimits
from coordinator.store.writer import Store
from coordinator.web import application as query
from coordinator.web import bodies, legacy, requests, v3
from coordinator.web.bodies import Body, Room, encoded
from coordinator.web.parameters import duration_ns, logfmt, tags_of
from protocol.messages import Group, SliceFlags, SliceStatus, Source, TraceId, TriggerFired
from protocol.verdicts import VerdictKind
from runtime.http import GIVE_UP_OVERDUE, HttpServer
from tests.export.collected import (
    BEGIN_NS,
    CART,
    FRONT,
    MS,
    SPANS,
    STOCK,
    TRACE,
    Said,
    process_bytes,
)
from tests.unit.logs import SILENT, logs_to
from tests.unit.test_store import ROOMY, Clock, Driver, driver, passed

OTHER = TraceId(bytes(15) + b"\x2a")
S = 1000 * MS
BEGIN_US = BEGIN_NS // 1000


def put_trace(
    here: Driver,
    trace: TraceId,
    slices: dict[str, bytes],
    version: int = 1,
    epoch: int = 1,
    judged: Verdict | None = None,
) -> None:
    """Store a trace as the core does; back's clock is 5 ms ahead."""
    fired = TriggerFired(Group("error", trace), (), "OutOfStock", Source.APPLICATION, BEGIN_NS)
    here.write(PutTrigger("back", fired))
    for node, data in slices.items():
        status = SliceStatus(trace, True, SliceFlags.HELD, len(data), epoch=epoch)
        clock = ClockOffset(5 * MS if node == "back" else 0, 1)
        here.write(PutStatus(node, status, clock), AppendSlice(trace, node, epoch, 0, data))
    size = sum(map(len, slices.values()))
    verdict = Verdict(
        version, VerdictKind.COHERENT, (), tuple(slices), size, SPANS, BEGIN_NS, BEGIN_NS + 100 * MS
    )
    here.write(PutVerdict(trace, judged or verdict))


def bring_up_to_date(store: Store, path: Path) -> Indexer:
    indexer = Indexer(store, path, SILENT)
    with StoreReader(path) as reader:
        while indexer._work(reader) is not None:
            pass
    indexer.close()
    return indexer


# A minute later; of the same front end, and of a service with a name that must be quoted.
OTHER_FRONT = process_bytes(
    1,
    "front",
    Said(0x11, 0, "GET /", 60_000, 60_002, attributes={"http.route": "/", "user": "a b"}),
)
OTHER_TEAM = process_bytes(2, "team/ж", Said(0x12, 0x11, "GET /", 60_001, 60_002))


@dataclass(frozen=True, slots=True)
class Api:
    """The API of a store with two traces, and what it logged."""

    url: str
    path: Path
    log: list[str]

    def get(self, path: str, **parameters: object) -> Any:
        status, body = self.ask(path, **parameters)
        assert status == 200, body
        return body

    def ask(self, path: str, **parameters: object) -> tuple[int, Any]:
        asked = f"{self.url}{path}" + (
            f"?{urlencode(parameters, doseq=True)}" if parameters else ""
        )
        return self.ask_url(asked)

    @staticmethod
    def ask_url(asked: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(asked) as response:
                assert response.headers["Content-Type"] == "application/json"
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def found(self, **parameters: object) -> list[str]:
        """The ids that a legacy search finds."""
        return [trace["traceID"] for trace in self.get("/api/traces", **parameters)["data"]]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    path = tmp_path_factory.mktemp("query") / "t.sqlite"
    with driver(path) as here:
        put_trace(here, TRACE, {"edge": FRONT, "back": CART + STOCK})
        put_trace(here, OTHER, {"edge": OTHER_FRONT + OTHER_TEAM})
        indexer = bring_up_to_date(here.store, path)
        assert (indexer.counters.traces_indexed, indexer.counters.traces_failed) == (2, 0)
        now_ns = BEGIN_NS + 120 * S
        log: list[str] = []
        application = query.application(path, logs_to(log), lambda: now_ns)
        with HttpServer("127.0.0.1:0", application, SILENT) as server:
            yield Api(f"http://127.0.0.1:{server.port}", path, log)


SERVICES = ["cart", "front", "stock", "team/ж"]


# -------------------------------------------- Grafana, pkg/tsdb/jaeger/client.go


def test_grafana_lists_services_and_operations(api: Api) -> None:
    # ServicesResponse
    assert api.get("/api/services") == {
        "data": SERVICES,
        "total": 4,
        "limit": 0,
        "offset": 0,
        "errors": None,
    }
    assert api.get("/api/services/cart/operations")["data"] == [
        "POST /cart",
        "Reserve",
        "redis GET",
    ]
    assert api.get(f"/api/services/{quote('team/ж', safe='')}/operations")["data"] == ["GET /"]
    assert api.get("/api/services/nobody/operations")["data"] == []


def test_grafana_searches(api: Api) -> None:
    # Search(): no times at all, tags as JSON of what was logfmt, empty ones left out.
    answer = api.get(
        "/api/traces",
        limit=20,
        service="stock",
        operation="stock.Stock/Reserve",
        tags='{"error":"true","rpc.system":"grpc"}',
        minDuration="5ms",
        maxDuration="1.2s",
    )
    (trace,) = answer["data"]
    assert trace["traceID"] == TRACE.hex()
    assert len(trace["spans"]) == SPANS
    # types.go: what it reads of a span and of a process
    for span in trace["spans"]:
        assert {"traceID", "spanID", "operationName", "references", "processID"} <= span.keys()
        assert isinstance(span["startTime"], int) and isinstance(span["duration"], int)
        assert isinstance(span["tags"], list) and isinstance(span["logs"], list)
        assert span["processID"] in trace["processes"]
    assert {p["serviceName"] for p in trace["processes"].values()} == {"front", "cart", "stock"}


def test_grafana_shows_a_trace(api: Api) -> None:
    # Trace(): with and without the time range around it
    for parameters in ({}, {"start": BEGIN_US, "end": BEGIN_US + 10**6}):
        answer = api.get(f"/api/traces/{TRACE.hex()}", **parameters)
        assert len(answer["data"][0]["spans"]) == SPANS
    status, answer = api.ask(f"/api/traces/{'7' * 32}")
    assert status == 404
    assert answer["errors"] == [{"code": 404, "msg": "trace not found"}]


# -------------------------------------- Grafana, pkg/tsdb/jaeger/grpc_client.go


def test_grafana_v3(api: Api) -> None:
    assert api.get("/api/v3/services") == {"services": SERVICES}
    assert {"name": "Reserve", "spanKind": "client"} in api.get(
        "/api/v3/operations", service="cart"
    )["operations"]
    # GrpcSearch(): times are not encoded, so that a plus sign means a space.
    times = (
        "query.start_time_min=2026-09-21T14:13:00+00:00&query.start_time_max=2026-09-21T14:14:00.5Z"
    )
    search = urlencode({"query.service_name": "front", "query.attributes": '{"http.route":"/buy"}'})
    status, answer = api.ask_url(f"{api.url}/api/v3/traces?{search}&{times}")
    assert status == 200
    assert_traces_data(answer["result"], SPANS)
    # and its GrpcTrace
    assert_traces_data(api.get(f"/api/v3/traces/{TRACE.hex()}")["result"], SPANS)
    status, answer = api.ask(f"/api/v3/traces/{'7' * 32}")
    assert (status, answer) == (404, {"error": {"httpCode": 404, "message": "No traces found"}})


def assert_traces_data(result: Any, count: int) -> None:
    """What jaeger-ui's schemas.ts, refinedTracesData, demands."""
    spans = [
        span
        for resource in result["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert len(spans) == count
    for span in spans:
        assert re.fullmatch("[0-9a-f]{32}", span["traceId"])
        assert re.fullmatch("(?!0+$)[0-9a-f]{16}", span["spanId"])
        assert re.fullmatch("(?!0+$)[0-9a-f]{16}", span.get("parentSpanId", "1" * 16))
        assert isinstance(span["kind"], int)
        assert re.fullmatch(r"\d+", span["startTimeUnixNano"])
        for item in span.get("attributes", ()):
            assert len(item["value"]) == 1, item
            assert re.fullmatch(r"-?\d+", item["value"].get("intValue", "1"))
        for event in span.get("events", ()):
            assert re.fullmatch(r"\d+", event["timeUnixNano"])


# ------------------------------- Jaeger UI, packages/jaeger-ui/src/api/jaeger.ts


def test_jaeger_ui_legacy(api: Api) -> None:
    # fetchServiceServerOps
    answer = api.get("/api/operations", service="stock", spanKind="server")
    assert answer["data"] == [{"name": "stock.Stock/Reserve", "spanKind": "server"}]
    # fetchDependencies, in milliseconds
    links = api.get("/api/dependencies", endTs=BEGIN_NS // MS + 1000, lookback=604800000)["data"]
    assert links == [
        {"parent": "cart", "child": "stock", "callCount": 1},
        {"parent": "front", "child": "cart", "callCount": 1},
    ]
    assert len(api.get("/api/dependencies")["data"]) == 3
    before = api.get("/api/dependencies", endTs=BEGIN_NS // MS - 1000, lookback=1000)
    assert before["data"] == []
    # the search of versions before v3
    search = {
        "service": "front",
        "start": BEGIN_US - 3_600_000_000,
        "end": BEGIN_US + 120_000_000,
        "lookback": "1h",
        "limit": 20,
        "maxDuration": "",
        "minDuration": "",
    }
    assert api.found(**search) == [OTHER.hex(), TRACE.hex()]  # newest first
    assert api.found(**{**search, "limit": 1}) == [OTHER.hex()]
    # traceID, repeated, of the comparison
    ids = [TRACE.hex(), "2a", "7" * 32]
    answer = api.get("/api/traces", traceID=ids)
    assert [trace["traceID"] for trace in answer["data"]] == [TRACE.hex(), OTHER.hex()]
    assert answer["errors"] == [{"msg": "trace not found", "traceID": "7" * 32}]


# ------------------------------ Jaeger UI, packages/jaeger-ui/src/api/v3/client.ts


def test_jaeger_ui_v3_summaries(api: Api) -> None:
    # fetchTraceSummaries, of the version with camelCase and of the one before it
    camel = {
        "query.serviceName": "front",
        "query.operationName": "GET /buy",
        "query.startTimeMin": "2026-09-21T14:13:00.000Z",
        "query.startTimeMax": "2026-09-21T14:15:00.000Z",
        "query.searchDepth": 20,
        "query.durationMin": "1ms",
        "query.attributes": '{"error":"true"}',
    }
    snake = {
        "query.service_name": "front",
        "query.span_name": "GET /buy",
        "query.start_time_min": "2026-09-21T14:13:00.000Z",
        "query.start_time_max": "2026-09-21T14:15:00.000Z",
        "query.num_traces": 20,
    }
    for search in (camel, snake):
        (summary,) = api.get("/api/v3/trace-summaries", **search)["summaries"]
        assert summary == {
            "traceId": TRACE.hex(),
            "rootServiceName": "front",
            "rootOperationName": "GET /buy",
            "minStartTimeUnixNano": str(BEGIN_NS),
            "maxEndTimeUnixNano": str(BEGIN_NS + 100 * MS),
            "spanCount": SPANS,
            "errorSpanCount": 2,
            "orphanSpanCount": 0,
            "services": [
                {"name": "cart", "spanCount": 3, "errorSpanCount": 0},
                {"name": "front", "spanCount": 2, "errorSpanCount": 1},
                {"name": "stock", "spanCount": 2, "errorSpanCount": 1},
            ],
        }
    nothing = {**snake, "query.span_name": "GET /sell"}
    assert api.get("/api/v3/trace-summaries", **nothing) == {"summaries": []}


def test_v3_takes_ids_in_base64_and_gives_raw_times(api: Api) -> None:
    encoded = quote(base64.b64encode(TRACE).decode(), safe="")

    def start_of_stock(**parameters: object) -> int:
        result = api.get(f"/api/v3/traces/{encoded}", **parameters)["result"]
        (start,) = (
            span["startTimeUnixNano"]
            for resource in result["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
            if span["name"] == "stock.Stock/Reserve"
        )
        return int(start)

    assert start_of_stock() == BEGIN_NS + 40 * MS
    assert start_of_stock(rawTraces="true") == BEGIN_NS + 45 * MS


# ------------------------------------------------------------------ searches

IN_TIME = {"start": BEGIN_US, "end": BEGIN_US + 120_000_000}


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ({"service": "cart"}, [TRACE]),
        ({"service": "front", "operation": "GET /"}, [OTHER]),
        ({"service": "front", "operation": "redis GET"}, []),  # another service's
        ({"service": "front", "tags": '{"http.route":"/buy"}'}, [TRACE]),
        ({"service": "front", "tags": 'http.route=/ user="a b"'}, [OTHER]),
        ({"service": "front", "tag": "user:a b"}, [OTHER]),
        # All tags on one span, though each is somewhere in the trace.
        ({"service": "cart", "tags": "rpc.system=grpc"}, []),
        ({"service": "stock", "tags": "rpc.system=grpc error"}, [TRACE]),
        ({"service": "stock", "tags": "exception.type=OutOfStock"}, [TRACE]),
        ({"service": "front", "tags": f'{{"n":"{1 << 60}"}}'}, [TRACE]),
        ({"service": "front", "tags": "ok=false share=0.5 span.kind=client"}, [TRACE]),
        ({"service": "stock", "tags": "process.pid=102"}, [TRACE]),
        ({"service": "front", "tags": "backsight.trigger=error"}, [OTHER, TRACE]),
        ({"service": "front", "minDuration": "80ms"}, [TRACE]),
        ({"service": "front", "minDuration": "100.001ms"}, []),
        ({"service": "front", "maxDuration": "79999us"}, [OTHER]),
        ({"service": "front", "start": BEGIN_US + 1, "end": BEGIN_US + 50_000_000}, [TRACE]),
        ({"service": "front", "start": BEGIN_US + 10_001, "end": BEGIN_US + 50_000_000}, []),
        ({"service": "front", "end": BEGIN_US + 120_000_000, "lookback": "70s"}, [OTHER]),
    ],
)
def test_what_a_search_finds(api: Api, search: dict[str, Any], found: list[TraceId]) -> None:
    times = {} if "end" in search else IN_TIME
    assert api.found(**times, **search) == [trace.hex() for trace in found]


@pytest.mark.parametrize(
    ("path", "parameters", "message"),
    [
        ("/api/traces", {}, "parameter 'service' is required"),
        ("/api/traces", {"service": "a", "start": "now"}, "malformed parameter start: 'now'"),
        ("/api/traces", {"service": "a", "limit": "-1"}, "malformed parameter limit: '-1'"),
        ("/api/traces", {"service": "a", "minDuration": "5"}, "malformed parameter minDuration"),
        ("/api/traces", {"service": "a", "lookback": "1y"}, "malformed parameter lookback"),
        ("/api/traces", {"service": "a", "tags": "{"}, "malformed 'tags' parameter"),
        ("/api/traces", {"service": "a", "tags": '{"a":[1]}'}, "malformed 'tags' parameter"),
        ("/api/traces", {"service": "a", "tags": 'a="b'}, "malformed 'tags' parameter"),
        ("/api/traces", {"service": "a", "tag": "ab"}, "malformed 'tag' parameter"),
        (
            "/api/traces",
            {"service": "a", "minDuration": "2s", "maxDuration": "1s"},
            "'maxDuration' should be greater than 'minDuration'",
        ),
        ("/api/traces", {"service": "a", "tags": '{"a":' + "[" * 9000}, "nested too deeply"),
        ("/api/traces", {"service": "a", "start": 2, "end": 1}, "the end of the time range"),
        ("/api/traces", {"traceID": "xyz!"}, "malformed parameter traceID"),
        ("/api/traces/00", {}, "malformed parameter traceID"),
        ("/api/traces/1", {"raw": "perhaps"}, "malformed parameter raw"),
        ("/api/operations", {}, "parameter 'service' is required"),
        ("/api/dependencies", {"endTs": "x"}, "malformed parameter endTs"),
        ("/api/v3/operations", {}, "malformed parameter service"),
        ("/api/v3/traces", {"query.serviceName": "a"}, "are required"),
        (
            "/api/v3/trace-summaries",
            {"query.startTimeMin": "yesterday", "query.startTimeMax": "2026-11-21T00:00:00Z"},
            "malformed parameter query.startTimeMin",
        ),
    ],
)
def test_what_is_malformed_is_refused_in_jaegers_shape(
    api: Api, path: str, parameters: dict[str, Any], message: str
) -> None:
    status, body = api.ask(path, **parameters)
    assert status == 400
    if "/v3/" in path:
        assert body["error"]["httpCode"] == 400
        said = body["error"]["message"]
    else:
        assert body["data"] is None
        assert body["errors"][0]["code"] == 400
        said = body["errors"][0]["msg"]
    assert message in said


def test_what_is_not_there_is_told(api: Api) -> None:
    status, body = api.ask("/api/metrics/calls")
    assert status == 404
    assert "/api/v3/trace-summaries" in body["errors"][0]["msg"]


def test_an_answer_is_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(OTHER_FRONT + OTHER_TEAM)
    monkeypatch.setattr(requests, "BYTES_MAX", size + 1)
    assert api.found(service="front", **IN_TIME) == [OTHER.hex()]
    status, body = api.ask(f"/api/traces/{TRACE.hex()}")
    assert status == 413
    assert "backsightctl export" in body["errors"][0]["msg"]
    monkeypatch.setattr(requests, "LIMIT_MAX", 1)
    assert api.found(service="front", limit=10**9, **IN_TIME) == [OTHER.hex()]


V3_TIMES = {
    "query.serviceName": "front",
    "query.startTimeMin": "2026-09-21T14:13:00Z",
    "query.startTimeMax": "2026-09-21T14:15:00Z",
}


def ids_of_v3(body: Any) -> set[str]:
    return {
        span["traceId"]
        for resource in body["result"]["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }


def test_a_trace_that_is_too_large_hides_no_other(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The newest that a search finds is too large for any answer.
    large = len(FRONT + CART + STOCK)
    monkeypatch.setattr(requests, "BYTES_MAX", large)
    with padded(api, OTHER):
        search = api.get("/api/traces", service="front", **IN_TIME)
        assert [trace["traceID"] for trace in search["data"]] == [TRACE.hex()]
        (error,) = search["errors"]
        assert (error["code"], error["traceID"]) == (413, OTHER.hex())
        assert "use `backsightctl export`" in error["msg"]
        assert ids_of_v3(api.get("/api/v3/traces", **V3_TIMES)) == {TRACE.hex()}
        for asked in ([TRACE.hex(), OTHER.hex()], [OTHER.hex(), TRACE.hex(), TRACE.hex()]):
            body = api.get("/api/traces", traceID=asked)
            assert [trace["traceID"] for trace in body["data"]] == [TRACE.hex()]
            assert body["errors"] == search["errors"]
        for path in (f"/api/traces/{OTHER.hex()}", f"/api/v3/traces/{OTHER.hex()}"):
            assert api.ask(path)[0] == 413
        assert api.ask("/api/traces", traceID=OTHER.hex())[0] == 413
    # Each has room, but not both.
    body = api.get("/api/traces", service="front", **IN_TIME)
    assert [trace["traceID"] for trace in body["data"]] == [OTHER.hex()]
    assert "ask for it alone" in body["errors"][0]["msg"]
    assert api.get(f"/api/traces/{TRACE.hex()}")["total"] == 1


@contextlib.contextmanager
def padded(api: Api, trace: TraceId) -> Iterator[None]:
    """Let the store say that there is more of a trace."""
    with contextlib.closing(sqlite3.connect(api.path)) as connection:
        change = (
            "UPDATE slices SET bytes = bytes + ?"
            " WHERE trace = (SELECT key FROM traces WHERE id = ?)"
        )
        with connection:
            connection.execute(change, (1 << 30, trace))
        yield
        with connection:
            connection.execute(change, (-(1 << 30), trace))


@pytest.mark.parametrize(
    ("module", "form", "id_of"),
    [
        (requests, "stamped", lambda detail: detail.summary.trace),
        (legacy, "trace_json", lambda read: read.trace),
        (v3, "otlp_json", lambda data: data.resource_spans[0].scope_spans[0].spans[0].trace_id),
    ],
)
def test_a_trace_that_cannot_be_read_hides_no_other(
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    form: str,
    id_of: Callable[[Any], bytes],
) -> None:
    real = getattr(module, form)

    def read(given: Any, **options: Any) -> Any:
        if id_of(given) == OTHER:
            raise ValueError("what a client wrote")
        return real(given, **options)

    monkeypatch.setattr(module, form, read)
    del api.log[:]
    if form != "otlp_json":
        body = api.get("/api/traces", service="front", **IN_TIME)
        assert [trace["traceID"] for trace in body["data"]] == [TRACE.hex()]
        assert (body["errors"][0]["code"], body["errors"][0]["traceID"]) == (500, OTHER.hex())
        status, body = api.ask(f"/api/traces/{OTHER.hex()}")
        assert (status, body["errors"][0]["code"]) == (500, 500)
    if form != "trace_json":
        assert ids_of_v3(api.get("/api/v3/traces", **V3_TIMES)) == {TRACE.hex()}
        assert api.ask(f"/api/v3/traces/{OTHER.hex()}")[0] == 500
    assert set(api.log) == {
        f"trace {OTHER.hex()}: cannot be shown: ValueError('what a client wrote')"
    }


def test_a_fault_of_ours_is_not_the_askers(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ValueError

    monkeypatch.setattr(IndexReader, "services", fail)
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(f"{api.url}/api/services")
    with failed.value:
        assert failed.value.code == 500
    status, body = api.ask_url(f"{api.url}/api/services?" + "a=b&" * 2000)
    assert (status, body["errors"][0]["code"]) == (400, 400)


def test_answers_that_nobody_reads_are_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SMALL_BYTES", 2000)
    monkeypatch.setattr(bodies, "_ROOM_TIMEOUT_S", 0.0)
    serve = query.application(api.path, SILENT, lambda: BEGIN_NS)
    statuses: list[str] = []

    def ask(path: str) -> Any:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path}
        return serve(environ, lambda status, _: statuses.append(status[:3]))  # type: ignore[arg-type]

    large = f"/api/traces/{TRACE.hex()}"
    size = sum(map(len, ask(large)))
    for sending_max, read_slowly in ((size // 2, 1), (2 * size, 2)):
        monkeypatch.setattr(bodies, "_SENDING_BYTES_MAX", sending_max)
        serve = query.application(api.path, SILENT, lambda: BEGIN_NS)
        del statuses[:]
        answers = [ask(large) for _ in range(read_slowly)]
        ask(large).close()
        ask("/api/services").close()  # a small one has room
        for answer in answers:
            answer.close()
            answer.close()
        ask(large).close()
        ask(large).close()
        assert statuses == ["200"] * read_slowly + ["503", "200", "200", "200"]


def test_few_answers_are_made_at_a_time(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, each is many times as large as what it is made of."""
    making: queue.SimpleQueue[None] = queue.SimpleQueue()
    waiting: queue.SimpleQueue[None] = queue.SimpleQueue()
    may_end = threading.Event()
    respond = query._respond

    class Places(threading.BoundedSemaphore):
        def __enter__(self, blocking: bool = True, timeout: float | None = None) -> bool:
            if self.acquire(blocking=False):
                return True
            waiting.put(None)
            return self.acquire(blocking, timeout)

    def respond_later(*arguments: Any) -> Any:
        making.put(None)
        assert may_end.wait(60)
        return respond(*arguments)

    monkeypatch.setattr(threading, "BoundedSemaphore", Places)
    monkeypatch.setattr(query, "_respond", respond_later)
    serve = query.application(api.path, SILENT, lambda: BEGIN_NS)
    statuses: list[str] = []

    def ask() -> None:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/services"}
        serve(environ, lambda status, _: statuses.append(status[:3]))  # type: ignore[arg-type]

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        waiting.get(timeout=60)
        assert making.qsize() == 2
    finally:
        may_end.set()
        for thread in threads:
            thread.join()
    assert statuses == ["200"] * 3


def test_who_waits_for_room_holds_up_nobody_else(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SMALL_BYTES", 2000)
    monkeypatch.setattr(bodies, "_SENDING_BYTES_MAX", 1)
    room = Room(2)
    monkeypatch.setattr(query, "Room", lambda _: room)
    serve = query.application(api.path, SILENT, lambda: BEGIN_NS)
    large = f"/api/traces/{TRACE.hex()}"

    def ask(path: str, give_up: Callable[[], object] = lambda: None) -> tuple[str, Any]:
        statuses: list[str] = []
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, GIVE_UP_OVERDUE: give_up}
        answer = serve(environ, lambda status, _: statuses.append(status[:3]))  # type: ignore[arg-type]
        return statuses[0], answer

    is_overdue = False
    status, unread = ask(large, lambda: unread.close() if is_overdue else None)
    assert status == "200"

    def read() -> None:
        status, answer = ask(large)
        answers.append(status)
        answer.close()

    answers: list[str] = []
    waiting = [threading.Thread(target=read) for _ in range(2)]
    for thread in waiting:
        thread.start()
    while len(room._waiting) < 2:
        assert any(thread.is_alive() for thread in waiting)
    assert ask("/api/services")[0] == "200"
    assert ask(large)[0] == "503"  # at once: there is no more memory for those that wait
    assert (len(room._waiting), answers) == (2, [])
    is_overdue = True
    for thread in waiting:
        thread.join()
    assert answers == ["200", "200"]
    assert room._taken == {}


def test_a_large_answer_does_not_wait_for_smaller_ones_that_came_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "_SMALL_BYTES", 0)
    monkeypatch.setattr(bodies, "_SENDING_BYTES_MAX", 10)
    room = Room(2)
    made: queue.SimpleQueue[Body] = queue.SimpleQueue()

    def body(size: int) -> Body:
        return Body([bytes(size)], room, lambda: None)

    def wait(size: int) -> threading.Thread:
        before = len(room._waiting)
        thread = threading.Thread(target=lambda: made.put(body(size)))
        thread.start()
        while len(room._waiting) == before:
            assert thread.is_alive()
        return thread

    first = body(6)
    threads = [wait(10), wait(3)]
    first.close()
    for size in (10, 3):
        got = made.get(timeout=60)
        assert got.size == size
        assert made.empty()
        got.close()
    for thread in threads:
        thread.join()


def test_an_answer_that_was_read_leaves_room(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SMALL_BYTES", 0)
    monkeypatch.setattr(bodies, "_SENDING_BYTES_MAX", 1)
    for _ in range(3):
        assert api.get(f"/api/traces/{TRACE.hex()}")["total"] == 1
        assert api.ask("/api/metrics")[0] == 404


@given(
    st.lists(st.binary(min_size=5, max_size=5), min_size=2),
    st.lists(st.integers(0, 30)),
    st.integers(0, 4),
)
def test_tags_are_found_where_they_begin(hashes: list[bytes], chosen: list[int], at: int) -> None:
    packed = b"".join(hashes)
    wanted = [hashes[i] for i in chosen if i < len(hashes)]
    assert asking._has_tags(packed, b"".join(wanted))
    between = packed[at : at + 5]
    assert asking._has_tags(packed, between) == (between in hashes)


def test_a_search_reads_only_the_traces_that_it_shows(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[TraceId] = []

    def counted(reader: StoreReader, trace: TraceId, *rest: Any) -> Any:
        read.append(trace)
        return trace_detail(reader, trace, *rest)

    monkeypatch.setattr(requests, "trace_detail", counted)
    assert api.found(service="stock", tags="error", **IN_TIME) == [TRACE.hex()]
    assert read == [TRACE]
    times = {
        "query.startTimeMin": "2026-09-21T14:13:00Z",
        "query.startTimeMax": "2026-09-21T14:15:00Z",
    }
    assert len(api.get("/api/v3/trace-summaries", **times)["summaries"]) == 2
    api.get("/api/dependencies")
    api.get("/api/services/front/operations")
    assert read == [TRACE]


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/api/traces", {"service": "front", **IN_TIME}),
        ("/api/services", {}),
        ("/api/operations", {"service": "cart"}),
        ("/api/dependencies", {"endTs": BEGIN_NS // MS + 1000}),
    ],
)
def test_what_takes_too_long_is_given_up(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, parameters: dict[str, Any]
) -> None:
    monkeypatch.setattr(reading, "_READ_TIMEOUT_S", -1.0)
    monkeypatch.setattr(reading, "_STEPS", 1)
    status, body = api.ask(path, **parameters)
    assert status == 503
    assert "narrow it" in body["errors"][0]["msg"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The API of a store where ids stand in the names of operations and services."""
    path = tmp_path_factory.mktemp("many") / "t.sqlite"
    with driver(path) as here:
        IndexFile(path, here.store.id, SILENT).close()
        connection = sqlite3.connect(index_path(path))
        connection.executemany(
            "INSERT INTO operations (service, operation, kind) VALUES (?, ?, 'server')",
            [("shop", f"GET /{number:06}") for number in range(50_000)]
            + [(f"shop-{number:06}", "GET /") for number in range(50_000)],
        )
        connection.executemany(
            "INSERT INTO operations (service, operation, kind) VALUES ('long', ?, 'server')",
            [(f"{number:06}" + "x" * 30_000,) for number in range(1000)],
        )
        connection.executemany(
            "INSERT INTO calls VALUES (?, 1, 'shop', ?, 1)",
            [(BEGIN_NS, f"shop-{number:06}") for number in range(50_000)],
        )
        connection.commit()
        connection.close()
        log: list[str] = []
        application = query.application(path, logs_to(log), lambda: BEGIN_NS + S)
        with HttpServer("127.0.0.1:0", application, SILENT) as server:
            yield Api(f"http://127.0.0.1:{server.port}", path, log)


@pytest.mark.parametrize(
    ("path", "parameters", "what", "first", "last"),
    [
        ("/api/services", {}, "services", "long", "shop-009997"),
        ("/api/services/shop/operations", {}, "operations", "GET /000000", "GET /009999"),
        (
            "/api/operations",
            {"service": "shop"},
            "operations",
            {"name": "GET /000000", "spanKind": "server"},
            {"name": "GET /009999", "spanKind": "server"},
        ),
        (
            "/api/dependencies",
            {},
            "calls",
            {"parent": "shop", "child": "shop-000000", "callCount": 1},
            {"parent": "shop", "child": "shop-009999", "callCount": 1},
        ),
    ],
)
def test_a_list_of_names_is_bounded_and_says_so(
    many: Api, path: str, parameters: dict[str, Any], what: str, first: object, last: object
) -> None:
    for _ in range(2):
        body = many.get(path, **parameters)
        assert (body["data"][0], body["data"][-1]) == (first, last)
        assert len(body["data"]) == body["total"] == body["limit"] == asking.NAMES_MAX
    # Who shows a menu asks often.
    (said,) = [line for line in many.log if f"list of {what} is cut" in line]
    assert "ids" in said


def test_lists_of_v3_are_bounded_too(many: Api) -> None:
    assert len(many.get("/api/v3/services")["services"]) == asking.NAMES_MAX
    found = many.get("/api/v3/operations", service="shop", spanKind="server")["operations"]
    assert len(found) == asking.NAMES_MAX
    assert many.get("/api/v3/operations", service="shop", spanKind="client")["operations"] == []


def test_long_names_are_bounded_by_what_they_take(many: Api) -> None:
    body = many.get("/api/services/long/operations")
    assert 0 < sum(map(len, body["data"])) <= 4 << 20
    assert body["limit"] == len(body["data"]) < 1000


def test_calls_of_one_service_are_not_cut_by_those_of_others(many: Api) -> None:
    body = many.get("/api/dependencies", service="shop-049999")
    assert body["data"] == [{"parent": "shop", "child": "shop-049999", "callCount": 1}]
    assert body["limit"] == 0


def test_answers_are_made_in_few_pieces(many: Api, api: Api) -> None:
    def pieces(of: Api, path: str) -> int:
        path, _, asked = path.partition("?")
        environ: Any = {"PATH_INFO": path, "QUERY_STRING": asked, "REQUEST_METHOD": "GET"}
        said: set[str] = set()
        status, made, _ = query._respond(of.path, environ, lambda: BEGIN_NS + S, SILENT, said)
        assert status == 200
        return len(made)

    assert pieces(many, "/api/operations?service=shop") < 20
    assert pieces(many, "/api/v3/operations?service=shop") < 20
    # But each span is made for itself.
    assert pieces(api, f"/api/traces/{TRACE.hex()}") > SPANS
    summaries = urlencode({**V3_TIMES, "query.searchDepth": 5})
    assert 3 < pieces(api, f"/api/v3/trace-summaries?{summaries}") < 20


# ------------------------------------------------------------------ the index


def rows(path: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(index_path(path))) as connection:
        return {
            table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("summaries", "operations", "batches", "spans", "calls")
        }


EMPTY = {"summaries": 0, "operations": 0, "batches": 0, "spans": 0, "calls": 0}


def test_a_new_verdict_replaces_what_the_index_has(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with driver(path) as here:
        put_trace(here, TRACE, {"edge": FRONT})
        bring_up_to_date(here.store, path)
        assert rows(path) == {**EMPTY, "summaries": 1, "operations": 2, "batches": 1, "spans": 2}
        put_trace(here, TRACE, {"edge": FRONT, "back": CART + STOCK}, version=2)
        bring_up_to_date(here.store, path)
        after = {"summaries": 1, "operations": 7, "batches": 1, "spans": 7, "calls": 2}
        assert rows(path) == after
        with StoreReader(path, index_path(path)) as reader:
            summaries = dict(IndexReader(reader.connection).summaries([TRACE, OTHER]))
        assert summaries[TRACE].span_count == SPANS
        assert OTHER not in summaries
        # It is closed, and nothing is new.
        here.write(PutReleased(TRACE))
        assert bring_up_to_date(here.store, path).counters.traces_indexed == 0


def test_a_listing_of_a_service_looks_into_the_index(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with driver(path) as here:
        put_trace(here, TRACE, {"edge": FRONT, "back": CART})
        put_trace(here, OTHER, {"edge": OTHER_FRONT})
        bring_up_to_date(here.store, path)
        with StoreReader(path, index_path(path)) as reader:
            assert reader.list_traces(Wanted(service="front")) == [OTHER, TRACE]
            assert reader.list_traces(Wanted(service="cart")) == [TRACE]
            assert reader.is_wanted(OTHER, Wanted(service="front"))
            assert not reader.is_wanted(OTHER, Wanted(service="cart"))


def test_a_search_looks_into_each_batch_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.index.file._BATCH_BITS", 0)
    path = tmp_path / "t.sqlite"
    with driver(path) as here:
        put_trace(here, TRACE, {"edge": FRONT, "back": CART})
        put_trace(here, OTHER, {"edge": OTHER_FRONT})
        bring_up_to_date(here.store, path)
        assert rows(path)["batches"] == 2
        with StoreReader(path, index_path(path)) as reader:
            index = IndexReader(reader.connection)

            def found(**wanted: Any) -> list[TraceId]:
                return index.search(Search(**wanted))

            assert found(service="front") == found() == [OTHER, TRACE]
            assert found(service="cart") == [TRACE]
            late_ns = BEGIN_NS + 60 * S
            assert found(start_min_ns=late_ns) == [OTHER]
            assert found(start_max_ns=late_ns - 1) == [TRACE]
            # To the nanosecond: a batch is asked that has one span of that time.
            assert found(start_min_ns=late_ns, start_max_ns=late_ns) == [OTHER]
            (last_ns,) = reader.connection.execute(
                "SELECT max(start_ns) FROM found.spans WHERE batch = 1"
            ).fetchone()
            assert found(start_min_ns=last_ns, start_max_ns=last_ns) == [TRACE]
            assert reader.list_traces(Wanted(service="front")) == [OTHER, TRACE]
        with contextlib.closing(IndexFile(path, here.store.id, SILENT)) as file:
            with file.transaction():
                file.forget([1])
            assert rows(path)["batches"] == 1


def test_the_index_goes_with_its_traces(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.sqlite", Clock()
    with driver(path, StoreLimits(ROOMY.bytes_max, Keep(3600)), clock) as here:
        put_trace(here, TRACE, {"edge": FRONT, "back": CART + STOCK})
        bring_up_to_date(here.store, path)
        assert rows(path)["spans"] == SPANS
        here.write(PutReleased(TRACE))
        clock.now_s += 7200
        put_trace(here, OTHER, {"edge": OTHER_FRONT})
        passed(here.store)  # the bounds are looked at after a transaction
        with StoreReader(path, index_path(path)) as reader:
            # At once, and not only once the index has heard of it.
            assert not list(IndexReader(reader.connection).summaries([TRACE]))
            assert reader.trace(TRACE) is None
        bring_up_to_date(here.store, path)
        assert rows(path) == {**EMPTY, "summaries": 1, "operations": 1, "batches": 1, "spans": 1}
        fired = TriggerFired(Group("again", TRACE), (), "", Source.APPLICATION, BEGIN_NS)
        here.write(PutTrigger("back", fired))  # it comes up again, without a verdict
        bring_up_to_date(here.store, path)
        assert rows(path) == {**EMPTY, "summaries": 1, "operations": 1, "batches": 1, "spans": 1}


@pytest.mark.parametrize("is_lost", ["whole", "broken", "another's", "far behind"])
def test_a_lost_index_is_made_anew(tmp_path: Path, is_lost: str) -> None:
    path, clock = tmp_path / "t.sqlite", Clock()
    with driver(path, StoreLimits(ROOMY.bytes_max, Keep(3600)), clock) as here:
        put_trace(here, TRACE, {"edge": FRONT})
        here.write(PutReleased(TRACE))
        bring_up_to_date(here.store, path)
        clock.now_s += 7200
        put_trace(here, OTHER, {"edge": OTHER_FRONT})
        passed(here.store)
        last = here.store._tables.change_number
    if is_lost == "whole":
        index_path(path).unlink()
    elif is_lost == "broken":
        index_path(path).write_bytes(b"no database" * 1000)
    else:
        with contextlib.closing(sqlite3.connect(index_path(path))) as connection:
            if is_lost == "another's":
                # That has nothing of this store's traces, but as many changes.
                for table in ("summaries", "spans", "operations"):
                    connection.execute(f"DELETE FROM {table}")
                moved = "UPDATE position SET store_id = 'another', number = ?"
                connection.execute(moved, (last,))
            connection.commit()
    with driver(path, clock=clock) as here:
        # Nobody else needs them.
        here.store._tables.trim_changes(here.store._tables.change_number)
        bring_up_to_date(here.store, path)
        assert rows(path) == {**EMPTY, "summaries": 1, "operations": 1, "batches": 1, "spans": 1}
        with StoreReader(path, index_path(path)) as reader:
            assert IndexReader(reader.connection).services().rows == ["front"]


def test_what_waits_for_longest_is_indexed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their ids those of whoever chooses these could come first for ever."""
    monkeypatch.setattr(indexing, "_CHANGES_AT_ONCE", 1)
    path, clock = tmp_path / "t.sqlite", Clock()
    traces = [TraceId(bytes(15) + bytes([number])) for number in (9, 1, 8, 2)]
    with driver(path, clock=clock) as here, StoreReader(path) as reader:
        for trace in traces:
            put_trace(here, trace, {"edge": FRONT})
        indexer = Indexer(here.store, path, SILENT)
        file = IndexFile(path, here.store.id, SILENT)
        for done, _ in enumerate(traces, start=1):
            indexer._work(reader)
            assert [trace for _, trace in file.keys(0, 10)] == traces[:done]
            assert indexer.waiting == len(traces) - done
        indexer.close()
        file.close()


def test_what_cannot_be_read_stops_no_other_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.sqlite"
    with driver(path) as here:
        put_trace(here, TRACE, {"edge": b"no slice at all"})
        put_trace(here, OTHER, {"edge": OTHER_FRONT})
        indexer = bring_up_to_date(here.store, path)
        assert rows(path) == {**EMPTY, "summaries": 2, "operations": 1, "batches": 1, "spans": 1}
        assert indexer.counters.traces_indexed == 2

        def fail(*_: object) -> None:
            raise OverflowError

        monkeypatch.setattr("coordinator.index.indexer.index_of", fail)
        put_trace(here, OTHER, {"edge": OTHER_FRONT}, version=2)
        indexer = bring_up_to_date(here.store, path)
        assert indexer.counters.traces_failed == 1
        assert rows(path) == {**EMPTY, "summaries": 2}
        with StoreReader(path, index_path(path)) as reader:
            assert not list(IndexReader(reader.connection).summaries([TRACE, OTHER]))


def test_what_is_found_of_a_trace_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "SPANS_MAX", 3)
    path = tmp_path / "t.sqlite"
    with driver(path) as here:
        put_trace(here, TRACE, {"edge": FRONT, "back": CART + STOCK})
        bring_up_to_date(here.store, path)
        assert rows(path)["spans"] == 3
        with StoreReader(path, index_path(path)) as reader:
            ((_, summary),) = IndexReader(reader.connection).summaries([TRACE])
        assert summary.span_count == SPANS


def test_a_trace_that_is_closed_as_it_was_judged_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with driver(path) as here, StoreReader(path) as reader:
        put_trace(here, TRACE, {"edge": FRONT})
        indexer = Indexer(here.store, path, SILENT)
        while indexer._work(reader) is not None:
            pass
        position = indexer._file.position
        here.write(PutReleased(TRACE))
        while indexer._work(reader) is not None:
            pass
        assert (indexer.waiting, indexer._file.position) == (0, position)
        assert indexer.counters.traces_indexed == 1
        # What comes after it takes it along.
        put_trace(here, OTHER, {"edge": OTHER_FRONT})
        while indexer._work(reader) is not None:
            pass
        assert indexer._file.position == reader.last_change()
        indexer.close()


def test_what_is_indexed_at_once_is_bounded_by_its_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in memory at once."""
    monkeypatch.setattr(indexing, "_SPANS_AT_ONCE", 0)
    path = tmp_path / "t.sqlite"
    with driver(path) as here, StoreReader(path) as reader:
        for number in range(1, 6):
            put_trace(here, TraceId(number.to_bytes(16, "big")), {"edge": FRONT})
        indexer = Indexer(here.store, path, SILENT)
        for number in range(1, 6):
            assert indexer._work(reader) == indexing._GATHER_S
            assert indexer._work(reader) == (None if number == 5 else 0.0)
            assert rows(path)["summaries"] == number
        indexer.close()


def test_the_indexer_works_when_there_are_news(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with driver(path) as here:
        with Indexer(here.store, path, SILENT) as indexer:
            put_trace(here, TRACE, {"edge": FRONT})
            while not indexer.counters.traces_indexed:
                passed(here.store)
        assert rows(path)["spans"] == 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
    st.integers(0, 4),
)
def test_pieces_of_json_are_json(value: object, depth: int) -> None:
    assert json.loads(b"".join(encoded(value, depth))) == value


@pytest.mark.parametrize(
    ("text", "ns"),
    [("1.5s", 1_500_000_000), ("100us", 100_000), ("1h30m", 5400 * 10**9), (".5ms", 500_000)],
)
def test_durations_are_those_of_go(text: str, ns: int) -> None:
    assert duration_ns(text) == ns


def test_logfmt() -> None:
    assert logfmt(r'error a.b=c  q="x \"y\"" empty=') == {
        "error": "true",
        "a.b": "c",
        "q": 'x "y"',
        "empty": "",
    }


def thread_ns(parse: Callable[[str], object], text: str) -> int:
    """What it costs at least."""
    costs = []
    for _ in range(3):
        begun_ns = time.thread_time_ns()
        with contextlib.suppress(ValueError):
            parse(text)
        costs.append(time.thread_time_ns() - begun_ns)
    return min(costs)


@pytest.mark.parametrize(
    ("parse", "before", "repeated", "after"),
    [
        (tags_of, "a", " ", '"'),
        (tags_of, "", "a", '"'),
        (tags_of, 'a="', "x", ""),
        (tags_of, 'a="', "\\", ""),
        (tags_of, "", 'a="" ', '"'),
        (tags_of, "a=", "x", '"'),
        (duration_ns, "", "1", ""),
        (duration_ns, "1.", "1", "?"),
        (duration_ns, "1", "s", ""),
    ],
)
def test_no_text_costs_more_than_its_length(
    parse: Callable[[str], object], before: str, repeated: str, after: str
) -> None:
    # While it is parsed no other thread has its turn, and the event loop is one of them.
    sixteenth_ns, whole_ns = (
        thread_ns(parse, before + repeated * times + after) for times in (1_000, 16_000)
    )
    assert whole_ns < 100 * max(sixteenth_ns, 10_000)
