# SPDX-License-Identifier: Apache-2.0
"""The dashboard as it is installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def panels_of(build: Path) -> list[dict[str, Any]]:
    """All that show something; rows do not."""
    text = (build / "packaging/monitoring/grafana-dashboard.json").read_text("utf-8")
    return [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]


def queries(panels: Sequence[dict[str, Any]]) -> dict[str, str]:
    """All expressions, by where they stand: the panel, and the name of the curve."""
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels
        for target in panel["targets"]
    }
