# SPDX-License-Identifier: Apache-2.0
"""Applications that know nothing of Backsight, run by ``opentelemetry-instrument``."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctl.trace import TraceView
from tests.otel.conftest import Instrumented


def spans(view: TraceView) -> Counter[str]:
    return Counter(placed.span.name for placed in view.spans)


def services(view: TraceView) -> set[object]:
    return {
        placed.span.resource.attributes["service.name"]
        for placed in view.spans
        if placed.span.resource is not None
    }


@contextlib.contextmanager
def served(instrumented: Instrumented, application: str, **environment: str) -> Iterator[str]:
    """An application of web.py under gunicorn, loaded before its worker forks; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.set_inheritable(True)
        with instrumented.popen(
            "gunicorn", "--preload", "--workers", 1, "--bind", f"fd://{listener.fileno()}",
            "--log-level", "warning", "--no-control-socket", f"web:{application}",
            service=application, pipes=False, pass_fds=(listener.fileno(),), more=environment,
        ) as process:  # fmt: skip
            try:
                # A worker attaches while it serves already.
                while not get(address, "/", secrets.token_hex(16))[2]:
                    pass
                yield address
            finally:
                process.terminate()


def get(address: str, path: str, trace: str) -> tuple[int, str, str]:
    """Status, text, and which node answered."""
    request = urllib.request.Request(
        f"http://{address}{path}", headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-00"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), answer.headers.get("backsight-node", "")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", error.headers.get("backsight-node", "")


def test_a_failure_behind_a_fall_back_is_caught_where_it_is(instrumented: Instrumented) -> None:
    with (
        served(instrumented, "back") as back,
        served(instrumented, "front", BACK=back) as front,
    ):
        good, bad = secrets.token_hex(16), secrets.token_hex(16)
        assert get(front, "/cart/fine", good)[:2] == (200, "2 apples")
        status, text, node = get(front, "/cart/broken", bad)
    assert (status, text) == (200, "empty")
    assert node.startswith("#")
    assert instrumented.node.control.status()["triggers"]["error"]["fired"] == 1
    for trace, trigger in ((good, ""), (bad, "error")):
        view = instrumented.peek(trace)
        assert services(view) == {"front", "back"}
        assert spans(view) == {"GET /cart/<kind>": 1, "GET": 1, "GET /items/<kind>": 1}
        (part,) = view.slices
        assert part.complete
        # The answer said where the back end runs, and its context where the front end does.
        assert len(part.content.hops_out) == len(part.content.hops_in) == 1
        assert part.trigger == trigger
    (failed,) = [
        placed.span
        for placed in instrumented.peek(bad).spans
        if placed.span.name == "GET /items/<kind>"
    ]
    (exception,) = failed.events
    assert exception.attributes["exception.type"] == "LookupError"
    assert "raise LookupError" in str(exception.attributes["exception.stacktrace"])


def test_aiohttp_learns_who_answered(instrumented: Instrumented) -> None:
    with served(instrumented, "back") as back:
        output = instrumented.run("python", "fetch.py", f"http://{back}/items/fine")
    (part,) = instrumented.peek(output).slices
    assert len(part.content.hops_out) == len(part.content.hops_in) == 1
    assert len([crumb for crumb in part.content.breadcrumbs if not crumb.name]) == 1


OTHERWISE = {
    # Which tries again by itself, also what was sent.
    ("urllib3", "refused"): False,
    ("urllib3", "connect times out"): False,
    # In the words of a timeout while it sends.
    ("urllib", "connect times out"): False,
    # Which sends nothing before the server has said its settings.
    ("grpc", "reset"): True,
    # By a server, which got the call.
    ("grpc", "passed on"): False,
}
"""What the error tells of whether nothing was sent, where that is not what happened, or not as by others."""


def test_who_can_have_got_a_call_that_nobody_answered_is_known_by_the_error(
    instrumented: Instrumented,
) -> None:
    output = instrumented.run(
        "python", "unheard.py", OTEL_SEMCONV_STABILITY_OPT_IN="http", BACKSIGHT_TRIGGERS="none"
    )
    called = json.loads(output)
    unsent = {"refused": True, "connect times out": True, "times out": False, "reset": False}
    libraries = {"requests", "requests, again", "httpx", "httpx of asyncio", "aiohttp"}
    assert {(each["library"], each["how"]) for each in called} >= {
        (library, how) for library in libraries for how in unsent
    }
    for each in called:
        said = [
            (body.address, body.unsent)
            for part in instrumented.peek(each["trace"]).slices
            for body in part.content.unanswered
        ]
        if each["library"] in libraries:
            assert said == [("127.0.0.1", unsent[each["how"]])], each
        else:
            # Their instrumentations tell of no address, so there is no such record.
            assert said == []
        known = OTHERWISE.get((each["library"], each["how"]), unsent.get(each["how"]))
        assert each["unsent"] == known, each


@contextlib.contextmanager
def calls(instrumented: Instrumented, serve: str) -> Iterator[str]:
    """A server of calls.py, and its port."""
    with instrumented.popen("python", "calls.py", serve, service="stock") as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()


@pytest.mark.parametrize(
    ("serve", "call", "unary"), [("serve", "call", 2), ("serve_aio", "call_aio", 1)]
)
def test_grpc_servers_say_where_they_run_in_all_kinds_of_calls(
    instrumented: Instrumented, serve: str, call: str, unary: int
) -> None:
    with calls(instrumented, serve) as port:
        output = instrumented.run("python", "calls.py", call, port)
    view = instrumented.peek(output)
    assert services(view) == {"shop", "stock"}
    assert spans(view) == {
        "calls": 1,
        **{f"/shop.Stock/{name}": 2 for name in ("StreamOut", "StreamIn", "StreamBoth", "Broken")},
        "/shop.Stock/Unary": 2 * unary,
    }
    (part,) = view.slices
    # From the server's trailing metadata, one a call.
    answers = [crumb for crumb in part.content.breadcrumbs if not crumb.name]
    assert len(answers) == 4 + unary
    assert instrumented.node.control.status()["triggers"]["error"]["fired"] == 1
    assert part.trigger == "error"


def test_no_grpc_call_waits_for_another(instrumented: Instrumented) -> None:
    with calls(instrumented, "serve") as port:
        instrumented.run("python", "calls.py", "meet_all", port)


def test_a_stream_that_the_application_drops_is_cancelled(instrumented: Instrumented) -> None:
    with calls(instrumented, "serve") as port:
        instrumented.run("python", "calls.py", "drop", port)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            "coroutines",
            {"root": 1}
            | {f"task {number}": 1 for number in range(20)}
            | {f"step {number}.{step}": 1 for number in range(20) for step in range(3)},
        ),
        ("pool", {"root": 1, "job": 30}),
        ("daemon", {"before": 1, "after": 1}),
        ("closed", {"root": 1, "after": 1}),
        ("ending", {"root": 1, "never ends": 1, "in a thread": 1, "in atexit": 1}),
    ],
)
def test_whatever_processes_do(
    instrumented: Instrumented, program: str, expected: dict[str, int]
) -> None:
    view = instrumented.peek(instrumented.run("python", "processes.py", program))
    found = spans(view)
    # A span that begins while a process attaches may find no pool yet.
    del found["first"]
    assert found == expected
    unfinished = {placed.span.name for placed in view.spans if placed.span.unfinished}
    assert unfinished == ({"never ends"} if program == "ending" else set())
    parents = {placed.span.span_id: placed.span.name for placed in view.spans}
    if program == "coroutines":
        for placed in view.spans:
            kind, _, number = placed.span.name.partition(" ")
            wanted = {"root": None, "task": "root", "step": f"task {number.partition('.')[0]}"}[
                kind
            ]
            assert parents.get(placed.span.parent_id) == wanted


