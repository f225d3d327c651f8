# SPDX-License-Identifier: Apache-2.0
"""What the node's core is told by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.messages import CHUNK_BYTES_MAX, LATERALS_MAX

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """How many traces local triggers may collect, and how many each may drag along.

    Rates and bursts are in traces: a firing counts with its laterals.
    """

    per_process_per_s: float = 100.0
    per_process_burst: float = 100.0
    per_trigger_per_s: float = 100.0
    per_trigger_burst: float = 100.0
    laterals_max: int = LATERALS_MAX

    def __post_init__(self) -> None:
        if not 0 <= self.laterals_max <= LATERALS_MAX:
            raise ValueError(f"laterals_max is {self.laterals_max}; allowed: 0 to {LATERALS_MAX}")


@dataclass(frozen=True, slots=True)
class TriggerPolicy:
    """A trigger name's part of report bandwidth and report store.

    ``weight`` is relative to the other triggers'. ``report_bytes_per_s`` is a
    limit of its own below the node's; None: no such limit.
    """

    weight: float = 1.0
    report_bytes_per_s: int | None = None

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight is {self.weight}; it must be positive")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Settings of one node's core. Names end in their units.

    ``abandon_threshold`` is the fraction of the report store above which
    groups are given up. A group younger than ``abandon_grace_ns`` is spared, as
    long as the store is not filled by half of the rest too: another trigger may
    be on its way to this node that wants the same trace, and what was given up
    cannot be collected again. ``triggered_max`` bounds the triggered traces that
    hold nothing in the report store (never seen here, reported already, or
    still searched for), the firings that wait for their acknowledgement and the abandoned groups
    remembered for each coordinator: a hundred bytes or two each. ``triggered_ttl_ns`` is how
    long a trace that is of no more use, or was never seen, stays triggered.
    ``groups_per_trace_max`` is how many triggers one trace is collected under, as primary
    or lateral: whatever happens to it concerns all of them.
    ``status_interval_ns`` is the least time between two statuses of a trace
    that say no more than that it grew. ``gather_ns`` is for how long bytes of a trace wait
    for more while a process has it open: mostly that is a request which is about to
    end, and all of it goes in one chunk then. ``software`` is which Backsight it is, for operators.
    """

    node: str
    cluster_seed: int = 0
    limits: TriggerLimits = field(default_factory=TriggerLimits)
    policies: Mapping[str, TriggerPolicy] = field(default_factory=dict)
    default_policy: TriggerPolicy = field(default_factory=TriggerPolicy)
    report_bytes_per_s: int | None = None
    report_burst_bytes: int = 1 << 20
    abandon_threshold: float = 0.75
    abandon_grace_ns: int = NS_PER_S // 2
    triggered_max: int = 65536
    triggered_ttl_ns: int = 60 * NS_PER_S
    groups_per_trace_max: int = 64
    trigger_names_max: int = 256
    chunk_bytes: int = 64 << 10
    status_interval_ns: int = 50_000_000
    gather_ns: int = 50_000_000
    software: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.chunk_bytes <= CHUNK_BYTES_MAX:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}; allowed: 1 to {CHUNK_BYTES_MAX}")
        if not 0 < self.abandon_threshold <= 1:
            raise ValueError(
                f"abandon_threshold is {self.abandon_threshold}; allowed: above 0, up to 1"
            )
        if self.triggered_max < 1 or self.trigger_names_max < 1:
            raise ValueError("triggered_max and trigger_names_max must be at least 1")
        if self.groups_per_trace_max < 1:
            raise ValueError(
                f"groups_per_trace_max is {self.groups_per_trace_max}; it must be at least 1"
            )

    def policy(self, trigger: str) -> TriggerPolicy:
        return self.policies.get(trigger, self.default_policy)
