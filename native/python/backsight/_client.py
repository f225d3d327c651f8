# SPDX-License-Identifier: Apache-2.0
"""The two forms of the client over libbacksight; the package's docstring says which to use."""

from __future__ import annotations

import contextlib
import enum
import math
import re
import struct
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from backsight._attributes import (
    AttributeValue,
    cut_utf8,
    encode_attributes,
    encode_text,
)
from backsight._native import ffi, lib
from backsight._shown import Before, enter, leave

if TYPE_CHECKING:
    from backsight._native import CData

TraceId: TypeAlias = bytes | str
"""A W3C trace id: 16 bytes, or their 32 hex digits. All zero means no trace: nothing is written."""

Payload: TypeAlias = bytes | bytearray | memoryview

_unpack_id = struct.Struct(">QQ").unpack

# Longer than the name of any operation, and leaves a span's end record room
# for its attributes.
SPAN_NAME_BYTES_MAX = 1024

# Names that were cut in the start record wait for the end record. A trace with
# more spans in progress than this has ends whose names stay cut.
_LONG_NAMES_MAX = 1024

_TRIGGER_NAME_MAX = 31  # BS_TRIGGER_NAME_MAX
_TRIGGER_NAME = re.compile(f"[a-z0-9_.-]{{1,{_TRIGGER_NAME_MAX}}}")
_NOT_IN_TRIGGER_NAME = re.compile("[^a-z0-9_.-]")

# How long a wait goes on before it looks for Ctrl-C again.
_WAIT_STEP_MS = 50


class SpanKind(enum.IntEnum):
    """OTLP's SpanKind."""

    UNSPECIFIED = 0
    INTERNAL = 1
    SERVER = 2
    CLIENT = 3
    PRODUCER = 4
    CONSUMER = 5


class SpanStatus(enum.IntEnum):
    """OTLP's StatusCode."""

    UNSET = 0
    OK = 1
    ERROR = 2


def _id_pair(trace_id: TraceId) -> tuple[int, int]:
    raw: bytes = trace_id if isinstance(trace_id, bytes) else _id_from_hex(trace_id)
    if len(raw) != 16:
        raise ValueError(f"a trace id has 16 bytes or 32 hex digits, not {trace_id!r}")
    return _unpack_id(raw)


def _id_from_hex(trace_id: str) -> bytes:
    if not isinstance(trace_id, str):
        raise TypeError(f"a trace id is bytes or str, not {type(trace_id).__name__}")
    try:
        # fromhex skips blanks, which are no digits.
        return bytes.fromhex(trace_id) if len(trace_id) == 32 else b""
    except ValueError:
        return b""


def _payload(payload: Payload) -> bytes:
    # TypeError for what has no buffer. A copy for what is not bytes: it could
    # not be handed on without one that costs more than these few bytes.
    return payload if type(payload) is bytes else bytes(memoryview(payload))


# ---------------------------------------------------------- thread-local form


def begin(trace_id: TraceId) -> None:
    """Write about this trace on this thread from now on; ends one that was still open."""
    lib.begin(*_id_pair(trace_id))


def end() -> None:
    """End the thread's trace."""
    lib.bs_end()


def tracepoint(payload: Payload) -> None:
    """Write bytes of your own, stamped now; at most 32768."""
    payload = _payload(payload)
    lib.tracepoint(payload, len(payload))


def breadcrumb(node: str) -> None:
    """The thread's trace was, or will be, on that node too: a name, or what node_ref() gave there."""
    lib.bs_breadcrumb(ffi.NULL, encode_text(node))


def serialize(span_id: int) -> str:
    """The context for a request that span_id sends: the value of the tracestate member ``bs``.

    Send it along, for deserialize() at the other end. Empty when there is nothing to pass on.
    """
    return serialize_to(ffi.NULL, span_id)


def deserialize(span_id: int, value: str) -> None:
    """Take in what serialize() gave where the request comes from; span_id is the caller's span."""
    deserialize_from(ffi.NULL, span_id, value)


