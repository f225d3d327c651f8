# SPDX-License-Identifier: Apache-2.0
"""Judges what was collected of the shop by the services' own access logs; README.md beside this file.

    python3 -m tests.demo.check DIRECTORY --service front=node-1 ... [--json]

Shares no code with the coordinator, nor with the shop. Exit status: 0 good, 1 not, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

# From the browser's end; the order in which requests pass through.
FRONT, MIDDLE, LAST = "front", "orders", "stock"

# A lock is held for a second. Who came when it was almost over is no trouble.
SLOW_MS = 800.0

_COHERENT_SHARE_MIN = 0.99
_SLOW_RECALL_MIN = 0.95

# Rare ones, 1 in 301; and those that were slow since the machine was.
_OTHERS_SHARE_MAX = 0.1

# Where OpenTelemetry's conventions, of now and of before, have a request's URL.
_URL_ATTRIBUTES = ("url.path", "url.full", "http.target", "http.url")
_ORDER = re.compile(r"(?:https?://[^/]+)?/orders/(\d+)(?:/invoice)?")
_DATABASE_ATTRIBUTES = ("db.system.name", "db.system")
_DATABASES = ("postgresql", "redis")

_T = TypeVar("_T")
Json = dict[str, Any]


class BadInputError(Exception):
    """A file cannot be used; the message says which, where, and what is wanted."""


@dataclass(frozen=True, slots=True)
class Handled:
    """A request as a service logged it."""

    status: str
    outcome: str
    duration_ms: float
    calls: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Witnessed:
    """A span as another exporter of the same service had it."""

    parent_id: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    status: str
    attributes: Mapping[str, object]
    events: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A collected span. ``said``: what another exporter must have said of it too."""

    span_id: str
    node: str
    unfinished: bool
    said: Witnessed

    @property
    def parent_id(self) -> str:
        return self.said.parent_id

    @property
    def name(self) -> str:
        return self.said.name

    @property
    def kind(self) -> str:
        return self.said.kind

    @property
    def attributes(self) -> Mapping[str, object]:
        return self.said.attributes


@dataclass(frozen=True, slots=True)
class Trace:
    """A collected trace. ``triggers``: each one's name and node."""

    trace_id: str
    verdict: str
    triggers: tuple[tuple[str, str], ...]
    span_count: int
    spans: tuple[Span, ...]

    def orders(self) -> set[int]:
        """The orders that URLs in it ask for."""
        texts = (span.attributes.get(key) for span in self.spans for key in _URL_ATTRIBUTES)
        matches = (_ORDER.fullmatch(text) for text in texts if isinstance(text, str))
        return {int(match[1]) for match in matches if match}


Orders = Mapping[int, Mapping[str, Handled]]
"""By order and service, what was logged."""

Witness = Mapping[str, Mapping[str, tuple[str, Witnessed]]]
"""By trace and span id, which service had it, and what of it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of trouble. ``trigger``: what has to fire for it; ``one_node``: and nowhere else."""

    letter: str
    what: str
    trigger: str
    recall_min: float
    one_node: bool

    def happened(self, logged: Mapping[str, Handled]) -> bool:
        """Whether an order met this trouble, by what all services logged."""
        front, middle, last = (logged.get(service) for service in (FRONT, MIDDLE, LAST))
        if front is None or middle is None or last is None:
            return False
        match self.letter:
            case "a":
                return last.status == "UNKNOWN" and front.status == "500"
            case "b":
                return last.outcome == "waited" and front.duration_ms >= SLOW_MS
            case "c":
                return (last.status, middle.status, front.status) == ("OK", "200", "500")
            case _:
                failed = last.status not in ("OK", "UNKNOWN")
                return failed and middle.status == front.status == "200"


KINDS = (
    Kind("a", "the last service raises, the front end answers 500", "error", 1.0, one_node=False),
    Kind(
        "b",
        f"waits for a row that is locked, {SLOW_MS:.0f} ms or more",
        "latency",
        _SLOW_RECALL_MIN,
        one_node=False,
    ),
    Kind("c", "only the front end fails", "error", 1.0, one_node=True),
    Kind("d", "the last service fails, its caller falls back", "error", 1.0, one_node=True),
)


@dataclass(slots=True)
class KindResult:
    """What became of one kind of trouble.

    ``captured``: collected whole, and for this kind's trigger. Of those, ``firing_nodes``: how many each node
    fired on; ``one_node_fired``: on how many exactly one node did; ``of_all_nodes``: of how many
    the slices of all nodes arrived. ``missing``: the orders that were not captured.
    """

    what: str
    happened: int = 0
    captured: int = 0
    firing_nodes: dict[str, int] = field(default_factory=dict)
    one_node_fired: int = 0
    of_all_nodes: int = 0
    missing: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """The fields of README.md's table; shares are between 0 and 1."""

    requests: int
    spans: int
    collected: int
    kinds: dict[str, KindResult]
    recall: float
    coherent_by_checker: float | None
    false_coherent: int
    false_incoherent: int
    selected: int
    selected_share: float
    others: int
    differences: dict[str, list[str]]
    shown: dict[str, str]
    failures: list[str]
    ok: bool


