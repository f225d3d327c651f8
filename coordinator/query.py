# SPDX-License-Identifier: Apache-2.0
"""Jaeger's HTTP API, legacy and v3, over what is stored: for Jaeger UI and Grafana.

Paths, parameters and answers are those of jaegertracing/jaeger,
cmd/jaeger/internal/extension/jaegerquery/internal: http_handler.go, query_parser.go
and apiv3/. Times are put on the coordinator's clock, unless raw traces are wanted.

Runs in the threads of runtime.http, each request with a reader of its own.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from coordinator.answers import trace_detail
from coordinator.bodies import Body, NoRoom, Room, encoded
from coordinator.index.asking import IndexReader, Listing, Search
from coordinator.index.file import index_path
from coordinator.parameters import TIME_MAX_NS, Parameters, Refused, tags_of, trace_id
from coordinator.store.reader import ReadTooLong, StoreReader
from formats.jaeger import answer, trace_json
from formats.otlp_json import otlp_json
from formats.stamped import StampedTrace, stamped
from formats.tags import KINDS
from protocol.messages import TraceId
from runtime.http import GIVE_UP_OVERDUE, HttpServer
from runtime.log import Log

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Json = dict[str, Any]
_Row = TypeVar("_Row")

# As with Jaeger, where nothing is said.
_LIMIT = 100
_LOOKBACK_NS = 2 * 86400 * 10**9
_DEPENDENCIES_LOOKBACK_NS = 7 * 86400 * 10**9

# What Jaeger UI lets choose at most.
_LIMIT_MAX = 1500

# Traces of one answer, as nodes wrote them, which is 30,000 spans or so. As objects and
# JSON they take 50 times as much; so few answers are made at a time.
_BYTES_MAX = 8 << 20
_ANSWERS_AT_ONCE = 2

_STATUS = {
    200: "200 OK",
    400: "400 Bad Request",
    404: "404 Not Found",
    405: "405 Method Not Allowed",
    413: "413 Content Too Large",
    500: "500 Internal Server Error",
    503: "503 Service Unavailable",
}


def _search_only(search: Search) -> Search:
    if search.start_max_ns < search.start_min_ns:
        raise Refused(400, "the end of the time range is before its start")
    if search.duration_max_ns < search.duration_min_ns:
        raise Refused(400, "'maxDuration' should be greater than 'minDuration'")
    return replace(search, limit=min(search.limit, _LIMIT_MAX))


@dataclass(frozen=True, slots=True)
class _Request:
    """What is asked, with what it is answered from."""

    reader: StoreReader
    parameters: Parameters
    path: tuple[str, ...]  # what stands for the stars of the route
    now_ns: int
    log: Log
    said_cut: set[str]  # of which lists it is logged that they are cut

    @property
    def searches(self) -> IndexReader:
        """What can be asked of the index."""
        return IndexReader(self.reader.connection)

    def listed(self, what: str, listing: Listing[_Row]) -> list[_Row]:
        """What there is of a list. That it is cut is logged once: who asks for it asks often."""
        if listing.is_cut and what not in self.said_cut:
            self.said_cut.add(what)
            self.log.warning(
                f"Jaeger's list of {what} is cut after {len(listing.rows)}: there are more names than"
                " anybody reads; does an application put ids into them?"
            )
        return listing.rows

    def traces(
        self, ids: Iterable[TraceId], form: Callable[[StampedTrace], Json], *, raw: bool
    ) -> tuple[dict[TraceId, Json], dict[TraceId, Refused]]:
        """Those that are there, as many as may be in one answer, and why others are not in it."""
        shown: dict[TraceId, Json] = {}
        left_out: dict[TraceId, Refused] = {}
        left = _BYTES_MAX
        for trace in dict.fromkeys(ids):
            size = sum(part.bytes for part in self.reader.slices(trace))
            if size > left:
                left_out[trace] = _too_large(trace, size)
                continue
            detail = trace_detail(self.reader, trace, left)
            if detail is None:
                continue
            left -= size
            try:
                read = stamped(detail, one_clock=not raw)
                if read.span_count:
                    shown[trace] = form(read)
            except Exception as error:  # noqa: BLE001 - what applications wrote must not stop the others
                self.log.warning(
                    f"trace {trace.hex()}: cannot be shown: {error!r}", trace_id=trace.hex()
                )
                left_out[trace] = Refused(
                    500, f"trace {trace.hex()} cannot be read; the coordinator's log says why"
                )
        return shown, left_out

    def trace(
        self, trace: TraceId, form: Callable[[StampedTrace], Json], *, raw: bool
    ) -> Json | None:
        """One, if it is there."""
        shown, left_out = self.traces([trace], form, raw=raw)
        if left_out:
            raise left_out[trace]
        return shown.get(trace)


def _too_large(trace: TraceId, size: int) -> Refused:
    limit = f"{_BYTES_MAX >> 20} MiB"
    if size > _BYTES_MAX:
        return Refused(413, f"trace {trace.hex()} has more than {limit}; use `backsightctl export`")
    return Refused(
        413,
        f"trace {trace.hex()} is left out, with which there were more than {limit}; ask for it alone",
    )


# -------------------------------------------------------------------- legacy


def _services(request: _Request) -> Json:
    listing = request.searches.services()
    services = request.listed("services", listing)
    return answer(services, len(services), limit=_limit_of(listing))


def _service_operations(request: _Request) -> Json:
    listing = request.searches.operations(request.path[0])
    names = list(dict.fromkeys(name for name, _ in request.listed("operations", listing)))
    return answer(names, len(names), limit=_limit_of(listing))


def _operations(request: _Request) -> Json:
    service = request.parameters.text("service")
    if not service:
        raise Refused(400, "parameter 'service' is required")
    listing = request.searches.operations(service, request.parameters.text("spanKind"))
    found = request.listed("operations", listing)
    named = [{"name": name, "spanKind": kind} for name, kind in found]
    return answer(named, len(named), limit=_limit_of(listing))


def _limit_of(listing: Listing[Any]) -> int:
    """What Jaeger's answer has for it: 0 where all is there."""
    return len(listing.rows) if listing.is_cut else 0


