# SPDX-License-Identifier: Apache-2.0
"""appliance/probes/compiler.py: whatever becomes of a compiler is told, and stays with its source."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.probes import compiler
from appliance.probes.bcc_compiler import find_headers
from appliance.probes.compiler import coder
from appliance.probes.native import Loader

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(120)]


def test_a_compiler_that_cannot_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tmp_path))
    with (
        coder(Loader.BCC) as code,
        pytest.raises(OSError, match=f"^disks: BCC_KERNEL_SOURCE is {tmp_path}"),
    ):
        code("disks")
    monkeypatch.delenv("BCC_KERNEL_SOURCE")
    # Where Python has no bcc.
    (tmp_path / "bcc.py").write_text("raise ImportError('none here')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with coder(Loader.BCC) as code, pytest.raises(OSError, match="install python3-bpfcc"):
        code("disks")


def test_what_lies_in_the_current_directory_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where bcc looks for each header of Linux; it may be anyone's, and who calls may not be let in."""
    planted = tmp_path / "generated" / "autoconf.h"
    planted.parent.mkdir()
    planted.write_text("#error planted\n")
    monkeypatch.chdir(tmp_path)
    with coder(Loader.BCC) as code:
        assert code("disks")


def test_headers_may_be_named_from_the_current_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    tree.symlink_to(find_headers(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "tree")
    with coder(Loader.BCC) as code:
        assert code("disks")


def test_headers_that_go_are_not_replaced_by_anyones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a kernel that is being upgraded, say: bcc then looks in $TMPDIR, under a name that all know.

    By version, it takes what is there, or has rm remove it, with a wrong command.
    """
    tree = tmp_path / "tree"
    for header in ("linux/kconfig.h", "generated/autoconf.h"):
        (tree / "include" / header).parent.mkdir(parents=True)
        (tree / "include" / header).touch()
    planted = tmp_path / f"kheaders-{os.uname().release}" / "include" / "linux" / "kconfig.h"
    planted.parent.mkdir(parents=True)
    planted.write_text("#error planted\n")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tree))
    removes = tmp_path / "removes"
    (tmp_path / "rm").write_text(f"#!/bin/sh\necho $PWD $* >> {removes}\n")
    (tmp_path / "rm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with coder(Loader.BCC) as code:
        for _ in range(2):
            with pytest.raises(OSError, match=r"^disks: ") as caught:
                code("disks")
            assert "planted" not in str(caught.value)
            (tree / "include" / "linux" / "kconfig.h").unlink(missing_ok=True)
    for removed in removes.read_text().splitlines() if removes.exists() else ():
        directory, _, path = removed.split()
        assert path.startswith(f"{directory}/")


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Puts lines of sh in the compiler's place; gives a file that has a line for each time it was started."""

    def put(lines: str) -> Path:
        starts, script = tmp_path / "starts", tmp_path / "compiler"
        script.write_text(f"#!/bin/sh\necho >> {starts}\n{lines}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return starts

    return put


def no_child_is_left() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("exit 3", "exit status 3"),
        ("kill -SEGV $$", "by SIGSEGV"),
        # As the process above the one that compiles tells of it.
        ("exit 134", "by SIGABRT"),
        ("echo 'bcc: fatal error: no memory' >&2; exit 1", "bcc: fatal error: no memory"),
    ],
)
def test_each_source_has_a_compiler_though_the_one_before_died(
    instead: Callable[[str], Path], lines: str, why: str
) -> None:
    starts = instead(lines)
    with coder(Loader.BCC) as code:
        for number, name in enumerate(("disks", "waits"), 1):
            with pytest.raises(OSError, match=f"^{name}: the compiler has ended: {why}$"):
                code(name)
            assert starts.read_text() == number * "\n"
    assert no_child_is_left()


@pytest.mark.parametrize(
    "answer", ["nothing of JSON", "[]", '{"bytes": -1}', '{"bytes": "1"}', "{}"]
)
def test_a_compiler_that_answers_nonsense_is_noticed(
    instead: Callable[[str], Path], answer: str
) -> None:
    instead(f"echo '{answer}'; cat > /dev/null")
    with (
        coder(Loader.BCC) as code,
        pytest.raises(OSError, match=r"^disks: the compiler's answer makes no sense"),
    ):
        code("disks")
    assert no_child_is_left()


@pytest.mark.parametrize("hangs", ["exec sleep 1000", "kill -STOP $$"])
def test_a_compiler_that_hangs_is_ended(
    instead: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """It is waited for once, not with each source."""
    monkeypatch.setattr(compiler, "_ANSWERS_WITHIN_S", 2.0)
    starts = instead(hangs)
    with coder(Loader.BCC) as code:
        for name in ("disks", "waits"):
            with pytest.raises(OSError, match=f"^{name}: the compiler did not answer within"):
                code(name)
    assert starts.read_text() == "\n"
    assert no_child_is_left()


def below(pid: int) -> int:
    """The process below one that has one below it."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize("is_above", [True, False])
def test_whatever_ends_a_compiler_nothing_of_it_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_above: bool
) -> None:
    """Its links to headers, say; and the next source has another one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with coder(Loader.BCC) as code:
        whole = code("disks")
        assert len(list(tmp_path.iterdir())) == 1
        if is_above:
            started[-1].terminate()
        else:
            os.kill(below(started[-1].pid), signal.SIGKILL)
        started[-1].wait()
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(OSError, match=r"^disks: the compiler has ended: by SIGKILL$"):
            code("disks")
        assert code("disks") == whole
    assert len(started) == 2
    assert list(tmp_path.iterdir()) == []
