# SPDX-License-Identifier: Apache-2.0
"""The files by which a daemon proves who it is: read, checked, and read again when they change.

A pair is replaced file by file, or by a link; whoever reads in between has a certificate and
a key that do not go together, or half of a file. What cannot be used is not taken up, and
is a problem only when it stays so.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pwd
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.log import Log, MessageId
from runtime.memfd import memfd
from runtime.settings.tls import TlsFiles

if TYPE_CHECKING:
    from runtime.certificates import Certificate

LOOK_EVERY_S = 5.0
"""How soon a change is taken up. What was opened before is not touched by it."""

# Certificates of less than a tenth of their time: somebody should have renewed them.
_LATE = 0.1

# Of a connection that is tried to learn why another one failed.
_TRY_S = 5.0


class TlsError(OSError):
    """Files of TLS that cannot be used; the message says which, why, and what to do."""


class OverError(TlsError):
    """A certificate that is over."""

    def __init__(self, problem: str, expires_at: datetime) -> None:
        super().__init__(problem)
        self.expires_at = expires_at


class Usage(enum.Enum):
    """What a certificate is shown for."""

    SERVER = "servers"
    CLIENT = "clients"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the files hold, all of it checked."""

    ca: bytes
    certificate: bytes
    key: bytes
    facts: Certificate
    context: ssl.SSLContext = field(compare=False)
    """The same for OpenSSL, which took it."""


def load(files: TlsFiles, section: str, usage: Usage, now: datetime | None = None) -> Credentials:
    """Read them. TlsError names the key of the configuration, in its ``section``.

    It says the same for as long as the same is wrong: who says it once compares the words.
    """
    from runtime import certificates

    at = now or datetime.now(UTC)
    ca = _read(f"{section}.ca", files.ca)
    certificate = _read(f"{section}.certificate", files.certificate)
    key = _read(f"{section}.key", files.key)
    try:
        trusted = certificates.certificates(ca)
    except ValueError as error:
        raise TlsError(_no_pem(f"{section}.ca", files.ca, str(error))) from error
    try:
        chain = certificates.certificates(certificate)
    except ValueError as error:
        problem = _no_pem(f"{section}.certificate", files.certificate, str(error))
        raise TlsError(problem) from error
    if not trusted:
        raise TlsError(_no_pem(f"{section}.ca", files.ca, "there is no certificate in it"))
    if all(one.expires_at <= at for one in trusted):
        raise TlsError(
            f"{section}.ca: {files.ca}: all that is in it is over, the last since"
            f" {moment_in_words(max(one.expires_at for one in trusted))}; get the certificate of the CA"
            " that is in use"
        )
    if not chain:
        problem = _no_pem(f"{section}.certificate", files.certificate, "there is none in it")
        raise TlsError(problem)
    facts = chain[0]
    try:
        public = certificates.public_key(key)
    except TypeError as error:
        raise TlsError(
            f"{section}.key: {files.key}: it has a password, which nobody is there to type; allowed: a"
            " private key without one, in a file that only this user can read"
        ) from error
    except ValueError as error:
        problem = _no_pem(f"{section}.key", files.key, "it is no private key that can be read")
        raise TlsError(problem) from error
    if public != facts.public_key:
        raise TlsError(
            f"{section}.key: {files.key}: it is not the key of the certificate in {files.certificate};"
            " give both files as they were made together"
        )
    if facts.expires_at <= at:
        raise OverError(
            f"{section}.certificate: {files.certificate}: it was valid until"
            f" {moment_in_words(facts.expires_at)}; renew it",
            facts.expires_at,
        )
    if facts.begins_at > at:
        raise TlsError(
            f"{section}.certificate: {files.certificate}: it is valid from"
            f" {moment_in_words(facts.begins_at)} on, which is later than now; is this machine's clock right?"
        )
    if not (facts.for_servers if usage is Usage.SERVER else facts.for_clients):
        raise TlsError(
            f"{section}.certificate: {files.certificate}: it is not meant for {usage.value}; get one with"
            f" the extended key usage {usage.name.lower()}Auth"
        )
    context = _context(files, section, usage, ca, certificate, key)
    return Credentials(ca, certificate, key, facts, context)


