# SPDX-License-Identifier: Apache-2.0
"""The loader ``bcc``: what it cannot compile or link it says, and loads nothing of it.

That its probes see what those of ``core`` see is tested with each of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.probes import compiler
from appliance.probes.compiler import load
from appliance.probes.native import Loader, NativeProbes, Newcomer, layout
from testbed.topology import PYTHON
from tests.probes.kernel import bpftool, held, ids_of, left_since
from tests.probes.machine import machine
from tests.probes.test_budget import reload

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]

INSTRUCTION = struct.Struct("=BBhi")
HEAD = struct.Struct("32sII")

DEADLINE_S = 10.0
LOOK_EVERY_S = 0.05

LOAD_64, CALL, EXIT = 0x18, 0x85, 0x95
MAP, FUNCTION = 1, 4
RETURN_0 = ((0xB7, 0, 0, 0), (EXIT, 0, 0, 0))


@pytest.fixture
def probes() -> Iterator[NativeProbes]:
    before = held()
    with contextlib.closing(load(Loader.BCC)) as made:
        yield made
    assert left_since(before) == {}


def function(name: str, *instructions: tuple[int, int, int, int]) -> bytes:
    code = b"".join(INSTRUCTION.pack(*one) for one in instructions)
    return HEAD.pack(name.encode(), len(instructions), 0) + code


def refused(probes: NativeProbes, code: bytes) -> str:
    """Why it does not take that as what bcc made of bpf/disks.bpf.c; nothing of it is left."""
    with pytest.raises(OSError, match=r"^\[Errno \d+\] disks: ") as caught:
        probes.attach("disks", code)
    assert {one.object for one in probes.programs()} == {"threads"}
    return str(caught.value.strerror)


def test_what_is_no_program_is_refused(probes: NativeProbes) -> None:
    for nothing in (b"", b"\0" * 7, function("on_biography", *RETURN_0)):
        assert "No such file" in refused(probes, nothing)
    whole = function("on_bio", *RETURN_0)
    for length in range(len(whole)):
        refused(probes, whole[:length])
    # As many instructions as there is no room for.
    refused(probes, HEAD.pack(b"on_bio", 1 << 31, 0) + whole[HEAD.size :])
    probes.attach("disks", whole)
    probes.detach("disks")


@pytest.mark.parametrize(
    "instructions",
    [
        ((LOAD_64, MAP << 4, 0, 99), (0, 0, 0, 0)),
        ((LOAD_64, MAP << 4, 0, -1), (0, 0, 0, 0)),
        ((LOAD_64, FUNCTION << 4, 0, 99), (0, 0, 0, 0)),
        ((CALL, 0, 0, 0x10000 + 99),),
        ((CALL, 0, 0, 0x10000),),  # a function that is not there
        ((LOAD_64, MAP << 4, 0, 0),),  # without its second half
    ],
)
def test_what_refers_to_nothing_is_refused(
    probes: NativeProbes, instructions: tuple[tuple[int, int, int, int], ...]
) -> None:
    refused(probes, function("on_bio", *instructions, *RETURN_0))


def test_a_call_that_bcc_has_left_is_told(probes: NativeProbes) -> None:
    code = function("on_bio", (CALL, 0x10, 0, -1), *RETURN_0)
    assert refused(probes, code) == "disks: bcc has left a call between functions in on_bio"


def test_the_verifier_is_heard(probes: NativeProbes) -> None:
    code = function("on_bio", (EXIT, 0, 0, 0))
    assert "R0 !read_ok" in refused(probes, code)


def test_a_function_is_linked_once_however_often_it_is_called(probes: NativeProbes) -> None:
    """One that calls itself too would have no end."""
    record = 0x10000
    code = function("on_bio", (CALL, 0, 0, record), (CALL, 0, 0, record), *RETURN_0)
    probes.attach("disks", code + function("record", *RETURN_0))
    probes.detach("disks")
    forever = function("record", (CALL, 0, 0, record), *RETURN_0)
    assert "the call stack of 9 frames is too deep" in refused(probes, code + forever)


def test_the_kernels_structures_are_where_its_types_say() -> None:
    text = layout().decode()
    size = int(text.split("SIZE_OF_task_struct = ")[1].split()[0])
    said = subprocess.run(
        ["bpftool", "btf", "dump", "file", "/sys/kernel/btf/vmlinux"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    task = said.split("STRUCT 'task_struct' ")[1].split("STRUCT '")[0].splitlines()
    assert f"size={size} " in task[0] + " "
    bits = {
        line.split("'")[1]: line.split("bits_offset=")[1] for line in task if "bits_offset=" in line
    }
    for name in ("pid", "tgid", "policy", "comm", "sched_task_group"):
        assert f"at_{name}[{int(bits[name].split()[0]) // 8}]" in text


def dumped(name: str, pid: int) -> list[dict[str, Any]]:
    """What is in a map that a process holds, of a name of 15 characters at most."""
    ids = ids_of(pid, "map")
    (number,) = {
        one["id"] for one in bpftool("map", "list") if one.get("name") == name and one["id"] in ids
    }
    return bpftool("map", "dump", "id", str(number))


def await_entries(name: str, pid: int, count: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while len(found := dumped(name, pid)) != count:
        assert time.monotonic() < deadline_s, f"{name} has {len(found)} entries, not {count}"
        time.sleep(LOOK_EVERY_S)


def test_a_thread_is_known_while_there_is_one(probes: NativeProbes) -> None:
    with contextlib.ExitStack() as stack:
        pidfd, context = os.pidfd_open(os.getpid()), probes.make_context()
        stack.callback(os.close, pidfd)
        stack.callback(os.close, context)
        (number,) = probes.register([Newcomer(1, pidfd, context)])
        assert isinstance(number, int)
        before = len(dumped("threads_by_pid", os.getpid()))
        assert before == len(list(Path("/proc/self/task").iterdir()))
        ends = threading.Event()
        thread = threading.Thread(target=ends.wait)
        thread.start()
        assert len(dumped("threads_by_pid", os.getpid())) == before + 1
        ends.set()
        thread.join()
        await_entries("threads_by_pid", os.getpid(), before)
        probes.unregister([number])
        assert len(dumped("threads_by_pid", os.getpid())) == 0


# Writes in a trace when it is told to, and holds the connection until it is told again.
WRITER = """
import socket, sys, backsight
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    for line in sys.stdin:
        backsight.begin(bytes(15) + b"\\1")
        connection.send(b"x")
        backsight.end()
        print("written", flush=True)
