# SPDX-License-Identifier: Apache-2.0
"""What those may be who show no certificate, by the coordinator's configuration."""

from __future__ import annotations

from coordinator.rpc.identity import Role
from runtime.endpoint import is_loopback
from runtime.schema import InvalidValue
from runtime.settings.coordinator import NOBODY, AccessSettings, Settings
from runtime.unix_socket import Allowed, Credentials


def role_of(access: AccessSettings, peer: Credentials) -> Role | None:
    """The highest role of who connected to a Unix socket; None if nobody named him.

    Names are looked up now: users come and go. InvalidValue if one of them is not there.
    """
    for role, allow in (Role.OPERATOR, access.operators), (Role.VIEWER, access.viewers):
        try:
            allowed = Allowed(*allow.resolve())
        except InvalidValue as error:
            raise InvalidValue(f"access.{role}s.{error.key}", error.problem) from error
        if allowed.admits(peer):
            return role
    return None


_MAY: dict[str, str] = {
    NOBODY: "may pass for any node",
    "viewer": "may pass for any node, and read all traces (`access.anonymous: viewer`)",
    "operator": (
        "may pass for any node, and read and delete all traces, have more collected and forget nodes"
        " (`access.anonymous: operator`)"
    ),
}


def warning_of_strangers(settings: Settings) -> str | None:
    """What anybody may who reaches the coordinator over a network; None if he must prove who he is."""
    if settings.tls is not None or is_loopback(settings.listen):
        return None
    return (
        f"serves on {settings.listen} without TLS: whoever reaches it {_MAY[settings.access.anonymous]};"
        " `tls` in the configuration ends that (docs/tls.md)"
    )
