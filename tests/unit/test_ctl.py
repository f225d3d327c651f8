# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import errno
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import backsight_pb2 as pb
import pytest

from appliance import control
from appliance.control import ControlServer, Peek
from ctl import __main__ as ctl
from ctl.__main__ import main
from ctl.coordinator import AskError, NotFound
from ctl.node import NodeClient
from ctl.trace import in_tree_order, trace_view
from ctl.waterfall import ago, milliseconds, waterfall
from formats.records import SpanEnd, SpanStart
from formats.slices import PieceKind, Process, RunFlags
from formats.spans import Event
from protocol.control import control_path
from protocol.messages import SliceFlags, TraceId
from runtime.log import Log
from testbed.encoding import encode_attributes, encode_piece, encode_process, encode_record
from tests.unit.attach_harness import NOBODY, open_directory

TRACE = TraceId(bytes.fromhex("0af7651916cd43dd8448eb211c80319c"))
UNREADABLE = TraceId(b"unreadable trace")
MS = 1_000_000


def _slice(*spans: tuple[int, int, str, int, int | None]) -> bytes:
    """Spans (id, parent, name, start_ms, end_ms) as a process would write them."""
    records = b""
    for span_id, parent_id, name, start_ms, _ in spans:
        records += encode_record(SpanStart(span_id, parent_id, start_ms * MS, 1, name), 0)
    for span_id, _, _, _, end_ms in spans:
        if end_ms is not None:
            attributes = encode_attributes({"pod": "p"})
            records += encode_record(SpanEnd(span_id, end_ms * MS, 0, "", attributes), 0)
    return encode_process(1, Process(42, "shop")) + encode_piece(
        PieceKind.RUN, records, flags=RunFlags.FIRST | RunFlags.LAST, client=1, handle=7
    )


def _told(trigger: pb.Trigger) -> list[str]:
    """What ``backsightctl show`` says of a trigger of TRACE."""
    detail = pb.TraceDetail(summary=pb.TraceSummary(trace=TRACE, triggers=[trigger]))
    return [line.replace(TRACE.hex(), "TRACE") for line in waterfall(trace_view(detail), 120)][1:-1]


def _detail(**slices: bytes) -> pb.TraceDetail:
    return pb.TraceDetail(
        summary=pb.TraceSummary(
            trace=TRACE,
            verdict=pb.Verdict(
                kind="partial",
                version=3,
                reasons=[pb.VerdictReason(kind="missing", node="gone", detail="did not answer")],
            ),
            triggers=[
                pb.Trigger(name="latency", why="99 ms", node="front", source=pb.SOURCE_APPLICATION)
            ],
            nodes=list(slices),
        ),
        slices=[
            pb.NodeSlice(node=node, bytes=len(data), flags=int(SliceFlags.HELD), data=data)
            for node, data in slices.items()
        ],
    )


def test_a_trace_becomes_one_tree_over_its_nodes() -> None:
    view = trace_view(
        _detail(
            back=_slice((2, 1, "query", 20, 60)),
            front=_slice((1, 0, "GET /", 0, 100), (3, 1, "render", 70, 90)),
        )
    )
    assert [(depth, placed.span.name) for depth, placed in in_tree_order(view.spans)] == [
        (0, "GET /"),
        (1, "query"),
        (1, "render"),
    ]
    spans = view.to_json()["spans"]
    assert [(s["span_id"], s["parent_id"], s["node"], s["service"]) for s in spans] == [
        ("0" * 15 + "1", "", "front", "shop"),
        ("0" * 15 + "2", "0" * 15 + "1", "back", "shop"),
        ("0" * 15 + "3", "0" * 15 + "1", "front", "shop"),
    ]
    assert spans[0]["attributes"] == {"pod": "p"}
    json.dumps(view.to_json())


def test_an_exception_is_shown_once_with_its_stack_where_it_was_thrown() -> None:
    view = trace_view(
        _detail(front=_slice((1, 0, "GET /", 0, 100)), back=_slice((2, 1, "query", 20, 60)))
    )
    for placed in view.spans:
        placed.span.events = (
            Event("retry", 30),
            Event(
                "exception",
                50,
                {
                    "exception.type": "KeyError",
                    "exception.message": "'milk\x1b'",
                    "exception.stacktrace": "Traceback:\n  in shelf()",
                },
            ),
        )
    lines = list(waterfall(view, width=120))
    assert lines[-3:] == [
        "  KeyError on back, in query: 'milk?'",
        "    Traceback:",
        "      in shelf()",
    ]
    assert sum("KeyError" in line for line in lines) == 1
    assert [event["name"] for event in view.to_json()["spans"][0]["events"]] == [
        "retry",
        "exception",
    ]


