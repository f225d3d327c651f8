# SPDX-License-Identifier: Apache-2.0
"""A bad configuration is told in clear words, with status 2, and nothing is started by it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctl.__main__ import main
from ctl.config import check
from runtime.schema import ConfigError

# Of each file: for whom it is meant, and all that is said of it.
BROKEN = {
    "node-in-the-clear": (
        "node",
        [
            (
                "4: coordinator.endpoint: traces.example:4770 is not on this machine, and what is sent is"
                " not encrypted; allowed: a loopback address, a `tls` section, or `insecure: true` beside it"
            )
        ],
    ),
    "node-no-such-user": ("node", ["3: allow.users: there is no user 'no-such-user-here'"]),
    "node-out-of-range": (
        "node",
        [
            "3: reclaim_percent: 101; allowed: a whole number from 10 to 100",
            "5: triggers.laterals_max: 64; allowed: a whole number from 0 to 32",
        ],
    ),
    "node-repeated-key": ("node", ["5: clients_max: stands in line 3 already"]),
    "node-unit": (
        "node",
        [
            (
                "3: pool_bytes: 512MB; allowed: 4MiB to 512GiB, as a number of bytes or with KiB, MiB, GiB"
                " or TiB"
            )
        ],
    ),
    "node-unknown-key": (
        "node",
        ["4: pol_bytes: unknown key; allowed: node, socket, coordinator,"],
    ),
    "coordinator-no-yaml": ("coordinator", ["4: no valid YAML: "]),
    "coordinator-port": (
        "coordinator",
        ["1: listen: 127.0.0.1:70000; allowed: HOST:PORT or [IPV6]:PORT, with a port up to 65535"],
    ),
    "coordinator-section": (
        "coordinator",
        [
            "2: store: ./traces.sqlite; allowed: a section with path, bytes_max, age_max_s",
            "4: metrics: a list; allowed: a section with listen, insecure",
        ],
    ),
    "coordinator-wrong-type": (
        "coordinator",
        [
            "4: quiet_s: '0.2'; allowed: a number from 0.001 to 86400",
            "5: insecure: sometimes; allowed: true or false",
        ],
    ),
}

MODULES = {"node": "appliance", "coordinator": "coordinator"}

# Runs a module as a program, and says at its end what it did to the world around it.
PROBE = """
import atexit, json, os, runpy, sys, threading
did = []
def audit(event, arguments):
    if event in ("socket.bind", "socket.connect", "sqlite3.connect", "os.mkdir", "subprocess.Popen"):
        did.append(event)
    elif event == "open" and arguments[2] and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        did.append(f"open {arguments[0]}")
def tell():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # that of the listing itself
    sockets = sum(link.startswith("socket:") for link in links)
    threads = len(os.listdir("/proc/self/task"))
    print(json.dumps({"did": did, "sockets": sockets, "threads": threads}))
sys.addaudithook(audit)
atexit.register(tell)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

NOTHING = {"did": [], "sockets": 0, "threads": 1}


