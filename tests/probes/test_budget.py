# SPDX-License-Identifier: Apache-2.0
"""Probes that cost more than they may say so and go; what else a reload changes, and what not."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.topology import PYTHON
from tests.probes.kernel import ids_of
from tests.probes.machine import Machine, machine, trigger_of

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

LOCK_WAIT = {"fire_ms": 30, "record_ms": 5}


@pytest.fixture
def here(tmp_path: Path, build: Path, loader: str) -> Iterator[Machine]:
    # A thousandth of a percent: a thread that sleeps and wakes costs more.
    probes = {"cpu_percent": 0.001, "lock_wait": LOCK_WAIT}
    with machine(tmp_path, build, loader, probes) as made:
        yield made


def reload(here: Machine, probes: dict[str, Any]) -> None:
    """Until it is done."""
    loader = here.node.config["probes"]["loader"]
    here.probes.reload(probes={"loader": loader, **probes})


def programs(status: dict[str, Any]) -> set[str]:
    return set(status["probes"].get("programs", {}))


def assert_put_back(here: Machine) -> None:
    """On a busy machine others were too dear as well."""
    put_back = r"what was taken out is put back: .*\brun_queue\b"
    assert re.search(put_back, here.probes.log_path.read_text())


def test_what_costs_too_much_goes_and_comes_back_when_told(here: Machine) -> None:
    with here.sufferer("sleep") as program:
        here.probes.await_watched(1)

        def is_gone(status: dict[str, Any]) -> bool:
            # It goes on while it is looked at.
            program.suffer()
            return "run_queue" in status["probes"].get("missing", {})

        status = here.probes.await_node(is_gone)
        assert status["probes"]["thresholds_raised"] == 1
        assert "on_switch" not in programs(status)
        log = here.probes.log_path.read_text()
        assert "`probes.cpu_percent` allows 0.001 %: all thresholds are raised by 10" in log
        assert "those of waits, the costliest, are taken out until the others have kept" in log
        assert "without them: run_queue, cpu_throttled, lock_wait, blocked, io_wait" in log
    reload(here, {"cpu_percent": 50, "lock_wait": LOCK_WAIT})
    here.probes.await_node(lambda status: "on_switch" in programs(status))
    assert_put_back(here)
    with here.suffers("lock_wait") as it:
        trigger_of(here.shown(it.victim), "kernel.lock_wait")


@pytest.mark.slow
def test_what_costs_too_much_is_tried_again(tmp_path: Path, build: Path, loader: str) -> None:
    probes = {"cpu_percent": 0.001, "lock_wait": LOCK_WAIT}
    program = "tests.probes.impatient"
    with machine(tmp_path, build, loader, probes, program=program) as here:
        with here.sufferer("sleep") as sufferer:
            here.probes.await_watched(1)

            def is_gone(status: dict[str, Any]) -> bool:
                sufferer.suffer()
                return "on_switch" not in programs(status)

            here.probes.await_node(lambda status: "on_switch" in programs(status))
            here.probes.await_node(is_gone)
        # Nobody is there of whom it could cost anything.
        here.probes.await_node(lambda status: "on_switch" in programs(status))
        assert_put_back(here)


def test_thresholds_change_while_programs_run(here: Machine) -> None:
    pid = here.probes.daemon_pid()
    before = ids_of(pid, "prog")
    assert before
    reload(here, {"lock_wait": {"fire_ms": 3_600_000, "record_ms": 5}})
    with here.suffers("lock_wait") as it:
        pass
    reload(here, {"lock_wait": LOCK_WAIT})
    with here.suffers("lock_wait") as after:
        trigger_of(here.shown(after.victim), "kernel.lock_wait")
    assert it.victim not in here.triggered()["kernel.lock_wait"]
    assert ids_of(pid, "prog") == before


def test_with_the_bypass_no_program_is_left(here: Machine, loader: str) -> None:
    # Which threads are ours is known all the time.
    kept = {"new_thread", "on_exec", {"core": "register_threads", "bcc": "on_exit"}[loader]}
    here.probes.await_node(lambda status: "on_switch" in programs(status))
    reload(here, {"bypass": True})
    here.probes.await_node(lambda status: programs(status) == kept)
    with here.suffers("lock_wait") as it:
        pass
    reload(here, {"lock_wait": LOCK_WAIT})
    here.probes.await_node(lambda status: "on_switch" in programs(status))
    with here.suffers("lock_wait") as after:
        trigger_of(here.shown(after.victim), "kernel.lock_wait")
    assert it.victim not in here.triggered()["kernel.lock_wait"]


WRITER = """
import secrets, socket, sys
import backsight
assert backsight.wait_attached(30)
print("ready", flush=True)
connection = None
for line in sys.stdin:
    if connection is None or line == "anew\\n":
        connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    trace = secrets.token_bytes(16)
    backsight.begin(trace)
    connection.sendall(b"x")
    backsight.end()
    print(trace.hex(), flush=True)
"""


def wrote(writer: subprocess.Popen[bytes], how: bytes = b"on") -> str:
    """The trace in which it wrote something."""
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write(how + b"\n")
    writer.stdin.flush()
    return writer.stdout.readline().decode().strip()


def break_off(connection: socket.socket) -> None:
    """By a reset, and not by an end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_who_wrote_before_a_bypass_did_not_write_last(here: Machine) -> None:
    """Nobody saw who wrote meanwhile."""
    seeing = {"on_send", "on_reset_received"}
    here.probes.await_watched(0)
    reload(here, {})
    here.probes.await_node(lambda status: seeing <= programs(status))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        here.node.host.popen(
            [PYTHON, "-c", WRITER, str(listener.getsockname()[1])],
            env=here.node.client_environment("writer"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writer,
    ):
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        here.probes.await_watched(1)
        before = wrote(writer)
        connection, _ = listener.accept()
        reload(here, {"bypass": True})
        here.probes.await_node(lambda status: not seeing & programs(status))
        meanwhile = wrote(writer)
        reload(here, {})
        here.probes.await_node(lambda status: seeing <= programs(status))
        break_off(connection)
        after = wrote(writer, b"anew")
        connection, _ = listener.accept()
        break_off(connection)
        trigger_of(here.shown(after), "kernel.tcp_reset_received")
        assert writer.stdin is not None
        writer.stdin.close()
    assert not here.triggered()["kernel.tcp_reset_received"] & {before, meanwhile}
