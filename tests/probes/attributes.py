# SPDX-License-Identifier: Apache-2.0
"""What a kernel span carries, as docs/probes.md says it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.kernel_events import Kind

_DOCS = Path(__file__).resolve().parents[2] / "docs" / "probes.md"


@dataclass(frozen=True, slots=True)
class Attribute:
    """A row of the table: its unit ("" for none), and the keys of the probes that set it."""

    unit: str
    probes: frozenset[str]


def documented() -> dict[str, Attribute]:
    """The table, by the attributes' names."""
    section = _DOCS.read_text().partition("### What a kernel span carries\n")[2]
    section = section.partition("\n## ")[0]
    keys = [kind.name.lower() for kind in Kind]
    table: dict[str, Attribute] = {}
    for name, unit, probes in re.findall(
        r"^\| `([a-z_.]+)` \| (\w*) ?\| ([^|]+) \|", section, re.MULTILINE
    ):
        patterns = ["*"] if probes == "all" else re.findall(r"`([^`]+)`", probes)
        matched = {pattern: set(fnmatch.filter(keys, pattern)) for pattern in patterns}
        assert all(matched.values()), f"{name}: docs/probes.md names a probe that is none"
        table[name] = Attribute(unit, frozenset().union(*matched.values()))
    return table


def assert_documented(shown: Mapping[str, Any]) -> None:
    """A probe sets no attribute that the table does not have for it."""
    table = documented()
    for span in shown["spans"]:
        event = span["attributes"].get("kernel.event")
        if event is None:
            continue
        for name in span["attributes"]:
            assert event in table[name].probes, f"docs/probes.md: {event} sets {name}, too"
