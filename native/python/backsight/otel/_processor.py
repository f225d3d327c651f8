# SPDX-License-Identifier: Apache-2.0
"""Every span of the process into the pool: a record when it starts, and one or more when it ends."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import msgpack
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import SpanKind

from backsight import _client
from backsight._attributes import cut_utf8, encode_text
from backsight._native import ffi, lib
from backsight._shown import enter, leave
from backsight.otel._firing import STATUS_ERROR, is_answer, listed
from backsight.otel._reach import is_unsent

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

    from backsight._native import CData
    from backsight._shown import Before
    from backsight.otel._firing import Rules

_log = logging.getLogger("backsight")

TRACESTATE_KEY = "bs"
"""Our member of tracestate (backsight.h, bs_serialize)."""

# Traces that are open in the process at a time. One more closes the one that was
# opened first, which is then one of spans that nobody ends.
_OPEN_MAX = 16384

# Of one span. Beyond, its longest texts are cut: OTLP receivers refuse more in one message.
_DETAIL_BYTES_MAX = 1 << 20
_TEXT_CUT = 4096

# Where they stand in a SpanContext, which is a tuple: its properties cost as much as a record.
_TRACE_ID, _SPAN_ID, _REMOTE, _FLAGS, _STATE = range(5)

_CLIENT = SpanKind.CLIENT  # see STATUS_ERROR

_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200  # OTLP SpanFlags
_MASK_64 = (1 << 64) - 1
# Programs that make a tracer a request have as many scopes as requests.
_KNOWN_MAX = 1024

# Of what a reader shows of it.
_ERROR_BYTES_MAX = 127

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1

_START_NAME_MAX: int = lib.BS_SPAN_START_NAME_MAX


@dataclass(slots=True)
class OpenTrace:
    """One trace while spans of it are open in this process.

    ``spans``: the open ones, and the names that they started with. ``numbers``: for
    scopes that have none yet. ``answered``: client spans that were answered by a
    process on a node, which sees its own errors. ``shown``: spans that began to show the
    trace on their thread or task.
    """

    pair: tuple[int, int]
    handle: CData
    spans: dict[int, str] = field(default_factory=dict)
    scopes: dict[bytes, int] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=partial(count, 1))
    answered: set[int] = field(default_factory=set)
    shown: dict[int, Before] = field(default_factory=dict)


class BacksightSpanProcessor(SpanProcessor):
    """Writes what it is told to the pool of this node; see the package.

    A trace is open in the pool from the start of its first span in this process
    until none of them is open any more. The SDK hands on to the application what a
    processor raises, so nothing is: a span that cannot be written is left out, counted
    in ``failures``, and the first one is told in the log.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        # Those at rest: one at work may be asked for more by a finalizer, which would cut in.
        self._packers: list[msgpack.Packer] = []
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a child: what was open is the parent's, and a lock may be nobody's."""
        # Begins to attach, so that a worker need not lose its first request.
        _client.node_ref()
        # Finalizers and signal handlers may make and end spans while their own thread holds
        # it: from any call to what follows, the open traces may become others.
        self._lock = threading.RLock()
        self._open: OrderedDict[int, OpenTrace] = OrderedDict()
        self._resources: dict[int, tuple[Resource, bytes]] = {}
        self._scopes: dict[int, tuple[InstrumentationScope, bytes]] = {}
        self.failures = 0

    # ------------------------------------------------------- SpanProcessor

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """A span starts: open its trace, take in where the request comes from."""
        # All of it in one block, which costs nothing where nothing is raised.
        try:
            # Here and below, past the properties of the SDK, which copy, and of enumerations,
            # which are slow: together they were a third of what a span costs.
            context: Any = span._context
            trace_id, span_id = context[_TRACE_ID], context[_SPAN_ID]
            name = span._name
            parent: Any = span._parent
            with self._lock:
                while True:
                    trace = self._open.get(trace_id) or self._begin(trace_id, span.resource)
                    trace.spans[span_id] = name
                    # From here on the span keeps it open.
                    if self._open.get(trace_id) is trace:
                        break
            handle = trace.handle
            before = enter(handle)
            if before is not None:
                trace.shown[span_id] = before
            parent_id = 0 if parent is None else parent[_SPAN_ID]
            try:
                lib.bs_span_start(
                    handle,
                    span_id,
                    parent_id,
                    span._start_time or 0,
                    span._kind._value_ + 1,
                    encode_text(name),
                )
            except (AttributeError, OverflowError, TypeError):
                # The SDK takes all that it is given for a time, a kind and a name.
                start_ns, kind = _whole(span.start_time), _kind(span.kind)
                encoded = encode_text(_text(name))
                lib.bs_span_start(handle, span_id, parent_id, start_ns, kind, encoded)
            if parent is not None and parent[_REMOTE]:
                self._extract(handle, parent)
            # A flag that came with the request counts where what comes is believed.
            if context[_FLAGS] & 1 and (
                parent is None or (parent[_REMOTE] and lib.bs_trusts_incoming())
            ):
                _fire(trace, *self._rules.sampled())
        except Exception:  # noqa: BLE001 # see the class
            self._fail("record the start of a span")
            self._leave(span)

    def on_end(self, span: ReadableSpan) -> None:
        """A span ends: write all of it, and see whether a rule fires."""
        try:
            context: Any = span._context
            trace_id, span_id = context[_TRACE_ID], context[_SPAN_ID]
            trace = self._open.get(trace_id)
            if trace is None or span_id not in trace.spans:
                return  # of the parent process, or of a trace that was open too long
            name = span._name
            if type(name) is not str:
                name = _text(name)
            encoded_name = encode_text(name)
            is_told = name == trace.spans[span_id] and len(encoded_name) <= _START_NAME_MAX
            is_long = len(encoded_name) > _client.SPAN_NAME_BYTES_MAX or "\0" in name
            attributes = _plain(span._attributes)
            detail = self._detail(span, attributes, name if is_long else "")
            end_ns = span._end_time or 0
            lib.span_end_detailed(
                trace.handle,
                span_id,
                end_ns if type(end_ns) is int and 0 <= end_ns <= _MASK_64 else _whole(end_ns),
                span._status._status_code._value_,
                ffi.NULL if is_told else cut_utf8(encoded_name, _client.SPAN_NAME_BYTES_MAX),
                self._scope(trace, span._instrumentation_scope),
                detail,
                len(detail),
            )
            # The channel or session of a call without a span of its own names the one around it.
            answered = span_id in trace.answered and span._kind is _CLIENT
            if span._kind is _CLIENT:
                address = self._peer(trace, attributes)
                if (
                    address
                    and span._status._status_code is STATUS_ERROR
                    and not answered
                    and not is_answer(attributes)
                ):
                    self._unanswered(trace, span_id, address, span)
            for trigger, why in self._rules.ended(span, attributes, answered=answered):
                _fire(trace, trigger, why)
            self._close(trace, trace_id, span_id)
        except Exception:  # noqa: BLE001 # see the class
            self._fail("record the end of a span")
            self._leave(span)

    def _leave(self, span: ReadableSpan) -> None:
        """Whatever became of the span, it is not open any more."""
        try:
            context = span._context
            trace_id, span_id = context.trace_id, context.span_id  # type: ignore[union-attr]
            trace = self._open.get(trace_id)
            if trace is not None:
                self._close(trace, trace_id, span_id)
        except Exception:  # noqa: BLE001 # no more can be done
            self._fail("forget a span")

    def _close(self, trace: OpenTrace, trace_id: int, span_id: int) -> None:
        """A span of the trace is not open any more, nor is the trace after its last one."""
        before = trace.shown.pop(span_id, None)
        if before is not None:
            leave(before)
        with self._lock:
            trace.spans.pop(span_id, None)
            trace.answered.discard(span_id)
            # Without a call from the question to the deletion, nothing comes in between.
            if not trace.spans and trace_id in self._open and self._open[trace_id] is trace:
                del self._open[trace_id]
                lib.bs_close(trace.handle)

    def _fail(self, what: str) -> None:
        """Called where an exception is handled."""
        self.failures += 1
        if self.failures == 1:
            _log.warning("cannot %s; said once, counted from here on", what, exc_info=True)

    def shutdown(self) -> None:
        """Nothing to flush: what is written is in the pool, and what is open shows as unfinished."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    # ------------------------------------------------------------ contexts

    def inject(self, context: SpanContext) -> str:
        """The value of our member of tracestate for a request that this span sends; "" for none."""
        trace = self._open.get(context.trace_id)
        if trace is None:
            return ""
        try:
            return _client.serialize_to(trace.handle, context.span_id)
        except Exception:  # noqa: BLE001 # see the class
            self._fail("send a context along")
            return ""

    def answered(self, context: SpanContext, node: str) -> None:
        """The request of this client span was answered by a process on that node (bs_node_ref)."""
        trace = self._open.get(context.trace_id)
        if trace is not None and lib.bs_breadcrumb(trace.handle, encode_text(node)) == 0:
            trace.answered.add(context.span_id)

    def _extract(self, handle: CData, parent: SpanContext) -> None:
        value = parent.trace_state.get(TRACESTATE_KEY)
        if value:
            _client.deserialize_from(handle, parent.span_id, value)

    def _peer(self, trace: OpenTrace, attributes: Mapping[str, Any]) -> str:
        """Whom a client span called is a hint where else to look, also if no answer came.

        The address that is now known; empty if it is none.
        """
        address = (
            attributes.get("network.peer.address")
            or attributes.get("net.peer.ip")
            or attributes.get("server.address")
        )
        if isinstance(address, str):
            # What is no address is refused, and counted as such.
            address = address.strip("[]")
            is_address = address[:1].isdigit() or ":" in address
            if is_address and not lib.bs_breadcrumb(trace.handle, encode_text("@" + address)):
                return address
        return ""

    def _unanswered(self, trace: OpenTrace, span_id: int, address: str, span: ReadableSpan) -> None:
        """Say that nobody answered, and whether anybody can have got it (struct bs_unanswered)."""
        error = span._status._description or ""
        kind, _, message = error.partition(": ")
        unsent = is_unsent(kind, message, address)
        thrown = [
            (str(said.get("exception.type")), str(said.get("exception.message")))
            for said in (
                e._attributes or {} for e in listed(span._events) if e._name == "exception"
            )
        ]
        if thrown:
            error = ": ".join(thrown[-1])
            # Who tries again may have been heard once.
            unsent = all(is_unsent(kind, message, address) for kind, message in thrown)
        reach = lib.BS_REACH_NONE if unsent else lib.BS_REACH_UNKNOWN
        encoded = encode_text(address)
        head = span_id.to_bytes(8, "little") + len(encoded).to_bytes(4, "little")
        payload = (
            head
            + reach.to_bytes(4, "little")
            + encoded
            + cut_utf8(encode_text(error), _ERROR_BYTES_MAX)
        )
        lib.bs_write(trace.handle, lib.BS_RECORD_UNANSWERED, payload, len(payload))

    # ------------------------------------------------------------- records

    def _begin(self, trace_id: int, resource: Resource) -> OpenTrace:
        """Open a trace; the lock is held."""
        while len(self._open) >= _OPEN_MAX:
            _, oldest = self._open.popitem(last=False)
            lib.bs_close(oldest.handle)
        known = self._resources.get(id(resource))
        if known is None:
            encoded = self._pack([_plain(resource.attributes), resource.schema_url or ""])
            if len(self._resources) >= _KNOWN_MAX:
                self._resources.clear()
            # Held, so that its id is no other's.
            known = self._resources[id(resource)] = (resource, encoded)
        pair = (trace_id >> 64, trace_id & _MASK_64)
        # Owns the memory of the handle, which stays in place.
        trace = OpenTrace(pair, ffi.new(_client.HANDLE))
        lib.open_trace(trace.handle, *pair)
        lib.bs_write(trace.handle, lib.BS_RECORD_RESOURCE, known[1], len(known[1]))
        begun = self._open.setdefault(trace_id, trace)
        if begun is not trace:
            lib.bs_close(trace.handle)
        return begun

    def _scope(self, trace: OpenTrace, scope: InstrumentationScope | None) -> int:
        """The number of the scope in this handle, telling of it if it is the first time."""
        if scope is None:
            return 0
        known = self._scopes.get(id(scope))
        if known is None:
            encoded = self._pack(
                [
                    scope.name,
                    scope.version or "",
                    scope.schema_url or "",
                    _plain(getattr(scope, "attributes", None)),  # not of older SDKs
                ]
            )
            if len(self._scopes) >= _KNOWN_MAX:
                self._scopes.clear()
            # Held, so that its id is no other's.
            known = self._scopes[id(scope)] = (scope, encoded)
        encoded = known[1]
        number = trace.scopes.get(encoded)
        if number is None:
            # In one step, without the lock: no two scopes get the same number.
            number = trace.scopes.setdefault(encoded, next(trace.numbers))
            # Another thread may say the same once more.
            payload = number.to_bytes(4, "little") + encoded
            lib.bs_write(trace.handle, lib.BS_RECORD_SCOPE, payload, len(payload))
        return number

    def _detail(self, span: ReadableSpan, attributes: Mapping[str, Any], long_name: str) -> bytes:
        """MessagePack of what formats/spans.py of the coordinator reads, without its empty end."""
        events, links = span._events, span._links
        status = span._status
        state: Any = span._context[_STATE]  # type: ignore[index]
        # A comprehension is a call: most spans have none of them.
        listed_events, listed_links = listed(events), listed(links)
        encoded_links = [_link(link) for link in listed_links] if listed_links else []
        links_lost = encoded_links.count(None)
        if links_lost:
            encoded_links = [link for link in encoded_links if link is not None]
        items: list[Any] = [
            attributes,
            [_event(event) for event in listed_events] if listed_events else [],
            encoded_links,
            (status._description or "") if status._status_code is STATUS_ERROR else "",
            ",".join([f"{key}={value}" for key, value in state.items()]) if state else "",
            _flags(span._parent),
        ]
        if (
            long_name
            or links_lost
            or getattr(span._attributes, "dropped", 0)
            or getattr(events, "dropped", 0)
            or getattr(links, "dropped", 0)
        ):
            items += (span.dropped_attributes, span.dropped_events, span.dropped_links + links_lost)
            if long_name:
                items.append(long_name)
        encoded = self._pack(items)
        return encoded if len(encoded) <= _DETAIL_BYTES_MAX else self._pack(_shortened(items))

    def _pack(self, items: list[Any]) -> bytes:
        try:
            packer = self._packers.pop()
        except IndexError:
            packer = msgpack.Packer(default=_default)
        try:
            encoded: bytes = packer.pack(items)
        except (OverflowError, TypeError, ValueError, RecursionError):
            packer.reset()
            # Which takes a copy of each text, so it is not the one for all.
            replacing = msgpack.Packer(unicode_errors="replace")
            encoded = replacing.pack(_packable(items))
        self._packers.append(packer)
        return encoded


