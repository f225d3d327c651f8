# SPDX-License-Identifier: Apache-2.0
"""All metrics that there are, and those that a text or an expression names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import appliance.metrics
import coordinator.metrics
from runtime.metrics import Metric

TABLES = {
    appliance.metrics.PREFIX: appliance.metrics.METRICS,
    coordinator.metrics.PREFIX: coordinator.metrics.METRICS,
}

KNOWN: dict[str, Metric] = {
    f"{prefix}_{metric.name}": metric for prefix, table in TABLES.items() for metric in table
}
"""Those of our own, by their full names."""

BUILD_INFO = frozenset(f"{prefix}_build_info" for prefix in TABLES)

OF_OTHERS = frozenset(
    {
        # Prometheus makes these.
        "up",
        "ALERTS",
        # prometheus-client's, of each daemon.
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
    }
)
"""What is watched besides."""

# What Prometheus gives to each series, and to each alert.
_LABELS_OF_PROMETHEUS = frozenset({"job", "instance", "alertname", "alertstate"})

_SELECTOR = re.compile(r"\b([A-Za-z_:][\w:]*)\{([^{}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_NAME = re.compile(r"\b(?:backsight_(?:node|coordinator)_\w+|process_\w+|up\b|ALERTS\b)")


def names_in(text: str) -> set[str]:
    """All metrics that it names, a histogram by the name of its family."""
    found = set()
    for name in _NAME.findall(text):
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        is_histogram = family in KNOWN and KNOWN[family].histogram
        found.add(family if is_histogram else name)
    return found


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on a label, as in ``metric{label="value"}``."""

    metric: str
    label: str
    operator: str
    value: str

    @property
    def is_of_prometheus(self) -> bool:
        return self.label in _LABELS_OF_PROMETHEUS

    @property
    def selects(self) -> bool | None:
        """Whether a value that the label may have satisfies it; None: its values are not fixed."""
        places = KNOWN[self.metric].places.values()
        values = {labels[self.label] for labels in places if self.label in labels}
        if not values:
            return None
        if "~" in self.operator:
            matching = {value for value in values if re.fullmatch(self.value, value)}
        else:
            matching = {self.value} & values
        return bool(matching) and matching != values


def matchers_in(expression: str) -> Iterator[Matcher]:
    """All conditions on labels of metrics of our own."""
    for name, inside in _SELECTOR.findall(expression):
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        metric = family if family in KNOWN else name
        if metric in KNOWN:
            for label, operator, value in _MATCHER.findall(inside):
                yield Matcher(metric, label, operator, value)