def _context(
    files: TlsFiles, section: str, usage: Usage, ca: bytes, certificate: bytes, key: bytes
) -> ssl.SSLContext:
    """What they are for OpenSSL. It refuses what is too weak, and gRPC, which does the same, says nothing then."""
    server = usage is Usage.SERVER
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    try:
        # It reads files only, and those on disk may be others by now.
        with _as_file(certificate) as shown, _as_file(key) as private, _as_file(ca) as trusted:
            try:
                context.load_cert_chain(shown, private)
            except ssl.SSLError as error:
                raise TlsError(
                    f"{section}.certificate: {files.certificate}: OpenSSL refuses to show it, or what stands"
                    f" behind it: {_reason(error)}; allowed: keys of RSA with 2048 bits or more, or of an"
                    " elliptic curve, and signatures by SHA-256 or better; get such a certificate, with"
                    " its key"
                ) from error
            try:
                context.load_verify_locations(trusted)
            except ssl.SSLError as error:
                raise TlsError(
                    f"{section}.ca: {files.ca}: OpenSSL refuses it: {_reason(error)}; allowed: certificates"
                    " of CAs, as PEM; get those of the CA that is in use"
                ) from error
    except TlsError:
        raise
    except OSError as error:
        raise TlsError(f"{section}: its files cannot be tried: {error.strerror}") from error
    return context


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    with os.fdopen(memfd("tls"), "wb", buffering=0) as file:
        file.write(data)
        yield f"/proc/self/fd/{file.fileno()}"


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


def moment_in_words(moment: datetime) -> str:
    """As all messages on certificates have it; UTC."""
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _no_pem(key: str, path: str, problem: str) -> str:
    return f"{key}: {path}: {problem}; allowed: PEM, which begins with -----BEGIN"


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise TlsError(
            f"{key}: {path}: there is no such file; `backsightctl pki` makes one, if no CA of yours does"
        ) from error
    except PermissionError as error:
        raise TlsError(
            f"{key}: {path}: the user {_user()} may not read it; make it his:"
            f" chown {_user()} {path}, and let him enter the directories above"
        ) from error
    except OSError as error:
        raise TlsError(f"{key}: {path}: cannot be read: {error.strerror}") from error


def _user() -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return str(os.geteuid())


_Stats = tuple[tuple[int, int, int, int] | None, ...]


class Rotating:
    """The files of a section, taken up again whenever they changed.

    ``current`` None: they never could be used. Whoever serves makes the first call of take_up().
    """

    def __init__(self, files: TlsFiles, section: str, usage: Usage, log: Log) -> None:
        self.current: Credentials | None = None
        self.problem: str | None = None
        """Why what is in the files now is not taken up."""
        self._files = files
        self._section = section
        self._usage = usage
        self._log = log
        self._seen: _Stats | None = None  # when they were taken up
        self._looked_at: _Stats | None = None
        self._over_at_s = 0.0  # of a certificate that is refused for that
        self._said: str | None = None
        self._warned: Credentials | None = None

    @property
    def files(self) -> TlsFiles:
        return self._files

    @property
    def expires_at_s(self) -> float:
        """When the certificate in use is over, in seconds since 1970; 0: there is none.

        Where none ever could be used: when the one in the files was, if it is refused for that.
        """
        return (
            self._over_at_s if self.current is None else self.current.facts.expires_at.timestamp()
        )

    @property
    def why_unusable(self) -> str | None:
        """Why nothing can be shown to the other side, and what to do; None if something can."""
        if self.current is None:
            return self.problem
        facts = self.current.facts
        if facts.expires_at > datetime.now(UTC):
            return None
        return self.problem or (
            f"{self._section}.certificate: {self._files.certificate}: it was valid until"
            f" {moment_in_words(facts.expires_at)}; renew it"
        )

    def take_up(self, files: TlsFiles | None = None) -> None:
        """Read them now, or others from now on; TlsError leaves all as it was."""
        wanted = files or self._files
        seen = _stats(wanted)
        self._use(load(wanted, self._section, self._usage))
        self._files, self._seen = wanted, seen

    def _use(self, credentials: Credentials) -> None:
        self.problem = self._said = None
        if credentials != self.current:
            self.current = credentials

    def turn_to(self, files: TlsFiles) -> None:
        """Look at these from now on; what was read before is kept until they can be used."""
        if files != self._files:
            self._files, self._seen, self._looked_at = files, None, None

    def look(self) -> bool:
        """Read them if they changed. Whether there is something new to be used."""
        before = self.current
        seen = _stats(self._files)
        if seen != self._seen:
            try:
                credentials = load(self._files, self._section, self._usage)
            except TlsError as error:
                self.problem = str(error)
                self._over_at_s = (
                    error.expires_at.timestamp() if isinstance(error, OverError) else 0.0
                )
            else:
                # What changed while it was read is read again at the next look.
                if seen == _stats(self._files):
                    self._use(credentials)
                self._seen = seen
            self._say_problem(settled=seen == self._looked_at)
        self._looked_at = seen
        self._say_late()
        if self.current == before:
            return False
        assert self.current is not None
        if before is not None:
            self._log.info(
                f"{self._files.certificate}: taken up, {self.current.facts.who}, valid until"
                f" {moment_in_words(self.current.facts.expires_at)}",
                message_id=MessageId.RELOADED,
            )
        return True

    def _say_problem(self, *, settled: bool) -> None:
        """Once, and not of what is being replaced this very moment."""
        if self.problem is None or self.problem == self._said or not settled:
            return
        self._said = self.problem
        # Who has none at all says so wherever it is missed.
        if self.current is not None:
            self._log.error(
                f"{self.problem}. What was read before is kept", message_id=MessageId.RELOAD_REFUSED
            )

    def _say_late(self) -> None:
        if self.current is None or self.current is self._warned:
            return
        facts = self.current.facts
        whole, left = facts.expires_at - facts.begins_at, facts.expires_at - datetime.now(UTC)
        if left < _LATE * whole:
            self._warned = self.current
            self._log.warning(
                f"{self._files.certificate}: valid until {moment_in_words(facts.expires_at)} only; renew it,"
                " and it is taken up by itself"
            )


