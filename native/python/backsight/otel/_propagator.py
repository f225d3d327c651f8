# SPDX-License-Identifier: Apache-2.0
"""Breadcrumbs and fired triggers, in our member of tracestate and in responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import (
    CarrierT,
    Getter,
    Setter,
    TextMapPropagator,
    default_getter,
    default_setter,
)
from opentelemetry.trace import get_current_span

from backsight._client import node_ref
from backsight.otel._processor import TRACESTATE_KEY, BacksightSpanProcessor

if TYPE_CHECKING:
    from opentelemetry.instrumentation.propagators import Setter as ResponseSetter

RESPONSE_HEADER = "backsight-node"
"""In responses: the node on which they were made, as ``bs_node_ref()`` gives it."""

_TRACESTATE = "tracestate"


class Current:
    """The processor of this process, once there is one.

    The SDK makes propagators before and apart from processors, by entry points without
    arguments: there is no other way from the one to the other.
    """

    processor: BacksightSpanProcessor | None = None


class BacksightPropagator(TextMapPropagator):
    """Puts our member first into ``tracestate``; use it after ``tracecontext``.

    Nothing is to be extracted: ``tracecontext`` has put the members into the context of
    the caller's span, from where the processor takes ours.
    """

    def inject(
        self,
        carrier: CarrierT,
        context: Context | None = None,
        setter: Setter[CarrierT] = default_setter,
    ) -> None:
        """Write ``tracestate`` again, with ours."""
        if Current.processor is None:
            return
        span_context = get_current_span(context).get_span_context()
        if not span_context.is_valid:
            return
        value = Current.processor.inject(span_context)
        if not value:
            return
        state = span_context.trace_state
        members = [f"{TRACESTATE_KEY}={value}"]
        # 32 members at most, of which the last give way (W3C Trace Context 3.3.1.5).
        members += [f"{k}={v}" for k, v in state.items() if k != TRACESTATE_KEY][:31]
        setter.set(carrier, _TRACESTATE, ",".join(members))

    def extract(
        self,
        carrier: CarrierT,
        context: Context | None = None,
        getter: Getter[CarrierT] = default_getter,
    ) -> Context:
        return Context() if context is None else context

    @property
    def fields(self) -> set[str]:
        return {_TRACESTATE}


def propagates(propagator: TextMapPropagator) -> bool:
    """Whether ours is in it."""
    if isinstance(propagator, BacksightPropagator):
        return True
    return any(propagates(inner) for inner in getattr(propagator, "_propagators", ()))


class BacksightResponsePropagator:
    """Tells the caller which node answered; beside another one that was set before."""

    def __init__(self, other: Any = None) -> None:  # noqa: ANN401 # of opentelemetry.instrumentation
        self._other = other

    def inject(
        self,
        carrier: Any,  # noqa: ANN401 # whatever the setter can set
        context: Context | None = None,
        setter: ResponseSetter | None = None,
    ) -> None:
        from opentelemetry.instrumentation.propagators import default_setter as default

        setter = setter or default
        if self._other is not None:
            self._other.inject(carrier, context, setter)
        ref = node_ref()
        if ref:
            setter.set(carrier, RESPONSE_HEADER, ref)  # type: ignore[no-untyped-call]
