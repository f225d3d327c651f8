# SPDX-License-Identifier: Apache-2.0
"""What the documentation says can be typed in."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import runtime.settings.coordinator
import runtime.settings.node
from runtime.log import MessageId
from runtime.schema import load

SETTINGS = {
    "coordinator.yaml": runtime.settings.coordinator.Settings,
    "node.yaml": runtime.settings.node.Settings,
}


def _examples(repository: Path) -> dict[str, str]:
    text = (repository / "docs" / "running.md").read_text()
    return dict(re.findall(r"^`(\S+\.yaml)`:\n\n```yaml\n(.*?)```", text, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_examples_are_valid(name: str, repository: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(_examples(repository)[name])
    assert isinstance(load(path, SETTINGS[name]), SETTINGS[name])


@pytest.mark.parametrize("settings", SETTINGS.values())
def test_every_key_is_in_the_tables(settings: type[Any], repository: Path) -> None:
    text = (repository / "docs" / "running.md").read_text()
    for field in dataclasses.fields(settings):
        assert re.search(rf"`{field.name}[`.]", text), (
            f"docs/running.md does not explain {field.name}"
        )


def _anchors(text: str) -> set[str]:
    """Of all headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _documents(repository: Path) -> list[Path]:
    found = [*repository.glob("*.md"), *repository.glob("*/*.md"), *repository.glob("tests/*/*.md")]
    return [path for path in found if "build" not in path.relative_to(repository).parts]


def test_links_lead_somewhere(repository: Path) -> None:
    wrong = []
    for path in _documents(repository):
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
            if re.match(r"\w+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists() or (
                anchor and anchor not in _anchors(target.read_text("utf-8"))
            ):
                wrong.append(f"{path.relative_to(repository)}: {link}")
    assert wrong == []


def test_a_link_that_leads_nowhere_would_be_found() -> None:
    assert _anchors("## What it takes\n\n```\n# a comment\n```\n\n### `bs_show()`, or not\n") == {
        "what-it-takes",
        "bs_show-or-not",
    }


def test_each_message_that_a_machine_may_ask_for_is_in_the_guide(repository: Path) -> None:
    text = (repository / "docs/operating.md").read_text("utf-8")
    in_table = re.findall(r"^\| `([0-9a-f]{32})` \|", text, re.MULTILINE)
    assert sorted(in_table) == sorted(MessageId)