def serialize_to(handle: CData, span_id: int) -> str:
    size: int = lib.BS_CONTEXT_MAX + 1
    value = ffi.new("char[]", size)
    if lib.bs_serialize(handle, span_id, value, size) < 0:
        return ""
    return ffi.string(value).decode("ascii", "replace")


def deserialize_from(handle: CData, span_id: int, value: str) -> None:
    encoded = encode_text(value)
    lib.bs_deserialize(handle, span_id, encoded, len(encoded))


# ------------------------------------------------------------ either form


def trigger(
    trace_id: TraceId,
    name: str,
    why: str | None = None,
    laterals: Iterable[TraceId] = (),
) -> None:
    """Collect this trace from every node that it visited.

    ``name`` is the rule's: 31 of ``[a-z0-9_.-]``. Capitals are lowered, what
    else it has becomes ``_``, and what is more is cut: no trigger is lost for
    its name. ``why`` is for the person who reads the trace, cut at 95 bytes;
    ``laterals`` are up to 32 other traces, kept or dropped together with this
    one.
    """
    trigger_pair(_id_pair(trace_id), name, why, laterals)


def _trigger_name(name: str) -> bytes:
    if not _TRIGGER_NAME.fullmatch(name):
        name = _NOT_IN_TRIGGER_NAME.sub("_", name.lower())[:_TRIGGER_NAME_MAX] or "_"
    return name.encode()


def trigger_pair(
    pair: tuple[int, int], name: str, why: str | None, laterals: Iterable[TraceId] = ()
) -> None:
    pairs = [_id_pair(lateral) for lateral in islice(laterals, lib.BS_LATERALS_MAX)]
    reason = ffi.NULL if why is None else encode_text(why)
    lib.trigger(*pair, _trigger_name(name), reason, pairs, len(pairs))


def node_ref() -> str:
    """This node, for a response whose receiver calls breadcrumb(); empty while unattached."""
    return ffi.string(lib.bs_node_ref()).decode("ascii", "replace")


@dataclass(frozen=True, slots=True)
class Stats:
    """What this process wrote and lost since it started, or since it was forked."""

    runs: int
    """Stretches of records written to the pool."""
    runs_lost: int
    """Stretches of which at least one record was dropped."""
    records_lost: int
    payload_bytes_lost: int
    records_oversized: int
    """Payloads over 32768 bytes."""
    contexts_malformed: int
    """Values that deserialize() could not read."""
    breadcrumbs_malformed: int
    """Nodes that breadcrumb() could not read."""
    attributes_malformed: int
    """Ends of spans refused for their attributes; those of this package are well-formed."""
    triggers_malformed: int
    """Triggers refused for their name, or for the trace id of all zeros."""
    triggers_unattached: int
    """There was no node to tell, nor memory of one. A trigger that is fired after the node has gone
    waits in its memory for the next one; if that has not kept it, it is lost, and not counted."""
    triggers_unrecorded: int
    """Of traces that are not among the percentage that is recorded."""
    triggers_lost: int
    """The trigger queue was full."""
    attachments: int
    """Times attached to a node daemon."""
    attached: bool
    """To a node daemon, or to one that has gone, until the next is there."""


def stats() -> Stats:
    """Counters of all that the calls of this module do not raise for."""
    native = ffi.new("struct bs_stats *")
    lib.bs_get_stats(native)
    return Stats(**{name: getattr(native, name) for name in Stats.__slots__})


