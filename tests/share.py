# SPDX-License-Identifier: Apache-2.0
"""Run a share of the tests: in an order that is drawn, as many as begin within so many seconds.

A plugin for pytest (``-p tests.share --share-s 600``). For tests that take too long to be run
all each time. The time begins with the first, so that one is always run: a run of none would
be a success. What is left for other runs is counted in the summary; it is drawn by the seed
in the head, so that a run can be repeated.
"""

from __future__ import annotations

import random
import time
from itertools import groupby

import pytest
from _pytest.terminal import TerminalReporter

from tests.conftest import new_seeds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share-s", type=float, required=True, help="begin no test so many seconds after the first"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Share(config.getoption("--share-s")))


class Share:
    """Which tests are run."""

    def __init__(self, share_s: float) -> None:
        self._share_s = share_s
        self._ends_s: float | None = None  # to find the tests takes none of it
        self._left = 0

    @pytest.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator] # Debian's pluggy has no types
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mix the files, and the tests of each: together these have a fixture once.

        After this pytest itself puts together what has the same parameter of a fixture.
        """
        rng = random.Random(new_seeds(1)[0])
        files = [list(of_file) for _, of_file in groupby(items, lambda item: item.path)]
        rng.shuffle(files)
        for of_file in files:
            rng.shuffle(of_file)
        items[:] = [item for of_file in files for item in of_file]

    @pytest.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator]
    def pytest_runtest_protocol(self) -> bool | None:
        now_s = time.monotonic()
        if self._ends_s is None:
            self._ends_s = now_s + self._share_s
            return None
        if now_s < self._ends_s:
            return None
        self._left += 1
        return True  # as if it had been run

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        terminalreporter.write_line(f"{self._left} tests are left for other runs")
