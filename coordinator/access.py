# SPDX-License-Identifier: Apache-2.0
"""What users of the coordinator's machine may be, by its configuration."""

from __future__ import annotations

from coordinator.rpc.identity import Role
from runtime.schema import InvalidValue
from runtime.settings.coordinator import AccessSettings
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