def _legacy_tags(parameters: Parameters) -> dict[str, str]:
    tags: dict[str, str] = {}
    for pair in parameters.all("tag"):
        key, colon, value = pair.partition(":")
        if not colon:
            raise Refused(400, f"malformed 'tag' parameter, expecting key:value, received: {pair}")
        tags[key] = value
    for text in parameters.all("tags"):
        try:
            tags |= tags_of(text)
        except ValueError as error:
            raise Refused(400, f"malformed 'tags' parameter, cannot unmarshal: {error}") from error
    return tags


def _legacy_search(request: _Request) -> Search:
    parameters = request.parameters
    end_us = parameters.number("end")
    end_ns = request.now_ns if end_us is None else end_us * 1000
    start_us = parameters.number("start")
    if start_us is not None:
        start_ns = start_us * 1000
    else:
        # Jaeger UI says "custom" beside a start, and Grafana says none.
        lookback = parameters.text("lookback")
        lookback_ns = _LOOKBACK_NS
        if lookback and lookback != "custom":
            lookback_ns = parameters.duration_ns("lookback") or 0
        start_ns = end_ns - lookback_ns
    longest_ns = parameters.duration_ns("maxDuration")
    limit = parameters.number("limit")
    return _search_only(
        Search(
            parameters.text("service"),
            parameters.text("operation"),
            _legacy_tags(parameters),
            min(max(start_ns, 0), TIME_MAX_NS),
            min(end_ns, TIME_MAX_NS),
            parameters.duration_ns("minDuration") or 0,
            longest_ns or TIME_MAX_NS,
            _LIMIT if limit is None else limit,
        )
    )


def _find(request: _Request) -> Json:
    parameters = request.parameters
    raw = parameters.flag("raw")
    ids = [trace_id(text) for text in parameters.all("traceID")[:_LIMIT_MAX]]
    if len(ids) == 1:
        one = request.trace(ids[0], trace_json, raw=raw)
        return _legacy_answer({} if one is None else {ids[0]: one}, {}, ids)
    if ids:
        return _legacy_answer(*request.traces(ids, trace_json, raw=raw), ids)
    if not parameters.text("service"):
        raise Refused(400, "parameter 'service' is required")
    found = request.searches.search(_legacy_search(request))
    return _legacy_answer(*request.traces(found, trace_json, raw=raw))


def _legacy_answer(
    shown: Mapping[TraceId, Json],
    left_out: Mapping[TraceId, Refused],
    asked: Iterable[TraceId] = (),
) -> Json:
    """Traces, why some of them are left out, and which of those that were asked for are not there."""
    errors: list[Json] = [
        {"code": refused.status, "msg": str(refused), "traceID": trace.hex()}
        for trace, refused in left_out.items()
    ]
    errors += [
        {"msg": "trace not found", "traceID": trace.hex()}
        for trace in asked
        if trace not in shown and trace not in left_out
    ]
    return answer(list(shown.values()), len(shown), errors or None)


def _trace(request: _Request) -> Json:
    parameters = request.parameters
    parameters.number("start")  # hints to a sharded store, which are checked all the same
    parameters.number("end")
    found = request.trace(trace_id(request.path[0]), trace_json, raw=parameters.flag("raw"))
    if found is None:
        raise Refused(404, "trace not found")
    return answer([found], 1)


