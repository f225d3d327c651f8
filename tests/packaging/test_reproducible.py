# SPDX-License-Identifier: Apache-2.0
"""The same sources give the same packages, byte by byte."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]


def digests(dist: Path) -> dict[str, str]:
    return {
        str(path.relative_to(dist)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in dist.rglob("*")
        if path.is_file()
    }


def build_elsewhere(builder: Path, dist: Path, suite: str) -> None:
    """As somebody with other habits would, and one processor: so one job at a time."""
    processor = min(os.sched_getaffinity(0))
    subprocess.run(
        ["taskset", "--cpu-list", str(processor), builder, dist, suite],
        env={**os.environ, "TZ": "Asia/Kathmandu", "LC_ALL": "tr_TR.UTF-8", "HOME": "/nonexistent"},
        umask=0o077,
        check=True,
    )


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_two_builds_of_the_deb_are_the_same(
    suite: str, repository: Path, debs_of: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    one = digests(debs_of(suite)[0].parent)
    # Eight packages, the symbols of four of them, and three files of their source.
    assert len(one) == 15
    build_elsewhere(repository / "packaging/build-deb", tmp_path, suite)
    assert digests(tmp_path) == one


def test_two_builds_of_the_rpm_are_the_same(repository: Path, tmp_path: Path) -> None:
    builder = repository / "packaging/build-rpm"
    subprocess.run([builder, tmp_path / "one", "bookworm"], check=True)
    one = digests(tmp_path / "one")
    assert len(one) == 9
    build_elsewhere(builder, tmp_path / "other", "bookworm")
    assert digests(tmp_path / "other") == one
