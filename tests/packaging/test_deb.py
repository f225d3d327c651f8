# SPDX-License-Identifier: Apache-2.0
"""The .deb, installed on a plain Debian that is booted: services from boot to purge."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.machines import Machine, tree_with
from tests.packaging.installed import (
    check_services,
    check_traces,
    configure,
    files,
    kill_node,
    misconfigure_node,
    restart_node,
    users,
)

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def suite(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def packages(suite: str, debs_of: Callable[[str], list[Path]]) -> list[Path]:
    return debs_of(suite)


@pytest.fixture(scope="module")
def machine(
    suite: str, packages: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("machine")
    with Machine("web-1", tree_with(packages, suite, directory), directory) as machine:
        yield machine


def test_lintian_finds_nothing(packages: list[Path]) -> None:
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error,warning", *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_from_installation_to_purge(machine: Machine) -> None:
    # Others recommend them, or are of that importance: apt keeps them.
    machine.sh("apt-get install --yes --no-install-recommends python3 passwd")
    files_before, users_before = files(machine), users(machine)
    machine.sh("apt-get install --yes --no-install-recommends /dist/*.deb")
    check_services(machine)
    configure(machine)
    check_traces(machine, (kill_node, kill_node, restart_node, misconfigure_node))
    machine.halt()
    machine.boot()
    check_services(machine)
    check_traces(machine, ())
    machine.sh("apt-get purge --yes '*backsight*'; apt-get autoremove --purge --yes")
    assert files(machine) - files_before == set()
    assert users(machine) == users_before
    assert "backsight" not in machine.run("systemctl", "list-unit-files")
