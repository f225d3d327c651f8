# SPDX-License-Identifier: Apache-2.0
"""Jaeger's HTTP API, version 3: OTLP in JSON (apiv3/ of jaegertracing/jaeger, beside the legacy one)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from coordinator.index.asking import Search
from coordinator.web.parameters import TIME_MAX_NS, Refused, tags_of, trace_id
from coordinator.web.requests import LIMIT, Json, Request, search_only
from formats.otlp_json import otlp_json
from formats.stamped import StampedTrace
from formats.tags import KINDS
from protocol.messages import TraceId


def _services(request: Request) -> Json:
    return {"services": request.listed("services", request.searches.services())}


def _operations(request: Request) -> Json:
    parameters = request.parameters
    service = parameters.text("service")
    if not service:
        raise Refused(400, "malformed parameter service: it is required")
    kind = parameters.text("spanKind", "span_kind")
    found = request.listed("operations", request.searches.operations(service, kind))
    return {"operations": [{"name": name, "spanKind": kind or KINDS[1]} for name, kind in found]}


def _search(request: Request) -> Search:
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
    return search_only(
        Search(
            parameters.text("query.serviceName", "query.service_name"),
            # The last is what a version of Jaeger UI says.
            parameters.text("query.operationName", "query.operation_name", "query.span_name"),
            tags,
            min(max(start_ns, 0), TIME_MAX_NS),
            min(end_ns, TIME_MAX_NS),
            parameters.duration_ns("query.durationMin", "query.duration_min") or 0,
            longest_ns or TIME_MAX_NS,
            depth or LIMIT,
        )
    )


def _trace_json(trace: StampedTrace) -> Json:
    data = trace.otlp()
    _leave_out_valueless(data)
    return otlp_json(data)


def _result(request: Request, ids: Iterable[TraceId], *, raw: bool) -> Json:
    shown, left_out = request.traces(ids, _trace_json, raw=raw)
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


def _find(request: Request) -> Json:
    raw = request.parameters.flag("query.rawTraces", "query.raw_traces")
    ids = request.searches.search(_search(request))
    return _result(request, ids, raw=raw)


def _trace(request: Request) -> Json:
    parameters = request.parameters
    parameters.time_ns("startTime", "start_time")
    parameters.time_ns("endTime", "end_time")
    raw = parameters.flag("rawTraces", "raw_traces")
    return _result(request, [trace_id(request.path[0])], raw=raw)


def _summaries(request: Request) -> Json:
    searches = request.searches
    ids = searches.search(_search(request))
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


def error(status: int, message: str) -> Json:
    """An error as it looks here."""
    return {"error": {"httpCode": status, "message": message}}


# How deep single spans are: in result, resourceSpans, an item, scopeSpans, an item, spans.
_SPANS_DEPTH = 7

ROUTES: Mapping[str, tuple[Callable[[Request], Json], int]] = {
    "/api/v3/services": (_services, 1),
    "/api/v3/operations": (_operations, 1),
    "/api/v3/traces": (_find, _SPANS_DEPTH),
    "/api/v3/traces/*": (_trace, _SPANS_DEPTH),
    # They are large enough, each for itself. Names are not: of all of them in one list JSON is made
    # in 10 ms or 20.
    "/api/v3/trace-summaries": (_summaries, 2),
}
"""Who answers what, and down to which depth JSON is made in pieces (coordinator.web.bodies)."""
