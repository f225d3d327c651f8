# SPDX-License-Identifier: Apache-2.0
"""Who calls, by what proves it, and what it may call."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.settings.tls import CoordinatorTlsSettings, DnsNameSettings


class Role(enum.StrEnum):
    """What somebody is to the coordinator; as it stands in a SPIFFE ID."""

    NODE = "node"
    OPERATOR = "operator"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who somebody is, and what proves it: words of a certificate, or of the kernel."""

    role: Role
    name: str
    proof: str

    def __str__(self) -> str:
        return f"{self.role} {self.name} ({self.proof})"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and until when that is so, in seconds since 1970; None: for as long as it calls."""

    identity: Identity
    expires_at_s: float | None = None


class Unidentified(Exception):
    """Somebody who is known, and is nobody to us; the message is for him."""


_NODES = frozenset({Role.NODE})
_READERS = frozenset({Role.VIEWER, Role.OPERATOR})
_OPERATORS = frozenset({Role.OPERATOR})

ALLOWED: dict[str, frozenset[Role]] = {
    "Control": _NODES,
    "Slices": _NODES,
    "ListTraces": _READERS,
    "TailTraces": _READERS,
    "GetTrace": _READERS,
    "ListNodes": _READERS,
    "GetCounters": _READERS,
    "GetStatus": _READERS,
    "TakeSnapshot": _OPERATORS,
    "ForgetNode": _OPERATORS,
    "PinTrace": _OPERATORS,
    "DeleteTrace": _OPERATORS,
}
"""Who may call what."""

ANYBODY = frozenset({"Check", "Watch"})
"""Health: what everybody may call whose certificate is valid, whoever it names, if anybody."""


def why_not(identity: Identity | None, method: str, anonymous: Role | None) -> str | None:
    """Why somebody may not call a method; None if it may.

    Identity None: it comes over a network on which nobody is asked who it is. It may be a node,
    and it is ``anonymous`` beside that.
    """
    if method in ANYBODY:
        return None
    allowed = ALLOWED.get(method, frozenset())
    roles = " or ".join(sorted(allowed)) or "nobody"
    if identity is None:
        if allowed & {Role.NODE, anonymous}:
            return None
        return (
            f"{method} is for the role {roles}, and here nobody proves who he is; call at the"
            " coordinator's Unix socket (`access.socket`, on its own machine), or with a certificate"
            " (`tls`), or let everybody who comes be that (`access.anonymous`)"
        )
    if identity.role in allowed:
        return None
    return f"{method} is not for {identity}; allowed: the role {roles}"


class Names(Protocol):
    """How identities stand in certificates."""

    def identity(self, uris: Sequence[str], dns_names: Sequence[str]) -> Identity:
        """Whose a certificate with these names is; Unidentified if nobody's."""


# What node names have (runtime.settings.node), and SPIFFE paths.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_SPIFFE = "spiffe://"


@dataclass(frozen=True, slots=True)
class SpiffeNames:
    """``spiffe://TRUST-DOMAIN/…/ROLE/NAME``."""

    trust_domain: str

    def identity(self, uris: Sequence[str], dns_names: Sequence[str]) -> Identity:
        ids = [uri for uri in uris if uri.lower().startswith(_SPIFFE)]
        wanted = f"{_SPIFFE}{self.trust_domain}/…/ROLE/NAME, with the role {_one_of(Role)}"
        if len(ids) != 1:
            has = " and ".join((*ids, *dns_names)) or "no name"
            raise Unidentified(f"the certificate has {has}; wanted: one URI {wanted}")
        trust_domain, *path = ids[0][len(_SPIFFE) :].split("/")
        if trust_domain != self.trust_domain:
            raise Unidentified(
                f"the certificate is of {ids[0]}, which is of another trust domain; wanted: {wanted}"
            )
        *_, role, name = ("", *path) if len(path) > 1 else ("", "", "")
        if role not in list(Role) or not _NAME.fullmatch(name):
            raise Unidentified(f"the certificate is of {ids[0]}; wanted: {wanted}")
        return Identity(Role(role), name, ids[0])


@dataclass(frozen=True, slots=True)
class DnsNames:
    """By patterns with a star, one for each role."""

    patterns: DnsNameSettings

    def identity(self, uris: Sequence[str], dns_names: Sequence[str]) -> Identity:
        given = [(role, getattr(self.patterns, role)) for role in Role]
        patterns = [(role, pattern) for role, pattern in given if pattern is not None]
        found = [
            Identity(role, name, dns_name)
            for role, pattern in patterns
            for dns_name in dns_names
            if (name := _starred(pattern, dns_name)) is not None
        ]
        if len(found) != 1:
            wanted = ", ".join(f"{pattern} for the role {role}" for role, pattern in patterns)
            has = " and ".join((*dns_names, *uris)) or "no name"
            raise Unidentified(f"the certificate has {has}; wanted: one DNS name like {wanted}")
        return found[0]


def _starred(pattern: str, name: str) -> str | None:
    """What stands in a name for the star of a pattern."""
    before, _, after = pattern.partition("*")
    match = re.fullmatch(f"{re.escape(before)}(.+){re.escape(after)}", name.lower())
    return match[1] if match is not None and _NAME.fullmatch(match[1]) else None


def _one_of(roles: type[Role]) -> str:
    return ", ".join(roles)


def names_of(settings: CoordinatorTlsSettings, own_uris: Sequence[str]) -> Names:
    """How to read certificates. ``own_uris`` of the coordinator's own say its trust domain.

    ValueError if nobody says it.
    """
    if settings.dns is not None:
        return DnsNames(settings.dns)
    if settings.trust_domain is not None:
        return SpiffeNames(settings.trust_domain)
    for uri in own_uris:
        if uri.startswith(_SPIFFE):
            return SpiffeNames(uri[len(_SPIFFE) :].partition("/")[0])
    raise ValueError(
        "tls.trust_domain: is not given, and the coordinator's own certificate has no SPIFFE ID that"
        " would say it; give it, or `dns` if names are DNS names"
    )
