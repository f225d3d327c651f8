# SPDX-License-Identifier: Apache-2.0
"""The files of TLS: what is wrong with them is said, and what changes is taken up whole."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa

from ctl.pki import _ENCODING, Authority, _pem
from runtime import tls
from runtime.settings.tls import TlsFiles
from runtime.tls import Rotating, TlsError, Usage, load
from tests.unit.logs import SILENT, logs_to

DAY = timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "pki", "d")


@pytest.fixture
def directory(authority: Authority) -> Path:
    return authority.issue("node/n1", is_server=False).directory


def break_pair(directory: Path) -> None:
    other = Authority(directory.parent).issue("node/n2", is_server=False)
    shutil.copy(other.directory / "tls.key", directory / "tls.key")


def encrypt(directory: Path) -> None:
    subprocess.run(
        ["openssl", "pkey", "-aes256", "-passout", "pass:x"]
        + ["-in", str(directory / "tls.key"), "-out", str(directory / "locked")],
        check=True,
    )
    (directory / "locked").rename(directory / "tls.key")


def weaken(directory: Path) -> None:
    """The same, with a key that OpenSSL does not take by default."""
    ca, own = Authority(directory.parent), directory / "tls.crt"
    before = x509.load_pem_x509_certificate(own.read_bytes())
    key = rsa.generate_private_key(65537, 1024)
    builder = (
        x509.CertificateBuilder()
        .issuer_name(before.issuer)
        .subject_name(before.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - DAY)
        .not_valid_after(datetime.now(UTC) + 8 * DAY)
    )
    for extension in before.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    signed = builder.sign(ca._key, hashes.SHA256())
    own.write_bytes(signed.public_bytes(_ENCODING))
    (directory / "tls.key").write_bytes(_pem(key))  # type: ignore[arg-type] # as of a curve


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda d: (d / "tls.key").unlink(), "tls.key: {d}/tls.key: there is no such file; `backs"),
        (lambda d: (d / "ca.crt").unlink(), "tls.ca: {d}/ca.crt: there is no such file"),
        (break_pair, "tls.key: {d}/tls.key: it is not the key of the certificate in {d}/tls.crt;"),
        (encrypt, "tls.key: {d}/tls.key: it has a password"),
        (lambda d: (d / "tls.key").write_text("x"), "tls.key: {d}/tls.key: it is no private key"),
        (lambda d: (d / "tls.crt").write_text("x"), "tls.certificate: {d}/tls.crt: there is none"),
        (lambda d: (d / "ca.crt").write_text(""), "tls.ca: {d}/ca.crt: there is no certificate"),
        (
            lambda d: (d / "tls.crt").write_text(
                "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
            ),
            "tls.certificate: {d}/tls.crt: ",
        ),
        (
            weaken,
            "tls.certificate: {d}/tls.crt: OpenSSL refuses to show it, or what stands behind it: ee",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    directory: Path, break_it: Callable[[Path], object], problem: str
) -> None:
    break_it(directory)
    with pytest.raises(TlsError) as caught:
        load(TlsFiles.of_directory(directory), "tls", Usage.CLIENT)
    assert str(caught.value).startswith(problem.format(d=directory))


@pytest.mark.parametrize(
    ("after", "problem"), [(-2 * DAY, "it is valid from "), (400 * DAY, "it was valid until ")]
)
def test_a_certificate_out_of_its_time_is_refused(
    directory: Path, after: timedelta, problem: str
) -> None:
    with pytest.raises(TlsError, match=problem):
        load(TlsFiles.of_directory(directory), "tls", Usage.CLIENT, datetime.now(UTC) + after)


@pytest.mark.parametrize("after", [-2 * DAY, 400 * DAY])
def test_what_is_wrong_is_said_in_the_same_words_at_any_time(
    directory: Path, after: timedelta
) -> None:
    def words(at: datetime) -> str:
        with pytest.raises(TlsError) as caught:
            load(TlsFiles.of_directory(directory), "tls", Usage.CLIENT, at)
        return str(caught.value)

    at = datetime.now(UTC) + after
    assert words(at) == words(at + timedelta(seconds=5))


def test_a_ca_that_is_over_is_refused(tmp_path: Path) -> None:
    past = datetime.now(UTC) - 3 * DAY
    authority = Authority.create(tmp_path, "d", days=2, now=past)
    made = authority.issue("node/n1", is_server=False, now=past)
    with pytest.raises(TlsError, match=r"tls\.ca: .*: all that is in it is over, the last since"):
        load(TlsFiles.of_directory(made.directory), "tls", Usage.CLIENT)


def test_a_daemon_without_room_for_a_file_tries_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    files = Rotating(TlsFiles.of_directory(directory), "tls", Usage.CLIENT, SILENT)
    with monkeypatch.context() as patched:
        patched.setattr(tls, "memfd", full)
        assert not files.look()
        assert files.problem == "tls: its files cannot be tried: Too many open files"
    assert files.look()


def test_a_nodes_certificate_is_none_for_a_coordinator(directory: Path) -> None:
    with pytest.raises(TlsError, match="it is not meant for servers; get one with the extended"):
        load(TlsFiles.of_directory(directory), "tls", Usage.SERVER)


@pytest.mark.root
def test_a_key_that_the_daemons_user_may_not_read_is_said(directory: Path) -> None:
    for above in (directory, *directory.parents[:-2]):
        above.chmod(above.stat().st_mode | 0o055)
    program = (
        "import os, sys; from pathlib import Path\n"
        "from runtime.settings.tls import TlsFiles\n"
        "from runtime.tls import Usage, TlsError, load\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: load(TlsFiles.of_directory(Path(sys.argv[1])), 'tls', Usage.CLIENT)\n"
        "except TlsError as error: print(error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    key = directory / "tls.key"
    assert said.startswith(f"tls.key: {key}: the user nobody may not read it; make it his: chown")


def rotating(directory: Path, said: list[str]) -> Rotating:
    files = Rotating(TlsFiles.of_directory(directory), "tls", Usage.CLIENT, logs_to(said))
    files.take_up()
    return files


def test_what_is_replaced_file_by_file_is_taken_up_when_it_goes_together(
    authority: Authority, directory: Path
) -> None:
    said: list[str] = []
    files = rotating(directory, said)
    first = files.current
    assert not files.look()
    new = authority.issue("node/n2", is_server=False).directory
    (new / "tls.key").rename(directory / "tls.key")
    assert not files.look()
    assert files.current is first
    (new / "tls.crt").rename(directory / "tls.crt")
    assert files.look()
    assert files.current is not None
    assert files.current.facts.uris == ("spiffe://d/node/n2",)
    assert files.problem is None
    # A moment between two files is no error.
    assert len(said) == 1
    assert said[0].startswith(f"{directory}/tls.crt: taken up, spiffe://d/node/n2, valid until")
    assert not files.look()


def test_what_stays_wrong_is_said_once_and_the_old_one_kept(
    authority: Authority, directory: Path
) -> None:
    said: list[str] = []
    files = rotating(directory, said)
    first = files.current
    whole = (directory / "tls.crt").read_bytes()
    # Written in place, so half of it can be read.
    (directory / "tls.crt").write_bytes(whole[: len(whole) // 2])
    assert not files.look()
    assert said == []
    assert not any(files.look() for _ in range(3))
    assert [text.partition(": there is none")[0] for text in said] == [
        f"tls.certificate: {directory}/tls.crt"
    ]
    assert said[0].endswith(". What was read before is kept")
    assert files.current is first
    (directory / "tls.crt").write_bytes(whole)
    assert not files.look()  # the same as before
    assert files.problem is None


@pytest.mark.parametrize("usage", Usage)
def test_a_renewal_that_openssl_refuses_is_said_and_not_taken_up(
    authority: Authority, usage: Usage
) -> None:
    made = authority.issue("one", is_server=usage is Usage.SERVER)
    said: list[str] = []
    files = Rotating(TlsFiles.of_directory(made.directory), "tls", usage, logs_to(said))
    files.take_up()
    first = files.current
    weaken(made.directory)
    assert not any(files.look() for _ in range(3))
    (refused,) = said
    assert "one/tls.crt: OpenSSL refuses to show it" in refused
    assert refused.endswith(". What was read before is kept")
    assert files.current is first
    assert files.expires_at_s == pytest.approx(made.expires_at.timestamp(), abs=1)
    authority.issue("one", is_server=usage is Usage.SERVER, replace=True)
    assert files.look()
    assert files.problem is None


def test_a_swapped_link_is_a_change(tmp_path: Path, authority: Authority) -> None:
    """As Kubernetes replaces a secret."""
    old = authority.issue("node/n1", is_server=False).directory
    new = authority.issue("node/n2", is_server=False).directory
    link = tmp_path / "current"
    link.symlink_to(old)
    files = rotating(link, [])
    (tmp_path / "next").symlink_to(new)
    (tmp_path / "next").rename(link)
    assert files.look()
    assert files.current is not None
    assert files.current.facts.uris == ("spiffe://d/node/n2",)


def test_what_changes_while_it_is_read_is_read_again(
    authority: Authority, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = rotating(directory, [])
    first = files.current
    for name in ("n2", "n3"):
        authority.issue(f"node/{name}", is_server=False)
    pki = directory.parent

    def put(name: str) -> None:
        for file in ("tls.key", "tls.crt"):
            (pki / f"node-{name}" / file).rename(directory / file)

    put("n2")
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        data = real(path)
        if path.name == "tls.key" and (pki / "node-n3/tls.key").exists():
            put("n3")
        return data

    monkeypatch.setattr(Path, "read_bytes", read)
    assert not files.look()
    assert files.current is first
    assert files.look()
    assert files.current is not None
    assert files.current.facts.uris == ("spiffe://d/node/n3",)


def test_a_certificate_that_is_over_is_not_shown(authority: Authority, tmp_path: Path) -> None:
    made = authority.issue("node/n1", is_server=False)
    files = Rotating(TlsFiles.of_directory(made.directory), "tls", Usage.CLIENT, SILENT)
    assert files.expires_at_s == 0
    files.look()
    assert files.why_unusable is None
    assert files.expires_at_s == pytest.approx(made.expires_at.timestamp(), abs=1)
    (made.directory / "tls.key").unlink()
    missing = Rotating(TlsFiles.of_directory(made.directory), "tls", Usage.CLIENT, SILENT)
    missing.look()
    assert "there is no such file" in (missing.why_unusable or "")


def test_since_when_a_certificate_is_over_is_told_also_of_one_that_is_never_taken_up(
    tmp_path: Path,
) -> None:
    """The alert asks for it, also after the machine was booted."""
    past = datetime.now(UTC) - 9 * DAY
    authority = Authority.create(tmp_path, "d", now=past)
    made = authority.issue("node/n1", is_server=False, days=2, now=past)
    files = Rotating(TlsFiles.of_directory(made.directory), "tls", Usage.CLIENT, SILENT)
    files.look()
    assert files.current is None
    assert files.expires_at_s == pytest.approx(made.expires_at.timestamp(), abs=1)
    (made.directory / "tls.crt").unlink()
    files.look()
    assert files.expires_at_s == 0
    renewed = authority.issue("node/n1", is_server=False, replace=True)
    files.look()
    assert files.expires_at_s == pytest.approx(renewed.expires_at.timestamp(), abs=1)


def test_little_time_left_is_said_once(tmp_path: Path) -> None:
    past = datetime.now(UTC) - 19.5 * DAY
    authority = Authority.create(tmp_path, "d", now=past)
    made = authority.issue("node/n1", is_server=False, days=20, now=past)
    said: list[str] = []
    files = rotating(made.directory, said)
    for _ in range(2):
        files.look()
    assert len(said) == 1
    assert "renew it, and it is taken up by itself" in said[0]
