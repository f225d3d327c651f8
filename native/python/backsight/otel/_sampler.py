# SPDX-License-Identifier: Apache-2.0
"""Sampling that decides what is exported, and never what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    StaticSampler,
    TraceIdRatioBased,
)
from opentelemetry.trace import get_current_span

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, TraceState
    from opentelemetry.util.types import Attributes


# They take tracestate from the parent by themselves.
_OF_THE_SDK = (StaticSampler, ParentBased, TraceIdRatioBased)


class AlwaysRecordSampler(Sampler):
    """What another sampler drops is recorded, unsampled: processors see it, exporters do not.

    The SDK's own sampler of that name would lose the parent's tracestate, of
    other vendors too: the SDK does not hand it to samplers
    (opentelemetry-python #5578). So it is put back here.
    """

    def __init__(self, inner: Sampler) -> None:
        self.inner = inner
        self._looks_itself = isinstance(inner, _OF_THE_SDK)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """As the inner one decides, but no drop."""
        if trace_state is None and not self._looks_itself:
            trace_state = get_current_span(parent_context).get_span_context().trace_state
        result = self.inner.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )
        state = result.trace_state
        if state is None:
            state = trace_state
        if state is None:
            state = get_current_span(parent_context).get_span_context().trace_state
        if result.decision is Decision.DROP:
            # A sampler that drops gives no attributes; those of the caller are the span's.
            return SamplingResult(Decision.RECORD_ONLY, attributes, state)
        if state is result.trace_state:
            return result
        return SamplingResult(result.decision, result.attributes, state)

    def get_description(self) -> str:
        return f"BacksightAlwaysRecord{{{self.inner.get_description()}}}"
