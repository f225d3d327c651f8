# SPDX-License-Identifier: Apache-2.0
"""What a service writes down about each request: a line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Entry:
    """One request, as the service saw it.

    ``calls`` counts what it asked of whom: ``http``, ``grpc``, ``postgresql``, ``redis``.
    """

    service: str
    order: int
    status: str = ""
    outcome: str = "ok"
    duration_ms: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def handled(service: str, order: int) -> Iterator[Entry]:
    """Handle a request within; what it raises is its outcome. Appends to the file ACCESS_LOG."""
    entry = Entry(service, order)
    start_s = time.perf_counter()
    try:
        yield entry
    except Exception as error:
        entry.outcome = type(error).__name__
        raise
    finally:
        entry.duration_ms = round((time.perf_counter() - start_s) * 1e3, 3)
        line = json.dumps({name: getattr(entry, name) for name in Entry.__slots__}) + "\n"
        # At once and in one piece, so that threads and processes may share the file.
        log = os.open(os.environ["ACCESS_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(log, line.encode())
        finally:
            os.close(log)
