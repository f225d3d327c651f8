# SPDX-License-Identifier: Apache-2.0
"""What became of traces whose trigger came late, by what their writers know that they wrote.

Of each part, what one node has of one trace, it is known from its writer when it was written
and with which spans. It is

    whole      all of them came
    evicted    some did not, and the verdict says `evicted` of this node
    dropped    some did not, and the verdict says that they were lost when they were written:
               a failure too, since a pool has room for what is new
    unreached  nothing came, and nobody says anything of the node: who called it was evicted,
               which the verdict says, and with that who it called
    lost       anything else
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.recall.horizon import Horizon
from tests.recall.late import TRIGGER, Asked

_COHERENT_SHARE_MIN = 0.99  # of the whole ones; a fingerprint may be another trace's


class Fate(enum.StrEnum):
    WHOLE = "whole"
    EVICTED = "evicted"
    DROPPED = "dropped"
    UNREACHED = "unreached"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Written:
    """What a writer knows of its part of a trace. Times are Unix ns."""

    trace_id: str
    node: str
    first_ns: int
    last_ns: int
    span_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Collected:
    """What ``backsightctl show TRACE --json`` prints, as far as it is looked at.

    ``spans``: those that are there with their end, by node.
    """

    trace_id: str
    verdict: str
    reasons: frozenset[tuple[str, str]]
    triggers: frozenset[str]
    spans: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, shown: Mapping[str, Any]) -> Self:
        spans: dict[str, set[str]] = {}
        for span in shown["spans"]:
            if not span["unfinished"]:
                spans.setdefault(span["node"], set()).add(span["span_id"])
        return cls(
            shown["trace_id"],
            shown["verdict"]["kind"],
            frozenset((reason["kind"], reason["node"]) for reason in shown["verdict"]["reasons"]),
            frozenset(trigger["name"] for trigger in shown["triggers"]),
            {node: frozenset(ids) for node, ids in spans.items()},
        )

    def nodes_said(self, *kinds: str) -> frozenset[str]:
        """Of which the verdict says any of this."""
        return frozenset(node for kind, node in self.reasons if kind in kinds)


def read_collected(captured: Path) -> dict[str, Collected]:
    """By trace id, what tests.cluster.fetch wrote into a folder."""
    shown = (json.loads(path.read_text()) for path in captured.glob("*.json"))
    return {found.trace_id: found for found in map(Collected.of, shown)}


@dataclass(frozen=True, slots=True)
class Part:
    """One node's part of a trace that was asked for.

    Ages are those of its first record, when the trigger fired and at most when it was
    collected. So are the horizons: as it was said, and what was sure. None reaches back to
    the node's start.
    """

    trace_id: str
    node: str
    fate: Fate
    age_ns: int
    collected_age_ns: int
    horizon_ns: int | None
    sure_ns: int | None

    @property
    def is_young(self) -> bool:
        """Whether it must be whole."""
        return self.sure_ns is None or self.collected_age_ns < self.sure_ns


@dataclass(frozen=True, slots=True)
class TraceFate:
    """All parts of one trace."""

    trace_id: str
    verdict: str
    parts: tuple[Part, ...]

    @property
    def is_whole(self) -> bool:
        return all(part.fate is Fate.WHOLE for part in self.parts)

    @property
    def is_young(self) -> bool:
        return all(part.is_young for part in self.parts)


@dataclass(frozen=True, slots=True)
class Judgement:
    traces: tuple[TraceFate, ...]
    failures: tuple[str, ...]

    @property
    def parts(self) -> list[Part]:
        return [part for trace in self.traces for part in trace.parts]

    def fates(self) -> dict[str, int]:
        counted = Counter(part.fate.value for part in self.parts)
        return {fate.value: counted[fate.value] for fate in Fate}


def judge(
    asked: Iterable[Asked],
    written: Mapping[str, Sequence[Written]],
    collected: Mapping[str, Collected],
    horizons: Mapping[str, Horizon],
) -> Judgement:
    """``written`` and ``collected`` are by trace id, ``horizons`` by node."""
    traces = []
    in_time = [found for found in collected.values() if found.triggers - {TRIGGER}]
    early = {found.trace_id for found in in_time}
    for one in asked:
        found = collected.get(one.trace_id)
        # Asked for twice: what was collected in time may be let go of in between.
        if one.trace_id in early:
            continue
        parts = tuple(
            _part(one, part, found, horizons[part.node]) for part in written[one.trace_id]
        )
        traces.append(TraceFate(one.trace_id, "" if found is None else found.verdict, parts))
    alone = [found.verdict for found in in_time if TRIGGER not in found.triggers]
    coherent = alone.count("coherent")
    failures = list(_failures(traces))
    if coherent < _COHERENT_SHARE_MIN * len(alone):
        failures.append(
            f"{coherent} of {len(alone)} traces that were triggered in time are coherent"
        )
    return Judgement(tuple(traces), tuple(failures))


def _part(asked: Asked, part: Written, found: Collected | None, horizon: Horizon) -> Part:
    return Part(
        part.trace_id,
        part.node,
        Fate.LOST if found is None else _fate(part, found),
        asked.fired_ns - part.first_ns,
        asked.judged_ns - part.first_ns,
        horizon.said_ns(asked.fired_ns),
        horizon.sure_ns(asked.judged_ns),
    )


def _fate(part: Written, found: Collected) -> Fate:
    came = found.spans.get(part.node, frozenset())
    evicted = found.nodes_said("evicted")
    if part.span_ids <= came:
        return Fate.WHOLE
    if part.node in evicted:
        return Fate.EVICTED
    if part.node in found.nodes_said("lossy", "maybe_lossy"):
        return Fate.DROPPED
    named = {node for _, node in found.reasons}
    if not came and evicted and part.node not in named:
        return Fate.UNREACHED
    return Fate.LOST


def _failures(traces: Sequence[TraceFate]) -> Iterable[str]:
    whole = [trace for trace in traces if trace.is_whole]
    if not whole or len(whole) == len(traces):
        yield f"{len(whole)} of {len(traces)} traces are whole, so nothing is shown"
    for trace in traces:
        for part in trace.parts:
            if part.fate is Fate.LOST:
                yield f"{trace.trace_id}: what {part.node} wrote is missing, and nobody says why"
            if part.fate is Fate.DROPPED:
                yield f"{trace.trace_id}: what {part.node} was to write found no room"
        if trace.verdict == "coherent" and not trace.is_whole:
            yield f"{trace.trace_id}: called coherent, and is not"
        if trace.is_young and not trace.is_whole:
            fates = ", ".join(f"{part.node} {part.fate}" for part in trace.parts)
            yield f"{trace.trace_id}: younger than all horizons, and not whole: {fates}"
    coherent = sum(trace.verdict == "coherent" for trace in whole)
    if coherent < _COHERENT_SHARE_MIN * len(whole):
        yield f"{coherent} of {len(whole)} whole traces are called coherent"
