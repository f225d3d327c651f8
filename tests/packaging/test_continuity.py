# SPDX-License-Identifier: Apache-2.0
"""Daemons are killed and upgraded under load, as packages and systemd do it: nothing is lost."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.machines import Machine, tree_with
from tests.packaging.installed import AS_NOBODY, configure, kill, verdicts_now

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]

BUILD = Path(__file__).parents[2] / "build"

# Full after half a minute, so that it has a horizon.
SMALL_POOL = "pool_bytes: 64MiB\n"

APPLICATIONS = 2
TRACES_PER_S = 5000 // APPLICATIONS
# 25 triggers a second of each application: a node takes 100 a second of one name.
TRIGGER_EVERY = 100

KILLS = 20
# The code that is upgraded from, until there is a release: that will be its tag.
PREVIOUS = "6a644de1d66c6b10fdd76794ecd819d79ad5b25f"

# So many triggers, of all applications, must follow what was done to a daemon.
TRIGGERS_BETWEEN = 20


class Load:
    """Applications that record, and that trigger now and then."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._seen: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.triggered: list[str] = []
        self.results: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        command = (*AS_NOBODY, "/srv/steady")
        for _ in range(APPLICATIONS):
            process = self._machine.popen(*command, str(TRACES_PER_S), str(TRIGGER_EVERY))
            self._processes.append(process)
            reader = threading.Thread(target=self._read, args=(process,))
            reader.start()
            self._readers.append(reader)
        try:
            yield
        finally:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.close()
            for reader in self._readers:
                reader.join()
            for process in self._processes:
                process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.results.append(json.loads(line))
            elif line != "attached\n":
                self.triggered.append(line.strip())
                self._seen.put(line)

    def goes_on(self) -> None:
        """Until so many more triggers have fired from now on."""
        for _ in range(self._seen.qsize() + TRIGGERS_BETWEEN):
            self._seen.get(timeout=60)


def previous(repository: Path, directory: Path) -> list[Path]:
    """Packages of an earlier commit, with a version before any of ours."""
    source, dist = directory / "source", directory / "dist"
    git = ("git", "-c", "advice.detachedHead=false")
    subprocess.run([*git, "clone", "--quiet", "--no-checkout", repository, source], check=True)
    subprocess.run([*git, "-C", source, "checkout", "--quiet", PREVIOUS], check=True)
    subprocess.run([source / "packaging/build-deb", dist, "bookworm"], check=True)
    made = []
    for deb in sorted(dist.glob("*.deb")):
        tree = directory / deb.stem
        subprocess.run(["dpkg-deb", "--raw-extract", deb, tree], check=True)
        control = tree / "DEBIAN/control"
        text = control.read_text()
        (version,) = re.findall(r"^Version: (\S+)$", text, re.MULTILINE)
        control.write_text(text.replace(version, f"{version.rpartition('-')[0]}-0"))
        made.append(directory / f"previous-{deb.name}")
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "--build", tree, made[-1]],
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return made


@pytest.fixture(scope="module")
def machine(
    repository: Path,
    debs_of: Callable[[str], list[Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("machine")
    tree = tree_with(debs_of("bookworm"), "bookworm", directory)
    (tree / "previous").mkdir()
    for deb in previous(repository, directory):
        deb.rename(tree / "previous" / deb.name)
    shutil.copy(BUILD / "tests/steady", tree / "srv")
    with Machine("web-1", tree, directory) as machine:
        machine.sh("apt-get install --yes --no-install-recommends /previous/*.deb")
        configure(machine, SMALL_POOL)
        yield machine


def verdicts_at_last(machine: Machine) -> dict[str, str]:
    """By trace, once the node has reported all, and each is judged."""
    found: dict[str, str] = {}
    while not found or "provisional" in found.values():
        while json.loads(machine.run("backsightctl", "status", "--json"))["triggers_unreported"]:
            pass
        found = verdicts_now(machine)
    return found


def versions(machine: Machine) -> str:
    return machine.run("dpkg-query", "--show", "--showformat=${Version}\n", "*backsight*")


def horizon_s(machine: Machine) -> float:
    """How far back the pool reaches."""
    metrics = machine.run("curl", "-s", "localhost:4771/metrics")
    (found,) = re.findall(r"^backsight_node_event_horizon_seconds (\S+)$", metrics, re.MULTILINE)
    return float(found)


def test_applications_notice_nothing_of_kills_and_an_upgrade(machine: Machine) -> None:
    assert set(re.findall(r"-\S*$", versions(machine), re.MULTILINE)) == {"-0"}
    load = Load(machine)
    with load.running():
        load.goes_on()
        for _ in range(KILLS):
            kill(machine, "backsight-node")
            kill(machine, "backsight-probes")
            load.goes_on()
        # A service manager that is upgraded itself hands over what it keeps.
        machine.run("systemctl", "daemon-reexec")
        kill(machine, "backsight-node")
        load.goes_on()
        while not horizon_s(machine):
            pass
        said = machine.sh("apt-get install --yes --no-install-recommends /dist/*.deb")
        assert f"{len(list((machine.root / 'dist').iterdir()))} upgraded" in said, said
        load.goes_on()
        assert horizon_s(machine) > 0
        machine.run("systemctl", "restart", "backsight-node", "backsight-probes")
        assert horizon_s(machine) > 0
        load.goes_on()
    assert not re.search(r"-0$", versions(machine), re.MULTILINE)
    for result in load.results:
        print(f"{result['traces'] * 1e9 / result['elapsed_ns']:.0f} traces/s: {result}")
        assert (result["errors"], result["lost"], result["blocked"]) == (0, 0, 0), result
        # Memory that is met for the first time is met beforehand, by a thread of the library.
        assert result["faulted"] <= result["traces"] / 10_000
    assert len(load.results) == APPLICATIONS
    found = verdicts_at_last(machine)
    print(f"{len(load.triggered)} triggered")
    assert {trace: found.get(trace) for trace in load.triggered} == dict.fromkeys(
        load.triggered, "coherent"
    )
