# SPDX-License-Identifier: Apache-2.0
"""What programs write through `import backsight` is what the node holds."""

from __future__ import annotations

import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import backsight
from appliance.core.dataplane import LocalTrigger
from formats.records import Breadcrumb, Data, HopIn, HopOut
from formats.spans import SliceContent
from protocol.messages import SliceFlags, Source, TraceId
from tests.python_client.conftest import Node, RunProgram
from tests.python_client.programs import LONG_NAME, START_NS, THREADS, trace_id


def payloads(content: SliceContent) -> list[bytes]:
    """The application's bytes, in the slice's order."""
    found = []
    for record in content.records:
        assert isinstance(record.body, Data)
        found.append(record.body.payload)
    return found


def assert_whole(content: SliceContent) -> None:
    """Every handle is there from its first run to its last, which closed it; nothing was lost."""
    assert content.whole
    assert content.handles
    assert [handle.problem() for handle in content.handles.values()] == [None] * len(
        content.handles
    )
    assert not content.lossy
    assert not any(handle.lossy for handle in content.handles.values())


def identifier(number: int) -> TraceId:
    return TraceId(bytes.fromhex(trace_id(number)))


# --------------------------------------------------------------- both forms


def test_the_handle_form_writes_what_it_was_given(node: Node) -> None:
    result = node.run("handle_form")
    content = node.slice(1)
    assert_whole(content)
    assert payloads(content) == [b"bytes", b"bytearray", b"srdd", b"", bytes(range(256)) * 128]

    root, child, unfinished = content.spans
    assert (root.span_id, root.parent_id, root.name, root.kind) == (0xA, 0, "root", 2)
    assert (root.start_ns, root.end_ns, root.status) == (START_NS, START_NS + 9, 2)
    assert root.attributes == {
        "pod": "cart-1",
        "n": -7,
        "share": 0.5,
        "ok": True,
        "raw": b"\0\xff",
    }
    assert (child.span_id, child.parent_id, child.name, child.kind) == (0xB, 0xA, LONG_NAME, 1)
    assert (child.start_ns, child.end_ns, child.status) == (START_NS + 1, START_NS + 5, 0)
    assert child.attributes == {}
    assert (unfinished.name, unfinished.unfinished) == ("unfinished", True)
    assert not content.ends_without_start

    assert result["node_ref"] == f"#{node.id:016x}"
    assert [crumb.name for crumb in content.breadcrumbs] == ["other-node", ""]
    assert content.breadcrumbs[1] == Breadcrumb(node.id, "")
    (out,) = content.hops_out
    assert (out.node_id, out.span_id) == (node.id, 0xB)

    callee = node.slice(2)
    assert_whole(callee)
    assert callee.hops_in == (HopIn(out.node_id, out.span_id, out.hop, out.handle),)
    assert (result["records_lost"], result["attachments"], result["attached"]) == (0, 1, True)


def test_the_thread_local_form_writes_what_it_was_given(node: Node) -> None:
    result = node.run("thread_form")
    caller, callee, third = node.slice(1), node.slice(2), node.slice(3)
    for content in (caller, callee, third):
        assert_whole(content)
    assert payloads(caller) == [b"caller", b"caller again"]
    assert payloads(callee) == [b"callee"]
    assert payloads(third) == [b"third"]
    assert [crumb.name for crumb in caller.breadcrumbs] == ["other-node"]
    (out,) = caller.hops_out
    assert out == HopOut(node.id, 0xB, out.hop, out.handle)
    assert callee.hops_in == (HopIn(node.id, 0xB, out.hop, out.handle),)
    assert result["records_lost"] == 0


