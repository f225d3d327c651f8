# SPDX-License-Identifier: Apache-2.0
"""Applications of these tests: ``programs.py NAME ARGUMENTS``, under the Python of requirements.txt."""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import gc
import io
import itertools
import json
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import (
    ReadableSpan,
    SpanLimits,
    SpanProcessor,
    TracerProvider,
)
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

import backsight
from backsight.otel import BacksightPropagator, install
from backsight.otel._propagator import Current


class Keeper(SpanProcessor):
    """Keeps what the SDK's own exporter would be given."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


@contextmanager
def provided(
    resource: Resource | None = None, span_limits: SpanLimits | None = None
) -> Iterator[tuple[TracerProvider, Keeper]]:
    assert backsight.wait_attached(20)
    provider = TracerProvider(
        sampler=ALWAYS_OFF, resource=resource, shutdown_on_exit=False, span_limits=span_limits
    )
    keeper = Keeper()
    install(provider)
    provider.add_span_processor(keeper)
    yield provider, keeper
    stats = backsight.stats()
    assert stats.records_lost == stats.attributes_malformed == 0


def hexadecimal(span: trace.Span) -> str:
    return format(span.get_span_context().trace_id, "032x")


def received(spans: Sequence[ReadableSpan]) -> bytes:
    """What a receiver gets of the SDK's own exporter."""
    requests: list[bytes] = []

    def export(request: bytes, _: grpc.ServicerContext) -> bytes:
        requests.append(request)
        return b""

    server = grpc.server(ThreadPoolExecutor(1))
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    exporter = OTLPSpanExporter(f"http://127.0.0.1:{port}", insecure=True)
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    exporter.shutdown()
    server.stop(None).wait()
    (request,) = requests
    return request


def fidelity(output: str) -> None:
    """One trace of everything that a span may have; what the SDK sends goes to output."""
    resource = Resource.create(
        {"service.name": "shop", "numbers": [1, 2], "ratio": 0.5}, "https://schema/resource"
    )
    limits = SpanLimits(max_span_attributes=24, max_events=3, max_links=2, max_event_attributes=2)
    with provided(resource=resource, span_limits=limits) as (provider, keeper):
        tracer = provider.get_tracer("lib", "1.2", "https://schema/lib", {"scope": True})
        other = provider.get_tracer("other")
        remote = SpanContext(
            int("0af7651916cd43dd8448eb211c80319c", 16),
            int("00f067aa0ba902b7", 16),
            is_remote=True,
            trace_flags=TraceFlags(0),
            trace_state=TraceState([("vendor", "x"), ("ot", "rv:12345678901234")]),
        )
        context = set_span_in_context(NonRecordingSpan(remote))
        attributes: dict[str, Any] = {
            "text": "Grüße\n\0",
            "empty": "",
            "yes": True,
            "no": False,
            "zero": 0,
            "low": -(1 << 63),
            "high": (1 << 63) - 1,
            "float": -1.5,
            "infinite": float("inf"),
            "bytes": b"\xff\x00",
            "texts": ["a", "b"],
            "numbers": [1, 2, 3],
            "floats": [0.5, 1.0],
            "flags": [True, False],
            "none": [],
        }
        links = [
            Link(remote, {"why": "because", "n": 1}),
            Link(SpanContext(1, 2, is_remote=False)),
            Link(SpanContext(3, 4, is_remote=False)),
        ]
        with tracer.start_as_current_span(
            "GET /cart", context, SpanKind.SERVER, attributes, links
        ) as root:
            for number in range(5):
                root.add_event(f"event {number}", {"a": number, "b": 2.5, "c": "cut"}, 10 + number)
            for number in range(20):
                root.set_attribute(f"more {number}", number)
            root.update_name("GET /cart/{id}")
            with other.start_as_current_span(
                "a name of more than thirty-two bytes", kind=SpanKind.CLIENT
            ):
                pass
            try:
                with tracer.start_as_current_span("fails", kind=SpanKind.PRODUCER):
                    raise ValueError("no such item")
            except ValueError:
                pass
            with tracer.start_as_current_span("large", kind=SpanKind.CONSUMER) as large:
                large.set_attribute("query", "x" * 40_000)
            with other.start_as_current_span("fine") as fine:
                fine.set_status(Status(StatusCode.OK))
            for name in ("ä" * 3000, "a\0b", "x" * 1030 + "\0"):
                with other.start_as_current_span(name):
                    pass
        Path(output).write_bytes(received(keeper.spans))
        print(hexadecimal(root))