def test_what_the_kernel_says_of_the_longest_waits_is_shown_as_they_began() -> None:
    waits = [(10 + n, 1, "waited", 2 * n, 2 * n + (2 if n % 5 else 1)) for n in range(25)]
    view = trace_view(_detail(front=_slice((1, 0, "GET /", 0, 100), *waits)))
    assert not any("kernel" in line for line in waterfall(view, width=120))
    for placed in view.spans[1:]:
        place = placed.span.span_id - 10
        placed.span.attributes = {"kernel.what": f"waited, {place}\x1b"}
    lines = list(waterfall(view, width=120))
    assert lines[-22] == "  seen by the kernel"
    assert lines[-21:-1] == [
        f"    {'+' + milliseconds(2 * n * MS):>10}  front: waited, {n}?" for n in range(25) if n % 5
    ]
    assert lines[-1] == "    and 5 shorter ones; see --json"


def test_the_waterfall_says_why_and_what_is_missing() -> None:
    view = trace_view(
        _detail(
            front=_slice((1, 0, "GET /", 0, 100), (4, 1, "still running", 50, None)),
            back=_slice((2, 99, "orphan", 20, 60)),
        )
    )
    lines = list(waterfall(view, width=120))
    text = "\n".join(lines)
    assert "partial (version 3)" in lines[0]
    assert "trigger latency on front: 99 ms" in text
    assert "missing on gone: did not answer" in text
    (running,) = [line for line in lines if "still running" in line]
    assert running.endswith("unfinished") and "?" in running
    (orphan,) = [line for line in lines if "orphan" in line]
    assert "parent 0000000000000063 missing" in orphan


def test_bars_stand_in_the_order_and_length_of_time() -> None:
    view = trace_view(_detail(front=_slice((1, 0, "all", 0, 100), (2, 1, "half", 50, 100))))
    bars = [line.split("|")[1] for line in waterfall(view, width=100) if "|" in line]
    assert bars[0].strip(" ") == bars[0]
    assert abs(bars[1].count("=") * 2 - len(bars[1])) <= 2
    assert bars[1].endswith("=") and bars[1].startswith(" ")


def test_an_impossible_hop_is_flagged_unless_the_clocks_explain_it() -> None:
    detail = _detail(front=_slice((1, 0, "call", 100, 200)), back=_slice((2, 1, "serve", 90, 150)))
    assert any("10.0 ms before its caller" in line for line in waterfall(trace_view(detail), 120))
    detail.slices[1].clock_offset_ns = -15 * MS
    assert not any("before its caller" in line for line in waterfall(trace_view(detail), 120))


def test_spans_in_a_circle_are_each_shown_once() -> None:
    view = trace_view(
        _detail(front=_slice((1, 2, "a", 0, 1), (2, 1, "b", 0, 1), (3, 3, "c", 0, 1)))
    )
    assert sorted(placed.span.span_id for _, placed in in_tree_order(view.spans)) == [1, 2, 3]


def test_that_there_are_no_spans_is_explained_once() -> None:
    detail = _detail(front=b"")
    assert list(waterfall(trace_view(detail)))[-2:] == [
        "  missing on gone: did not answer",
        "  no spans",
    ]
    del detail.summary.verdict.reasons[:]
    assert list(waterfall(trace_view(detail)))[-1].startswith("  nothing: reported before")


def test_a_name_cannot_drive_the_terminal() -> None:
    view = trace_view(_detail(front=_slice((1, 0, "\x1b[2J\nevil", 0, 1))))
    text = "".join(waterfall(view, width=100))
    assert "\x1b" not in text and "?[2J evil" in text


def test_no_text_from_elsewhere_drives_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refused(_Host):
        def status(self) -> dict[str, Any]:
            return {"refused": "no\x9b2J\nconnected True"}

    for more in ([], ["--json"]):
        command = ["status", *more]
        _ask_server(tmp_path, Refused(), ask=lambda path, c=command: main(["--node", path, *c]))
        assert "\x9b" not in capsys.readouterr().out
    Log.of("backsight-node").info("refused: no\x1b[2J\nbacksight-node: connected")
    assert capsys.readouterr().err == "backsight-node: refused: no?[2J?backsight-node: connected\n"


