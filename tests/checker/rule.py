# SPDX-License-Identifier: Apache-2.0
"""The streaming latency rule, from its specification in README.md beside this file."""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.checker.errors import BadInput
from tests.checker.recording import RecordedSpan


@dataclass(frozen=True, slots=True)
class Parameters:
    """The rule's parameters; raises BadInput for values that the specification does not allow."""

    quantile_permille: int
    warmup: int
    window: int
    factor_permille: int

    def __post_init__(self) -> None:
        for name, low, high in (
            ("quantile_permille", 1, 1000),
            ("window", 1, None),
            ("warmup", 1, self.window),
            ("factor_permille", 1, None),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < low or (high is not None and value > high):
                raise BadInput(
                    f"{name} is {value!r}, want an integer from {low} to {high if high is not None else 'any'}"
                )


@dataclass(slots=True)
class Window:
    """The durations (ns) of one (pod, operation), in the order in which they came and, beside it, sorted."""

    parameters: Parameters
    arrived: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)

    def present(self, duration_ns: int) -> bool:
        """Whether a span of this duration fires; takes the duration into the window."""
        wanted = self.parameters
        count = len(self.ordered)
        fires = False
        if count >= wanted.warmup:
            rank = -(-wanted.quantile_permille * count // 1000)
            fires = duration_ns * 1000 > wanted.factor_permille * self.ordered[rank - 1]
        self.arrived.append(duration_ns)
        insort(self.ordered, duration_ns)
        if count == wanted.window:
            del self.ordered[bisect_left(self.ordered, self.arrived.popleft())]
        return fires


def firing_spans(spans: Iterable[RecordedSpan], parameters: Parameters) -> list[RecordedSpan]:
    """The spans on which the rule fires, in the order in which it does."""
    windows: dict[tuple[str, str], Window] = {}
    fired = []
    for span in sorted(
        spans, key=lambda span: (span.end_ns, span.start_ns, span.span_id, span.trace_id)
    ):
        window = windows.setdefault((span.pod, span.operation), Window(parameters))
        if window.present(span.end_ns - span.start_ns):
            fired.append(span)
    return fired


def read_parameters(rules: Path, recording: Path) -> Parameters:
    """The parameters that the table ``rules`` gives for ``recording``; BadInput if it gives none.

    The table's key is the recording's file name without .csv and .xz.
    """
    try:
        table = json.loads(rules.read_text())
        factors = table["factor_permille"]
        known = sorted(factors.keys())
        common = (table["quantile_permille"], table["warmup"], table["window"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{rules}: not a table of latency rules: {error!r}") from error
    name = recording.name.removesuffix(".xz").removesuffix(".csv")
    if name not in known:
        raise BadInput(
            f"{rules}: no factor_permille for {name!r}; it knows {', '.join(known)}; add one"
        )
    return Parameters(*common, factors[name])
