# SPDX-License-Identifier: Apache-2.0
"""Late triggers on pools that are gone round: what is missing was evicted, and is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.report import read
from tests.demo.live import Live
from tests.recall.late import Late
from tests.recall.report import Recall
from tests.replay.replay import Recording, Replay

DATA = Path(__file__).resolve().parent.parent / "data" / "nezha"
CONTENTION = DATA / "onlineboutique-cartservice-cpu-contention.csv.xz"

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(400)]


def assert_all_is_said(recall: Recall, tmp_path: Path) -> None:
    assert not recall.failures, recall.table()
    fates = recall.judgement.fates()
    assert fates["evicted"] > 0
    assert fates["whole"] > 0
    recall.write(tmp_path)
    metrics = {result.metric for result in read(tmp_path / "recall.jsonl")}
    assert metrics == {"recall_by_s", "recall_by_horizon"}


def test_of_recorded_traffic(tmp_path: Path) -> None:
    recording = Recording.read(CONTENTION, DATA / "rules.json")
    with Replay(recording, captured=tmp_path / "captured", speed=4.0, late=Late(2.0)) as replay:
        replay.run()
        recall = replay.recall()
    assert_all_is_said(recall, tmp_path)


def test_of_a_live_shop(tmp_path: Path) -> None:
    with Live(tmp_path / "captured", duration_s=12, late=Late(2.0)) as live:
        live.run()
        recall = live.recall()
    assert_all_is_said(recall, tmp_path)
