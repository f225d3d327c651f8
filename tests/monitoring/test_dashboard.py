# SPDX-License-Identifier: Apache-2.0
"""The dashboard asks for what there is, and can be read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from testbed.topology import PYTHON
from tests.monitoring.dashboard import panels_of, queries
from tests.monitoring.metrics import KNOWN, OF_OTHERS, matchers_in, names_in


@pytest.fixture(scope="module")
def panels(build: Path) -> list[dict[str, Any]]:
    return panels_of(build)


def test_all_that_the_dashboard_names_is_there(panels: list[dict[str, Any]]) -> None:
    for where, query in queries(panels).items():
        assert names_in(query), where
        assert names_in(query) <= KNOWN.keys() | OF_OTHERS, where
        for matcher in matchers_in(query):
            if not matcher.is_of_prometheus:
                assert matcher.label in KNOWN[matcher.metric].label_names, where
                assert matcher.selects is not False, (where, matcher)


def test_curves_are_named_by_labels_that_they_have(panels: list[dict[str, Any]]) -> None:
    for where, query in queries(panels).items():
        wanted = set(re.findall(r"{{(\w+)}}", where.rpartition(": ")[2]))
        grouped = re.search(r"\bby \(([\w, ]+)\)", query)
        if grouped is not None:
            assert wanted == set(grouped[1].split(", ")) - {"le"} or "topk" in query, where
        else:
            assert wanted <= {"job", "instance"}, where


def test_panels_stand_beside_each_other_and_say_what_they_show(
    panels: list[dict[str, Any]],
) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_a_mistake_in_it_is_named_with_its_line(repository: Path, tmp_path: Path) -> None:
    folder = repository / "packaging/monitoring"
    text = (folder / "dashboard.yaml").read_text("utf-8")
    wrong = tmp_path / "dashboard.yaml"
    wrong.write_text(text.replace("unit: bytes", "unit: octets", 1))
    line = text[: text.index("unit: bytes")].count("\n") + 1
    done = subprocess.run(
        [PYTHON, folder / "dashboard.py", wrong, tmp_path / "out.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{wrong}:{line}: " in done.stderr and "octets" in done.stderr
