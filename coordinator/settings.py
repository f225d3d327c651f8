# SPDX-License-Identifier: Apache-2.0
"""What the parts of the coordinator take of its settings (runtime.settings.coordinator)."""

from __future__ import annotations

from coordinator.core.config import NS_PER_S, CoordinatorConfig
from coordinator.core.policy import policy_of
from coordinator.store.keeping import Keep
from coordinator.store.retention import StoreLimits
from protocol.hashing import percentage_threshold
from protocol.messages import NO_POLICY, Policy
from protocol.verdicts import VerdictKind
from runtime.settings.coordinator import PolicySettings, Settings, StoreSettings


def store_limits(settings: StoreSettings) -> StoreLimits:
    """How much is kept, for how long."""
    given = settings.retention
    return StoreLimits(
        settings.bytes_max,
        Keep(
            settings.age_max_s,
            dict(given.per_trigger),
            {VerdictKind(kind): keep_s for kind, keep_s in given.per_verdict.items()},
        ),
        settings.pinned_bytes_max_or_default,
    )


def policy(settings: PolicySettings | None) -> Policy:
    """What nodes are told to record."""
    if settings is None:
        return NO_POLICY
    return policy_of(percentage_threshold(settings.percentage))


def core_config(settings: Settings, priority_seed: int) -> CoordinatorConfig:
    """The part that the core decides by."""
    return CoordinatorConfig(
        answer_timeout_ns=_ns(settings.answer_timeout_s),
        quiet_ns=_ns(settings.quiet_s),
        provisional_ns=_ns(settings.provisional_s),
        linger_ns=_ns(settings.linger_s),
        missing_linger_ns=_ns(settings.missing_linger_s),
        node_expiry_ns=_ns(settings.node_expiry_s),
        memory_bytes=settings.memory_bytes,
        credit_window_bytes=settings.credit_window_bytes,
        slice_bytes_max=settings.slice_bytes_max,
        traces_max=settings.traces_max,
        evidence_max=settings.evidence_max,
        closed_max=settings.closed_max,
        nodes_max=settings.nodes_max,
        priority_seed=priority_seed,
        # The other half is what the store deletes from when it is full.
        assembly_bytes_max=settings.store.bytes_max // 2,
    )


def _ns(seconds: float) -> int:
    return int(seconds * NS_PER_S)
