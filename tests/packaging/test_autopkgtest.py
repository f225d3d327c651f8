# SPDX-License-Identifier: Apache-2.0
"""What the source package brings to be tested with (packaging/debian/tests), run by autopkgtest."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.machines import Machine, tree_with

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1200)]

# The program, and what it and the tests want of Debian.
OTHERS = ("autopkgtest", "dpkg-dev", "gcc", "libc6-dev", "pkgconf")

# The machine is a container of its own, and is thrown away.
COMMAND = (
    "autopkgtest --no-built-binaries"
    " --ignore-restrictions=isolation-container,isolation-machine,breaks-testbed"
    " /dist/*.deb /source/ -- null 2>&1"
)


def test_each_of_them_passes(
    repository: Path, debs_of: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    tree = tree_with(debs_of("bookworm"), "bookworm", tmp_path, OTHERS)
    shutil.copytree(repository / "packaging/debian", tree / "source/debian")
    with Machine("web-1", tree, tmp_path) as machine:
        machine.run("apt-get", "install", "--yes", "--no-install-recommends", OTHERS[0])
        said = machine.run("sh", "-c", COMMAND, check=False)
    control = (repository / "packaging/debian/tests/control").read_text()
    (summary,) = re.findall(r"@@@ summary\n(.*?)\nautopkgtest ", f"{said}\nautopkgtest ", re.DOTALL)
    results = dict(line.split()[:2] for line in summary.splitlines())
    expected = re.findall(r"^Tests: (\S+)$", control, re.MULTILINE)
    assert results == dict.fromkeys(expected, "PASS"), said
