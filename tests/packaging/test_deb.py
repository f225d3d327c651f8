# SPDX-License-Identifier: Apache-2.0
"""The .deb, installed on a plain Debian that is booted: services from boot to purge."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.machines import Machine, tree_with
from tests.packaging.installed import (
    check_services,
    check_traces,
    configure,
    end_node,
    files,
    hang_node,
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
    dist = packages[0].parent
    (source,) = dist.glob("*.dsc")
    symbols = list(dist.glob("dbgsym/*.deb"))
    assert symbols
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error,warning", *packages, *symbols, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_each_python_that_a_debian_has_will_do(packages: list[Path]) -> None:
    """What is compiled goes by the stable ABI."""
    for package in packages:
        depends = field(package, "Depends")
        assert not re.search(r"\bpython3\.\d|\bpython3(:any)? \(<", depends), (package, depends)


def test_each_release_has_versions_of_its_own(suite: str, packages: list[Path]) -> None:
    """The later one has the newer: apt replaces those of the release before."""
    suffix = {"bookworm": "~deb12u1", "trixie": "~deb13u1"}[suite]
    versions = {field(package, "Version") for package in packages}
    assert {version[-len(suffix) :] for version in versions} == {suffix}
    assert len(versions) == 1


def test_an_upgrade_of_debian_removes_nothing(
    repository: Path, debs_of: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    tree = tree_with(debs_of("bookworm"), "bookworm", tmp_path)

    def apt(*words: str) -> str:
        in_tree = (str(repository / "packaging/in-tree"), str(tree))
        command = [*in_tree, "sh", "-c", f"apt-get {' '.join(words)}"]
        return subprocess.check_output(command, text=True)

    apt("install --yes --no-install-recommends /dist/*.deb")
    sources = tree / "etc/apt/sources.list"
    sources.write_text(sources.read_text().replace("bookworm", "trixie"))
    apt("update")
    planned = apt("full-upgrade --simulate")
    # It is an upgrade at all: to another Python.
    assert re.search(r"^Inst python3 \[3\.11", planned, re.MULTILINE)
    assert re.findall(r"^Remv \S*backsight\S*", planned, re.MULTILINE) == []


def field(package: Path, name: str) -> str:
    """What a package says of itself."""
    command = ["dpkg-deb", "--field", str(package), name]
    return subprocess.check_output(command, text=True).strip()


def test_symbols_are_of_what_is_installed(packages: list[Path], tmp_path: Path) -> None:
    """All of it, and in a folder of their own: nobody gets them who names all packages."""
    assert [package.name for package in packages if "-dbgsym_" in package.name] == []
    for package in packages:
        subprocess.run(["dpkg-deb", "--extract", package, tmp_path / "installed"], check=True)
    for symbols in packages[0].parent.glob("dbgsym/*.deb"):
        subprocess.run(["dpkg-deb", "--extract", symbols, tmp_path / "symbols"], check=True)
    compiled = [
        path
        for path in (tmp_path / "installed").rglob("*")
        if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF"
    ]
    assert len(compiled) == 4
    for path in compiled:
        identifier = readelf("--notes", path, r"Build ID: (\w+)")
        there = f"usr/lib/debug/.build-id/{identifier[:2]}/{identifier[2:]}.debug"
        # Of sources of ours, by name.
        readelf(
            "--debug-dump=info", tmp_path / "symbols" / there, r"DW_AT_name .*: (\S*native\S*\.c)\n"
        )


def readelf(option: str, path: Path, pattern: str) -> str:
    """The first place that matches, of what readelf says of a file."""
    said = subprocess.check_output(["readelf", option, path], text=True)
    found = re.search(pattern, said)
    assert found is not None, (path, option)
    return found[1]


def test_from_installation_to_purge(machine: Machine) -> None:
    # Others recommend them, or are of that importance: apt keeps them.
    machine.sh("apt-get install --yes --no-install-recommends python3 passwd")
    files_before, users_before = files(machine), users(machine)
    machine.sh("apt-get install --yes --no-install-recommends /dist/*.deb")
    check_services(machine)
    configure(machine)
    check_traces(machine, (kill_node, end_node, restart_node, hang_node, misconfigure_node))
    machine.halt()
    machine.boot()
    check_services(machine)
    check_traces(machine, ())
    machine.sh("apt-get purge --yes '*backsight*'; apt-get autoremove --purge --yes")
    assert files(machine) - files_before == set()
    assert "backsight" not in machine.run("ls", "/run").split()
    assert users(machine) == users_before
    assert "backsight" not in machine.run("systemctl", "list-unit-files")
    # Somebody's own account stays.
    machine.run("useradd", "--create-home", "backsight")
    machine.sh("apt-get install --yes --no-install-recommends /dist/*.deb")
    machine.sh("apt-get purge --yes '*backsight*'; apt-get autoremove --purge --yes")
    assert [line for line in users(machine) if "backsight" in line] != []
