# SPDX-License-Identifier: Apache-2.0
"""What the coordinator's gRPC server counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ServerCounters:
    """What was refused. They only rise."""

    streams: int = 0
    malformed: int = 0
    no_hello: int = 0
    no_opening: int = 0
    not_reading: int = 0
    tail_overflowed: int = 0
