# SPDX-License-Identifier: Apache-2.0
"""What a daemon says to its operator: to the journal with fields, else a line on standard error.

A line is text for people, or an object of JSON for programs.

    log.warning("slice 12ab… is not stored from here on", trace_id=…, node=…)

Fields are what an operator filters by (``journalctl TRACE_ID=…``). Any thread may
log. Whatever comes from elsewhere may stand in a text: it cannot forge a line.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from systemd.journal import sendv

from runtime.printable import printable
from runtime.schema import Matching


class Level(enum.IntEnum):
    """As syslog(3) numbers them: the lower, the more it matters."""

    ERROR = 3
    WARNING = 4
    INFO = 6
    DEBUG = 7


LevelName = Annotated[str, Matching("error|warning|info|debug", "error, warning, info or debug")]


class Format(enum.StrEnum):
    """What a line on standard error is."""

    TEXT = "text"
    JSON = "json"


FormatName = Annotated[str, Matching("text|json", "text or json")]


class MessageId(enum.StrEnum):
    """Of events that somebody may want to be told of by a machine: ``journalctl MESSAGE_ID=…``."""

    CONNECTED = "cdc4ea00739c428ca49cc436bed78ff9"
    DISCONNECTED = "7810842f4d1b46c0a5a84957d0e4f44b"
    RELOADED = "6034524b13104ddba7afcf0ea96bc342"
    RELOAD_REFUSED = "3185f77a5aea42008ecc48baa734685b"
    STORE_FAILED = "25434e6a42d94535a0bf5996652dd668"
    HANGS = "eff1ba688fda4276b324d922c346c548"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that was said. Names of ``fields`` are upper-case."""

    level: Level
    message: str
    fields: Mapping[str, str]


class Log:
    """Passes what is at least as important as ``level`` on to a writer."""

    def __init__(
        self, write: Callable[[Entry], None], level: Level = Level.INFO, **fields: str
    ) -> None:
        """``fields`` go with everything."""
        self.level = level
        self._write = write
        self._fields = fields

    @classmethod
    def of(
        cls,
        program: str,
        level: Level = Level.INFO,
        form: Format = Format.TEXT,
        **fields: str,
    ) -> Log:
        """Where this process logs to: the journal if that is its standard error, else that, in a form."""
        writer: _Journal | _Json | _Stderr = _Stderr(program)
        if stderr_is_journal():
            writer = _Journal(program)
        elif form is Format.JSON:
            writer = _Json(program)
        return cls(writer.write, level, **fields)

    def says(self, level: Level) -> bool:
        """Whether it is worth while to find words for something."""
        return level <= self.level

    def error(self, message: str, **fields: str) -> None:
        """Something does not work, and somebody must act."""
        self._say(Level.ERROR, message, fields)

    def warning(self, message: str, **fields: str) -> None:
        """Something was lost or refused, and the daemon goes on."""
        self._say(Level.WARNING, message, fields)

    def info(self, message: str, **fields: str) -> None:
        """Something that an operator may want to know."""
        self._say(Level.INFO, message, fields)

    def debug(self, message: str, **fields: str) -> None:
        """What happens with each trace."""
        self._say(Level.DEBUG, message, fields)

    def _say(self, level: Level, message: str, fields: Mapping[str, str]) -> None:
        if self.says(level):
            given = {**self._fields, **fields}
            named = {name.upper(): printable(value) for name, value in given.items()}
            self._write(Entry(level, printable(message), named))


# What one address makes a daemon say in a minute, and all of them together: enough to see what
# is wrong, and too little to hide in or to fill a disk with.
_LINES_OF_ONE = 10
_LINES_OF_ALL = 100
_WINDOW_S = 60.0


# Of an IPv6 address: a machine mostly has all addresses that begin so, and takes others at will.
_NETWORK_BITS = 64


def _source(address: str) -> str:
    """What counts as one of all that are given for addresses: users too."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(ip), _NETWORK_BITS), strict=False))


class PeerLog:
    """Warnings that peers cause: few of each address, and the rest counted. For any thread.

    What was left out within a minute is said with the first warning after it.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s = clock()
        self._said: Counter[str] = Counter()  # lines, by source
        self._left_out = 0

    def warning(self, address: str, message: str, **fields: str) -> None:
        """``address``: an IP address, or what else all connections of one peer have in common."""
        with self._lock:
            self._warn(_source(address), message, fields)

    def _warn(self, source: str, message: str, fields: Mapping[str, str]) -> None:
        now_s = self._clock()
        if now_s - self._since_s >= _WINDOW_S:
            if self._left_out:
                self._log.warning(f"{self._left_out} more warnings about peers were left out")
            self._since_s, self._left_out = now_s, 0
            self._said.clear()
        if self._said[source] >= _LINES_OF_ONE or self._said.total() >= _LINES_OF_ALL:
            self._left_out += 1
            return
        self._said[source] += 1
        self._log.warning(message, **fields)


def stderr_is_journal() -> bool:
    """Whether $JOURNAL_STREAM, DEVICE:INODE, is what standard error goes to (systemd.exec(5))."""
    journal_stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        stderr = os.fstat(sys.__stderr__.fileno() if sys.__stderr__ else -1)
    except OSError:
        return False
    return journal_stream == f"{stderr.st_dev}:{stderr.st_ino}"


@dataclass(frozen=True, slots=True)
class _Stderr:
    program: str

    def write(self, entry: Entry) -> None:
        how_bad = f"{entry.level.name.lower()}: " if entry.level < Level.INFO else ""
        _write_line(f"{self.program}: {how_bad}{entry.message}")


@dataclass(frozen=True, slots=True)
class _Json:
    program: str

    def write(self, entry: Entry) -> None:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        said = {
            "time": now,
            "level": entry.level.name.lower(),
            "logger": self.program,
            "message": entry.message,
        }
        # No field of ours has one of these names.
        _write_line(json.dumps(said | {name.lower(): text for name, text in entry.fields.items()}))


def _write_line(line: str) -> None:
    # A closed pipe is no reason to end.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class _Journal:
    program: str

    def write(self, entry: Entry) -> None:
        fields = {
            "MESSAGE": entry.message,
            "PRIORITY": str(int(entry.level)),
            "SYSLOG_IDENTIFIER": self.program,
            **entry.fields,
        }
        try:
            sendv(*(f"{name}={value}" for name, value in fields.items()))
        except OSError:
            _Stderr(self.program).write(entry)
