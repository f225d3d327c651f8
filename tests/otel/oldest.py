# SPDX-License-Identifier: Apache-2.0
"""One trace of what a span may have, under the Python of oldest.txt; prints its id, in hexadecimal."""

from __future__ import annotations

from contextlib import suppress

from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

import backsight
from backsight.otel import install


def main() -> None:
    assert backsight.wait_attached(20)
    limits = SpanLimits(max_attributes=2, max_events=2, max_links=1)
    provider = TracerProvider(span_limits=limits, shutdown_on_exit=False)
    processor = install(provider)
    tracer = provider.get_tracer("lib", "1")
    links = [Link(SpanContext(number, 6, is_remote=False), {"n": number}) for number in (5, 6)]
    with tracer.start_as_current_span("root", kind=SpanKind.SERVER, links=links) as root:
        for number in range(3):
            root.set_attribute(f"a{number}", number)
            root.add_event(f"e{number}", {"n": number})
        with suppress(ValueError), tracer.start_as_current_span("fails"):
            raise ValueError("no such item")
        with tracer.start_as_current_span("told") as told:
            told.set_status(Status(StatusCode.ERROR, "why"))
    assert processor.failures == 0
    print(format(root.get_span_context().trace_id, "032x"))


if __name__ == "__main__":
    main()
