# SPDX-License-Identifier: Apache-2.0
"""By what priorities are hashed: drawn once, and kept beside the store.

Who knew it could choose ids of traces that overload keeps.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from pathlib import Path

from runtime.settings.coordinator import Settings

_SEED = re.compile(r"(?!0{16})[0-9a-f]{16}\n")


def priority_seed(settings: Settings) -> int:
    """As configured; else what was drawn for this store, now if it was not yet. OSError."""
    if settings.priority_seed is not None:
        return settings.priority_seed
    path = seed_path(settings.store_path)
    try:
        kept = path.read_text("ascii", errors="replace")
    except FileNotFoundError:
        kept = _draw(path)
    if not _SEED.fullmatch(kept):
        raise OSError(
            f"{path}: it should hold 16 hexadecimal digits, the seed of priorities; delete it, and another"
            " is drawn"
        )
    return int(kept, 16)


def seed_path(store_path: Path) -> Path:
    """Where the seed of a store is kept."""
    return store_path.with_name(f"{store_path.name}.seed")


def _draw(path: Path) -> str:
    drawn = f"{secrets.randbelow((1 << 64) - 1) + 1:016x}\n"
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w", encoding="ascii") as file:  # with mode 0600
            file.write(drawn)
            file.flush()
            os.fsync(number)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return drawn
