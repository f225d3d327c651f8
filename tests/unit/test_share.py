# SPDX-License-Identifier: Apache-2.0
"""A share of the tests: others each time, the same by the same seed, one at least, and none too late."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FILES = "abcd"
TESTS = 5


def run(repository: Path, directory: Path, share_s: float, seed: int) -> tuple[list[str], int]:
    """The tests that were run, in order, and how many are said to be left."""
    for name in FILES:
        (directory / f"test_{name}.py").write_text(
            "".join(f"def test_{name}{number}(): pass\n" for number in range(TESTS))
        )
    command: list[str | Path] = ["-m", "pytest", "-v", "-p", "tests.conftest", "-p", "tests.share"]
    command += ["-c", repository / "pyproject.toml", "--rootdir", directory]
    command += ["--share-s", str(share_s), directory]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=repository,
        env={**os.environ, "BACKSIGHT_NEW_SEEDS": str(seed)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    left = re.search(r"^(\d+) tests are left for other runs$", done.stdout, re.MULTILINE)
    assert left is not None, done.stdout
    return re.findall(r"::test_(\w\d) PASSED", done.stdout), int(left.group(1))


def test_all_are_run_where_there_is_time_in_an_order_that_the_seed_draws(
    repository: Path, tmp_path: Path
) -> None:
    runs = [run(repository, tmp_path, 1e6, seed) for seed in (1, 1, 2)]
    everything = sorted(f"{name}{number}" for name in FILES for number in range(TESTS))
    for ran, left in runs:
        assert sorted(ran) == everything
        assert left == 0
        files = [name[0] for name in ran]
        assert files == sorted(files, key=files.index), "the tests of a file are not together"
    assert runs[0] == runs[1] != runs[2]


def test_none_begins_when_the_time_is_over_but_the_first(repository: Path, tmp_path: Path) -> None:
    ran, left = run(repository, tmp_path, 0, seed=1)
    assert len(ran) == 1
    assert left == len(FILES) * TESTS - 1


def test_what_comes_before_the_first_test_takes_none_of_the_time(
    repository: Path, tmp_path: Path
) -> None:
    """Such as to find the tests, which takes as long as it likes."""
    (tmp_path / "conftest.py").write_text(
        "import time\n"
        "before = time.monotonic\n"
        "def pytest_collection_finish(): time.monotonic = lambda: before() + 1e7\n"
    )
    _, left = run(repository, tmp_path, 1e6, seed=1)
    assert left == 0