# -------------------------------------------------------------------- input


def _field(where: str, holder: object, name: str, kind: type[_T]) -> _T:
    if not isinstance(holder, dict) or name not in holder:
        raise BadInputError(f"{where}: no field {name!r}")
    value = holder[name]
    # bool is an int to Python, not to JSON.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadInputError(f"{where}: field {name!r} is {value!r}, want {kind.__name__}")
    return value


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    """Each line of JSON, with where it stands."""
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path}:{number}", json.loads(line)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInputError(f"{path}: want lines of JSON: {error}") from error


def read_logs(directory: Path, services: Iterable[str]) -> Orders:
    """The access logs ``SERVICE.access.jsonl``. Raises BadInputError."""
    orders: dict[int, dict[str, Handled]] = {}
    for service in services:
        for where, line in _lines(directory / f"{service}.access.jsonl"):
            of_order = orders.setdefault(_field(where, line, "order", int), {})
            if _field(where, line, "service", str) != service:
                raise BadInputError(f"{where}: this is not a line of {service}")
            if service in of_order:
                raise BadInputError(
                    f"{where}: an order's number is there twice; each is asked once"
                )
            of_order[service] = Handled(
                _field(where, line, "status", str),
                _field(where, line, "outcome", str),
                _field(where, line, "duration_ms", float),
                _field(where, line, "calls", dict),
            )
    if not orders:
        raise BadInputError(f"{directory}: the access logs are empty: nothing to judge by")
    return orders


def read_witness(directory: Path, services: Iterable[str]) -> Witness:
    """The spans of ``SERVICE.spans.jsonl``. Raises BadInputError."""
    traces: dict[str, dict[str, tuple[str, Witnessed]]] = {}
    for service in services:
        for where, line in _lines(directory / f"{service}.spans.jsonl"):
            of_trace = traces.setdefault(_field(where, line, "trace_id", str), {})
            span_id = _field(where, line, "span_id", str)
            events = tuple(map(str, _field(where, line, "events", list)))
            of_trace[span_id] = service, _witnessed(where, line, events)
    return traces


def _witnessed(where: str, span: object, events: tuple[str, ...]) -> Witnessed:
    return Witnessed(
        _field(where, span, "parent_id", str),
        _field(where, span, "name", str),
        _field(where, span, "kind", str),
        _field(where, span, "start_ns", int),
        _field(where, span, "end_ns", int),
        _field(where, span, "status", str),
        _field(where, span, "attributes", dict),
        events,
    )


def read_traces(directory: Path) -> dict[str, Trace]:
    """Those that ``traces.jsonl`` lists, each from its TRACE.json. Raises BadInputError."""
    traces = {}
    for where, line in _lines(directory / "traces.jsonl"):
        trace_id = _field(where, line, "trace_id", str)
        if not re.fullmatch("[0-9a-f]{32}", trace_id) or trace_id in traces:
            raise BadInputError(f"{where}: {trace_id!r} is no trace id, or there a second time")
        traces[trace_id] = _trace(directory / f"{trace_id}.json")
    return traces


def _trace(path: Path) -> Trace:
    try:
        shown = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInputError(
            f"{path}: want what backsightctl show --json prints: {error}"
        ) from error
    where = str(path)
    return Trace(
        trace_id=_field(where, shown, "trace_id", str),
        verdict=_field(where, _field(where, shown, "verdict", dict), "kind", str),
        triggers=tuple(
            (_field(where, trigger, "name", str), _field(where, trigger, "node", str))
            for trigger in _field(where, shown, "triggers", list)
        ),
        span_count=_field(where, shown, "span_count", int),
        spans=tuple(
            Span(
                _field(where, span, "span_id", str),
                _field(where, span, "node", str),
                _field(where, span, "unfinished", bool),
                _witnessed(
                    where,
                    span,
                    tuple(
                        _field(where, event, "name", str)
                        for event in _field(where, span, "events", list)
                    ),
                ),
            )
            for span in _field(where, shown, "spans", list)
        ),
    )


# ----------------------------------------------------------------- judging


