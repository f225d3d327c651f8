# SPDX-License-Identifier: Apache-2.0
"""Every span of the process into the pool: a record when it starts, and one or more when it ends."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from backsight import _client
from backsight._attributes import cut_utf8, encode_text
from backsight._native import ffi, lib

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

    from backsight._native import CData
    from backsight.otel._rules import Rules

TRACESTATE_KEY = "bs"
"""Our member of tracestate (backsight.h, bs_serialize)."""

# Traces that are open in the process at a time. One more closes the one that was
# opened first, which is then one of spans that nobody ends.
_OPEN_MAX = 16384

# Of one span. Beyond, its longest texts are cut: OTLP receivers refuse more in one message.
_DETAIL_BYTES_MAX = 1 << 20
_TEXT_CUT = 4096

_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200  # OTLP SpanFlags
_MASK_64 = (1 << 64) - 1
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1

_START_NAME_MAX: int = lib.BS_SPAN_START_NAME_MAX


@dataclass(slots=True)
class OpenTrace:
    """One trace while spans of it are open in this process.

    ``spans``: the open ones, and the names that they started with. ``answered``:
    client spans that were answered by a process on a node, which sees its own errors.
    """

    pair: tuple[int, int]
    handle: CData
    spans: dict[int, str] = field(default_factory=dict)
    scopes: dict[int, int] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)


class BacksightSpanProcessor(SpanProcessor):
    """Writes what it is told to the pool of this node; see the package.

    A trace is open in the pool from the start of its first span in this process
    until none of them is open any more.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._local = threading.local()
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a child: what was open is the parent's, and a lock may be nobody's."""
        # Begins to attach, so that a worker need not lose its first request.
        _client.node_ref()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenTrace] = OrderedDict()
        self._resources: dict[int, tuple[Resource, bytes]] = {}
        self._scopes: dict[int, tuple[InstrumentationScope | None, bytes]] = {}

    # ------------------------------------------------------- SpanProcessor

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """A span starts: open its trace, take in where the request comes from."""
        context = span.context
        trace_id, span_id, name = context.trace_id, context.span_id, span.name
        parent = span.parent
        with self._lock:
            trace = self._open.get(trace_id)
            if trace is None:
                trace = self._begin(trace_id, span.resource)
            trace.spans[span_id] = name
        handle = trace.handle
        if parent is None:
            parent_id = 0
        else:
            parent_id = parent.span_id
            if parent.is_remote:
                self._extract(handle, parent)
        lib.bs_span_start(
            handle, span_id, parent_id, span.start_time or 0, span.kind.value + 1, encode_text(name)
        )
        # A flag that came with the request counts where what comes is believed.
        if context.trace_flags & 1 and (
            parent is None or (parent.is_remote and lib.bs_trusts_incoming())
        ):
            _fire(trace, *self._rules.sampled())

    def on_end(self, span: ReadableSpan) -> None:
        """A span ends: write all of it, and see whether a rule fires."""
        # Here and below, past the properties of the SDK, which copy, and of enumerations,
        # which are slow: together they were a third of what a span costs.
        context = span._context
        assert context is not None
        trace_id, span_id = context.trace_id, context.span_id
        trace = self._open.get(trace_id)
        if trace is None or span_id not in trace.spans:
            return  # of the parent process, or of a trace that was open too long
        name = span._name
        encoded_name = encode_text(name)
        is_told = name == trace.spans[span_id] and len(encoded_name) <= _START_NAME_MAX
        attributes = _plain(span._attributes)
        detail = self._detail(span, attributes)
        lib.span_end_detailed(
            trace.handle,
            span_id,
            span._end_time or 0,
            span._status.status_code._value_,
            ffi.NULL if is_told else cut_utf8(encoded_name, _client.SPAN_NAME_BYTES_MAX),
            self._scope(trace, span._instrumentation_scope),
            detail,
            len(detail),
        )
        if span._kind is SpanKind.CLIENT:
            self._peer(trace, attributes)
        answered = span_id in trace.answered
        for trigger, why in self._rules.ended(span, attributes, answered=answered):
            _fire(trace, trigger, why)
        with self._lock:
            del trace.spans[span_id]
            if answered:
                trace.answered.discard(span_id)
            if not trace.spans and self._open.get(trace_id) is trace:
                del self._open[trace_id]
                lib.bs_close(trace.handle)

    def shutdown(self) -> None:
        """Nothing to flush: what is written is in the pool, and what is open shows as unfinished."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    # ------------------------------------------------------------ contexts

    def inject(self, context: SpanContext) -> str:
        """The value of our member of tracestate for a request that this span sends; "" for none."""
        trace = self._open.get(context.trace_id)
        return "" if trace is None else _client.serialize_to(trace.handle, context.span_id)

    def answered(self, context: SpanContext, node: str) -> None:
        """The request of this client span was answered by a process on that node (bs_node_ref)."""
        trace = self._open.get(context.trace_id)
        if trace is not None and lib.bs_breadcrumb(trace.handle, encode_text(node)) == 0:
            trace.answered.add(context.span_id)

    def _extract(self, handle: CData, parent: SpanContext) -> None:
        value = parent.trace_state.get(TRACESTATE_KEY)
        if value:
            _client.deserialize_from(handle, parent.span_id, value)

    def _peer(self, trace: OpenTrace, attributes: Mapping[str, Any]) -> None:
        """Whom a client span called is a hint where else to look, also if no answer came."""
        address = (
            attributes.get("network.peer.address")
            or attributes.get("net.peer.ip")
            or attributes.get("server.address")
        )
        if isinstance(address, str):
            # What is no address is refused, and counted as such.
            address = address.strip("[]")
            if address[:1].isdigit() or ":" in address:
                lib.bs_breadcrumb(trace.handle, encode_text("@" + address))

    # ------------------------------------------------------------- records

    def _begin(self, trace_id: int, resource: Resource) -> OpenTrace:
        """Open a trace; the lock is held."""
        while len(self._open) >= _OPEN_MAX:
            _, oldest = self._open.popitem(last=False)
            lib.bs_close(oldest.handle)
        pair = (trace_id >> 64, trace_id & _MASK_64)
        # Owns the memory of the handle, which stays in place.
        trace = self._open[trace_id] = OpenTrace(pair, ffi.new(_client.HANDLE))
        lib.open_trace(trace.handle, *pair)
        known = self._resources.get(id(resource))
        if known is None:
            encoded = self._pack([_plain(resource.attributes), resource.schema_url or ""])
            # Held, so that its id is no other's.
            known = self._resources[id(resource)] = (resource, encoded)
        lib.bs_write(trace.handle, lib.BS_RECORD_RESOURCE, known[1], len(known[1]))
        return trace

    def _scope(self, trace: OpenTrace, scope: InstrumentationScope | None) -> int:
        """The number of the scope in this handle, telling of it if it is the first time."""
        if scope is None:
            return 0
        number = trace.scopes.get(id(scope))
        if number is None:
            known = self._scopes.get(id(scope))
            if known is None:
                encoded = self._pack(
                    [
                        scope.name,
                        scope.version or "",
                        scope.schema_url or "",
                        _plain(scope.attributes),
                    ]
                )
                known = self._scopes[id(scope)] = (scope, encoded)
            number = trace.scopes[id(scope)] = len(trace.scopes) + 1
            payload = number.to_bytes(4, "little") + known[1]
            lib.bs_write(trace.handle, lib.BS_RECORD_SCOPE, payload, len(payload))
        return number

    def _detail(self, span: ReadableSpan, attributes: Mapping[str, Any]) -> bytes:
        """MessagePack of what protocol/spans.py of the coordinator reads, without its empty end."""
        events, links = span._events, span._links
        status, state = span._status, span.context.trace_state
        items: list[Any] = [
            attributes,
            [
                [event.name, event.timestamp, _plain(event.attributes), event.dropped_attributes]
                for event in events
            ]
            if events
            else [],
            [_link(link) for link in links] if links else [],
            (status.description or "") if status.status_code is StatusCode.ERROR else "",
            ",".join([f"{key}={value}" for key, value in state.items()]) if state else "",
            _flags(span._parent),
        ]
        if (
            getattr(span._attributes, "dropped", 0)
            or getattr(events, "dropped", 0)
            or getattr(links, "dropped", 0)
        ):
            items += (span.dropped_attributes, span.dropped_events, span.dropped_links)
        encoded = self._pack(items)
        return encoded if len(encoded) <= _DETAIL_BYTES_MAX else self._pack(_shortened(items))

    def _pack(self, items: list[Any]) -> bytes:
        try:
            packer = self._local.packer
        except AttributeError:
            packer = self._local.packer = msgpack.Packer(default=_default, unicode_errors="replace")
        try:
            encoded: bytes = packer.pack(items)
        except (OverflowError, TypeError, ValueError, RecursionError):
            packer.reset()
            encoded = packer.pack(_packable(items))
        return encoded


