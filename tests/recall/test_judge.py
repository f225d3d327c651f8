# SPDX-License-Identifier: Apache-2.0
"""What counts as said, and how far back a pool reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from tests.recall.horizon import Horizon, Reading
from tests.recall.judge import Collected, Fate, Judgement, Written, judge
from tests.recall.late import Asked, Late, LateError

TRACE = "11" * 16
OTHER = "22" * 16
S = 1_000_000_000


def horizons() -> dict[str, Horizon]:
    """What was written before 90 s may be gone at 100 s, and from then on."""
    reading = [Reading(90 * S, 90 * S, 0), Reading(200 * S, 200 * S, 110 * S)]
    return {node: Horizon(list(reading)) for node in ("a", "b")}


def written(node: str, *spans: str, at_s: float = 95) -> Written:
    return Written(TRACE, node, int(at_s * S), int(at_s * S) + S, frozenset(spans))


def collected(
    verdict: str,
    spans: Mapping[str, Iterable[str]],
    *reasons: tuple[str, str],
    trace: str = TRACE,
    triggers: Iterable[str] = ("late",),
) -> Collected:
    return Collected(
        trace,
        verdict,
        frozenset(reasons),
        frozenset(triggers),
        {node: frozenset(ids) for node, ids in spans.items()},
    )


def judged(found: Collected | None, *parts: Written) -> Judgement:
    """Beside a trace that is whole, and one that is evicted as it should be."""
    whole = Written(OTHER, "a", 95 * S, 95 * S, frozenset("x"))
    gone = Written("33" * 16, "a", 1 * S, 1 * S, frozenset("y"))
    by_trace = {TRACE: list(parts), OTHER: [whole], gone.trace_id: [gone]}
    every = {
        OTHER: collected("coherent", {"a": "x"}, trace=OTHER),
        gone.trace_id: collected("partial", {}, ("evicted", "a"), trace=gone.trace_id),
    }
    if found is not None:
        every[TRACE] = found
    asked = [Asked(trace, 100 * S, 101 * S) for trace in by_trace]
    return judge(asked, by_trace, every, horizons())


def test_what_came_is_whole() -> None:
    judgement = judged(collected("coherent", {"a": "12"}), written("a", "1", "2"))
    assert judgement.traces[0].parts[0].fate is Fate.WHOLE
    assert not judgement.failures


@pytest.mark.parametrize(
    ("spans", "reasons", "fate"),
    [
        ({"a": "1"}, [("evicted", "a")], Fate.EVICTED),
        ({}, [("evicted", "a")], Fate.EVICTED),
        ({"a": "1"}, [("lossy", "a")], Fate.DROPPED),
        ({"a": "1"}, [("evicted", "b")], Fate.LOST),
        ({"a": "1"}, [("run_missing", "a")], Fate.LOST),
        ({}, [("evicted", "b")], Fate.UNREACHED),
        ({}, [("evicted", "b"), ("no_answer", "a")], Fate.LOST),
        ({}, [], Fate.LOST),
    ],
)
def test_what_did_not_come_must_be_said(
    spans: Mapping[str, str], reasons: list[tuple[str, str]], fate: Fate
) -> None:
    old = written("a", "1", "2", at_s=10)
    judgement = judged(collected("partial", spans, *reasons), old)
    assert judgement.traces[0].parts[0].fate is fate
    assert bool(judgement.failures) == (fate in (Fate.LOST, Fate.DROPPED))


def test_a_trace_of_which_nobody_says_anything_is_lost() -> None:
    judgement = judged(None, written("a", "1", at_s=10))
    assert judgement.fates()["lost"] == 1
    assert any("nobody says why" in failure for failure in judgement.failures)


def test_coherent_and_not_whole_is_a_failure() -> None:
    found = collected("coherent", {"a": "1"}, ("evicted", "a"))
    judgement = judged(found, written("a", "1", "2", at_s=10))
    assert [failure for failure in judgement.failures if "called coherent, and is not" in failure]


def test_evicted_within_the_horizon_is_a_failure() -> None:
    found = collected("partial", {}, ("evicted", "a"))
    young = judged(found, written("a", "1", at_s=92))
    assert [failure for failure in young.failures if "younger than all horizons" in failure]
    # One of its parts is older: then all is as it may be.
    assert not judged(found, written("a", "1", at_s=92), written("b", "2", at_s=80)).failures


def test_nothing_is_shown_where_nothing_is_evicted() -> None:
    only = {OTHER: [Written(OTHER, "a", 95 * S, 95 * S, frozenset("x"))]}
    found = {OTHER: collected("coherent", {"a": "x"}, trace=OTHER)}
    judgement = judge([Asked(OTHER, 100 * S, 101 * S)], only, found, horizons())
    assert judgement.failures == ("1 of 1 traces are whole, so nothing is shown",)


def test_what_was_triggered_in_time_is_not_counted_and_must_be_coherent() -> None:
    both = collected("partial", {}, ("restarted", "a"), triggers=("late", "error"))
    assert TRACE not in {trace.trace_id for trace in judged(both, written("a", "1")).traces}
    alone = collected("partial", {}, ("evicted", "a"), triggers=("error",))
    failures = judged(alone, written("a", "1")).failures
    assert "0 of 1 traces that were triggered in time are coherent" in failures


def test_what_is_sure_follows_from_what_a_node_says_next() -> None:
    horizon = Horizon([Reading(10, 12, 0), Reading(20, 22, 0), Reading(30, 32, 25)])
    assert horizon.sure_ns(15) is None  # nothing was reclaimed by 20
    assert horizon.sure_ns(25) == 25 - 7  # by 30 nothing that was sealed after 7
    assert horizon.sure_ns(31) == 0  # nobody has looked since
    assert horizon.said_ns(31) is None  # read, but not yet answered
    assert horizon.said_ns(33) == 25


def test_the_environment_asks_for_it() -> None:
    assert Late.from_environment({}) is None
    assert Late.from_environment({"LATE": "2.5", "POOL": "8MiB"}) == Late(2.5, 8 << 20)
    for environment, words in (
        ({"POOL": "8MiB"}, "POOL=8MiB: only together with LATE"),
        ({"LATE": "never"}, "LATE=never: want a number above 0, up to 20"),
        ({"LATE": "21"}, "LATE=21: want"),
        ({"LATE": "1", "POOL": "1MiB"}, "POOL=1MiB: want 4MiB to 1GiB"),
    ):
        with pytest.raises(LateError, match=words):
            Late.from_environment(environment)
