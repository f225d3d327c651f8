# SPDX-License-Identifier: Apache-2.0
"""Applications with PyPI's OpenTelemetry, beside a node daemon of this tree."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
_HERE = Path(__file__).parent
_VENV = REPOSITORY / "build/venv-otel"


@pytest.fixture(scope="session")
def otel_python() -> Path:
    """A Python that has requirements.txt, made once for a build directory."""
    wanted = (_HERE / "requirements.txt").read_text()
    stamp = _VENV / ".installed"
    python = _VENV / "bin/python"
    _VENV.parent.mkdir(exist_ok=True)
    with Path(f"{_VENV}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != wanted:
            subprocess.run(["/usr/bin/python3", "-m", "venv", "--clear", _VENV], check=True)
            subprocess.run(
                [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                 "--requirement", _HERE / "requirements.txt"],
                check=True,
            )  # fmt: skip
            stamp.write_text(wanted)
    return python


@dataclass(frozen=True, slots=True)
class Application:
    """Runs tests/otel/programs.py, attached to the node."""

    python: Path
    socket: Path

    def run(self, program: str, *arguments: object, **environment: str) -> str:
        """Its output; AssertionError with what it complained of if it failed."""
        done = subprocess.run(
            [self.python, _HERE / "programs.py", program, *map(str, arguments)],
            env={
                **{
                    k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "BACKSIGHT_"))
                },
                "BACKSIGHT_SOCKET": str(self.socket),
                "BACKSIGHT_SERVICE": "shop",
                "PYTHONPATH": str(REPOSITORY / "build/native/python"),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def node_socket(tmp_path: Path) -> Iterator[Path]:
    """Where a node daemon serves."""
    socket = tmp_path / "node.sock"
    configuration = tmp_path / "node.yaml"
    configuration.write_text(f"node: n1\nsocket: {socket}\npool_bytes: 16MiB\n")
    with subprocess.Popen(
        ["/usr/bin/python3", "-m", "appliance", "--config", configuration],
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as daemon:
        assert daemon.stderr is not None
        try:
            assert "serves on" in daemon.stderr.readline()
            yield socket
        finally:
            daemon.terminate()
            daemon.stderr.read()


@pytest.fixture
def application(otel_python: Path, node_socket: Path) -> Application:
    return Application(otel_python, node_socket)
