# SPDX-License-Identifier: Apache-2.0
"""What the node's core counts: every decision, by trigger name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class TriggerCounters:
    """One trigger name's counters. They only rise.

    ``fired`` is the sum of four: ``rate_limited_process`` and
    ``rate_limited_trigger`` count refused firings, ``dry_run`` those that were only
    to be counted, by their name (DRY_RUN_PREFIX), ``admitted`` the others. ``merged``
    counts those of a group that was known already, or for a trace with as many groups as
    there may be; ``laterals_cut`` neighbours beyond ``laterals_max``, or that had as many
    groups, or of such a firing. ``collected``
    counts groups taken in, fired here or elsewhere; ``evicted_before`` traces
    that had lost something to eviction when the trigger came, ``lossy`` those
    that had lost records when written. ``reported_bytes`` counts what was put
    into chunks, repetitions included; ``reported`` slices that became durable
    as a whole. ``abandoned`` counts groups given up here, ``dropped_remote``
    those given up because another node had.
    """

    fired: int = 0
    rate_limited_process: int = 0
    rate_limited_trigger: int = 0
    dry_run: int = 0
    admitted: int = 0
    merged: int = 0
    laterals_cut: int = 0
    collected: int = 0
    evicted_before: int = 0
    lossy: int = 0
    reported: int = 0
    reported_bytes: int = 0
    abandoned: int = 0
    dropped_remote: int = 0
    store_full: int = 0
    forgotten: int = 0

    def add(self, other: TriggerCounters) -> None:
        """Count what another one has counted, too."""
        for counter in fields(self):
            setattr(self, counter.name, getattr(self, counter.name) + getattr(other, counter.name))


@dataclass(slots=True)
class NodeCounters:
    """The node's counters."""

    triggers: dict[str, TriggerCounters] = field(default_factory=dict)
    marks_dropped: int = 0
    firings_dropped: int = 0
    abandonments_forgotten: int = 0
    refused: int = 0
    unexpected_messages: int = 0
    unknown_messages: int = 0
