# SPDX-License-Identifier: Apache-2.0
"""Jaeger's HTTP API as Jaeger UI and Grafana have long asked it.

cmd/jaeger/internal/extension/jaegerquery/internal of jaegertracing/jaeger: http_handler.go,
query_parser.go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coordinator.index.asking import Listing, Search
from coordinator.web.parameters import TIME_MAX_NS, Parameters, Refused, tags_of, trace_id
from coordinator.web.requests import LIMIT, LIMIT_MAX, Json, Request, search_only
from formats.jaeger import answer, trace_json
from protocol.messages import TraceId

# As with Jaeger, where nothing is said.
_LOOKBACK_NS = 2 * 86400 * 10**9
_DEPENDENCIES_LOOKBACK_NS = 7 * 86400 * 10**9


def _services(request: Request) -> Json:
    listing = request.searches.services()
    services = request.listed("services", listing)
    return answer(services, len(services), limit=_limit_of(listing))


def _service_operations(request: Request) -> Json:
    listing = request.searches.operations(request.path[0])
    names = list(dict.fromkeys(name for name, _ in request.listed("operations", listing)))
    return answer(names, len(names), limit=_limit_of(listing))


def _operations(request: Request) -> Json:
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


def _legacy_search(request: Request) -> Search:
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
    return search_only(
        Search(
            parameters.text("service"),
            parameters.text("operation"),
            _legacy_tags(parameters),
            min(max(start_ns, 0), TIME_MAX_NS),
            min(end_ns, TIME_MAX_NS),
            parameters.duration_ns("minDuration") or 0,
            longest_ns or TIME_MAX_NS,
            LIMIT if limit is None else limit,
        )
    )


def _find(request: Request) -> Json:
    parameters = request.parameters
    raw = parameters.flag("raw")
    ids = [trace_id(text) for text in parameters.all("traceID")[:LIMIT_MAX]]
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


def _trace(request: Request) -> Json:
    parameters = request.parameters
    parameters.number("start")  # hints to a sharded store, which are checked all the same
    parameters.number("end")
    found = request.trace(trace_id(request.path[0]), trace_json, raw=parameters.flag("raw"))
    if found is None:
        raise Refused(404, "trace not found")
    return answer([found], 1)


def _dependencies(request: Request) -> Json:
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


def error(status: int, message: str) -> Json:
    """An error as it looks here."""
    return answer(None, 0, [{"code": status, "msg": message}])


# How deep single spans are: in data, a trace, spans.
_SPANS_DEPTH = 4

ROUTES: Mapping[str, tuple[Callable[[Request], Json], int]] = {
    "/api/services": (_services, 1),
    "/api/services/*/operations": (_service_operations, 1),
    "/api/operations": (_operations, 1),
    "/api/traces": (_find, _SPANS_DEPTH),
    "/api/traces/*": (_trace, _SPANS_DEPTH),
    "/api/dependencies": (_dependencies, 1),
}
"""Who answers what, and down to which depth JSON is made in pieces (coordinator.web.bodies)."""
