# SPDX-License-Identifier: Apache-2.0
"""What all tests share: paths, what marks mean, and how Hypothesis behaves."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build"


def pytest_configure(config: pytest.Config) -> None:
    # Programs that tests start find the same packages as the tests.
    os.environ["PYTHONPATH"] = os.pathsep.join(str(path) for path in config.getini("pythonpath"))
    os.environ["PYTHONPYCACHEPREFIX"] = str(BUILD / ".pycache")
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(BUILD / ".hypothesis")
    # Nobody attaches to the node of the machine that the tests run on.
    os.environ["BACKSIGHT_SOCKET"] = str(BUILD / "no-node.sock")
    # What tests read is not the journal, though it may be our own standard error.
    os.environ.pop("JOURNAL_STREAM", None)
    # No deadline per example: it is wall-clock time, on machines that are busy.
    hypothesis.settings.register_profile("backsight", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("backsight")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root: sudo make test")


@pytest.hookimpl(hookwrapper=True)  # type: ignore[untyped-decorator] # Debian's pluggy has no types
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Turn the skip of an eBPF test into a failure where eBPF is required.

    Whoever sets BACKSIGHT_REQUIRE_EBPF=1 says that this kernel can run the
    probes, so that nothing passes for tested that was not.
    """
    outcome = yield
    report = outcome.get_result()
    required = os.environ.get("BACKSIGHT_REQUIRE_EBPF") == "1"
    if required and report.skipped and item.get_closest_marker("bpf"):
        report.outcome = "failed"
        report.longrepr = f"skipped where BACKSIGHT_REQUIRE_EBPF=1: {report.longrepr}"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def build(repository: Path) -> Path:
    """The build directory, with what `make build` makes."""
    if not (BUILD / "build.ninja").is_file():
        pytest.fail(f"{BUILD} is not built: run `make build` (or `sudo make test`) first")
    return BUILD
