# SPDX-License-Identifier: Apache-2.0
"""The coordinator's side of TLS: what it shows, and who the others are by what they show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from coordinator.rpc.admission import Context
from coordinator.rpc.identity import Caller, Names, names_of
from runtime.log import Log
from runtime.settings.tls import CoordinatorTlsSettings
from runtime.tls import Credentials, Rotating, TlsError, Usage

if TYPE_CHECKING:
    from runtime.certificates import Certificate


def _first(pem: bytes) -> Certificate:
    """The caller's own, if it showed a chain."""
    # Who uses no TLS does not import it.
    from runtime.certificates import certificates

    return certificates(pem)[0]


class Guard:
    """Asks each caller who it is, if there is TLS."""

    def __init__(
        self,
        settings: CoordinatorTlsSettings | None,
        distrust: Callable[[], object],
        log: Log,
    ) -> None:
        """``distrust`` ends all connections. TlsError: the files cannot be used."""
        self._distrust = distrust
        self._log = log
        self._names: Names | None = None
        self._given: Credentials | None = None
        # To read one takes a ms, and who calls calls again.
        self._shown = functools.lru_cache(maxsize=256)(_first)
        self.files: Rotating | None = None
        """None: without TLS."""
        if settings is not None:
            self.files, self._names = self._read(settings)

    def _read(self, settings: CoordinatorTlsSettings) -> tuple[Rotating, Names]:
        files = Rotating(settings, "tls", Usage.SERVER, self._log)
        files.take_up()
        assert files.current is not None
        try:
            return files, names_of(settings, files.current.facts.uris)
        except ValueError as error:
            raise TlsError(str(error)) from error

    def reconfigure(self, settings: CoordinatorTlsSettings | None) -> None:
        """Go on with these files and names; TlsError leaves all as it was."""
        if settings is None or self.files is None:
            return  # waits for a restart
        before, names = self.files.current, self._names
        files, self._names = self._read(settings)
        if files.current == before and files.files == self.files.files:
            files = self.files
        self.files = files
        self._end_untrusted(before, names)

    def look(self) -> None:
        """Take files up that were changed."""
        if self.files is not None:
            before = self.files.current
            if self.files.look():
                self._end_untrusted(before, self._names)

    def _end_untrusted(self, before: Credentials | None, names: Names | None) -> None:
        """Who is trusted no more must not go on; all others come again."""
        assert self.files is not None
        assert self.files.current is not None
        assert before is not None
        if self.files.current.ca != before.ca or self._names != names:
            self._log.info("trusts others than before, so all connections begin anew")
            self._distrust()

    @property
    def expires_at_s(self) -> float:
        """When the certificate in use is over, in seconds since 1970; 0: there is none."""
        return self.files.expires_at_s if self.files is not None else 0.0

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """What new connections are met with: always the latest. None: without TLS."""
        if self.files is None:
            return None
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._new_configuration,  # type: ignore[arg-type] # None is allowed, as it says itself
            require_client_authentication=True,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        assert self.files is not None
        given = self._given = self.files.current
        assert given is not None
        return grpc.ssl_server_certificate_configuration(
            [(given.key, given.certificate)], root_certificates=given.ca
        )

    def _new_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """For each connection, in a thread of gRPC's. None: as before."""
        assert self.files is not None
        return None if self.files.current is self._given else self._configuration()

    def caller(self, context: Context) -> Caller | None:
        """Who calls; None if nobody is asked. Unidentified says why it is nobody."""
        if self._names is None:
            return None
        shown = self._shown(b"".join(context.auth_context().get("x509_pem_cert", ())))
        identity = self._names.identity(shown.uris, shown.dns_names)
        return Caller(identity, shown.expires_at.timestamp())