def _fire(trace: OpenTrace, trigger: str, why: str) -> None:
    _client.trigger_pair(trace.pair, trigger, why)


def _flags(context: SpanContext | None) -> int:
    """OTLP's, of a link or a span with this one as its parent."""
    return _HAS_IS_REMOTE | (_IS_REMOTE if context is not None and context[_REMOTE] else 0)


def _event(event: Any) -> list[Any]:  # noqa: ANN401 # of the SDK
    name, time_ns, attributes = event._name, event._timestamp, event._attributes
    return [
        name if type(name) is str else _text(name),
        time_ns if type(time_ns) is int and 0 <= time_ns <= _MASK_64 else _whole(time_ns),
        _plain(attributes),
        getattr(attributes, "dropped", 0),
    ]


def _link(link: Any) -> list[Any] | None:  # noqa: ANN401 # of the API or the SDK
    """None for one with ids that are none."""
    context = link.context
    try:
        trace_id = context.trace_id.to_bytes(16, "big")
        context.span_id.to_bytes(8, "big")
    except (AttributeError, OverflowError):
        return None
    return [
        trace_id,
        context.span_id,
        _plain(link.attributes),
        "",
        _flags(context),
        getattr(link, "dropped_attributes", 0),  # not of older SDKs
    ]


def _text(name: Any) -> str:  # noqa: ANN401 # whatever was given for a name
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _whole(time_ns: Any) -> int:  # noqa: ANN401 # whatever was given for a time
    try:
        return min(max(int(time_ns), 0), _MASK_64)
    except (OverflowError, TypeError, ValueError):
        return 0


def _kind(kind: Any) -> int:  # noqa: ANN401 # whatever was given for a kind
    """OTLP's; 0 is that of an unknown one."""
    try:
        return SpanKind(kind).value + 1
    except ValueError:
        return 0


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
