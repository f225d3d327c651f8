# SPDX-License-Identifier: Apache-2.0
"""What kubectl says. It comes from Kubernetes: that of Debian 12 is too old for our kustomizations."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def kustomize(folder: Path) -> str:
    """The objects that it would apply; the test is skipped where there is none."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl 1.22 or later")
    done = subprocess.run(
        [kubectl, "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
