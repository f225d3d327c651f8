# SPDX-License-Identifier: Apache-2.0
"""Sampling that decides what is exported, and never what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import get_current_span

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, TraceState
    from opentelemetry.util.types import Attributes


class AlwaysRecordSampler(Sampler):
    """What another sampler drops is recorded, unsampled: processors see it, exporters do not.

    The SDK's own sampler of that name would lose the parent's tracestate, of
    other vendors too: the SDK does not hand it to samplers
    (opentelemetry-python #5578). So it is put back here.
    """

    def __init__(self, inner: Sampler) -> None:
        self.inner = inner

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
        if trace_state is None:
            trace_state = get_current_span(parent_context).get_span_context().trace_state
        result = self.inner.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )
        decision = result.decision
        if decision is Decision.DROP:
            decision = Decision.RECORD_ONLY
            # A sampler that drops gives no attributes; those of the caller are the span's.
            return SamplingResult(decision, attributes, result.trace_state or trace_state)
        return SamplingResult(decision, result.attributes, result.trace_state or trace_state)

    def get_description(self) -> str:
        return f"BacksightAlwaysRecord{{{self.inner.get_description()}}}"
