# SPDX-License-Identifier: Apache-2.0
"""Virtual environments, for what applications get from PyPI and no daemon may see."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

DISTRIBUTION = "/usr/bin/python3"

_REPOSITORY = Path(__file__).parents[1]


def clean_environment() -> dict[str, str]:
    """Ours, without what leads a Python, a loader or an application to this tree."""
    ours = ("PYTHON", "LD_LIBRARY_PATH", "BACKSIGHT_", "OTEL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def run(command: list[str | Path], directory: Path) -> str:
    """What it prints; AssertionError with that if it fails."""
    done = subprocess.run(
        command,
        cwd=directory,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def new_environment(python: str, directory: Path) -> Path:
    """The Python of a new virtual environment."""
    run([python, "-m", "venv", "--clear", directory], directory.parent)
    return directory / "bin/python"


def pip(python: Path, *arguments: str | Path) -> None:
    run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], python.parent)


def made_once(name: str, requirements: Path) -> Path:
    """The Python of build/venv-NAME, which has these requirements; others wait for who makes it."""
    directory = _REPOSITORY / "build" / f"venv-{name}"
    wanted = requirements.read_text()
    stamp = directory / ".installed"
    directory.parent.mkdir(exist_ok=True)
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != wanted:
            python = new_environment(DISTRIBUTION, directory)
            pip(python, "install", "--requirement", requirements)
            stamp.write_text(wanted)
    return directory / "bin/python"


def otel_python() -> Path:
    """A Python with OpenTelemetry's SDK, for applications in tests and benchmarks."""
    return made_once("otel", _REPOSITORY / "tests/otel/requirements.txt")
