# SPDX-License-Identifier: Apache-2.0
"""Virtual environments, for what applications get from PyPI and no daemon may see."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
from collections.abc import Iterator
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


def made_once(name: str, *requirements: Path, client: bool = False) -> Path:
    """The Python of build/venv-NAME, which has these requirements; others wait for who makes it.

    ``client``: and ``backsight[otel]`` as the tree has it, installed as users do.
    """
    directory = _REPOSITORY / "build" / f"venv-{name}"
    python = directory / "bin/python"
    directory.parent.mkdir(exist_ok=True)
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = "".join(file.read_text() for file in requirements)
        with _stamped(directory / ".installed", wanted) as is_new:
            if is_new:
                new_environment(DISTRIBUTION, directory)
                pip(python, "install", *(f"--requirement={file}" for file in requirements))
        if client:
            with _stamped(directory / ".client", _client_sources()) as is_other:
                if is_other:
                    pip(python, "install", f"{_REPOSITORY}[otel]")
    return python


@contextlib.contextmanager
def _stamped(stamp: Path, wanted: str) -> Iterator[bool]:
    """Whether there is something to do, because the stamp says something else than what is wanted."""
    differs = not stamp.is_file() or stamp.read_text() != wanted
    yield differs
    if differs:
        stamp.write_text(wanted)


def _client_sources() -> str:
    """A digest of what the wheel is made of."""
    files = [_REPOSITORY / name for name in ("pyproject.toml", "meson.build", "meson_options.txt")]
    for folder in ("native/include", "native/src", "native/python"):
        files += sorted(path for path in (_REPOSITORY / folder).rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(
            f"{file.relative_to(_REPOSITORY)} {file.stat().st_size}\n".encode() + file.read_bytes()
        )
    return digest.hexdigest()


def otel_python() -> Path:
    """A Python with OpenTelemetry's SDK, for applications in tests and benchmarks."""
    return made_once("otel", _REPOSITORY / "testbed/apps/otel-requirements.txt")
