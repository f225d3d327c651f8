# SPDX-License-Identifier: Apache-2.0
"""Makes of dashboard.yaml, which says what there is to see, a file that Grafana imports.

    dashboard.py YAML OUTPUT

The JSON is of schema version 39, which Grafana 10.3 and later read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from runtime.schema import ConfigError, Matching, load

_SCHEMA_VERSION = 39

# Grafana's grid: three curves, or six figures, stand beside each other.
_COLUMNS = 24
_CURVES_WIDTH, _CURVES_HEIGHT = 8, 8
_STAT_WIDTH, _STAT_HEIGHT = 4, 4

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

# The line above what is stacked: not a part of it.
_CAPACITY = "capacity"

_UNITS = Matching(
    "binBps|bytes|cps|percent|percentunit|s|short",
    "binBps, bytes, cps (events a second), percent, percentunit (1 is all), s or short (a number)",
)


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves, or with ``stat`` the last value of one, large.

    ``queries``: expressions by the name of their curves, with labels in {{}}. One that is
    called capacity is a line above what is stacked. ``red_below``, ``red_above``: from where
    on somebody should act.
    """

    title: str
    about: str
    unit: Annotated[str, _UNITS]
    queries: Mapping[str, str]
    stat: bool = False
    stacked: bool = False
    red_below: float | None = None
    red_above: float | None = None

    @property
    def width(self) -> int:
        return _STAT_WIDTH if self.stat else _CURVES_WIDTH

    @property
    def height(self) -> int:
        return _STAT_HEIGHT if self.stat else _CURVES_HEIGHT


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    rows: tuple[Row, ...]


def _thresholds(panel: Panel) -> dict[str, Any]:
    if panel.red_below is not None:
        steps = [(None, "red"), (panel.red_below, "green")]
    elif panel.red_above is not None:
        steps = [(None, "green"), (panel.red_above, "red")]
    else:
        steps = [(None, "green")]
    return {"mode": "absolute", "steps": [{"value": at, "color": color} for at, color in steps]}


def _stacking(*, stacked: bool) -> dict[str, str]:
    return {"mode": "normal" if stacked else "none", "group": "A"}


def _capacity_line() -> dict[str, Any]:
    look = {
        "custom.stacking": _stacking(stacked=False),
        "custom.fillOpacity": 0,
        "custom.lineStyle": {"fill": "dash", "dash": [10, 10]},
    }
    return {
        "matcher": {"id": "byName", "options": _CAPACITY},
        "properties": [{"id": key, "value": value} for key, value in look.items()],
    }


def _field_config(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "thresholds" if panel.stat else "palette-classic"},
        "thresholds": _thresholds(panel),
    }
    if not panel.stat:
        is_bounded = panel.red_below is not None or panel.red_above is not None
        defaults["custom"] = {
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": _stacking(stacked=panel.stacked),
            "thresholdsStyle": {"mode": "dashed" if is_bounded else "off"},
        }
    overrides = [_capacity_line()] if _CAPACITY in panel.queries else []
    return {"defaults": defaults, "overrides": overrides}


def _options(panel: Panel) -> dict[str, Any]:
    if panel.stat:
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
        }
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
                "range": True,
            }
            for place, (legend, expr) in enumerate(panel.queries.items())
        ],
        "fieldConfig": _field_config(panel),
        "options": _options(panel),
    }


def _panels(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """Each row from left to right, as many beside each other as fit."""
    number, y = 1, 0
    for row in rows:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": y},
            "panels": [],
        }
        number, y, x = number + 1, y + 1, 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + panel.height
            yield _panel(number, panel, x, y)
            number, x = number + 1, x + panel.width
        y += row.panels[-1].height


def _instances(name: str, label: str, metric: str) -> dict[str, Any]:
    """A variable: which of the instances that have such a metric somebody wants to see."""
    query = f"label_values({metric}, instance)"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time that is shown changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def in_json(dashboard: Dashboard) -> dict[str, Any]:
    """As Grafana's model has it. Curves are chosen by the variables node and coordinator."""
    return {
        "uid": "backsight",
        "title": "Backsight",
        "description": "Nodes, coordinator and kernel probes of Backsight.",
        "tags": ["backsight", "tracing"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # the same moment in all panels
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                },
                _instances("node", "Node", "backsight_node_pool_capacity_bytes"),
                _instances("coordinator", "Coordinator", "backsight_coordinator_nodes_known"),
            ]
        },
        "panels": list(_panels(dashboard.rows)),
    }


def main() -> None:
    """``dashboard.py YAML OUTPUT``."""
    source, output = map(Path, sys.argv[1:])
    try:
        dashboard = load(source, Dashboard)
    except ConfigError as error:
        sys.exit(str(error))
    output.write_text(json.dumps(in_json(dashboard), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
