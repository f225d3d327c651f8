# SPDX-License-Identifier: Apache-2.0
"""The latency rule: against the vectors, and against the specification written down naively."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backsight.autotrigger import LatencyTrigger

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "checker" / "vectors.json").read_text()
)

PARAMETERS = ("quantile_permille", "warmup", "window", "factor_permille")


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["what"])
def test_the_vectors_that_the_checker_agrees_to(vector: dict[str, Any]) -> None:
    trigger = LatencyTrigger(**{name: vector[name] for name in PARAMETERS})
    fired = [i for i, ns in enumerate(vector["durations_ns"]) if trigger.observe(ns)]
    assert fired == vector["fires"]


def naive(
    durations: list[int], quantile_permille: int, warmup: int, window: int, factor_permille: int
) -> list[bool]:
    """The text of tests/checker/README.md, with the whole history and exact fractions."""
    fires = []
    for i, duration in enumerate(durations):
        before = durations[max(0, i - window) : i]
        if len(before) < warmup:
            fires.append(False)
            continue
        rank = math.ceil(Fraction(quantile_permille * len(before), 1000))
        quantile = sorted(before)[rank - 1]
        fires.append(
            Fraction(duration, quantile) > Fraction(factor_permille, 1000)
            if quantile
            else duration > 0
        )
    return fires


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, int]:
    window = draw(st.integers(1, 12))
    return {
        "quantile_permille": draw(st.integers(1, 1000)),
        "warmup": draw(st.integers(1, window)),
        "window": window,
        "factor_permille": draw(st.integers(1, 4000)),
    }


# Few different durations, so that ties and equalities are common; and large ones.
DURATIONS = st.lists(st.one_of(st.integers(0, 8), st.integers(0, 1 << 62)), max_size=60)


@given(DURATIONS, parameters())
def test_equals_the_naive_rule(durations: list[int], wanted: dict[str, int]) -> None:
    trigger = LatencyTrigger(**wanted)
    assert [trigger.observe(ns) for ns in durations] == naive(durations, **wanted)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 8)), max_size=80), parameters())
def test_operations_do_not_see_each_other(
    observations: list[tuple[str, int]], wanted: dict[str, int]
) -> None:
    together = LatencyTrigger(**wanted)
    alone = {operation: LatencyTrigger(**wanted) for operation in "abc"}
    for operation, ns in observations:
        assert together.observe(ns, operation) == alone[operation].observe(ns)


def test_of_too_many_operations_the_one_not_seen_for_longest_is_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trigger = LatencyTrigger(
        quantile_permille=500, warmup=1, window=2, factor_permille=1000, operations_max=2
    )
    for operation in ("a", "b", "a", "c"):
        trigger.observe(1, operation)
    # "b" made room, and warms up again; for it "c" made room.
    assert [trigger.observe(9, operation) for operation in ("a", "b", "c")] == [True, False, False]
    assert trigger.operations_forgotten == 3
    (record,) = caplog.records
    assert record.getMessage() == (
        "latency: more than 2 operations, 'b' was not seen for the longest time and is forgotten;"
        " such names may have values in them (said once)"
    )


def test_a_scanner_blinds_no_operation() -> None:
    trigger = LatencyTrigger(
        quantile_permille=990, warmup=10, window=20, factor_permille=1500, operations_max=8
    )
    for number in range(100):
        assert not trigger.observe(1, "GET /cart")
        for scanned in range(5):
            trigger.observe(1, f"GET /{number}/{scanned}")
    assert trigger.observe(2, "GET /cart")
    for _ in range(11):
        trigger.observe(1, "GET /new")
    assert trigger.observe(2, "GET /new")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"quantile_permille": 0}, ValueError, "quantile_permille is 0, want 1 to 1000"),
        ({"quantile_permille": 1001}, ValueError, "want 1 to 1000"),
        ({"warmup": 11}, ValueError, "warmup is 11, want 1 to 10"),
        ({"window": 0}, ValueError, "window is 0, want 1 or more"),
        ({"factor_permille": -1}, ValueError, "want 1 or more"),
        ({"factor_permille": 1.5}, TypeError, "factor_permille must be an int, not 1.5"),
    ],
)
def test_parameters_are_checked(change: dict[str, Any], error: type[Exception], text: str) -> None:
    allowed: dict[str, Any] = {
        "quantile_permille": 990,
        "warmup": 5,
        "window": 10,
        "factor_permille": 2000,
    }
    with pytest.raises(error, match=text):
        LatencyTrigger(**(allowed | change))


def test_threads_may_share_one() -> None:
    """Every observation takes effect once: the last one sees all 8000 before it."""
    trigger = LatencyTrigger(quantile_permille=1000, warmup=8000, window=8000, factor_permille=1000)
    start = threading.Barrier(8)
    fired: list[bool] = []

    def observe() -> None:
        start.wait()
        fired.extend([trigger.observe(7) for _ in range(1000)])

    threads = [threading.Thread(target=observe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fired == [False] * 8000
    assert trigger.observe(8)


class Interrupting(str):
    """An operation that is observed as a signal handler would: in the middle of another."""

    __slots__ = ("interrupt",)

    interrupt: Callable[[], None]

    def __hash__(self) -> int:
        self.interrupt()
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


@pytest.mark.timeout(20)
def test_an_observation_in_the_middle_of_another_is_left_out() -> None:
    trigger = LatencyTrigger(quantile_permille=1000, warmup=2, window=2, factor_permille=1000)
    answers: list[bool] = []
    name = Interrupting("a")
    name.interrupt = lambda: answers.append(trigger.observe(100, "a"))
    assert [trigger.observe(ns, name) for ns in (1, 2, 3)] == [False, False, True]
    assert answers
    assert not any(answers)
    # The window has 2 and 3.
    assert not trigger.observe(3, "a")
    assert trigger.observe(4, "a")


def test_a_log_handler_may_wait_for_one_that_observes() -> None:
    trigger = LatencyTrigger(
        quantile_permille=500, warmup=1, window=2, factor_permille=1000, operations_max=1
    )
    waited: list[bool] = []

    class Waiting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            thread = threading.Thread(target=trigger.observe, args=(1, "b"), daemon=True)
            thread.start()
            thread.join(timeout=20)  # of one that waits for us
            waited.append(thread.is_alive())

    handler = Waiting()
    logger = logging.getLogger("backsight")
    logger.addHandler(handler)
    try:
        trigger.observe(1, "a")
        trigger.observe(1, "b")
    finally:
        logger.removeHandler(handler)
    assert waited == [False]


def test_a_child_starts_with_empty_windows_even_if_a_thread_held_the_lock() -> None:
    trigger = LatencyTrigger(quantile_permille=500, warmup=1, window=2, factor_permille=1000)
    trigger.observe(1)
    with trigger._lock:  # as another thread may at the moment of the fork
        pid = os.fork()
        if pid == 0:
            os._exit(0 if [trigger.observe(9), trigger.observe(10)] == [False, True] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert trigger.observe(9)


def test_the_fork_hook_keeps_no_object_alive() -> None:
    trigger = LatencyTrigger(quantile_permille=500, warmup=1, window=2, factor_permille=1000)
    gone = weakref.ref(trigger)
    del trigger
    gc.collect()
    assert gone() is None