class _Host:
    def __init__(self) -> None:
        self.fired: list[tuple[str, bytes, str]] = []

    def status(self) -> dict[str, Any]:
        return {
            "node": "alpha",
            "dataplane": {"pool_bytes": 4 << 20, "horizon_ns": 1_500_000},
            "connected": False,
            "refused": "",
            "clients_in_pool": 3,
            "pick_up": {"bounds": [0.1, 0.5], "counts": [0, 3, 1], "sum": 2.5},
            "lossy": [{"pid": 7, "service": "shop"}, {"pid": 8, "service": "\x1b[0m"}],
        }

    def peek(self, trace: TraceId) -> Peek:
        if trace == UNREADABLE:
            raise OSError(errno.ENXIO, "no such device")
        assert threading.current_thread() is not threading.main_thread()
        if trace != TRACE:
            return Peek(SliceFlags.NONE, 0, b"")
        return Peek(SliceFlags.HELD, 1, _slice((1, 0, "GET /", 0, None)), "latency")

    async def known(self, trace: TraceId) -> None:
        pass

    def trigger(self, name: str, trace: TraceId, why: str) -> None:
        self.fired.append((name, trace, why))


def _ask_server(directory: Path, host: _Host, *, ask: Any) -> Any:
    socket_path = directory / "node.sock"

    async def serve() -> Any:
        async with ControlServer(control_path(socket_path), "alpha", host):
            return await asyncio.to_thread(ask, str(socket_path))

    return asyncio.run(serve())


def test_the_node_tells_its_status_and_what_it_holds(tmp_path: Path) -> None:
    host = _Host()
    status, view = _ask_server(
        tmp_path, host, ask=lambda path: (NodeClient(path).status(), NodeClient(path).peek(TRACE))
    )
    assert status == host.status()
    (span,) = view.to_json()["spans"]
    assert span["name"] == "GET /" and span["unfinished"] and span["node"] == "alpha"
    assert view.to_json()["slices"][0]["open"] == 1
    assert view.slices[0].trigger == "latency"


STRANGER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect(sys.argv[1])
    asking.sendall(b'{"command": "status"}\\n')
    print(asking.makefile().readline(), end="")
