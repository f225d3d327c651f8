# SPDX-License-Identifier: Apache-2.0
"""bench/run --base: another commit is built beside this tree, and both are measured in turn."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_commit_is_measured_in_turn_with_this_tree(
    build: Path, repository: Path, tmp_path: Path
) -> None:
    output = tmp_path / "native.jsonl"
    done = subprocess.run(
        [repository / "bench/run", "--quick", "--base", "HEAD", "--output", output,
         "--only", "idle", "--only", "horizon"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    commit = json.loads(output.with_suffix(".about.json").read_text())["base"]
    turns = re.findall(r"^(idle|horizon), round (\d) of 3, (.*):$", done.stdout, re.MULTILINE)
    sides = [commit, "this tree"]
    assert turns == [
        (metric, str(number + 1), side)
        for metric in ("idle", "horizon")
        for number in range(3)
        for side in (sides if number % 2 == 0 else reversed(sides))
    ]
    # What ran was that commit's, of which everything lies in build/base.
    assert (build / "base/tree/build/native/src/client/libbacksight.so").exists()
    before, after = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (tmp_path / "base.jsonl", output)
    )
    assert [one["metric"] for one in before] == [one["metric"] for one in after]
    tables = (tmp_path / "compared.md").read_text()
    first_rows = dict(re.findall(r"^### (\w+)\n\n.*\n.*\n(.*)$", tables, re.MULTILINE))
    assert set(first_rows) >= {"horizon_ratio", "payload_share"}
    for metric in ("horizon_ratio", "payload_share"):
        assert re.search(r" \| \*\*[\d.]+\*\* \|", first_rows[metric])


def test_what_is_no_commit_is_said(repository: Path) -> None:
    done = subprocess.run(
        [repository / "bench/run", "--quick", "--base", "no-such-commit"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "BASE=no-such-commit: no commit of this repository" in done.stderr
