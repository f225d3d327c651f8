# SPDX-License-Identifier: Apache-2.0
"""What `pip install` gives to an application, whose Python knows nothing of this tree.

pip fetches what the wheel is built with, so these tests need the network.
"""

from __future__ import annotations

import configparser
import email
import json
import secrets
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctl.node import NodeClient
from protocol.messages import TraceId
from testbed.daemons import Cores, node
from testbed.topology import Node
from testbed.venvs import DISTRIBUTION, clean_environment, new_environment, pip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEWER = (12, 13, 14)  # one wheel is for all of them

# Says which files it runs from, and what it wrote.
PROGRAM = """
import dataclasses, json, sys, backsight

attached = backsight.wait_attached(float(sys.argv[2]))
with backsight.Trace(sys.argv[1]) as trace:
    trace.span_start(1, 0, 1_700_000_000_000_000_000, "GET /cart")
    trace.write(b"seen")
    trace.span_end(1, 1_700_000_000_001_000_000)
with open("/proc/self/maps") as maps:
    libraries = sorted({line.split()[-1] for line in maps if "libbacksight" in line})
print(json.dumps({
    "attached": attached,
    "package": backsight.__file__,
    "libraries": libraries,
    "stats": dataclasses.asdict(backsight.stats()),
}))
"""


def pythons() -> list[str]:
    """The distribution's, and the newer ones that are on the path and run."""
    found = [shutil.which(f"python3.{minor}") for minor in NEWER]
    return [DISTRIBUTION] + [
        path
        for path in found
        if path
        and not subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode
    ]


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    # Debian's pip is in no package that we ask for; every virtual environment has one.
    python = new_environment(DISTRIBUTION, directory / "builder")
    pip(python, "wheel", "--no-deps", "--wheel-dir", directory, repository)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module", params=pythons())
def python(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Python in which the wheel is installed, and what it requires."""
    installed = new_environment(request.param, tmp_path_factory.mktemp("application") / "venv")
    pip(installed, "install", wheel)
    return installed


@pytest.fixture(scope="module")
def daemon(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    assert build.is_dir()
    with node(tmp_path_factory.mktemp("node"), Cores.choose(), {}) as daemon:
        yield daemon


def trace(
    python: Path, directory: Path, trace_id: str, timeout_s: float, environment: dict[str, str]
) -> Any:
    done = subprocess.run(
        [python, "-c", PROGRAM, trace_id, str(timeout_s)],
        cwd=directory,
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_it_holds_the_client_and_nothing_else(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = repository / "native/python/backsight"
    sources = {
        f"backsight/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.suffix in (".py", ".pyi", ".typed")
    }
    built = {"backsight/libbacksight.so.0", "backsight/_native.abi3.so"}
    assert {name for name in names if ".dist-info/" not in name} == sources | built
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_what_meson_installs_says_the_same_of_itself(wheel: Path, build: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        said = {
            Path(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    installed = build / "native/python/backsight"

    def fields(text: str) -> dict[str, set[str]]:
        message = email.message_from_string(text)
        names = ("Name", "Version", "Summary", "Requires-Python", "Requires-Dist", "Provides-Extra")
        # As different writers quote and space the same.
        plain = str.maketrans("", "", " \"'")
        return {name: {v.translate(plain) for v in message.get_all(name, ())} for name in names}

    assert fields((installed / "METADATA").read_text()) == fields(said["METADATA"])

    def points(text: str) -> dict[str, dict[str, str]]:
        parser = configparser.ConfigParser()
        parser.read_string(text)
        return {section: dict(parser[section]) for section in parser.sections()}

    assert points((installed / "entry_points.txt").read_text()) == points(said["entry_points.txt"])


def test_it_traces_to_a_node(python: Path, daemon: Node, tmp_path: Path) -> None:
    trace_id = secrets.token_hex(16)
    said = trace(python, tmp_path, trace_id, 30.0, daemon.client_environment("shop"))
    package = Path(said["package"]).parent
    assert package.is_relative_to(python.parent.parent)
    assert said["libraries"] == [str(package / "libbacksight.so.0")]
    assert said["attached"]
    assert (said["stats"]["runs"], said["stats"]["records_lost"]) == (1, 0)

    held = NodeClient(str(daemon.socket_path)).peek(TraceId(bytes.fromhex(trace_id)))
    (part,) = held.slices
    assert part.complete
    assert [span.name for span in part.content.spans] == ["GET /cart"]


def test_a_program_runs_without_a_node(python: Path, tmp_path: Path) -> None:
    said = trace(
        python,
        tmp_path,
        secrets.token_hex(16),
        0.0,
        {"BACKSIGHT_SOCKET": str(tmp_path / "none.sock")},
    )
    assert not said["attached"]
    assert (said["stats"]["runs"], said["stats"]["records_lost"]) == (0, 3)