"""


@pytest.mark.root
def test_only_who_runs_the_node_may_ask_it() -> None:
    """By the mode of the socket; and by credentials, since it is bound before it has that mode."""

    def ask(path: str) -> list[str]:
        control = control_path(Path(path))
        command = [sys.executable, "-c", STRANGER, str(control)]
        answers = []
        for mode in (None, 0o666):
            if mode is not None:
                control.chmod(mode)
            done = subprocess.run(command, user=NOBODY, capture_output=True, text=True, check=False)
            answers.append(done.stdout or done.stderr.splitlines()[-1])
        return answers

    with open_directory() as directory:
        refused, answered = _ask_server(directory, _Host(), ask=ask)
    assert "PermissionError" in refused
    assert json.loads(answered) == {"error": "not allowed"}


def test_the_status_is_a_figure_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _ask_server(tmp_path, _Host(), ask=lambda path: main(["--node", path, "status"]))
    assert capsys.readouterr().out.splitlines() == [
        "node                  alpha",
        "connected             no",
        "refused               -",
        "clients_in_pool       3",
        "pick_up               3 up to 0.5; 1 more",
        "lossy                 pid=7 service=shop; pid=8 service=?[0m",
        "dataplane.pool_bytes  4194304  (4.0 MiB)",
        "dataplane.horizon_ns  1500000  (1.5 ms)",
    ]


@pytest.mark.parametrize(
    ("at_s", "said"),
    [
        (0.0, "-"),
        (86400.0, "1970-01-02 00:00:00 UTC  (over)"),
        (32503680000.0, "3000-01-01 00:00:00 UTC"),
    ],
)
def test_the_end_of_a_certificate_is_a_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at_s: float, said: str
) -> None:
    class Secured(_Host):
        def status(self) -> dict[str, Any]:
            # As a node has it, and as a coordinator has.
            return {
                "certificate_expires_s": at_s,
                "of": {"certificate_expires_s": {"listen": at_s}},
            }

    _ask_server(tmp_path, Secured(), ask=lambda path: main(["--node", path, "status"]))
    assert capsys.readouterr().out.splitlines() == [
        f"certificate_expires_s            {said}",
        f"of.certificate_expires_s.listen  {said}",
    ]


def test_a_node_answers_while_it_looks_for_what_somebody_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_KNOWN_TIMEOUT_S", 0.01)
    looking, answered = threading.Event(), threading.Event()
    data = _slice((1, 0, "GET /", 0, 1)) + encode_piece(PieceKind.EXIT, client=1) * (1 << 20)

    class Busy(_Host):
        def peek(self, trace: TraceId) -> Peek:
            looking.set()
            assert answered.wait(60)
            return Peek(SliceFlags.HELD, 0, data)

    def ask(path: str) -> Any:
        views: list[Any] = []
        asking = threading.Thread(target=lambda: views.append(NodeClient(path).peek(TRACE)))
        asking.start()
        looking.wait()
        try:
            assert NodeClient(path).status()["node"] == "alpha"
            assert NodeClient(path).trigger("t", TRACE, "now") is None
        finally:
            answered.set()
            asking.join()
        return views[0]

    view = _ask_server(tmp_path, Busy(), ask=ask)
    assert view.slices[0].bytes == len(data) > 20_000_000
    assert [placed.span.name for placed in view.spans] == ["GET /"]


def test_a_trace_that_the_node_never_saw_is_not_found(tmp_path: Path) -> None:
    other = TraceId(bytes(15) + b"\1")
    with pytest.raises(NotFound, match="holds nothing"):
        _ask_server(tmp_path, _Host(), ask=lambda path: NodeClient(path).peek(other))


def test_the_operator_fires_a_trigger(tmp_path: Path) -> None:
    host = _Host()
    status = _ask_server(
        tmp_path,
        host,
        ask=lambda path: (
            main(["--node", path, "trigger", TRACE.hex()])
            or main(["--node", path, "trigger", TRACE.hex(), "--name", "by-hand", "--why", "odd"])
        ),
    )
    assert status == 0
    assert host.fired == [("operator", TRACE, "fired by hand"), ("by-hand", TRACE, "odd")]


REPORTED = TraceId(bytes(15) + b"\3")


class _Rest(_Host):
    def peek(self, trace: TraceId) -> Peek:
        assert self.fired, "what it looks at may be much: a trigger does not wait for that"
        if trace == REPORTED:
            return Peek(SliceFlags.HELD, 0, b"", "latency", 678)
        if trace != TRACE:
            return super().peek(trace)
        return Peek(SliceFlags.HELD | SliceFlags.EVICTED, 0, b"12345")


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (TRACE.hex(), "triggered; node alpha holds 5 bytes of it (evicted)\n"),
        ("00" * 15 + "01", "triggered; node alpha holds nothing of it\n"),
        (
            REPORTED.hex(),
            "triggered; node alpha holds nothing of it, and has reported 678 bytes\n",
        ),
        # It is fired all the same.
        (UNREADABLE.hex(), "triggered; what the node holds of it cannot be told now\n"),
    ],
)
def test_who_fires_a_trigger_hears_what_the_node_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: str, said: str
) -> None:
    assert _ask_server(tmp_path, _Rest(), ask=lambda p: main(["--node", p, "trigger", trace])) == 0
    assert capsys.readouterr().out == said


class _Searching(_Host):
    """It looks for what was triggered, and is done with that when ``is_found`` is set."""

    def __init__(self, is_found: asyncio.Event) -> None:
        super().__init__()
        self._is_found = is_found
        self.waiting = asyncio.Semaphore(0)

    async def known(self, trace: TraceId) -> None:
        self.waiting.release()
        await self._is_found.wait()

    def peek(self, trace: TraceId) -> Peek:
        return super().peek(trace) if self._is_found.is_set() else Peek(SliceFlags.HELD, 0, b"")


def test_nothing_is_said_of_what_is_still_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "_KNOWN_TIMEOUT_S", 0.01)

    def ask(path: str) -> None:
        assert main(["--node", path, "trigger", TRACE.hex()]) == 0
        assert main(["--node", path, "trigger", TRACE.hex(), "--json"]) == 0
        assert main(["--node", path, "show", TRACE.hex()]) == 1

    host = _Searching(asyncio.Event())
    _ask_server(tmp_path, host, ask=ask)
    assert len(host.fired) == 2
    out, err = capsys.readouterr()
    words, told = out.splitlines()
    assert words == "triggered; what the node holds of it cannot be told now"
    assert (json.loads(told)["bytes_held"], json.loads(told)["bytes_reported"]) == (None, None)
    assert f"trace {TRACE.hex()} is still looked for; ask again" in err


def test_all_who_wait_for_a_search_hear_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_KNOWN_TIMEOUT_S", 600.0)

    async def run() -> list[int]:
        is_found = asyncio.Event()
        host = _Searching(is_found)
        node = NodeClient(str(tmp_path / "node.sock"))
        async with ControlServer(control_path(Path(node.socket_path)), "alpha", host):
            asking = [asyncio.to_thread(node.trigger, "t", TRACE, "") for _ in range(2)]
            showing = asyncio.ensure_future(asyncio.to_thread(node.peek, TRACE))
            fired = asyncio.gather(*asking)
            for _ in range(3):
                await host.waiting.acquire()
            is_found.set()
            found = [held.bytes for held in await fired if held is not None]
            return [*found, (await showing).slices[0].bytes]

    assert asyncio.run(run()) == [len(_slice((1, 0, "GET /", 0, None)))] * 3


def test_nobody_looks_at_a_node_that_is_gone(tmp_path: Path) -> None:
    """Who waits for a search until its end."""

    class Gone(_Searching):
        looked = False

        def peek(self, trace: TraceId) -> Peek:
            self.looked = True
            return super().peek(trace)

    async def run() -> bool:
        is_found = asyncio.Event()
        host, path = Gone(is_found), control_path(tmp_path / "node.sock")
        request = json.dumps({"command": "peek", "trace": TRACE.hex()}).encode() + b"\n"
        async with ControlServer(path, "alpha", host):
            _, writer = await asyncio.open_unix_connection(str(path))
            writer.write(request)
            await host.waiting.acquire()
        is_found.set()
        # In these it would look, and answer.
        for _ in range(10):
            await asyncio.sleep(0)
        await asyncio.get_running_loop().shutdown_default_executor()
        writer.close()
        return host.looked

    assert not asyncio.run(run())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"[]\n", "JSON object"),
        (b"garbage\n", "Expecting value"),
        (b"\xff\xfe\n", ""),
        (b'{"command": "reboot"}\n', "no command 'reboot'"),
        (b'{"command": "peek", "trace": "xyz"}\n', "32 hex digits"),
        (b'{"command": "trigger", "name": "A B", "trace": ""}\n', "[a-z0-9_.-]"),
        (b"x" * 10000 + b"\n", "at most 4096 bytes"),
        (b"[" * 4000 + b"\n", "flat JSON object"),
        (b'{"command": "peek", "trace": "%s"}\n' % UNREADABLE.hex().encode(), "no such device"),
    ],
)
def test_bad_requests_get_an_answer(tmp_path: Path, line: bytes, expected: str) -> None:
    def ask(path: str) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(control_path(Path(path))))
            connection.sendall(line)
            return json.loads(connection.makefile("rb").readline())

    reply = _ask_server(tmp_path, _Host(), ask=ask)
    assert expected in reply["error"]


def test_nobody_there_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AskError, match="no node answers"):
        NodeClient(str(tmp_path / "none")).status()
    assert main(["--node", str(tmp_path / "none"), "status"]) == 1
    assert "give --node SOCKET" in capsys.readouterr().err
    assert main(["--coordinator", "127.0.0.1:9", "traces"]) == 1
    assert "no coordinator answers at 127.0.0.1:9" in capsys.readouterr().err
    assert main(["--coordinator", f"unix:{tmp_path}/none", "traces"]) == 1
    said = capsys.readouterr().err
    assert f"no coordinator answers at unix:{tmp_path}/none" in said
    assert "is a coordinator running on this machine? Its log says why it has no `acc" in said


NODE = pb.NodeStatus(
    protocol=4,
    node="alpha",
    node_id=7,
    connected=True,
    software="0.1.0",
    identity="node alpha (spiffe://d/node/alpha)",
    addresses=["10.0.0.1", "10.0.0.2"],
    clock_offset_ns=1_234_567,
    clock_error_ns=20_000,
)


class _Coordinator:
    """Has one trace and two nodes, and says yes to everything."""

    forgotten: ClassVar[list[str]] = []

    def __init__(self, endpoint: str, tls: Path | None) -> None:
        self.endpoint = endpoint

    def __enter__(self) -> _Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def traces(self, _: pb.ListTracesRequest) -> Iterator[pb.TraceSummary]:
        yield _detail(front=b"").summary

    tail = traces

    def snapshot(self, _: pb.SnapshotRequest) -> Iterator[pb.SnapshotProgress]:
        yield pb.SnapshotProgress(trigger="snapshot.1", nodes=1, nodes_done=1)

    def trace(self, _: bytes) -> pb.TraceDetail:
        return _detail(front=_slice((1, 0, "GET /", 0, 100)))

    def nodes(self) -> list[pb.NodeStatus]:
        seen_ns = time.time_ns() - 3 * 3600 * 10**9
        return [NODE, pb.NodeStatus(node="beta", seen_ns=seen_ns, peer="ipv4:10.0.0.3:7")]

    def pin(self, _: bytes, *, unpin: bool = False) -> None:
        pass

    def delete(self, _: bytes) -> None:
        pass

    def forget_node(self, name: str) -> None:
        self.forgotten.append(name)

    def status(self, node: str = "") -> dict[str, Any]:
        if node:
            return {"node": node}
        return {"version": "0.1.0", "ready": True, "now": {"groups": 3}}

    def counters(self) -> dict[str, int]:
        return {"core.triggers": 3}


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctl, "CoordinatorClient", _Coordinator)


ASK_COORDINATOR = {
    "traces": [],
    "tail": ["--limit", "1"],
    "show": [TRACE.hex()],
    "snapshot": [],
    "counters": [],
    "nodes": [],
    "pin": [TRACE.hex()],
    "unpin": [TRACE.hex()],
    "delete": [TRACE.hex(), "--yes"],
    "export": [TRACE.hex(), "--output", "out"],
}
ASK_NODE = {"status": [], "show": [TRACE.hex()], "trigger": [TRACE.hex()]}


CHECK = {
    "id": "btf",
    "ok": True,
    "found": "it is there",
    "costs": "all probes",
    "remedy": "none",
    "is_needed": True,
}


def test_every_command_is_for_programs_too(
    coordinator: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node.yaml").write_text("pool_bytes: 4MiB\n")
    told: dict[str, list[dict[str, Any]]] = {}

    def run(label: str, *command: str) -> None:
        assert main([*command, "--json"]) == 0
        told[label] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    for name, more in ASK_COORDINATOR.items():
        run(name, name, *more)
    run("config check", "config", "check", "node.yaml")
    # What works depends on who asks, and where.
    monkeypatch.setattr(ctl, "examine", lambda config: iter([CHECK]))
    run("doctor", "doctor")
    run("pki init", "pki", "init", "--domain", "d")
    run("token", "token", "grafana")
    for name, more in ASK_NODE.items():
        _ask_server(
            tmp_path,
            _Host(),
            ask=lambda path, c=(name, *more): run(f"node: {c[0]}", "--node", path, *c),
        )
    with pytest.raises(SystemExit):
        main(["--help"])
    offered = re.findall("^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    assert {label.removeprefix("node: ").partition(" ")[0] for label in told} == set(offered)
    assert {label: set(lines[0]) for label, lines in told.items() if label != "node: status"} == {
        "doctor": set(CHECK),
        "pki init": {"directory", "identity", "expires"},
        "token": {"token", "line"},
        "traces": set(told["traces"][0]),
        "tail": set(told["traces"][0]),
        "show": set(told["show"][0]),
        # When it began and ended, it takes all nodes to tell.
        "node: show": set(told["show"][0]) - {"start_ns", "end_ns"},
        "snapshot": {
            *("trigger", "nodes", "nodes_done", "nodes_lost"),
            *("found", "fired", "bytes", "traces", "judged"),
        },
        "counters": {"core.triggers"},
        "pin": {"trace_id", "pinned"},
        "unpin": {"trace_id", "pinned"},
        "delete": {"trace_id", "deleted"},
        "nodes": {
            *(
                "node",
                "node_id",
                "connected",
                "seen_ns",
                "version",
                "identity",
                "peer",
                "addresses",
            ),
            *("clock_offset_ns", "clock_error_ns"),
            *("protocol", "features"),
        },
        "export": {"output", "format", "traces", "spans", "without_spans"},
        "config check": {"file", "valid_for", "problems"},
        "node: trigger": {"trigger", "trace_id", "why", "bytes_held", "bytes_reported"},
    }
    assert told["show"][0]["trace_id"] == told["traces"][0]["trace_id"] == TRACE.hex()
    assert [node["node"] for node in told["nodes"]] == ["alpha", "beta"]
    assert told["export"] == [
        {"output": "out", "format": "otlp-json", "traces": 1, "spans": 1, "without_spans": 0}
    ]
    assert told["node: trigger"] == [
        {
            "trigger": "operator",
            "trace_id": TRACE.hex(),
            "why": "fired by hand",
            "bytes_held": len(_slice((1, 0, "GET /", 0, None))),
            "bytes_reported": 0,
        }
    ]


def test_what_json_has_no_number_for_is_a_text() -> None:
    view = trace_view(_detail(front=_slice((1, 0, "GET /", 0, 100))))
    view.spans[0].span.attributes = {"share": float("nan"), "most": [float("inf"), 1.5]}
    (span,) = view.to_json()["spans"]
    assert span["attributes"] == {"share": "nan", "most": ["inf", 1.5]}


def test_all_that_is_stored_is_exported_by_a_limit_of_0(
    coordinator: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", "--limit", "0", "--output", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["traces"] == 1
    assert out.stat().st_size > 0
    with pytest.raises(SystemExit) as usage:
        main(["export", "--output", str(out)])
    assert usage.value.code == 2
    assert "name traces, or choose them" in capsys.readouterr().err


@pytest.mark.usefixtures("coordinator")
@pytest.mark.parametrize("form", ["otlp-json", "jaeger-json", "perfetto"])
def test_a_trace_without_a_span_is_left_out_of_a_file_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    other = TraceId(bytes(15) + b"\2")
    whole = _Coordinator.trace

    def trace(here: _Coordinator, trace: TraceId) -> pb.TraceDetail:
        return whole(here, trace) if trace == TRACE else _detail(front=_slice())

    monkeypatch.setattr(_Coordinator, "trace", trace)
    alone, both = tmp_path / "alone", tmp_path / "both"
    export = ["export", "--format", form]
    assert main([*export, TRACE.hex(), "--output", str(alone)]) == 0
    assert capsys.readouterr().err == "backsightctl: exported 1 traces, 1 spans\n"
    assert main([*export, other.hex(), TRACE.hex(), "--output", str(both)]) == 0
    said = "backsightctl: exported 1 traces, 1 spans; 1 without a span were left out\n"
    assert capsys.readouterr().err == said
    assert both.read_bytes() == alone.read_bytes()


def test_json_beside_an_export_to_standard_output_is_wrong_usage(
    coordinator: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as usage:
        main(["export", TRACE.hex(), "--json"])
    assert usage.value.code == 2
    assert "--json wants --output FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        *(
            (["--node", "/s", name, *more], f"{name} asks the coordinator: leave out --node")
            for name, more in ASK_COORDINATOR.items()
            if name not in ASK_NODE
        ),
        *(
            (
                ["--coordinator", "127.0.0.1:9", name, *more],
                f"{name} asks the node on this machine: leave out --coordinator",
            )
            for name, more in ASK_NODE.items()
            if name not in {*ASK_COORDINATOR, "status"}
        ),
        (
            ["--node", "/s", "--coordinator", "127.0.0.1:9", "show", TRACE.hex()],
            "show asks the coordinator or the node on this machine: leave out --coordinator or --node",
        ),
        (
            ["--coordinator", "h:1", "config", "check", "f"],
            "config check asks nobody: leave out --coordinator",
        ),
        (["--node", "/s", "config", "check", "f"], "config check asks nobody: leave out --node"),
    ],
)
def test_who_is_not_asked_must_not_be_named(
    command: list[str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # In the environment it stands for all commands.
    monkeypatch.setenv("BACKSIGHT_COORDINATOR", "127.0.0.1:9")
    with pytest.raises(SystemExit) as usage:
        main(command)
    assert usage.value.code == 2
    assert problem in capsys.readouterr().err


def test_the_environment_names_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BACKSIGHT_COORDINATOR", "127.0.0.1:9")
    assert main(["nodes"]) == 1
    assert "no coordinator answers at 127.0.0.1:9" in capsys.readouterr().err
    status = _ask_server(tmp_path, _Host(), ask=lambda path: main(["--node", path, "status"]))
    assert status == 0


@pytest.mark.parametrize("endpoint", ["localhost", "localhost:", "h:65536", "http://h:1", "::1:1"])
def test_a_coordinator_is_named_with_its_port(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = f"{endpoint!r}; allowed: HOST:PORT or [IPV6]:PORT, with a port up to 65535"
    with pytest.raises(SystemExit) as usage:
        main(["--coordinator", endpoint, "nodes"])
    assert usage.value.code == 2
    assert f"--coordinator: {wrong}" in capsys.readouterr().err
    monkeypatch.setenv("BACKSIGHT_COORDINATOR", endpoint)
    with pytest.raises(SystemExit):
        main(["nodes"])
    assert f"BACKSIGHT_COORDINATOR: {wrong}" in capsys.readouterr().err


def test_who_asks_a_node_needs_no_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKSIGHT_COORDINATOR", "localhost")
    for command in (["status"], ["show", TRACE.hex()]):

        def ask(path: str, command: list[str] = command) -> int:
            return main(["--node", path, *command])

        assert _ask_server(tmp_path, _Host(), ask=ask) == 0


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_a_heading_over_the_nodes(
    coordinator: None,
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert main(["nodes"]) == 0
    *heading, alpha, beta = capsys.readouterr().out.splitlines()
    assert len(heading) == is_terminal
    assert alpha.split(maxsplit=4) == [
        "alpha",
        "connected",
        "0.1.0",
        "4",
        "+1.235 ms +- 0.020 ms        10.0.0.1 10.0.0.2 node alpha (spiffe://d/node/alpha)",
    ]
    assert beta.split() == ["beta", "3", "h", "ago", "-", "-", "not", "measured", "ipv4:10.0.0.3:7"]
    for line in heading:
        assert line.split() == [
            *("NODE", "SEEN", "VERSION", "PROTOCOL", "CLOCK", "ADDRESSES,", "IDENTITY")
        ]
        assert line.index("SEEN") == alpha.index("connected") == beta.index("3 h")
        assert line.index("VERSION") == alpha.index("0.1.0") == beta.index("-")
        assert line.index("PROTOCOL") == alpha.index("4 ") == beta.index("-", beta.index("-") + 1)
        assert line.index("CLOCK") == alpha.index("+1.235") == beta.index("not")
        assert line.index("ADDRESSES") == alpha.index("10.0.0.1")


@pytest.mark.usefixtures("coordinator")
def test_status_is_the_coordinators_if_that_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(["--coordinator", "hub:4770", "status"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "version     0.1.0",
        "ready       yes",
        "now.groups  3",
    ]
    assert main(["--coordinator", "hub:4770", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["now"] == {"groups": 3}
    assert main(["status", "web-1"]) == 0
    assert capsys.readouterr().out == "node  web-1\n"
    with pytest.raises(SystemExit):
        main(["--node", "/s", "status", "web-1"])
    assert "leave out --node" in capsys.readouterr().err
    # A variable of the environment says which coordinator, not that one is asked.
    monkeypatch.setenv("BACKSIGHT_COORDINATOR", "hub:4770")
    monkeypatch.setattr("ctl.__main__.DEFAULT_NODE", str(tmp_path / "absent"))
    assert main(["status"]) == 1
    assert "absent" in capsys.readouterr().err


@pytest.mark.usefixtures("coordinator")
def test_a_node_is_forgotten_instead_of_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _Coordinator.forgotten.clear()
    assert main(["nodes", "--forget", "beta"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["nodes", "--forget", "gamma", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"forgotten": "gamma"}
    assert _Coordinator.forgotten == ["beta", "gamma"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (-5, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_how_long_ago_is_in_the_largest_unit_that_says_enough(seconds: int, said: str) -> None:
    assert ago(seconds * 10**9) == said


@pytest.mark.usefixtures("coordinator")
def test_that_no_trace_is_found_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Coordinator, "traces", lambda *_: iter(()))
    for arguments in (["traces", "--trigger", "lock_wait"], ["traces", "--limit", "0"]):
        assert main(arguments) == 0
        assert capsys.readouterr().err == "backsightctl: no trace was found\n"
        assert main([*arguments, "--json"]) == 0
        assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("coordinator")
def test_that_no_node_has_connected_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Coordinator, "nodes", lambda _: [])
    for more, said in (
        ([], "backsightctl: no node has connected to this coordinator\n"),
        (
            ["--json"],
            "",
        ),
    ):
        assert main(["nodes", *more]) == 0
        assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("limit", ["-3", "x", "1.5", "4294967296", "²"])
def test_a_limit_is_a_whole_number(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as usage:
        main(["traces", f"--limit={limit}"])
    assert usage.value.code == 2
    assert f"argument --limit: {limit!r}; allowed: a whole number from 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "order"),
    [
        (["traces", "--coordinator", "hub:4770"], "--coordinator WHERE traces ..."),
        (["show", "--coordinator=hub:4770", TRACE.hex()], "--coordinator WHERE show ..."),
        (["nodes", "--forget", "n", "--tls", "dir"], "--tls DIR nodes ..."),
        (["trigger", "--node", "/s", TRACE.hex()], "--node SOCKET trigger ..."),
    ],
)
def test_what_goes_before_the_command_is_said(
    capsys: pytest.CaptureFixture[str], words: list[str], order: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{order.split()[0]} goes before the command: backsightctl {order}" in said


def test_what_nobody_knows_is_said_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["traces", "--colour"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --colour" in capsys.readouterr().err


def test_wrong_usage_is_status_2() -> None:
    with pytest.raises(SystemExit) as usage:
        main(["show", "not-a-trace-id"])
    assert usage.value.code == 2


def test_laterals_of_the_own_trigger_are_named_but_not_all() -> None:
    others = [bytes([number]) * 16 for number in range(1, 6)]
    own = pb.Trigger(name="slow", node="front", why="99 ms", primary=TRACE)
    own.laterals.extend(others[:1])
    assert _told(own) == [
        "  trigger slow on front, with 1 lateral: 99 ms",
        f"    laterals: {'01' * 16}",
    ]
    own.laterals.extend(others[1:])
    assert _told(own) == [
        "  trigger slow on front, with 5 laterals: 99 ms",
        f"    laterals: {'01' * 16}, {'02' * 16}, {'03' * 16} and 2 more",
    ]


def test_a_lateral_is_told_whose_it_is() -> None:
    struck = bytes([7]) * 16
    foreign = pb.Trigger(name="slow", node="front", primary=struck, laterals=[TRACE])
    assert _told(foreign) == [f"  trigger slow on front, lateral of {'07' * 16}"]
