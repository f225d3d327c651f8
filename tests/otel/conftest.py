# SPDX-License-Identifier: Apache-2.0
"""Applications with PyPI's OpenTelemetry, beside a node daemon of this tree."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from native.bench.daemons import Cores, lone_node
from tests.cluster.topology import Node
from tests.venvs import clean_environment, otel_python

REPOSITORY = Path(__file__).parents[2]
_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def python() -> Path:
    return otel_python()


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
def application(python: Path, daemon: Node) -> Application:
    return Application(python, daemon)