@pytest.mark.parametrize("propagators", ["tracecontext", "tracecontext,backsight"])
def test_breadcrumbs_go_out_once(instrumented: Instrumented, propagators: str) -> None:
    said = instrumented.run(
        "python", "-c",
        "import backsight, json; assert backsight.wait_attached(20);"
        "from opentelemetry import propagate, trace; carrier = {};\n"
        "with trace.get_tracer('t').start_as_current_span('s'):\n"
        "    propagate.inject(carrier)\n"
        "print(json.dumps(carrier))",
        OTEL_PROPAGATORS=propagators,
    )  # fmt: skip
    assert json.loads(said)["tracestate"].count("bs=1-") == 1


def test_the_environment_has_the_last_word(instrumented: Instrumented) -> None:
    said = instrumented.run(
        "python", "-c",
        "import json, os; from opentelemetry.trace import get_tracer_provider as p;"
        "from opentelemetry.propagate import get_global_textmap as g;"
        "print(json.dumps([p().sampler.get_description(), sorted(g().fields),"
        "os.environ['OTEL_TRACES_EXPORTER']]))",
        OTEL_TRACES_SAMPLER="always_on",
        OTEL_PROPAGATORS="b3",
        OTEL_TRACES_EXPORTER="console",
    )  # fmt: skip
    sampler, fields, exporter = json.loads(said.splitlines()[0])
    assert sampler == "BacksightAlwaysRecord{AlwaysOnSampler}"
    assert fields == ["b3", "tracestate"]
    assert exporter == "console"


@pytest.mark.parametrize(
    ("sampler", "root"),
    [("", "Off"), ("sampler: {parent_based: {root: {always_on: {}}}}", "On")],
)
def test_a_declared_provider_exports_what_it_was_told_to(
    instrumented: Instrumented, tmp_path: Path, sampler: str, root: str
) -> None:
    file = tmp_path / "otel.yaml"
    file.write_text(
        "file_format: '1.0'\n"
        "tracer_provider:\n"
        "  processors: [{simple: {exporter: {console: {}}}}]\n"
        f"  {sampler}\n"
    )
    said = instrumented.run(
        "python", "-c",
        "from opentelemetry.trace import get_tracer_provider as p;"
        "print(p().sampler.get_description())",
        OTEL_CONFIG_FILE=str(file),
    )  # fmt: skip
    assert f"BacksightAlwaysRecord{{ParentBased{{root:Always{root}Sampler" in said
