# SPDX-License-Identifier: Apache-2.0
"""Which processes lose records: metrics say only how many of all, since nobody bounds the names of processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from appliance.clients import Client

# As many as a person looks into.
_MOST = 8


def most_lossy(
    clients: Iterable[Client], records_lost: Callable[[int], int]
) -> list[dict[str, Any]]:
    """Those that lost the most records since they attached, by their own word; ready for JSON."""
    lossy = [
        {
            "pid": client.pid,
            "uid": client.uid,
            "service": client.service,
            "records_lost": lost,
        }
        for client in clients
        if (lost := records_lost(client.number))
    ]
    return heapq.nlargest(_MOST, lossy, key=lambda one: one["records_lost"])
