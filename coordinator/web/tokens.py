# SPDX-License-Identifier: Apache-2.0
"""A file with the names of those who may read, and what their tokens hash to (protocol.tokens)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from protocol.tokens import TOKENS_BYTES_MAX, TokenError, hashed, read_tokens
from runtime.log import Log

_Stat = tuple[int, int, int]


class Tokens:
    """The file as it is now; for any thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._seen: tuple[str, _Stat] | None = None
        self._owners: Mapping[str, str] = {}
        self._said: str | None = None

    def owner(self, file: str | None, token: str) -> str | None:
        """Whose a token is; None if nobody's. What cannot be read is said once, and is nobody's."""
        if file is None:
            return None
        with self._lock:
            try:
                self._look(Path(file))
                self._said = None
            except (OSError, TokenError) as error:
                self._seen, self._owners = None, {}
                why = error.strerror if isinstance(error, OSError) else str(error)
                said = f"query.tokens: {file}: {why}; nobody gets in by a token"
                if said != self._said:
                    self._said = said
                    self._log.error(said)
            return self._owners.get(hashed(token))

    def _look(self, path: Path) -> None:
        stat = path.stat()
        seen = (str(path), (stat.st_ino, stat.st_mtime_ns, stat.st_size))
        if seen != self._seen:
            if stat.st_size > TOKENS_BYTES_MAX:
                raise TokenError(f"has {stat.st_size} bytes; allowed: {TOKENS_BYTES_MAX}")
            self._owners = read_tokens(path.read_text("utf-8", "replace"))
            self._seen = seen