def test_triggers_arrive_with_their_reason_and_laterals(node: Node) -> None:
    result = node.run("triggers")
    fired = node.triggers()
    assert [
        (event.trigger, event.trace, event.why, event.laterals, event.source) for event in fired
    ] == [
        (
            "slow.get-cart",
            identifier(1),
            "ü" * 47,  # 95 bytes, cut between characters
            (identifier(7), identifier(8)),
            Source.APPLICATION,
        ),
        ("after_close__123456789012345678", identifier(1), "", (), Source.APPLICATION),
        ("_", identifier(1), "", (), Source.APPLICATION),
        (
            "from_outside",
            identifier(2),
            "",
            tuple(identifier(n) for n in range(10, 42)),
            Source.APPLICATION,
        ),
    ]
    assert all(isinstance(event, LocalTrigger) for event in fired)
    assert result["triggers_lost"] == 0


# ---------------------------------------------------------------- lifetimes


def test_traces_end_by_exceptions_and_garbage_collection(node: Node) -> None:
    result = node.run("closed_and_forgotten")
    for number in (1, 2, 3):
        content = node.slice(number)
        assert_whole(content)
        assert payloads(content) == [b"%d" % number]
    assert result == {"closed": True}


def test_calls_on_closed_and_zero_traces_write_nothing(node: Node) -> None:
    result = node.run("late_calls")
    content = node.slice(1)
    assert_whole(content)
    assert payloads(content) == [b"before"]
    assert not (content.spans or content.breadcrumbs or content.hops_in or content.hops_out)
    assert result["runs"] == 1


def test_the_interpreter_may_go_down_with_open_traces_and_daemon_threads(node: Node) -> None:
    node.run("shutdown")
    for number in range(1, THREADS):
        content = node.slice(number)
        assert content.whole
        first, *more = payloads(content)
        assert first == b"start"
        assert set(more) <= {b"x" * 100}
    assert payloads(node.slice(5)) == [b"kept"]


# ------------------------------------------------------------------ threads


def test_threads_without_a_slot_are_counted_and_run_on(node: Node) -> None:
    result = node.run("more_threads_than_slots")
    written = [number for number in range(1, 301) if payloads(node.slice(number))]
    alive: Any = result["alive"]
    assert 0 < len(written) <= 256
    assert alive["records_lost"] == 300 - len(written)
    assert alive["payload_bytes_lost"] == 10 * (300 - len(written))
    after: Any = result["after"]
    assert after["records_lost"] == alive["records_lost"]
    assert payloads(node.slice(1000)) == [b"again"]


def test_threads_share_one_trace_and_have_their_own(node: Node) -> None:
    result = node.run("threads_share_a_trace")
    assert result["records_lost"] == 0
    shared = node.slice(1)
    assert_whole(shared)
    wanted = [[b"%d %d" % (thread, i) for i in range(200)] for thread in range(THREADS - 1)]
    assert sorted(payloads(shared)) == sorted(chain.from_iterable(wanted))
    for thread in range(THREADS - 1):
        own = node.slice(100 + thread)
        assert_whole(own)
        assert payloads(own) == wanted[thread]


def test_the_first_writer_may_close_after_others(node: Node) -> None:
    node.run("closed_by_the_first_writer")
    content = node.slice(1)
    assert_whole(content)
    assert sorted(payloads(content)) == [b"first", b"second"]


def test_a_close_beside_writers_is_the_end(node: Node) -> None:
    result = node.run("close_under_writers")
    assert (result["records_lost"], result["runs_lost"]) == (0, 0)
    for number in range(1, 61):
        content = node.slice(number)
        assert_whole(content)
        found = payloads(content)
        assert found.count(b"first") == 1
        assert found.count(b"more") == len(found) - 1 <= 40


def test_the_gil_is_kept_where_releasing_it_would_cost_more_than_the_call(node: Node) -> None:
    """Beside a thread that computes, a released GIL is back after a switch interval."""
    result = node.run("turns_of_another_thread")
    # One wait for the GIL may have begun, with the shorter interval, before it was set.
    assert result["calls"] == 40_000
    assert result["turns"] <= 2


# -------------------------------------------------------------------- fork


