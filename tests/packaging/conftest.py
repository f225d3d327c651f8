# SPDX-License-Identifier: Apache-2.0
"""Packages for a release of Debian, built once for all tests."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def debs_of(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Path]]:
    """The .deb of this tree for a release of Debian."""

    @functools.cache
    def build(suite: str) -> list[Path]:
        dist = tmp_path_factory.mktemp(f"dist-{suite}")
        subprocess.run([repository / "packaging/build-deb", dist, suite], check=True)
        return sorted(dist.glob("*.deb"))

    return build
