# SPDX-License-Identifier: Apache-2.0
"""The judge of a campaign can fail: each thing that must not be, it finds."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from formats.records import Data, SpanEnd, SpanStart
from formats.slices import PieceKind, Process
from testbed.encoding import encode_piece, encode_process, encode_record
from tests.hostile.attacks import ALL, GROUPS, phases
from tests.hostile.footage import Compared, compare
from tests.hostile.judge import (
    Judged,
    Outcome,
    Result,
    Turn,
    Visitors,
    Written,
    judge,
    settled,
    table,
)
from tests.hostile.memory import Sample
from tests.hostile.truth import DATA_RECORDS, Honest, honest, payload, span_id

MIB = 1 << 20
TRACE = Honest(run=0x1234, number=7, front=1)
HONEST_PID, OTHER_PID = 100, 200
PIDS = {"alpha": {HONEST_PID}, "beta": {HONEST_PID}}
FIRED = frozenset(range(100))


# ------------------------------------------------------------------ footage


def records(side: int, count: int = DATA_RECORDS) -> list[bytes]:
    span = span_id(TRACE, side)
    return [
        encode_record(SpanStart(span, 0, 1, 1, "request"), 1),
        *(encode_record(Data(1, payload(TRACE, side, index)), 1) for index in range(count)),
        encode_record(SpanEnd(span, 2, 0, "", b""), 1),
    ]


def slice_of(pieces: Sequence[bytes], pid: int = HONEST_PID, client: int = 1) -> bytes:
    """All in one run, in a piece for each."""
    data = encode_process(client, Process(pid, "honest"))
    start = 0
    for piece in pieces:
        data += encode_piece(PieceKind.RUN, piece, client=client, handle=5, seq=0, start=start)
        start += len(piece)
    return data


def whole() -> dict[str, bytes]:
    return {TRACE.node(side): slice_of(records(side)) for side in (0, 1)}


def test_an_id_tells_all_of_a_trace() -> None:
    for trace in (TRACE, Honest(0x1234, 9, 0, alone=True)):
        assert honest(trace.trace_id, 0x1234) == trace
        assert honest(trace.trace_id, 0x1235) is None
    assert (TRACE.node(0), TRACE.node(1)) == ("beta", "alpha")
    spans = {span_id(TRACE, 0), span_id(TRACE, 1), span_id(Honest(0x1234, 8, 1), 0)}
    assert len(spans) == 3
    assert payload(TRACE, 0, 0) != payload(TRACE, 0, 1) != payload(TRACE, 1, 1)


def test_whole_footage_is_whole() -> None:
    assert compare(TRACE, whole(), PIDS) == Compared(12, 0, 0)
    # A piece that was copied twice is the same twice.
    twice = {node: data + data for node, data in whole().items()}
    assert compare(TRACE, twice, PIDS).whole


@pytest.mark.parametrize("gone", range(DATA_RECORDS + 2))
def test_a_lost_record_is_missing(gone: int) -> None:
    slices = whole()
    left = records(0)
    del left[gone]
    slices["beta"] = slice_of(left)
    assert compare(TRACE, slices, PIDS) == Compared(12, 1, 0)


def test_a_lost_piece_takes_all_that_follows_in_its_run() -> None:
    slices = whole()
    pieces = records(0)
    at = len(slice_of(pieces[:2])) - len(slice_of([]))
    data = slices["beta"]
    head = len(slice_of([]))
    cut = head + at
    after = cut + len(slice_of(pieces[2:3])) - head
    slices["beta"] = data[:cut] + data[after:]
    assert compare(TRACE, slices, PIDS).missing == 4


def test_a_node_that_delivered_nothing_lacks_all_of_its_records() -> None:
    slices = whole()
    del slices["alpha"]
    assert compare(TRACE, slices, PIDS) == Compared(12, 6, 0)


def test_another_content_is_missing_and_wrong() -> None:
    slices = whole()
    pieces = records(1)
    pieces[2] = encode_record(Data(1, payload(TRACE, 1, 1)[:-1] + b"!"), 1)
    slices["alpha"] = slice_of(pieces)
    assert compare(TRACE, slices, PIDS) == Compared(12, 1, 1)


def test_a_record_that_is_there_twice_is_wrong() -> None:
    slices = whole()
    pieces = records(1)
    slices["alpha"] = slice_of([*pieces, pieces[1]])
    assert compare(TRACE, slices, PIDS) == Compared(12, 0, 1)


def test_what_liars_write_into_a_trace_neither_helps_nor_hurts() -> None:
    slices = whole()
    slices["alpha"] += slice_of(records(1)[:3], OTHER_PID, client=2)
    assert compare(TRACE, slices, PIDS).whole
    slices["alpha"] = slice_of(records(1), OTHER_PID, client=2)
    assert compare(TRACE, slices, PIDS) == Compared(12, 6, 0)


def test_nonsense_is_no_footage() -> None:
    chance = random.Random(1)
    for _ in range(200):
        slices = {"alpha": chance.randbytes(chance.randrange(2000)), "beta": whole()["beta"]}
        assert compare(TRACE, slices, PIDS).missing == 6


# -------------------------------------------------------------------- judge


def outcome(low: int, verdict: str = "coherent", missing: int = 0, **more: Any) -> Outcome:
    return Outcome(low, verdict, 12, missing, **{"wrong": 0, **more})


def samples(own_mib: Sequence[float], shared_mib: float = 100, files: int = 50) -> list[Sample]:
    """One a second."""
    shared = int(shared_mib * MIB)
    return [
        Sample("alpha", at, int(own * MIB), int(own * MIB), shared, shared // 2, files)
        for at, own in enumerate(own_mib)
    ]


def result(outcomes: Sequence[Outcome] | None = None, **changed: Any) -> Result:
    judged = Judged()
    for one in [outcome(low) for low in FIRED] if outcomes is None else outcomes:
        judged.add(one)
    what: dict[str, Any] = {
        "duration_s": 60,
        "seed": 1,
        "attacks": {"scribble": 2},
        "written": [Written(1000, 12000, 0, 0, FIRED)],
        "visitors": Visitors(4, 4),
        "judged": judged,
        "samples": samples([80.0] * 60),
        "answers_s": [0.01] * 60,
        "budget_bytes": 300 * MIB,
        "pool_bytes": 64 * MIB,
        "files_max": 100,
        "deaths": [],
    }
    return judge(**{**what, **changed})


def only_failure(judged: Result) -> str:
    assert len(judged.failures) == 1, judged.failures
    assert not judged.ok
    assert judged.failures[0] in table(judged)
    return judged.failures[0]


def test_all_as_promised(tmp_path: Path) -> None:
    good = result()
    assert good.ok
    assert "as promised" in table(good)
    good.write(tmp_path / "result.json")
    said = json.loads((tmp_path / "result.json").read_text())
    assert (said["honest_records"], said["honest_records_lost"]) == (12000, 0)
    assert (said["honest_triggers"], said["honest_triggers_collected"]) == (100, 1.0)
    assert said["false_coherent"] == 0
    assert said["node_rss_max_mib"] == 80.0
    assert said["node_memory_settled_max_mib"] == 180.0


def test_records_that_the_library_lost_fail() -> None:
    bad = result(
        written=[Written(1000, 12000, 3, 0, FIRED)],
        turns=[Turn("a", "", 0, frozenset()), Turn("b", "alpha", 3, FIRED)],
    )
    assert bad.honest_records_lost == 3
    assert only_failure(bad) == "3 of 12000 honest records were lost (3 in: b)"


def test_a_record_that_lacks_in_the_footage_fails() -> None:
    bad = result([*(outcome(low) for low in range(99)), outcome(99, "lossy", 1)])
    assert bad.honest_records_lost == 1
    assert "1 of 12000 honest records were lost" in only_failure(bad)


def test_what_is_said_to_be_evicted_is_not_lost_but_not_collected_either() -> None:
    gone = [outcome(low, "lossy", 6, reasons=("evicted",)) for low in range(98, 100)]
    bad = result([*(outcome(low) for low in range(98)), *gone])
    assert (bad.honest_records_lost, bad.honest_records_evicted) == (0, 12)
    assert bad.honest_triggers_collected == 0.98
    assert "98.00% of 100 honest triggers" in only_failure(bad)


def test_a_trigger_that_nobody_collected_counts() -> None:
    one = result([outcome(low) for low in range(99)])
    assert one.ok
    assert one.honest_triggers_collected == 0.99
    two = result(
        [*(outcome(low) for low in range(98)), Outcome(98, "none", 0, 0, 0)],
        turns=[Turn("a", "", 0, frozenset(range(50))), Turn("b", "", 0, frozenset(range(50, 100)))],
    )
    assert "98.00% of 100" in only_failure(two)
    assert [(turn.triggers, turn.missed) for turn in two.turns] == [(50, {}), (50, {"none": 2})]


def test_a_verdict_that_claims_too_much_fails_for_good() -> None:
    # Also if a later one is right, and of a trace that honest processes did not fire.
    bad = result(
        [
            *(outcome(low) for low in FIRED),
            outcome(7, missing=1),
            outcome(7),
            outcome(500, missing=2),
        ]
    )
    assert bad.false_coherent == 2
    assert bad.honest_records_lost == 0
    assert "2 traces are called coherent and are not whole" in only_failure(bad)
    assert result([*(outcome(low) for low in FIRED), outcome(7, wrong=1), outcome(7)]).failures


def test_a_record_that_nobody_wrote_fails() -> None:
    bad = result([*(outcome(low) for low in FIRED), outcome(7, "partial", wrong=1)])
    assert bad.honest_records_wrong == 1
    assert any("did not write" in failure for failure in bad.failures)


def test_a_leak_fails() -> None:
    bad = result(samples=samples([80.0 + second for second in range(60)]))
    assert bad.node_memory_growth_mib == pytest.approx(20, abs=2)
    assert "grew by" in only_failure(bad)
    # What came at the beginning, and stayed, is none.
    assert result(samples=samples([60.0] * 5 + [120.0] * 55)).ok


def test_memory_beyond_the_budget_fails() -> None:
    assert "180.0 MiB, within its budget are 150.0" in only_failure(result(budget_bytes=150 * MIB))
    # Resident alone, if what is shared is not there.
    resident = [dataclasses.replace(one, rss_bytes=400 * MIB) for one in samples([80.0] * 60)]
    assert "resident memory" in only_failure(result(samples=resident))


def test_memory_that_is_given_back_within_seconds_is_no_leak() -> None:
    spikes = [500.0 if second % 3 == 0 else 80.0 for second in range(60)]
    touched = [
        dataclasses.replace(one, shared_bytes=int(size * MIB))
        for one, size in zip(samples([80.0] * 60), spikes, strict=True)
    ]
    good = result(samples=touched)
    assert good.ok
    assert (good.node_memory_max_mib, good.node_memory_settled_max_mib) == (580.0, 160.0)
    stays = [dataclasses.replace(one, shared_bytes=500 * MIB) for one in touched[30:36]]
    assert "MiB, within its budget" in only_failure(
        result(samples=[*touched[:30], *stays, *touched[36:]])
    )


def test_what_stayed_is_the_least_of_some_seconds() -> None:
    series = samples([1, 9, 9, 9, 9, 2, 9], shared_mib=0)
    assert [(at, size // MIB) for at, size in settled(series)] == [
        (3, 1), (4, 9), (5, 2), (6, 2),
    ]  # fmt: skip


def test_what_liars_touched_must_be_gone_at_the_end() -> None:
    series = [dataclasses.replace(one, arenas_bytes=90 * MIB) for one in samples([80.0] * 60)]
    assert "arenas have 90.0 MiB, its pool 64.0" in only_failure(result(samples=series))
    series[-1] = samples([80.0])[0]
    assert result(samples=series).ok


def test_open_files_without_end_fail() -> None:
    assert "1000 open files" in only_failure(result(samples=samples([80.0] * 60, files=1000)))


def test_a_node_that_has_no_time_fails() -> None:
    assert result(answers_s=[0.01] * 54 + [3.0] * 6).ok
    bad = result(answers_s=[0.01] * 50 + [3.0] * 10)
    assert "17% of 60 times a node took more than 1 s to say how it is, 3.0 s once" in only_failure(
        bad
    )


def test_whoever_could_not_attach_or_died_fails() -> None:
    assert "1 of 4 honest processes" in only_failure(result(visitors=Visitors(4, 3)))
    assert only_failure(result(deaths=["the daemon of alpha ended"])) == "the daemon of alpha ended"


@pytest.mark.parametrize(
    "nothing", [{"written": [Written(0, 0, 0, 0, frozenset())]}, {"samples": []}]
)
def test_nothing_shows_nothing(nothing: dict[str, Any]) -> None:
    assert not result(**nothing).ok


# ----------------------------------------------------------------- campaign


@pytest.mark.parametrize("duration_s", [10, 30, 600])
def test_every_attack_has_its_turn_in_the_time_there_is(duration_s: float) -> None:
    found = list(phases(duration_s, random.Random(1)))
    assert sum(phase.seconds for phase in found) == pytest.approx(duration_s)
    assert [phase.what for phase in found][: len(GROUPS)] == list(GROUPS)
    assert set(found[-1].attacks) == set(ALL)
    assert {attack for phase in found[: len(GROUPS)] for attack in phase.attacks} == set(ALL)
    again = list(phases(duration_s, random.Random(1)))
    assert found == again
