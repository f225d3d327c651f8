# SPDX-License-Identifier: Apache-2.0
"""Applications with PyPI's OpenTelemetry, beside a node daemon of this tree."""

from __future__ import annotations

import configparser
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from ctl.trace import TraceView
from protocol.messages import TraceId
from testbed.daemons import Cores, lone_node
from testbed.topology import Node
from testbed.venvs import clean_environment, made_once, otel_python

REPOSITORY = Path(__file__).parents[2]
_HERE = Path(__file__).parent
APPS = _HERE / "apps"


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
        return self.run_file("programs.py", program, *arguments, **environment)

    def run_file(self, file: str, *arguments: object, **environment: str) -> str:
        """The same of another file than programs.py."""
        done = subprocess.run(
            [self.python, _HERE / file, *map(str, arguments)],
            env={
                **clean_environment(),
                **self.node.client_environment("shop"),
                "PYTHONPATH": f"{REPOSITORY / 'build/native/python'}:{REPOSITORY}",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@dataclass(frozen=True, slots=True)
class Instrumented:
    """Runs programs of tests/otel/apps under ``opentelemetry-instrument``, attached to the node.

    ``packages`` are on their path: the client of this tree, and its entry points.
    """

    python: Path
    node: Node
    packages: str

    def popen(
        self,
        *command: object,
        service: str,
        pipes: bool = True,
        pass_fds: tuple[int, ...] = (),
        more: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start one; leave the ``with`` block of it to wait for its end."""
        pipe = subprocess.PIPE if pipes else None
        return subprocess.Popen(
            [self.python.parent / "opentelemetry-instrument", *map(str, command)],
            env={
                **clean_environment(),
                **self.node.client_environment(service),
                "PATH": f"{self.python.parent}:/usr/bin:/bin",
                "PYTHONPATH": self.packages,
                "OTEL_SERVICE_NAME": service,
                "OTEL_PYTHON_DISTRO": "backsight",
                "OTEL_PYTHON_CONFIGURATOR": "backsight",
                **(more or {}),
            },
            cwd=APPS,
            pass_fds=pass_fds,
            stdin=pipe,
            stdout=pipe,
            text=True,
        )

    def run(self, *command: object, service: str = "shop", **environment: str) -> str:
        """Its output, at its end, which is a good one."""
        with self.popen(*command, service=service, more=environment) as process:
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return output

    def peek(self, trace: str) -> TraceView:
        """What the node has of a trace."""
        return self.node.control.peek(TraceId(bytes.fromhex(trace.strip())))


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tree's package as if it was installed: with the entry points of pyproject.toml."""
    directory = tmp_path_factory.mktemp("packages")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    installed = directory / f"{project['name']}-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n"
    )
    entry_points = configparser.ConfigParser()
    entry_points.read_dict(project["entry-points"])
    with (installed / "entry_points.txt").open("w") as file:
        entry_points.write(file)
    return f"{REPOSITORY / 'build/native/python'}:{directory}"


@pytest.fixture
def instrumented(daemon: Node, packages: str) -> Instrumented:
    return Instrumented(made_once("apps", APPS / "requirements.txt"), daemon, packages)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Node]:
    # Alone, so that what is triggered can be read here.
    with lone_node(tmp_path, Cores.choose(), {}) as daemon:
        yield daemon


@pytest.fixture
def application(python: Path, daemon: Node) -> Application:
    return Application(python, daemon)
