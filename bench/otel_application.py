# SPDX-License-Identifier: Apache-2.0
"""A process whose requests are spans: ``otel_application.py PROCESSOR [ENDPOINT]``.

Runs under the Python of testbed/apps/otel-requirements.txt. A request is a trace of ten spans, each with
eight attributes and an event, like those of an instrumented web service. PROCESSOR is noop,
backsight, or otlp, with a receiver at ENDPOINT. For each line of its input, a number of requests,
it makes these and prints one line of JSON: spans, and the CPU time of the process, all threads,
in ns, until all of them are out of its hands.
"""

from __future__ import annotations

import json
import sys
import time

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, Tracer

SPANS_PER_REQUEST = 10


def request(tracer: Tracer, number: int) -> None:
    """One server span, and nine that it calls one after the other."""
    with tracer.start_as_current_span("GET /cart/{id}", kind=SpanKind.SERVER) as server:
        describe(server, number)
        for step in range(SPANS_PER_REQUEST - 1):
            with tracer.start_as_current_span("SELECT shop.carts", kind=SpanKind.CLIENT) as span:
                describe(span, number + step)


def describe(span: object, number: int) -> None:
    """Eight attributes and an event, texts and numbers as instrumentations set them."""
    span.set_attribute("http.request.method", "GET")  # type: ignore[attr-defined]
    span.set_attribute("url.path", f"/cart/{number}")  # type: ignore[attr-defined]
    span.set_attribute("http.route", "/cart/{id}")  # type: ignore[attr-defined]
    span.set_attribute("http.response.status_code", 200)  # type: ignore[attr-defined]
    span.set_attribute("server.address", "cart.internal")  # type: ignore[attr-defined]
    span.set_attribute("server.port", 8080)  # type: ignore[attr-defined]
    span.set_attribute("network.protocol.version", "1.1")  # type: ignore[attr-defined]
    span.set_attribute("cart.total", 12.5)  # type: ignore[attr-defined]
    span.add_event("cache.miss", {"key": "cart", "size": number})  # type: ignore[attr-defined]


def provider(processor: str, endpoint: str) -> TracerProvider:
    """A tracer provider with that processor and no other."""
    # The sampler is the SDK's default, which exports all of it.
    made = TracerProvider(
        resource=Resource.create({"service.name": "bench"}), shutdown_on_exit=False
    )
    match processor:
        case "noop":
            made.add_span_processor(SpanProcessor())
        case "backsight":
            import backsight
            from backsight.otel import install

            install(made)
            if not backsight.wait_attached(30):
                sys.exit("otel_application.py: no node daemon to attach to")
        case "otlp":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            made.add_span_processor(
                BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=True))
            )
        case _:
            sys.exit("otel_application.py: PROCESSOR is noop, backsight or otlp")
    return made


def main() -> None:
    """Do as the command line says."""
    processor, *rest = sys.argv[1:]
    made = provider(processor, rest[0] if rest else "")
    tracer = made.get_tracer("bench", "1.0")
    for line in sys.stdin:
        requests = int(line)
        begun_ns = time.process_time_ns()
        for number in range(requests):
            request(tracer, number)
            # As a service pauses between requests, so that no batch is dropped for the
            # queue being full: what is dropped costs less.
            if processor == "otlp" and number % 100 == 99:
                made.force_flush()
        made.force_flush()
        cpu_ns = time.process_time_ns() - begun_ns
        spans = requests * SPANS_PER_REQUEST
        print(json.dumps({"spans": spans, "cpu_ns": cpu_ns}), flush=True)
    made.shutdown()
    if processor == "backsight":
        import backsight

        lost = backsight.stats().records_lost
        if lost:
            sys.exit(f"otel_application.py: {lost} records were lost, which makes spans cheaper")


if __name__ == "__main__":
    main()