def test_a_forked_child_leaves_its_parents_traces_alone(node: Node) -> None:
    result = node.run("fork")
    parent = result["pid"]
    for number in (1, 2):
        content = node.slice(number)
        assert_whole(content)
        assert payloads(content) == [b"parent", b"parent again"]
        assert {process.pid for process in content.processes.values()} == {parent}
        assert not content.spans
        assert not content.hops_out
    busy = node.slice(50)
    assert set(payloads(busy)) == {b"busy"}
    assert {process.pid for process in busy.processes.values()} == {parent}
    for number in (3, 4):
        content = node.slice(number)
        assert_whole(content)
        assert sorted(payloads(content)) == [b"child %d" % child for child in range(8)]
        pids = {process.pid for process in content.processes.values()}
        assert len(pids) == result["children"] == 8
        assert parent not in pids


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(node: Node, method: str) -> None:
    result = node.run(f"multiprocessing_{method}")
    inherited = node.slice(1)
    assert_whole(inherited)
    assert payloads(inherited) == [b"parent"]
    content = node.slice(3)
    assert_whole(content)
    assert sorted(payloads(content)) == [b"0", b"1", b"2", b"3"]
    pids = {process.pid for process in content.processes.values()}
    assert sorted(pids) == result["pids"]
    assert result["pid"] not in pids


# ----------------------------------------------------------------- asyncio


def test_asyncio_tasks_each_have_their_own_trace(node: Node) -> None:
    result = node.run("asyncio_tasks")
    assert result["records_lost"] == 0
    for number in range(1, 51):
        outer, inner = node.slice(number), node.slice(1000 + number)
        assert_whole(outer)
        assert_whole(inner)
        assert sorted(payloads(outer)) == sorted(b"%d %d" % (number, step) for step in range(12))
        assert payloads(inner) == [b"%d 12" % number]


def test_cancelled_tasks_close_their_trace(node: Node) -> None:
    node.run("asyncio_cancelled")
    for number, text in ((1, b"endless"), (2, b"request")):
        content = node.slice(number)
        assert_whole(content)
        assert payloads(content) == [text]


def test_a_trace_may_be_left_in_another_context_than_entered(node: Node) -> None:
    node.run("asyncio_generator")
    content = node.slice(1)
    assert_whole(content)
    assert payloads(content) == [b"row"]


# ------------------------------------------------------ what threads show


def test_a_thread_shows_the_trace_of_its_block(node: Node) -> None:
    assert node.run("shown_in_blocks")["numbers"] == [0, 1, 2, 0, 1, 0]


def test_a_closed_trace_is_shown_by_no_thread(node: Node) -> None:
    assert node.run("shown_after_others_close")["numbers"] == [1, 0]


def test_each_step_of_asyncio_shows_the_trace_of_its_task(node: Node) -> None:
    assert node.run("shown_in_tasks")["wrong"] == []


# ------------------------------------------------------ what is not written


def test_refused_records_are_counted_and_cost_only_themselves(node: Node) -> None:
    result = node.run("refused")
    assert (result["records_oversized"], result["contexts_malformed"]) == (2, 2)
    assert result["breadcrumbs_malformed"] == 2
    assert result["attributes_malformed"] == 0
    content = node.slice(1)
    assert payloads(content) == [b"x" * 32768]
    assert not content.breadcrumbs
    assert not content.hops_in
    (span,) = content.spans
    assert span.name == "n" * 1024
    big = span.attributes["big"]
    assert isinstance(big, str)
    assert set(big) == {"v"}
    assert 30000 < len(big) < 32768
    assert {key: value for key, value in span.attributes.items() if key != "big"} == {
        "after": 1,
        backsight.TRUNCATED_KEY: 1,
    }


@pytest.mark.parametrize("disabled", ["", "1"])
def test_without_a_node_everything_is_lost_and_nothing_fails(
    run_program: RunProgram, tmp_path: Path, disabled: str
) -> None:
    result = run_program(
        "unattached",
        {"BACKSIGHT_SOCKET": str(tmp_path / "nobody"), "BACKSIGHT_DISABLE": disabled},
    )
    assert (result["node_ref"], result["waited"]) == ("", False)
    assert (result["runs"], result["attachments"], result["attached"]) == (0, 0, False)
    # Of the handle: bytes, span start and end, breadcrumb. Of the thread: bytes, breadcrumb.
    assert (result["records_lost"], result["runs_lost"]) == (6, 2)
    assert result["contexts_malformed"] == 2
    assert (result["triggers_unattached"], result["triggers_malformed"]) == (1, 0)