def wait_attached(timeout_s: float) -> bool:
    """Wait for a node daemon: for tests and short-lived tools; services need not."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        now_s = time.monotonic()
        step_ms = min(_WAIT_STEP_MS, max(0, math.ceil((deadline_s - now_s) * 1000)))
        if lib.wait_attached(step_ms) == 0:
            return True
        # It gives up early where it will never attach (BACKSIGHT_DISABLE).
        if not now_s + step_ms / 1000 <= time.monotonic() < deadline_s:
            return False


# ---------------------------------------------------------------- handle form

_current: ContextVar[Trace | None] = ContextVar("backsight.current", default=None)


def current() -> Trace | None:
    """The innermost open trace that this task (or thread) entered by ``with Trace(...)``.

    A task that asyncio starts inherits the trace of the one that started it. None without any.
    """
    trace = _current.get()
    return None if trace is None or trace.closed else trace


HANDLE = ffi.typeof("struct bs_trace *")


class Trace:
    """A request in this process, open from here until close().

    A context manager: inside its block it is the current() one, and the block's end closes it,
    also when the task is cancelled. One that is forgotten is closed when it is garbage-collected.
    Several threads and tasks may use one object. After close(), and in a child after a fork,
    every call is ignored, so a late callback does no harm.

    Span and node ids are unsigned 64-bit integers, times are Unix time in nanoseconds.
    """

    __slots__ = ("__weakref__", "_before", "_handle", "_long_names", "_pair", "_token", "closed")

    # Within reach of __del__ when the interpreter has taken the module apart.
    _close = staticmethod(lib.bs_close)

    def __init__(self, trace_id: TraceId) -> None:
        self._pair = _id_pair(trace_id)
        # Owns the handle's memory, which stays in place.
        self._handle = ffi.new(HANDLE)
        self._long_names: dict[int, bytes] = {}
        self._token: Token[Trace | None] | None = None
        self._before: Before | None = None
        self.closed = False
        lib.open_trace(self._handle, *self._pair)

    def close(self) -> None:
        """End the trace in this process. Once is enough, more do nothing."""
        if not self.closed:
            self.closed = True
            self._close(self._handle)

    def __del__(self) -> None:
        # Without a handle if the trace id was no id.
        if hasattr(self, "closed"):
            self.close()

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        self._before = enter(self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            # ValueError: left in another context than entered, as an asynchronous generator is
            # that the event loop finalises. A closed trace is nobody's current one anyway.
            with contextlib.suppress(ValueError):
                _current.reset(token)
        before, self._before = self._before, None
        if before is not None:
            leave(before)
        self.close()

    def write(self, payload: Payload) -> None:
        """Write bytes of your own, stamped now; at most 32768."""
        payload = _payload(payload)
        lib.write_data(self._handle, payload, len(payload))

    def span_start(
        self,
        span_id: int,
        parent_id: int,
        start_ns: int,
        name: str,
        kind: int = SpanKind.INTERNAL,
    ) -> None:
        """A span starts; parent_id 0 is the root. Of the name, 1024 bytes are kept."""
        encoded = cut_utf8(encode_text(name), SPAN_NAME_BYTES_MAX)
        if len(encoded) > lib.BS_SPAN_START_NAME_MAX and len(self._long_names) < _LONG_NAMES_MAX:
            self._long_names[span_id] = encoded
        lib.bs_span_start(self._handle, span_id, parent_id, start_ns, kind, encoded)

    def span_end(
        self,
        span_id: int,
        end_ns: int,
        status: int = SpanStatus.UNSET,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        """The span ends. What does not fit of its attributes is cut (see TRUNCATED_KEY)."""
        name = self._long_names.pop(span_id, b"")
        encoded = b""
        if attributes:
            encoded = encode_attributes(
                attributes, lib.BS_PAYLOAD_MAX - lib.SPAN_END_BYTES - len(name)
            )
        lib.bs_span_end(
            self._handle, span_id, end_ns, status, name or ffi.NULL, encoded, len(encoded)
        )

    def breadcrumb(self, node: str) -> None:
        """What the module's ``breadcrumb`` does, for this trace."""
        lib.bs_breadcrumb(self._handle, encode_text(node))

    def serialize(self, span_id: int) -> str:
        """What the module's ``serialize`` does, for this trace."""
        return serialize_to(self._handle, span_id)

    def deserialize(self, span_id: int, value: str) -> None:
        """What the module's ``deserialize`` does, for this trace."""
        deserialize_from(self._handle, span_id, value)

    def trigger(self, name: str, why: str | None = None, laterals: Iterable[TraceId] = ()) -> None:
        """What the module's ``trigger`` does, for this trace; works after close too."""
        trigger_pair(self._pair, name, why, laterals)
