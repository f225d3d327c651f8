# SPDX-License-Identifier: Apache-2.0
"""A daemon's log: with fields in the journal, in lines elsewhere, and nobody else's words pass for its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from runtime.log import Entry, Format, Level, Log, MessageId, stderr_is_journal
from runtime.schema import ConfigError, loads
from runtime.settings.coordinator import Settings as CoordinatorSettings
from runtime.settings.node import Settings as NodeSettings
from tests.unit.logs import logs_to

# In a mount namespace of its own, where it is the journal as well as who logs.
JOURNAL = """
import os, socket, sys
from pathlib import Path
from coordinator.__main__ import main
from runtime.log import Log, MessageId

Path("/run/systemd/journal").mkdir(parents=True)
journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
journal.bind("/run/systemd/journal/socket")
stderr = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{stderr.st_dev}:{stderr.st_ino}"
log = Log.of("backsight-node", node="web-1")
log.debug("not said")
log.warning("odd:\\nPRIORITY=1", trace_id="ab" * 16, trigger="slow", message_id=MessageId.HANGS)
sys.stdout.buffer.write(journal.recv(4096))
sys.argv = ["", "--config", "/nowhere.yaml"]
try:
    main()
except SystemExit as ended:
    assert ended.code == 2
sys.stdout.buffer.write(journal.recv(4096))
journal.close()
log.info("nobody keeps it")
"""


@pytest.mark.root
def test_the_journal_gets_fields() -> None:
    done = subprocess.run(
        [
            *("unshare", "--mount", "--", "sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "-"),
            *(sys.executable, "-c", JOURNAL),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [*sorted(lines[:7]), *sorted(lines[7:])] == [
        "MESSAGE=odd:?PRIORITY=1",
        f"MESSAGE_ID={MessageId.HANGS}",
        "NODE=web-1",
        "PRIORITY=4",
        "SYSLOG_IDENTIFIER=backsight-node",
        f"TRACE_ID={'ab' * 16}",
        "TRIGGER=slow",
        # Why a daemon did not start is found by its priority too.
        "MESSAGE=/nowhere.yaml: cannot be read: No such file or directory",
        "PRIORITY=3",
        "SYSLOG_IDENTIFIER=backsight-coordinator",
    ]
    # A journal that is gone loses nothing.
    assert done.stderr == "backsight-node: nobody keeps it\n"


def test_elsewhere_it_is_a_line_with_how_bad_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log.of("backsight-node", node="web-1")
    log.error("no disk")
    log.warning("lost\none", node="other")
    log.info("serves")
    assert capsys.readouterr().err == (
        "backsight-node: error: no disk\n"
        "backsight-node: warning: lost?one\n"
        "backsight-node: serves\n"
    )


def test_or_an_object_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log.of("backsight-node", Level.DEBUG, Format.JSON, node="web-1")
    before = datetime.now(UTC)
    log.error("no\ndisk é", reason='it is "full"')
    log.debug("fired", trace_id="ab" * 16, message_id=MessageId.HANGS)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.isascii() for line in lines)
    first, second = map(json.loads, lines)
    assert list(first)[:4] == ["time", "level", "logger", "message"]
    said = [datetime.fromisoformat(entry.pop("time")) for entry in (first, second)]
    assert before <= said[0] <= said[1] <= datetime.now(UTC)
    assert first == {
        "level": "error",
        "logger": "backsight-node",
        "message": "no?disk é",
        "node": "web-1",
        "reason": 'it is "full"',
    }
    assert second == {
        "level": "debug",
        "logger": "backsight-node",
        "message": "fired",
        "node": "web-1",
        "trace_id": "ab" * 16,
        "message_id": MessageId.HANGS,
    }


def test_the_journal_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has fields of its own, whatever the configuration says of lines."""
    sent: list[tuple[str, ...]] = []
    monkeypatch.setattr("runtime.log.stderr_is_journal", lambda: True)
    monkeypatch.setattr("runtime.log.sendv", lambda *fields: sent.append(fields))
    Log.of("backsight-node", Level.INFO, Format.JSON, node="n").info("serves")
    assert sent == [("MESSAGE=serves", "PRIORITY=6", "SYSLOG_IDENTIFIER=backsight-node", "NODE=n")]


@pytest.mark.parametrize("schema", [CoordinatorSettings, NodeSettings])
def test_the_format_is_configured(schema: type[CoordinatorSettings | NodeSettings]) -> None:
    assert schema().form is Format.TEXT
    assert loads("log_format: json", schema, "f").form is Format.JSON
    with pytest.raises(ConfigError, match="log_format: xml; allowed: text or json"):
        loads("log_format: xml", schema, "f")


def test_only_what_matters_enough_is_said() -> None:
    said: list[str] = []
    log = logs_to(said)
    for level in Level:
        log.level = level
        log.error("e")
        log.warning("w")
        log.info("i")
        log.debug("d")
        assert "".join(said) == "ewid"[: list(Level).index(level) + 1]
        said.clear()


def test_fields_go_with_everything_unless_said_otherwise() -> None:
    entries: list[Entry] = []
    log = Log(entries.append, node="web-1")
    log.info("a", trace_id="\x1b1")
    log.info("b", node="db-1")
    assert [entry.fields for entry in entries] == [
        {"NODE": "web-1", "TRACE_ID": "?1"},
        {"NODE": "db-1"},
    ]


@pytest.mark.parametrize("stream", ["", "1:2", "nonsense"])
def test_another_stream_is_not_the_journal(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not stderr_is_journal()
    monkeypatch.setenv("JOURNAL_STREAM", stream)
    assert not stderr_is_journal()


def test_the_stream_that_systemd_names_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stderr = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{stderr.st_dev}:{stderr.st_ino}")
    assert stderr_is_journal()


def test_message_ids_differ() -> None:
    ids = [str(message_id) for message_id in MessageId]
    assert len(set(ids)) == len(ids)
    assert all(len(bytes.fromhex(text)) == 16 for text in ids)