def misused(tracer: trace.Tracer, context: Context) -> None:
    """All that the SDK takes without a word, and its processors get to see."""

    def start(name: Any, kind: Any = SpanKind.INTERNAL, start_time: Any = None) -> trace.Span:
        return tracer.start_span(name, context, kind, start_time=start_time)

    start("float start", start_time=1.5e18).end()
    start("negative start", start_time=-5).end()
    start("text start", start_time="now").end()
    start("float end").end(1.5e18)  # type: ignore[arg-type]
    start("large end").end(1 << 70)
    for name in (None, 7, b"bytes"):
        start(name).end()
    renamed = start("renamed")
    renamed.update_name(None)  # type: ignore[arg-type]
    renamed.end()
    start("number of a kind", kind=3).end()
    start("no kind", kind="server").end()
    linked = start("linked")
    linked.add_link(SpanContext(1 << 130, 5, is_remote=False), {"why": "broken"})
    linked.add_link(SpanContext(5, 6, is_remote=False))
    linked.end()
    told = start("event")
    told.add_event(None, timestamp=1.5)  # type: ignore[arg-type]
    told.end()


class Beyond(RandomIdGenerator):
    def generate_trace_id(self) -> int:
        return 1 << 130


def shown_spans() -> None:
    """What the thread shows in spans, those of tasks too, and after them."""
    from tests.python_client.shown import shown

    with provided() as (provider, _):
        tracer = provider.get_tracer("lib")
        wrong: list[str] = []

        def look(where: str, span: trace.Span | None) -> None:
            if shown() != ("" if span is None else hexadecimal(span)):
                wrong.append(where)

        with tracer.start_as_current_span("request") as request:
            with tracer.start_as_current_span("inner"):
                look("inner", request)
            look("outer", request)
            with tracer.start_as_current_span("other trace", context=Context()) as other:
                look("other", other)
            look("outer again", request)
        look("after", None)

        worker = ThreadPoolExecutor(1)
        with tracer.start_as_current_span("request") as request:
            here = contextvars.copy_context()

            def work() -> None:
                with tracer.start_as_current_span("in a thread"):
                    look("thread", request)
                look("thread, after", None)

            worker.submit(here.run, work).result()
            # It ends where it did not begin.
            left = tracer.start_span("left", context=Context())
            look("left", left)
            worker.submit(left.end).result()
            look("left elsewhere", None)
        look("after threads", None)

        async def task() -> None:
            # The first one of all is seen from its second step on.
            with tracer.start_as_current_span("request") as request:
                for _ in range(3):
                    await asyncio.sleep(0)
                    look("task", request)
                    with tracer.start_as_current_span("step"):
                        await asyncio.sleep(0)
                        look("step", request)
            await asyncio.sleep(0)
            look("task, after", None)

        async def tasks() -> None:
            await asyncio.gather(task(), task(), task())

        asyncio.run(tasks())
        look("after tasks", None)
    print(json.dumps(wrong))


def unwritable() -> None:
    """What cannot be recorded is left out, told once, and fails no request."""
    told = io.StringIO()
    logging.getLogger("backsight").addHandler(logging.StreamHandler(told))
    with provided() as (provider, _):
        processor = Current.processor
        assert processor is not None
        provider.id_generator = Beyond()
        with provider.get_tracer("ids").start_as_current_span("beyond"):
            pass
        assert processor.failures == 1
        provider.id_generator = RandomIdGenerator()
        with provider.get_tracer("lib").start_as_current_span("root") as root:
            trace_id = root.get_span_context().trace_id
            assert processor.inject(SpanContext(trace_id, 1 << 70, is_remote=False)) == ""
        with provider.get_tracer("lib").start_as_current_span("whose rules fail") as span:
            processor._rules = None  # type: ignore[assignment]
        assert processor.failures == 3
        assert not processor._open
        assert told.getvalue().count("said once") == 1
        print(hexadecimal(span))


