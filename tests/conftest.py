# SPDX-License-Identifier: Apache-2.0
"""What all tests share: paths, what marks mean, and how Hypothesis behaves."""

from __future__ import annotations

import faulthandler
import os
import secrets
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build"

# Characters, or bytes, of a parameter in the name of a test.
_ID_MAX = 80

# Capturing leaves it alone.
STDERR = pytest.StashKey[TextIO]()

# Tests that draw lots take new ones in each run. The first of them stands in the head of what
# pytest prints; with it set, a run draws the same again.
_NEW_SEEDS = "BACKSIGHT_NEW_SEEDS"


def new_seeds(count: int) -> range:
    """So many seeds that no run has had before, by all odds."""
    first = int(os.environ[_NEW_SEEDS])
    return range(first, first + count)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "hang",
        "seconds that a test which timed out, and that the fixtures of any test, may take to end",
        default="60",
    )


def pytest_report_header() -> str:
    return f"new seeds: {_NEW_SEEDS}={os.environ[_NEW_SEEDS]}"


def pytest_configure(config: pytest.Config) -> None:
    # Workers of this run inherit it.
    os.environ.setdefault(_NEW_SEEDS, str(1_000_000 + secrets.randbelow(1 << 40)))
    assert sys.__stderr__ is not None
    config.stash[STDERR] = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")
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


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[STDERR].close()


def end_if_it_hangs(item: pytest.Item, timeout_s: float) -> None:
    """End this process, with the tracebacks of all threads, unless the test ends in that time.

    A timeout is an exception in the main thread. It is not seen by C code that waits for ever,
    and what runs because of it may wait for ever too, as may fixtures. Then all the tests hang.
    """
    hang_s = float(item.config.getini("hang"))
    faulthandler.dump_traceback_later(timeout_s + hang_s, exit=True, file=item.config.stash[STDERR])


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    end_if_it_hangs(item, settings.timeout)


@pytest.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator]
def pytest_runtest_teardown(item: pytest.Item) -> None:
    # After a failure there is neither a timeout any more, nor this.
    end_if_it_hangs(item, 0)


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Leave a long value out of the name of a test: a megabyte of zeros takes four there."""
    is_long = isinstance(val, bytes | str) and len(val) > _ID_MAX
    return argname if is_long else None


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
