# SPDX-License-Identifier: Apache-2.0
"""What processes do to a tracer: ``processes.py NAME`` prints the trace id, in hexadecimal.

Run by ``opentelemetry-instrument``; each name makes one trace.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import sys
import threading

from opentelemetry import trace
from opentelemetry.context import attach
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, set_span_in_context

import backsight

tracer = trace.get_tracer("processes")


def tell(span: Span) -> None:
    print(format(span.get_span_context().trace_id, "032x"), flush=True)


def coroutines() -> None:
    """Tasks that interleave on one thread keep their spans apart."""

    async def work(number: int) -> None:
        with tracer.start_as_current_span(f"task {number}"):
            for step in range(3):
                with tracer.start_as_current_span(f"step {number}.{step}"):
                    await asyncio.sleep(0)

    async def all_of_them() -> None:
        with tracer.start_as_current_span("root") as root:
            tell(root)
            await asyncio.gather(*(work(number) for number in range(20)))

    asyncio.run(all_of_them())


def _start() -> None:
    assert backsight.wait_attached(20)


def _in_pool(parent: tuple[int, int]) -> int:
    attach(set_span_in_context(NonRecordingSpan(SpanContext(*parent, is_remote=True))))
    with tracer.start_as_current_span("job"):
        return os.getpid()


def pool() -> None:
    """Workers forked before there was a request, as Celery's are."""
    with multiprocessing.get_context("fork").Pool(3, _start) as workers:
        with tracer.start_as_current_span("root") as root:
            tell(root)
            context = root.get_span_context()
            workers.map(_in_pool, [(context.trace_id, context.span_id)] * 30, chunksize=1)
        workers.close()
        workers.join()


def daemon() -> None:
    """Twice forked, all descriptors closed, as daemons are made; then it works."""
    with tracer.start_as_current_span("before") as before:
        tell(before)
        context = before.get_span_context()
    done_read, done_write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        os.closerange(0, 3)
        os.closerange(3, done_write)
        os.closerange(done_write + 1, 1024)
        for _ in range(3):
            os.open("/dev/null", os.O_RDWR)
        attach(
            set_span_in_context(
                NonRecordingSpan(SpanContext(context.trace_id, context.span_id, True))
            )
        )
        # The first span makes it attach.
        with tracer.start_as_current_span("first"):
            pass
        if backsight.wait_attached(20):
            with tracer.start_as_current_span("after"):
                pass
        os.write(done_write, b"x")
        os._exit(0)
    os.close(done_write)
    os.read(done_read, 1)


def closed() -> None:
    """All descriptors closed in place, while attached."""
    with tracer.start_as_current_span("root") as root:
        tell(root)
        sys.stdout.flush()
        os.closerange(3, 1024)
        with tracer.start_as_current_span("after"):
            pass


def ending() -> None:
    """Spans while the interpreter goes down: in atexit, in a thread, and one that never ends."""
    root = tracer.start_span("root")
    tell(root)
    context = set_span_in_context(root)
    tracer.start_span("never ends", context)
    started = threading.Event()

    def late() -> None:
        started.set()
        threading.main_thread().join()
        with tracer.start_as_current_span("in a thread", context):
            pass

    threading.Thread(target=late).start()
    started.wait()

    def last() -> None:
        with tracer.start_as_current_span("in atexit", context):
            pass
        root.end()

    atexit.register(last)


if __name__ == "__main__":
    assert backsight.wait_attached(20)
    {f.__name__: f for f in (coroutines, pool, daemon, closed, ending)}[sys.argv[1]]()