class Meeting(dict[bytes, int]):
    """Who asks what is in it, to add to that, is overtaken once by another between the two."""

    def __init__(self, other: Callable[[], None]) -> None:
        super().__init__()
        self._others = [other]

    def _overtaken(self) -> None:
        if self._others:
            self._others.pop()()

    def __len__(self) -> int:
        count = super().__len__()
        self._overtaken()
        return count

    def setdefault(self, key: bytes, default: int = 0, /) -> int:
        self._overtaken()
        return super().setdefault(key, default)


def scopes() -> None:
    """A tracer a request, as frameworks make them, and spans of one trace that end at a time."""
    with provided() as (provider, _):
        processor = Current.processor
        assert processor is not None
        for number in range(1030):
            with provider.get_tracer("lib", attributes={"n": number}).start_as_current_span("s"):
                pass
        assert len(processor._scopes) <= 1024
        with provider.get_tracer("lib").start_as_current_span("root") as root:
            # Equal to each other, and which older SDKs make again and again.
            for _ in range(3):
                processor._scopes.clear()
                with provider.get_tracer("lib").start_as_current_span("again"):
                    pass
            (opened,) = processor._open.values()
            assert len(opened.scopes) == 1
        with provider.get_tracer("lib").start_as_current_span("overtaken") as parent:
            context = set_span_in_context(parent)
            (opened,) = processor._open.values()
            spans = [provider.get_tracer(f"{n}").start_span("s", context) for n in range(2)]
            opened.scopes = Meeting(spans[1].end)
            spans[0].end()
            assert len(set(opened.scopes.values())) == len(opened.scopes) == 2
        print(hexadecimal(root))


def samplers() -> None:
    """What decides what is exported, by how a provider was made."""
    given = {"none": None, "always": ParentBased(ALWAYS_ON), "never": ALWAYS_OFF}
    made = {}
    for what, sampler in given.items():
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        install(provider)
        made[what] = provider.sampler.get_description()
    print(json.dumps(made))


def unusual() -> None:
    """Values that neither side can carry, threads, and a fork: nothing fails."""
    with provided() as (provider, _):
        tracer = provider.get_tracer("lib")
        with tracer.start_as_current_span("root") as root:
            context = set_span_in_context(root)
            root.set_attribute("huge", 1 << 70)
            root.set_attribute("surrogate", "\udc80")
            misused(tracer, context)

            def work() -> None:
                for _ in range(50):
                    with tracer.start_as_current_span("thread", context):
                        pass

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            child = os.fork()
            if child == 0:
                # What the parent has open is the parent's.
                root.end()
                assert backsight.wait_attached(20)
                with tracer.start_as_current_span("child", context):
                    pass
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert Current.processor is not None
        assert Current.processor.failures == 0
        print(hexadecimal(root))


def contexts() -> None:
    """Foreign members of tracestate are kept, and ours comes first."""
    with provided() as (provider, _):
        tracer = provider.get_tracer("lib")
        remote = SpanContext(
            5, 6, is_remote=True, trace_state=TraceState([("vendor", "x"), ("bs", "1-0-0-1")])
        )
        carrier: dict[str, str] = {}
        with tracer.start_as_current_span("root", set_span_in_context(NonRecordingSpan(remote))):
            BacksightPropagator().inject(carrier)
        outside: dict[str, str] = {}
        BacksightPropagator().inject(outside)
        print(json.dumps([carrier, outside]))


