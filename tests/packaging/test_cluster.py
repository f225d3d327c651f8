# SPDX-License-Identifier: Apache-2.0
"""The cluster of vagrant/: what Vagrant says of it, and what becomes of it in containers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.cluster import Cluster
from tests.packaging.story import Story


def validate(
    repository: Path, directory: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # What it would run machines with is not here.
        ["vagrant", "validate", "--ignore-provider"],
        cwd=repository / "vagrant",
        env={
            **os.environ,
            "VAGRANT_HOME": str(directory),
            "VAGRANT_DOTFILE_PATH": str(directory / "state"),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("nodes", ["1", "3", "7"])
def test_vagrant_accepts_the_cluster(repository: Path, tmp_path: Path, nodes: str) -> None:
    done = validate(repository, tmp_path, BACKSIGHT_NODES=nodes, BACKSIGHT_PACKAGES=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"node-{nodes}:" in done.stdout
    assert f"node-{int(nodes) + 1}:" not in done.stdout


def test_vagrant_is_told_of_numbers_that_are_none(repository: Path, tmp_path: Path) -> None:
    done = validate(repository, tmp_path, BACKSIGHT_NODES="0")
    assert done.returncode != 0
    assert "BACKSIGHT_NODES=0: want 1 to 200" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(1800)
def test_a_cluster_of_machines(debs_of: Callable[[str], list[Path]], tmp_path: Path) -> None:
    with Cluster(debs_of("bookworm"), 3, tmp_path, print) as cluster:
        result = Story(cluster, print).tell()
    assert result.problems() == [], result
    assert (result.nodes, result.traces) == (3, 15)
