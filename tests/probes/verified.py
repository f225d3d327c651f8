# SPDX-License-Identifier: Apache-2.0
"""How much work each program is for the kernel's verifier, which gives up at a million instructions.

verified.json has it for each series of Linux (6.1), as it was measured when it was looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from appliance.probes.native import Loader

_KEPT = Path(__file__).with_name("verified.json")

# A program that takes a fifth more is looked at before it is kept.
_MORE_ALLOWED = 1.2


def series_of(release: str, loader: Loader) -> str:
    """Of a kernel's release, as uname(1) has it; what bcc makes is another program."""
    series = ".".join(release.split(".")[:2])
    return series if loader is Loader.CORE else f"{series} by {loader.key}"


def _all() -> dict[str, dict[str, int]]:
    kept: dict[str, dict[str, int]] = json.loads(_KEPT.read_text()) if _KEPT.exists() else {}
    return kept


def kept(series: str) -> dict[str, int] | None:
    """What was measured; None: nothing."""
    return _all().get(series)


def keep(series: str, measured: Mapping[str, int]) -> None:
    """Keep that instead."""
    everything = {**_all(), series: dict(sorted(measured.items()))}
    _KEPT.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")


def much_more(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, str]:
    """Programs that take much more than what was kept, and by how much; or that are new or gone."""
    return {
        name: f"{before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in sorted({*before, *now})
        if name not in before or name not in now or now[name] > _MORE_ALLOWED * before[name]
    }
