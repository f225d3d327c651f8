# SPDX-License-Identifier: Apache-2.0
"""Files beside the store, of those who follow it: each has one writer, and knows how far it followed."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from coordinator.store.schema import StoreError, connect, in_words, is_broken, make_private
from runtime.log import Log


def path_beside(store: Path, name: str) -> Path:
    """Where such a file is: ``traces.index.sqlite`` beside ``traces.sqlite``."""
    return store.with_name(f"{store.stem}.{name}{store.suffix}")


_POSITION = """
-- One row: of which store it is, and up to which of its changes.
CREATE TABLE position (store_id TEXT NOT NULL, number INTEGER NOT NULL);
"""


def journal_bytes(store: Path) -> dict[str, int]:
    """How large the journals of the store and of the files beside it are; 0 where nobody has one open."""
    databases = {name: path_beside(store, name) for name in ("index", "exports")}
    return {
        name: _size(Path(f"{path}-wal")) for name, path in {"traces": store, **databases}.items()
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Beside:
    """A database of its own, made anew if it is broken, of another version, or of another store.

    ``is_new``: it was made just now. StoreError says why it cannot be used.
    """

    def __init__(self, path: Path, store_id: str, schema: str, version: int, log: Log) -> None:
        self.is_new = False
        self.path = path
        self._store_id = store_id
        try:
            self.connection = self._open(schema, version)
        except (sqlite3.Error, OSError) as error:
            if not isinstance(error, sqlite3.Error) or not is_broken(error):
                why = in_words(path, error) if isinstance(error, sqlite3.Error) else str(error)
                raise StoreError(f"{path}: cannot be used: {why}") from error
            log.warning(f"{path}: makes it anew, since {error}")
            self._remove()
            self.connection = self._open(schema, version)

    def _open(self, schema: str, version: int) -> sqlite3.Connection:
        make_private(self.path)
        connection = connect(self.path, writable=True)
        try:
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found and (found != version or self._is_of_another(connection)):
                connection.close()
                self._remove()
                return self._open(schema, version)
            connection.execute("PRAGMA journal_mode = WAL")
            # What a crash of the machine takes is made, or done, once more.
            connection.execute("PRAGMA synchronous = NORMAL")
            if not found:
                self.is_new = True
                connection.executescript(
                    f"BEGIN; {_POSITION} {schema} PRAGMA user_version = {version}; COMMIT;"
                )
                connection.execute("INSERT INTO position VALUES (?, 0)", (self._store_id,))
        except BaseException:
            connection.close()
            raise
        return connection

    def _is_of_another(self, connection: sqlite3.Connection) -> bool:
        row = connection.execute("SELECT store_id FROM position").fetchone()
        return bool(row != (self._store_id,))

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    @property
    def position(self) -> int:
        """Up to which change of the store this is."""
        (number,) = self.connection.execute("SELECT number FROM position").fetchone()
        return int(number)

    def move_to(self, number: int) -> None:
        """Within the caller's transaction."""
        self.connection.execute("UPDATE position SET number = ?", (number,))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written within, or nothing."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
