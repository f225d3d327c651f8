# SPDX-License-Identifier: Apache-2.0
"""What the coordinator's core counts, and how things stand: for metrics and for operators."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.core.clock import ClockOffset
from coordinator.core.verdict import ReasonKind
from protocol.messages import NodeId
from protocol.verdicts import VerdictKind
from protocol.versions import Agreed

# 20 ms is what following a request over ten nodes shall take, 0.2 s the quiet after
# which it is judged, 300 s for how long what is missing is waited for.
DURATION_BOUNDS_S = (
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)


@dataclass(slots=True)
class TriggerCounters:
    """Of one trigger name: reports by nodes, repetitions included; and traces that it collected.

    A trace of several names counts once for each.
    """

    reports: int = 0
    traces: int = 0

    def add(self, other: TriggerCounters) -> None:
        """Count what another one has counted, too."""
        self.reports += other.reports
        self.traces += other.traces


@dataclass(slots=True)
class CoordinatorCounters:
    """Since start; they only rise. Each is a fact that an operator may have to act on.

    ``verdicts`` counts every version of a trace's verdict by its kind, ``reasons`` those of
    them that have a reason of that kind; ``closed`` counts traces by the kind that they were
    closed with, each time they were. ``triggers`` is the sum of what ``by_trigger`` has.
    """

    hellos_refused: int = 0
    triggers: int = 0
    groups_abandoned: int = 0
    groups_given_up: int = 0  # by this coordinator, to keep within a bound
    firings_left_out: int = 0  # of known groups, by nodes that fire too much
    abandonments_refused: int = 0
    bytes_over_slice_max: int = 0  # of slices, dropped for slice_bytes_max
    traces_finished_early: int = 0  # traces, evidence or bytes over their bound
    traces_late: int = 0  # bytes, or a doubt, came for a closed one
    chunks_unwelcome: int = 0  # on a stream that may not send
    chunks_over_credit: int = 0
    chunks_with_gap: int = 0
    clock_replies_refused: int = 0
    messages_unexpected: int = 0
    messages_unknown: int = 0
    verdicts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VerdictKind, 0))
    reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ReasonKind, 0))
    closed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VerdictKind, 0))
    by_trigger: dict[str, TriggerCounters] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CoordinatorFigures:
    """How things stand.

    ``traces_open`` wait for an answer, bytes, or the end of what is written; ``traces_settled`` have
    their verdict and may still grow; ``traces_closed`` are remembered by their outcome.
    ``memory_bytes`` is undurable bytes and credit that is out; ``streams_waiting`` would send more if
    they had credit; ``assembly_bytes`` what is stored of
    the traces that are not closed.
    """

    nodes_known: int
    nodes_connected: int
    traces_open: int
    traces_settled: int
    traces_closed: int
    groups: int
    memory_bytes: int
    undurable_bytes: int
    streams_waiting: int
    assembly_bytes: int
    answers_waiting: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as an operator sees it. ``gone_ns``: for how long it has not been connected."""

    node: str
    id: NodeId
    connected: bool
    peer: str
    addresses: tuple[str, ...]
    clock: ClockOffset | None
    agreed: Agreed | None
    gone_ns: int
    software: str
    identity: str