def _fire(trace: OpenTrace, trigger: str, why: str) -> None:
    _client.trigger_pair(trace.pair, trigger, why)


def _flags(context: SpanContext | None) -> int:
    return _HAS_IS_REMOTE | (_IS_REMOTE if context is not None and context.is_remote else 0)


def _link(link: Any) -> list[Any]:  # noqa: ANN401 # of the API or the SDK
    context = link.context
    return [
        context.trace_id.to_bytes(16, "big"),
        context.span_id,
        _plain(link.attributes),
        "",
        _flags(context),
        link.dropped_attributes,
    ]


def _plain(attributes: Any) -> dict[str, Any]:  # noqa: ANN401 # a mapping, or None
    """Attributes as a dict; of the SDK's own container, the one inside."""
    try:
        inner = attributes._dict
    except AttributeError:
        return dict(attributes) if attributes else {}
    return inner if isinstance(inner, dict) else dict(attributes)


def _default(value: object) -> object:
    """What MessagePack does not know by itself."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Iterable):
        return list(value)
    return str(value)


def _packable(value: Any) -> Any:  # noqa: ANN401 # any attribute
    """The same with what cannot be packed as text: a number that is too large, a strange key."""
    if isinstance(value, Mapping):
        return {str(key): _packable(item) for key, item in value.items()}
    if isinstance(value, str | bytes | bool | float) or value is None:
        return value
    if isinstance(value, int):
        return value if _INT_MIN <= value <= _INT_MAX else str(value)
    if isinstance(value, Iterable):
        return [_packable(item) for item in value]
    return str(value)


def _shortened(value: Any) -> Any:  # noqa: ANN401 # any attribute
    """The same with texts cut."""
    if isinstance(value, str | bytes):
        return value[:_TEXT_CUT]
    if isinstance(value, Mapping):
        return {str(key): _shortened(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [_shortened(item) for item in value]
    return value