def differences(
    trace: Trace,
    logged: Mapping[str, Handled],
    services: Mapping[str, str],
    witnessed: Mapping[str, tuple[str, Witnessed]],
) -> list[str]:
    """In what a collected trace is not the order that the services logged; README.md's table."""
    found = list(_from_the_witness(trace, services, witnessed))
    by_id = {span.span_id: span for span in trace.spans}
    found += [
        f"duplicate_span: {span_id} is there {count} times"
        for span_id, count in Counter(span.span_id for span in trace.spans).items()
        if count > 1
    ]
    if trace.span_count != len(trace.spans):
        found.append(f"span_count: says {trace.span_count}, shows {len(trace.spans)}")
    roots = [span for span in trace.spans if not span.parent_id]
    if len(roots) != 1:
        found.append(f"root: {len(roots)} spans have no parent, want 1")
    for span in trace.spans:
        if span.unfinished:
            found.append(f"unfinished: {span.span_id}, {span.name}")
        if span.parent_id and span.parent_id not in by_id:
            found.append(f"parent: {span.span_id}, {span.name} has none of its own here")
    expected = {services[service] for service in logged}
    for span in trace.spans:
        if span.node not in expected:
            found.append(f"extra_node: {span.node} has {span.name}, and logged nothing")
    caller: str | None = None
    for service in (FRONT, MIDDLE, LAST):
        if service in logged:
            node = services[service]
            found += _service_differences(trace, by_id, service, logged[service], node, caller)
            caller = node
    return found


def _from_the_witness(
    trace: Trace,
    services: Mapping[str, str],
    witnessed: Mapping[str, tuple[str, Witnessed]],
) -> Iterator[str]:
    shown = {span.span_id: span for span in trace.spans}
    for span_id, (service, had) in witnessed.items():
        span = shown.pop(span_id, None)
        if span is None:
            yield f"witness: {service} had {span_id}, {had.name}, which is not here"
            continue
        if span.node != services[service]:
            yield f"witness: {span_id}, {had.name} of {service} is said to be of {span.node}"
        for name in Witnessed.__slots__:
            said, really = getattr(span.said, name), getattr(had, name)
            if said != really:
                yield f"witness: {name} of {span_id} is {said!r}, and was {really!r}"
    for span_id, span in shown.items():
        yield f"witness: no service had {span_id}, {span.name}"


def _service_differences(
    trace: Trace,
    by_id: Mapping[str, Span],
    service: str,
    logged: Handled,
    node: str,
    caller: str | None,
) -> Iterator[str]:
    """``caller``: the node from which the service is called; None for the first."""
    here = [span for span in trace.spans if span.node == node]
    servers = [span for span in here if span.kind == "server"]
    if len(servers) != 1:
        yield f"server: {len(servers)} spans of {service} on {node}, logged was 1 request"
        return
    (server,) = servers
    parent = by_id.get(server.parent_id)
    if caller is not None and (parent is None or parent.node != caller or parent.kind != "client"):
        yield f"caller: {server.name} on {node} is not below a client span of {caller}"
    clients = [span for span in here if span.kind == "client"]
    systems = Counter(
        str(
            next(
                (span.attributes[key] for key in _DATABASE_ATTRIBUTES if key in span.attributes), ""
            )
        )
        for span in clients
    )
    for system in _DATABASES:
        if systems[system] != logged.calls.get(system, 0):
            yield (
                f"calls: {systems[system]} to {system} on {node}, "
                f"logged were {logged.calls.get(system, 0)}"
            )
    requests = logged.calls.get("http", 0) + logged.calls.get("grpc", 0)
    if systems[""] != requests:
        yield f"calls: {systems['']} to services on {node}, logged were {requests}"


