# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md has each metric as it is in the code, and no document names one that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runtime.metrics import Metric
from tests.monitoring.metrics import BUILD_INFO, KNOWN, OF_OTHERS, TABLES, names_in

# prometheus-client's, which nothing of ours asks for.
_TOLD_BY_THE_WAY = {
    "process_virtual_memory_bytes",
    "process_open_fds",
    "process_max_fds",
}

_ROW = re.compile(r"\| `(\w+)(?:{([\w,]+)})?` \| (\w+)(?:, (\w+))? \| (.+) \| (.+) \|")


def type_of(metric: Metric) -> str:
    if metric.histogram:
        return "histogram"
    return "counter" if metric.name.endswith("_total") else "gauge"


def unit_of(metric: Metric) -> str | None:
    """By its name, as Prometheus wants it; None: it counts things."""
    found = re.search(r"_(bytes|seconds)(_total)?$", f"_{metric.name}")
    if found is not None:
        return found[1]
    return "percent" if metric.name == "percentage" else None


@pytest.mark.parametrize("prefix", sorted(TABLES))
def test_each_metric_is_explained_as_the_code_has_it(prefix: str, repository: Path) -> None:
    text = (repository / "docs/metrics.md").read_text("utf-8")
    program = prefix.replace("_", "-")
    section = re.split(r"^## ", text.partition(f"\n## {program}\n")[2], flags=re.MULTILINE)[0]
    rows = [_ROW.fullmatch(line) for line in section.splitlines() if line.startswith("| `")]
    explained = [row.groups() for row in rows if row is not None]
    assert len(explained) == len(rows)
    assert [row[:5] for row in explained] == [
        (
            metric.name,
            ",".join(metric.label_names) or None,
            type_of(metric),
            unit_of(metric),
            metric.help,
        )
        for metric in TABLES[prefix]
    ]


def test_no_document_names_a_metric_that_is_not_there(repository: Path) -> None:
    named = set()
    for path in [
        *repository.glob("*.md"),
        *repository.glob("*/*.md"),
        *repository.glob("packaging/*.yaml"),
    ]:
        if path.parent.name == "build":
            continue
        text = path.read_text("utf-8")
        # "up" is a word, too.
        named |= {name for name in names_in(text) if name not in ("up", "ALERTS")}
    assert len(named) > 20
    assert named <= KNOWN.keys() | BUILD_INFO | OF_OTHERS | _TOLD_BY_THE_WAY


def test_labels_that_documents_name_are_there(repository: Path) -> None:
    text = "".join(path.read_text("utf-8") for path in (repository / "docs").glob("*.md"))
    named = re.findall(r"`(backsight_(?:node|coordinator)_\w+){([\w, ]+)}`", text)
    assert len(named) > 5
    for name, labels in named:
        assert set(labels.split(",")) == set(KNOWN[name].label_names), name
