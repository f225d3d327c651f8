# SPDX-License-Identifier: Apache-2.0
"""Applications with PyPI's OpenTelemetry, beside a node daemon of this tree."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from native.bench.daemons import Cores, lone_node
from tests.cluster.topology import Node
from tests.venvs import DISTRIBUTION, clean_environment, new_environment, pip

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
            new_environment(DISTRIBUTION, _VENV)
            pip(python, "install", "--requirement", _HERE / "requirements.txt")
            stamp.write_text(wanted)
    return python


@dataclass(frozen=True, slots=True)
class Application:
    """Runs tests/otel/programs.py, attached to the node."""

    python: Path
    node: Node

    def run(self, program: str, *arguments: object, **environment: str) -> str:
        """Its output; AssertionError with what it complained of if it failed."""
        done = subprocess.run(
            [self.python, _HERE / "programs.py", program, *map(str, arguments)],
            env={
                **clean_environment(),
                **self.node.client_environment("shop"),
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
def daemon(tmp_path: Path) -> Iterator[Node]:
    # Alone, so that what is triggered can be read here.
    with lone_node(tmp_path, Cores.choose(), {}) as daemon:
        yield daemon


@pytest.fixture
def application(otel_python: Path, daemon: Node) -> Application:
    return Application(otel_python, daemon)
