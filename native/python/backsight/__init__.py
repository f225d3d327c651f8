# SPDX-License-Identifier: Apache-2.0
"""Record every request in full, keep it on the node, collect it when something goes wrong.

    import backsight

    with backsight.Trace(trace_id) as trace:  # the W3C trace id: 16 bytes or 32 hex digits
        trace.span_start(span_id, parent_id, start_ns, "GET /cart")
        ...
        trace.span_end(span_id, end_ns, attributes={"items": 3})
        if end_ns - start_ns > limit_ns:
            trace.trigger("slow", "over the limit")

Which form to use. ``Trace`` is right everywhere, and the only right one in asyncio and with thread
pools, where requests interleave on one thread or one request runs on several. Inside a ``with``
block, ``current()`` gives the task's own trace to code that was not handed it. The functions
``begin``, ``tracepoint``, ``end`` and so on write to the one trace of the calling *thread*; they
suit a thread that works on one request from beginning to end, cost less, and would mix up
coroutines.

What may go wrong. A wrong type raises TypeError, an impossible id or number ValueError or
OverflowError: mistakes of the program. Nothing that happens while a right program runs raises:
no node daemon, no memory left, a payload too large, a malformed context are counted in
``stats()``, and cost the record in question only. After a node daemon has gone, records and triggers
go into the memory that it gave until the next one is there; if that one has not kept it, as it does
under a service manager, they are lost, and not counted. No call waits for anything but
``wait_attached()``.

Safe to use from threads (256 of a process can write at the same time; more are counted), and
across ``os.fork`` and ``multiprocessing``: a child attaches anew, and traces that were open in the
parent stay the parent's. Not from subinterpreters, as cffi has one state for all.

Environment: ``BACKSIGHT_SOCKET`` is the node daemon's socket (/run/backsight/node.sock if unset),
``BACKSIGHT_SERVICE`` the service's name (the interpreter's if unset). ``BACKSIGHT_DISABLE=1``: never
attach. ``BACKSIGHT_DEBUG=1``: say on standard error why the process is not attached.

``backsight.autotrigger`` has a rule for latencies, ``backsight.otel`` does it all for OpenTelemetry.
"""

from backsight._attributes import TRUNCATED_KEY, AttributeValue
from backsight._client import (
    Payload,
    SpanKind,
    SpanStatus,
    Stats,
    Trace,
    TraceId,
    begin,
    breadcrumb,
    current,
    deserialize,
    end,
    node_ref,
    serialize,
    stats,
    tracepoint,
    trigger,
    wait_attached,
)

__all__ = [
    "TRUNCATED_KEY",
    "AttributeValue",
    "Payload",
    "SpanKind",
    "SpanStatus",
    "Stats",
    "Trace",
    "TraceId",
    "begin",
    "breadcrumb",
    "current",
    "deserialize",
    "end",
    "node_ref",
    "serialize",
    "stats",
    "tracepoint",
    "trigger",
    "wait_attached",
]