def triggers() -> None:
    """Which of a list of spans fire what, told by the node."""
    with provided() as (provider, _):
        tracer = provider.get_tracer("lib")
        fired = {}
        with tracer.start_as_current_span("ok", kind=SpanKind.SERVER) as span:
            fired["ok"] = hexadecimal(span)
        try:
            with tracer.start_as_current_span("fails", kind=SpanKind.SERVER) as span:
                fired["error"] = hexadecimal(span)
                with tracer.start_as_current_span("inner"):
                    raise KeyError("lost")
        except KeyError:
            pass
        with tracer.start_as_current_span("pays", kind=SpanKind.SERVER) as span:
            span.set_attribute("http.response.status_code", 402)
            fired["refused"] = hexadecimal(span)
        from backsight.otel import _hooks

        statuses: dict[str, tuple[str, object]] = {
            "answered 500": ("http.response.status_code", 500),
            "answered 404": ("http.response.status_code", 404),
            "answered 503 of old": ("http.status_code", 503),
            "answered 429 of old": ("http.status_code", 429),
            "answered UNAVAILABLE": ("rpc.grpc.status_code", 14),
            "answered NOT_FOUND": ("rpc.grpc.status_code", 5),
            "answered INTERNAL": ("rpc.response.status_code", "INTERNAL"),
            "answered nothing": ("peer.service", "stock"),
        }
        for what, (key, value) in statuses.items():
            with tracer.start_as_current_span("caller") as span:
                fired[what] = hexadecimal(span)
                with tracer.start_as_current_span("call", kind=SpanKind.CLIENT) as call:
                    _hooks.answered(call, {"backsight-node": "#0000000000000001"})
                    call.set_attribute(key, value)  # type: ignore[arg-type]
                    call.set_status(StatusCode.ERROR)
        # By a call without a span, of a service that the instrumentation leaves out say.
        with tracer.start_as_current_span("serves", kind=SpanKind.SERVER) as span:
            fired["served"] = hexadecimal(span)
            _hooks.answered(span, {"backsight-node": "#0000000000000001"})
            span.set_attribute("http.response.status_code", 500)
            span.set_status(StatusCode.ERROR)
        with tracer.start_as_current_span("sends", kind=SpanKind.SERVER) as span:
            fired["message"] = hexadecimal(span)
            with tracer.start_as_current_span("sends http send") as message:
                message.set_attribute("asgi.event.type", "http.response.start")
                message.set_status(StatusCode.ERROR)
        print(json.dumps(fired))


def unanswered() -> None:
    """Calls that end in errors, with an answer or without."""
    from backsight.otel import _hooks

    called: dict[str, str] = {}
    attributes: dict[str, dict[str, Any]] = {
        "refused": {"server.address": "10.9.9.9"},
        "unavailable": {"net.peer.ip": "10.9.9.9", "rpc.grpc.status_code": 14},
        "answered by a status": {
            "network.peer.address": "10.9.9.9",
            "http.response.status_code": 500,
        },
        "answered by a code": {"server.address": "10.9.9.9", "rpc.grpc.status_code": 5},
        "answered by its node": {"server.address": "10.9.9.9"},
        "refused at last": {"server.address": "10.9.9.9"},
        "refused, says its status": {"server.address": "10.9.9.9"},
        "to a name": {"server.address": "stock.example"},
        "well": {"server.address": "10.9.9.9"},
    }
    with provided() as (provider, _):
        tracer = provider.get_tracer("lib")
        for what, said in attributes.items():
            with tracer.start_as_current_span(
                "call", kind=SpanKind.CLIENT, attributes=said
            ) as call:
                called[what] = hexadecimal(call)
                if what == "answered by its node":
                    _hooks.answered(call, {"backsight-node": "#0000000000000001"})
                if what == "refused at last":
                    call.record_exception(ConnectionResetError("gone"))
                if what in ("refused", "refused at last"):
                    call.record_exception(ConnectionRefusedError("nobody listens"))
                words = "failed"
                if what == "refused, says its status":
                    words = "ConnectionRefusedError: nobody listens"
                if what != "well":
                    call.set_status(StatusCode.ERROR, words)
    print(json.dumps(called))