def _stats(files: TlsFiles) -> _Stats:
    return tuple(_stat(path) for path in (files.ca, files.certificate, files.key))


def _stat(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


class ServerContext:
    """By which Python's own servers meet connections, as the files are; who connects shows nothing.

    TlsError: the files cannot be used.
    """

    def __init__(self, files: TlsFiles, section: str, log: Log) -> None:
        self._files = Rotating(files, section, Usage.SERVER, log)
        self._files.take_up()
        self._context = self._made()

    def current(self) -> ssl.SSLContext:
        """For the next connection."""
        return self._context

    @property
    def expires_at_s(self) -> float:
        """When the certificate that is shown is over, in seconds since 1970."""
        return self._files.expires_at_s

    def look(self, files: TlsFiles) -> None:
        """Take these files up if they are others, or were changed."""
        self._files.turn_to(files)
        if self._files.look():
            self._context = self._made()

    def _made(self) -> ssl.SSLContext:
        assert self._files.current is not None
        context = self._files.current.context
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        return context


def leave_words_to_us() -> None:
    """Keep gRPC from writing a line on standard error for each handshake that fails.

    It names no peer, and a stranger would fill the log with them. Before gRPC does anything.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def why_not(
    endpoint: str, files: TlsFiles, server_name: str | None, facts: Certificate
) -> str | None:
    """Why a server is not reached by TLS, by trying: gRPC says little. None: it may be reached.

    Blocks, for some seconds at most.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(files.ca)
        context.load_cert_chain(files.certificate, files.key)
        plain = socket.create_connection((host, int(port)), _TRY_S)
    except OSError:
        return None  # said by whoever reads the files, or by gRPC
    with plain:
        try:
            with context.wrap_socket(plain, server_hostname=server_name or host) as secured:
                # With TLS 1.3 a server learns of our certificate after we have finished.
                if secured.recv(1):
                    return None
        except ssl.SSLCertVerificationError as error:
            return (
                f"its certificate is not accepted: {error.verify_message.rstrip('.')}; it must be signed"
                f" by a CA in {files.ca}, be valid now, and be for {server_name or host}"
            )
        except TimeoutError:
            return "it takes the connection and says nothing"
        except ssl.SSLError as error:
            if error.reason == "WRONG_VERSION_NUMBER":
                return "it speaks no TLS; has it a `tls` section?"
            return _not_accepted(files, facts, error.reason)
        except OSError:
            pass  # hung up on, which says as much
    return _not_accepted(files, facts, None)


def _not_accepted(files: TlsFiles, facts: Certificate, reason: str | None) -> str:
    said = f" ({reason})" if reason else ""
    return (
        f"it hung up when it saw the certificate in {files.certificate}{said}: {facts.who}, signed by"
        f" {facts.issuer}, valid until {moment_in_words(facts.expires_at)}. That must be signed by a CA in"
        " the coordinator's tls.ca, and be valid by its clock"
    )
