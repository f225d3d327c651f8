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
