# SPDX-License-Identifier: Apache-2.0
"""A test that hangs ends with a traceback, whatever it hangs in."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HANGS_IN = {
    "what cleans up": """
        def test_hangs():
            try:
                time.sleep(60)
            finally:
                threading.Event().wait()
    """,
    "C code": """
        def test_hangs():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            threading.Event().wait()
    """,
    "a fixture, after a failure": """
        @pytest.fixture
        def ends_never():
            yield
            threading.Event().wait()

        def test_hangs(ends_never):
            assert ends_never
    """,
}


BESIDE_OTHERS = ["--numprocesses", "1", "--max-worker-restart", "0"]


@pytest.mark.parametrize(
    ("where", "arguments"),
    [*((where, []) for where in HANGS_IN), ("what cleans up", BESIDE_OTHERS)],
)
def test_a_hang_is_named(
    repository: Path, tmp_path: Path, where: str, arguments: list[str]
) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("import pytest, signal, threading, time\n" + textwrap.dedent(HANGS_IN[where]))
    command: list[str | Path] = [
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-c",
        repository / "pyproject.toml",
    ]
    # Long enough for pytest to begin the test, on a busy machine too.
    command += ["--rootdir", tmp_path, "--timeout", "2", "-o", "hang=2"]
    done = subprocess.run(
        [sys.executable, *command, *arguments, test],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert re.search(r'test_it.py", line \d+ in (test_hangs|ends_never)\n', done.stderr), said
    if arguments:
        assert re.search("crashed while running '.*test_it.py::test_hangs'", done.stdout), said
