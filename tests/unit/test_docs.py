# SPDX-License-Identifier: Apache-2.0
"""What the documentation says can be typed in."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime.settings.coordinator
import runtime.settings.node
from runtime.log import MessageId
from runtime.schema import AT_START, RELOADABLE, load

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


def _keys(settings: type[Any], *, path: str = "", live: bool = False) -> Iterator[tuple[str, bool]]:
    """All of them by their paths, and whether a reload takes a change up."""
    for name, kind in typing.get_type_hints(settings, include_extras=True).items():
        marks = getattr(kind, "__metadata__", ())
        may = (live or RELOADABLE in marks) and AT_START not in marks
        bare = typing.get_args(kind)[0] if marks else kind
        inner = [one for one in (bare, *typing.get_args(bare)) if dataclasses.is_dataclass(one)]
        if inner:
            yield from _keys(typing.cast("type[Any]", inner[0]), path=f"{path}{name}.", live=may)
        else:
            yield f"{path}{name}", may


# These the guide names together: "all times and bounds of memory".
_TIMES_AND_BOUNDS = re.compile(r"[a-z_]+_(s|bytes|max)")


@pytest.mark.parametrize(
    ("settings", "whose"),
    [
        (SETTINGS["node.yaml"], r"^`percentage`, (.*?) While the coordinator runs"),
        (SETTINGS["coordinator.yaml"], r" While the coordinator runs,(.*?) can be changed: see"),
    ],
)
def test_what_a_reload_takes_up_is_in_the_guide_and_nothing_else(
    settings: type[Any], whose: str, repository: Path
) -> None:
    text = (repository / "docs/running.md").read_text("utf-8")
    found = re.search(whose, text, re.MULTILINE | re.DOTALL)
    assert found is not None
    named: list[str] = []
    for key in re.findall(r"`([a-z_.*]+)`", re.sub(r"\((not|but) .*?\)", "", found[0])):
        # `query.tokens`, `.hosts`: the second is of the same section.
        named.append(f"{named[-1].partition('.')[0]}{key}" if key.startswith(".") else key)
    together = "all times and bounds of memory" in found[0]
    for key, is_live in _keys(settings):
        is_named = any(key == name or key.startswith(f"{name.rstrip('.*')}.") for name in named)
        if together and _TIMES_AND_BOUNDS.fullmatch(key):
            is_named = True
        if key == "probes.loader":
            continue  # excepted there in brackets
        assert is_named == is_live, key


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
