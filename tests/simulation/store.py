# SPDX-License-Identifier: Apache-2.0
"""The coordinator's store in memory: what was durable when it crashed.

It keeps what coordinator/core/records.py says a store keeps, and nothing of a
write before its time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from coordinator.core.records import (
    AppendSlice,
    DropNode,
    PutAbandoned,
    PutNode,
    PutReleased,
    PutStatus,
    PutTrigger,
    PutVerdict,
    PutVerdictAgain,
    Record,
    StoredSlice,
    StoredTrace,
    Write,
)
from coordinator.core.verdict import Verdict
from protocol.messages import Group, SliceStatus, TraceId


@dataclass(slots=True)
class KeptSlice:
    status: SliceStatus | None = None
    epoch: int = 0
    restarted: bool = False
    data: bytearray = field(default_factory=bytearray)
    least: int | None = None


@dataclass(slots=True)
class KeptTrace:
    slices: dict[str, KeptSlice] = field(default_factory=dict)
    verdict: Verdict | None = None
    released: bool = False
    first_released_ns: int | None = None
    first_closed_ns: int | None = None
    """When that was decided; it is durable at ``first_released_ns``."""
    released_ns: int = -1
    """When it was closed last; -1: never."""


class MemoryStore:
    """Tells of what becomes durable.

    ``on_verdict`` is called with each verdict, ``on_durable`` with all traces of which anything
    changed in one transaction.
    """

    def __init__(
        self,
        on_verdict: Callable[[TraceId, Verdict], None],
        on_durable: Callable[[set[TraceId]], None] = lambda _: None,
    ) -> None:
        self.nodes: dict[str, PutNode] = {}
        self.triggers: dict[tuple[Group, str], PutTrigger] = {}
        self.fired_ns: dict[tuple[Group, str], int] = {}
        """When it was told last that one fired."""
        self.abandoned: dict[Group, PutAbandoned] = {}
        self.traces: dict[TraceId, KeptTrace] = {}
        self.undurable_bytes = 0
        self._pending: deque[tuple[Write, int]] = deque()
        self._on_verdict = on_verdict
        self._on_durable = on_durable
        self._touched: set[TraceId] = set()

    def write(self, write: Write, now_ns: int) -> None:
        self._pending.append((write, now_ns))
        if isinstance(write.record, AppendSlice):
            self.undurable_bytes += len(write.record.data)

    def make_durable(self, token: int, now_ns: int) -> None:
        """Everything up to the token reaches the disk."""
        while self._pending and self._pending[0][0].token <= token:
            write, written_ns = self._pending.popleft()
            self._apply(write.record, written_ns, now_ns)
        touched, self._touched = self._touched, set()
        self._on_durable(touched)

    def delete(self, trace: TraceId) -> None:
        """As for its bounds: a released trace goes with all that is known of it."""
        assert self.traces.pop(trace).released
        self.triggers = {key: put for key, put in self.triggers.items() if key[0].primary != trace}

    def crash(self) -> None:
        """What was not durable is gone."""
        self._pending.clear()
        self.undurable_bytes = 0

    def recovered(self) -> tuple[list[StoredTrace], list[PutNode]]:
        """What a new coordinator reads."""
        traces = [self._stored(trace, kept) for trace, kept in self.traces.items()]
        return traces, list(self.nodes.values())

    def recalled(self, trace: TraceId) -> StoredTrace | None:
        """What is durable of a trace."""
        kept = self.traces.get(trace)
        return None if kept is None else self._stored(trace, kept)

    def _stored(self, trace: TraceId, kept: KeptTrace) -> StoredTrace:
        return StoredTrace(
            trace,
            tuple(p for (group, _), p in self.triggers.items() if group.primary == trace),
            tuple(p for group, p in self.abandoned.items() if group.primary == trace),
            tuple(
                StoredSlice(
                    node,
                    found.status,
                    found.epoch,
                    len(found.data),
                    found.restarted,
                    () if kept.released else (bytes(found.data),),
                    found.least,
                )
                for node, found in kept.slices.items()
            ),
            kept.verdict,
            kept.released,
        )

    def _apply(self, record: Record, written_ns: int, now_ns: int) -> None:
        match record:
            case PutNode():
                self.nodes.pop(record.node, None)
                self.nodes[record.node] = record
            case DropNode():
                del self.nodes[record.node]
            case PutTrigger():
                self.triggers[record.fired.group, record.node] = record
                self.fired_ns[record.fired.group, record.node] = now_ns
                for member in (record.fired.group.primary, *record.fired.laterals):
                    self._trace(member)
            case PutAbandoned():
                self.abandoned.setdefault(record.group, record)
                self._trace(record.group.primary)
            case PutStatus():
                found = self._slice(record.status.trace, record.node)
                found.status = record.status
                found.restarted = found.restarted or record.restarted
            case AppendSlice():
                self.undurable_bytes -= len(record.data)
                kept = self._slice(record.trace, record.node)
                if record.epoch != kept.epoch and record.offset == 0:
                    kept.restarted = kept.restarted or len(kept.data) > 0
                    kept.epoch = record.epoch
                    kept.data.clear()
                    kept.least = None
                    if kept.status is not None and kept.status.epoch != record.epoch:
                        kept.status = None
                assert record.epoch == kept.epoch, "the store never mixes slices"
                assert record.offset == len(kept.data), "the store appends at the end only"
                kept.data += record.data
            case PutVerdict():
                trace = self._trace(record.trace)
                if trace.verdict is None or record.verdict.version > trace.verdict.version:
                    trace.verdict = record.verdict
                    self._on_verdict(record.trace, record.verdict)
            case PutVerdictAgain():
                trace = self._trace(record.trace)
                if trace.verdict is None:
                    trace.verdict = record.verdict
            case PutReleased():
                trace = self._trace(record.trace)
                trace.released = record.released
                for node, least in record.least:
                    self._slice(record.trace, node).least = least
                if record.released:
                    trace.released_ns = now_ns
                if trace.first_released_ns is None:
                    trace.first_released_ns = now_ns
                    trace.first_closed_ns = written_ns
            case _:
                assert_never(record)

    def _trace(self, trace: TraceId) -> KeptTrace:
        self._touched.add(trace)
        return self.traces.setdefault(trace, KeptTrace())

    def _slice(self, trace: TraceId, node: str) -> KeptSlice:
        return self._trace(trace).slices.setdefault(node, KeptSlice())
