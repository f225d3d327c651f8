# SPDX-License-Identifier: Apache-2.0
"""The private CA: what it signs, and what it never does by itself."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ctl.__main__ import main
from ctl.pki import Authority, PkiError
from runtime.certificates import certificates, public_key
from runtime.settings.tls import TlsFiles
from runtime.tls import Usage, load

DOMAIN = "prod.example.org"


def pki(directory: Path, *words: str) -> int:
    return main(["pki", *words, "--directory", str(directory)])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    here = tmp_path / "pki"
    assert pki(here, "init", "--domain", DOMAIN) == 0
    return here


def verified(directory: Path, name: str, purpose: str) -> bool:
    """By OpenSSL, as strictly as it can."""
    done = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-purpose", purpose]
        + ["-CAfile", directory / "ca.crt", directory / name / "tls.crt"],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


@pytest.mark.parametrize(
    ("words", "name", "identity", "purpose", "other"),
    [
        (["coordinator", "--ip", "::1"], "coordinator", "coordinator", "sslserver", "sslclient"),
        (["node", "n-1"], "node-n-1", "node/n-1", "sslclient", "sslserver"),
        (["operator", "ann"], "operator-ann", "operator/ann", "sslclient", "sslserver"),
        (["viewer", "bob"], "viewer-bob", "viewer/bob", "sslclient", "sslserver"),
    ],
)
def test_what_it_signs_is_good_for_one_thing(
    directory: Path, words: list[str], name: str, identity: str, purpose: str, other: str
) -> None:
    assert pki(directory, *words) == 0
    assert verified(directory, name, purpose)
    assert not verified(directory, name, other)
    usage = Usage.SERVER if purpose == "sslserver" else Usage.CLIENT
    loaded = load(TlsFiles.of_directory(directory / name), "tls", usage)
    assert loaded.facts.uris == (f"spiffe://{DOMAIN}/{identity}",)
    assert public_key(loaded.key) == loaded.facts.public_key
    assert loaded.ca == (directory / "ca.crt").read_bytes()


def test_nobody_else_can_read_a_key(directory: Path) -> None:
    assert pki(directory, "node", "n1") == 0
    for key in (directory / "ca.key", directory / "node-n1/tls.key"):
        assert key.stat().st_mode & 0o777 == 0o600
    for folder in (directory, directory / "node-n1"):
        assert folder.stat().st_mode & 0o777 == 0o700
    # Whoever else is on the machine checks by it.
    assert (directory / "node-n1/ca.crt").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("words", [["init", "--domain", "other"], ["node", "n1"]])
def test_nothing_is_overwritten_unless_it_is_said(
    directory: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert pki(directory, "node", "n1") == 0
    files = [path for path in directory.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    assert pki(directory, *words) == 1
    assert "is there already; with --replace a new one is made" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in files} == before
    assert pki(directory, *words, "--replace") == 0
    assert {path: path.read_bytes() for path in files} != before


def test_without_a_ca_nothing_is_signed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pki(tmp_path, "node", "n1") == 1
    said = capsys.readouterr().err
    assert f"{tmp_path}/ca.crt: there is no CA here; make one: backsightctl pki init" in said


def test_the_coordinator_has_the_names_by_which_it_is_called(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        pki(directory, "coordinator")
    assert "--dns NAME, --ip ADDRESS" in capsys.readouterr().err
    said = ["--dns", "hub.example.org", "--dns", "hub", "--ip", "10.0.0.1", "--json"]
    assert pki(directory, "coordinator", *said) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["identity"] == f"spiffe://{DOMAIN}/coordinator"
    (found,) = certificates((directory / "coordinator/tls.crt").read_bytes())
    assert found.dns_names == ("hub.example.org", "hub")


def test_nothing_outlives_its_ca(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    authority = Authority.create(tmp_path / "a", DOMAIN, days=10)
    made = authority.issue("node/n1", is_server=False, days=20)
    assert made.expires_at == authority.expires_at
    late = Authority.create(tmp_path / "b", DOMAIN, days=1, now=now - timedelta(days=2))
    with pytest.raises(PkiError, match="the CA was valid until"):
        late.issue("node/n1", is_server=False)


@pytest.mark.parametrize(
    "words",
    [["node", "a/b"], ["node", ""], ["init", "--domain", "A b"], ["node", "n", "--days", "0"]],
)
def test_names_that_would_mean_something_else_are_refused(
    directory: Path, words: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        pki(directory, *words)
    assert ended.value.code == 2
