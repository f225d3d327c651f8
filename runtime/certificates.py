# SPDX-License-Identifier: Apache-2.0
"""What stands in certificates and keys.

The one module that knows the library for it, which takes 5 MB and 25 ms to import: who uses no
TLS does not import this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the daemons want to know of one. ``public_key``: DER, to compare."""

    subject: str
    issuer: str
    begins_at: datetime
    expires_at: datetime
    uris: tuple[str, ...]
    dns_names: tuple[str, ...]
    for_servers: bool
    for_clients: bool
    public_key: bytes

    @property
    def who(self) -> str:
        """The names in it, for a person."""
        return ", ".join((*self.uris, *self.dns_names)) or self.subject


def certificates(pem: bytes) -> list[Certificate]:
    """All that are in a text, in its order. ValueError if one cannot be read."""
    return [_certificate(one) for one in _PEM.findall(pem)]


def _certificate(pem: bytes) -> Certificate:
    found = x509.load_pem_x509_certificate(pem)
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        dns_names = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        uris, dns_names = [], []
    try:
        usages = list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return Certificate(
        found.subject.rfc4514_string(),
        found.issuer.rfc4514_string(),
        _in_utc(found, "not_valid_before"),
        valid_until(found),
        tuple(uris),
        tuple(dns_names),
        ExtendedKeyUsageOID.SERVER_AUTH in usages,
        ExtendedKeyUsageOID.CLIENT_AUTH in usages,
        _der(found.public_key()),
    )


def valid_until(certificate: x509.Certificate) -> datetime:
    """The end of its time."""
    return _in_utc(certificate, "not_valid_after")


def _in_utc(certificate: x509.Certificate, name: str) -> datetime:
    # The library's later versions have it with a time zone, and warn of the other one.
    aware: datetime | None = getattr(certificate, f"{name}_utc", None)
    return aware or getattr(certificate, name).replace(tzinfo=UTC)


def _der(key: object) -> bytes:
    data: bytes = key.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return data


def public_key(private_pem: bytes) -> bytes:
    """Of a private key. ValueError if it is none, TypeError if it has a password."""
    return _der(serialization.load_pem_private_key(private_pem, None).public_key())
