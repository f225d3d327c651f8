# SPDX-License-Identifier: Apache-2.0
"""The same sources give the same packages, byte by byte."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("builder", "packages"), [("build-deb", 8), ("build-rpm", 9)])
def test_two_builds_are_the_same(
    repository: Path, tmp_path: Path, builder: str, packages: int
) -> None:
    digests = []
    for name in ("one", "other"):
        dist = tmp_path / name
        subprocess.run([repository / "packaging" / builder, dist, "bookworm"], check=True)
        digests.append(
            {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir()}
        )
    assert len(digests[0]) == packages
    assert digests[0] == digests[1]
