# SPDX-License-Identifier: Apache-2.0
"""Random fault schedules, each from one seed, which names it.

/usr/bin/python3 -m tests.simulation --seed N --trace

Some seeds are always the same, some are new each time: see ``BACKSIGHT_NEW_SEEDS`` in the head of
what pytest prints.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback

import pytest

from tests.conftest import new_seeds
from tests.simulation.faults import run_schedule
from tests.simulation.oracle import Tally

QUICK = 200
NEW = 30
"""A change that has nothing to do with it must seldom fail by what is found: of 6,000 new ones
(590000 to 595999) none did."""
MANY = 10_000

JUDGED_MIN = 0.8
"""Of the traces that are fired, so many must have one right outcome, else schedules test too little."""

# Of these the simulator once asked for more than can be had: two firings in the same instant,
# a daemon that doubts what its predecessor left, and a trigger of a machine that then dies.
ASKED_TOO_MUCH = (5729, 7451, 8889)

# In these, nodes held for ever what nobody wanted (500582, 500870), bytes were lost that had come
# (501307), what was given up was not called so (501257), what a node had said of a trace was forgotten
# when that was closed early (510126), a trace that was whole when its node gave it up was called given
# up when it was asked for it again (515218), a snapshot that was ordered twice stopped (520843), and a
# node was told for ever to send again what it had been told to let go of (544754), or not told at all
# (550546), or refused for good (555660). A node that fired a trace was not asked for the other groups
# of it, and dropped it with its own (547348, 547393).
# Of the others the simulator asked too much: it forgot what a process had fired, looked in the moment
# after something was given up, wanted of a trace that it goes with a group that was given up when it
# was closed already (504015, 510604, 519906, 540093), or whole (548774), that something is known for
# which the report store had no room (517115, 519806, 520002), that nobody is waited for who is not
# known (541064, 541232), that what a report store had no room for the next one has not either
# (543512), that a coordinator that begins anew
# waits longer for who fired (555204), that all who fire the same tell of it (553444), that a trace
# waits for who was cut off while it wrote (561413), or that who is gone tells of what came then
# (573985). In one, what a node was told while it stood still, and then stood still for longer, came out
# of order (575115).
FOUND = (
    500582,
    500870,
    501100,
    501257,
    501307,
    502163,
    504015,
    510126,
    510604,
    515218,
    517115,
    519806,
    519906,
    520002,
    520843,
    540093,
    541064,
    541232,
    543512,
    544754,
    547348,
    547393,
    548774,
    550546,
    551859,
    553444,
    555204,
    555660,
    556698,
    561413,
    563254,
    566939,
    571677,
    573985,
    575115,
)

# In these, nodes give up several groups of a trigger that has more of them.
GIVE_UP = (4, 9, 12, 196)


def _outcome_of(seed: int) -> Tally | str:
    try:
        return run_schedule(seed).oracle.tally
    except Exception:  # noqa: BLE001 # whatever a core raises is a finding of this seed
        return f"seed {seed}: {traceback.format_exc(limit=-3)}"


def _check(seeds: range, judged_min: float = JUDGED_MIN) -> None:
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        outcomes = list(pool.imap(_outcome_of, seeds, chunksize=20))
    failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(outcomes) == len(seeds)
    assert not failures, (
        f"{len(failures)} of {len(seeds)} schedules failed; run one again by "
        f"/usr/bin/python3 -m tests.simulation --seed N --trace:\n" + "\n".join(failures[:20])
    )
    total = Tally()
    for outcome in outcomes:
        assert isinstance(outcome, Tally)
        total.add(outcome)
    print(f"{total.judged} of {total.traces} traces judged, {total.coherent} must be coherent")
    assert total.judged >= judged_min * total.traces, total


@pytest.mark.timeout(600)
def test_random_fault_schedules() -> None:
    _check(range(QUICK))


@pytest.mark.timeout(600)
def test_schedules_that_nobody_has_run_before() -> None:
    _check(new_seeds(NEW), judged_min=0)  # so few may all be of the same kind


@pytest.mark.parametrize("seed", ASKED_TOO_MUCH + FOUND)
def test_a_schedule_that_failed_once(seed: int) -> None:
    run_schedule(seed)


@pytest.mark.parametrize("seed", GIVE_UP)
def test_what_a_node_gives_up_is_what_has_the_lowest_priority(seed: int) -> None:
    assert len(run_schedule(seed).world.given_up) >= 4


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_ten_thousand_random_fault_schedules() -> None:
    _check(range(QUICK, QUICK + MANY))


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_many_schedules_that_nobody_has_run_before() -> None:
    _check(new_seeds(NEW + MANY // 10)[NEW:])


def test_a_seed_gives_the_same_run_again() -> None:
    runs = [run_schedule(7, trace_log=True).log_lines for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0]) > 100