def run(
    module: str, directory: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a daemon in a directory; how it ended, and what it did."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def broken(repository: Path) -> Path:
    return repository / "tests" / "data" / "config"


def check_message(text: str, path: str, problems: list[str]) -> None:
    lines = text.splitlines()
    assert len(lines) == len(problems)
    for line, problem in zip(lines, problems, strict=True):
        assert line.startswith(f"{path}:{problem}")


def test_there_is_a_test_for_each_broken_file(broken: Path) -> None:
    assert len(BROKEN) == 10
    assert {path.stem for path in broken.glob("*.yaml")} == set(BROKEN)


@pytest.mark.parametrize("name", sorted(BROKEN))
@pytest.mark.parametrize("more", [(), ("--check",)])
def test_a_daemon_says_what_is_wrong_and_starts_nothing(
    name: str, more: tuple[str, ...], broken: Path, tmp_path: Path
) -> None:
    kind, problems = BROKEN[name]
    # What would be made, would be made here.
    shutil.copy(broken / f"{name}.yaml", tmp_path / "bad.yaml")
    done, did = run(MODULES[kind], tmp_path, "--config", "bad.yaml", *more)
    assert done.returncode == 2
    check_message(done.stderr, "bad.yaml", problems)
    assert did == NOTHING
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_backsightctl_says_the_same(
    name: str, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, problems = BROKEN[name]
    path = str(broken / f"{name}.yaml")
    for arguments in ([path, "--kind", kind], [path]):
        assert main(["config", "check", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        check_message(captured.err, path, problems)
    assert main(["config", "check", path, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["valid_for"] == [] and len(told["problems"]) == len(problems)


@pytest.mark.parametrize("kind", MODULES)
def test_a_good_one_is_only_checked(kind: str, repository: Path, tmp_path: Path) -> None:
    example = str(repository / "packaging" / f"{kind}.yaml")
    done, did = run(MODULES[kind], tmp_path, "--config", example, "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{example}: valid for backsight-{kind}\n")
    assert did == NOTHING


@pytest.mark.parametrize("kind", MODULES)
def test_the_probe_sees_what_a_daemon_does(kind: str, tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as path,
    ):
        path.bind(str(tmp_path / "node.sock.bpf"))
        path.listen()
        (tmp_path / "good.yaml").write_text(
            # It starts, and ends since the last thing that it needs is not to be had.
            "metrics: {listen: null}\n"
            + (
                "socket: ./node.sock\npool_bytes: 4MiB\n"
                if kind == "node"
                else f"listen: 127.0.0.1:{port.getsockname()[1]}\nstore: {{path: ./t.sqlite}}\n"
                "query: {listen: null}\n"
            )
        )
        done, did = run(MODULES[kind], tmp_path, "--config", "good.yaml")
    assert done.returncode == 1
    said = "another daemon" if kind == "node" else "listen: cannot listen on"
    assert said in done.stderr
    assert "socket.bind" in did["did"]
    assert ("sqlite3.connect" in did["did"]) == (kind == "coordinator")


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("pool_bytes: 1GiB\n", [], "valid for backsight-node\n"),
        ("quiet_s: 1\n", [], "valid for backsight-coordinator\n"),
        ("log_level: debug\n", [], "valid for backsight-node and backsight-coordinator\n"),
        ("", [], "valid for backsight-node and backsight-coordinator\n"),
        ("", ["--kind", "node"], "valid for backsight-node\n"),
        # The keys of one, with a mistake of the other's.
        (
            "quiet_s: 1\nlisten: 127.0.0.1:1\nsocket: x\n",
            ["--kind", "coordinator"],
            "3: socket: un",
        ),
        ("quiet_s: 1\nlisten: 127.0.0.1:1\nsocket: x\n", [], "3: socket: unknown key; allowed: li"),
        (
            "log_level: loud\n",
            [],
            "may be meant for a node or for a coordinator; say which: --kind",
        ),
        ("- a\n", ["--kind", "node"], "1: a list; allowed: a section with node,"),
    ],
)
def test_it_finds_by_itself_what_a_file_is_for(
    text: str, arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    status = main(["config", "check", str(path), *arguments])
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    assert status == (0 if "valid for" in said else 2)


@pytest.mark.parametrize("kind", MODULES)
def test_a_file_with_nothing_but_comments_is_told_apart(
    kind: str, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = "no key is in force there, so all have their defaults\n"
    installed = repository / "packaging" / f"{kind}.yaml"
    assert main(["config", "check", str(installed)]) == 0
    assert nothing in capsys.readouterr().out
    path = tmp_path / "x.yaml"
    path.write_text(f"{installed.read_text()}\nlog_level: debug\n")
    assert main(["config", "check", str(path)]) == 0
    assert nothing not in capsys.readouterr().out


@given(st.text(max_size=60))
def test_any_text_is_valid_or_told_why_not(text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.yaml"
        path.write_text(text, "utf-8", "surrogatepass")
        try:
            assert set(check(path, None)) <= set(MODULES)
        except ConfigError as error:
            assert all(problem.startswith(str(path)) for problem in error.problems)


def test_a_file_that_is_not_there_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "absent.yaml"
    assert main(["config", "check", str(path)]) == 2
    assert capsys.readouterr().err == f"{path}: cannot be read: No such file or directory\n"