def limited() -> None:
    """What the error rule says of requests that fail at these times, in s."""
    from backsight.otel import _firing, _rules

    now_s = 0.0
    tracer = TracerProvider().get_tracer("lib")

    def limit() -> _firing.Rules:
        return _firing.Rules(_rules.RuleSet(_rules.Error(per_s=1, burst=2)), lambda: now_s)

    def fail(rules: _firing.Rules, at_s: float, name: str, error: str = "error") -> list[str]:
        nonlocal now_s
        now_s = at_s
        with tracer.start_as_current_span(name, attributes={"error.type": error}) as span:
            span.set_status(StatusCode.ERROR, "no money")
        # As if of two spans of one trace, of which the second has no more to tell.
        ended = [*rules.ended(span, {}, answered=False), *rules.ended(span, {}, answered=False)]  # type: ignore[arg-type]
        return [why for _, why in ended]

    rules = limit()
    told = [
        *(fail(rules, 0, "pays") for _ in range(3)),
        *(fail(rules, 0, "ships"), fail(rules, 0, "pays", "Timeout")),
        *(fail(rules, at_s, "pays") for at_s in (0.5, 1.5, 1.5, 2)),
        *(fail(rules, 2, "ships"), fail(rules, 9, "pays")),
    ]
    _firing._KEYS_MAX = 1  # of all kinds but one nobody remembers which it was
    rules = limit()
    rest = [fail(rules, 9, f"one of {i}") for i in range(4)]
    print(json.dumps([told, rest, fail(rules, 10, "last")]))


class OnlyText(dict[str, str]):
    """As httpx has them: asked for anything but text, they fail."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(str.lower(key), default)


class Broken:
    def get(self, key: str) -> str:
        raise RuntimeError("no header today")


def answers() -> None:
    """Calls that fail, answered with headers of several kinds: which of them are told here."""
    from backsight.otel import _hooks

    node = "#0000000000000001"
    headers: dict[str, Any] = {
        "none": None,
        "empty": {},
        "text": OnlyText(),
        "broken": Broken(),
        "pairs": [(b"date", b"today")],
        "named": OnlyText({"backsight-node": node}),
        "named pairs": [("date", "today"), (b"Backsight-Node", node.encode())],
    }
    with provided() as (provider, _):
        tracer = provider.get_tracer("lib")
        traces = {}
        for what, given in headers.items():
            with tracer.start_as_current_span("call", kind=SpanKind.CLIENT) as call:
                traces[what] = hexadecimal(call)
                _hooks.answered(call, given)
                call.set_attribute("http.response.status_code", 503)
                call.set_status(StatusCode.ERROR)
        print(json.dumps(traces))


class ServerContext:
    """Of a gRPC server, with trailing metadata that was set before."""

    def __init__(self) -> None:
        self.said: Any = [("before", "1")]

    def set_trailing_metadata(self, metadata: Any) -> None:
        self.said = list(metadata)

    def trailing_metadata(self) -> Any:
        return self.said


class Slotted(ServerContext):
    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name != "said":
            raise AttributeError(name)
        super().__setattr__(name, value)


class Unreadable(ServerContext):
    def trailing_metadata(self) -> Any:
        raise NotImplementedError


def contexts_of_servers() -> None:
    """What several classes of them have for the caller before and after a handler set its own."""
    from backsight.otel import _grpc

    told: dict[str, list[Any]] = {}
    with provided() as (provider, _):
        tracer = provider.get_tracer("lib")
        for kind in (ServerContext, Slotted, Unreadable):
            with tracer.start_as_current_span("served", kind=SpanKind.SERVER):
                context = kind()
                _grpc._tell(context)
                before = context.said
                context.set_trailing_metadata((("after", "2"),))
                told[kind.__name__] = [[key for key, _ in said] for said in (before, context.said)]
                _grpc._tell(object())
        untraced = ServerContext()
        _grpc._tell(untraced)
        told["untraced"] = [[key for key, _ in untraced.said]]
    print(json.dumps(told))


def contexts_that_go() -> None:
    """Contexts of gRPC servers are no garbage: each is gone with the last use of it."""
    from backsight.otel import _grpc

    told = {}
    with provided() as (provider, _):
        tracer = provider.get_tracer("lib")
        gc.disable()
        for kind in (ServerContext, Slotted, Unreadable):
            with tracer.start_as_current_span("served", kind=SpanKind.SERVER):
                context: ServerContext | None = kind()
                assert context is not None
                _grpc._tell(context)
                context.set_trailing_metadata((("after", "2"),))
                left = weakref.ref(context)
                context = None
                told[kind.__name__] = left() is None
    print(json.dumps(told))


@contextmanager
def interrupted(after: int, interrupt: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Calls once, after so many calls to and from the package's code: there, a signal handler may run.

    What is given tells whether there were as many.
    """
    package = str(Path(backsight.__file__).parent)
    left = after

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if frame.f_code.co_filename.startswith(package):
            left -= 1
            if left == 0:
                interrupt()

    sys.setprofile(profile)
    try:
        yield lambda: left <= 0
    finally:
        sys.setprofile(None)


