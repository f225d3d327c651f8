# SPDX-License-Identifier: Apache-2.0
"""Random fault schedules, each from one seed, which names it.

/usr/bin/python3 -m tests.simulation --seed N --trace
"""

from __future__ import annotations

import multiprocessing
import os
import traceback

import pytest

from tests.simulation.faults import run_schedule

QUICK = 300
MANY = 10_000

# Of these the simulator once asked for more than can be had: two firings in the same instant,
# a daemon that doubts what its predecessor left, and a trigger of a machine that then dies.
SEEN = (5729, 7451, 8889)


def _failure_of(seed: int) -> str | None:
    try:
        run_schedule(seed)
    except Exception:  # noqa: BLE001 # whatever a core raises is a finding of this seed
        return f"seed {seed}: {traceback.format_exc(limit=-3)}"
    return None


def _check(seeds: range) -> None:
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        outcomes = list(pool.imap(_failure_of, seeds, chunksize=20))
    failures = [failure for failure in outcomes if failure is not None]
    assert len(outcomes) == len(seeds)
    assert not failures, f"{len(failures)} of {len(seeds)} schedules failed:\n" + "\n".join(
        failures[:20]
    )


@pytest.mark.timeout(600)
def test_random_fault_schedules() -> None:
    _check(range(QUICK))


@pytest.mark.parametrize("seed", SEEN)
def test_a_schedule_that_failed_once(seed: int) -> None:
    run_schedule(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_random_fault_schedules() -> None:
    _check(range(QUICK, QUICK + MANY))


def test_a_seed_gives_the_same_run_again() -> None:
    runs = [run_schedule(7, trace_log=True).log_lines for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0]) > 100