"""


def test_who_ends_while_it_is_registered_leaves_nothing(probes: NativeProbes) -> None:
    """Whatever becomes of them, all that came is as if it had never been."""
    for _ in range(5):
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(subprocess.Popen(["true"])) for _ in range(60)]
            newcomers = []
            for number, process in enumerate(processes):
                fds = os.pidfd_open(process.pid), probes.make_context()
                for fd in fds:
                    stack.callback(os.close, fd)
                newcomers.append(Newcomer(number, *fds))
            found = probes.register(newcomers)
            probes.unregister([number for number in found if isinstance(number, int)])
    assert len(dumped("threads_by_pid", os.getpid())) == 0
    (entry,) = dumped("filter", os.getpid())
    assert set(entry["formatted"]["value"]["processes"]) == {0}


def test_who_shows_no_threads_leaves_nothing(probes: NativeProbes, tmp_path: Path) -> None:
    """As who ends between two looks into /proc."""
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(process.kill)
        fds = os.pidfd_open(process.pid), probes.make_context()
        for fd in fds:
            stack.callback(os.close, fd)
        threads = f"/proc/{process.pid}/task"
        subprocess.run(["mount", "--bind", tmp_path, threads], check=True)
        stack.callback(subprocess.run, ["umount", threads], check=True)
        (found,) = probes.register([Newcomer(0, *fds)])
        assert isinstance(found, OSError)
        assert found.errno == errno.ESRCH
    (entry,) = dumped("filter", os.getpid())
    assert set(entry["formatted"]["value"]["processes"]) == {0}


def test_a_socket_is_known_while_there_is_one(tmp_path: Path, build: Path) -> None:
    with (
        machine(tmp_path, build, "bcc", {}) as here,
        socket.create_server(("127.0.0.1", 0)) as server,
        here.node.host.popen(
            [PYTHON, "-c", WRITER, str(server.getsockname()[1])],
            env=here.node.client_environment("writer"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writer,
    ):
        accepted, _ = server.accept()
        daemon = here.probes.daemon_pid()
        assert writer.stdin is not None
        assert writer.stdout is not None
        # It is attached when it has begun its first trace.
        for _ in range(2):
            writer.stdin.write(b"write\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == b"written\n"
            here.probes.await_watched(1)
        assert len(dumped("sockets_by_addr", daemon)) == 1
        # While nobody sees which ones are gone, none is known.
        reload(here, {"loader": "bcc", "bypass": True})
        here.probes.await_node(lambda status: status["probes"].get("bypassed") == 1)
        assert len(dumped("sockets_by_addr", daemon)) == 0
        reload(here, {"loader": "bcc"})
        here.probes.await_node(lambda status: "on_send" in status["probes"].get("programs", {}))
        writer.stdin.write(b"write\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == b"written\n"
        assert len(dumped("sockets_by_addr", daemon)) == 1
        writer.stdin.close()
        writer.wait()
        accepted.close()
        await_entries("sockets_by_addr", daemon, 0)


def test_the_daemon_says_which_loader_it_took(tmp_path: Path, build: Path) -> None:
    """And keeps none of the compiler's memory: 40 MiB at most."""
    with machine(tmp_path, build, "bcc", {}) as here:
        status = here.probes.await_node(lambda status: bool(status["probes"].get("programs")))
        assert status["probes"]["loader"] == {"bcc": 1}
        assert set(status["probes"]["missing"]) == set()
        pid = here.probes.daemon_pid()
        resident = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]
        assert int(resident) < 40 << 10
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        assert children == ""


def test_in_another_pid_namespace_it_says_what_to_do() -> None:
    done = subprocess.run(
        [
            "unshare", "--pid", "--fork", "--mount-proc",
            PYTHON, "-c",
            "from appliance.probes.compiler import *; load(Loader.BCC)",
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "this process is in another one; take the loader `core`" in done.stderr


def test_auto_takes_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_bcc(loader: Loader) -> NativeProbes:
        if loader is Loader.CORE:
            raise OSError(errno.EINVAL, "too old")
        return load(loader)

    warned: list[str] = []
    loader, probes = compiler.load_any("auto", warned.append)
    probes.close()
    assert (loader, warned) == (Loader.CORE, [])
    monkeypatch.setattr(compiler, "load", only_bcc)
    loader, probes = compiler.load_any("auto", warned.append)
    probes.close()
    assert loader is Loader.BCC
    assert warned == ["the loader core: [Errno 22] too old; the loader bcc is taken instead"]
    with pytest.raises(OSError, match=r"no loader of probes works here; core: .*too old"):
        compiler.load_any("core", warned.append)


def test_who_chooses_a_loader_that_is_not_there_is_told(tmp_path: Path) -> None:
    config = tmp_path / "node.yaml"
    config.write_text("probes: {loader: gcc}\n")
    done = subprocess.run(
        [PYTHON, "-m", "appliance.probes", "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"{config}:1: probes.loader: gcc; allowed: auto, core or bcc" in done.stderr
