# SPDX-License-Identifier: Apache-2.0
"""The two services of bench/http_pair.py: what is measured is recorded, and its interval is right."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from bench import http_pair

RECORD_BYTES = 1024
EVENTS = RECORD_BYTES // http_pair.EVENT_LOG_BYTES


@pytest.fixture(scope="module")
def shown(build: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One trace of many, as the coordinator shows it."""
    program, directory = build / "bench/http_service", tmp_path_factory.mktemp("http")
    with http_pair.running(program, directory, 1000, RECORD_BYTES, 8 << 20) as running:
        pair, coordinator = running
        with pair.loading(traced=True, seconds=1) as (wrk, output):
            trace = pair.collect()
            output.read()
        assert wrk.wait() == 0
        assert [one["triggers_lost"] for one in pair.stats()] == [0, 0]
        return http_pair.shown_when_judged(coordinator, trace)


def test_a_trace_of_the_load_is_collected_whole(shown: dict[str, Any]) -> None:
    assert shown["verdict"]["kind"] == "coherent"
    assert [part["complete"] for part in shown["slices"]] == [True]
    front, back = sorted(shown["spans"], key=lambda span: span["start_ns"])
    assert (front["service"], front["parent_id"]) == ("front", "")
    assert (back["service"], back["parent_id"]) == ("back", front["span_id"])
    assert front["pid"] != back["pid"]
    # The hop that the context made is met on the other side.
    hops = {hop.pop("kind"): hop for hop in copy.deepcopy(shown["hops"])}
    assert hops["out"] == hops["in"]
    assert hops["out"]["span_id"] == front["span_id"]
    assert len(shown["records"]) == 2 * EVENTS
    assert http_pair.missing(shown, RECORD_BYTES) == []


def test_what_is_missing_is_told(shown: dict[str, Any]) -> None:
    shown = copy.deepcopy(shown)
    shown["records"].pop()
    shown["spans"].pop()
    shown["verdict"]["kind"] = "partial"
    assert [reason.partition(":")[0] for reason in http_pair.missing(shown, RECORD_BYTES)] == [
        "verdict",
        "services",
        "records",
    ]


@pytest.mark.parametrize(
    ("count", "rank", "confidence"),
    # Of binomial(n, 1/2): tables of the sign test.
    [(6, 1, 0.9688), (20, 6, 0.9586), (24, 7, 0.9773), (25, 8, 0.9567)],
)
def test_the_interval_of_a_median_is_of_order_statistics(
    count: int, rank: int, confidence: float
) -> None:
    samples = [float(n) for n in range(1, count + 1)]
    random.Random(count).shuffle(samples)
    interval = http_pair.median_interval(samples)
    assert (interval.low, interval.high) == (rank, count + 1 - rank)
    assert interval.confidence == pytest.approx(confidence, abs=5e-5)


def test_too_few_samples_say_how_little_they_tell() -> None:
    interval = http_pair.median_interval([0.9, 1.1])
    assert (interval.low, interval.high, interval.confidence) == (0.9, 1.1, 0.5)