def judge(
    orders: Orders, traces: Mapping[str, Trace], services: Mapping[str, str], witness: Witness
) -> Result:
    """Judge what was captured. ``services``: each one's node."""
    kinds = {kind.letter: KindResult(kind.what) for kind in KINDS}
    by_order: dict[int, list[Trace]] = {}
    found: dict[str, list[str]] = {}
    for trace in traces.values():
        asked = trace.orders()
        if len(asked) != 1:
            found[trace.trace_id] = [f"order: its URLs name {len(asked)} orders, want 1"]
            continue
        (order,) = asked
        by_order.setdefault(order, []).append(trace)
        if order not in orders:
            found[trace.trace_id] = [f"order: nobody logged order {order}"]
        elif wrong := differences(trace, orders[order], services, witness.get(trace.trace_id, {})):
            found[trace.trace_id] = wrong
    for order, several in by_order.items():
        if len(several) > 1:
            for trace in several:
                found.setdefault(trace.trace_id, []).append(
                    f"order: {order} has {len(several)} traces"
                )

    shown: dict[str, str] = {}
    met: set[int] = set()
    for order, logged in sorted(orders.items()):
        for kind in KINDS:
            if kind.happened(logged):
                met.add(order)
                of_order = by_order.get(order, [])
                whole_ones = [one for one in of_order if one.trace_id not in found]
                _count(kinds[kind.letter], kind, order, whole_ones, services)
                if of_order:
                    shown.setdefault(kind.letter, of_order[0].trace_id)

    coherent = {trace_id for trace_id, trace in traces.items() if trace.verdict == "coherent"}
    whole = traces.keys() - found.keys()
    happened = sum(result.happened for result in kinds.values())
    captured = sum(result.captured for result in kinds.values())
    coherent_share = len(whole) / len(traces) if traces else None
    false_coherent, false_incoherent = coherent - whole, whole - coherent
    failures = list(_failures(kinds))
    if false_coherent:
        failures.append(f"false_coherent: {len(false_coherent)} are called coherent and are not")
    if coherent_share is None or coherent_share < _COHERENT_SHARE_MIN:
        failures.append(
            f"coherent_by_checker: {len(whole)} of {len(traces)} are whole, want {_COHERENT_SHARE_MIN:.0%}"
        )
    others = sum(not trace.orders() & met for trace in traces.values())
    if others > _OTHERS_SHARE_MAX * len(orders):
        failures.append(
            f"others: {others} of {len(orders)} orders were collected though nothing was wrong with"
            f" them, want at most {_OTHERS_SHARE_MAX:.0%}"
        )
    if len(whole & coherent) < _COHERENT_SHARE_MIN * len(whole):
        failures.append(
            f"false_incoherent: {len(false_incoherent)} whole ones are not called coherent"
        )
    return Result(
        requests=len(orders),
        spans=sum(
            1 + sum(handled.calls.values())
            for logged in orders.values()
            for handled in logged.values()
        ),
        collected=len(traces),
        kinds=kinds,
        recall=captured / happened if happened else 1.0,
        coherent_by_checker=coherent_share,
        false_coherent=len(false_coherent),
        false_incoherent=len(false_incoherent),
        selected=happened,
        selected_share=happened / len(orders),
        others=others,
        differences=found,
        shown=shown,
        failures=failures,
        ok=not failures,
    )


def _count(
    result: KindResult, kind: Kind, order: int, traces: list[Trace], services: Mapping[str, str]
) -> None:
    result.happened += 1
    fired = {fired for trace in traces for fired in trace.triggers}
    if not any(name == kind.trigger for name, _ in fired):
        result.missing.append(order)
        return
    result.captured += 1
    nodes = {node for _, node in fired}
    counted = Counter(result.firing_nodes) + Counter(nodes)
    result.firing_nodes = dict(sorted(counted.items()))
    result.one_node_fired += len(nodes) == 1
    delivered = {span.node for trace in traces for span in trace.spans}
    result.of_all_nodes += delivered >= set(services.values())


def _failures(kinds: Mapping[str, KindResult]) -> Iterator[str]:
    for kind in KINDS:
        result = kinds[kind.letter]
        if not result.happened:
            yield f"{kind.letter}: never happened, so nothing is shown"
        if result.captured < kind.recall_min * result.happened:
            yield (
                f"{kind.letter}: {result.captured} of {result.happened} captured, "
                f"want {kind.recall_min:.0%}; missing are orders {result.missing}"
            )
        if kind.one_node and result.one_node_fired < result.captured:
            yield (
                f"{kind.letter}: one node fired on {result.one_node_fired} of {result.captured}, "
                "want all"
            )
        if result.of_all_nodes < result.captured:
            yield (
                f"{kind.letter}: slices of all nodes for {result.of_all_nodes} of {result.captured}"
            )


def _service(text: str) -> tuple[str, str]:
    service, _, node = text.partition("=")
    if service not in (FRONT, MIDDLE, LAST) or not node:
        raise argparse.ArgumentTypeError(f"{text!r}: want {FRONT}, {MIDDLE} or {LAST}, =, its node")
    return service, node


def main(argv: list[str] | None = None) -> int:
    """Run the check; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.demo.check")
    parser.add_argument("directory", type=Path, help="access logs, traces.jsonl, TRACE.json")
    parser.add_argument("--service", type=_service, action="append", required=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    services = dict(arguments.service)
    if len(services) != len((FRONT, MIDDLE, LAST)):
        parser.error(f"want --service three times: {FRONT}, {MIDDLE}, {LAST}")
    try:
        directory = arguments.directory
        result = judge(
            read_logs(directory, services),
            read_traces(directory),
            services,
            read_witness(directory, services),
        )
    except BadInputError as error:
        sys.stderr.write(f"check: {error}\n")
        return 2
    if arguments.json:
        print(json.dumps(asdict(result)))
    else:
        for trace_id, wrong in result.differences.items():
            print(trace_id, "; ".join(wrong))
        for letter, kind in result.kinds.items():
            print(f"{letter}: {kind}")
        print("\n".join(f"FAILED {failure}" for failure in result.failures) or "good")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
