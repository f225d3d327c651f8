# SPDX-License-Identifier: Apache-2.0
"""A private CA in a directory, for who has none: it signs what nodes, coordinator and people show.

The certificates' names are SPIFFE IDs, ``spiffe://DOMAIN/ROLE/NAME``. Of each, a directory
holds what its machine needs, under the names that Kubernetes has for them.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from runtime.certificates import valid_until
from runtime.settings.tls import CA_NAME, CERTIFICATE_NAME, KEY_NAME

CA_DAYS, DAYS = 3650, 365

# So that a machine whose clock is a little late takes it at once.
_BEGUN_BEFORE = timedelta(hours=1)

_CA_KEY_NAME = "ca.key"


# Of a kind of enumeration that mypy takes for texts.
_ENCODING: Any = serialization.Encoding.PEM


class PkiError(RuntimeError):
    """Nothing was made; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate with its key, and where both are."""

    directory: Path
    identity: str
    expires_at: datetime


class Authority:
    """The CA in a directory."""

    def __init__(self, directory: Path) -> None:
        """PkiError if there is none."""
        self.directory = directory
        try:
            self._pem = (directory / CA_NAME).read_bytes()
            self._certificate = x509.load_pem_x509_certificate(self._pem)
            key = (directory / _CA_KEY_NAME).read_bytes()
            self._key = serialization.load_pem_private_key(key, None)
        except FileNotFoundError as error:
            raise PkiError(
                f"{error.filename}: there is no CA here; make one: backsightctl pki init --directory"
                f" {directory} --domain DOMAIN"
            ) from error
        except (OSError, ValueError, TypeError) as error:
            raise PkiError(f"{directory}: the CA cannot be read: {error}") from error
        names = self._certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        (uri,) = names.value.get_values_for_type(x509.UniformResourceIdentifier)
        self.domain = uri.removeprefix("spiffe://")

    @classmethod
    def create(
        cls,
        directory: Path,
        domain: str,
        *,
        days: float = CA_DAYS,
        replace: bool = False,
        now: datetime | None = None,
    ) -> Authority:
        """A new one, for a trust domain."""
        paths = [directory / CA_NAME, directory / _CA_KEY_NAME]
        _refuse_existing(
            paths, "all certificates that it signed are worth nothing", replace=replace
        )
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"Backsight CA of {domain}"[:64])]
        )
        begins = now or datetime.now(UTC)
        certificate = (
            _builder(name, name, key.public_key(), begins, begins + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(ca=True), critical=True)
            .add_extension(_names(f"spiffe://{domain}"), critical=False)
            .sign(key, hashes.SHA256())
        )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(directory / _CA_KEY_NAME, _pem(key), 0o600)
        _write(directory / CA_NAME, certificate.public_bytes(_ENCODING), 0o644)
        return cls(directory)

    @property
    def expires_at(self) -> datetime:
        return valid_until(self._certificate)

    def issue(
        self,
        path: str,
        *,
        is_server: bool,
        dns: Sequence[str] = (),
        addresses: Sequence[str] = (),
        days: float = DAYS,
        replace: bool = False,
        now: datetime | None = None,
    ) -> Issued:
        """A certificate for ``spiffe://DOMAIN/PATH``, as of a server or of a client, with a new key."""
        directory = self.directory / path.replace("/", "-")
        paths = [directory / name for name in (CA_NAME, CERTIFICATE_NAME, KEY_NAME)]
        _refuse_existing(paths, "what is there now is gone", replace=replace)
        begins = now or datetime.now(UTC)
        expires = min(begins + timedelta(days=days), self.expires_at)
        if expires <= begins:
            raise PkiError(f"{self.directory}: the CA was valid until {expires}; make another one")
        identity = f"spiffe://{self.domain}/{path}"
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, path.rpartition("/")[2][:64])])
        usage = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
        certificate = (
            _builder(self._certificate.subject, name, key.public_key(), begins, expires)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(_names(identity, dns, addresses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        directory.mkdir(mode=0o700, exist_ok=True)
        # Daemons that read in between wait until both go together.
        _write(directory / KEY_NAME, _pem(key), 0o600)
        _write(
            directory / CERTIFICATE_NAME,
            certificate.public_bytes(_ENCODING),
            0o644,
        )
        _write(directory / CA_NAME, self._pem, 0o644)
        return Issued(directory, identity, expires)


def _refuse_existing(paths: Sequence[Path], loss: str, *, replace: bool) -> None:
    for path in paths:
        if path.exists() and not replace:
            raise PkiError(
                f"{path}: is there already; with --replace a new one is made, and {loss}"
            )


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begins: datetime,
    expires: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - _BEGUN_BEFORE)
        .not_valid_after(expires)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _names(
    uri: str, dns: Sequence[str] = (), addresses: Sequence[str] = ()
) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName(
        [
            x509.UniformResourceIdentifier(uri),
            *map(x509.DNSName, dns),
            *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses),
        ]
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem: bytes = key.private_bytes(  # type: ignore[attr-defined]
        _ENCODING,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem


def _write(path: Path, data: bytes, mode: int) -> None:
    """The whole file or none, which nobody else can ever read unless the mode says so."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(number, mode)
            os.fsync(number)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