def _dependencies(request: _Request) -> Json:
    parameters = request.parameters
    end_ms = parameters.number("endTs")
    lookback_ms = parameters.number("lookback")
    end_ns = request.now_ns if end_ms is None else min(end_ms * 10**6, TIME_MAX_NS)
    lookback_ns = _DEPENDENCIES_LOOKBACK_NS if lookback_ms is None else lookback_ms * 10**6
    listing = request.searches.calls(
        max(end_ns - lookback_ns, 0), end_ns, parameters.text("service")
    )
    links = [
        {"parent": caller, "child": callee, "callCount": count}
        for caller, callee, count in request.listed("calls", listing)
    ]
    return answer(links, len(links), limit=_limit_of(listing))


# ------------------------------------------------------------------------ v3


def _v3_services(request: _Request) -> Json:
    return {"services": request.listed("services", request.searches.services())}


def _v3_operations(request: _Request) -> Json:
    parameters = request.parameters
    service = parameters.text("service")
    if not service:
        raise Refused(400, "malformed parameter service: it is required")
    kind = parameters.text("spanKind", "span_kind")
    found = request.listed("operations", request.searches.operations(service, kind))
    return {"operations": [{"name": name, "spanKind": kind or KINDS[1]} for name, kind in found]}


def _v3_search(request: _Request) -> Search:
    parameters = request.parameters
    start_ns = parameters.time_ns("query.startTimeMin", "query.start_time_min")
    end_ns = parameters.time_ns("query.startTimeMax", "query.start_time_max")
    if start_ns is None or end_ns is None:
        raise Refused(400, "query.startTimeMin and query.startTimeMax are required")
    if parameters.text("query.filter"):
        raise Refused(400, "query.filter is not supported; allowed: query.attributes")
    tags: dict[str, str] = {}
    for text in parameters.all("query.attributes"):
        try:
            tags |= tags_of(text)
        except ValueError as error:
            raise Refused(400, f"malformed parameter query.attributes: {error}") from error
    depth = parameters.number("query.searchDepth", "query.search_depth", "query.num_traces")
    longest_ns = parameters.duration_ns("query.durationMax", "query.duration_max")
    return _search_only(
        Search(
            parameters.text("query.serviceName", "query.service_name"),
            # The last is what a version of Jaeger UI says.
            parameters.text("query.operationName", "query.operation_name", "query.span_name"),
            tags,
            min(max(start_ns, 0), TIME_MAX_NS),
            min(end_ns, TIME_MAX_NS),
            parameters.duration_ns("query.durationMin", "query.duration_min") or 0,
            longest_ns or TIME_MAX_NS,
            depth or _LIMIT,
        )
    )


def _v3_json(trace: StampedTrace) -> Json:
    data = trace.otlp()
    _leave_out_valueless(data)
    return otlp_json(data)


def _v3_result(request: _Request, ids: Iterable[TraceId], *, raw: bool) -> Json:
    shown, left_out = request.traces(ids, _v3_json, raw=raw)
    if not shown:
        raise next(iter(left_out.values()), Refused(404, "No traces found"))
    joined = [part for one in shown.values() for part in one.get("resourceSpans", ())]
    return {"result": {"resourceSpans": joined}}


def _leave_out_valueless(data: TracesData) -> None:
    """Attributes without a value, which OTLP has and Jaeger UI takes for an error of the whole."""
    for resource_spans in data.resource_spans:
        holders: list[Any] = [resource_spans.resource]
        for scope_spans in resource_spans.scope_spans:
            holders.append(scope_spans.scope)
            for span in scope_spans.spans:
                holders += [span, *span.events, *span.links]
        for holder in holders:
            kept = [item for item in holder.attributes if item.value.WhichOneof("value")]
            if len(kept) < len(holder.attributes):
                del holder.attributes[:]
                holder.attributes.extend(kept)


def _v3_find(request: _Request) -> Json:
    raw = request.parameters.flag("query.rawTraces", "query.raw_traces")
    ids = request.searches.search(_v3_search(request))
    return _v3_result(request, ids, raw=raw)


def _v3_trace(request: _Request) -> Json:
    parameters = request.parameters
    parameters.time_ns("startTime", "start_time")
    parameters.time_ns("endTime", "end_time")
    raw = parameters.flag("rawTraces", "raw_traces")
    return _v3_result(request, [trace_id(request.path[0])], raw=raw)


def _v3_summaries(request: _Request) -> Json:
    searches = request.searches
    ids = searches.search(_v3_search(request))
    return {
        "summaries": [
            {
                "traceId": trace.hex(),
                "rootServiceName": summary.root_service,
                "rootOperationName": summary.root_operation,
                "minStartTimeUnixNano": str(summary.start_ns),
                "maxEndTimeUnixNano": str(summary.end_ns),
                "spanCount": summary.span_count,
                "errorSpanCount": summary.error_span_count,
                "orphanSpanCount": summary.orphan_span_count,
                "services": [
                    {
                        "name": service.name,
                        "spanCount": service.span_count,
                        "errorSpanCount": service.error_span_count,
                    }
                    for service in summary.services
                ],
            }
            for trace, summary in searches.summaries(ids)
        ]
    }


