# SPDX-License-Identifier: Apache-2.0
"""Many processes come and go: all are taken in, and systemd answers everybody else meanwhile.

``pytest -s`` prints how often it answered, and what took it longest.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.machines import Machine, tree_with
from tests.packaging.installed import AS_NOBODY, configure

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
STEADY = HERE.parents[1] / "build/tests/steady"

CROWD = (*AS_NOBODY, "/srv/crowd.py")
WAVE = 700
LOOPS, PROCESSES = 4, 700
ANSWERS = 50
"""With four file descriptors stored of each process there were two of them, in 25 s."""


@pytest.fixture(scope="module")
def machine(
    debs_of: Callable[[str], list[Path]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("machine")
    tree = tree_with(debs_of("bookworm"), "bookworm", directory)
    shutil.copy(STEADY, tree / "srv")
    shutil.copy(HERE / "crowd.py", tree / "srv")
    with Machine("web-1", tree, directory) as machine:
        machine.sh("apt-get install --yes --no-install-recommends /dist/*.deb")
        configure(machine, "clients_max: 1024\nclients_per_user_max: 1024\n")
        yield machine


def test_a_second_wave_of_processes_attaches_as_the_first(machine: Machine) -> None:
    for _ in range(2):
        began_s = time.monotonic()
        attached = int(machine.run(*CROWD, "wave", str(WAVE)))
        print(f"{attached} of {WAVE} attached, and ended, in {time.monotonic() - began_s:.1f} s")
        assert attached == WAVE


def test_systemd_answers_while_processes_come_and_go(machine: Machine) -> None:
    with machine.popen(*CROWD, "stream", str(LOOPS), str(PROCESSES)) as crowd:
        took_s = []
        while crowd.poll() is None:
            began_s = time.monotonic()
            machine.run("systemctl", "is-active", "dbus")
            took_s.append(time.monotonic() - began_s)
        assert crowd.stdout is not None
        attached = int(crowd.stdout.read())
    print(
        f"{attached} processes attached in {sum(took_s):.1f} s; systemd answered {len(took_s)} times,"
        f" after {max(took_s):.2f} s at the longest"
    )
    assert attached == LOOPS * PROCESSES
    assert len(took_s) >= ANSWERS
