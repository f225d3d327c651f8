# SPDX-License-Identifier: Apache-2.0
"""What the coordinator's gRPC server, and its store, count."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Deleted(enum.StrEnum):
    """Why the store deleted a trace."""

    AGE = "age"
    BYTES = "bytes"
    DISK_FULL = "disk_full"
    OPERATOR = "operator"


@dataclass(slots=True)
class ServerCounters:
    """What was refused. They only rise."""

    streams: int = 0
    malformed: int = 0
    unsendable: int = 0  # messages of our own that break the protocol
    not_heard: int = 0  # what was said of traces that the store cannot read
    no_hello: int = 0
    no_opening: int = 0
    no_question: int = 0
    not_reading: int = 0
    not_permitted: int = 0
    too_many_calls: int = 0
    connections_ended_unfinished: int = 0
    connections_ended_calls: int = 0
    addresses_barred: int = 0
    connections_ended_idle: int = 0
    tail_overflowed: int = 0


@dataclass(slots=True)
class StoreCounters:
    """What the store could not do, or not keep, since its start. They only rise."""

    deleted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Deleted, 0))
    """Traces, by why."""
    bytes_cut: int = 0  # not stored, since what comes before them was deleted
    writes_failed: int = 0  # and tried again
    records_left_out: int = 0  # that no store can take
    disk_full: int = 0  # times that room was made within the file

    @property
    def traces_deleted(self) -> int:
        """For whatever reason."""
        return sum(self.deleted.values())
