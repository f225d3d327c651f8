# SPDX-License-Identifier: Apache-2.0
"""What the parts of the node take of its settings (runtime.settings.node)."""

from __future__ import annotations

from appliance.core.config import NodeConfig, TriggerLimits, TriggerPolicy
from appliance.quotas import Quota, Quotas
from runtime import VERSION
from runtime.settings.node import PolicySettings, Settings
from runtime.unix_socket import Allowed


def allowed(settings: Settings) -> Allowed:
    """Who may attach. InvalidValue names a user or group that does not exist."""
    return Allowed(*settings.allow.resolve())


def quotas(settings: Settings) -> Quotas:
    """Of users and groups. InvalidValue names one that does not exist."""
    users, groups = settings.quotas.resolve()
    return Quotas(
        {uid: Quota(f"user {name}", size) for uid, (name, size) in users.items()},
        {gid: Quota(f"group {name}", size) for gid, (name, size) in groups.items()},
    )


def core_config(settings: Settings) -> NodeConfig:
    """The part that the core decides by."""
    triggers, report = settings.triggers, settings.report
    return NodeConfig(
        node=settings.node,
        software=VERSION,
        cluster_seed=settings.cluster_seed,
        limits=TriggerLimits(
            triggers.per_process_per_s,
            triggers.per_process_burst,
            triggers.per_trigger_per_s,
            triggers.per_trigger_burst,
            triggers.laterals_max,
        ),
        policies={name: _policy(policy) for name, policy in triggers.policies.items()},
        default_policy=_policy(triggers.default_policy),
        report_bytes_per_s=report.bytes_per_s,
        report_burst_bytes=report.burst_bytes,
        abandon_threshold=report.abandon_threshold,
        chunk_bytes=report.chunk_bytes,
    )


def _policy(settings: PolicySettings) -> TriggerPolicy:
    return TriggerPolicy(settings.weight, settings.report_bytes_per_s)
