# SPDX-License-Identifier: Apache-2.0
"""The files of TLS, in the configurations of both daemons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from runtime.schema import PATH, RELOADABLE, Matching

CA_NAME, CERTIFICATE_NAME, KEY_NAME = "ca.crt", "tls.crt", "tls.key"
"""As cert-manager, and Kubernetes, name them in a secret."""

TLS_AND_INSECURE = (
    "true, and there is a `tls` section, which is not in clear text; allowed: one of both"
)

HOST_NAME = Matching(r"[A-Za-z0-9._-]{1,253}", "a host name")
TRUST_DOMAIN = Matching(
    r"[a-z0-9._-]{1,255}", "a SPIFFE trust domain: 1 to 255 characters of a-z 0-9 . _ -"
)
_PATTERN = Matching(r"[a-z0-9.-]*\*[a-z0-9.-]*", "a DNS name in lower case with one *")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: a certificate with its key, and those by which the other side's is checked."""

    ca: Annotated[str, PATH, RELOADABLE]
    certificate: Annotated[str, PATH, RELOADABLE]
    key: Annotated[str, PATH, RELOADABLE]

    @classmethod
    def of_directory(cls, directory: Path) -> TlsFiles:
        """Where ``backsightctl pki`` and cert-manager put them."""
        return cls(*(str(directory / name) for name in (CA_NAME, CERTIFICATE_NAME, KEY_NAME)))


@dataclass(frozen=True, slots=True)
class NodeTlsSettings(TlsFiles):
    """``server_name``: for which name the coordinator's certificate must be; else the endpoint's."""

    server_name: Annotated[str | None, HOST_NAME, RELOADABLE] = None


@dataclass(frozen=True, slots=True)
class DnsNameSettings:
    """By which DNS names certificates have a role; the star stands for the name of who has it."""

    node: Annotated[str | None, _PATTERN, RELOADABLE] = None
    operator: Annotated[str | None, _PATTERN, RELOADABLE] = None
    viewer: Annotated[str | None, _PATTERN, RELOADABLE] = None


@dataclass(frozen=True, slots=True)
class CoordinatorTlsSettings(TlsFiles):
    """Whose certificates are good for what: by SPIFFE IDs of a trust domain, or else by DNS names."""

    trust_domain: Annotated[str | None, TRUST_DOMAIN, RELOADABLE] = None
    dns: Annotated[DnsNameSettings | None, RELOADABLE] = None