class Watched:
    """The library, with an eye on which handles are open."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.open: set[Any] = set()

    def open_trace(self, handle: Any, *pair: int) -> None:
        assert handle not in self.open
        self.open.add(handle)
        self._library.open_trace(handle, *pair)

    def bs_close(self, handle: Any) -> None:
        self.open.remove(handle)
        self._library.bs_close(handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def reentered() -> None:
    """Spans that start and end in the middle of another's start and end, at each place in turn."""
    from backsight.otel import _processor

    # What waits for itself is told where.
    faulthandler.dump_traceback_later(40, exit=True)
    with provided() as (provider, _):
        processor = Current.processor
        assert processor is not None
        module: Any = _processor
        watched = module.lib = Watched(module.lib)
        remote = SpanContext(7, 8, is_remote=True)
        context = set_span_in_context(NonRecordingSpan(remote))
        made: Counter[str] = Counter()

        def start(name: str) -> trace.Span:
            made[name] += 1
            span = provider.get_tracer(name).start_span(
                name, context, SpanKind.SERVER, {"rare": len(made)}
            )
            span.set_status(StatusCode.ERROR)
            return span

        def work(after: int, *, before: bool, leave: bool) -> bool:
            """Whether there was a place of that number to interrupt."""
            processor._scopes.clear()
            processor._resources.clear()
            spans = [start("before")] if before else []

            def interrupt() -> None:
                if before:
                    spans.pop().end()
                start("in between").end()
                if leave:
                    spans.append(start("left"))

            with interrupted(after, interrupt) as was_interrupted:
                start("interrupted").end()
            for span in spans:
                span.end()
            assert not processor._open, after
            assert not watched.open, after
            return was_interrupted()

        for before, leave in itertools.product((False, True), repeat=2):
            after = 1
            while work(after, before=before, leave=leave):
                after += 1
            assert after > 20
        assert processor.failures == 0
        print(json.dumps([format(7, "032x"), made]))


def rules(directory: str) -> None:
    """Of each file of rules: what is complained of, and which rules hold."""
    from backsight.otel._rules import from_environment

    told = {}
    for path in Path(directory).iterdir():
        complaints: list[str] = []
        found = from_environment({"BACKSIGHT_TRIGGERS_FILE": str(path)}, complaints.append)
        holds = [
            *(name for name in ("error", "latency", "dry_run") if getattr(found, name)),
            *(f"rare {rule.attribute}" for rule in found.rare),
            *(f"when {rule.name}" for rule in found.when),
        ]
        told[path.name] = [complaints, holds]
    print(json.dumps(told))


if __name__ == "__main__":
    PROGRAMS = (
        *(samplers, fidelity, unusual, unwritable, scopes, contexts, contexts_of_servers),
        *(triggers, unanswered, limited, answers, rules, contexts_that_go, reentered, shown_spans),
    )
    {f.__name__: f for f in PROGRAMS}[sys.argv[1]](*sys.argv[2:])