def test_waiting_for_a_node_can_be_interrupted(run_program: RunProgram, tmp_path: Path) -> None:
    result = run_program("interrupted", {"BACKSIGHT_SOCKET": str(tmp_path / "nobody")})
    assert result == {"interrupted": True}


def test_waiting_ends_at_once_where_the_client_is_disabled(
    run_program: RunProgram, tmp_path: Path
) -> None:
    """An hour, were it not for that."""
    result = run_program("waits_an_hour", {"BACKSIGHT_DISABLE": "1"})
    assert result == {"attached": False}


# ----------------------------------------------------------------- mistakes


@pytest.mark.parametrize("wrong", ["", "12", "z" * 32, " " + "1" * 31, b"", b"1" * 15, "1" * 33])
def test_an_impossible_trace_id_is_a_mistake(wrong: bytes | str) -> None:
    for call in (backsight.begin, backsight.Trace, lambda bad: backsight.trigger(bad, "name")):
        with pytest.raises(ValueError, match="a trace id has 16 bytes or 32 hex digits"):
            call(wrong)
    with pytest.raises(ValueError, match="a trace id has"):
        backsight.trigger(trace_id(1), "name", laterals=[wrong])


@pytest.mark.parametrize("wrong", [None, 1, 1.5, ["a"]])
def test_wrong_types_are_mistakes(wrong: Any) -> None:  # what it is about
    with backsight.Trace(trace_id(1)) as trace:
        for call in (
            lambda: backsight.begin(wrong),
            lambda: backsight.Trace(wrong),
            lambda: backsight.tracepoint(wrong),
            lambda: backsight.breadcrumb(wrong),
            lambda: backsight.deserialize(1, wrong),
            lambda: backsight.trigger(trace_id(1), wrong),
            lambda: trace.write(wrong),
            lambda: trace.breadcrumb(wrong),
            lambda: trace.deserialize(1, wrong),
            lambda: trace.span_start(1, 0, 0, wrong),
            lambda: trace.trigger(wrong),
        ):
            with pytest.raises((TypeError, AttributeError)):
                call()
        for typed in (
            lambda: trace.serialize("1"),  # type: ignore[arg-type]
            lambda: trace.span_start("1", 0, 0, "name"),  # type: ignore[arg-type]
            lambda: trace.span_end(1, "now"),  # type: ignore[arg-type]
            lambda: trace.write("text"),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError):
                typed()


@pytest.mark.parametrize("wrong", [-1, 1 << 64])
def test_numbers_out_of_range_are_mistakes(wrong: int) -> None:
    with backsight.Trace(trace_id(1)) as trace:
        for call in (
            lambda: trace.span_start(wrong, 0, 0, "name"),
            lambda: trace.span_start(1, wrong, 0, "name"),
            lambda: trace.span_start(1, 0, wrong, "name"),
            lambda: trace.span_start(1, 0, 0, "name", wrong),
            lambda: trace.span_end(1, wrong),
            lambda: trace.span_end(1, 0, wrong),
            lambda: trace.serialize(wrong),
        ):
            with pytest.raises(OverflowError):
                call()


def test_the_package_is_the_one_that_was_built(build: Path) -> None:
    assert backsight.__file__ is not None
    assert Path(backsight.__file__).is_relative_to(build)
    marker = Path(backsight.__file__).with_name("py.typed")
    assert marker.is_file()


def test_a_killed_program_leaves_what_it_wrote(node: Node) -> None:
    """Its open run too, and the node knows that nothing more comes."""
    with node.start("killed") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    node.notice_exits()
    content = node.slice(1)
    assert payloads(content) == [b"before the end"]
    (span,) = content.spans
    assert span.unfinished
    assert content.exited
    assert [handle.problem() for handle in content.handles.values()] == ["it was never closed"]
    assert node.collect(1).flags == SliceFlags.HELD