def _error(status: int, message: str) -> Json:
    return answer(None, 0, [{"code": status, "msg": message}])


def _v3_error(status: int, message: str) -> Json:
    return {"error": {"httpCode": status, "message": message}}


_LEGACY: Mapping[str, Callable[[_Request], Json]] = {
    "/api/services": _services,
    "/api/services/*/operations": _service_operations,
    "/api/operations": _operations,
    "/api/traces": _find,
    "/api/traces/*": _trace,
    "/api/dependencies": _dependencies,
}
_V3: Mapping[str, Callable[[_Request], Json]] = {
    "/api/v3/services": _v3_services,
    "/api/v3/operations": _v3_operations,
    "/api/v3/traces": _v3_find,
    "/api/v3/traces/*": _v3_trace,
    "/api/v3/trace-summaries": _v3_summaries,
}
# How deep single spans are: in data, a trace, spans; in result, resourceSpans, an item, scopeSpans,
# an item, spans. Summaries are large enough, each for itself, and names are not: of all of them in
# one list JSON is made in 10 ms or 20.
_DEPTH: Mapping[Callable[[_Request], Json], int] = {
    _find: 4,
    _trace: 4,
    _v3_find: 7,
    _v3_trace: 7,
    _v3_summaries: 2,
}
_NAMES_DEPTH = 1

_ROUTES = [
    (re.compile(re.escape(path).replace(r"\*", "(.+)")), handler, error)
    for routes, error in ((_LEGACY, _error), (_V3, _v3_error))
    for path, handler in routes.items()
]


def serving(
    endpoint: str | None, path: Path, log: Log
) -> contextlib.AbstractContextManager[HttpServer | None]:
    """Serve the store at HOST:PORT while entered; nowhere without an endpoint.

    OSError if nobody can listen there.
    """
    if not endpoint:
        return contextlib.nullcontext()
    try:
        return HttpServer(endpoint, application(path, log), log)
    except OSError as error:
        raise OSError(
            f"query.listen: {error}; give it another endpoint, or null to have none"
        ) from error


def application(path: Path, log: Log, now_ns: Callable[[], int] = time.time_ns) -> WSGIApplication:
    """Serves the store at ``path``."""
    places = threading.BoundedSemaphore(_ANSWERS_AT_ONCE)
    room = Room(_ANSWERS_AT_ONCE)
    said_cut: set[str] = set()

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        give_up_overdue = environ.get(GIVE_UP_OVERDUE, lambda: None)
        with places:
            status, pieces, error = _respond(path, environ, now_ns, log, said_cut)
        # In no place: what waits for a slow reader holds up nobody who makes an answer.
        try:
            body = Body(pieces, room, give_up_overdue)
        except NoRoom as full:
            status, pieces = 503, _pieces(error(503, str(full)))
            body = Body(pieces, room, give_up_overdue)
        headers = [("Content-Type", "application/json"), ("Content-Length", str(body.size))]
        start_response(_STATUS[status], headers)
        return body

    return serve


def _pieces(answered: Json, depth: int = 0) -> list[bytes]:
    return list(encoded(answered, depth))


def _respond(
    path: Path,
    environ: WSGIEnvironment,
    now_ns: Callable[[], int],
    log: Log,
    said_cut: set[str],
) -> tuple[int, list[bytes], Callable[[int, str], Json]]:
    """Status, answer, and the form that errors have there."""
    # WSGI gives the bytes of a path as characters.
    asked = environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace")
    for pattern, handler, error in _ROUTES:
        match = pattern.fullmatch(asked)
        if match is None:
            continue
        try:
            if environ["REQUEST_METHOD"] != "GET":
                raise Refused(405, "allowed: GET")
            try:
                parameters = Parameters(environ.get("QUERY_STRING", ""))
            except ValueError as invalid:  # too many of them
                raise Refused(400, str(invalid)) from invalid
            with StoreReader(path, index_path(path)) as reader:
                request = _Request(reader, parameters, match.groups(), now_ns(), log, said_cut)
                answered = handler(request)
            return 200, _pieces(answered, _DEPTH.get(handler, _NAMES_DEPTH)), error
        except Refused as refused:
            return refused.status, _pieces(error(refused.status, str(refused))), error
        except ReadTooLong as too_long:
            return 503, _pieces(error(503, str(too_long))), error
    described = ", ".join((*_LEGACY, *_V3))
    missing = _error(404, f"nothing is at {asked[:200]}; allowed: {described}")
    return 404, _pieces(missing), _error
