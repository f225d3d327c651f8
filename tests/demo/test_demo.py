# SPDX-License-Identifier: Apache-2.0
"""The demo as a test: a real shop on real nodes, for a few seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from testbed.processes import APPS
from testbed.topology import PYTHON
from tests.cluster.leftovers import interrupt_and_look, namespaces_of, processes_in
from tests.demo.live import Live
from tests.demo.report import BYTES_LEFT_SHARE_MAX

# The virtual environment is made by the first who wants it.
pytestmark = [pytest.mark.timeout(400)]

# The first trouble is in order 525: enough for it at half of the usual speed.
SECONDS = 12


@pytest.mark.root
def test_the_trouble_of_live_services_is_captured_whole(tmp_path: Path) -> None:
    with Live(tmp_path / "captured", duration_s=SECONDS) as live:
        live.run()
        result = live.judge()
        directory = live.shop.directory
        story = live.shop.coordinator.ctl("show", result.shown["a"])
    assert result.checker_ok, result.checker_failures
    for letter, kind in result.kinds.items():
        assert kind["happened"] > 0, letter
        assert kind["captured"] == kind["of_all_nodes"] == kind["happened"], letter
    for letter in ("c", "d"):
        assert result.kinds[letter]["one_node_fired"] == result.kinds[letter]["happened"]
    assert set(result.kinds["c"]["firing_nodes"]) == {"node-1"}
    assert set(result.kinds["d"]["firing_nodes"]) == {"node-3"}
    assert result.recall == 1
    assert result.coherent_by_checker is not None and result.coherent_by_checker >= 0.99
    assert result.false_coherent == 0
    assert 0 < result.bytes_left < BYTES_LEFT_SHARE_MAX * result.bytes_generated
    # Who fired, why, and where it was thrown.
    assert re.search(r"trigger error on node-3: .*StockMiscountedError", story)
    assert re.search(r"raise StockMiscountedError\(", story)
    result.write(tmp_path / "result.json")
    assert set(json.loads((tmp_path / "result.json").read_text())["kinds"]) == set("abcd")
    assert not directory.exists()
    assert namespaces_of(os.getpid()) == []
    assert processes_in(str(directory)) == []


@pytest.mark.root
def test_ctrl_c_removes_everything() -> None:
    interrupt_and_look("tests.demo", "s of orders")


def test_the_shop_knows_nothing_of_tracing() -> None:
    files = [path for path in (APPS / "shop").rglob("*") if path.is_file()]
    assert {"front.py", "orders.py", "stock.py"} <= {path.name for path in files}
    for path in files:
        found = re.search(
            rb"(?i)backsight|opentelemetry|otel|tracer|traceparent", path.read_bytes()
        )
        assert found is None, (path, found)


@pytest.mark.root
@pytest.mark.parametrize("text", ["0", "-1", "2.5", "x", "3601"])
def test_a_duration_that_makes_no_sense_is_refused(text: str) -> None:
    done = subprocess.run(
        [PYTHON, "-m", "tests.demo"],
        env={**os.environ, "DURATION": text},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"demo: DURATION={text}: want whole seconds, 1 to 3600\n",
    )
